"""The fused ops, and the fusions that put them in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from opfuse import Environment, FusedOperation, Fusion, OperationContext, Optional, Subclasses
from opfuse.ops import (
    Activation,
    AddExtraInput,
    BasicLinear,
    Bias,
    ConstantScale,
    ParallelLinear,
    libraries,
)
from opfuse.ops.authoring import added

from . import choice, conditions, kernels

Ctxs = list[OperationContext]
Extras = Sequence[Sequence[Tensor | None]]

# A fused op keeps what a call needs of its basic ops in one attribute, since looking up a module's
# is slow.


class Products(libraries.Products):
    """Matrix products, in the faster library here, and small ones by the shortest way."""

    def planned(self, env: Environment) -> None:
        """See :meth:`opfuse.FusedOperation.planned`."""
        super().planned(env)
        self._small, self._linear = kernels.for_small(env)


class ForwardLinear(Products):
    """Linear alone, in the faster of PyTorch's libraries."""

    def fuser_forward(
        self, basic_op_ctxs: Ctxs, input_: Tensor, **unused: Any
    ) -> tuple[Tensor, Any]:
        """See :meth:`opfuse.FusibleOperation.fuser_forward`."""
        x, weight = BasicLinear.operands(basic_op_ctxs[0], input_)
        return libraries.linear(x, weight, None, self._onednn), ((),)


class ForwardLinearBias(Products):
    """Linear + bias: the bias goes into the matrix product."""

    def fuser_forward(
        self, basic_op_ctxs: Ctxs, input_: Tensor, **unused: Any
    ) -> tuple[Tensor, Any]:
        """See :meth:`opfuse.FusibleOperation.fuser_forward`."""
        x, weight = BasicLinear.operands(basic_op_ctxs[0], input_)
        (bias,) = basic_op_ctxs[1].params
        if x.numel() < self._small and bias.dtype is x.dtype:
            return self._linear(x, weight, bias), ((), ())
        return libraries.linear(x, weight, bias, self._onednn), ((), ())


class ForwardLinearBiasActivation(Products):
    """Linear [+ bias] + activation. The activation's input is kept if its backward needs it."""

    def __init__(self, basic_ops: Sequence[Any]) -> None:
        super().__init__(basic_ops)
        act = basic_ops[-1]
        no_extras, has_bias = ((),) * len(basic_ops), len(basic_ops) == 3
        self._parts = has_bias, act, conditions.epilogue(act), no_extras
        self._triton: Any = None

    def configurations(self, env: Environment) -> Sequence[Mapping[str, Any]]:
        """See :meth:`opfuse.FusedOperation.configurations`."""
        return choice.configurations(list(self.basic_ops), env) or super().configurations(env)

    def planned(self, env: Environment) -> None:
        """See :meth:`opfuse.FusedOperation.planned`."""
        super().planned(env)
        self._triton = choice.product(list(self.basic_ops), env)
        if self._triton is not None or env.device.type != "cpu":
            self._small = 0  # one kernel is faster, however small

    def fuser_forward(
        self, basic_op_ctxs: Ctxs, input_: Tensor, **unused: Any
    ) -> tuple[Tensor, Any]:
        """See :meth:`opfuse.FusibleOperation.fuser_forward`."""
        has_bias, op, epilogue, no_extras = self._parts
        act = basic_op_ctxs[-1]
        x, weight = BasicLinear.operands(basic_op_ctxs[0], input_)
        (bias,) = basic_op_ctxs[1].params if has_bias else (None,)
        if x.numel() < self._small and has_bias and bias.dtype is x.dtype:
            return op.op_forward(act, self._linear(x, weight, bias)), no_extras
        y = None if self._triton is None else self._triton(act, x, weight, bias)
        if y is None and epilogue is not None and not act.requires_grad:
            y = kernels.linear_activation(x, weight, bias, *epilogue, self._onednn)
        if y is None:
            y = op.op_forward(act, libraries.linear(x, weight, bias, self._onednn))
        return y, no_extras


class ForwardParallelLinear(Products):
    """Linears side by side, in the faster of PyTorch's libraries."""

    def __init__(self, basic_ops: Sequence[Any]) -> None:
        super().__init__(basic_ops)
        self._parallel = basic_ops[0]

    def fuser_forward(
        self, basic_op_ctxs: Ctxs, input_: Tensor, **unused: Any
    ) -> tuple[Tensor, Any]:
        """See :meth:`opfuse.FusibleOperation.fuser_forward`."""
        operands = self._parallel.operands(basic_op_ctxs[0], input_)
        return _side_by_side(self._parallel, operands, self._onednn), ((),)


