"""The Triton kernels, their configurations, and the functions that launch them.

One source serves every activation, by its device functions. Only this file imports Triton. Kernels
of plugins have its parts without an underscore.
"""
# ruff: noqa: ANN202  # kernels take what they are given

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..configs import Config, cdiv, next_power_of_2
from ..kernels import Kernel
from ..sums import sum_strips
from ..targets import Target, current_target
from .formulas import Formula

# Parts of the kernels. A tile has BLOCK_ROWS rows and BLOCK_COLUMNS features of the output.


@triton.jit
def apart(woven, SIZE: tl.constexpr):
    """The gate and the linear half of a tile in which SIZE features of each alternate."""
    rows: tl.constexpr = woven.shape[0]
    columns: tl.constexpr = woven.shape[1] // 2
    parts = tl.reshape(woven, (rows, columns // SIZE, 2, SIZE))
    gate, linear = tl.split(tl.permute(parts, (0, 1, 3, 2)))
    return tl.reshape(gate, (rows, columns)), tl.reshape(linear, (rows, columns))


@triton.jit
def together(gate, linear, SIZE: tl.constexpr):
    """The inverse of :func:`apart`."""
    rows: tl.constexpr = gate.shape[0]
    columns: tl.constexpr = gate.shape[1]
    shape: tl.constexpr = (rows, columns // SIZE, SIZE)
    parts = tl.join(tl.reshape(gate, shape), tl.reshape(linear, shape))
    return tl.reshape(tl.permute(parts, (0, 1, 3, 2)), (rows, 2 * columns))


@triton.jit
def _gate_at(column, SIZE: tl.constexpr):
    """Where the gate of a feature of the output is in a row of the input."""
    return column if SIZE == 0 else column // SIZE * (2 * SIZE) + column % SIZE


@triton.jit
def hidden(x_ptr, bias_ptr, kept_ptr, start, column, in_rows, in_columns, DTYPE: tl.constexpr):
    """The input of the activation, in fp32: rounded where the separate ops round."""
    inside = in_rows & in_columns
    x = tl.load(x_ptr + start + column, inside, 0)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + column, in_columns, 0)
        x = (x.to(tl.float32) + bias.to(tl.float32)).to(x.dtype)
    x = x.to(DTYPE)
    if kept_ptr is not None:
        tl.store(kept_ptr + start + column, x, inside)
    return x.to(tl.float32)


@triton.jit
def hidden_halves(
    x_ptr, bias_ptr, kept_ptr, row, in_rows, first, features, DTYPE: tl.constexpr,
    SIZE: tl.constexpr, WOVEN: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """The same for both halves of a gated activation; ``WOVEN``: both are read at once."""
    start = row * (2 * features)
    if WOVEN:
        column = 2 * first + tl.arange(0, 2 * BLOCK_COLUMNS)[None, :]
        there = column < 2 * features
        both = hidden(x_ptr, bias_ptr, kept_ptr, start, column, in_rows, there, DTYPE)
        a, b = apart(both, SIZE)
    else:
        column = first + tl.arange(0, BLOCK_COLUMNS)[None, :]
        at, there = _gate_at(column, SIZE), column < features
        a = hidden(x_ptr, bias_ptr, kept_ptr, start, at, in_rows, there, DTYPE)
        at += features if SIZE == 0 else SIZE
        b = hidden(x_ptr, bias_ptr, kept_ptr, start, at, in_rows, there, DTYPE)
    return a, b


@triton.jit
def _store_halves(
    dx_ptr, da, db, row, in_rows, first, features,
    SIZE: tl.constexpr, WOVEN: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write the gradients of both halves."""
    start = row * (2 * features)
    da, db = da.to(dx_ptr.dtype.element_ty), db.to(dx_ptr.dtype.element_ty)
    if WOVEN:
        column = 2 * first + tl.arange(0, 2 * BLOCK_COLUMNS)[None, :]
        both = together(da, db, SIZE)
        tl.store(dx_ptr + start + column, both, in_rows & (column < 2 * features))
    else:
        column = first + tl.arange(0, BLOCK_COLUMNS)[None, :]
        at, inside = _gate_at(column, SIZE), in_rows & (column < features)
        tl.store(dx_ptr + start + at, da, inside)
        at += features if SIZE == 0 else SIZE
        tl.store(dx_ptr + start + at, db, inside)


# The kernels


@triton.jit
def activation_forward_kernel(
    x_ptr, bias_ptr, scales_ptr, y_ptr, kept_ptr, rows, features, numbers,
    VALUE: tl.constexpr, LINEAR_VALUE: tl.constexpr,
    SIZE: tl.constexpr, ROUNDS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """``act(x + bias) * scales[:, None]``, and what the activation is applied to.

    Without a bias, without scales or where nothing is to be kept, their pointers are None.
    """
    # shorter runs than a thread reads at once: both halves are read together
    WOVEN: tl.constexpr = (SIZE == 1) | (SIZE == 2) | (SIZE == 4)
    tiles = tl.cdiv(features, BLOCK_COLUMNS)
    first = tl.program_id(0) % tiles * BLOCK_COLUMNS
    row = (tl.program_id(0) // tiles).to(tl.int64) * BLOCK_ROWS
    row += tl.arange(0, BLOCK_ROWS)[:, None]
    column = first + tl.arange(0, BLOCK_COLUMNS)[None, :]
    in_rows, in_columns = row < rows, column < features
    DTYPE: tl.constexpr = y_ptr.dtype.element_ty
    if LINEAR_VALUE is None:
        start = row * features
        x = hidden(x_ptr, bias_ptr, kept_ptr, start, column, in_rows, in_columns, DTYPE)
        y = VALUE(x, *numbers)
    else:
        a, b = hidden_halves(
            x_ptr, bias_ptr, kept_ptr, row, in_rows, first, features, DTYPE,
            SIZE, WOVEN, BLOCK_COLUMNS,
        )  # fmt: skip
        y = VALUE(a, *numbers)
        if ROUNDS and DTYPE == tl.bfloat16:
            y = y.to(tl.bfloat16).to(tl.float32)
        y *= LINEAR_VALUE(b, *numbers)
    if scales_ptr is not None:
        y *= tl.load(scales_ptr + row, in_rows, 0).to(tl.float32)
    inside = in_rows & in_columns
    tl.store(y_ptr + row * features + column, y.to(y_ptr.dtype.element_ty), inside)


@triton.jit
def activation_backward_kernel(
    dy_ptr, x_ptr, dx_ptr, sums_ptr, y_ptr, rows, features, numbers,
    VALUE: tl.constexpr, DERIVATIVE: tl.constexpr,
    LINEAR_VALUE: tl.constexpr, LINEAR_DERIVATIVE: tl.constexpr,
    SIZE: tl.constexpr, ROUNDS: tl.constexpr,
    STRIP: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """``dx = act'(x) dy``, its sum over each ``STRIP`` rows, and ``act(x)``, computed in fp32.

    ``dx_ptr``, ``sums_ptr`` or ``y_ptr`` is None where that is not needed. Without sums a program
    has one tile, and ``STRIP`` is 0. ``dx`` of an activation that is not gated, or ``y``, may be
    ``dy``: each number of it is read before one is written in its place.
    """
    WOVEN: tl.constexpr = (SIZE == 1) | (SIZE == 2) | (SIZE == 4)
    tiles = tl.cdiv(features, BLOCK_COLUMNS)
    first = tl.program_id(0) % tiles * BLOCK_COLUMNS
    strip = (tl.program_id(0) // tiles).to(tl.int64)
    height: tl.constexpr = STRIP if STRIP > 0 else BLOCK_ROWS
    column = first + tl.arange(0, BLOCK_COLUMNS)[None, :]
    in_columns = column < features
    total = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32)
    total_b = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32)
    for step in range(0, height, BLOCK_ROWS):
        row = strip * height + step + tl.arange(0, BLOCK_ROWS)[:, None]
        in_rows = row < rows
        start, inside = row * features, in_rows & in_columns
        dy = tl.load(dy_ptr + start + column, inside, 0).to(tl.float32)
        if LINEAR_VALUE is None:
            x = tl.load(x_ptr + start + column, inside, 0).to(tl.float32)
            if y_ptr is not None:
                y = VALUE(x, *numbers)
                tl.store(y_ptr + start + column, y.to(y_ptr.dtype.element_ty), inside)
            dx = dy * DERIVATIVE(x, *numbers)
            if dx_ptr is not None:
                tl.store(dx_ptr + start + column, dx.to(dx_ptr.dtype.element_ty), inside)
        else:
            a, b = hidden_halves(
                x_ptr, None, None, row, in_rows, first, features, x_ptr.dtype.element_ty,
                SIZE, WOVEN, BLOCK_COLUMNS,
            )  # fmt: skip
            linear, db = LINEAR_VALUE(b, *numbers), VALUE(a, *numbers)
            dx = dy * linear
            if ROUNDS and x_ptr.dtype.element_ty == tl.bfloat16:
                dx, db = dx.to(tl.bfloat16).to(tl.float32), db.to(tl.bfloat16).to(tl.float32)
            if y_ptr is not None:
                y = db * linear
                tl.store(y_ptr + start + column, y.to(y_ptr.dtype.element_ty), inside)
            dx *= DERIVATIVE(a, *numbers)
            db *= dy * LINEAR_DERIVATIVE(b, *numbers)
            if dx_ptr is not None:
                _store_halves(
                    dx_ptr, dx, db, row, in_rows, first, features, SIZE, WOVEN, BLOCK_COLUMNS
                )  # fmt: skip
            total_b += tl.where(inside, db, 0.0)
        total += tl.where(inside, dx, 0.0)
    if sums_ptr is not None:
        column = first + tl.arange(0, BLOCK_COLUMNS)
        width = features if LINEAR_VALUE is None else 2 * features
        at, of_a = strip * width + _gate_at(column, SIZE), tl.sum(total, 0)
        tl.store(sums_ptr + at, of_a.to(sums_ptr.dtype.element_ty), column < features)
        if LINEAR_VALUE is not None:
            at += features if SIZE == 0 else SIZE
            of_b = tl.sum(total_b, 0).to(sums_ptr.dtype.element_ty)
            tl.store(sums_ptr + at, of_b, column < features)


@triton.jit
def scaled_backward_kernel(
    dy_ptr, x_ptr, scales_ptr, dx_ptr, dscales_ptr, rows, numbers,
    VALUE: tl.constexpr, DERIVATIVE: tl.constexpr,
    LINEAR_VALUE: tl.constexpr, LINEAR_DERIVATIVE: tl.constexpr,
    SIZE: tl.constexpr, ROUNDS: tl.constexpr,
    FEATURES: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """``dx = act'(x) dy scales`` and ``dscales``, the sum of ``act(x) dy`` over the features.

    A program has whole rows. ``dx_ptr`` and ``scales_ptr``, or ``dscales_ptr``, are None where
    they are not needed.
    """
    WOVEN: tl.constexpr = (SIZE == 1) | (SIZE == 2) | (SIZE == 4)
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    in_rows = row < rows
    total = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32)
    if dx_ptr is not None:
        scales = tl.load(scales_ptr + row, in_rows, 0).to(tl.float32)
    for first in range(0, FEATURES, BLOCK_COLUMNS):
        column = first + tl.arange(0, BLOCK_COLUMNS)[None, :]
        start, inside = row * FEATURES, in_rows & (column < FEATURES)
        dy = tl.load(dy_ptr + start + column, inside, 0).to(tl.float32)
        if LINEAR_VALUE is None:
            x = tl.load(x_ptr + start + column, inside, 0).to(tl.float32)
            total += tl.where(inside, VALUE(x, *numbers) * dy, 0.0)
            if dx_ptr is not None:
                dx = dy * scales * DERIVATIVE(x, *numbers)
                tl.store(dx_ptr + start + column, dx.to(dx_ptr.dtype.element_ty), inside)
        else:
            a, b = hidden_halves(
                x_ptr, None, None, row, in_rows, first, FEATURES, x_ptr.dtype.element_ty,
                SIZE, WOVEN, BLOCK_COLUMNS,
            )  # fmt: skip
            value, linear = VALUE(a, *numbers), LINEAR_VALUE(b, *numbers)
            total += tl.where(inside, value * linear * dy, 0.0)
            if dx_ptr is not None:
                da = dy * scales * linear * DERIVATIVE(a, *numbers)
                db = value * (dy * scales * LINEAR_DERIVATIVE(b, *numbers))
                _store_halves(
                    dx_ptr, da, db, row, in_rows, first, FEATURES, SIZE, WOVEN, BLOCK_COLUMNS
                )  # fmt: skip
    if dscales_ptr is not None:
        row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        tl.store(dscales_ptr + row, tl.sum(total, 1).to(dscales_ptr.dtype.element_ty), row < rows)


# Configurations

_TILES = {
    (activation_forward_kernel.__name__, False): ((4096, 4), (2048, 4), (1024, 4), (8192, 8)),
    (activation_forward_kernel.__name__, True): ((2048, 4), (1024, 4), (4096, 8), (4096, 4)),
    (activation_backward_kernel.__name__, False): ((1024, 4), (2048, 4), (4096, 8)),
    (activation_backward_kernel.__name__, True): ((1024, 4), (512, 2), (2048, 8)),
}
"""Elements of the output per tile, with warps, by kernel and whether it is gated."""

_WIDTHS = 512, 256
LARGEST, TALLEST = 4096, 256
"""The elements of a tile in a strip, and the rows of any tile, at most."""


def _configs(kernel: str, target: Target, facts: Mapping[str, Any]) -> list[Config]:
    """The tiles of the table, first those that leave the fewest threads without a feature."""
    found: dict[Config, None] = {}
    is_gradient, is_gated = kernel == activation_backward_kernel.__name__, facts["LINEAR_VALUE"]
    # rows that are not aligned take registers for addresses
    crowded = is_gradient and facts["features"] % 16 and (is_gated is None or facts.get("y_ptr"))
    for columns in _columns(facts["features"]):
        for elements, warps in _TILES[kernel, is_gated is not None]:
            if is_gradient and _spills(facts, elements, warps):
                continue
            rows = min(max(1, elements // columns), TALLEST)
            found[_tile(target, rows, columns, 2 * warps if crowded else warps)] = None
    return list(found)


def _spills(facts: Mapping[str, Any], elements: int, warps: int) -> bool:
    """Return whether a gradient in fp32 spills registers at this size of a tile."""
    return facts.get("dy_ptr") is torch.float32 and elements > 256 * warps


def _tile(target: Target, rows: int, columns: int, warps: int) -> Config:
    """A tile, for warps of 32 threads; of 64 there are half as many."""
    warps = warps // 2 if target.backend == "hip" else warps
    return Config({"BLOCK_ROWS": rows, "BLOCK_COLUMNS": columns}, warps)


def _columns(features: int) -> list[int]:
    """The possible widths of tiles for so many features, the best first."""
    found = [max(16, min(width, next_power_of_2(features))) for width in _WIDTHS]
    return sorted(found, key=lambda columns: cdiv(features, columns) * columns)


def _scaled_configs(target: Target, facts: Mapping[str, Any]) -> list[Config]:
    columns = _columns(facts["FEATURES"])[0]
    return [
        _tile(target, max(1, elements // columns), columns, warps)
        for elements, warps in ((2048, 4), (1024, 4), (4096, 8), (4096, 4))
        if not _spills(facts, elements, warps)
    ]


def _grid(rows: int, features: int, strip: int, config: Config) -> tuple[int]:
    tile = config.constants
    height = strip or tile["BLOCK_ROWS"]
    return (-(-rows // height) * -(-features // tile["BLOCK_COLUMNS"]),)


FORWARD, BACKWARD = (
    Kernel(fn, functools.partial(_configs, fn.__name__))
    for fn in (activation_forward_kernel, activation_backward_kernel)
)
SCALED_BACKWARD = Kernel(scaled_backward_kernel, _scaled_configs)

LONGEST_STRIP = 1024
PROGRAMS = 8
"""Programs per multiprocessor that strips are made for, of tiles of 512 features."""


def strip_of(rows: int, features: int, target: Target) -> int:
    """Return how many rows a program of the backward kernel adds up: a power of two."""
    wanted = rows * cdiv(features, 512) // (PROGRAMS * target.multiprocessors)
    # no less than any tile has
    least = min(TALLEST, LARGEST // min(_columns(features)))
    return min(max(least, next_power_of_2(max(wanted, 1))), LONGEST_STRIP)


def candidates(name: str, formula: Formula, width: int, target: Target) -> list[dict[str, Any]]:
    """The possible ``config`` of :func:`forward`, :func:`backward` or :func:`scaled_backward`.

    Args:
        name: The name of the function.
        formula: The activation.
        width: Features of the input.
        target: The GPU.
    """
    features = width // 2 if formula.gated else width
    kernel = {"forward": FORWARD, "backward": BACKWARD}.get(name, SCALED_BACKWARD)
    facts = {"features": features, "FEATURES": features, **formula.forward}
    return kernel.candidates(target, facts)


# The calls. The tensors are contiguous, and not empty


def forward(
    formula: Formula,
    numbers: tuple[float, ...],
    x: Tensor,
    bias: Tensor | None,
    scales: Tensor | None,
    dtype: torch.dtype,
    keep: bool,
    config: Config | None = None,
) -> tuple[Tensor, Tensor | None]:
    """See :func:`opfuse_triton.elementwise.twins.forward`."""
    width = x.shape[-1]
    rows, features = x.numel() // width, width // 2 if formula.gated else width
    y = x.new_empty((*x.shape[:-1], features), dtype=dtype)
    kept = torch.empty_like(x, dtype=dtype) if keep else None
    FORWARD.launch(
        functools.partial(_grid, rows, features, 0),
        *(x, bias, scales, y, kept, rows, features, numbers),
        config=config,
        **formula.forward,
    )
    return y, kept


def backward(
    formula: Formula,
    numbers: tuple[float, ...],
    dy: Tensor,
    x: Tensor,
    needs_x: bool,
    needs_sums: bool,
    needs_y: bool = False,
    owns: bool = False,
    config: Config | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """See :func:`opfuse_triton.elementwise.twins.backward`; ``dy`` has the dtype of ``x``."""
    width = x.shape[-1]
    rows, features = x.numel() // width, width // 2 if formula.gated else width
    dx = sums = out = y = None
    if needs_y:
        y = dy if owns else torch.empty_like(dy)
    if needs_x:
        over = owns and not needs_y and not formula.gated
        dx = dy if over else torch.empty_like(x)
    strip, strips = 0, 1
    if needs_sums:
        strip = strip_of(rows, features, current_target(x.device))
        strips = cdiv(rows, strip)
        if strips == 1:  # fewer steps, and maybe less than a tile: no other strip has its rows
            strip = next_power_of_2(rows)
        out = sums = x.new_empty(width)
        if strips > 1:
            sums = x.new_empty((strips, width), dtype=torch.float32)
    BACKWARD.launch(
        functools.partial(_grid, rows, features, strip),
        *(dy, x, dx, sums, y, rows, features, numbers),
        config=config,
        STRIP=strip,
        **formula.backward,
    )
    if sums is not None and out is not None and strips > 1:
        sum_strips(sums, out)
    return dx, out, y


def scaled_backward(
    formula: Formula,
    numbers: tuple[float, ...],
    dy: Tensor,
    x: Tensor,
    scales: Tensor | None,
    needs_scales: bool,
    config: Config | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """See :func:`opfuse_triton.elementwise.twins.scaled_backward`."""
    width = x.shape[-1]
    rows, features = x.numel() // width, width // 2 if formula.gated else width
    dx = None if scales is None else torch.empty_like(x)
    dtype = torch.float32 if scales is None else scales.dtype
    dscales = x.new_empty(x.shape[:-1], dtype=dtype) if needs_scales else None
    SCALED_BACKWARD.launch(
        lambda config: (cdiv(rows, config["BLOCK_ROWS"]),),
        *(dy, x, scales, dx, dscales, rows, numbers),
        config=config,
        FEATURES=features,
        **formula.backward,
    )
    return dx, dscales
