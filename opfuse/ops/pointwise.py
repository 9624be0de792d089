"""Ops with little or no computation: ConstantScale and Reshape."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from ..core.op import BasicOperation
from ..core.op_context import Unread
from ._common import OpGrads, RowwiseOperation, expected, shows, whole


class ConstantScale(RowwiseOperation):
    """``y = scale * x``, for any shape, in the dtype of the input.

    Args:
        scale: The constant.

    Raises:
        TypeError: ``scale`` is not a real number.
    """

    saved_names = ()
    context_names = ("scale",)
    batch_invariant = ("rows", "exact")
    real_numbers = ("scale",)
    feature_ratio = 1

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    extra_repr = shows("scale")

    def op_forward(self, ctx: Any, input_: Tensor, prev_op_grad_output_quantizer: Unread = None,
                   next_op_input_quantizer: Unread = None) -> Tensor:  # fmt: skip
        """The product; saves no tensor, leaves ``ctx.scale``."""
        if ctx.requires_grad:
            ctx.scale = self.scale
        return input_ * self.scale

    def op_backward(self, ctx: Any, grad_output: Tensor) -> OpGrads:
        """``dx = scale * dy``, with the forward's ``scale``."""
        return grad_output * ctx.scale, ()


class Reshape(BasicOperation):
    """``y = x.reshape(shape)``.

    Args:
        shape: The new shape; one size may be -1, which is then inferred.

    Raises:
        TypeError: A size is not a whole number.
        ValueError: A size is less than -1, or several are -1.
    """

    saved_names = ()
    context_names = ("input_shape",)
    batch_invariant = ("exact",)
    grad_input = "same"
    differentiable = True

    def __init__(self, shape: Iterable[int]) -> None:
        super().__init__()
        shape = tuple(shape)
        sizes = [whole(size) for size in shape]
        self.shape = tuple([size for size in sizes if size is not None])
        if len(self.shape) != len(shape):
            raise TypeError(expected(self, "whole numbers as shape", shape))
        if any(size < -1 for size in self.shape) or self.shape.count(-1) > 1:
            what = "sizes of at least 0 and one -1 at most"
            raise ValueError(expected(self, what, self.shape))
        if self.shape and self.shape[-1] >= 0:
            self.out_features = self.shape[-1]

    extra_repr = shows("shape")

    def op_forward(self, ctx: Any, input_: Tensor, prev_op_grad_output_quantizer: Unread = None,
                   next_op_input_quantizer: Unread = None) -> Tensor:  # fmt: skip
        """The reshaped input; saves no tensor."""
        if ctx.requires_grad:
            ctx.input_shape = input_.shape
        return input_.reshape(self.shape)

    def op_backward(self, ctx: Any, grad_output: Tensor) -> OpGrads:
        """The gradient in the input's shape."""
        return grad_output.reshape(ctx.input_shape), ()
