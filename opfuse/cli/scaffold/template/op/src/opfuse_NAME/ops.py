"""The op, and what it leaves for its backward."""

from __future__ import annotations

from typing import Any

import torch
from opfuse import BasicOperation, OperationContext
from opfuse.ops.authoring import cast, widen
from torch import Tensor


class LayerScale(BasicOperation):
    """``y = x * weight * factor`` over the last dimension (Touvron et al. 2021).

    Takes and gives ``(..., size)``, in the dtype of the input; half precision is computed in fp32.

    Args:
        size: Size of the last dimension.
        initial: The values that the weight starts at.
        factor: A number, which may change between calls.
    """

    saved_names = ("input", "weight")
    context_names = ("factor",)  # a backward uses the number of its forward
    real_numbers = ("factor",)
    grad_input = "fresh"
    keeps_rows = True
    differentiable = True
    batch_invariant = ("rows",)

    def __init__(self, size: int, *, initial: float = 1e-4, factor: float = 1.0) -> None:
        super().__init__()
        self.in_features = self.out_features = size
        self.factor = factor
        self.weight = torch.nn.Parameter(torch.full((size,), initial))

    def operand(self, ctx: Any, input_: Tensor) -> Tensor:
        """The input in the compute dtype; leaves what the backward reads. For fusions too."""
        x = cast(input_, ctx.dtype or input_.dtype)
        (weight,) = ctx.params  # of this call: never self.weight
        if ctx.requires_grad:
            ctx.factor = self.factor
            needs_x, needs_weight = ctx.input_requires_grad, ctx.param_requires_grad[0]
            ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None)
        return x

    def op_forward(self, ctx: Any, input_: Tensor) -> Tensor:
        """The product; saves ``(input, weight)``, the input in the compute dtype."""
        x = self.operand(ctx, input_)
        (weight,) = ctx.params
        return cast(widen(x) * widen(weight) * self.factor, x.dtype)

    def op_backward(
        self, ctx: OperationContext, grad_output: Tensor
    ) -> tuple[Tensor | None, tuple[Tensor | None]]:
        """``dx = dy * weight * factor`` and, summed over rows, ``dweight = dy * x * factor``."""
        x, weight = ctx.saved_tensors or (None, None)
        dy, dx, dweight = widen(grad_output) * ctx.factor, None, None  # type: ignore[attr-defined]
        if weight is not None:
            dx = cast(dy * widen(weight), grad_output.dtype)
        if x is not None:
            dweight = (dy * widen(x)).reshape(-1, dy.shape[-1]).sum(0)
        return dx, (dweight,)
