"""The kernels over tiles: casts, activations, and gradients of activations and biases.

One source serves every activation, by its device functions, and every format.
"""
# kernels take what they are given

from __future__ import annotations

import triton
import triton.language as tl
from opfuse_triton.elementwise.kernels import hidden, hidden_halves, together

from .emit import emit

# Parts of the kernels. A tile has BLOCK_ROWS rows and BLOCK_COLUMNS features of the output.


@triton.jit
def _column_sums(sums_ptr, v, tile, width, first):
    """The sum of each column of a tile, if there is a place for it.

    It is in fp32, and in the result's dtype where it is the only one.
    """
    if sums_ptr is not None:
        column = first + tl.arange(0, v.shape[1])
        total = tl.sum(v, 0).to(sums_ptr.dtype.element_ty)
        tl.store(sums_ptr + tile * width + column, total, column < width)


@triton.jit
def _gate_gradient(
    dy, a, b, numbers, inside,
    DERIVATIVE: tl.constexpr, LINEAR_VALUE: tl.constexpr, ROUNDS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """``act'(a) lin(b) dy``."""
    da = dy * LINEAR_VALUE(b, *numbers)
    if ROUNDS and DTYPE == tl.bfloat16:
        da = da.to(tl.bfloat16).to(tl.float32)
    return tl.where(inside, (da * DERIVATIVE(a, *numbers)).to(DTYPE).to(tl.float32), 0.0)


@triton.jit
def _linear_gradient(
    dy, a, b, numbers, inside,
    VALUE: tl.constexpr, LINEAR_DERIVATIVE: tl.constexpr, ROUNDS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """``act(a) lin'(b) dy``."""
    db = VALUE(a, *numbers)
    if ROUNDS and DTYPE == tl.bfloat16:
        db = db.to(tl.bfloat16).to(tl.float32)
    db *= dy * LINEAR_DERIVATIVE(b, *numbers)
    return tl.where(inside, db.to(DTYPE).to(tl.float32), 0.0)


# The kernels


@triton.jit
def cast_forward(
    x_ptr, bias_ptr, kept_ptr,
    wide_ptr, row_ptr, row_scale_ptr, column_ptr, column_scale_ptr, scale_ptr, amax_ptr,
    rows, features, numbers,
    VALUE: tl.constexpr, LINEAR_VALUE: tl.constexpr,
    SIZE: tl.constexpr, ROUNDS: tl.constexpr, DTYPE: tl.constexpr,
    FORMAT: tl.constexpr, MANTISSA: tl.constexpr,
    POWER_OF_2: tl.constexpr, IF_INFINITE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """``act(x + bias)`` rounded to ``DTYPE``, cast; without ``VALUE``, ``x`` itself."""
    tiles = tl.cdiv(features, BLOCK_COLUMNS)
    first = tl.program_id(0) % tiles * BLOCK_COLUMNS
    first_row = (tl.program_id(0) // tiles).to(tl.int64) * BLOCK_ROWS
    row = first_row + tl.arange(0, BLOCK_ROWS)[:, None]
    column = first + tl.arange(0, BLOCK_COLUMNS)[None, :]
    in_rows, in_columns = row < rows, column < features
    if LINEAR_VALUE is None:
        start = row * features
        y = hidden(x_ptr, bias_ptr, kept_ptr, start, column, in_rows, in_columns, DTYPE)
        if VALUE is not None:
            y = VALUE(y, *numbers)
    else:
        a, b = hidden_halves(
            x_ptr, bias_ptr, kept_ptr, row, in_rows, first, features, DTYPE,
            SIZE, SIZE > 0, BLOCK_COLUMNS,
        )  # fmt: skip
        y = VALUE(a, *numbers)
        if ROUNDS and DTYPE == tl.bfloat16:
            y = y.to(tl.bfloat16).to(tl.float32)
        y *= LINEAR_VALUE(b, *numbers)
    if VALUE is not None or bias_ptr is not None:  # what is loaded is 0 outside
        y = tl.where(in_rows & in_columns, y, 0.0)
    y = y.to(DTYPE).to(tl.float32)
    emit(
        y, first_row, first, rows, features, features,
        wide_ptr, row_ptr, row_scale_ptr, column_ptr, column_scale_ptr, scale_ptr, amax_ptr,
        FORMAT, MANTISSA, POWER_OF_2, IF_INFINITE,
    )  # fmt: skip


@triton.jit
def cast_backward(
    dy_ptr, x_ptr, sums_ptr,
    wide_ptr, row_ptr, row_scale_ptr, column_ptr, column_scale_ptr, scale_ptr, amax_ptr,
    rows, features, numbers,
    VALUE: tl.constexpr, DERIVATIVE: tl.constexpr,
    LINEAR_VALUE: tl.constexpr, LINEAR_DERIVATIVE: tl.constexpr,
    SIZE: tl.constexpr, ROUNDS: tl.constexpr, DTYPE: tl.constexpr,
    FORMAT: tl.constexpr, MANTISSA: tl.constexpr,
    POWER_OF_2: tl.constexpr, IF_INFINITE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """``act'(x) dy`` rounded to ``DTYPE``, cast, and its sums over the rows of each tile.

    Without ``DERIVATIVE`` it is ``dy`` itself. ``sums_ptr`` is None if the sums are not needed.
    """
    tiles = tl.cdiv(features, BLOCK_COLUMNS)
    first, tile = tl.program_id(0) % tiles * BLOCK_COLUMNS, tl.program_id(0) // tiles
    first_row = tile.to(tl.int64) * BLOCK_ROWS
    row = first_row + tl.arange(0, BLOCK_ROWS)[:, None]
    column = first + tl.arange(0, BLOCK_COLUMNS)[None, :]
    in_rows = row < rows
    inside = in_rows & (column < features)
    at, tile = row * features + column, tile.to(tl.int64)
    dy = tl.load(dy_ptr + at, inside, 0).to(tl.float32)
    if LINEAR_VALUE is None:
        dx = dy
        if DERIVATIVE is not None:
            dx *= DERIVATIVE(tl.load(x_ptr + at, inside, 0).to(tl.float32), *numbers)
            dx = tl.where(inside, dx, 0.0)
        dx = dx.to(DTYPE).to(tl.float32)
        _column_sums(sums_ptr, dx, tile, features, first)
        emit(
            dx, first_row, first, rows, features, features,
            wide_ptr, row_ptr, row_scale_ptr, column_ptr, column_scale_ptr, scale_ptr, amax_ptr,
            FORMAT, MANTISSA, POWER_OF_2, IF_INFINITE,
        )  # fmt: skip
    else:
        a, b = hidden_halves(
            x_ptr, None, None, row, in_rows, first, features, DTYPE, SIZE, SIZE > 0, BLOCK_COLUMNS
        )  # fmt: skip
        da = _gate_gradient(dy, a, b, numbers, inside, DERIVATIVE, LINEAR_VALUE, ROUNDS, DTYPE)
        if SIZE > 0:
            db = _linear_gradient(
                dy, a, b, numbers, inside, VALUE, LINEAR_DERIVATIVE, ROUNDS, DTYPE
            )
            both = together(da, db, SIZE)
            _column_sums(sums_ptr, both, tile, 2 * features, 2 * first)
            emit(
                both, first_row, 2 * first, rows, 2 * features, 2 * features,
                wide_ptr, row_ptr, row_scale_ptr, column_ptr, column_scale_ptr, scale_ptr, amax_ptr,
                FORMAT, MANTISSA, POWER_OF_2, IF_INFINITE,
            )  # fmt: skip
        else:  # one after the other, which takes fewer registers
            _column_sums(sums_ptr, da, tile * 2, features, first)
            emit(
                da, first_row, first, rows, 2 * features, features,
                wide_ptr, row_ptr, row_scale_ptr, column_ptr, column_scale_ptr, scale_ptr, amax_ptr,
                FORMAT, MANTISSA, POWER_OF_2, IF_INFINITE,
            )  # fmt: skip
            db = _linear_gradient(
                dy, a, b, numbers, inside, VALUE, LINEAR_DERIVATIVE, ROUNDS, DTYPE
            )
            _column_sums(sums_ptr, db, tile * 2 + 1, features, first)
            emit(
                db, first_row, features + first, rows, 2 * features, 2 * features,
                wide_ptr, row_ptr, row_scale_ptr, column_ptr, column_scale_ptr, scale_ptr, amax_ptr,
                FORMAT, MANTISSA, POWER_OF_2, IF_INFINITE,
            )  # fmt: skip
