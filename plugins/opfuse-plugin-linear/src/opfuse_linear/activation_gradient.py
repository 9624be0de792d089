"""The gradient of an activation, in the product of the backward of the linear after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from opfuse import Environment, Fusion, OperationContext, Optional, Subclasses
from opfuse.ops import Activation, BasicLinear, Bias

from . import choice, kernels
from .fused import Products

Ctxs = list[OperationContext]


class BackwardActivationLinear(Products):
    """The backward of [bias +] activation + linear: one kernel gives the activation's gradient.

    The gradient of the linear's input is never stored. That of the bias is added up by tiles.
    """

    grad_input = "fresh"

    def configurations(self, env: Environment) -> Sequence[Mapping[str, Any]]:
        """See :meth:`opfuse.FusedOperation.configurations`."""
        return choice.gradient_configurations(list(self.basic_ops), env)

    def planned(self, env: Environment) -> None:
        """See :meth:`opfuse.FusedOperation.planned`."""
        super().planned(env)
        from opfuse_triton import functions_of

        ops: Any = list(self.basic_ops)
        self._parts = ops[-2], functions_of(ops[-2]), len(ops) == 3, ((),) * len(ops)
        self._config = choice.found(env)

    def fuser_backward(
        self, basic_op_ctxs: Ctxs, grad_output: Tensor, **unused: Any
    ) -> tuple[Tensor | None, Any, Any]:
        """See :meth:`opfuse.FusibleOperation.fuser_backward`."""
        act, functions, has_bias, no_extras = self._parts
        of_act: Any = basic_op_ctxs[-2]
        linear = basic_op_ctxs[-1]
        x, weight = BasicLinear.saved_operands(linear)
        hidden = act.saved_input(of_act)
        wants_bias = has_bias and basic_op_ctxs[0].param_requires_grad[0]
        operand = x if weight is None else weight
        dy = grad_output if operand is None else grad_output.to(operand.dtype)
        _, grad_weight = kernels.linear_grads(dy, x, None, onednn=self._onednn, ctx=linear)
        dx: Tensor | None = None
        grad_bias: Tensor | None = None
        if weight is not None and hidden is not None and _takes(dy, weight, hidden):
            from . import products

            numbers = functions.numbers(of_act.numbers if functions.names else ())
            dx, grad_bias = products.activation_gradient(
                dy, weight, hidden, functions, numbers, sums=wants_bias, config=self._config
            )
        elif weight is not None and hidden is not None:
            dx, _ = act.op_backward(of_act, kernels.linear_dgrad(dy, weight))
            grad_bias = kernels.bias_grad(dx) if wants_bias and dx is not None else None
        of_params: Any = (), (grad_weight,)
        return dx, ((grad_bias,), *of_params) if has_bias else of_params, no_extras


def _takes(dy: Tensor, weight: Tensor, hidden: Tensor) -> bool:
    """Whether the kernel takes the tensors that came."""
    return (
        all(type(t) in kernels.PLAIN and t.dtype is dy.dtype for t in (dy, weight, hidden))
        and dy.dtype in kernels.DTYPES
        and dy.device == weight.device == hidden.device
        and dy.numel() > 0
        and hidden.numel() > 0
    )


def _pays(ops: Sequence[Any], env: Environment) -> bool | str:
    """Asked while planning."""
    return choice.activation_gradient_refusal(ops, env) or True


BACKWARD = [
    Fusion(
        (Optional(Bias), Subclasses(Activation), BasicLinear),
        BackwardActivationLinear,
        _pays,
        name="activation+linear",
    )
]
