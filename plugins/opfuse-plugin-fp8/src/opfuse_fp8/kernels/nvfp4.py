"""The kernels of NVFP4: the largest magnitudes, and the casts.

Bit for bit those of :mod:`opfuse_fp8.nvfp4`. A copy of a tile has its blocks along the last
dimension: of the columnwise copy the tile is transposed.
"""
# kernels take what they are given

from __future__ import annotations

import triton
import triton.language as tl

from .device import codes_of, place_of
from .emit import record

FP32_MAX = tl.constexpr(3.4028234663852886e38)


@triton.jit
def _sums_apart(v, APART: tl.constexpr):
    """Sums and differences of numbers that are so far apart, of 16 in the last dimension."""
    outer: tl.constexpr = v.shape[0]
    wide: tl.constexpr = v.shape[1]
    pairs = tl.reshape(v, (outer, wide // (2 * APART), 2, APART))
    one, other = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
    return tl.reshape(tl.permute(tl.join(one + other, one - other), (0, 1, 3, 2)), (outer, wide))


@triton.jit
def mixed(v, SIGNS: tl.constexpr, MOST: tl.constexpr, DTYPE: tl.constexpr):
    """The Hadamard transform of each 16 neighbours, rounded; NaN where one is not finite."""
    outer: tl.constexpr = v.shape[0]
    wide: tl.constexpr = v.shape[1]
    place = tl.arange(0, wide)[None, :] % 16
    # Triton 3.6 negates by subtracting from 0, which loses the sign of 0
    sums = v * tl.where((SIGNS >> place) & 1 == 1, -0.0625, 0.0625)
    for apart in tl.static_range(4):
        sums = _sums_apart(sums, 1 << apart)
    found = sums * 0.25 * 16.0
    found = tl.minimum(tl.maximum(found, -MOST), MOST)
    endless = tl.where(tl.abs(v) < float("inf"), 0, 1)  # NaN is not less either
    bad = tl.max(tl.reshape(endless, (outer, wide // 16, 16)), 2, keep_dims=True)
    found = tl.where(bad > 0, float("nan"), tl.reshape(found, (outer, wide // 16, 16)))
    return tl.reshape(found, (outer, wide)).to(DTYPE).to(tl.float32)


@triton.jit
def _turned(v, SIGNS: tl.constexpr, MOST: tl.constexpr, DTYPE: tl.constexpr):
    """The tile of the columnwise copy, in fp32."""
    turned = tl.trans(v).to(tl.float32)
    if SIGNS is not None:
        turned = mixed(turned, SIGNS, MOST, DTYPE)
    return turned


@triton.jit
def _tile(x_ptr, rows, columns, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr):
    """The values of a tile, 0 outside, its first row and its first column."""
    tiles = tl.cdiv(columns, BLOCK_COLUMNS)
    first = tl.program_id(0) % tiles * BLOCK_COLUMNS
    first_row = (tl.program_id(0) // tiles).to(tl.int64) * BLOCK_ROWS
    row = first_row + tl.arange(0, BLOCK_ROWS)[:, None]
    column = first + tl.arange(0, BLOCK_COLUMNS)[None, :]
    v = tl.load(x_ptr + row * columns + column, (row < rows) & (column < columns), 0)
    return v, first_row, first


@triton.jit
def nvfp4_amax(
    x_ptr, amax_ptr, rows, columns,
    ROW: tl.constexpr, SIGNS: tl.constexpr, MOST: tl.constexpr, DTYPE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Raise the largest magnitudes to those of a tile: of its values, and of those mixed."""
    v, _, _ = _tile(x_ptr, rows, columns, BLOCK_ROWS, BLOCK_COLUMNS)
    if ROW:
        record(v.to(tl.float32), amax_ptr)
    if SIGNS is not None:
        record(_turned(v, SIGNS, MOST, DTYPE), amax_ptr + 1 if ROW else amax_ptr)


@triton.jit
def _encode(amax):
    """The factor of all values, see :func:`opfuse_fp8.nvfp4.tensor_scale`."""
    scale = tl.div_rn(tl.zeros_like(amax) + 6.0 * 448.0, amax)
    scale = tl.where(scale == float("inf"), FP32_MAX, scale)
    return tl.where((amax > 0.0) & (amax < float("inf")), scale, 1.0)


@triton.jit
def _value_of(code):
    """What a code of E4M3 without sign stands for; by arithmetic, for targets without E4M3."""
    code = code.to(tl.int32)
    exponent, rest = code >> 3, code & 7
    normal = (((exponent + 120) << 23) | (rest << 20)).to(tl.float32, bitcast=True)
    return tl.where(exponent > 0, normal, rest.to(tl.float32) * 0.001953125)


@triton.jit
def _scaled(v, scale, decode):
    """Numbers without their scales, up to a magnitude of 6."""
    factor = tl.div_rn(tl.zeros_like(scale) + 1.0, scale * decode)
    return tl.minimum(tl.maximum(v * tl.minimum(factor, FP32_MAX), -6.0), 6.0)


@triton.jit
def _places(size):
    """Where magnitudes lie, see :func:`opfuse_fp8.nvfp4._places`."""
    low, middle = size < 2.0, size < 4.0
    place = size * tl.where(low, 2.0, tl.where(middle, 1.0, 0.5))
    return place, tl.where(low, 0, tl.where(middle, 2, 4))


@triton.jit
def _nearest(size):
    """The codes of magnitudes up to 6: the nearest, of two the even one; int32."""
    place, first = _places(size)
    # the sum has 1 as its last bit
    return ((place + 8388608.0).to(tl.int32, bitcast=True) & 7) + first


@triton.jit
def _drawn(size, seed_ptr, step_ptr, row, first, rows, columns, WHICH: tl.constexpr):
    """The codes of magnitudes up to 6, rounded up or down at random; int32."""
    tall: tl.constexpr = size.shape[0]
    across: tl.constexpr = size.shape[1]
    each: tl.constexpr = across * 4  # of four values
    at = (row * (columns // 4) + first // 4 + tl.arange(0, each)[None, :]).to(tl.uint32)
    columns, rows = tl.cast(columns, tl.uint32), tl.cast(rows, tl.uint32)
    step = tl.load(step_ptr).to(tl.uint32)
    a, b, c, d = tl.philox(tl.load(seed_ptr), at, columns, step, 2 * rows + WHICH)
    words = tl.join(tl.join(a, c), tl.join(b, d))  # the last dimension changes first
    draw = (tl.reshape(words, (tall, across, 16)) >> 8).to(tl.float32) * 5.960464477539063e-08
    place, low = _places(size)
    below = tl.floor(place)
    return (below + tl.where(place - below > draw, 1.0, 0.0)).to(tl.int32) + low


@triton.jit
def _copy(
    v, first_row, first, rows, columns, pitch, data_ptr, scale_ptr, inverse_ptr, amax,
    seed_ptr, step_ptr,
    WHICH: tl.constexpr, SQUARE: tl.constexpr, SWIZZLED: tl.constexpr,
):  # fmt: skip
    """Write the codes of a tile, two in a byte, the scales of its blocks, and that of the tensor.

    ``pitch``, half of the columns, is an argument, so that Triton sees by what it can be divided.
    """
    tall: tl.constexpr = v.shape[0]
    across: tl.constexpr = v.shape[1] // 16
    v = tl.reshape(v, (tall, across, 16))
    endless = tl.max(tl.where(tl.abs(v) < float("inf"), 0, 1), 2, keep_dims=True)
    v = tl.where(v == v, v, 0.0)
    most = tl.max(tl.abs(v), 2, keep_dims=True)
    if SQUARE:
        down: tl.constexpr = tall // 16
        squares = tl.max(tl.reshape(most, (down, 16, across)), 1, keep_dims=True)
        most = tl.reshape(tl.broadcast_to(squares, (down, 16, across)), (tall, across, 1))
        squares = tl.max(tl.reshape(endless, (down, 16, across)), 1, keep_dims=True)
        endless = tl.reshape(tl.broadcast_to(squares, (down, 16, across)), (tall, across, 1))
    encode = _encode(amax)
    decode = tl.div_rn(1.0, encode)
    tl.store(inverse_ptr, decode, tl.program_id(0) == 0)
    row = first_row + tl.arange(0, tall)[:, None]
    sixth: tl.constexpr = 0.1666666716337204
    scale = codes_of(tl.minimum(most * (encode * sixth), 448.0), 1.0, 3)
    scaled = _scaled(v, _value_of(scale), decode)
    if seed_ptr is not None:
        codes = _drawn(tl.abs(scaled), seed_ptr, step_ptr, row, first, rows, columns, WHICH)
    else:
        codes = _nearest(tl.abs(scaled))
    codes |= (scaled.to(tl.int32, bitcast=True) >> 28) & 8
    low, high = tl.split(tl.reshape(codes, (tall, across * 8, 2)))
    byte = first // 2 + tl.arange(0, across * 8)[None, :]
    inside = (row < rows) & (byte < pitch)
    tl.store(data_ptr + row * pitch + byte, (low | (high << 4)).to(tl.uint8), inside)
    scale = tl.reshape(tl.where(endless > 0, 0x7F, scale.to(tl.int32)), (tall, across))
    block = first // 16 + tl.arange(0, across)[None, :]
    inside = (row < rows) & (block < columns // 16)
    at = place_of(row, block, columns // 16, SWIZZLED)
    tl.store(scale_ptr + at, scale.to(tl.uint8), inside)


@triton.jit
def nvfp4_cast(
    x_ptr, row_ptr, row_scale_ptr, row_inverse_ptr,
    column_ptr, column_scale_ptr, column_inverse_ptr, amax_ptr, seed_ptr, step_ptr, arrived_ptr,
    rows, columns, row_pitch, column_pitch,
    SQUARE: tl.constexpr, SIGNS: tl.constexpr, MOST: tl.constexpr, DTYPE: tl.constexpr,
    SWIZZLED: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Both copies of a tile, with the largest magnitudes that :func:`nvfp4_amax` has left.

    ``arrived_ptr`` is None, or of what says that there was a cast.
    """
    if arrived_ptr is not None:
        tl.store(arrived_ptr, 0.0, tl.program_id(0) == 0)
    v, first_row, first = _tile(x_ptr, rows, columns, BLOCK_ROWS, BLOCK_COLUMNS)
    if row_ptr is not None:
        _copy(
            v.to(tl.float32), first_row, first, rows, columns, row_pitch, row_ptr, row_scale_ptr,
            row_inverse_ptr, tl.load(amax_ptr), seed_ptr, step_ptr,
            0, SQUARE, SWIZZLED,
        )  # fmt: skip
    if column_ptr is not None:
        largest = amax_ptr if SIGNS is None or row_ptr is None else amax_ptr + 1
        turned = _turned(v, SIGNS, MOST, DTYPE)
        _copy(
            turned, first.to(tl.int64), first_row, columns, rows, column_pitch, column_ptr,
            column_scale_ptr, column_inverse_ptr, tl.load(largest), seed_ptr, step_ptr,
            1, SQUARE, SWIZZLED,
        )  # fmt: skip
