"""Communication beside products under the recipes of opfuse-plugin-fp8, over gloo."""

from __future__ import annotations

import importlib.util

import gloo
import pytest

NEEDED = "opfuse_fp8", "opfuse_overlap"
if not all(importlib.util.find_spec(name) for name in NEEDED):
    pytest.skip("two plugins are needed: it runs in `together`", allow_module_level=True)

import overlap_ranks as ranks  # noqa: E402

pytestmark = pytest.mark.xdist_group("gloo")


@pytest.mark.parametrize("way", ranks.USAGES)
@pytest.mark.parametrize("tensor", ["input", "grad_output"])
@pytest.mark.parametrize("name", [name for name in ranks.RECIPES if name != "nvfp4"])
def test_codes_are_those_of_the_whole(name, way, tensor):
    for why in gloo.together(ranks.codes_of_rows, name, way, tensor, 128):
        assert why == ""


@pytest.mark.parametrize(
    "name, way, rows, sentence",
    [
        ("mx", "both", 33, "33 rows of a process are not whole blocks of 32"),
        ("block", "columnwise", 64, "64 rows of a process are not whole blocks of 128"),
        ("square blocks", "rowwise", 64, "64 rows of a process are not whole blocks of 128"),
        ("nvfp4", "rowwise", 128, "NVFP4Quantizer does not declare that rows can be quantized"),
    ],
)
def test_blocks_of_two_processes(name, way, rows, sentence):
    for why in gloo.together(ranks.codes_of_rows, name, way, "input", rows):
        assert sentence in why


@pytest.mark.parametrize("name", ["mx", "block", "current"])
@pytest.mark.parametrize("rows", [1, 7])
def test_rowwise_codes_of_any_rows(name, rows):
    assert gloo.together(ranks.codes_of_rows, name, "rowwise", "input", rows) == ["", ""]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", ranks.RECIPES)
def test_a_chain_under_a_recipe(name, bias):
    gloo.together(ranks.a_chain, name, None, 128, bias)


@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
@pytest.mark.parametrize("name", ["mx", "current"])
def test_a_chain_with_an_override(name, override):
    gloo.together(ranks.a_chain, name, override, 32, True)


@pytest.mark.parametrize("frozen", [(0,), (2,), (0, 2)])
@pytest.mark.parametrize("name", ["mx", "current"])
def test_frozen_weights(name, frozen):
    gloo.together(ranks.a_chain, name, None, 32, True, frozen)


@pytest.mark.parametrize("name", [None, *ranks.RECIPES])
def test_the_linears_of_transformer_engines_test(name):
    gloo.together(ranks.linears, name)


@pytest.mark.parametrize(("name", "copies", "scales"), [("current", 1, 0), ("mx", 2, 1 / 32)])
def test_codes_are_half_the_bytes(name, copies, scales):
    (plain, coded), other = gloo.together(ranks.bytes_sent, name)
    assert [plain, coded] == other
    x, dy = 128 * 256, 128 * 512
    assert plain == (2 * x, 2 * x + 2 * dy)
    each = 1 + scales
    assert coded == (each * x, each * x + copies * each * dy)


def test_reports_say_what_is_not_sent_as_codes():
    details, _ = gloo.together(ranks.what_reports_say, 48)
    for what in ("its input is gathered", "the gradient of its output is gathered"):
        assert f"{what} unquantized: 48 rows of a process are not whole blocks of 32" in " ".join(
            details.split()
        )
    details, _ = gloo.together(ranks.what_reports_say, 32)
    assert "unquantized" not in details