class ForwardParallelLinearActivation(Products):
    """Linears side by side + activation, which is gated where they are gate and up."""

    def __init__(self, basic_ops: Sequence[Any]) -> None:
        super().__init__(basic_ops)
        self._parts = basic_ops[0], basic_ops[1]

    def fuser_forward(
        self, basic_op_ctxs: Ctxs, input_: Tensor, **unused: Any
    ) -> tuple[Tensor, Any]:
        """See :meth:`opfuse.FusibleOperation.fuser_forward`."""
        parallel, act = self._parts
        operands = parallel.operands(basic_op_ctxs[0], input_)
        hidden = _side_by_side(parallel, operands, self._onednn)
        return act.op_forward(basic_op_ctxs[1], hidden), ((), ())


def _side_by_side(op: Any, operands: Any, onednn: bool | None) -> Tensor:
    y = kernels.linears(*operands, onednn)
    return op.product(*operands) if y is None else y


class ForwardLinearAdd(Products):
    """Linear [+ bias] or linear + scale, and the extra input added."""

    def __init__(self, basic_ops: Sequence[Any]) -> None:
        super().__init__(basic_ops)
        has_bias = isinstance(basic_ops[1], Bias)
        scale = basic_ops[1:-1] if isinstance(basic_ops[1], ConstantScale) else ()
        self._parts = has_bias, scale, basic_ops[-1], ((),) * len(basic_ops)

    def fuser_forward(
        self, basic_op_ctxs: Ctxs, input_: Tensor, *, basic_op_extra_inputs: Extras, **unused: Any
    ) -> tuple[Tensor, Any]:
        """See :meth:`opfuse.FusibleOperation.fuser_forward`."""
        has_bias, scaling, add, no_extras = self._parts
        scale = scaling[0].scale if scaling else 1.0
        if scaling and basic_op_ctxs[1].requires_grad:
            basic_op_ctxs[1].scale = scale  # type: ignore[attr-defined]
        x, weight = BasicLinear.operands(basic_op_ctxs[0], input_)
        (bias,) = basic_op_ctxs[1].params if has_bias else (None,)
        extra: Any = basic_op_extra_inputs[-1][0]
        dense = add.input_first or extra.is_contiguous()  # the product's strides are the sum's
        if has_bias and x.numel() < self._small and extra.dtype is bias.dtype is x.dtype:
            y = self._linear(x, weight, bias)
            if add.check_extra(basic_op_ctxs[-1], extra, y.shape):
                return added(extra.detach(), y), no_extras
            return added(y, extra) if dense else extra + y, no_extras
        in_place = add.check_extra(basic_op_ctxs[-1], extra, (*x.shape[:-1], weight.shape[0]))
        if not in_place and dense and extra.dtype is x.dtype and type(extra) in kernels.PLAIN:
            return kernels.linear_add(x, weight, bias, extra, scale, self._onednn), no_extras
        y = libraries.linear(x, weight, bias, self._onednn)
        if in_place:
            return added(extra.detach(), y, scale), no_extras
        return add.sum(y if scale == 1.0 else y * scale, extra), no_extras


class BackwardLinear(Products):
    """The backward of linear [+ bias] [+ activation].

    The gradient of the activation overwrites a gradient that the chain owns.
    """

    grad_input = "fresh"

    def __init__(self, basic_ops: Sequence[Any]) -> None:
        super().__init__(basic_ops)
        act = basic_ops[-1].op_backward if isinstance(basic_ops[-1], Activation) else None
        has_bias = len(basic_ops) > 1 and isinstance(basic_ops[1], Bias)
        self._parts = act, has_bias, ((),) * len(basic_ops)

    def fuser_backward(
        self, basic_op_ctxs: Ctxs, grad_output: Tensor, *, basic_op_grad_extra_outputs: Extras
    ) -> tuple[Tensor | None, Any, Any]:
        """See :meth:`opfuse.FusibleOperation.fuser_backward`."""
        act, has_bias, no_extras = self._parts
        dy, of_act = (grad_output, ()) if act is None else act(basic_op_ctxs[-1], grad_output)
        x, weight = BasicLinear.saved_operands(basic_op_ctxs[0])
        of_bias: Any = (None,)
        if has_bias and basic_op_ctxs[1].param_requires_grad[0]:
            of_bias = (dy.sum(0) if dy.ndim == 2 else kernels.bias_grad(dy),)
        grad_input, grad_weight = kernels.linear_grads(
            dy, x, weight, onednn=self._onednn, ctx=basic_op_ctxs[0]
        )
        grads: Any = ((grad_weight,), of_bias) if has_bias else ((grad_weight,),)
        return grad_input, grads if act is None else (*grads, of_act), no_extras


