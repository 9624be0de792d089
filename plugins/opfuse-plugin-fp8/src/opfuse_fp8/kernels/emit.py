"""How a tile of values becomes codes: the last part of every kernel that casts.

A tile is a matrix of fp32 values, already rounded to the dtype that the separate ops give, and 0
outside. It starts at a multiple of its sides, or of a block's.
"""
# kernels take what they are given

from __future__ import annotations

import triton
import triton.language as tl

from .device import (
    codes_of,
    exponent_of,
    inverse_of,
    largest,
    place_of,
    scale_of,
    scale_of_exponent,
)


@triton.jit
def record(v, amax_ptr):
    """Raise the largest magnitude so far to that of a tile.

    As integers the bits of numbers that are not negative are in the same order, and -1 is below all
    of them: so the result does not depend on the order of the programs.
    """
    bits = largest(v).to(tl.int32, bitcast=True)
    at = amax_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    # few programs have more than those before them; an old value read here is only smaller
    tl.atomic_max(at, bits, mask=bits > tl.load(at), sem="relaxed")


@triton.jit
def _emit_with_scale(
    v, row, column, inside, rows, columns,
    row_ptr, inverse_ptr, column_ptr, kept_ptr, scale_ptr, count_ptr,
    IS_AMAX: tl.constexpr, MANTISSA: tl.constexpr, POWER_OF_2: tl.constexpr,
):  # fmt: skip
    """One scale, which is known or follows from an amax: both copies have the same codes."""
    scale = tl.load(scale_ptr)
    if IS_AMAX:
        if count_ptr is not None:
            tl.atomic_add(count_ptr, 1, (scale == float("inf")) & (tl.program_id(0) == 0))
        scale = scale_of(scale, MANTISSA, POWER_OF_2, 3.4028234663852886e38)
    codes = codes_of(v, scale, MANTISSA)
    if row_ptr is not None:
        tl.store(row_ptr + row * columns + column, codes, inside)
    if column_ptr is not None:
        tl.store(column_ptr + column.to(tl.int64) * rows + row, codes, inside)
    if tl.program_id(0) == 0:
        tl.store(inverse_ptr, inverse_of(scale, POWER_OF_2))
        if kept_ptr is not None:
            tl.store(kept_ptr, scale)


