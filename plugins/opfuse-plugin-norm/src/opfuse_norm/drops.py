"""The fused ops that draw: dropout, with what comes after it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from opfuse_triton import norms as kernels
from opfuse_triton.norms import drop as twin
from opfuse_triton.norms.drop import Drop
from torch import Tensor

from opfuse import Environment, FusedOperation, Fusion, OneOf, Optional
from opfuse.ops import AddExtraInput, Dropout, LayerNorm, MakeExtraOutput, RMSNorm
from opfuse.ops.authoring import added

from . import fused
from .fused import PREDICTED, BackwardNorm, Ctxs, Extras, ForwardNorm


class _Dropping(FusedOperation):
    """The base: it draws a seed, which is all that the backward needs.

    If ``p`` has become 0 or 1 since the plan was made, the op itself runs, and saves a mask.
    """

    def __init__(self, basic_ops: Sequence[Any]) -> None:
        super().__init__(basic_ops)
        self._drop: Any = basic_ops[0]
        self._nothing = ((),) * len(basic_ops)

    def planned(self, env: Environment) -> None:
        """See :meth:`opfuse.FusedOperation.planned`."""
        self.fallback = kernels_missing(env)
        self._run = twin.dropout
        if not self.fallback:
            from opfuse_triton.norms import library

            self._run = library.dropout

    def _begin(self, ctx: Any, x: Tensor) -> tuple[Tensor, Drop | None]:
        """Return what is dropped from the input; None: what is returned instead of it."""
        if not 0 < self._drop.p < 1:
            return self._drop.op_forward(ctx, x), None
        drop = Drop(twin.draw_seed(x.device), float(self._drop.p))
        if ctx.requires_grad:
            ctx.p = drop.p
            ctx.to_save = (drop.seed if ctx.input_requires_grad else None,)
        return x, drop

    def _gradient(self, ctx: Any, dy: Tensor | None) -> Tensor | None:
        """The gradient of the input."""
        if dy is None or not (ctx.requires_grad and ctx.input_requires_grad):
            return None
        (saved,) = ctx.saved_tensors
        if saved is None or saved.dtype is torch.bool:
            return self._drop.op_backward(ctx, dy)[0]  # type: ignore[no-any-return]
        # autograd gives expanded ones, from a sum
        return self._run(dy.contiguous(), None, Drop(saved, ctx.p))


class DropoutAdd(_Dropping):
    """Dropout [+ AddExtraInput]."""

    def fuser_forward(
        self, basic_op_ctxs: Ctxs, input_: Tensor, *, basic_op_extra_inputs: Extras, **_: Any
    ) -> tuple[Tensor, Any]:
        """See :meth:`opfuse.FusibleOperation.fuser_forward`."""
        extra, into = None, False
        if len(basic_op_ctxs) > 1:
            add: Any = self.basic_ops[1]
            ((extra,),) = basic_op_extra_inputs[1:]
            into = add.check_extra(basic_op_ctxs[1], extra, input_.shape)
        x, drop = self._begin(basic_op_ctxs[0], input_)
        if drop is not None:
            dense = extra is not None and x.is_contiguous() and extra.is_contiguous()
            inside = dense and not into  # else the strides of the sum depend on its order
            x, extra = self._run(x, extra if inside else None, drop), None if inside else extra
        if extra is not None:
            x = added(extra.detach(), x) if into else add.sum(x, extra)
        return x, self._nothing

    def fuser_backward(
        self, basic_op_ctxs: Ctxs, grad_output: Tensor, **_: Any
    ) -> tuple[Tensor | None, Any, Any]:
        """See :meth:`opfuse.FusibleOperation.fuser_backward`."""
        extras = ((), (grad_output,))[: len(basic_op_ctxs)]
        return self._gradient(basic_op_ctxs[0], grad_output), self._nothing, extras


class DropoutAddNorm(_Dropping):
    """Dropout + AddExtraInput [+ MakeExtraOutput] + norm."""

    def __init__(self, basic_ops: Sequence[Any]) -> None:
        super().__init__(basic_ops)
        # in a tuple, for they hold the same ops
        self._parts = ForwardNorm(basic_ops[1:]), BackwardNorm(basic_ops[2:])

    def planned(self, env: Environment) -> None:
        """See :meth:`opfuse.FusedOperation.planned`."""
        super().planned(env)
        for part in self._parts:
            part.planned(env)

    def fuser_forward(
        self, basic_op_ctxs: Ctxs, input_: Tensor, *, basic_op_extra_inputs: Extras, **given: Any
    ) -> tuple[Tensor, Any]:
        """See :meth:`opfuse.FusibleOperation.fuser_forward`."""
        x, drop = self._begin(basic_op_ctxs[0], input_)
        y, outputs = self._parts[0].fuser_forward(
            basic_op_ctxs[1:], x, basic_op_extra_inputs=basic_op_extra_inputs[1:], drop=drop
        )
        return y, ((), *outputs)

    def fuser_backward(
        self, basic_op_ctxs: Ctxs, grad_output: Tensor, *, basic_op_grad_extra_outputs: Extras
    ) -> tuple[Tensor | None, Any, Any]:
        """See :meth:`opfuse.FusibleOperation.fuser_backward`."""
        extras, dx, grads = basic_op_grad_extra_outputs[2:], None, self._nothing[2:]
        if basic_op_ctxs[-1].is_reached:
            dx, grads, _ = self._parts[1].fuser_backward(
                basic_op_ctxs[2:], grad_output, basic_op_grad_extra_outputs=extras
            )
        else:  # only the sum is used, before the norm; the caller's gradient is none of the results
            dx = extras[0][0].clone()  # type: ignore[union-attr]
        of_extras = (self._nothing[0], (dx,), *self._nothing[2:])
        return self._gradient(basic_op_ctxs[0], dx), ((), (), *grads), of_extras


def kernels_missing(env: Environment) -> str:
    """Return why twins run, where they may; see :func:`opfuse_triton.why_no_kernel`."""
    return fused.why_no_kernel(env.device, env.capability)


def _why_not(ops: Sequence[Any], env: Environment) -> str:
    drop = ops[0]
    if not (drop.training and 0 < drop.p < 1):
        return "nothing is drawn"
    if env.compiling:
        return "torch.compile makes a kernel of a dropout itself"
    if env.dtype not in kernels.DTYPES:
        return fused.in_which_dtypes(env)
    return "" if env.options.get("norm.twins") else kernels_missing(env)


def _draws(name: str) -> Any:
    """The condition of a fusion without a norm."""

    def when(ops: Sequence[Any], env: Environment) -> bool | str:
        return _why_not(ops, env) or PREDICTED.why_not(name, env) or True

    return when


def _draws_before_a_norm(ops: Sequence[Any], env: Environment) -> bool | str:
    if len(getattr(ops[-1], "normalized_shape", (0,))) > 1:
        return "its kernel draws along the last dimension, and the norm has several"
    refused = _why_not(ops, env) or fused.why_not(ops, env)
    return refused or PREDICTED.why_not("dropout+add+norm", env) or True


JOINT = [
    Fusion((Dropout,), DropoutAdd, _draws("dropout"), benefit=1, name="dropout"),
    Fusion(
        (Dropout, AddExtraInput), DropoutAdd, _draws("dropout+add"), benefit=3, name="dropout+add"
    ),
    Fusion(
        (Dropout, AddExtraInput, Optional(MakeExtraOutput), OneOf(RMSNorm, LayerNorm)),
        DropoutAddNorm,
        _draws_before_a_norm,
        benefit=16,
        name="dropout+add+norm",
    ),
]
