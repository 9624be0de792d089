"""The kernels: compiled for GPUs that need not be there, counted, and what the model predicts."""

import dataclasses

import pytest
import torch

from opfuse.testing.machine import is_interpreting

pytest.importorskip("triton", reason="Triton is not installed")

import compiled
import ledger
from opfuse_rope import fused, kernels, layouts, twins
from opfuse_rope.cases import CASES
from opfuse_triton import TARGETS
from opfuse_triton.checking import check_case
from opfuse_triton.floor import assert_floor
from opfuse_triton.targets import target

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter
needs_interpreter = pytest.mark.skipif(not is_interpreting(), reason="it needs TRITON_INTERPRET=1")
needs_compiler = pytest.mark.skipif(is_interpreting(), reason="TRITON_INTERPRET is set")
by_name = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@needs_compiler
@pytest.mark.parametrize("arch", TARGETS, ids=str)
def test_they_compile_without_refusals(arch, monkeypatch, tmp_path):
    """Those that take most registers; ``python -m opfuse_triton check rope`` compiles all."""
    if arch != next(iter(TARGETS)):
        compiled.skip_if_reported("rope")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for number in (3, 6):
        rows = check_case("rope", "opfuse_rope.cases:CASES", number, arch)
        assert rows and not [sentence for row in rows for sentence in row.refusals]


@needs_interpreter
@by_name
def test_they_move_no_more_than_they_have_to(case):
    assert_floor(case)


@needs_interpreter
@by_name
def test_they_compute_what_their_twins_do(case):
    """In whole tiles and in parts; the same bits each time."""
    torch.manual_seed(0)
    given = case.inputs(case.small[0], "cpu", torch.float32)
    found, again = case.run(**given), case.run(**given)
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
    wide = {name: tensor.double() for name, tensor in given.items()}
    for got, expected in zip(found, case.twin(**wide), strict=True):
        torch.testing.assert_close(got, expected.to(got.dtype), atol=1e-4, rtol=1e-4)
    for got, expected in zip(found, case.separate(**wide), strict=True):
        torch.testing.assert_close(got, expected.to(got.dtype), atol=1e-4, rtol=1e-4)


@needs_interpreter
def test_every_configuration_gives_the_same_and_a_gradient_is_overwritten_where_it_may_be():
    torch.manual_seed(0)
    x, cos, sin = torch.randn(9, 3, 40), torch.randn(9, 32), torch.randn(9, 32)
    angles = layouts.Angles(cos, sin, None, 1, 9, 16, False, 1)
    ((expected, _),) = twins.forward([layouts.Heads(x, x.dtype)], angles, True)
    facts = {"HALF": 16, "DIM": 40, "q_heads": 3, "k_heads": 0, "tokens": 9}
    found = kernels.ROPE.candidates(TARGETS[90], facts)
    assert 1 < len(found) <= 8
    for config in found:
        memory = x.clone()
        heads = layouts.Heads(memory, x.dtype, into=memory)
        ((y, _),) = kernels.forward([heads], angles, True, config)
        assert y is memory
        torch.testing.assert_close(y, expected)


@needs_interpreter
def test_every_configuration_of_a_backward_takes_all_tiles_of_a_program():
    """More tiles than programs, the last of them in part."""
    (case,) = [
        case for case in CASES if case.name == "RMSNorm + RoPE of queries and keys, backward"
    ]
    torch.manual_seed(0)
    given = case.inputs({"tokens": 133, "heads": 3, "keys": 2, "dim": 64}, "cpu", torch.float32)
    wide = case.twin(**{name: tensor.double() for name, tensor in given.items()})
    facts = {"HALF": 32, "DIM": 64, "q_heads": 3, "k_heads": 2, "tokens": 133}
    small = dataclasses.replace(TARGETS[90], multiprocessors=1)
    found = kernels.NORM_BACKWARD.candidates(small, facts)
    assert len(found) == 2
    for config in found:
        assert kernels.PROGRAMS * config["constants"]["TOKENS"] < 133
        with target(small), kernels.NORM_BACKWARD.pinned(config):
            for got, expected in zip(case.run(**given), wide, strict=True):
                torch.testing.assert_close(got, expected.to(got.dtype), atol=1e-4, rtol=1e-4)


@needs_interpreter
def test_offsets_beyond_32_bits():
    """The last programs find the end of 2^32 numbers."""
    (case,) = [case for case in CASES if case.name == "RoPE"]
    shape = {"tokens": 1 << 20, "heads": 32, "keys": 1, "dim": 128}
    entry = ledger.estimate(case, shape, TARGETS[90], sample=3)
    assert 0.99 < entry.moved.full / case.floor_bytes(shape) < 1.01


@needs_interpreter
def test_predictions_are_those_of_the_model():
    ledger.assert_predicted(fused.PREDICTED, CASES)


def test_a_fusion_that_would_be_slower_waits(monkeypatch):
    import opfuse
    from opfuse import ops

    env = opfuse.Environment(torch.device("cuda"), (9, 0), torch.bfloat16)
    monkeypatch.setitem(fused.PREDICTED.fusions, "rope", (1.0, ()))
    assert "was not measured on this GPU" in fused._forward_runs((ops.RoPE(64),), env)
    assert fused._backward_runs((ops.RoPE(64),), env) is True
