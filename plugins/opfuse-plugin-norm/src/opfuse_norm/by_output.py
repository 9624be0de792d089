"""A LayerNorm that keeps its output in place of its input.

A linear layer after a norm keeps the output of the norm anyway, and nothing else keeps its input.
The normalized values are ``(output - bias) / weight``.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from opfuse import Environment, FusedOperation, Fusion
from opfuse.ops import LayerNorm
from opfuse.ops.authoring import cast, may_write, reusable, wide

from .fused import Ctxs

MOST = 16.0
"""The largest bias in units of its weight.

The output is rounded by an error that grows with the bias, and dividing by the weight magnifies it.
"""

OPTION = "norm.by_output"
LEAST = 2.0**-30
"""About the smallest weight: with larger ones, the output is far from underflow."""


class NormByOutput(FusedOperation):
    """LayerNorm, with the gradients computed from its output, where weight and bias allow that.

    Elsewhere the op runs, and keeps its input. So it does where the caller gets the output, who may
    write to it, unless the option "norm.by_output" is "always".
    """

    recomputes = True
    grad_input = "fresh"

    def __init__(self, basic_ops: Sequence[Any]) -> None:
        super().__init__(basic_ops)
        self._of: tuple[Any, ...] = tuple(basic_ops)  # looking up a module's attributes is slow
        self._always = False

    def planned(self, env: Environment) -> None:
        """See :meth:`opfuse.FusedOperation.planned`."""
        self._always = env.options.get(OPTION) == "always"

    def fuser_forward(
        self, basic_op_ctxs: Ctxs, input_: Tensor, **unused: Any
    ) -> tuple[Tensor, Any]:
        """See :meth:`opfuse.FusibleOperation.fuser_forward`."""
        (op,), (ctx,) = self._of, basic_op_ctxs
        y = op.op_forward(ctx, input_)
        # a linear would keep it: the next op, or a later one, unless autocast casts it for that
        is_inner = op.is_inner and (op.is_inner is True or op.is_inner == threading.get_ident())
        is_kept = ctx.may_recompute or (is_inner and ctx.dtype is None) or self._always
        if is_kept and ctx.requires_grad and ctx.to_save[0] is not None:
            divided = _divided(ctx, input_, y, op.eps)
            if divided is not None:
                weight, *_ = (*ctx.params, None)
                ctx.to_save = y, weight, None, ctx.to_save[-1], *divided
                ctx.recomputable_output = y if ctx.may_recompute else None
        return y, ((),)

    def fuser_recompute(self, basic_op_ctxs: Sequence[Any]) -> Tensor:
        """The output that is kept; see :meth:`opfuse.FusedOperation.fuser_recompute`."""
        return basic_op_ctxs[0].saved_tensors[0]  # type: ignore[no-any-return]

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


def _divided(
    ctx: Any, x: Tensor, y: Tensor, eps: float
) -> tuple[Tensor | None, Tensor | None] | None:
    """What the output times the first, plus the second, gives: the normalized values.

    None where they would be less precise than the gradients need them, or nothing may be kept. The
    mean square of a row of them is ``1 - eps rstd^2``: it is small in rows that vary less than eps.
    """
    if not x.dtype is y.dtype is torch.float32 or not may_write(x, y):
        return None
    if not ctx.params:
        return None, None
    weight, *bias = ctx.params
    inverse, shift = _scale(ctx, weight, wide(x.dtype)).reciprocal(), None
    squares = inverse.square().mul_((MOST * LEAST) ** 2)
    if bias:
        shift = torch.mul(bias[0], inverse).neg_()
        squares = squares.addcmul_(shift, shift)
    rstd = ctx.to_save[-1]
    largest = 1 - eps * rstd.amin().item() ** 2 if rstd.numel() else 1.0
    return (inverse, shift) if squares.amax().item() <= MOST**2 * largest else None  # no NaN is


def _scale(ctx: Any, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The factor of the normalized values."""
    return cast(weight, dtype) + 1 if ctx.zero_centered_gamma else cast(weight, dtype)


def _gradients(op: Any, ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, tuple[Any, ...]]:
    """``dx = rstd (g - mean(g) - n mean(g n))``, with ``n`` and ``g = dy weight``.

    PyTorch's kernel gets ``n`` as an input of the mean 0 and the deviation 1.
    """
    y, weight, _, rstd, inverse, shift = ctx.saved_tensors
    dtype, needs = rstd.dtype, ctx.param_requires_grad
    scale = None if weight is None else _scale(ctx, weight, dtype)
    normalized = cast(y, dtype)
    if shift is not None:
        normalized = torch.addcmul(shift, normalized, inverse)
    elif inverse is not None:
        normalized = normalized * inverse
    wants = [ctx.input_requires_grad, *needs, False, False][:3]
    constants = op.normalized_shape, torch.zeros_like(rstd), torch.ones_like(rstd)
    kernel = torch.ops.aten.native_layer_norm_backward.default
    dx, *grads = kernel(cast(grad_output, dtype), normalized, *constants, scale, scale, wants)
    dx = cast(torch.mul(dx, rstd, out=reusable(dx, rstd)), y.dtype) if wants[0] else None
    pairs = zip(grads[: len(needs)], needs, strict=True)
    return dx, tuple([grad if wanted else None for grad, wanted in pairs])


def _pays(ops: Any, env: Environment) -> bool | str:
    """Asked while planning."""
    if env.measured == math.inf:
        return "beside a norm alone it is slower, so opfuse tune compares whole chains"
    if not env.requires_grad:
        return "no backward follows, for which something would be kept"
    if env.options.get(OPTION) == "never":
        return f'the option {OPTION} is "never"'
    if env.device.type != "cpu":
        return "at each call its weights are read on the host, for which a GPU would have to wait"
    if env.dtype is not torch.float32:
        return f"only in fp32 the output is precise enough, and this is {env.dtype}"
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
