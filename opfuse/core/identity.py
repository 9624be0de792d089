"""Identity, and the base of ops that change nothing on the way."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .op import BasicOperation
from .op_context import Grads, OperationContext, Unread


class PassThrough(BasicOperation):
    """An op that returns its input as it is, and its gradient too."""

    saved_names = ()
    feature_ratio = 1
    keeps_rows = True
    batch_invariant = ("rows", "exact")
    grad_input = "same"
    differentiable = True

    def op_forward(self, ctx: Any, input_: Tensor, prev_op_grad_output_quantizer: Unread = None,
                   next_op_input_quantizer: Unread = None) -> Tensor:  # fmt: skip
        """Return the input, which the engine has cast if the op asks for it; save nothing."""
        return input_

    def op_backward(
        self, ctx: OperationContext, grad_output: Tensor
    ) -> tuple[Tensor | None, Grads]:
        """``dx = dy``, which the engine has cast if the op asks for it."""
        return grad_output, ()


class Identity(PassThrough):
    """``y = x``, for any shape."""
