"""The fused op, and where it may stand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from opfuse import Environment, FusedOperation, Fusion, OperationContext, Subclasses
from opfuse.ops import Activation, Bias


class BiasActivation(FusedOperation):
    """Bias + activation: the sum is written only if the activation's backward reads it."""

    def __init__(self, basic_ops: Sequence[Any]) -> None:
        super().__init__(basic_ops)
        from . import kernels  # now that the fusion is used: this imports Triton

        # for as long as this plan
        self._kernel, self._known = kernels.bias_activation, kernels.known(basic_ops[1])

    def fuser_forward(
        self, basic_op_ctxs: list[OperationContext], input_: Tensor, **unused: Any
    ) -> tuple[Tensor, Any]:
        """The output, and no extra outputs. Leaves for the backward what the ops would."""
        bias_ctx, ctx = basic_op_ctxs
        (bias,) = bias_ctx.params  # of this call: never self.basic_ops[0].bias
        dtype = ctx.dtype or input_.dtype  # autocast may ask for another one
        keep = ctx.requires_grad and ctx.input_requires_grad
        activation: Any = self.basic_ops[1]
        output, hidden = self._kernel(input_, bias, activation, self._known, dtype=dtype, keep=keep)
        # leave what the activation does: its input, and its numbers if it has any
        if ctx.requires_grad:
            activation.operand(ctx, hidden if keep else output)
        return output, [(), ()]


def pays(ops: Any, env: Environment) -> bool | str:
    """Asked while planning: True, or the sentence that ``opfuse.explain`` shows."""
    if env.compiling:
        return "torch.compile fuses a bias and an activation by itself"
    return True


FORWARD = [Fusion((Bias, Subclasses(Activation)), BiasActivation, pays, name="bias+activation")]
