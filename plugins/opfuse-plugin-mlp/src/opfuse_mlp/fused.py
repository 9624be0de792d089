"""The fused ops, and their patterns."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from opfuse_triton import why_no_kernel
from torch import Tensor

from opfuse import (
    Environment,
    FusedOperation,
    Fusion,
    OneOf,
    OperationContext,
    Optional,
    Subclasses,
)
from opfuse.core.quantization import dequantize
from opfuse.ops import Activation, BasicLinear, Bias, LayerNorm, ParallelLinear, RMSNorm

from . import formulas

Ctxs = list[OperationContext]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that the kernel reads and writes. It computes in fp32."""


class MLP(FusedOperation):
    """[Norm +] linear [+ bias] + activation + linear [+ bias], which keeps less for the backward.

    The forward is that of the ops. The input of the activation is kept, and neither its output nor
    that of the norm, which the backward computes again.
    """

    grad_input = "fresh"

    def __init__(self, basic_ops: Sequence[Any]) -> None:
        super().__init__(basic_ops)
        # in a tuple, since looking up a module's attributes is slow
        self._ops: tuple[Any, ...] = tuple(basic_ops)
        self._has_norm = isinstance(basic_ops[0], (RMSNorm, LayerNorm))
        self._act = _place_of_activation(basic_ops)
        self._keep_norm, self._kernel = False, None

    def planned(self, env: Environment) -> None:
        """See :meth:`opfuse.FusedOperation.planned`."""
        self._keep_norm = env.options.get("mlp.keep_norm", False)
        self.fallback, functions = _why_not(self._ops, env)
        if self.fallback:
            return
        from opfuse_triton import Config

        from . import kernels  # this imports Triton

        config = None if env.configuration is None else Config(**env.configuration)
        size = getattr(self._ops[self._act], "glu_interleave_size", None)
        self._kernel = kernels.Gradients(functions, size or 0, config)  # type: ignore[assignment]

    def configurations(self, env: Environment) -> Sequence[Mapping[str, Any]]:
        """See :meth:`opfuse.FusedOperation.configurations`."""
        if env.compiling or _why_not(self._ops, env)[0]:
            return ()
        from . import kernels

        return kernels.candidates(env.device, self._ops[self._act + 1].in_features)

    def fuser_forward(
        self, basic_op_ctxs: Ctxs, input_: Tensor, **unused: Any
    ) -> tuple[Tensor, Any]:
        """See :meth:`opfuse.FusibleOperation.fuser_forward`."""
        ops, ctxs, place = self._ops, basic_op_ctxs, self._act
        x = ops[0].op_forward(ctxs[0], input_) if self._has_norm else input_
        z = self._first(ctxs, x)
        activation, second, *bias = ctxs[place:]
        y = ops[place].forward_value(ops[place].operand(activation, z))
        y, weight = BasicLinear.operands(second, y)
        output = formulas.product(y, weight, bias[0].params[0] if bias else None)
        self._keep_less(ctxs)
        return output, ((),) * len(ops)

    def _first(self, ctxs: Ctxs, x: Tensor) -> Tensor:
        """The first linear and its bias."""
        linear, *bias = ctxs[self._has_norm : self._act]
        x, weight = BasicLinear.operands(linear, x)
        return formulas.product(x, weight, bias[0].params[0] if bias else None)

    def _keep_less(self, ctxs: Sequence[Any]) -> None:
        """Drop from the contexts of the ops what can be computed again.

        What is saved instead is on the context of the activation: its input, and then weight and
        bias of the norm whose output is computed again.
        """
        activation, second = ctxs[self._act : self._act + 2]
        if not (activation.requires_grad and activation.input_requires_grad):
            return  # all before is frozen: the output of the activation is smaller than its input
        second.to_save = (None, *second.to_save[1:])
        if not self._has_norm or self._keep_norm:
            return
        norm, linear = ctxs[:2]
        kept = norm.requires_grad and norm.to_save[0] is not None
        if kept and linear.to_save[0] is not None:
            linear.to_save = (None, *linear.to_save[1:])
            activation.to_save = (*activation.to_save, *(*norm.params, None, None)[:2])

    def fuser_backward(
        self, basic_op_ctxs: Ctxs, grad_output: Tensor, **unused: Any
    ) -> tuple[Tensor | None, Any, Any]:
        """See :meth:`opfuse.FusibleOperation.fuser_backward`."""
        ops, ctxs, place = self._ops, basic_op_ctxs, self._act
        grads: list[Any] = [None] * len(ops)
        no_extras = ((),) * len(ops)
        activation, second, *bias = ctxs[place:]
        dy, dz, y = formulas.rows_of(grad_output), None, None
        dy = dy if second.dtype is None else dy.to(second.dtype)
        if bias and bias[0].param_requires_grad[0]:
            grads[-1] = (dy.sum(0),)
        if second.requires_grad:
            y, weight = BasicLinear.saved_operands(second)
            (wanted,) = second.param_requires_grad
            if weight is not None:
                dz, y = self._gradients(activation, dy.mm(weight), wanted)
            if y is not None:
                grads[place + 1] = (formulas.grad_of_weight(dy, formulas.rows_of(y)),)
        if dz is None:
            return None, grads, no_extras
        del dy, y  # before more is computed
        dx = self._first_gradients(ctxs, dz, grads)
        if dx is not None:
            dx = dx.view(*grad_output.shape[:-1], dx.shape[1])
        if self._has_norm and ctxs[0].requires_grad:
            dx, grads[0] = ops[0].op_backward(ctxs[0], dx)
        return dx, grads, no_extras

    def _gradients(self, ctx: Any, dy: Tensor, with_output: bool) -> tuple[Tensor, Tensor | None]:
        """The gradient of the activation's input, and its output again, as matrices."""
        op = self._ops[self._act]
        saved, *_ = ctx.saved_tensors  # the norm's tensors come after it
        z = formulas.rows_of(dequantize(saved))
        numbers = ctx.numbers if "numbers" in op.context_names else ()
        if self._kernel is not None and _takes(dy, z):
            return self._kernel(dy, z, numbers, with_output)
        return formulas.gradients(op.with_numbers(numbers), dy, z, with_output)

    def _first_gradients(self, ctxs: Ctxs, dz: Tensor, grads: list[Any]) -> Tensor | None:
        """The gradients of the first linear and its bias; returns that of its input."""
        place = int(self._has_norm)
        linear, *bias = ctxs[place : self._act]
        if bias and bias[0].param_requires_grad[0]:
            grads[place + 1] = (dz.sum(0),)
        if not linear.requires_grad:
            return None
        x, weight = BasicLinear.saved_operands(linear)
        if linear.param_requires_grad[0]:
            grads[place] = (formulas.grad_of_weight(dz, self._input(ctxs, x)),)
        return None if weight is None else dz.mm(weight)

    def _input(self, ctxs: Ctxs, saved: Tensor | None) -> Tensor:
        """The input of the first linear as a matrix: as it was saved, or computed again."""
        if saved is None:
            norm, linear = ctxs[:2]
            _, *params = ctxs[self._act].saved_tensors  # type: ignore[misc]
            saved = formulas.normalized_again(norm, norm.saved_tensors, params, norm.dtype)
            saved = saved if linear.dtype is None else saved.to(linear.dtype)
        return formulas.rows_of(saved)


