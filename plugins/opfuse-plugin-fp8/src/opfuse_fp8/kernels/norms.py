"""The kernels of norms that end with a cast.

A rowwise copy is written by whole rows, which stay in registers. A columnwise copy is written by
tiles, which are taller than a program could hold whole rows: so the statistics of the rows come
first, and the tiles read the input again. Where one scale serves the whole tensor, the codes are
transposed instead, which are half of that.
"""
# kernels take what they are given

from __future__ import annotations

import triton
import triton.language as tl
from opfuse_triton.norms.forward import normalized, statistics

from .emit import emit


@triton.jit
def norm_rows(
    x_ptr, extra_ptr, weight_ptr, bias_ptr, sum_ptr, mean_ptr, rstd_ptr,
    wide_ptr, row_ptr, row_scale_ptr, column_ptr, column_scale_ptr, scale_ptr, amax_ptr,
    rows, features, eps,
    KIND: tl.constexpr, ZERO_CENTERED: tl.constexpr, DTYPE: tl.constexpr,
    FORMAT: tl.constexpr, MANTISSA: tl.constexpr,
    POWER_OF_2: tl.constexpr, IF_INFINITE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """The norm of whole rows of ``x``, or of ``x + extra``, with a rowwise copy of the codes.

    With ``FORMAT`` ``"statistics"`` nothing is written but the sum and the statistics.
    """
    first_row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS
    row = first_row + tl.arange(0, BLOCK_ROWS)[:, None]
    column = tl.arange(0, BLOCK_COLUMNS)[None, :]
    in_columns = column < features
    inside = (row < rows) & in_columns
    at = row * features + column
    x, rstd = statistics(
        x_ptr, extra_ptr, sum_ptr, mean_ptr, rstd_ptr, None, row, at, inside, row < rows,
        features, eps, 0.0, 1.0, KIND, BLOCK_COLUMNS,
    )  # fmt: skip
    if FORMAT != "statistics":
        y = normalized(x, None, rstd, weight_ptr, bias_ptr, column, in_columns, ZERO_CENTERED)
        y = tl.where(inside, y.to(DTYPE).to(tl.float32), 0.0)
        emit(
            y, first_row, 0, rows, features, features,
            wide_ptr, row_ptr, row_scale_ptr, column_ptr, column_scale_ptr, scale_ptr, amax_ptr,
            FORMAT, MANTISSA, POWER_OF_2, IF_INFINITE,
        )  # fmt: skip


@triton.jit
def norm_tiles(
    x_ptr, weight_ptr, bias_ptr, mean_ptr, rstd_ptr,
    row_ptr, row_scale_ptr, column_ptr, column_scale_ptr,
    rows, features,
    ZERO_CENTERED: tl.constexpr, DTYPE: tl.constexpr,
    FORMAT: tl.constexpr, MANTISSA: tl.constexpr,
    POWER_OF_2: tl.constexpr, IF_INFINITE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """The same by tiles, from statistics that are there."""
    tiles = tl.cdiv(features, BLOCK_COLUMNS)
    first = tl.program_id(0) % tiles * BLOCK_COLUMNS
    first_row = (tl.program_id(0) // tiles).to(tl.int64) * BLOCK_ROWS
    row = first_row + tl.arange(0, BLOCK_ROWS)[:, None]
    column = first + tl.arange(0, BLOCK_COLUMNS)[None, :]
    in_rows, in_columns = row < rows, column < features
    inside = in_rows & in_columns
    x = tl.load(x_ptr + row * features + column, inside, other=0.0).to(tl.float32)
    mean = None
    if mean_ptr is not None:
        mean = tl.load(mean_ptr + row, in_rows, other=0.0)
    rstd = tl.load(rstd_ptr + row, in_rows, other=0.0)
    y = normalized(x, mean, rstd, weight_ptr, bias_ptr, column, in_columns, ZERO_CENTERED)
    y = tl.where(inside, y.to(DTYPE).to(tl.float32), 0.0)
    emit(
        y, first_row, first, rows, features, features,
        None, row_ptr, row_scale_ptr, column_ptr, column_scale_ptr, None, None,
        FORMAT, MANTISSA, POWER_OF_2, IF_INFINITE,
    )  # fmt: skip


@triton.jit
def transpose_codes(
    row_ptr, column_ptr, rows, columns, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr
):  # fmt: skip
    """The codes once more, transposed."""
    tiles = tl.cdiv(columns, BLOCK_COLUMNS)
    row = (tl.program_id(0) // tiles).to(tl.int64) * BLOCK_ROWS
    row += tl.arange(0, BLOCK_ROWS)[:, None]
    column = tl.program_id(0) % tiles * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)[None, :]
    inside = (row < rows) & (column < columns)
    codes = tl.load(row_ptr + row * columns + column, inside, other=0)
    tl.store(column_ptr + column.to(tl.int64) * rows + row, codes, inside)
