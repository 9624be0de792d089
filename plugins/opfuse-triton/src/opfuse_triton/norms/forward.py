"""The forward kernels, and how they are launched."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from opfuse_triton import Config, Kernel, Target, next_power_of_2

from . import LAYER, Norm, normalized_dtype
from .drop import Drop
from .dropout import keep_factors
from .twins import Forward

WHOLE = 16384
"""The widest row that one program keeps in registers. A wider one is read twice."""

BLOCK = 8192
"""Columns of a wider row that are read at a time."""


@triton.jit
def normalized(x, mean, rstd, weight_ptr, bias_ptr, column, valid, ZERO_CENTERED: tl.constexpr):
    """The output of a norm in fp32. ``mean`` is None where ``x`` is centered, or is not to be."""
    if mean is not None:
        x -= mean
    y = x * rstd
    if weight_ptr is not None:
        y *= factors(weight_ptr, column, valid, ZERO_CENTERED)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + column, valid, other=0.0).to(tl.float32)
    return y


@triton.jit
def factors(weight_ptr, column, valid, ZERO_CENTERED: tl.constexpr):
    """What some columns are multiplied by."""
    weight = tl.load(weight_ptr + column, valid, other=0.0).to(tl.float32)
    if ZERO_CENTERED:
        weight += 1.0
    return weight


@triton.jit
def statistics(
    x_ptr, extra_ptr, sum_ptr, mean_ptr, rstd_ptr, seed_ptr, row, at, inside, some,
    features, eps, threshold, scale, KIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Whole rows of ``x + extra``, centered for ``"layer"``, and what each is multiplied by.

    ``at`` and ``inside`` are the places of their numbers, and ``some`` says which rows there are.
    """
    x = tl.load(x_ptr + at, inside, other=0.0).to(tl.float32)
    if seed_ptr is not None:
        x *= keep_factors(seed_ptr, row, 0, threshold, scale, BLOCK)
        x = x.to(x_ptr.dtype.element_ty).to(tl.float32)
    if extra_ptr is not None:
        x += tl.load(extra_ptr + at, inside, other=0.0).to(tl.float32)
        if sum_ptr is not None:  # rounded, as between the separate ops
            total = x.to(sum_ptr.dtype.element_ty)
            tl.store(sum_ptr + at, total, inside)
            x = total.to(tl.float32)
        elif x_ptr.dtype == extra_ptr.dtype:  # a sum of two dtypes is in fp32
            x = x.to(x_ptr.dtype.element_ty).to(tl.float32)
    if KIND == "layer":
        mean = tl.sum(x, 1, keep_dims=True) / features
        x = tl.where(inside, x - mean, 0.0)
        if mean_ptr is not None:
            tl.store(mean_ptr + row, mean, some)
    square = tl.sum(x * x, 1, keep_dims=True)
    if KIND != "l2":
        square = square / features
    rstd = tl.rsqrt(square + eps)
    if rstd_ptr is not None:
        tl.store(rstd_ptr + row, rstd, some)
    return x, rstd


@triton.jit
def norm_forward(
    x_ptr,
    extra_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    sum_ptr,
    mean_ptr,
    rstd_ptr,
    seed_ptr,
    rows,
    features,
    groups,
    eps,
    threshold,
    scale,
    KIND: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    GIVEN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``ROWS`` whole rows, which stay in registers.

    With ``GIVEN`` the statistics are there, and the output is computed from them once more. If
    there are ``groups``, each has ``rows`` rows, and a weight and a bias of its own.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    if groups is not None:  # a program has rows of one group
        tiles = tl.cdiv(rows, ROWS)
        group = (tl.program_id(0) // tiles).to(tl.int64)
        row = (tl.program_id(0) % tiles) * ROWS + tl.arange(0, ROWS)[:, None]
        x_ptr += group * rows * features
        y_ptr += group * rows * features
        if mean_ptr is not None:
            mean_ptr += group * rows
        if rstd_ptr is not None:
            rstd_ptr += group * rows
        weight_ptr += group * features
        bias_ptr += group * features
    column = tl.arange(0, BLOCK)[None, :]
    valid = column < features
    inside = (row < rows) & valid
    at = row.to(tl.int64) * features + column
    if GIVEN:
        x = tl.load(x_ptr + at, inside, other=0.0).to(tl.float32)
        if mean_ptr is not None:
            x -= tl.load(mean_ptr + row, row < rows, other=0.0)
        rstd = tl.load(rstd_ptr + row, row < rows, other=0.0)
    else:
        x, rstd = statistics(
            x_ptr, extra_ptr, sum_ptr, mean_ptr, rstd_ptr, seed_ptr, row, at, inside, row < rows,
            features, eps, threshold, scale, KIND, BLOCK,
        )  # fmt: skip
    y = normalized(x, None, rstd, weight_ptr, bias_ptr, column, valid, ZERO_CENTERED)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), inside)


