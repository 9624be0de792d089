"""Grouped products in Triton: each row is multiplied by the matrix of its group.

The rows of a group follow one another. Where a group ends is read on the device: a program takes
every ``num_programs``-th tile of all groups, and finds the group of a tile by itself. A tile never
has rows of two groups. Products are added up in fp32.

Arguments of the kernels:

- ``x``: ``(rows, depth)``, with contiguous features.
- ``w``: the matrix of the first group; that of group ``g`` is ``table[g]`` elements after it, or
  ``g * w_group`` if there is no table. ``w_feature`` and ``w_depth`` are its strides.
- ``ends``: ``(groups,)``, int32.
- ``bias``: ``(groups, features)``, or None. ``scales``: ``(rows,)``, or None.
- ``x_inverse``, ``w_inverse``: of FP8 codes, what those of each group are multiplied by, or None.
- ``EXACT``: whether Hopper's tensor cores, which add up FP8 products in fewer bits than fp32 has,
  do so within ``BLOCK_K`` of them only.
- ``GROUPS``: the power of two from ``groups`` on. ``ALIGNED``: what divides all of ``table``.
"""

from __future__ import annotations

import triton
import triton.language as tl
from opfuse_triton.grouped import place_of, tiles_of


@triton.jit
def matrix_of(group, w, table, w_group, ALIGNED: tl.constexpr):
    """The matrix of a group."""
    if table is None:
        at = group.to(tl.int64) * w_group
    else:
        at = tl.multiple_of(tl.load(table + group), ALIGNED)
    return w + at


@triton.jit
def row_product(
    x, matrix, row, feature, depth, x_stride, w_feature, w_depth,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    EXACT: tl.constexpr = False,
):  # fmt: skip
    """The product of rows with features of a matrix, in fp32."""
    most: tl.constexpr = BLOCK_K if EXACT else None
    along = tl.arange(0, BLOCK_K)
    far = along.to(tl.int64)
    of_x = x + row[:, None] * x_stride + far[None, :]
    of_w = matrix + far[:, None] * w_depth + feature.to(tl.int64)[None, :] * w_feature
    product = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range(tl.cdiv(depth, BLOCK_K)):
        inside = along < depth - step * BLOCK_K
        left = tl.load(of_x, inside[None, :], other=0.0)
        right = tl.load(of_w, inside[:, None], other=0.0)
        product = tl.dot(
            left, right, product, input_precision=PRECISION, max_num_imprecise_acc=most
        )  # fmt: skip
        of_x += BLOCK_K
        of_w += tl.full((), BLOCK_K, tl.int64) * w_depth
    return product


