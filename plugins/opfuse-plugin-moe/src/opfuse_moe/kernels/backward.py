"""The gradients of grouped products, in Triton; arguments as in ``forward``.

The gradient of an input is a grouped product too, with the matrices transposed.

Those of the matrices go to ``dw``, the contiguous matrix of the first group; that of group ``g`` is
``table[g]`` elements after it, or ``g * dw_group`` if there is no table. With ``ADDS`` they are
added to what is there, and matrices of groups without rows stay as they are; without, these become
zero. A matrix that is ``ABSENT`` in the table is not needed.
"""

from __future__ import annotations

import triton
import triton.language as tl
from opfuse_triton.grouped import filled_of, place_of, tiles_of

from .forward import halves_of, matrix_of, row_product
from .scaled import scaled_product

ABSENT = tl.constexpr(-(1 << 62))


@triton.jit
def grouped_gradients(
    dy, w, table, ends, scales, hidden, d_hidden, partial, numbers,
    groups, rows, features, depth, dy_stride, w_group, w_feature, w_depth,
    VALUE: tl.constexpr, DERIVATIVE: tl.constexpr,
    LINEAR_VALUE: tl.constexpr, LINEAR_DERIVATIVE: tl.constexpr, INTERLEAVED: tl.constexpr,
    PRECISION: tl.constexpr, ALIGNED: tl.constexpr, GROUPS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The gradient of ``hidden`` in ``act(hidden) * scales``, whose gradient is ``dy @ w``.

    ``partial`` is ``(columns of tiles, rows)``: in each column of tiles, the sum over its features
    of what a row adds to the gradient of its scale. None: that is not needed.
    """
    dtype: tl.constexpr = d_hidden.dtype.element_ty
    wide = features if LINEAR_VALUE is None else 2 * features
    columns = tl.cdiv(features, BLOCK_N)
    first, stop, tiles = tiles_of(ends, groups, rows, columns, GROUPS, BLOCK_M)
    for tile in range(tl.program_id(0), tl.sum(tiles), tl.num_programs(0)):
        group, start, end, column = place_of(tile, first, stop, tiles, GROUPS, BLOCK_M)
        row = (start + tl.arange(0, BLOCK_M)).to(tl.int64)
        feature = column * BLOCK_N + tl.arange(0, BLOCK_N)
        matrix = matrix_of(group, w, table, w_group, ALIGNED)
        product = row_product(
            dy, matrix, tl.minimum(row, end - 1), feature % features, depth,
            dy_stride, w_feature, w_depth, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        gradient = product.to(dtype).to(tl.float32)
        inside = (row < end)[:, None] & (feature < features)[None, :]
        gate_at, apart = halves_of(feature, features, INTERLEAVED, LINEAR_VALUE)
        within = tl.arange(0, BLOCK_M)[:, None] * wide + gate_at[None, :]
        of_hidden = hidden + start.to(tl.int64) * wide
        of_result = d_hidden + start.to(tl.int64) * wide
        scale = tl.load(scales + row, row < end, other=0.0).to(tl.float32)[:, None]
        gate = tl.load(of_hidden + within, inside, other=0.0).to(tl.float32)
        output = VALUE(gate, *numbers)
        scaled = gradient * scale
        if LINEAR_VALUE is None:
            result = scaled * DERIVATIVE(gate, *numbers)
            tl.store(of_result + within, result.to(dtype), inside)
        else:
            linear = tl.load(of_hidden + apart + within, inside, other=0.0).to(tl.float32)
            result = scaled * output * LINEAR_DERIVATIVE(linear, *numbers)
            tl.store(of_result + apart + within, result.to(dtype), inside)
            factor = LINEAR_VALUE(linear, *numbers)
            result = scaled * factor * DERIVATIVE(gate, *numbers)
            tl.store(of_result + within, result.to(dtype), inside)
            output *= factor
        if partial is not None:
            total = tl.sum(tl.where(inside, output * gradient, 0.0), 1)
            tl.store(partial + column.to(tl.int64) * rows + row, total, row < end)


@triton.jit
def bounds_of(ends, group, rows):
    """The first row of a group, and its end."""
    first = tl.load(ends + group - 1, group > 0, other=0)
    first = tl.minimum(tl.maximum(first, 0), rows)
    return first, tl.minimum(tl.maximum(tl.load(ends + group), first), rows)


@triton.jit
def height_of(group, table, height):
    """The rows of a group that are multiplied: none for a matrix that is not needed."""
    if table is not None:
        height = tl.where(tl.load(table + group) == ABSENT, 0, height)
    return height


@triton.jit
def store_part(
    product, tile, rows, stride, columns,
    ADDS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Store a part of a matrix that has this many rows and columns left, or add it, in fp32."""
    row, column = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    stored = (row < rows)[:, None] & (column < columns)[None, :]
    # few registers: places in a tile have 32 bits
    place = tile + (row[:, None] * stride + column[None, :])
    if ADDS:
        product += tl.load(place, stored, other=0.0)
        tl.debug_barrier()  # a thread may write where another one reads
    tl.store(place, product.to(tile.dtype.element_ty), stored)


@triton.jit
def store_matrix(
    product, dw, table, group, height, top, side, features, depth, dw_group,
    ADDS: tl.constexpr, ALIGNED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Store the tile of a group's matrix that begins at ``(top, side)``, or add it, in fp32."""
    if ADDS:
        features = tl.where(height > 0, features, 0)
    elif table is not None:
        features = tl.where(tl.load(table + group) == ABSENT, 0, features)
    tile = matrix_of(group, dw, table, dw_group, ALIGNED) + (top.to(tl.int64) * depth + side)
    if ADDS:  # few registers: what is there is read in two parts
        HALF: tl.constexpr = BLOCK_N // 2
        left, right = product.reshape(BLOCK_M, 2, HALF).permute(0, 2, 1).split()
        store_part(left, tile, features - top, depth, depth - side, ADDS, BLOCK_M, HALF)
        tl.debug_barrier()
        store_part(
            right, tile + HALF, features - top, depth, depth - side - HALF, ADDS, BLOCK_M, HALF
        )  # fmt: skip
    else:
        store_part(product, tile, features - top, depth, depth - side, ADDS, BLOCK_M, BLOCK_N)


@triton.jit
def grouped_wgrad(
    dy, x, ends, dw, table,
    rows, features, depth, dy_stride, x_stride, dw_group,
    PRECISION: tl.constexpr, ADDS: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """``dw[g] = dy.T @ x`` over the rows of group ``g``: a tile of ``BLOCK_M`` features of ``dy``.

    Each program has one tile, and adds up ``BLOCK_K`` rows at a time.
    """
    across = tl.cdiv(depth, BLOCK_N)
    each = tl.cdiv(features, BLOCK_M) * across
    group, tile = tl.program_id(0) // each, tl.program_id(0) % each
    first, stop = bounds_of(ends, group, rows)
    height = height_of(group, table, stop - first)
    top, side = tile // across * BLOCK_M, tile % across * BLOCK_N
    feature = top.to(tl.int64) + tl.arange(0, BLOCK_M)
    column = side.to(tl.int64) + tl.arange(0, BLOCK_N)
    row = first.to(tl.int64) + tl.arange(0, BLOCK_K)
    of_dy = dy + row[:, None] * dy_stride + feature[None, :]
    of_x = x + row[:, None] * x_stride + column[None, :]
    product = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range(tl.cdiv(height, BLOCK_K)):
        inside = (tl.arange(0, BLOCK_K) < height - step * BLOCK_K)[:, None]
        left = tl.load(of_dy, inside & (feature < features)[None, :], other=0.0)
        right = tl.load(of_x, inside & (column < depth)[None, :], other=0.0)
        product = tl.dot(left.T, right, product, input_precision=PRECISION)
        of_dy += tl.full((), BLOCK_K, tl.int64) * dy_stride
        of_x += tl.full((), BLOCK_K, tl.int64) * x_stride
    store_matrix(
        product, dw, table, group, height, top, side, features, depth, dw_group,
        ADDS, ALIGNED, BLOCK_M, BLOCK_N,
    )  # fmt: skip


@triton.jit
def grouped_coded_wgrad(
    dy, x, ends, dy_scale, x_scale, dw, table,
    groups, rows, features, depth, dw_group,
    DY_FORMAT: tl.constexpr, X_FORMAT: tl.constexpr,
    GROUPS: tl.constexpr, ADDS: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """``dw[g] = dy.T @ x`` of FP8 codes, see :func:`grouped_wgrad`.

    ``dy`` and ``x`` are columnwise copies: the rows of a group follow one another, filled up with
    zeros, so that what is added up is contiguous in both, as Hopper's tensor cores need it. Each
    group has a scale; or with formats, each 32 codes have a byte.
    """
    FILLED: tl.constexpr = 16 if X_FORMAT is None else 32
    across = tl.cdiv(depth, BLOCK_N)
    each = tl.cdiv(features, BLOCK_M) * across
    group, tile = tl.program_id(0) // each, tl.program_id(0) % each
    first, stop, _ = tiles_of(ends, groups, rows, 1, GROUPS, BLOCK_M)
    begin, filled = filled_of(group, first, stop, groups, rows, GROUPS, FILLED)
    height = height_of(group, table, filled)
    top, side = tile // across * BLOCK_M, tile % across * BLOCK_N
    # beyond the last feature or column another is read again, and not stored
    feature = (top.to(tl.int64) + tl.arange(0, BLOCK_M)) % features
    column = (side.to(tl.int64) + tl.arange(0, BLOCK_N)) % depth
    of_dy, of_x = begin.to(tl.int64) * features, begin.to(tl.int64) * depth
    if X_FORMAT is None:
        product = row_product(
            dy + of_dy, x + of_x, feature, column, height, filled, filled, 1,
            "ieee", BLOCK_M, BLOCK_N, BLOCK_K, EXACT=True,
        )  # fmt: skip
        # one after the other: their product may be too small for fp32 where the result is not
        product = product * tl.load(dy_scale + group) * tl.load(x_scale + group)
    else:
        own, blocks = feature[:, None], filled // 32
        product = scaled_product(
            dy + of_dy + own * filled, dy_scale + of_dy // 32 + own * blocks,
            x + of_x + column[None, :] * filled, x_scale + of_x // 32 + column[:, None] * blocks,
            height, DY_FORMAT, X_FORMAT, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    store_matrix(
        product, dw, table, group, height, top, side, features, depth, dw_group,
        ADDS, ALIGNED, BLOCK_M, BLOCK_N,
    )  # fmt: skip


@triton.jit
def group_sums(
    dy, scales, ends, sums, rows, features, dy_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """``sums[g]``: the sum of the rows of group ``g``, each times its scale if there are scales."""
    columns = tl.cdiv(features, BLOCK_N)
    group, column = tl.program_id(0) // columns, tl.program_id(0) % columns
    first, stop = bounds_of(ends, group, rows)
    feature = column.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(first, stop, BLOCK_M):
        row = (start + tl.arange(0, BLOCK_M)).to(tl.int64)
        inside = (row < stop)[:, None] & (feature < features)[None, :]
        values = tl.load(dy + row[:, None] * dy_stride + feature[None, :], inside, other=0.0)
        values = values.to(tl.float32)
        if scales is not None:
            values *= tl.load(scales + row, row < stop, other=0.0).to(tl.float32)[:, None]
        total += tl.sum(values, 0)
    place = group.to(tl.int64) * features + feature
    tl.store(sums + place, total.to(sums.dtype.element_ty), feature < features)
