"""A small quantization recipe, offered by a plugin object: rounds to a grid."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist
from opfuse_distributed.ranks import Group, start_collective

import opfuse
from opfuse.core.quantization import nothing_recorded
from opfuse.core.quantization.formats import ScaledTensor


@dataclasses.dataclass(frozen=True)
class Rounding(opfuse.Recipe):
    """Round to multiples of a step: a fixed one, or the largest value of earlier steps / ``levels``."""

    step: float = 0.25
    levels: int = 0

    def update(self, quantizers, group):
        seen = torch.cat([quantizer.seen for quantizer in quantizers])
        if group is not None:
            maximum = dist.all_reduce, seen, dist.ReduceOp.MAX
            start_collective(Group(group), "the maxima", *maximum).wait()
        for quantizer, amax in zip(quantizers, seen, strict=True):
            if quantizer.role.tensor_type != "grad_output" or amax >= 0:
                quantizer.updates += 1
                torch.maximum(quantizer.amax, amax, out=quantizer.amax)
            quantizer.discard()


class RoundingQuantizer(opfuse.Quantizer):
    state_names = ("amax", "updates", "seen")
    pending_names = ("seen",)

    def __init__(self, recipe: Rounding, role: opfuse.QuantizerRole) -> None:
        self.recipe, self.role = recipe, role
        self.state_names = type(self).state_names if recipe.levels else ()
        self.pending_names = type(self).pending_names if recipe.levels else ()
        self.amax = torch.ones(1)
        self.updates = torch.zeros(1, dtype=torch.int64)
        self.seen = nothing_recorded()

    def quantize(self, tensor, usage, out=None):
        step = torch.full((1,), self.recipe.step, device=tensor.device)
        if self.recipe.levels:
            step = self.amax / self.recipe.levels
            if tensor.numel():
                torch.maximum(self.seen, tensor.detach().abs().max().float(), out=self.seen)
        return self.rounded(tensor, step, usage)

    def requantize(self, tensor, scales, usage):
        return self.rounded(tensor, scales.scale_inv, usage)

    def rounded(self, tensor, step, usage):
        data = (tensor.float() / step).round()
        turned = data.unsqueeze(0).flatten(0, -2).t().contiguous() if usage.columnwise else None
        return ScaledTensor(
            tensor.shape,
            tensor.dtype,
            self,
            rowwise_data=data if usage.rowwise else None,
            columnwise_data=turned,
            scale_inv=step,
        )


class RoundingPlugin:
    @opfuse.hookimpl
    def opfuse_recipes(self):
        return {"rounding": Rounding}

    @opfuse.hookimpl
    def opfuse_quantizer(self, recipe, role):
        return RoundingQuantizer(recipe, role) if isinstance(recipe, Rounding) else None


@pytest.fixture(autouse=True)
def rounding():
    """The plugin alone; a module that imports this has it on in each test."""
    record = opfuse.plugins.register(RoundingPlugin(), name="rounding", distribution="rounding")
    with opfuse.plugins.using("rounding"):
        yield
    opfuse.plugins.remove(record)


def round_to(tensor, step=0.25):
    """What a stateless Rounding does to a tensor."""
    return (tensor / step).round() * step