@triton.jit
def grouped_product(
    x, w, table, ends, x_inverse, w_inverse, bias, scales, y,
    groups, rows, features, depth, x_stride, w_group, w_feature, w_depth,
    EXACT: tl.constexpr, PRECISION: tl.constexpr, ALIGNED: tl.constexpr, GROUPS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """``y = x @ w.T + bias``, where the bias is multiplied by the scale of the row if there is one.

    The product is rounded before a scaled bias is added, as between separate operations.
    """
    dtype: tl.constexpr = y.dtype.element_ty
    columns = tl.cdiv(features, BLOCK_N)
    first, stop, tiles = tiles_of(ends, groups, rows, columns, GROUPS, BLOCK_M)
    for tile in range(tl.program_id(0), tl.sum(tiles), tl.num_programs(0)):
        group, start, end, column = place_of(tile, first, stop, tiles, GROUPS, BLOCK_M)
        row = (start + tl.arange(0, BLOCK_M)).to(tl.int64)
        feature = column * BLOCK_N + tl.arange(0, BLOCK_N)
        matrix = matrix_of(group, w, table, w_group, ALIGNED)
        # beyond the last row or feature another is read again, and not stored
        result = row_product(
            x, matrix, tl.minimum(row, end - 1), feature % features, depth,
            x_stride, w_feature, w_depth, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K, EXACT,
        )  # fmt: skip
        if x_inverse is not None:
            # one after the other: their product may be too small for fp32 where the result is not
            result = result * tl.load(x_inverse + group) * tl.load(w_inverse + group)
        if bias is not None:
            place = group.to(tl.int64) * features + feature
            added = tl.load(bias + place, feature < features, other=0.0).to(tl.float32)[None, :]
            if scales is not None:
                scale = tl.load(scales + row, row < end, other=0.0).to(tl.float32)
                result = result.to(dtype).to(tl.float32)
                added = added * scale[:, None]
            result += added
        stored = (row < end)[:, None] & (feature < features)[None, :]
        # few registers: places in a tile have 32 bits
        within = tl.arange(0, BLOCK_M)[:, None] * features + feature[None, :]
        tl.store(y + start.to(tl.int64) * features + within, result.to(dtype), stored)


@triton.jit
def halves_of(feature, features, INTERLEAVED: tl.constexpr, LINEAR_VALUE: tl.constexpr):
    """Where the gate of a feature is in the activation's input, and how far the other half is."""
    gate = feature
    apart = features
    if LINEAR_VALUE is not None and INTERLEAVED != 0:
        gate = feature + feature // INTERLEAVED * INTERLEAVED
        apart = INTERLEAVED
    return gate, apart


@triton.jit
def grouped_activated(
    x, w, table, ends, bias, scales, y, hidden, numbers,
    groups, rows, features, depth, x_stride, w_group, w_feature, w_depth,
    VALUE: tl.constexpr, LINEAR_VALUE: tl.constexpr, INTERLEAVED: tl.constexpr,
    PRECISION: tl.constexpr, ALIGNED: tl.constexpr, GROUPS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """``y = act(x @ w.T + bias) * scales``, and ``hidden``, the activation's input, or None.

    ``features`` are those of ``y``. The product is rounded before the activation, which gets what
    its backward reads.
    """
    dtype: tl.constexpr = y.dtype.element_ty
    wide = features if LINEAR_VALUE is None else 2 * features
    columns = tl.cdiv(features, BLOCK_N)
    first, stop, tiles = tiles_of(ends, groups, rows, columns, GROUPS, BLOCK_M)
    for tile in range(tl.program_id(0), tl.sum(tiles), tl.num_programs(0)):
        group, start, end, column = place_of(tile, first, stop, tiles, GROUPS, BLOCK_M)
        row = (start + tl.arange(0, BLOCK_M)).to(tl.int64)
        own_row = tl.minimum(row, end - 1)
        feature = column * BLOCK_N + tl.arange(0, BLOCK_N)
        matrix = matrix_of(group, w, table, w_group, ALIGNED)
        gate_at, apart = halves_of(feature % features, features, INTERLEAVED, LINEAR_VALUE)
        along = tl.arange(0, BLOCK_K)
        far = along.to(tl.int64)
        of_x = x + own_row[:, None] * x_stride + far[None, :]
        of_gate = matrix + far[:, None] * w_depth + gate_at.to(tl.int64)[None, :] * w_feature
        # another half of the matrix: an own pointer, not an own place for each number
        to_linear = tl.full((), apart, tl.int64) * w_feature
        gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        linear = gate
        for step in range(tl.cdiv(depth, BLOCK_K)):
            inside = along < depth - step * BLOCK_K
            left = tl.load(of_x, inside[None, :], other=0.0)
            right = tl.load(of_gate, inside[:, None], other=0.0)
            gate = tl.dot(left, right, gate, input_precision=PRECISION)
            if LINEAR_VALUE is not None:
                right = tl.load(of_gate + to_linear, inside[:, None], other=0.0)
                linear = tl.dot(left, right, linear, input_precision=PRECISION)
            of_x += BLOCK_K
            of_gate += tl.full((), BLOCK_K, tl.int64) * w_depth
        of_bias = bias
        if bias is not None:
            of_bias = bias + group.to(tl.int64) * wide
            gate += tl.load(of_bias + gate_at).to(tl.float32)[None, :]
        gate = gate.to(dtype)
        stored = (row < end)[:, None] & (feature < features)[None, :]
        within = tl.arange(0, BLOCK_M)[:, None]
        of_hidden = hidden
        if hidden is not None:
            of_hidden = hidden + start.to(tl.int64) * wide
            tl.store(of_hidden + within * wide + gate_at[None, :], gate, stored)
        result = VALUE(gate.to(tl.float32), *numbers)
        if LINEAR_VALUE is not None:
            if bias is not None:
                linear += tl.load(of_bias + apart + gate_at).to(tl.float32)[None, :]
            linear = linear.to(dtype)
            if hidden is not None:
                tl.store(of_hidden + apart + within * wide + gate_at[None, :], linear, stored)
            result *= LINEAR_VALUE(linear.to(tl.float32), *numbers)
        result *= tl.load(scales + row, row < end, other=0.0).to(tl.float32)[:, None]
        of_y = y + start.to(tl.int64) * features
        tl.store(of_y + within * features + feature[None, :], result.to(dtype), stored)