class BackwardParallelLinear(Products):
    """The backward of linears side by side [+ activation].

    The gradient of the input is added up in the matrix products.
    """

    grad_input = "fresh"

    def __init__(self, basic_ops: Sequence[Any]) -> None:
        super().__init__(basic_ops)
        act = basic_ops[1].op_backward if len(basic_ops) > 1 else None
        self._parts = basic_ops[0], act, ((),) * len(basic_ops)

    def fuser_backward(
        self, basic_op_ctxs: Ctxs, grad_output: Tensor, *, basic_op_grad_extra_outputs: Extras
    ) -> tuple[Tensor | None, Any, Any]:
        """See :meth:`opfuse.FusibleOperation.fuser_backward`."""
        op, act, no_extras = self._parts
        dy, of_act = (grad_output, ()) if act is None else act(basic_op_ctxs[-1], grad_output)
        x, weights = op.saved_operands(basic_op_ctxs[0])
        parts = op.parts_of(basic_op_ctxs[0], dy)
        dx = kernels.linears_dgrad(parts, weights, self._onednn)
        if dx is not None and dy.ndim != 2:
            dx = dx.view(*dy.shape[:-1], dx.shape[1])
        grads = op.param_grads(
            basic_op_ctxs[0], parts, lambda part: kernels.linear_wgrad(part, x, onednn=self._onednn)
        )
        return dx, (grads,) if act is None else (grads, of_act), no_extras


class BackwardLinearScale(Products):
    """The backward of linear + scale: one pass over the gradient, or a scale in each product."""

    grad_input = "fresh"
    _apart = True

    def planned(self, env: Environment) -> None:
        """See :meth:`opfuse.FusedOperation.planned`."""
        super().planned(env)
        self._apart = conditions.scales_gradient(env)

    def fuser_backward(
        self, basic_op_ctxs: Ctxs, grad_output: Tensor, *, basic_op_grad_extra_outputs: Extras
    ) -> tuple[Tensor | None, Any, Any]:
        """See :meth:`opfuse.FusibleOperation.fuser_backward`."""
        linear, last = basic_op_ctxs
        dy, scale = grad_output, last.scale  # type: ignore[attr-defined]
        if self._apart:
            dy, scale = (dy.mul_(scale) if last.owns_grad_output else dy * scale), 1.0
        x, weight = BasicLinear.saved_operands(linear)
        grad_input, grad_weight = kernels.linear_grads(
            dy, x, weight, scale=scale, onednn=self._onednn, ctx=linear
        )
        return grad_input, ((grad_weight,), ()), ((), ())


class BackwardActivationBias(FusedOperation):
    """The backward of bias + activation: one gradient, and its column sum.

    It overwrites the incoming gradient if the chain owns it.
    """

    grad_input = "fresh"

    def __init__(self, basic_ops: Sequence[Any]) -> None:
        super().__init__(basic_ops)
        self._act = basic_ops[1].op_backward

    def fuser_backward(
        self, basic_op_ctxs: Ctxs, grad_output: Tensor, **unused: Any
    ) -> tuple[Tensor, Any, Any]:
        """See :meth:`opfuse.FusibleOperation.fuser_backward`."""
        dy, of_act = self._act(basic_op_ctxs[1], grad_output)
        grad_bias = kernels.bias_grad(dy) if basic_op_ctxs[0].param_requires_grad[0] else None
        return dy, ((grad_bias,), of_act), ((), ())


_ACT = Subclasses(Activation)

FORWARD = [
    Fusion((BasicLinear,), ForwardLinear, conditions.alone_pays, name="linear"),
    Fusion((BasicLinear, Bias), ForwardLinearBias, conditions.exact, name="linear+bias"),
    Fusion(
        (BasicLinear, Optional(Bias), _ACT),
        ForwardLinearBiasActivation,
        conditions.activation_fits,
        name="linear+bias+activation",
    ),
    Fusion((ParallelLinear,), ForwardParallelLinear, conditions.alone_pays, name="parallel linear"),
    Fusion(
        (ParallelLinear, _ACT),
        ForwardParallelLinearActivation,
        conditions.activation_fits,
        name="parallel linear+activation",
    ),
    Fusion(
        (BasicLinear, Optional(Bias), AddExtraInput),
        ForwardLinearAdd,
        conditions.exact,
        name="linear+bias+add",
    ),
    Fusion(
        (BasicLinear, ConstantScale, AddExtraInput),
        ForwardLinearAdd,
        conditions.exact,
        name="linear+scale+add",
    ),
]

BACKWARD = [
    Fusion(
        (BasicLinear, Optional(Bias), Optional(_ACT)),
        BackwardLinear,
        conditions.activation_pays,
        name="linear+bias+activation",
    ),
    Fusion(
        (ParallelLinear, Optional(_ACT)),
        BackwardParallelLinear,
        conditions.activation_pays,
        name="parallel linear+activation",
    ),
    # the others go first
    Fusion(
        (Bias, _ACT), BackwardActivationBias, conditions.pays, priority=-200, name="activation+bias"
    ),
    Fusion(
        (BasicLinear, ConstantScale),
        BackwardLinearScale,
        conditions.scale_pays,
        name="linear+scale",
    ),
]