@triton.jit
def _emit_blocks(
    v, first_row, first_column, row, column, inside, rows, columns, stop,
    row_ptr, row_scale_ptr, column_ptr, column_scale_ptr,
    MANTISSA: tl.constexpr,
    POWER_OF_2: tl.constexpr, IF_INFINITE: tl.constexpr,
):  # fmt: skip
    """A scale for 128 values: along the rows for one copy, along the columns for the other."""
    tall: tl.constexpr = v.shape[0]
    wide: tl.constexpr = v.shape[1]
    if row_ptr is not None:
        each: tl.constexpr = wide if wide < 128 else 128
        blocks = tl.reshape(v, (tall, wide // each, each))
        scale = scale_of(largest(blocks, 2), MANTISSA, POWER_OF_2, IF_INFINITE)
        codes = tl.reshape(codes_of(blocks, scale, MANTISSA), (tall, wide))
        tl.store(row_ptr + row * columns + column, codes, inside)
        block = first_column // 128 + tl.arange(0, wide // each)[None, :]
        inverse = inverse_of(tl.reshape(scale, (tall, wide // each)), POWER_OF_2)
        there = (row < rows) & (block * 128 < stop)
        tl.store(row_scale_ptr + block.to(tl.int64) * rows + row, inverse, there)
    if column_ptr is not None:
        scale = scale_of(largest(v, 0), MANTISSA, POWER_OF_2, IF_INFINITE)
        codes = codes_of(v, scale, MANTISSA)
        tl.store(column_ptr + column.to(tl.int64) * rows + row, codes, inside)
        at = first_row // 128 * columns + column
        tl.store(column_scale_ptr + at, inverse_of(scale, POWER_OF_2), column < stop)


@triton.jit
def _emit_square(
    v, first_row, first_column, row, column, inside, rows, columns, stop,
    row_ptr, row_scale_ptr, column_ptr, column_scale_ptr,
    MANTISSA: tl.constexpr,
    POWER_OF_2: tl.constexpr, IF_INFINITE: tl.constexpr,
):  # fmt: skip
    """A scale for the whole tile of 128 x 128: both copies have the same codes."""
    scale = scale_of(largest(v), MANTISSA, POWER_OF_2, IF_INFINITE)
    codes, inverse = codes_of(v, scale, MANTISSA), inverse_of(scale, POWER_OF_2)
    down, across = first_row // 128, first_column // 128
    if row_ptr is not None:
        tl.store(row_ptr + row * columns + column, codes, inside)
        width = tl.cdiv(tl.cdiv(columns, 128), 4) * 4
        tl.store(row_scale_ptr + down * width + across, inverse)
    if column_ptr is not None:
        tl.store(column_ptr + column.to(tl.int64) * rows + row, codes, inside)
        width = tl.cdiv(tl.cdiv(rows, 128), 4) * 4
        tl.store(column_scale_ptr + across.to(tl.int64) * width + down, inverse)


@triton.jit
def _emit_mx(
    v, first_row, first_column, row, column, inside, rows, columns, stop,
    row_ptr, row_scale_ptr, column_ptr, column_scale_ptr,
    MANTISSA: tl.constexpr, SWIZZLED: tl.constexpr,
):  # fmt: skip
    """A power of two for 32 values: along the rows for one copy, the columns for the other."""
    tall: tl.constexpr = v.shape[0]
    wide: tl.constexpr = v.shape[1]
    if row_ptr is not None:
        blocks = tl.reshape(v, (tall, wide // 32, 32))
        exponent = exponent_of(largest(blocks, 2), MANTISSA)
        codes = codes_of(blocks, scale_of_exponent(exponent), MANTISSA)
        codes = tl.reshape(codes, (tall, wide))
        tl.store(row_ptr + row * columns + column, codes, inside)
        block = first_column // 32 + tl.arange(0, wide // 32)[None, :]
        at = place_of(row, block, columns // 32, SWIZZLED)
        exponent = tl.reshape(exponent, (tall, wide // 32)).to(tl.uint8)
        tl.store(row_scale_ptr + at, exponent, (row < rows) & (block < stop // 32))
    if column_ptr is not None:
        blocks = tl.reshape(v, (tall // 32, 32, wide))
        exponent = exponent_of(largest(blocks, 1), MANTISSA)
        codes = codes_of(blocks, scale_of_exponent(exponent), MANTISSA)
        codes = tl.reshape(codes, (tall, wide))
        tl.store(column_ptr + column.to(tl.int64) * rows + row, codes, inside)
        block = first_row // 32 + tl.arange(0, tall // 32)[:, None]
        at = place_of(column.to(tl.int64), block, rows // 32, SWIZZLED)
        exponent = tl.reshape(exponent, (tall // 32, wide)).to(tl.uint8)
        tl.store(column_scale_ptr + at, exponent, (column < stop) & (block < rows // 32))


@triton.jit
def emit(
    v, first_row, first_column, rows, columns, stop,
    wide_ptr, row_ptr, row_scale_ptr, column_ptr, column_scale_ptr, scale_ptr, amax_ptr,
    FORMAT: tl.constexpr, MANTISSA: tl.constexpr,
    POWER_OF_2: tl.constexpr, IF_INFINITE: tl.constexpr,
):  # fmt: skip
    """Write a tile as ``FORMAT`` has it.

    Args:
        v: The values, fp32.
        first_row: The first row of the tile, int64.
        first_column: Its first column.
        rows: How many there are.
        columns: Likewise.
        stop: The first column after the tile.
        wide_ptr: Where the values themselves go, or None.
        row_ptr: Where the rowwise codes go, or None.
        row_scale_ptr: Where their scales go; of one scale, where its inverse goes.
        column_ptr: Where the columnwise codes go, or None.
        column_scale_ptr: Where their scales go; of one scale, where that goes itself, or None.
        scale_ptr: The one scale for ``"tensor"``, the largest magnitude of all for ``"amax"``.
        amax_ptr: The largest magnitude so far, raised to that of the tile; for ``"amax"`` how often
            it was infinite, int32; or None.
        FORMAT: ``"none"``, ``"tensor"``, ``"amax"``, ``"block"``, ``"square"``, ``"mx"`` or
            ``"swizzled mx"``.
        MANTISSA: 3 or 2 bits.
        POWER_OF_2: Whether scales are powers of two.
        IF_INFINITE: What replaces a scale of a block that is infinite.
    """
    row = first_row + tl.arange(0, v.shape[0])[:, None]
    column = first_column + tl.arange(0, v.shape[1])[None, :]
    inside = (row < rows) & (column < stop)
    if wide_ptr is not None:
        tl.store(wide_ptr + row * columns + column, v.to(wide_ptr.dtype.element_ty), inside)
    if amax_ptr is not None and FORMAT != "amax":
        record(v, amax_ptr)
    if FORMAT == "tensor" or FORMAT == "amax":
        _emit_with_scale(
            v, row, column, inside, rows, columns,
            row_ptr, row_scale_ptr, column_ptr, column_scale_ptr, scale_ptr, amax_ptr,
            FORMAT == "amax", MANTISSA, POWER_OF_2,
        )  # fmt: skip
    elif FORMAT == "block":
        _emit_blocks(
            v, first_row, first_column, row, column, inside, rows, columns, stop,
            row_ptr, row_scale_ptr, column_ptr, column_scale_ptr,
            MANTISSA, POWER_OF_2, IF_INFINITE,
        )  # fmt: skip
    elif FORMAT == "square":
        _emit_square(
            v, first_row, first_column, row, column, inside, rows, columns, stop,
            row_ptr, row_scale_ptr, column_ptr, column_scale_ptr,
            MANTISSA, POWER_OF_2, IF_INFINITE,
        )  # fmt: skip
    elif FORMAT == "mx" or FORMAT == "swizzled mx":
        _emit_mx(
            v, first_row, first_column, row, column, inside, rows, columns, stop,
            row_ptr, row_scale_ptr, column_ptr, column_scale_ptr,
            MANTISSA, FORMAT == "swizzled mx",
        )  # fmt: skip
