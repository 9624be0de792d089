"""The backward kernels, and how they are launched.

The gradients of weight and bias are sums over all rows. Each program adds up those of its rows in
registers and writes one partial sum per feature; a second kernel adds up the partial sums, always
in the same order.

Rows that are too wide for the registers of one program have one way, which takes two kernels:
``norm_backward_rows`` reads each row for its means, and ``norm_backward_tiles`` has some columns of
many rows, so that the sums of these columns stay in registers. One kernel with whole rows would
write and read a partial sum of each feature for each few rows.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from opfuse_triton import Config, Kernel, Target, current_target, next_power_of_2
from opfuse_triton.sums import sum_strips
from opfuse_triton.targets import LATENCY

from . import L2, LAYER, Norm, normalized_dtype
from .forward import factors
from .twins import Backward

WHOLE = 8192
"""The widest row that one program keeps in registers; see :func:`kernel_of`."""

PROGRAMS = 4
"""Programs per multiprocessor that add up partial sums, at most."""

REGISTERS = {"cuda": 256 * 1024, "hip": 512 * 1024}
"""Bytes of registers of a multiprocessor."""

PARTIAL = 0.1
"""The share of partial sums in the bytes that a backward has to move, at most."""


@triton.jit
def norm_backward(
    dy_ptr,
    x_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    extra_ptr,
    dx_ptr,
    dw_ptr,
    db_ptr,
    rows,
    features,
    groups,
    KIND: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PREFETCH: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """Tiles of ``ROWS`` whole rows; with ``PREFETCH`` the next one is on its way meanwhile.

    Without it, fewer registers are taken: the weight is read again for each tile, from the cache.
    ``PROGRAMS`` is for the launch. If there are ``groups``, each has ``rows`` rows, and a weight of
    its own, and every ``groups``-th program has rows of one.
    """
    step = tl.num_programs(0) * ROWS
    if groups is not None:
        group, step = (tl.program_id(0) % groups).to(tl.int64), step // groups
        before = group * rows
        dy_ptr += before * features
        x_ptr += before * features
        dx_ptr += before * features
        rstd_ptr += before
        if mean_ptr is not None:
            mean_ptr += before
        weight_ptr += group * features
    columns = tl.arange(0, BLOCK)[None, :]
    valid = columns < features
    if PREFETCH and weight_ptr is not None:
        weight = factors(weight_ptr, columns, valid, ZERO_CENTERED)
    if dw_ptr is not None:
        dw = tl.zeros([ROWS, BLOCK], tl.float32)
    if db_ptr is not None:
        db = tl.zeros([ROWS, BLOCK], tl.float32)
    program = tl.program_id(0) if groups is None else tl.program_id(0) // groups
    row = program * ROWS + tl.arange(0, ROWS)[:, None]
    start = row.to(tl.int64) * features
    if PREFETCH:
        x_next = tl.load(x_ptr + start + columns, (row < rows) & valid, other=0.0)
        dy_next = tl.load(dy_ptr + start + columns, (row < rows) & valid, other=0.0)
    for _ in range(program * ROWS, rows, step):
        some = row < rows
        inside = some & valid
        if PREFETCH:
            x = x_next.to(tl.float32)
            dy = dy_next.to(tl.float32)
            if extra_ptr is not None and dx_ptr is not None:
                extra = tl.load(extra_ptr + start + columns, inside, other=0.0).to(tl.float32)
        else:
            x = tl.load(x_ptr + start + columns, inside, other=0.0).to(tl.float32)
            dy = tl.load(dy_ptr + start + columns, inside, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row, some, other=0.0)
        if mean_ptr is not None:
            x -= tl.load(mean_ptr + row, some, other=0.0)
        n = x * rstd
        row += step
        following = row.to(tl.int64) * features
        if PREFETCH:
            x_next = tl.load(x_ptr + following + columns, (row < rows) & valid, other=0.0)
            dy_next = tl.load(dy_ptr + following + columns, (row < rows) & valid, other=0.0)
        if dw_ptr is not None:
            dw += dy * n
        if db_ptr is not None:
            db += dy
        if dx_ptr is not None:
            g = dy
            if weight_ptr is not None:
                if not PREFETCH:
                    weight = factors(weight_ptr, columns, valid, ZERO_CENTERED)
                g *= weight
            product = tl.sum(g * n, 1, keep_dims=True)
            if KIND != "l2":
                product = product / features
            dx = g - n * product
            if KIND == "layer":
                dx -= tl.sum(g, 1, keep_dims=True) / features
            dx *= rstd
            if extra_ptr is not None:
                if not PREFETCH:
                    extra = tl.load(extra_ptr + start + columns, inside, other=0.0).to(tl.float32)
                dx += extra
            tl.store(dx_ptr + start + columns, dx.to(dx_ptr.dtype.element_ty), inside)
        start = following
    partial = tl.program_id(0).to(tl.int64) * features + tl.arange(0, BLOCK)
    if dw_ptr is not None:
        tl.store(dw_ptr + partial, tl.sum(dw, 0), tl.arange(0, BLOCK) < features)
    if db_ptr is not None:
        tl.store(db_ptr + partial, tl.sum(db, 0), tl.arange(0, BLOCK) < features)


@triton.jit
def norm_backward_rows(
    dy_ptr,
    x_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    product_ptr,
    total_ptr,
    features,
    KIND: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The means of a wide row that its gradient needs: ``mean(g n)``, ``mean(g)``."""
    row = tl.program_id(0)
    start = row.to(tl.int64) * features
    rstd = tl.load(rstd_ptr + row)
    if mean_ptr is not None:
        mean = tl.load(mean_ptr + row)
    products = tl.zeros([BLOCK], tl.float32)
    totals = tl.zeros([BLOCK], tl.float32)
    for first in range(0, features, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = column < features
        x = tl.load(x_ptr + start + column, inside, other=0.0).to(tl.float32)
        g = tl.load(dy_ptr + start + column, inside, other=0.0).to(tl.float32)
        if weight_ptr is not None:
            g *= factors(weight_ptr, column, inside, ZERO_CENTERED)
        if mean_ptr is not None:
            x -= mean
        products += g * x
        totals += g
    product = tl.sum(products, 0) * rstd
    if KIND != "l2":
        product = product / features
    tl.store(product_ptr + row, product)
    if total_ptr is not None:
        tl.store(total_ptr + row, tl.sum(totals, 0) / features)


@triton.jit
def norm_backward_tiles(
    dy_ptr,
    x_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    product_ptr,
    total_ptr,
    extra_ptr,
    dx_ptr,
    dw_ptr,
    db_ptr,
    rows,
    features,
    ZERO_CENTERED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """``BLOCK`` columns of wide rows, of which :func:`norm_backward_rows` has added up each."""
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    columns = column[None, :]
    valid = columns < features
    if weight_ptr is not None:
        weight = factors(weight_ptr, columns, valid, ZERO_CENTERED)
    if dw_ptr is not None:
        dw = tl.zeros([ROWS, BLOCK], tl.float32)
    if db_ptr is not None:
        db = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = first + tl.arange(0, ROWS)[:, None]
        some = row < rows
        inside = some & valid
        at = row.to(tl.int64) * features + columns
        x = tl.load(x_ptr + at, inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + at, inside, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row, some, other=0.0)
        if mean_ptr is not None:
            x -= tl.load(mean_ptr + row, some, other=0.0)
        n = x * rstd
        if dx_ptr is not None:
            g = dy * weight if weight_ptr is not None else dy
            dx = g - n * tl.load(product_ptr + row, some, other=0.0)
            if total_ptr is not None:
                dx -= tl.load(total_ptr + row, some, other=0.0)
            dx *= rstd
            if extra_ptr is not None:
                dx += tl.load(extra_ptr + at, inside, other=0.0).to(tl.float32)
            tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), inside)
        if dw_ptr is not None:
            dw += dy * n
        if db_ptr is not None:
            db += dy
    partial = tl.program_id(0).to(tl.int64) * features + column
    if dw_ptr is not None:
        tl.store(dw_ptr + partial, tl.sum(dw, 0), column < features)
    if db_ptr is not None:
        tl.store(db_ptr + partial, tl.sum(db, 0), column < features)


