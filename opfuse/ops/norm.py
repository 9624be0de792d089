"""Normalizations: LayerNorm, RMSNorm, L2Normalization."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..op import BasicOperation, OperationContext
from ._common import Grads, cast, check_shape, shows, sum_rows, wide


class _Norm(BasicOperation):
    """What LayerNorm and RMSNorm share: the shape, the parameters, and their arguments."""

    grad_input = "fresh"
    differentiable = True
    _has_bias = False

    def __init__(
        self,
        normalized_shape: int | Iterable[int],
        *,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        sm_margin: int | dict[str, int] = 0,
    ) -> None:
        super().__init__()
        self.normalized_shape = check_shape(self, "normalized_shape", normalized_shape)
        self._dims = tuple(range(-len(self.normalized_shape), 0))
        self.in_features = self.out_features = self.normalized_shape[-1]
        self.eps = float(eps)
        self.zero_centered_gamma = zero_centered_gamma
        margins = sm_margin.values() if isinstance(sm_margin, dict) else [sm_margin]
        if not all(isinstance(margin, int) for margin in margins):
            raise TypeError(f"{type(self).__name__} expected an int or a dict of ints as sm_margin, got {sm_margin!r}")
        self.sm_margin = sm_margin
        self.weight = nn.Parameter(torch.empty(self.normalized_shape, device=device, dtype=dtype))
        if self._has_bias:
            self.bias = nn.Parameter(torch.empty_like(self.weight))
        self.reset_parameters()

    def extra_repr(self) -> str:
        """The shape and the constants."""
        return f"{self.normalized_shape}, eps={self.eps}, zero_centered_gamma={self.zero_centered_gamma}"

    def reset_parameters(self) -> None:
        """Set the parameters to what normalizes and does nothing else."""
        nn.init.constant_(self.weight, 0.0 if self.zero_centered_gamma else 1.0)
        if self._has_bias:
            nn.init.zeros_(self.bias)

    def _check_input(self, x: Tensor) -> None:
        shape = self.normalized_shape  # of one dimension: the chain has checked it
        if len(shape) > 1 and x.shape[-len(shape) :] != shape:
            raise ValueError(f"{type(self).__name__} expected last dimensions {shape}, got shape {tuple(x.shape)}")

    def _scale(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """What the normalized values are multiplied by."""
        weight = cast(weight, dtype)
        return weight + 1 if self.zero_centered_gamma else weight


class LayerNorm(_Norm):
    """``y = (x - mean) / sqrt(var + eps) * weight + bias`` (Ba et al. 2016).

    Takes ``(..., *normalized_shape)`` and gives the same shape in the compute dtype; mean and (biased) variance
    are over ``normalized_shape``, in fp32 for half precision. ``weight`` and ``bias`` have shape
    ``normalized_shape``, any floating dtype, and start at 1 and 0.

    Args:
        normalized_shape: The last dimensions, or the last one.
        eps: Added to the variance.
        device: Device of the parameters; default: torch's.
        dtype: Dtype of the parameters; default: torch's.
        zero_centered_gamma: Multiply by ``1 + weight``; the weight then starts at 0.
        sm_margin: Multiprocessors that a CUDA kernel leaves free; without effect here.

    Raises:
        ValueError: ``normalized_shape`` is empty or negative; in a call, an input of another shape.
        TypeError: ``normalized_shape`` or ``sm_margin`` of the wrong type.
    """

    saved_names = ("input", "weight", "mean", "rstd")
    _has_bias = True

    def op_forward(  # type: ignore[override]
        self, ctx: OperationContext, input_: Tensor, *, prev_op_grad_output_quantizer: Any, next_op_input_quantizer: Any
    ) -> Tensor:
        """The output, in ``ctx.dtype``; saves ``(input, weight, mean, rstd)``, the input as it came."""
        self._check_input(input_)
        weight, bias = ctx.params
        dtype = wide(input_.dtype)
        # on the CPU torch's kernel mixes a half precision input with fp32 parameters and statistics
        x = input_ if input_.device.type == "cpu" else cast(input_, dtype)
        scale, shift = self._scale(weight, dtype), cast(bias, dtype)
        y, mean, rstd = torch.native_layer_norm(x, self.normalized_shape, scale, shift, self.eps)
        if ctx.requires_grad:
            saved = (input_, weight if ctx.input_requires_grad else None, mean, rstd)
            needed = ctx.input_requires_grad or ctx.param_requires_grad[0]
            ctx.save_for_backward(*(saved if needed else (None,) * 4))
        return cast(y, ctx.dtype or input_.dtype)

    def op_backward(self, ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, Grads]:
        """With ``n`` the normalized input and ``g = dy weight``: ``dx = rstd (g - mean(g) - n mean(g n))``."""
        input_, weight, mean, rstd = ctx.saved_tensors
        wants = [weight is not None, *ctx.param_requires_grad]
        if input_ is None:
            return None, (None, sum_rows(grad_output, len(self.normalized_shape)))
        dtype = mean.dtype
        scale = mean.new_ones(self.normalized_shape) if weight is None else self._scale(weight, dtype)
        # all in one dtype: mixed, torch's kernel on the CPU sums the weight's gradient in half precision
        dx, dw, db = torch.ops.aten.native_layer_norm_backward.default(
            cast(grad_output, dtype), cast(input_, dtype), self.normalized_shape, mean, rstd, scale, scale, wants
        )
        return (cast(dx, input_.dtype) if wants[0] else None), (dw if wants[1] else None, db if wants[2] else None)


class RMSNorm(_Norm):
    """``y = x / sqrt(mean(x^2) + eps) * weight`` (Zhang and Sennrich 2019).

    Takes ``(..., *normalized_shape)`` and gives the same shape in the compute dtype; the mean is over
    ``normalized_shape``, in fp32 for half precision. ``weight`` has shape ``normalized_shape``, any floating
    dtype, and starts at 1.

    Args:
        normalized_shape: The last dimensions, or the last one.
        eps: Added to the mean square.
        device: Device of the weight; default: torch's.
        dtype: Dtype of the weight; default: torch's.
        zero_centered_gamma: Multiply by ``1 + weight``; the weight then starts at 0.
        sm_margin: Multiprocessors that a CUDA kernel leaves free; without effect here.

    Raises:
        ValueError: ``normalized_shape`` is empty or negative; in a call, an input of another shape.
        TypeError: ``normalized_shape`` or ``sm_margin`` of the wrong type.
    """

    saved_names = ("input", "weight", "rstd")

    def op_forward(  # type: ignore[override]
        self, ctx: OperationContext, input_: Tensor, *, prev_op_grad_output_quantizer: Any, next_op_input_quantizer: Any
    ) -> Tensor:
        """The output, in ``ctx.dtype``; saves ``(input, weight, rstd)``, the input as it came."""
        self._check_input(input_)
        (weight,) = ctx.params
        dtype = wide(input_.dtype)
        x = cast(input_, dtype)
        rstd = torch.rsqrt(x.square().mean(self._dims, keepdim=True) + self.eps)
        if ctx.requires_grad:
            ctx.save_for_backward(input_, weight if ctx.input_requires_grad else None, rstd)
        return cast(x * rstd * self._scale(weight, dtype), ctx.dtype or input_.dtype)

    def op_backward(self, ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, Grads]:
        """With ``n`` the normalized input and ``g = dy weight``: ``dx = rstd (g - n mean(g n))``."""
        input_, weight, rstd = ctx.saved_tensors
        dtype = rstd.dtype
        normalized, dy = cast(input_, dtype) * rstd, cast(grad_output, dtype)
        dx = dw = None
        if weight is not None:
            g = dy * self._scale(weight, dtype)
            dx = cast(rstd * (g - normalized * (g * normalized).mean(self._dims, keepdim=True)), input_.dtype)
        if ctx.param_requires_grad[0]:
            dw = sum_rows(dy * normalized, len(self._dims))
        return dx, (dw,)


class L2Normalization(BasicOperation):
    """``y = x / sqrt(sum(x^2) + eps)`` over the last dimension.

    Takes and gives ``(..., n)``, in the compute dtype; the sum is in fp32 for half precision.

    Args:
        eps: Added to the sum of squares.
        seq_length: Accepted for Transformer Engine's signature; without effect.
        micro_batch_size: Accepted for Transformer Engine's signature; without effect.
    """

    saved_names = ("input", "rstd")
    feature_ratio = 1
    grad_input = "fresh"
    differentiable = True

    def __init__(
        self, *, eps: float = 1e-6, seq_length: int | None = None, micro_batch_size: int | None = None
    ) -> None:
        super().__init__()
        self.eps = float(eps)
        self.seq_length = seq_length
        self.micro_batch_size = micro_batch_size

    extra_repr = shows("eps")

    def op_forward(  # type: ignore[override]
        self, ctx: OperationContext, input_: Tensor, *, prev_op_grad_output_quantizer: Any, next_op_input_quantizer: Any
    ) -> Tensor:
        """The output, in ``ctx.dtype``; saves ``(input, rstd)``, the input as it came."""
        x = cast(input_, wide(input_.dtype))
        rstd = torch.rsqrt(x.square().sum(-1, keepdim=True) + self.eps)
        if ctx.requires_grad:
            ctx.save_for_backward(*((input_, rstd) if ctx.input_requires_grad else (None, None)))
        return cast(x * rstd, ctx.dtype or input_.dtype)

    def op_backward(self, ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, Grads]:
        """With ``n`` the normalized input: ``dx = rstd (dy - n sum(dy n))``."""
        input_, rstd = ctx.saved_tensors
        if input_ is None:
            return None, ()
        normalized, dy = cast(input_, rstd.dtype) * rstd, cast(grad_output, rstd.dtype)
        dx = rstd * (dy - normalized * (dy * normalized).sum(-1, keepdim=True))
        return cast(dx, input_.dtype), ()
