"""The kernel of a dropout, and how it is launched."""
# ruff: noqa: ANN202  # device functions take what they are given

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from opfuse_triton import Config, Kernel, Target, cdiv, next_power_of_2

from . import normalized_dtype
from .drop import Drop


@triton.jit
def _factor(number, threshold, scale):
    return tl.where((number >> 8).to(tl.float32) >= threshold, scale, 0.0)


@triton.jit
def keep_factors(seed_ptr, row, first, threshold, scale, BLOCK: tl.constexpr):
    """What the columns ``first`` to ``first + BLOCK`` of some rows are multiplied by.

    ``row`` is of shape ``[ROWS, 1]``; ``first`` and ``BLOCK`` are multiples of 4. See
    :mod:`opfuse_triton.norms.drop`.
    """
    group = first // 4 + tl.arange(0, BLOCK // 4)[None, :]
    rows = row.to(tl.int64) + tl.zeros_like(group)
    groups = group.to(tl.uint32) + tl.zeros_like(row).to(tl.uint32)
    words = rows.to(tl.uint32), (rows >> 32).to(tl.uint32)
    a, b, c, d = tl.philox(tl.load(seed_ptr), groups, words[0], words[1], tl.zeros_like(groups))
    even = tl.join(_factor(a, threshold, scale), _factor(c, threshold, scale))
    odd = tl.join(_factor(b, threshold, scale), _factor(d, threshold, scale))
    return tl.reshape(tl.join(even, odd), (row.shape[0], BLOCK))


@triton.jit
def dropout_kernel(
    x_ptr,
    extra_ptr,
    y_ptr,
    seed_ptr,
    rows,
    features,
    threshold,
    scale,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A tile of ``ROWS`` rows and ``BLOCK`` columns."""
    columns = (features - 1) // BLOCK + 1  # tl.cdiv would overflow
    row = (tl.program_id(0) // columns).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    first = (tl.program_id(0) % columns).to(tl.int64) * BLOCK
    place = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (place < tl.minimum(features - first, BLOCK).to(tl.int32))
    start = row * features + first
    x = tl.load(x_ptr + start + place, inside, other=0.0)
    kept = x.to(tl.float32) * keep_factors(seed_ptr, row, first, threshold, scale, BLOCK)
    y = kept.to(x.dtype).to(tl.float32)
    if extra_ptr is not None:
        y += tl.load(extra_ptr + start + place, inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + start + place, y.to(y_ptr.dtype.element_ty), inside)


def _configs(target: Target, facts: Mapping[str, Any]) -> list[Config]:
    """Tiles of 2048 numbers, 16 per thread; then others to measure."""
    found = []
    for size, warps in ((2048, 4), (4096, 8), (1024, 4)):
        warps = min(warps, size // 512) if target.backend == "hip" else warps  # of 64 threads
        block = max(4, min(size, next_power_of_2(facts["features"])))
        found.append(Config({"ROWS": size // block, "BLOCK": block}, warps))
    return found


KERNEL = Kernel(dropout_kernel, _configs)


def dropout(
    x: Tensor, extra: Tensor | None, drop: Drop, config: Mapping[str, Any] | None = None
) -> Tensor:
    """Launch :func:`opfuse_triton.norms.drop.dropout` for contiguous tensors with elements.

    Args:
        x: As there.
        extra: See ``x``.
        drop: See ``x``.
        config: One of those of :data:`KERNEL`; None: the first.
    """
    features = x.shape[-1] if x.ndim else 1
    rows, y = x.numel() // features, torch.empty_like(x, dtype=normalized_dtype(x, extra))
    KERNEL.launch(
        lambda chosen: (cdiv(rows, chosen["ROWS"]) * cdiv(features, chosen["BLOCK"]),),
        *(x, extra, y, drop.seed, rows, features, drop.threshold, drop.scale),
        config=config,
    )
    return y