@triton.jit
def norm_forward_wide(
    x_ptr,
    extra_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    sum_ptr,
    mean_ptr,
    rstd_ptr,
    seed_ptr,
    features,
    eps,
    threshold,
    scale,
    KIND: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    GIVEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row, read by blocks of columns: once for the statistics, once for the output.

    The only kernel for rows that are too wide for registers. ``GIVEN`` as for :func:`norm_forward`.
    """
    row = tl.program_id(0)
    start = row.to(tl.int64) * features
    columns = tl.arange(0, BLOCK)
    mean = 0.0
    if GIVEN:
        rstd = tl.load(rstd_ptr + row)
        if mean_ptr is not None:
            mean = tl.load(mean_ptr + row)
    else:
        square = 0.0
        for first in range(0, features, BLOCK):
            inside = first + columns < features
            at = start + first + columns
            x = tl.load(x_ptr + at, inside, other=0.0).to(tl.float32)
            if seed_ptr is not None:
                row_of = tl.full([1, 1], 0, tl.int32) + row
                kept = keep_factors(seed_ptr, row_of, first, threshold, scale, BLOCK)
                x = (x * tl.reshape(kept, (BLOCK,))).to(x_ptr.dtype.element_ty).to(tl.float32)
            if extra_ptr is not None:
                x += tl.load(extra_ptr + at, inside, other=0.0).to(tl.float32)
                total = x.to(sum_ptr.dtype.element_ty)
                tl.store(sum_ptr + at, total, inside)
                x = total.to(tl.float32)
            if KIND == "layer":
                # mean and squares of two parts, combined as by Chan, Golub and LeVeque (1979)
                count = tl.minimum(features - first, BLOCK).to(tl.float32)
                of_block = tl.sum(x, 0) / count
                x = tl.where(inside, x - of_block, 0.0)
                share = count / (first + count)
                apart = of_block - mean
                square += apart * apart * first * share
                mean += apart * share
            square += tl.sum(x * x, 0)
        if KIND != "l2":
            square = square / features
        rstd = tl.rsqrt(square + eps)
        if mean_ptr is not None:
            tl.store(mean_ptr + row, mean)
        if rstd_ptr is not None:
            tl.store(rstd_ptr + row, rstd)
    source_ptr = x_ptr
    if extra_ptr is not None:
        source_ptr = sum_ptr
        tl.debug_barrier()  # one thread may load what another has stored
    for first in range(0, features, BLOCK):
        column = first + columns
        inside = column < features
        x = tl.load(source_ptr + start + column, inside, other=0.0).to(tl.float32)
        center = mean if KIND == "layer" else None
        y = normalized(x, center, rstd, weight_ptr, bias_ptr, column, inside, ZERO_CENTERED)
        tl.store(y_ptr + start + column, y.to(y_ptr.dtype.element_ty), inside)


def _configs(target: Target, facts: Mapping[str, Any]) -> list[Config]:
    """Tiles of about ``size`` numbers: 32 per thread, or 16."""
    block = max(4, next_power_of_2(facts["features"]))
    found = []
    for size, share in ((4096, 32), (4096, 16), (8192, 32), (2048, 16)):
        rows = max(1, size // block)
        # threads of 32, also where a warp has 64
        config = Config({"ROWS": rows, "BLOCK": block}, _warps(rows * block, share))
        if config not in found:
            found.append(config)
    return found


def _warps(size: int, share: int) -> int:
    """Warps for a tile of so many numbers, with about so many per thread."""
    return max(1, min(size // share // 32, 16))


WHOLE_KERNEL = Kernel(norm_forward, _configs)
WIDE_KERNEL = Kernel(norm_forward_wide, [Config({"BLOCK": BLOCK}, warps) for warps in (16, 8)])


def kernel_of(features: int) -> Kernel:
    """The kernel for rows of so many features."""
    return WIDE_KERNEL if features > WHOLE else WHOLE_KERNEL


def forward(
    x: Tensor,
    extra: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    norm: Norm,
    dtype: torch.dtype | None,
    keep: bool,
    save: bool,
    into: Tensor | None = None,
    drop: Drop | None = None,
    config: Config | Mapping[str, Any] | None = None,
) -> Forward:
    """Launch :func:`opfuse_triton.norms.twins.forward` for contiguous tensors with elements.

    Args:
        x: As there, and all but the last.
        extra: See ``x``.
        weight: See ``x``.
        bias: See ``x``.
        eps: See ``x``.
        norm: See ``x``.
        dtype: See ``x``.
        keep: See ``x``.
        save: See ``x``.
        into: See ``x``.
        drop: See ``x``; with it, there is ``extra``.
        config: One of the candidates; None: the first.
    """
    features = math.prod(x.shape[-norm.dims :])
    rows = x.numel() // features
    total, normalized = into, x.dtype if extra is None else normalized_dtype(x, extra, into)
    # the second pass over a wide row reads the sum that the first one wrote
    if extra is not None and into is None and (keep or features > WHOLE):
        total = torch.empty_like(x, dtype=normalized)
    y = torch.empty_like(x, dtype=dtype or normalized)
    mean = rstd = None
    if save:
        shape = (*x.shape[: -norm.dims], *(1,) * norm.dims)
        rstd = x.new_empty(shape, dtype=torch.float32)
        mean = torch.empty_like(rstd) if norm.kind == LAYER else None
    seed, numbers = None, (eps, 0.0, 1.0)
    if drop is not None:
        seed, numbers = drop.seed, (eps, drop.threshold, drop.scale)
    tensors = x, extra, weight, bias, y, total, mean, rstd, seed
    _launch(tensors, rows, features, numbers, norm, config=config)
    return y, total if keep else None, mean, rstd


def again(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    norm: Norm,
    dtype: torch.dtype | None,
) -> Tensor:
    """Launch :func:`opfuse_triton.norms.twins.again` for contiguous tensors with elements.

    Args:
        x: As there, and all others.
        weight: See ``x``.
        bias: See ``x``.
        mean: See ``x``.
        rstd: See ``x``.
        norm: See ``x``.
        dtype: See ``x``.
    """
    features, y = math.prod(x.shape[-norm.dims :]), torch.empty_like(x, dtype=dtype or x.dtype)
    tensors = x, None, weight, bias, y, None, mean, rstd, None
    _launch(tensors, x.numel() // features, features, (0.0, 0.0, 1.0), norm, given=True)
    return y


def _launch(
    tensors: tuple[Tensor | None, ...],
    rows: int,
    features: int,
    numbers: tuple[float, ...],
    norm: Norm,
    given: bool = False,
    config: Config | Mapping[str, Any] | None = None,
) -> None:
    constants = {"KIND": norm.kind, "ZERO_CENTERED": norm.zero_centered, "GIVEN": given}
    if features > WHOLE:
        WIDE_KERNEL.launch((rows,), *tensors, features, *numbers, config=config, **constants)
    else:
        WHOLE_KERNEL.launch(
            lambda chosen: (-(-rows // chosen.constants["ROWS"]),),
            *(*tensors, rows, features, None, *numbers),
            config=config,
            **constants,
        )