class ParallelMLP(MLP):
    """The same with linears side by side, such as gate and up, before the activation."""

    def _first(self, ctxs: Ctxs, x: Tensor) -> Tensor:
        op = self._ops[self._act - 1]
        return op.product(*op.operands(ctxs[self._act - 1], x))  # type: ignore[no-any-return]

    def _first_gradients(self, ctxs: Ctxs, dz: Tensor, grads: list[Any]) -> Tensor | None:
        place = self._act - 1
        op, ctx = self._ops[place], ctxs[place]
        x, weights = op.saved_operands(ctx)
        if any(ctx.param_requires_grad[: len(op.sizes)]):
            x = self._input(ctxs, x)
        parts = op.parts_of(ctx, dz)
        grads[place] = op.param_grads(ctx, parts, lambda dy: formulas.grad_of_weight(dy, x))
        dx = None
        for dy, weight in zip(parts, weights, strict=True) if weights[0] is not None else ():
            dx = dy.mm(weight) if dx is None else dx.addmm_(dy, weight)
        return dx


class RecomputedNorm(FusedOperation):
    """A norm whose output is computed again in the backward, so that no linear keeps it."""

    recomputes = True
    grad_input = "fresh"

    def fuser_forward(
        self, basic_op_ctxs: Ctxs, input_: Tensor, **unused: Any
    ) -> tuple[Tensor, Any]:
        """See :meth:`opfuse.FusibleOperation.fuser_forward`."""
        norm: Any = self.basic_ops[0]
        ctx: Any = basic_op_ctxs[0]
        y = norm.op_forward(ctx, input_)
        if ctx.requires_grad:
            if ctx.may_recompute and ctx.to_save[0] is not None:
                ctx.recomputable_output = y
            ctx.to_save = (*ctx.to_save, *(*ctx.params, None, None)[:2])
        return y, ((),)

    def fuser_recompute(self, basic_op_ctxs: Sequence[Any]) -> Tensor:
        """See :meth:`opfuse.FusedOperation.fuser_recompute`."""
        (ctx,) = basic_op_ctxs
        *saved, weight, bias = ctx.saved_tensors
        return formulas.normalized_again(ctx, saved, (weight, bias), ctx.dtype)

    def fuser_backward(
        self, basic_op_ctxs: Ctxs, grad_output: Tensor, **unused: Any
    ) -> tuple[Tensor | None, Any, Any]:
        """See :meth:`opfuse.FusibleOperation.fuser_backward`."""
        norm: Any = self.basic_ops[0]
        ctx: Any = basic_op_ctxs[0]
        ctx.saved_tensors = ctx.saved_tensors[:-2]
        dx, grads = norm.op_backward(ctx, grad_output)
        return dx, (grads,), ((),)


