"""Grouped products of FP8 codes with a power of two for each 32 that are added up (MX).

Both operands have what is added up in contiguous memory, and their scales likewise: ``(outer,
inner / 32)``, the biased exponents as bytes. Arguments otherwise as in ``forward``.
"""

from __future__ import annotations

import triton
import triton.language as tl
from opfuse_triton.grouped import place_of, tiles_of


@triton.jit
def scaled_product(
    of_x, of_x_scale, of_w, of_w_scale, depth,
    X_FORMAT: tl.constexpr, W_FORMAT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The product of rows with rows, in fp32; each argument points to the first of a row.

    ``of_x`` and its scale are ``(BLOCK_M, 1)``, those of ``w`` have ``BLOCK_N`` rows: ``(1,
    BLOCK_N)`` for the codes, which are multiplied transposed, and ``(BLOCK_N, 1)`` for the scales.
    """
    along, block = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_K // 32)
    product = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, depth, BLOCK_K):
        inside, known = start + along < depth, start // 32 + block < depth // 32
        left = tl.load(of_x + start + along[None, :], inside[None, :], other=0.0)
        right = tl.load(of_w + start + along[:, None], inside[:, None], other=0.0)
        at = start // 32 + block[None, :]
        left_scale = tl.load(of_x_scale + at, known[None, :], other=0)
        right_scale = tl.load(of_w_scale + at, known[None, :], other=0)
        product = tl.dot_scaled(
            left, left_scale, X_FORMAT, right, right_scale, W_FORMAT, product
        )  # fmt: skip
    return product


@triton.jit
def grouped_scaled_product(
    x, x_scale, w, w_scale, ends, bias, y,
    groups, rows, features, depth,
    X_FORMAT: tl.constexpr, W_FORMAT: tl.constexpr, GROUPS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """``y = x @ w.T + bias``; ``w`` is ``(groups, features, depth)``, and everything contiguous."""
    dtype: tl.constexpr = y.dtype.element_ty
    columns = tl.cdiv(features, BLOCK_N)
    first, stop, tiles = tiles_of(ends, groups, rows, columns, GROUPS, BLOCK_M)
    for tile in range(tl.program_id(0), tl.sum(tiles), tl.num_programs(0)):
        group, start, end, column = place_of(tile, first, stop, tiles, GROUPS, BLOCK_M)
        row = (start + tl.arange(0, BLOCK_M)).to(tl.int64)
        feature = column * BLOCK_N + tl.arange(0, BLOCK_N)
        # beyond the last row or feature another is read again, and not stored
        own = tl.minimum(row, end - 1)[:, None]
        matrix = group.to(tl.int64) * features + feature % features
        result = scaled_product(
            x + own * depth, x_scale + own * (depth // 32),
            w + matrix[None, :] * depth, w_scale + matrix[:, None] * (depth // 32), depth,
            X_FORMAT, W_FORMAT, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        if bias is not None:
            place = group.to(tl.int64) * features + feature
            result += tl.load(bias + place, feature < features, other=0.0).to(tl.float32)[None, :]
        stored = (row < end)[:, None] & (feature < features)[None, :]
        within = tl.arange(0, BLOCK_M)[:, None] * features + feature[None, :]
        tl.store(y + start.to(tl.int64) * features + within, result.to(dtype), stored)
