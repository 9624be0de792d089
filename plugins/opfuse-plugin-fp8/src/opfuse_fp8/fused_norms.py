"""Norms that end with a cast: the fused op, and its conditions."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

from torch import Tensor

from opfuse import Environment, FusedOperation, Fusion, OneOf, OperationContext, Optional
from opfuse.ops import AddExtraInput, Cast, LayerNorm, MakeExtraOutput, RMSNorm

from . import conditions
from .twins import Into

Ctxs = list[OperationContext]
Extras = Sequence[Sequence[Tensor | None]]

MOST_FEATURES = 16384
"""The widest row that a program keeps in registers."""


class ForwardNormCast(FusedOperation):
    """[AddExtraInput +] [MakeExtraOutput +] norm + cast: the output is written as codes.

    Under current scaling it is written once, and cast when its largest magnitude is known. The twin
    is the ops themselves, one after the other.
    """

    def __init__(self, basic_ops: Sequence[Any]) -> None:
        super().__init__(basic_ops)
        # in a tuple, since looking up a module's attributes is slow
        self._ops, self._nothing = tuple(basic_ops), ((),) * len(basic_ops)
        self._adds = isinstance(basic_ops[0], AddExtraInput)
        self._norm: Any = None
        self._forks = len(basic_ops) > 2 and isinstance(basic_ops[-3], MakeExtraOutput)

    def planned(self, env: Environment) -> None:
        """See :meth:`opfuse.FusedOperation.planned`."""
        module, self.fallback = conditions.chosen(env, self._ops[-1].quantizer)
        self._norm = getattr(import_module(f".{module}", __package__), "norm", None)

    def fuser_forward(
        self, basic_op_ctxs: Ctxs, input_: Tensor, *, basic_op_extra_inputs: Extras, **given: Any
    ) -> tuple[Any, Any]:
        """See :meth:`opfuse.FusibleOperation.fuser_forward`."""
        op: Any = self._ops[-2]
        ctx: Any = basic_op_ctxs[-2]
        cast: Any = basic_op_ctxs[-1]
        extra = basic_op_extra_inputs[0][0] if self._adds else None
        needs_x = ctx.requires_grad and ctx.input_requires_grad
        save = needs_x or (ctx.requires_grad and any(ctx.param_requires_grad[:1]))
        made: Any = None
        if self._norm is not None and self._fits(ctx, input_, extra):
            if extra is not None:
                self._ops[0].check_extra(basic_op_ctxs[0], extra, input_.shape)
            tensors = input_, extra, *(*ctx.params, None, None)[:2]
            keep = extra is not None and (save or self._forks)
            into = Into(cast.quantizer, cast.usage)
            made = self._norm(op, tensors, ctx.dtype, keep, save, into)
        if made is None:
            return self.run_separately(
                basic_op_ctxs, input_, basic_op_extra_inputs=basic_op_extra_inputs, **given
            )
        x: Any = input_ if extra is None else made.total
        if ctx.requires_grad:
            saved = {"input": x, "weight": ctx.params[0] if needs_x and ctx.params else None}
            saved |= {"mean": made.mean, "rstd": made.rstd}
            ctx.to_save = tuple([saved[name] if save else None for name in op.saved_names])
            ctx.zero_centered_gamma = op.zero_centered_gamma
        outputs: tuple[Any, ...] = self._nothing
        if self._forks:
            outputs = (*outputs[:-3], (x.view_as(x),), (), ())
        return made.output, outputs

    def _fits(self, ctx: Any, x: Tensor, extra: Tensor | None) -> bool:
        """Whether a kernel may take the tensors; if not, the ops say what is wrong with them."""
        vectors = bool(x.ndim) and all(p.shape == x.shape[-1:] for p in ctx.params)
        dtype = ctx.dtype or x.dtype
        return vectors and (extra is None or extra.shape == x.shape) and dtype in conditions.DTYPES


def _runs(ops: Sequence[Any], env: Environment) -> bool | str:
    op, cast = ops[-2], ops[-1]
    if len(op.normalized_shape) > 1:
        return f"its kernels normalize one dimension, and these are {len(op.normalized_shape)}"
    if op.normalized_shape[0] > MOST_FEATURES:
        many = f"{MOST_FEATURES} features, and these are {op.normalized_shape[0]}"
        return f"its kernels keep rows in registers, up to {many}"
    if getattr(ops[0], "in_place", False):
        return "its kernels do not add in place: AddExtraInput(in_place=False)"
    name = "add+norm+cast" if isinstance(ops[0], AddExtraInput) else "norm+cast"
    return conditions.runs(cast.quantizer, env, name=name)


_NORM = OneOf(RMSNorm, LayerNorm)
_CAST, _FORWARD = 8.0, 4.0
"""How much more often a cast, and a norm, in PyTorch's operations read and write."""

FORWARD = [
    Fusion((_NORM, Cast), ForwardNormCast, _runs, benefit=_CAST + _FORWARD + 2, name="norm+cast"),
    Fusion(
        (AddExtraInput, Optional(MakeExtraOutput), _NORM, Cast),
        ForwardNormCast,
        _runs,
        benefit=_CAST + _FORWARD + 5,
        name="add+norm+cast",
    ),
]
