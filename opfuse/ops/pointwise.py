"""Ops with little or no computation: ConstantScale, Reshape and Dropout."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..core.op import BasicOperation
from ..core.op_context import Unread
from ._common import OpGrads, RowwiseOperation, require, shows, whole
from ._samples import samples
from ._split import Tracker, check_tracker, forked


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
    sample_inputs = samples(-0.75, 0.0, 1.0, 2.0**-13, 256.0)
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
        are_whole = len(self.shape) == len(shape)
        require(self, are_whole, "whole numbers as shape", shape, TypeError)
        fits = min(self.shape, default=0) >= -1 and self.shape.count(-1) <= 1
        require(self, fits, "sizes of at least 0 and one -1 at most", self.shape)
        if self.shape and self.shape[-1] >= 0:
            self.out_features = self.shape[-1]

    extra_repr = shows("shape")

    @classmethod
    def sample_inputs(cls, op: Any, features: int, out_features: int | None) -> list[Any]:
        """How tests make the op."""
        return [op(cls, (-1, features))]

    def op_forward(self, ctx: Any, input_: Tensor, prev_op_grad_output_quantizer: Unread = None,
                   next_op_input_quantizer: Unread = None) -> Tensor:  # fmt: skip
        """The reshaped input; saves no tensor."""
        if ctx.requires_grad:
            ctx.input_shape = input_.shape
        return input_.reshape(self.shape)

    def op_backward(self, ctx: Any, grad_output: Tensor) -> OpGrads:
        """The gradient in the input's shape."""
        return grad_output.reshape(ctx.input_shape), ()


class Dropout(RowwiseOperation):
    """Zeroes each element with probability ``p`` and scales the others by ``1 / (1 - p)``.

    See Srivastava et al. 2014. Takes and gives any shape, in the dtype of the input. Draws from
    torch's generator of the device. In evaluation mode, and for ``p=0``, it is the identity.

    Args:
        p: Probability of a zero.

    Raises:
        TypeError: ``p`` is not a real number.
        ValueError: ``p`` is not between 0 and 1.
    """

    saved_names = ("mask",)
    context_names = ("p",)
    real_numbers = ("p",)
    sample_inputs = samples(0.0, 0.5, 1.0)
    feature_ratio = 1
    grad_input = "same"

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p
        require(self, 0 <= self.p <= 1, "a probability p between 0 and 1", p)

    extra_repr = shows("p")

    @property
    def batch_invariant(self) -> tuple[str, ...]:  # type: ignore[override]
        """That of the identity, which it is in evaluation mode."""
        return () if self.training and self.p else ("rows", "exact")

    def op_forward(self, ctx: Any, input_: Tensor, prev_op_grad_output_quantizer: Unread = None,
                   next_op_input_quantizer: Unread = None) -> Tensor:  # fmt: skip
        """The output; saves ``(mask,)``, leaves ``ctx.p``.

        The mask is True where an element stays, and None where all do.
        """
        y, mask = input_, None
        if self.training and self.p:
            y, mask = torch.native_dropout(input_, self.p, True)
        if ctx.requires_grad:
            ctx.p = self.p
            ctx.save_for_backward(mask if ctx.input_requires_grad else None)
        return y

    def op_backward(self, ctx: Any, grad_output: Tensor) -> OpGrads:
        """``dx = dy * mask / (1 - p)``, with the forward's ``p``."""
        (mask,) = ctx.saved_tensors
        if mask is None:
            return grad_output, ()
        scale = 1 / (1 - ctx.p) if ctx.p < 1 else 0.0
        return torch.ops.aten.native_dropout_backward.default(grad_output, mask, scale), ()


class TrackedDropout(Dropout):
    """``Dropout`` whose mask each process draws for itself, for the parallel parts of a model.

    No fusion of ``Dropout`` takes it, since those draw in another way.

    Args:
        p: Probability of a zero.
        rng_state_tracker_function: As for :class:`BasicLinear`; ``fork()`` is around the draw.

    Raises:
        TypeError: ``p`` is not a real number, or the other is not a function.
        ValueError: ``p`` is not between 0 and 1.
    """

    saved_names = ("mask",)
    context_names = ("p",)
    grad_input = "same"
    keeps_rows = True
    differentiable = True

    def __init__(self, p: float, rng_state_tracker_function: Tracker) -> None:
        super().__init__(p)
        check_tracker(self, rng_state_tracker_function)
        self._tracker = rng_state_tracker_function

    def op_forward(self, ctx: Any, input_: Tensor, prev_op_grad_output_quantizer: Unread = None,
                   next_op_input_quantizer: Unread = None) -> Tensor:  # fmt: skip
        """As the base, with numbers of this process."""
        with forked(self._tracker):
            return super().op_forward(ctx, input_)

    op_backward = Dropout.op_backward
