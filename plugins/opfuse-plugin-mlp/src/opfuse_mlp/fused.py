"""The fused ops, and their patterns."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from opfuse_triton.elementwise import passes
from opfuse_triton.norms.passes import NormPasses
from torch import Tensor
from torch.nn import functional as F

from opfuse import (
    Environment,
    FusedOperation,
    Fusion,
    OneOf,
    OperationContext,
    Optional,
    Subclasses,
)
from opfuse.core.overwriting import may_write
from opfuse.core.quantization import dequantize
from opfuse.ops import (
    Activation,
    BasicLinear,
    Bias,
    LayerNorm,
    LowRankLinear,
    ParallelLinear,
    RMSNorm,
)
from opfuse.ops.arithmetic import plus_product

Ctxs = list[OperationContext]


class MLP(FusedOperation):
    """[Norm +] linear [+ bias] + activation + linear [+ bias], which keeps less for the backward.

    The input of the activation is kept, and neither its output nor that of the norm, which the
    backward computes again.
    """

    grad_input = "fresh"
    keeps_input_as_first = True

    def __init__(self, basic_ops: Sequence[Any]) -> None:
        super().__init__(basic_ops)
        # in a tuple, since looking up a module's attributes is slow
        self._ops: tuple[Any, ...] = tuple(basic_ops)
        self._has_norm = isinstance(basic_ops[0], (RMSNorm, LayerNorm))
        self._norm: Any = NormPasses(basic_ops[0]) if self._has_norm else None
        self._act = _place_of_activation(basic_ops)
        self._keep_norm = False

    def planned(self, env: Environment) -> None:
        """See :meth:`opfuse.FusedOperation.planned`."""
        self._keep_norm = env.options.get("mlp.keep_norm", False)
        activation = self._ops[self._act]
        self.fallback = passes.why_not(activation, env)
        self._activate = passes.passes_of(activation, env).forward
        self._gradients = passes.passes_of(activation, env, env.configuration).backward
        if self._has_norm:
            self._norm.plan(env)

    def configurations(self, env: Environment) -> Sequence[Mapping[str, Any]]:
        """See :meth:`opfuse.FusedOperation.configurations`."""
        activation, second = self._ops[self._act : self._act + 2]
        if env.compiling or passes.why_not(activation, env):
            return ()
        from opfuse_triton import current_target
        from opfuse_triton.elementwise import formulas as of_kernels
        from opfuse_triton.elementwise import kernels

        formula: Any = of_kernels.formula_of(activation)
        width = second.in_features * activation.feature_ratio
        return kernels.candidates("backward", formula, width, current_target(env.device))

    def fuser_forward(
        self, basic_op_ctxs: Ctxs, input_: Tensor, **unused: Any
    ) -> tuple[Tensor, Any]:
        """See :meth:`opfuse.FusibleOperation.fuser_forward`."""
        ops, ctxs, place = self._ops, basic_op_ctxs, self._act
        x = input_
        if self._has_norm:
            x = _normalized(ops[0], self._norm, ctxs[0], x)
        z = ops[place].operand(ctxs[place], self._first(ctxs, x))
        y, _ = self._activate(z, None, None, z.dtype, False)
        output = self._second(ctxs, y)
        self._keep_less(ctxs)
        return output, ((),) * len(ops)

    def _first(self, ctxs: Ctxs, x: Tensor) -> Tensor:
        """The first linear and its bias."""
        linear, *bias = ctxs[self._has_norm : self._act]
        x, weight = BasicLinear.operands(linear, x)
        return _product(x, weight, bias[0].params[0] if bias else None)

    def _second(self, ctxs: Ctxs, y: Tensor) -> Tensor:
        """The second linear and its bias."""
        linear, *bias = ctxs[self._act + 1 :]
        y, weight = BasicLinear.operands(linear, y)
        return _product(y, weight, bias[0].params[0] if bias else None)

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
        second, *bias = ctxs[place + 1 :]
        dy, dz, sums = _rows_of(grad_output), None, None
        dy = dy if second.dtype is None else dy.to(second.dtype)
        if bias and bias[0].param_requires_grad[0]:
            grads[-1] = (dy.sum(0),)
        if second.requires_grad:
            dz, sums = self._second_gradients(ctxs, dy, grads)
        if dz is None:
            return None, grads, no_extras
        del dy  # before more is computed
        dx = self._first_gradients(ctxs, dz, sums, grads)
        if dx is not None:
            dx = dx.view(*grad_output.shape[:-1], dx.shape[1])
        if self._has_norm and ctxs[0].requires_grad:
            dx, grads[0] = _norm_backward(ops[0], self._norm, ctxs[0], dx, may_write(dx))
        return dx, grads, no_extras

    def _second_gradients(
        self, ctxs: Ctxs, dy: Tensor, grads: list[Any]
    ) -> tuple[Tensor | None, Tensor | None]:
        """The gradient of the second weight; returns that of the activation's input, and its sums.

        They are None where all before is frozen.
        """
        linear, dz, sums = ctxs[self._act + 1], None, None
        y, weight = BasicLinear.saved_operands(linear)
        (wanted,) = linear.param_requires_grad
        if weight is not None:
            dz, sums, y = self._of_activation(ctxs, dy.mm(weight), wanted)
        if y is not None:
            grads[self._act + 1] = (_grad_of_weight(dy, _rows_of(y)),)
        return dz, sums

    def _of_activation(self, ctxs: Ctxs, dy: Tensor, again: bool) -> Any:
        """The gradient of the activation's input, its sums, and the output again, as matrices."""
        op, ctx = self._ops[self._act], ctxs[self._act]
        needs = True, self._needs_sums(ctxs), again
        saved, *_ = ctx.saved_tensors  # type: ignore[misc]  # the norm's tensors come after it
        z = _rows_of(dequantize(saved))
        numbers = ctx.numbers if "numbers" in op.context_names else ()
        return self._gradients(numbers, dy, z, *needs, owns=may_write(dy))

    def _needs_sums(self, ctxs: Ctxs) -> bool:
        """Return whether the gradient of a bias is the sum of that of the activation's input."""
        bias = ctxs[self._has_norm + 1 : self._act]
        return bool(bias) and bias[0].param_requires_grad[0]

    def _first_gradients(
        self, ctxs: Ctxs, dz: Tensor, sums: Tensor | None, grads: list[Any]
    ) -> Tensor | None:
        """The gradients of the first linear and its bias; returns that of its input."""
        place = int(self._has_norm)
        linear = ctxs[place]
        if sums is not None:
            grads[place + 1] = (sums,)
        if not linear.requires_grad:
            return None
        x, weight = BasicLinear.saved_operands(linear)
        if linear.param_requires_grad[0]:
            grads[place] = (_grad_of_weight(dz, self._input(ctxs, x)),)
        return None if weight is None else dz.mm(weight)

    def _input(self, ctxs: Ctxs, saved: Tensor | None) -> Tensor:
        """The input of the first linear as a matrix: as it was saved, or computed again."""
        if saved is None:
            norm, linear = ctxs[:2]
            _, *params = ctxs[self._act].saved_tensors  # type: ignore[misc]
            saved = self._norm.again(norm, norm.saved_tensors, params)
            saved = saved if linear.dtype is None else saved.to(linear.dtype)
        return _rows_of(saved)


