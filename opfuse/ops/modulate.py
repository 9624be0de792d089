"""Modulate: a scale and a shift that come from a condition, as in diffusion transformers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.op_context import AllGrads, Outputs
from ._common import ExtraTensorOperation, RowwiseOperation, expected
from .arithmetic import added, cast, wide

Wanted = tuple[torch.Size, torch.dtype] | None
"""The shape and dtype of a gradient that is wanted; None: it is not."""


class Modulate(RowwiseOperation, ExtraTensorOperation):
    """``y = x * (1 + scale) + shift``, as after the norms of a DiT (Peebles and Xie 2023).

    Takes ``x`` and two extra inputs, ``scale`` and ``shift``. Each has any shape that broadcasts
    to that of ``x``, such as ``(features,)`` or ``(batch, 1, features)`` for an ``x`` of ``(batch,
    tokens, features)``. Gives the shape of ``x``. The gradients of ``scale`` and ``shift`` are
    sums over what they were broadcast to.

    Raises:
        ValueError: In a call, ``scale`` or ``shift`` does not broadcast to the shape of ``x``, or
            would enlarge it.
    """

    num_extra_inputs = 2
    saved_names = ("input", "scale")
    context_names = ("wanted",)
    params_in_compute_dtype = True
    batch_invariant = ("exact",)
    feature_ratio = 1

    def sample_extra_inputs(self, shape: tuple[int, ...], generator: Any) -> list[Any]:
        """A scale for each of the first dimension, and a shift for all rows."""
        first = shape[: len(shape) > 1]
        return [(*first, *(1,) * (len(shape) - len(first) - 1), shape[-1]), shape[-1:]]

    def fuser_forward(
        self, basic_op_ctxs: Any, input_: Tensor, *, basic_op_extra_inputs: Any, **_: Any
    ) -> Outputs:
        """The output; saves ``(input, scale)``, leaves ``ctx.wanted``."""
        (ctx,), ((scale, shift),) = basic_op_ctxs, basic_op_extra_inputs
        self.check_extras(input_.shape, scale, shift)
        if self.keeps_input(ctx, scale, shift):
            ctx.to_save = input_, *ctx.to_save[1:]
        return self.value(input_, scale, shift), [()]

    def check_extras(self, shape: Sequence[int], scale: Tensor, shift: Tensor) -> None:
        """Refuse extra inputs that do not broadcast to ``shape``, the input's; for fusions too."""
        for name, extra in (("scale", scale), ("shift", shift)):
            if not broadcasts(extra.shape, shape):
                what = f"a {name} that broadcasts to shape {tuple(shape)}, the input's"
                raise ValueError(expected(self, what, tuple(extra.shape)))

    def keeps_input(self, ctx: Any, scale: Tensor, shift: Tensor) -> bool:
        """Leave on ``ctx`` what the backward needs; return whether that includes the input.

        The input is then the first of ``ctx.to_save``, which is None here; for fusions too.
        """
        if not ctx.requires_grad:
            return False
        ctx.wanted = self.wanted_of(scale), self.wanted_of(shift)
        ctx.to_save = None, scale if ctx.input_requires_grad else None
        return ctx.wanted[0] is not None

    def wanted_of(self, extra: Tensor) -> Wanted:
        """What the gradient of an extra input has to be like; traced tensors do not tell."""
        needs = extra.requires_grad or torch.compiler.is_compiling()
        return (extra.shape, extra.dtype) if needs else None

    def value(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        """``x * (1 + scale) + shift``, in fp32 for half precision."""
        result = torch.promote_types(torch.promote_types(x.dtype, scale.dtype), shift.dtype)
        dtype = wide(result)
        y = cast(x, dtype) * (cast(scale, dtype) + 1)
        return cast(added(y, cast(shift, dtype)), result)

    def fuser_backward(self, basic_op_ctxs: Any, grad_output: Tensor, **_: Any) -> AllGrads:
        """``dx = dy (1 + scale)``; the sums of ``dy x`` and ``dy`` are those of scale and shift."""
        (ctx,) = basic_op_ctxs
        x, scale = ctx.saved_tensors
        dtype = wide(grad_output.dtype)
        dy, dx, dscale = cast(grad_output, dtype), None, None
        if scale is not None:
            dx = cast(dy * (cast(scale, dtype) + 1), grad_output.dtype)
        if ctx.wanted[0] is not None:
            dscale = summed_like(dy * cast(x, dtype), ctx.wanted[0])
        return dx, [()], [(dscale, summed_like(dy, ctx.wanted[1]))]


def broadcasts(shape: Sequence[int], to: Sequence[int]) -> bool:
    """Whether a tensor of one shape broadcasts to another, and does not enlarge that."""
    pairs = zip(reversed(shape), reversed(to), strict=False)
    return len(shape) <= len(to) and all([size in (1, most) for size, most in pairs])


def summed_like(grad: Tensor, wanted: Wanted) -> Tensor | None:
    """The gradient of what was broadcast to a shape, from that of the whole."""
    return None if wanted is None else cast(grad.sum_to_size(wanted[0]), wanted[1])
