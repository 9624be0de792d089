"""The fused op, and where it may stand."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from opfuse import Environment, FusedOperation, Fusion, OperationContext, Subclasses
from opfuse.ops import Activation, Bias

from . import kernels


class BiasActivation(FusedOperation):
    """Bias + activation: the sum goes through memory only if the activation's backward needs it."""

    def fuser_forward(self, basic_op_ctxs: list[OperationContext], input_: Tensor, **unused: Any) -> tuple[Tensor, Any]:
        """The output, and no extra outputs. Leaves for the backward what the two ops would."""
        bias_ctx, ctx = basic_op_ctxs
        (bias,) = bias_ctx.params  # the values of this call: never read self.basic_ops[0].bias
        keep = ctx.requires_grad and ctx.input_requires_grad
        dtype = ctx.dtype or input_.dtype  # autocast may ask the activation for another dtype
        output, hidden = kernels.bias_activation(input_, bias, self.basic_ops[1], dtype=dtype, keep=keep)
        if ctx.requires_grad:
            ctx.save_for_backward(hidden)  # Activation.saved_names: ("input",); Bias saves nothing
        return output, [(), ()]


def pays(ops: Any, env: Environment) -> bool | str:
    """Asked while planning: True, or the sentence that ``opfuse.explain`` shows."""
    if env.compiling:
        return "torch.compile fuses a bias and an activation by itself"
    return True


FORWARD = [Fusion((Bias, Subclasses(Activation)), BiasActivation, pays, name="bias+activation")]