def _place_of_activation(ops: Sequence[Any]) -> int:
    return next(place for place, op in enumerate(ops) if isinstance(op, Activation))


def _why_not(ops: Sequence[Any], env: Environment) -> tuple[str, Any]:
    """Why no kernel can run for a chain, as a sentence; or "" and the device functions."""
    if reason := _why_not_on(env):
        return reason, None
    from opfuse_triton import functions_of

    activation = ops[_place_of_activation(ops)]
    functions = functions_of(activation)
    if functions is None:
        return f"{type(activation).__name__} has no device functions that compute it", None
    return "", functions


def _why_not_on(env: Environment) -> str:
    """Why no kernel can run in an environment, as a sentence, or ""."""
    said = why_no_kernel(env.device, env.capability)
    if not said and env.dtype not in DTYPES:
        return f"its kernel computes in fp32, and this is {str(env.dtype)[6:]}"
    return said


def _takes(dy: Tensor, z: Tensor) -> bool:
    """Return whether the kernel takes these tensors; a subclass has its own ways."""
    for tensor in (dy, z):
        if not (type(tensor) is Tensor and tensor.dtype in DTYPES and tensor.is_contiguous()):
            return False
    return True


def _keeps_less(ops: Any, env: Environment) -> bool | str:
    """Asked while planning."""
    if env.recipe is not None:
        who = type(env.recipe).__name__
        return f"{who} quantizes the linears, and this fusion multiplies plain tensors"
    if not env.requires_grad:
        return "no backward follows, for which something would be kept"
    activation = ops[_place_of_activation(ops)]
    if not activation.deterministic:
        who = type(activation).__name__
        return f"{who} does not declare itself deterministic, and would be computed again"
    if env.compiling and _why_not_on(env):
        return "torch.compile merges what is computed twice, so that nothing less would be kept"
    return True


def _recomputes(ops: Any, env: Environment) -> bool | str:
    """Asked while planning for a norm alone; infinity lists what could be measured."""
    if env.options.get("mlp.keep_norm", False):
        return "the option mlp.keep_norm keeps it"
    if env.options.get("prefer") != "memory" and env.measured != math.inf:
        return 'computing the norm again trades time for memory, which prefer="memory" asks for'
    if env.recipe is not None:
        return f"{type(env.recipe).__name__} quantizes what a linear keeps"
    if not env.requires_grad:
        return "no backward follows, for which something would be kept"
    if env.compiling:
        return "torch.compile merges what is computed twice, so that nothing less would be kept"
    return True


_NORM = Optional(OneOf(RMSNorm, LayerNorm))
_REST = Subclasses(Activation), BasicLinear, Optional(Bias)

_LAST = -150
"""The priority: a kernel for the norm goes first."""

_ONE = (_NORM, BasicLinear, Optional(Bias), *_REST)
_SEVERAL = (_NORM, ParallelLinear, *_REST)

JOINT = [
    Fusion(_ONE, MLP, _keeps_less, name="mlp", trades_time=True),
    Fusion(_SEVERAL, ParallelMLP, _keeps_less, name="parallel mlp", trades_time=True),
    Fusion(
        (OneOf(RMSNorm, LayerNorm),),
        RecomputedNorm,
        _recomputes,
        benefit=1,
        priority=_LAST,
        name="recomputed norm",
        trades_time=True,
        only_recomputes=True,
    ),
]