class ParallelMLP(MLP):
    """The same with linears side by side, such as gate and up, before the activation."""

    def _first(self, ctxs: Ctxs, x: Tensor) -> Tensor:
        op = self._ops[self._act - 1]
        return op.product(*op.operands(ctxs[self._act - 1], x))  # type: ignore[no-any-return]

    def _needs_sums(self, ctxs: Ctxs) -> bool:
        op, ctx = self._ops[self._act - 1], ctxs[self._act - 1]
        return any(ctx.param_requires_grad[len(op.sizes) :])

    def _first_gradients(
        self, ctxs: Ctxs, dz: Tensor, sums: Tensor | None, grads: list[Any]
    ) -> Tensor | None:
        place = self._act - 1
        op, ctx = self._ops[place], ctxs[place]
        x, weights = op.saved_operands(ctx)
        if any(ctx.param_requires_grad[: len(op.sizes)]):
            x = self._input(ctxs, x)
        parts = op.parts_of(ctx, dz)
        summed = () if sums is None else op.parts_of(ctx, sums.unsqueeze(0))
        grads[place] = op.param_grads(ctx, parts, lambda dy: _grad_of_weight(dy, x), summed)
        dx = None
        for dy, weight in zip(parts, weights, strict=True) if weights[0] is not None else ():
            dx = plus_product(dx, dy, weight)
        return dx


