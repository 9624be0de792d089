"""The fused op, its twin in PyTorch, and the condition for using it."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch
from opfuse import Environment, FusedOperation, Fusion, OperationContext, Subclasses
from opfuse.ops import Activation, Bias
from opfuse_triton import why_no_kernel
from torch import Tensor


class BiasActivation(FusedOperation):
    """Bias + activation: the sum is written only if the activation's backward reads it."""

    def __init__(self, basic_ops: Sequence[Any]) -> None:
        super().__init__(basic_ops)
        self._functions: Any = None  # for as long as this plan
        if find_spec("triton") is not None:
            from . import kernels  # now that the fusion is used: this imports Triton

            self._kernels, self._functions = kernels, kernels.functions_for(basic_ops[1])

    def planned(self, env: Environment) -> None:
        """Say for reports why the twin runs, if it does."""
        name = type(self.basic_ops[1]).__name__
        unknown = f"the kernel does not compute {name}" if self._functions is None else ""
        self.fallback = why_no_kernel(env.device, env.capability) or unknown

    def fuser_forward(
        self, basic_op_ctxs: list[OperationContext], input_: Tensor, **unused: Any
    ) -> tuple[Tensor, Any]:
        """The output, and no extra outputs. Leaves for the backward what the ops would."""
        bias_ctx, ctx = basic_op_ctxs
        (bias,) = bias_ctx.params  # of this call: never self.basic_ops[0].bias
        dtype = ctx.dtype or input_.dtype  # autocast may ask for another one
        activation: Any = self.basic_ops[1]
        keep = ctx.requires_grad and ctx.input_requires_grad and not activation.saves_output
        functions = self._functions
        if functions is not None and self._kernels.takes(input_, bias, dtype):
            numbers = functions.numbers(activation.numbers_of())
            output, hidden = self._kernels.bias_activation(input_, bias, functions, numbers, keep)
        else:
            output, hidden = twin(input_, bias, activation, dtype, keep)
        # leave what the activation does: its input or its output, and its numbers if it has any
        if ctx.requires_grad:
            activation.operand(ctx, hidden if keep else output)
        return output, [(), ()]


def twin(
    x: Tensor, bias: Tensor, activation: Any, dtype: torch.dtype, keep: bool
) -> tuple[Tensor, Tensor | None]:
    """``activation(x + bias)`` in ``dtype`` and, if ``keep``, its input, by PyTorch."""
    hidden = (x + bias).to(x.dtype).to(dtype)
    return activation.forward_value(hidden), hidden if keep else None


def pays(ops: Any, env: Environment) -> bool | str:
    """Asked while planning: True, or the sentence that ``opfuse.explain`` shows."""
    if env.compiling:
        return "torch.compile fuses a bias and an activation by itself"
    return True


FORWARD = [Fusion((Bias, Subclasses(Activation)), BiasActivation, pays, name="bias+activation")]
