"""A small quantization recipe, offered by a plugin object: rounds to a grid."""

from __future__ import annotations

import dataclasses

import torch

import opfuse
from opfuse.quantization import QuantizedTensor


@dataclasses.dataclass(frozen=True)
class Rounding(opfuse.Recipe):
    """Round to multiples of a step: a fixed one, or the largest value seen so far divided by ``levels``."""

    step: float = 0.25
    levels: int = 0


class RoundingQuantizer(opfuse.Quantizer):
    state_names = ("amax", "uses")

    def __init__(self, recipe: Rounding) -> None:
        self.recipe = recipe
        self.state_names = type(self).state_names if recipe.levels else ()
        self.amax = torch.ones(1)
        self.uses = torch.zeros(1, dtype=torch.int64)

    def quantize(self, tensor):
        step = (
            self.amax / self.recipe.levels
            if self.recipe.levels
            else torch.tensor([self.recipe.step])
        )
        step = step.to(tensor.dtype)
        quantized = QuantizedTensor((tensor / step).round(), step, self, tensor.dtype)
        if self.recipe.levels:
            self.uses += 1
            torch.maximum(self.amax, tensor.detach().abs().max().to(self.amax.dtype), out=self.amax)
        return quantized

    def dequantize(self, quantized):
        return quantized.data * quantized.scale


class RoundingPlugin:
    @opfuse.hookimpl
    def opfuse_recipes(self):
        return {"rounding": Rounding}

    @opfuse.hookimpl
    def opfuse_quantizer(self, recipe, role):
        return RoundingQuantizer(recipe) if isinstance(recipe, Rounding) else None


def round_to(tensor, step=0.25):
    """What a stateless Rounding does to a tensor."""
    return (tensor / step).round() * step