class AdaptedMLP(ParallelMLP):
    """The same where the first linear has adapters, or the last one behind linears side by side.

    What the gradients of the adapters take, the outputs of the norm and of the activation, is
    computed again. The small product of each adapter and the mask of its dropout are kept.
    """

    def __init__(self, basic_ops: Sequence[Any]) -> None:
        super().__init__(basic_ops)
        first, self._adapted = basic_ops[self._has_norm], basic_ops[self._act + 1]
        self._is_adapted = isinstance(first, LowRankLinear)

    def _first(self, ctxs: Ctxs, x: Tensor) -> Tensor:
        if not self._is_adapted:
            return super()._first(ctxs, x)
        place = int(self._has_norm)
        for op, ctx in zip(self._ops[place : self._act], ctxs[place:], strict=False):
            x = op.op_forward(ctx, x)
        return x

    def _second(self, ctxs: Ctxs, y: Tensor) -> Tensor:
        if not isinstance(self._adapted, LowRankLinear):
            return super()._second(ctxs, y)
        place = self._act + 1
        for op, ctx in zip(self._ops[place:], ctxs[place:], strict=True):
            y = op.op_forward(ctx, y)
        return y

    def _needs_sums(self, ctxs: Ctxs) -> bool:
        return MLP._needs_sums(self, ctxs) if self._is_adapted else super()._needs_sums(ctxs)

    def _second_gradients(
        self, ctxs: Ctxs, dy: Tensor, grads: list[Any]
    ) -> tuple[Tensor | None, Tensor | None]:
        op, ctx = self._adapted, ctxs[self._act + 1]
        if not isinstance(op, LowRankLinear):
            return super()._second_gradients(ctxs, dy, grads)
        dx, left = op.input_grad(ctx, dy)
        (y, *_), dz, sums = ctx.saved_tensors, None, None  # type: ignore[misc]
        if dx is not None:
            dz, sums, y = self._of_activation(ctxs, dx, op.takes_input(ctx))
        grads[self._act + 1] = op.param_grads(ctx, left, None if y is None else _rows_of(y))
        return dz, sums

    def _first_gradients(
        self, ctxs: Ctxs, dz: Tensor, sums: Tensor | None, grads: list[Any]
    ) -> Tensor | None:
        if not self._is_adapted:
            return super()._first_gradients(ctxs, dz, sums, grads)
        place = int(self._has_norm)
        op, ctx = self._ops[place], ctxs[place]
        if sums is not None:
            grads[place + 1] = (sums,)
        if not ctx.requires_grad:
            return None
        dx, left = op.input_grad(ctx, dz)
        (x, *_) = ctx.saved_tensors  # type: ignore[misc]
        x = self._input(ctxs, x) if op.takes_input(ctx) else None
        grads[place] = op.param_grads(ctx, left, x)
        return dx


class AgainMLP(AdaptedMLP):
    """The same, where the product before the activation is computed again from its input."""

    def _keep_less(self, ctxs: Sequence[Any]) -> None:
        linear, activation = ctxs[self._act - 1 : self._act + 1]
        # where no gradient takes the input of the first product, nothing is kept to compute it from
        again = linear.requires_grad and linear.to_save[0] is not None
        super()._keep_less(ctxs)
        if again and activation.input_requires_grad:
            activation.to_save = (None, *activation.to_save[1:])

    def _of_activation(self, ctxs: Ctxs, dy: Tensor, again: bool) -> Any:
        activation, place = ctxs[self._act], self._act - 1
        z, *others = activation.saved_tensors  # type: ignore[misc]
        if z is None:
            op, linear = self._ops[place], ctxs[place]
            x, *saved = linear.saved_tensors  # type: ignore[misc]
            x = self._input(ctxs, x)
            activation.saved_tensors = op.again(linear, x), *others
            linear.saved_tensors = x, *saved
        return super()._of_activation(ctxs, dy, again)


class RecomputedNorm(FusedOperation):
    """A norm whose output is computed again in the backward, so that no linear keeps it."""

    recomputes = True
    grad_input = "fresh"

    def __init__(self, basic_ops: Sequence[Any]) -> None:
        super().__init__(basic_ops)
        self._of = basic_ops[0], NormPasses(basic_ops[0])

    def planned(self, env: Environment) -> None:
        """See :meth:`opfuse.FusedOperation.planned`."""
        self._of[1].plan(env)

    def fuser_forward(
        self, basic_op_ctxs: Ctxs, input_: Tensor, **unused: Any
    ) -> tuple[Tensor, Any]:
        """See :meth:`opfuse.FusibleOperation.fuser_forward`."""
        ctx: Any = basic_op_ctxs[0]
        y = _normalized(*self._of, ctx, input_)
        if ctx.requires_grad:
            if ctx.may_recompute and ctx.to_save[0] is not None:
                ctx.recomputable_output = y
            ctx.to_save = (*ctx.to_save, *(*ctx.params, None, None)[:2])
        return y, ((),)

    def fuser_recompute(self, basic_op_ctxs: Sequence[Any]) -> Tensor:
        """See :meth:`opfuse.FusedOperation.fuser_recompute`."""
        (ctx,) = basic_op_ctxs
        *saved, weight, bias = ctx.saved_tensors
        return self._of[1].again(ctx, saved, (weight, bias))

    def fuser_backward(
        self, basic_op_ctxs: Ctxs, grad_output: Tensor, **unused: Any
    ) -> tuple[Tensor | None, Any, Any]:
        """See :meth:`opfuse.FusibleOperation.fuser_backward`."""
        ctx: Any = basic_op_ctxs[0]
        ctx.saved_tensors = ctx.saved_tensors[:-2]
        dx, grads = _norm_backward(*self._of, ctx, grad_output, ctx.owns_grad_output)
        return dx, (grads,), ((),)


