"""A kernel that applies one function to every number of a tensor, and Triton's own functions."""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK = 1024


@triton.jit
def apply(x_ptr, y_ptr, FUNCTION: tl.constexpr, BLOCK: tl.constexpr):
    """``FUNCTION`` of fp32 numbers; there are whole blocks of them."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, FUNCTION(tl.load(x_ptr + at)))


@triton.jit
def triton_exp(x):
    """Triton's exponential."""
    return tl.exp(x)


@triton.jit
def triton_reciprocal(x):
    """Triton's quotient."""
    return 1.0 / x


@triton.jit
def triton_sigmoid(x):
    """Triton's sigmoid."""
    return tl.sigmoid(x)
