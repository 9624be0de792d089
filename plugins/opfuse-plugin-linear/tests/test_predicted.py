"""The speeds that fusions are predicted to have on GPUs: computed again from their cases."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

import opfuse
from opfuse import ops

pytest.importorskip("triton")

from opfuse_linear import cases, choice, conditions
from opfuse_triton import TARGETS
from opfuse_triton.floor import TorchBytes
from opfuse_triton.machine import PAYS

CASES = {
    "linear+bias+activation": (
        "linear + GELU",
        "linear + GELU, kept",
        "linear + GELU (tanh), wide, kept",
    ),
    "parallel linear+activation": ("gate and up + SwiGLU", "gate and up + SwiGLU, kept"),
    "linear+bias+add": ("linear + add",),
    "linear+scale+add": ("linear + scale + add",),
    "activation+linear": (
        "gradient of GELU before a linear",
        "gradient of GELU (erf) before a linear",
    ),
    "cross entropy": ("cross entropy", "cross entropy with all options"),
}


class Seconds(TorchDispatchMode):
    """The time of PyTorch's operations: each at the full bandwidth, or a product at the peak."""

    def __init__(self, target):
        super().__init__()
        self.target, self.total = target, 0.0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        with TorchBytes() as counted:
            result = func(*args, **(kwargs or {}))
        flops = flop_registry.get(func.overloadpacket)
        products = flops(*args, **(kwargs or {}), out_val=result) if flops else 0
        moved = counted.moved.total() / self.target.bandwidth
        self.total += max(moved, products / self.target.flops)
        return result


def speed(case, shape, target):
    """The time of the separate operations over the floor of the case."""
    given = case.inputs(shape)
    with Seconds(target) as separate:
        case.separate(**given)
    products = 0 if case.flops is None else case.flops(**shape) / target.flops
    return separate.total / max(case.floor_bytes(shape) / target.bandwidth, products)


@pytest.mark.parametrize("name", choice.PREDICTED)
def test_the_prediction_is_that_of_the_cases(name):
    chosen = [case for case in cases.CASES if case.name in CASES[name]]
    assert [case.name for case in chosen] == [*CASES[name]]
    found = min(
        speed(case, shape, target)
        for case in chosen
        for shape in case.shapes
        for target in TARGETS.values()
    )
    assert choice.PREDICTED[name] == pytest.approx(found, rel=0.05)


def test_what_is_predicted_to_gain_little_waits_until_it_is_measured():
    cuda = opfuse.Environment(torch.device("cuda"), (9, 0), torch.bfloat16, requires_grad=True)
    for name, predicted in choice.PREDICTED.items():
        said = choice.waits(name, cuda)
        assert bool(said) == (predicted < PAYS) and (not said or f"{predicted:.2f}x" in said)
        assert not choice.waits(name, cuda._replace(measured=1.0))
    waiting = {name for name, predicted in choice.PREDICTED.items() if predicted < PAYS}
    assert waiting == {*choice.PREDICTED} - {"cross entropy"}
    linear = ops.BasicLinear(16, 24, device="meta")
    both = ops.ParallelLinear([linear, linear])
    for chain, name in (
        ((linear, ops.Bias(24), ops.SiLU()), "linear+bias+activation"),
        ((both, ops.SwiGLU()), "parallel linear+activation"),
        ((linear, ops.AddExtraInput()), "linear+bias+add"),
        ((linear, ops.ConstantScale(2.0), ops.AddExtraInput()), "linear+scale+add"),
    ):
        assert choice.refusal(chain, cuda) == choice.waits(name, cuda)
    assert "it was not measured" in conditions.activation_fits((linear, ops.SiLU()), cuda)