def _normalized(op: Any, norm: NormPasses, ctx: Any, x: Tensor) -> Tensor:
    """The output of a norm: by a kernel, or by the op, which says what is wrong."""
    takes = norm.has_kernels and norm.fits(ctx, x)
    return norm.forward(ctx, x)[0] if takes else op.op_forward(ctx, x)


def _norm_backward(op: Any, norm: NormPasses, ctx: Any, dy: Tensor, owns: bool) -> Any:
    """The gradients of a norm: by kernels, or by the op, as those of a LayerNorm's bias alone."""
    takes = norm.has_kernels and norm.saved(ctx)[0] is not None
    return norm.backward(ctx, dy, owns=owns) if takes else op.op_backward(ctx, dy)


def _place_of_activation(ops: Sequence[Any]) -> int:
    return next(place for place, op in enumerate(ops) if isinstance(op, Activation))


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
    if activation.cache_quantized_input:
        return "its input is kept in FP8, from which its output would be computed again"
    if env.compiling and passes.why_not(activation, env):
        return "torch.compile merges what is computed twice, so that nothing less would be kept"
    return True


def _multiplies_again(ops: Any, env: Environment) -> bool | str:
    """Asked while planning; infinity lists what could be measured."""
    if env.options.get("prefer") != "memory" and env.measured != math.inf:
        return 'a product twice trades time for memory, which prefer="memory" asks for'
    return _keeps_less(ops, env)


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

_ONE = (_NORM, BasicLinear, Optional(Bias), *_REST)
_SEVERAL = (_NORM, ParallelLinear, *_REST)
_ADAPTED = Subclasses(LowRankLinear)
_OUTPUT = _ADAPTED, Optional(Bias)
_LOW_RANK = {
    "mlp, low rank": (
        *(_NORM, _ADAPTED, Optional(Bias), Subclasses(Activation)),
        *(OneOf(_ADAPTED, BasicLinear), Optional(Bias)),
    ),
    "parallel mlp, low rank at its end": (
        *(_NORM, ParallelLinear, Subclasses(Activation), *_OUTPUT),
    ),
}

JOINT = [
    Fusion(_ONE, MLP, _keeps_less, name="mlp", declares=("trades_time",)),
    Fusion(_SEVERAL, ParallelMLP, _keeps_less, name="parallel mlp", declares=("trades_time",)),
    *[
        Fusion(pattern, AdaptedMLP, _keeps_less, name=name, declares=("trades_time",))
        for name, pattern in _LOW_RANK.items()
    ],
    Fusion(
        (_NORM, _ADAPTED, Subclasses(Activation), OneOf(_ADAPTED, BasicLinear), Optional(Bias)),
        AgainMLP,
        _multiplies_again,
        priority=1,  # it keeps less than the others
        name="mlp, low rank, computed again",
        declares=("trades_time",),
    ),
    Fusion(
        (OneOf(RMSNorm, LayerNorm),),
        RecomputedNorm,
        _recomputes,
        benefit=1,
        priority=-150,  # a kernel for the norm goes first
        name="recomputed norm",
        declares=("trades_time",),
    ),
]


# The products, in PyTorch's operations


def _rows_of(tensor: Tensor) -> Tensor:
    """``(..., n)`` with one row dimension, ``(rows, n)``; a view where there can be one."""
    return tensor if tensor.ndim == 2 else tensor.unsqueeze(0).flatten(0, -2)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x @ weight.T + bias``: ``(..., n)`` times ``(m, n)``, in the dtype of ``x``."""
    return F.linear(x, weight, None if bias is None else bias.to(x.dtype))


def _grad_of_weight(dy: Tensor, x: Tensor) -> Tensor:
    """``dy.T @ x``: of ``(rows, m)`` and ``(rows, n)``, the gradient ``(m, n)`` of a weight."""
    return dy.t().mm(x)
