"""Rows that are cast apart from the others of their tensor, as processes that each hold some do."""

import opfuse_fp8 as fp8
import pytest
import torch

from opfuse.core.quantization import BOTH, ROWWISE, QuantizerRole
from opfuse.core.recipe_lookup import new_quantizer

RECIPES = {
    "delayed": fp8.DelayedScaling(amax_history_len=4),
    "current": fp8.Float8CurrentScaling(),
    "block": fp8.Float8BlockScaling(),
    "mx": fp8.MXFP8BlockScaling(),
}


def make(name, tensor="input"):
    return new_quantizer(RECIPES[name], QuantizerRole("linear", tensor), None)


def cast_apart(name, parts, usage, tensor="input"):
    """Each part cast by a quantizer of its own, and these quantizers; all ask for the maximum as often."""
    amaxes, made, quantizers = [], [], [make(name, tensor) for _ in parts]
    for part in parts:  # what each has
        make(name, tensor).quantize_rows(
            part, usage, lambda amax: amaxes.append(amax.clone()) or amax
        )
    largest = torch.stack(amaxes).amax(0) if amaxes else None
    for quantizer, part in zip(quantizers, parts, strict=True):
        made.append(quantizer.quantize_rows(part, usage, lambda amax: largest))
    return made, quantizers


@pytest.mark.parametrize("tensor", ["input", "grad_output"])
@pytest.mark.parametrize("name", RECIPES)
def test_rows_get_the_codes_of_the_whole(name, tensor):
    x = torch.randn(
        3 * 128, 160 - 32 * (name == "block"), generator=torch.Generator().manual_seed(0)
    )
    x[-1, 5] = 1000.0
    parts, whole = x.chunk(3), make(name, tensor)
    assert not any(whole.why_whole(part.shape, BOTH) for part in parts)
    made, quantizers = cast_apart(name, parts, BOTH, tensor)
    expected = whole(x, BOTH)
    values = torch.cat([each.dequantize(ROWWISE) for each in made])
    assert torch.equal(values, expected.dequantize(ROWWISE))
    codes = torch.cat([each.rowwise_data.view(torch.uint8) for each in made])
    assert torch.equal(codes, expected.rowwise_data.view(torch.uint8))
    columns = torch.cat([each.columnwise_data.view(torch.uint8) for each in made], 1)
    assert torch.equal(columns, expected.columnwise_data.view(torch.uint8))
    for quantizer in quantizers:
        for state in quantizer.state_names:
            assert torch.equal(getattr(quantizer, state), getattr(whole, state))


@pytest.mark.parametrize(
    "name, usage, rows, sentence",
    [
        ("mx", ROWWISE, 7, ""),
        ("mx", BOTH, 7, "7 rows of a process are not whole blocks of 32"),
        ("block", ROWWISE, 7, ""),
        ("block", BOTH, 64, "64 rows of a process are not whole blocks of 128"),
        ("current", BOTH, 7, ""),
    ],
)
def test_rows_that_share_a_block(name, usage, rows, sentence):
    assert make(name).why_whole(torch.Size((rows, 128)), usage) == sentence


def test_what_may_cast_otherwise():
    class Own(fp8.CurrentQuantizer):
        """Casts as it likes."""

    own = Own(torch.float8_e4m3fn)
    known = "Own may cast otherwise than CurrentQuantizer and DelayedQuantizer"
    assert own.why_whole(torch.Size((4, 4)), ROWWISE) == known
    four = new_quantizer(fp8.NVFP4BlockScaling(), QuantizerRole("linear", "input"), None)
    assert "does not declare that rows can be quantized apart" in four.why_whole(
        torch.Size((64, 64)), BOTH
    )
    with pytest.raises(NotImplementedError, match="quantizes no rows apart"):
        four.quantize_rows(torch.ones(64, 64), BOTH, torch.clone)
