"""A LayerNorm that keeps its output in place of its input.

The linear layers after a norm keep its output anyway, and nothing else keeps its input. The
normalized values are ``(output - bias) / weight``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from opfuse import Environment, FusedOperation, Fusion
from opfuse.ops import LayerNorm
from opfuse.ops.authoring import cast, may_write, wide

from .fused import Ctxs

MOST_SHIFT = {torch.float32: 16.0, torch.bfloat16: 2.0}
"""By dtype, the largest bias in units of its weight.

The output is rounded by an error that grows with the bias, and dividing by the weight magnifies it.
"""

LEAST_SCALE = 2.0**-30
"""The smallest weight: the output is far from underflow."""


class NormByOutput(FusedOperation):
    """LayerNorm, with the gradients computed from its output, where weight and bias allow that.

    Elsewhere the op runs, and keeps its input.
    """

    grad_input = "fresh"

    def __init__(self, basic_ops: Sequence[Any]) -> None:
        super().__init__(basic_ops)
        self._of: tuple[Any, ...] = tuple(basic_ops)  # looking up a module's attributes is slow

    def fuser_forward(
        self, basic_op_ctxs: Ctxs, input_: Tensor, **unused: Any
    ) -> tuple[Tensor, Any]:
        """See :meth:`opfuse.FusibleOperation.fuser_forward`."""
        (op,), (ctx,) = self._of, basic_op_ctxs
        y = op.op_forward(ctx, input_)
        if ctx.requires_grad and ctx.to_save[0] is not None and _can_divide(op, ctx, input_, y):
            weight, bias = (*ctx.params, None, None)[:2]
            ctx.to_save = y, weight, bias, None, ctx.to_save[-1]
        return y, ((),)

    def fuser_backward(
        self, basic_op_ctxs: Ctxs, grad_output: Tensor, **unused: Any
    ) -> tuple[Tensor | None, Any, Any]:
        """See :meth:`opfuse.FusibleOperation.fuser_backward`."""
        (op,), (ctx,) = self._of, basic_op_ctxs
        saved: Any = ctx.saved_tensors
        if len(saved) == len(op.saved_names):
            dx, grads = op.op_backward(ctx, grad_output)
        else:
            dx, grads = _gradients(op, ctx, grad_output)
        return dx, (grads,), ((),)


def _can_divide(op: Any, ctx: Any, x: Tensor, y: Tensor) -> bool:
    """Whether the output tells the normalized values as precisely as the gradients need them."""
    if y.dtype is not x.dtype or not may_write(x, y):
        return False
    scale, shift = _affine(op.normalized_shape, ctx, wide(x.dtype), *ctx.params)
    if scale is None:
        return True
    size = scale.abs()
    fits = size >= LEAST_SCALE
    if shift is not None:
        fits &= size * MOST_SHIFT[x.dtype] >= shift.abs()
    return bool(fits.all())


def _affine(
    shape: Any, ctx: Any, dtype: torch.dtype, weight: Tensor | None = None, bias: Any = None
) -> tuple[Tensor | None, Tensor | None]:
    """The factor of the normalized values, and what is added to them."""
    if weight is None:
        return None, None
    scale = cast(weight.detach(), dtype)
    scale = scale + 1 if ctx.zero_centered_gamma else scale
    return scale, None if bias is None else cast(bias.detach(), dtype)


def _gradients(op: Any, ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, tuple[Any, ...]]:
    """``dx = rstd (g - mean(g) - n mean(g n))``, with ``n`` and ``g = dy weight``.

    PyTorch's kernel gets ``n`` as an input of the mean 0 and the deviation 1.
    """
    y, weight, bias, _, rstd = ctx.saved_tensors
    dtype, shape, needs = rstd.dtype, op.normalized_shape, ctx.param_requires_grad
    scale, shift = _affine(shape, ctx, dtype, weight, bias)
    normalized = cast(y, dtype)
    if scale is not None:
        inverse = scale.reciprocal()
        if shift is None:
            normalized = normalized * inverse
        else:
            normalized = torch.addcmul(-shift * inverse, normalized, inverse)
    wants = [ctx.input_requires_grad, *needs, False, False][:3]
    constants = torch.zeros_like(rstd), torch.ones_like(rstd)
    kernel = torch.ops.aten.native_layer_norm_backward.default
    dx, *grads = kernel(
        cast(grad_output, dtype), normalized, shape, *constants, scale, scale, wants
    )
    dx = cast(dx.mul_(rstd), y.dtype) if wants[0] else None
    pairs = zip(grads[: len(needs)], needs, strict=True)
    return dx, tuple([grad if wanted else None for grad, wanted in pairs])


def _pays(ops: Any, env: Environment) -> bool | str:
    """Asked while planning."""
    if not env.requires_grad:
        return "no backward follows, for which something would be kept"
    if not env.options.get("norm.by_output", True):
        return "the option norm.by_output is off"
    if env.device.type != "cpu":
        return "its weights would be read on the host, to see whether they can be divided by"
    if env.dtype not in MOST_SHIFT:
        return f"it divides in fp32 and bf16, and this is {str(env.dtype).removeprefix('torch.')}"
    if env.recipe is not None:
        return f"{type(env.recipe).__name__} quantizes what a linear keeps"
    if env.compiling:
        return "torch.compile decides what is kept"
    return True


JOINT = [
    Fusion(
        (LayerNorm,),
        NormByOutput,
        _pays,
        benefit=1,
        priority=-140,  # a kernel for the norm goes first
        name="norm by output",
    )
]
