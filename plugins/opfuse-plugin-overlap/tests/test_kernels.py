"""Chains in pieces equal whole layers, on two processes over gloo."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import gloo
import overlapping as ranks
import pytest
import torch
from opfuse_overlap import conditions, pieces, symm_mem

import opfuse
from opfuse import ops

pytestmark = pytest.mark.xdist_group("gloo")


@pytest.mark.parametrize("mode", ["column", "row"])
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(2,), (6,), (4, 3), (2, 1, 3), (0, 2), (2, 0)], ids=str)
def test_a_layer_equals_the_whole_one(mode, sequence, bias, shape):
    gloo.together(ranks.one_layer, mode, sequence, bias, shape, "c10d", 3, torch.float64)


@pytest.mark.parametrize("mode", ["column", "row"])
@pytest.mark.parametrize("provider", ["c10d", "symm_mem"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(6,), (2, 3)], ids=str)
def test_providers_and_dtypes(mode, provider, bias, dtype, shape):
    gloo.together(ranks.one_layer, mode, True, bias, shape, provider, 0, dtype)


@pytest.mark.parametrize(
    "what",
    [
        "",
        "a copy",
        "a checkpoint",
        "a bias that is frozen",
        "weights that are frozen",
        "an input that is data",
        "autocast",
        "a weight's sum",
    ],
)
@pytest.mark.parametrize("sequence", [False, True])
def test_an_mlp_equals_the_whole_one(sequence, what):
    gloo.together(ranks.an_mlp, sequence, what)


@pytest.mark.parametrize("what", ["", "a checkpoint", "weights that are frozen", "autocast"])
def test_an_mlp_by_symm_mem(what):
    gloo.together(ranks.an_mlp, True, what, "symm_mem")


@pytest.mark.parametrize(
    "check", [ranks.kept_bytes, ranks.is_declined, ranks.what_reports_say, ranks.extra_input_on_one]
)
def test_a_single_thing(check):
    gloo.together(check)


@pytest.mark.parametrize("provider", ["c10d", "symm_mem"])
def test_every_collective_is_a_turn(provider):
    # by columns: the call and a gather; the gather again, and a scatter of the gradient. By rows:
    # the call and a scatter, with symm_mem also a sum of the bias; a gather of the gradient
    found = [2, 2, 3 if provider == "symm_mem" else 2, 1]
    assert gloo.together(ranks.turns, provider) == [found] * 2


def test_measurements_decide(tmp_path):
    gloo.together(ranks.as_measured, str(tmp_path))


def test_it_is_tuned_together(tmp_path):
    one, other = gloo.together(ranks.is_tuned, str(tmp_path))
    assert one == other


def test_symm_mem_is_for_some_devices_only():
    env = opfuse.Environment(torch.device("mps"), None, torch.float32)
    op = object.__new__(ops.AllGather)
    assert (
        symm_mem.why_not(op, env) == "torch has the products of symm_mem for CUDA, and this is mps"
    )


@pytest.mark.parametrize(
    "rows, count, expected", [(0, 4, [(0, 0)]), (1, 4, [(0, 1)]), (7, 3, [(0, 3), (3, 5), (5, 7)])]
)
def test_pieces_of_any_number_of_rows(rows, count, expected):
    assert pieces.bounds(rows, count) == expected
    assert pieces.bounds(32 * rows, count, 32) == [(32 * a, 32 * b) for a, b in expected]


def on_the_clock(sequence, pieces, share=0.5):
    (found, other) = gloo.together(ranks.a_step_on_the_clock, sequence, pieces, share)
    assert found == other
    return found


@pytest.mark.parametrize("sequence", [False, True])
def test_most_of_the_communication_is_hidden(sequence):
    """On a clock that counts, with half as much communication as products."""
    time, *_ = on_the_clock(sequence, 8)
    assert time <= 0.75
    in_one_piece, *_ = on_the_clock(sequence, 1)
    assert in_one_piece > time


def test_what_is_sent_in_pieces():
    rows, width, itemsize = 64, 16, 4
    _, events, count, sent = on_the_clock(True, 4)
    # the first layer's input twice, once in one piece; the gradient of the second's output
    assert count == {"gather": 4 + 4 + 1, "scatter": 4 + 4}
    others = rows // 2 * width * itemsize
    assert sent == {"gather": 3 * others, "scatter": 2 * others}
    # forward: own rows while those of the others arrive; each piece leaves before the next one
    assert events[:7] == ["start gather"] * 4 + ["product", "wait gather", "product"]
    assert events[13:17] == ["product", "product", "start scatter", "product"]


def test_what_runs_beside_what():
    _, events, *_ = on_the_clock(True, 2)
    ends = [i for i, event in enumerate(events) if event == "wait scatter"]
    backward = events[ends[1] + 1 :]
    assert backward == [
        *("start gather", "start gather", "grad_of_input"),  # the second layer
        *("wait gather", "grad_of_input", "wait gather", "grad_of_input"),
        "grad_of_weight",
        *("start gather", "grad_of_input", "grad_of_input", "start scatter"),  # the first
        *("grad_of_input", "grad_of_input", "start scatter", "wait gather", "grad_of_weight"),
        *("wait scatter", "wait scatter"),
    ]


# Of these the group is out of step behind them, so that each has processes of its own


@pytest.mark.costly(2)
@pytest.mark.parametrize(
    ("mode", "way", "backward"),
    [
        ("column", "raises", False),
        ("column", "dies", True),
        ("row", "raises", True),
        ("row", "dies", False),
    ],
)
def test_a_process_that_fails_while_pieces_are_on_their_way(mode, way, backward):
    with contextlib.closing(gloo.Team(seconds=20)) as team:
        answers = team.run(ranks.fails, mode, way, backward)
    (_, (kind, text)), other = answers
    ops = ("AllGather", "BasicLinear") if mode == "column" else ("BasicLinear", "Bias")
    assert kind == "RankError"
    assert text.startswith(f"chain [Linear], op 0 ({ops[0]}) + op 1 ({ops[1]}) + op 2 (")
    if way == "raises":
        assert "on rank 1 raised ArithmeticError: no luck" in text
        assert other[1][0] in ("RankError", "ArithmeticError") and "no luck" in other[1][1]
    else:
        assert other is None and "rank 1 did not answer" in text


@pytest.mark.parametrize(("processes", "waits"), [(2, True), (4, False), (8, False)])
def test_where_a_model_predicts_little_it_waits_for_a_measurement(processes, waits):
    op = SimpleNamespace(collective_group=object(), process_group_size=processes, dim=0)
    env = opfuse.Environment(torch.device("cuda"), None, torch.bfloat16)
    found = conditions.runs([op], env._replace(rows=4096))
    assert ("a model predicts less than 1.1 times" in str(found)) == waits
    assert (found is True) != waits
    assert conditions.runs([op], env._replace(options={"overlap.use": "always"})) is True
