"""The fused ops, and where they may stand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from opfuse import Environment, FusedOperation, Fusion, Maybe, OperationContext, Subclasses
from opfuse.ops import GELU, Activation, AddExtraInput, BasicLinear, Bias, ConstantScale, MakeExtraOutput, SiLU

from . import kernels

Ctxs = list[OperationContext]
Extras = Sequence[Sequence[Tensor | None]]

_EPILOGUES = {GELU: ("gelu", "tanh"), SiLU: ("swish", "")}
"""How oneDNN calls the activations that a matrix product can end with."""


class _ForwardLinear(FusedOperation):
    """The forward of a linear, with what follows it."""

    def __init__(self, basic_ops: Sequence[Any]) -> None:
        super().__init__(basic_ops)
        self._has_bias = len(basic_ops) > 1 and isinstance(basic_ops[1], Bias)
        self._has_scale = len(basic_ops) > 1 and isinstance(basic_ops[1], ConstantScale)
        self._parts = tuple(basic_ops)  # a tuple, since looking up a submodule costs a microsecond
        self._no_extras = ((),) * len(basic_ops)

    def _bias(self, ctxs: Ctxs, dtype: torch.dtype) -> Tensor | None:
        if not self._has_bias:
            return None
        (bias,) = ctxs[1].params
        return bias if bias.dtype is dtype else bias.to(dtype)


class ForwardLinearBias(_ForwardLinear):
    """Linear + bias: the bias goes into the matrix product."""

    def fuser_forward(
        self,
        basic_op_ctxs: Ctxs,
        input_: Tensor,
        *,
        basic_op_extra_inputs: Extras,
        prev_op_grad_output_quantizer: Any,
        next_op_input_quantizer: Any,
        basic_op_kwargs: Any,
    ) -> tuple[Tensor, Any]:
        """See :meth:`opfuse.FusibleOperation.fuser_forward`."""
        x, weight = BasicLinear.operands(basic_op_ctxs[0], input_)
        return kernels.linear(x, weight, self._bias(basic_op_ctxs, x.dtype)), self._no_extras


class ForwardLinearBiasActivation(_ForwardLinear):
    """Linear [+ bias] + activation. The activation's input is kept if its backward needs it."""

    def __init__(self, basic_ops: Sequence[Any]) -> None:
        super().__init__(basic_ops)
        self._epilogue = _EPILOGUES.get(type(basic_ops[-1]))

    def fuser_forward(
        self,
        basic_op_ctxs: Ctxs,
        input_: Tensor,
        *,
        basic_op_extra_inputs: Extras,
        prev_op_grad_output_quantizer: Any,
        next_op_input_quantizer: Any,
        basic_op_kwargs: Any,
    ) -> tuple[Tensor, Any]:
        """See :meth:`opfuse.FusibleOperation.fuser_forward`."""
        x, weight = BasicLinear.operands(basic_op_ctxs[0], input_)
        act, ctx, bias = self._parts[-1], basic_op_ctxs[-1], self._bias(basic_op_ctxs, x.dtype)
        if self._epilogue is not None and not ctx.requires_grad:
            y = kernels.linear_activation(x, weight, bias, *self._epilogue)
            if y is not None:
                return y, self._no_extras
        hidden = kernels.linear(x, weight, bias)
        return act.forward_value(act.operand(ctx, hidden)), self._no_extras


class ForwardLinearAdd(_ForwardLinear):
    """Linear [+ bias] or linear + scale, and the extra input added."""

    def fuser_forward(
        self, basic_op_ctxs: Ctxs, input_: Tensor, *, basic_op_extra_inputs: Extras, **unused: Any
    ) -> tuple[Tensor, Any]:
        """See :meth:`opfuse.FusibleOperation.fuser_forward`."""
        x, weight = BasicLinear.operands(basic_op_ctxs[0], input_)
        bias = self._bias(basic_op_ctxs, x.dtype)
        (extra,) = basic_op_extra_inputs[-1]
        assert extra is not None
        add = self._parts[-1]
        scale = self._parts[1].scale if self._has_scale else 1.0
        if add.check_extra(basic_op_ctxs[-1], extra, (*x.shape[:-1], weight.shape[0])):
            return extra.detach().add_(kernels.linear(x, weight, bias), alpha=scale), self._no_extras
        if extra.dtype is not x.dtype:
            return torch.add(extra, kernels.linear(x, weight, bias), alpha=scale), self._no_extras
        return kernels.linear_add(x, weight, bias, extra, scale), self._no_extras


