"""Scales and casts in plain PyTorch, exact to the bit: the reference for the kernels.

Numbers that are not finite stay so: infinity is infinity in E5M2 and NaN in E4M3, which has no
infinity. So an overflow of fp16 reaches a GradScaler. A finite number saturates, and one of fp64
that fp32 does not hold counts as the largest that it holds. The largest magnitude of a block or
tensor is that of its numbers; NaN does not count.
"""

from __future__ import annotations

import torch
from torch import Tensor

FP32_MAX = torch.finfo(torch.float32).max
_EXPONENT = 0x7F800000


def wide(values: Tensor) -> Tensor:
    """The values in fp32; finite fp64 values saturate instead of becoming infinite."""
    if values.dtype == torch.float64:
        values = torch.where(values.isinf(), values, values.clamp(-FP32_MAX, FP32_MAX))
    return values.float()


def largest(tensor: Tensor, dims: tuple[int, ...] | None = None) -> Tensor:
    """The largest magnitude in fp32, NaN left out; 0 of nothing.

    Args:
        tensor: The values.
        dims: The dimensions to go over, which stay as 1; None: all, and the result has shape (1,).
    """
    values = wide(tensor.detach()).abs()
    # isnan, and isinf below, by comparisons: compiled for a CPU, those take many values at a time
    values = torch.where(values == values, values, torch.zeros((), device=values.device))
    if not values.numel():
        sizes = [1 if i in (dims or ()) else size for i, size in enumerate(values.shape)]
        return values.new_zeros(sizes if dims else (1,))
    return values.amax(dims, keepdim=True) if dims else values.amax().reshape(1)


def scale_of(amax: Tensor, most: float, *, power_of_2: bool, if_infinite: float) -> Tensor:
    """The factor of the values: ``most / amax``; 1 where the amax is 0 or not finite.

    Args:
        amax: The largest magnitudes, fp32.
        most: The largest number of the dtype that values are cast to.
        power_of_2: Whether to round down to a power of two.
        if_infinite: What replaces a scale that fp32 cannot hold.
    """
    # a number divided by a tensor would be the tensor's reciprocal, times the number: rounded twice
    scale = torch.full_like(amax, most) / amax
    scale = torch.where(scale.isinf(), torch.full_like(scale, if_infinite), scale)
    if power_of_2:
        scale = (scale.view(torch.int32) & _EXPONENT).view(torch.float32)
    usable = (amax > 0) & amax.isfinite()
    return torch.where(usable, scale, torch.ones_like(scale))


def cast(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """``values * scale`` in fp32, rounded to nearest even, finite numbers saturated.

    Args:
        values: The values, of any dtype.
        scale: Broadcasts against them; fp32.
        dtype: An FP8 dtype.
    """
    most = torch.finfo(dtype).max
    exact = wide(values)
    scaled = (exact * scale).clamp(-most, most)
    # versions of torch convert infinity to E4M3 in different ways
    infinite = exact if dtype is torch.float8_e5m2 else torch.full_like(exact, torch.nan)
    return torch.where(exact.abs() == torch.inf, infinite, scaled).to(dtype)


def e8m0_of(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """The biased exponents of MX scales: that of ``amax / max``, rounded up.

    Args:
        amax: The largest magnitudes of blocks, fp32.
        dtype: The FP8 dtype of the values.

    Returns:
        uint8: 0 for a block of zeros, 254 where it holds infinity.
    """
    # the reciprocal in fp32 first, as the hardware's conversion has it
    reciprocal = torch.tensor(1.0 / torch.finfo(dtype).max, dtype=torch.float32)
    wanted = amax * reciprocal.to(amax.device)
    bits = wanted.view(torch.int32)
    exponent, mantissa = (bits >> 23) & 0xFF, bits & 0x7FFFFF
    # 2^-127, the least scale, is half of the first exponent's subnormal numbers
    covered = (mantissa == 0) | ((exponent == 0) & (mantissa <= 0x400000))
    exponent = exponent + (~covered & (exponent < 254)).int()
    return torch.where(wanted.isinf(), torch.full_like(exponent, 254), exponent).to(torch.uint8)


def e8m0_scale(exponent: Tensor) -> Tensor:
    """The factor of the values under MX scales: ``2^(127 - exponent)`` in fp32."""
    bits = (254 - exponent.int()) << 23
    return torch.where(exponent == 254, torch.full_like(bits, 0x400000), bits).view(torch.float32)
