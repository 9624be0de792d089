"""The kernels that cast groups of rows, each by itself."""

from __future__ import annotations

import triton
import triton.language as tl
from opfuse_triton.grouped import filled_of, place_of, tiles_of

from .device import codes_of, exponent_of, inverse_of, largest, scale_of, scale_of_exponent
from .emit import record


@triton.jit
def cast_groups(
    x_ptr, ends_ptr, row_ptr, column_ptr, inverse_ptr, scale_ptr, amax_ptr,
    groups, rows, features,
    IS_AMAX: tl.constexpr, MANTISSA: tl.constexpr, POWER_OF_2: tl.constexpr,
    GROUPS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Codes of all groups, as :class:`opfuse.ops.row_groups.GroupedTensor` has them.

    ``scale_ptr`` has a scale for each group, or its largest magnitude: then ``amax_ptr`` counts
    those that are infinite. Else it has the largest magnitudes so far, or is None. Without
    ``scale_ptr`` there are no codes.
    """
    most: tl.constexpr = 3.4028234663852886e38
    tile = tl.program_id(0)
    across = tl.cdiv(features, BLOCK_COLUMNS)
    first, stop, tiles = tiles_of(ends_ptr, groups, rows, across, GROUPS, BLOCK_ROWS)
    if scale_ptr is not None:
        if tile == 0:
            each = tl.arange(0, GROUPS)
            scales = tl.load(scale_ptr + each, each < groups, other=1.0)
            if IS_AMAX:
                if amax_ptr is not None:
                    infinite = (each < groups) & (scales == float("inf"))
                    tl.atomic_add(amax_ptr, tl.sum(infinite.to(tl.int32), 0))
                scales = scale_of(scales, MANTISSA, POWER_OF_2, most)
            tl.store(inverse_ptr + each, inverse_of(scales, POWER_OF_2), each < groups)
    if tile < tl.sum(tiles):
        group, start, end, side = place_of(tile, first, stop, tiles, GROUPS, BLOCK_ROWS)
        row = start + tl.arange(0, BLOCK_ROWS)[:, None]
        column = side * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)[None, :]
        in_columns = column < features
        inside = (row < end) & in_columns
        at = row.to(tl.int64) * features + column
        v = tl.load(x_ptr + at, inside, 0).to(tl.float32)
        if amax_ptr is not None and not IS_AMAX:
            record(v, amax_ptr + group)
        if scale_ptr is not None:
            scale = tl.load(scale_ptr + group)
            if IS_AMAX:
                scale = scale_of(scale, MANTISSA, POWER_OF_2, most)
            codes = codes_of(v, scale, MANTISSA)
            if row_ptr is not None:
                tl.store(row_ptr + at, codes, inside)
            if column_ptr is not None:
                # zeros fill up the rows of a group: the last tile has them
                begin, height = filled_of(group, first, stop, groups, rows, GROUPS, 16)
                own = tl.sum(tl.where(tl.arange(0, GROUPS) == group, first, 0))
                place = tl.multiple_of(start - own, 16) + tl.arange(0, BLOCK_ROWS)[:, None]
                to = column_ptr + begin.to(tl.int64) * features
                to += column.to(tl.int64) * height + place
                tl.store(to, codes, (place < height) & in_columns)


@triton.jit
def cast_mx_groups(
    x_ptr, ends_ptr, row_ptr, row_scale_ptr, column_ptr, column_scale_ptr,
    groups, rows, features,
    MANTISSA: tl.constexpr,
    GROUPS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """MX codes of all groups, as :class:`opfuse_quantized.grouped.GroupedMXTensor` has them."""
    tall: tl.constexpr = BLOCK_ROWS // 32
    wide: tl.constexpr = BLOCK_COLUMNS // 32
    tile = tl.program_id(0)
    across = tl.cdiv(features, BLOCK_COLUMNS)
    first, stop, tiles = tiles_of(ends_ptr, groups, rows, across, GROUPS, BLOCK_ROWS)
    if tile < tl.sum(tiles):
        group, start, end, side = place_of(tile, first, stop, tiles, GROUPS, BLOCK_ROWS)
        row = start + tl.arange(0, BLOCK_ROWS)[:, None]
        column = side * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)[None, :]
        in_columns = column < features
        inside = (row < end) & in_columns
        at = row.to(tl.int64) * features + column
        v = tl.load(x_ptr + at, inside, 0).to(tl.float32)
        if row_ptr is not None:
            blocks = tl.reshape(v, (BLOCK_ROWS, wide, 32))
            exponent = exponent_of(largest(blocks, 2), MANTISSA)
            codes = codes_of(blocks, scale_of_exponent(exponent), MANTISSA)
            tl.store(row_ptr + at, tl.reshape(codes, (BLOCK_ROWS, BLOCK_COLUMNS)), inside)
            block = side * wide + tl.arange(0, wide)[None, :]
            exponent = tl.reshape(exponent, (BLOCK_ROWS, wide)).to(tl.uint8)
            to = row_scale_ptr + row.to(tl.int64) * (features // 32) + block
            tl.store(to, exponent, (row < end) & (block < features // 32))
        if column_ptr is not None:
            blocks = tl.reshape(v, (tall, 32, BLOCK_COLUMNS))
            exponent = exponent_of(largest(blocks, 1), MANTISSA)
            codes = codes_of(blocks, scale_of_exponent(exponent), MANTISSA)
            # zeros fill up the rows of a group: the last tile has them
            begin, height = filled_of(group, first, stop, groups, rows, GROUPS, 32)
            own = tl.sum(tl.where(tl.arange(0, GROUPS) == group, first, 0))
            above = tl.multiple_of(start - own, 32)
            place = above + tl.arange(0, BLOCK_ROWS)[:, None]
            to = column_ptr + begin.to(tl.int64) * features
            to += column.to(tl.int64) * height + place
            codes = tl.reshape(codes, (BLOCK_ROWS, BLOCK_COLUMNS))
            tl.store(to, codes, (place < height) & in_columns)
            block = above // 32 + tl.arange(0, tall)[:, None]
            to = column_scale_ptr + begin.to(tl.int64) // 32 * features
            to += column.to(tl.int64) * (height // 32) + block
            exponent = tl.reshape(exponent, (tall, BLOCK_COLUMNS)).to(tl.uint8)
            tl.store(to, exponent, (block < height // 32) & in_columns)