class BackwardLinear(FusedOperation):
    """The backward of a linear, with what stands around it.

    In backward order: the activation (its gradient overwrites a gradient that the chain owns), the bias, the
    matrix products with a scale, and the extra gradient added.
    """

    grad_input = "fresh"

    def __init__(self, basic_ops: Sequence[Any]) -> None:
        super().__init__(basic_ops)
        kinds = (MakeExtraOutput, BasicLinear, Bias, ConstantScale, Activation)
        where = [next((i for i, op in enumerate(basic_ops) if isinstance(op, kind)), None) for kind in kinds]
        self._extra, linear, self._bias, scale, act = where
        assert linear is not None
        self._linear = linear
        self._is_plain = self._extra is None and scale is None
        self._scale = () if scale is None else (basic_ops[scale],)
        self._act = () if act is None else (basic_ops[act],)  # tuples, since looking up a submodule is slow
        self._no_extras = ((),) * len(basic_ops)

    def fuser_backward(
        self, basic_op_ctxs: Ctxs, grad_output: Tensor, *, basic_op_grad_extra_outputs: Extras
    ) -> tuple[Tensor | None, Sequence[Any], Any]:
        """See :meth:`opfuse.FusibleOperation.fuser_backward`."""
        grads: list[Any] = [None] * len(basic_op_ctxs)
        dy = grad_output
        if self._act:
            dy = backward_activation(self._act[0], basic_op_ctxs[-1], dy)
        if self._bias is not None and basic_op_ctxs[self._bias].param_requires_grad[0]:
            grads[self._bias] = (kernels.bias_grad(dy),)
        x, weight = basic_op_ctxs[self._linear].saved_tensors or ()
        operand = weight if x is None else x
        if operand is not None and dy.dtype is not operand.dtype:  # under autocast, the output may be wider
            dy = dy.to(operand.dtype)
        scale = 1.0
        if self._scale:
            scale = self._scale[0].scale
            if dy.device.type == "cpu":  # one pass over the gradient is cheaper than two scaled matrix products
                dy, scale = (dy.mul_(scale) if basic_op_ctxs[-1].owns_grad_output else dy * scale), 1.0
        if self._is_plain and x is not None and weight is not None and dy.ndim == 2 and kernels.is_small(dy):
            grads[self._linear] = (dy.t().mm(x),)
            return dy.mm(weight), grads, self._no_extras
        grad_input = grad_weight = None
        if weight is not None:
            addend = None if self._extra is None else basic_op_grad_extra_outputs[self._extra][0]
            if addend is None:
                grad_input = kernels.linear_dgrad(dy, weight, scale)
            elif addend.dtype is dy.dtype:
                grad_input = kernels.linear_dgrad_add(dy, weight, addend)
            else:
                grad_input = kernels.linear_dgrad(dy, weight) + addend
        if x is not None:
            grad_weight = kernels.linear_wgrad(dy, x, scale)
        grads[self._linear] = (grad_weight,)
        return grad_input, grads, self._no_extras


class BackwardActivationBias(FusedOperation):
    """The backward of bias + activation: one gradient, in place if the chain owns it, and its column sum."""

    grad_input = "fresh"

    def __init__(self, basic_ops: Sequence[Any]) -> None:
        super().__init__(basic_ops)
        self._act = (basic_ops[1],)  # a tuple, since looking up a submodule is slow

    def fuser_backward(self, basic_op_ctxs: Ctxs, grad_output: Tensor, **unused: Any) -> tuple[Tensor, Any, Any]:
        """See :meth:`opfuse.FusibleOperation.fuser_backward`."""
        dy = backward_activation(self._act[0], basic_op_ctxs[1], grad_output)
        grad_bias = kernels.bias_grad(dy) if basic_op_ctxs[0].param_requires_grad[0] else None
        return dy, ((grad_bias,), ()), ((), ())


def backward_activation(act: Any, ctx: OperationContext, grad_output: Tensor) -> Tensor:
    """The gradient of an activation's input, written over ``grad_output`` where that is allowed."""
    (x,) = ctx.saved_tensors or ()
    if grad_output.dtype is not x.dtype:
        grad_output = grad_output.to(x.dtype)
    return act.backward_value(grad_output, x, out=grad_output if ctx.owns_grad_output and not act.gated else None)


def _plain_linear(ops: Any, env: Environment) -> bool | str:
    if env.recipe is None:
        return True
    return f"{type(env.recipe).__name__} quantizes the linear, and this fusion multiplies plain tensors"


def _plain_and_pays(ops: Any, env: Environment) -> bool | str:
    if not isinstance(ops[-1], Activation) and adds_nothing(env):
        return f"on this CPU, in {str(env.dtype)[6:]}, it would do what the ops do one by one"
    features = max(op.in_features or 0 for op in ops)
    if env.device.type == "cpu" and features < kernels.MIN_FEATURES:
        return f"{features} features are too few for it to pay on a CPU"
    return _plain_linear(ops, env)


def _pays(ops: Any, env: Environment) -> bool | str:
    if env.device.type == "cpu" and ops[0].in_features < kernels.MIN_FEATURES:
        return f"{ops[0].in_features} features are too few for it to pay on a CPU"
    return True


def adds_nothing(env: Environment) -> bool:
    """Whether the backward of a linear, with nothing around it, is the same matrix products fused or not."""
    return env.device.type == "cpu" and not (env.dtype is torch.float32 and kernels.onednn_is_faster())


_ACT = Subclasses(Activation)

FORWARD = [
    Fusion((BasicLinear, Bias), ForwardLinearBias, name="linear+bias"),
    Fusion((BasicLinear, Maybe(Bias), _ACT), ForwardLinearBiasActivation, name="linear+bias+activation"),
    Fusion((BasicLinear, Maybe(Bias), AddExtraInput), ForwardLinearAdd, name="linear+bias+add"),
    Fusion((BasicLinear, ConstantScale, AddExtraInput), ForwardLinearAdd, name="linear+scale+add"),
]

BACKWARD = [
    Fusion((BasicLinear, Maybe(Bias), Maybe(_ACT)), BackwardLinear, _plain_and_pays, name="linear+bias+activation"),
    Fusion((Bias, _ACT), BackwardActivationBias, _pays, name="activation+bias"),
    Fusion((BasicLinear, ConstantScale), BackwardLinear, _plain_and_pays, name="linear+scale"),
    Fusion((MakeExtraOutput, BasicLinear), BackwardLinear, _plain_linear, name="linear+add"),
]
