"""The fused op of both passes, and the condition for using it."""

from __future__ import annotations

from typing import Any

from opfuse import Environment, FusedOperation, Fusion, OperationContext, Subclasses
from opfuse.ops import Activation, RMSNorm
from opfuse.ops.authoring import cast, widen
from torch import Tensor
from torch.nn import Parameter


class NormActivation(FusedOperation):
    """RMSNorm + activation: the backward computes the input of the activation again."""

    grad_input = "fresh"

    def fuser_forward(
        self, basic_op_ctxs: list[Any], input_: Tensor, **given: Any
    ) -> tuple[Tensor, Any]:
        """The output, and no extra outputs. Leaves what this class reads in its backward."""
        norm, activation = self.basic_ops
        norm_ctx, ctx = basic_op_ctxs
        # a fact of this call, so it goes with the contexts: the op serves other calls, too
        ctx.is_fused = type(input_) in (Tensor, Parameter)  # a subclass may do something else
        if not ctx.is_fused:
            return self.run_separately(basic_op_ctxs, input_, **given)
        hidden = activation.operand(ctx, norm.op_forward(norm_ctx, input_))
        if ctx.requires_grad:
            _, _, rstd = norm_ctx.to_save
            norm_ctx.save_for_backward(input_, next(iter(norm_ctx.params), None), rstd)
            ctx.save_for_backward()  # not what the activation would keep
        return activation.forward_value(hidden), [(), ()]

    def fuser_backward(
        self, basic_op_ctxs: list[Any], grad_output: Tensor, **given: Any
    ) -> tuple[Tensor | None, Any, Any]:
        """The gradients of the input and of the weight."""
        norm, activation = self.basic_ops
        norm_ctx, ctx = basic_op_ctxs
        if not ctx.is_fused:  # then the ops left what their own backward reads
            return self.run_separately_backward(basic_op_ctxs, grad_output, **given)
        hidden = normalized(norm_ctx)
        hidden = cast(hidden, ctx.dtype or hidden.dtype)
        activation = activation.with_numbers(getattr(ctx, "numbers", ()))  # of the forward
        dhidden = activation.backward_value(cast(grad_output, hidden.dtype), hidden)
        dx, of_norm = norm.op_backward(norm_ctx, dhidden)
        return dx, [of_norm, ()], [(), ()]


def normalized(ctx: OperationContext) -> Tensor:
    """The output of the norm, from what its context has in the backward."""
    x, weight, rstd = ctx.saved_tensors or ()
    y = widen(x) * rstd
    if weight is not None:
        weight = cast(weight, y.dtype)
        y = y * (weight + 1 if ctx.zero_centered_gamma else weight)  # type: ignore[attr-defined]
    return cast(y, ctx.dtype or x.dtype)


def can(ops: Any, env: Environment) -> bool | str:
    """Asked while planning: True, or the sentence that ``opfuse.explain`` shows."""
    _, activation = ops
    if env.compiling:
        return "torch.compile chooses by itself what it computes again"
    if not activation.deterministic:
        return f"{type(activation).__name__} may give something else when it is computed again"
    if activation.cache_quantized_input:
        return f"{type(activation).__name__} keeps its input in FP8 already"
    return True


JOINT = [
    Fusion(
        (RMSNorm, Subclasses(Activation)),
        NormActivation,
        can,
        name="rmsnorm+activation",
        declares=("trades_time",),
    )
]