@functools.lru_cache(maxsize=256)
def _whole_configs(target: Target, features: int, size: int, kind: str) -> list[Config]:
    """Tiles of 4096 numbers or one row, 16 per thread; then others to measure.

    Args:
        target: What is compiled for.
        features: Numbers in a row.
        size: Bytes of a number.
        kind: The norm.
    """
    block = next_power_of_2(features)
    rows = max(1, 4096 // block)
    # in a tile of 8192 there are no registers for that and for more than one sum or for fp32, and
    # in none for that and for the address of each number
    prefetch = features % 16 == 0 and (block < WHOLE or (kind != LAYER and size == 2))
    found: list[Config] = []

    def add(rows: int, share: int, early: bool, programs: int | None = None) -> None:
        tile = rows * block
        if programs is None:
            programs = _programs(target, tile, 2 * size * rows * features if early else 0)
        constants = {"ROWS": rows, "BLOCK": block, "PREFETCH": early, "PROGRAMS": programs}
        config = Config(constants, max(1, min(tile // share // 32, 16)))
        if config not in found:
            found.append(config)

    add(rows, 16, prefetch)
    for programs in (1, 2, PROGRAMS):
        add(rows, 16, prefetch, programs)
    add(rows, 16, False)
    add(max(1, rows // 2), 16, prefetch)
    add(rows, 32, False)
    return found


def _programs(target: Target, tile: int, prefetched: int) -> int:
    """Return how many programs of a multiprocessor keep the memory busy, by Little's law.

    Only what is prefetched is on its way all the time. A program that prefetches nothing waits for
    each tile: then there are as many as registers hold, for about 8 numbers in fp32 of each of a
    tile.

    Args:
        target: The target.
        tile: Numbers of a tile.
        prefetched: Bytes that a program prefetches.
    """
    if not prefetched:
        return max(1, min(PROGRAMS, REGISTERS[target.backend] // (8 * 4 * tile)))
    in_flight = target.bandwidth * LATENCY / target.multiprocessors
    return min(PROGRAMS, math.ceil(in_flight / prefetched))


def _configs(target: Target, facts: Mapping[str, Any]) -> list[Config]:
    """See :func:`_whole_configs`."""
    size = max(facts["dy_ptr"].itemsize, facts["x_ptr"].itemsize)
    return _whole_configs(target, facts["features"], size, facts["KIND"])


WHOLE_KERNEL = Kernel(norm_backward, _configs)
ROWS_KERNEL = Kernel(norm_backward_rows, [Config({"BLOCK": 4096}, 8)])
TILES_KERNEL = Kernel(
    norm_backward_tiles,
    [Config({"ROWS": 4, "BLOCK": 1024, "PROGRAMS": count}, 8) for count in (PROGRAMS, 2, 1)],
)


def backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    extra: Tensor | None,
    norm: Norm,
    needs: tuple[bool, bool, bool],
    owns: bool = False,
    config: Config | Mapping[str, Any] | None = None,
) -> Backward:
    """Launch :func:`opfuse_triton.norms.twins.backward` for contiguous tensors with elements.

    Args:
        dy: As there, and all but the last.
        x: See ``dy``.
        weight: See ``dy``.
        mean: See ``dy``.
        rstd: See ``dy``.
        extra: See ``dy``.
        norm: See ``dy``.
        needs: See ``dy``.
        owns: See ``dy``.
        config: One of the candidates; None: the first.
    """
    features = math.prod(x.shape[-norm.dims :])
    rows, sums = x.numel() // features, sum(needs[1:])
    dx = None
    if needs[0]:
        dtype = x.dtype if extra is None else normalized_dtype(x, extra)
        dx = dy if owns and dy.dtype is dtype else torch.empty_like(x, dtype=dtype)
    target = current_target(x.device)
    config = _config(config, target, dy, x, features, norm)
    tile = config.constants
    columns = -(-features // tile["BLOCK"])
    tiles = -(-rows // tile["ROWS"])
    partial = of_weight = of_bias = None
    if sums:
        each: int = -(-target.multiprocessors // columns)
        most = _most_tiles(rows, sums, (dy, x, extra, dx)) // each
        tiles = min(tiles, max(1, min(tile["PROGRAMS"], most)) * each)
        partial = x.new_empty((sums, tiles, features), dtype=torch.float32)
        of_weight = partial[0] if needs[1] else None
        of_bias = partial[-1] if needs[2] else None
    given = dy, x, weight, mean, rstd
    outputs = extra if needs[0] else None, dx, of_weight, of_bias, rows, features
    if "PREFETCH" not in tile:
        _launch_wide(given, outputs, norm, (tiles, columns), config)
    else:
        constants = {"KIND": norm.kind, "ZERO_CENTERED": norm.zero_centered}
        WHOLE_KERNEL.launch((tiles,), *given, *outputs, None, config=config, **constants)
    if partial is None:
        return dx, None, None
    return dx, *_sum_partial(partial, x.shape[-norm.dims :], weight, needs)


def _config(given: Any, target: Target, dy: Tensor, x: Tensor, features: int, norm: Norm) -> Config:
    """The configuration that was given, or that of a launch."""
    if given is not None:
        return given if isinstance(given, Config) else Config(**given)
    facts = {"dy_ptr": dy.dtype, "x_ptr": x.dtype, "features": features, "KIND": norm.kind}
    return kernel_of(features, norm.kind).pick(target, facts)


def _most_tiles(rows: int, sums: int, tensors: Sequence[Tensor | None]) -> int:
    """The number of tiles whose sums, in fp32, are written and read in few bytes."""
    moved = 0
    for tensor in tensors:
        moved += 0 if tensor is None else rows * tensor.itemsize
    return int(PARTIAL * moved / (2 * 4 * sums))


def kernel_of(features: int, kind: str) -> Kernel:
    """The kernel for rows of so many features.

    Wider ones than the registers of one program hold are read twice. If not every row begins at a
    multiple of 16 bytes, each number has its own address. A backward without sums has registers for
    that.
    """
    most = WHOLE if features % 16 == 0 or kind == L2 else WHOLE // 2
    return TILES_KERNEL if features > most else WHOLE_KERNEL


def _launch_wide(
    given: tuple[Any, ...],
    outputs: tuple[Any, ...],
    norm: Norm,
    grid: tuple[int, int],
    config: Config,
) -> None:
    *_, rstd = given
    *_, dx, _, _, rows, features = outputs
    product = total = None
    if dx is not None:
        product = torch.empty_like(rstd)
        total = torch.empty_like(rstd) if norm.kind == LAYER else None
        sums = product, total, features
        constants = {"KIND": norm.kind, "ZERO_CENTERED": norm.zero_centered}
        ROWS_KERNEL.launch((rows,), *given, *sums, **constants)
    constants = {"ZERO_CENTERED": norm.zero_centered}
    TILES_KERNEL.launch(grid, *given, product, total, *outputs, config=config, **constants)


def _sum_partial(
    partial: Tensor, shape: tuple[int, ...], weight: Tensor | None, needs: tuple[bool, bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of weight and bias; autograd casts them to the parameter's dtype."""
    dw = db = None
    if needs[1]:
        dtype = torch.float32 if weight is None else weight.dtype
        dw = partial.new_empty(shape, dtype=dtype)
    if needs[2]:
        db = partial.new_empty(shape)
    sum_strips(partial, *filter(torch.is_tensor, (dw, db)))
    return dw, db
