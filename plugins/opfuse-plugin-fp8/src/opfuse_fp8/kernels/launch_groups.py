"""Casts groups of rows at once, each by itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from opfuse_quantized.grouped import GroupedMXTensor
from opfuse_triton import Config, Kernel, Target, cdiv, next_power_of_2
from torch import Tensor

from opfuse.core.quantization import Usage
from opfuse.ops.row_groups import GroupedTensor, room

from . import groups
from .launch import MANTISSA


def _configs(target: Target, facts: Mapping[str, Any]) -> list[Config]:
    """The tile that the average group fills; codes that are transposed take tall ones."""
    tall, wide = (128, 64) if facts["column_ptr"] is not None else (64, 128)
    average = next_power_of_2(max(16, facts["rows"] // facts["groups"]))
    across = next_power_of_2(max(16, facts["features"]))
    tile = {"BLOCK_ROWS": min(tall, average), "BLOCK_COLUMNS": min(wide, across)}
    warps = max(1, min(8, tile["BLOCK_ROWS"] * tile["BLOCK_COLUMNS"] // 1024))
    return [Config(tile, max(1, warps // 2) if target.backend == "hip" else warps)]


def _configs_of_mx(target: Target, facts: Mapping[str, Any]) -> list[Config]:
    """Tiles of whole blocks: square ones where codes are transposed."""
    tall, wide, warps = (64, 64, 8) if facts["column_ptr"] is not None else (32, 128, 4)
    across = next_power_of_2(max(32, facts["features"]))
    tile = {"BLOCK_ROWS": tall, "BLOCK_COLUMNS": min(wide, across)}
    return [Config(tile, warps // 2 if target.backend == "hip" else warps)]


GROUPS = Kernel(groups.cast_groups, _configs)
MX_GROUPS = Kernel(groups.cast_mx_groups, _configs_of_mx)


def largest(x: Tensor, ends: Tensor) -> Tensor:
    """The largest magnitude of each group of rows, fp32; 0 of an empty one.

    Args:
        x: ``(rows, features)``, contiguous.
        ends: The row at which each group ends.
    """
    amax = torch.zeros(len(ends), dtype=torch.float32, device=x.device)
    _launch(x, ends, (None, None, None), None, amax, torch.float8_e4m3fn)
    return amax


def cast(
    x: Tensor, ends: Tensor, usage: Usage, quantizer: Any, scales: Tensor | None
) -> tuple[GroupedTensor, Tensor]:
    """Cast each group of rows with its scale.

    Args:
        x: The values, contiguous and not empty.
        ends: The row at which each group ends.
        usage: The copies that are written.
        quantizer: The first of the quantizers, which cast to one dtype.
        scales: ``(groups,)``, fp32. None: they follow from the largest magnitudes.

    Returns:
        The codes, and the largest magnitude of each group.
    """
    rows = x.reshape(-1, x.shape[-1])
    columns, count = rows.shape[1], len(ends)
    row = torch.empty(x.shape, dtype=torch.uint8, device=x.device) if usage.rowwise else None
    column = None
    if usage.columnwise:
        size = room(len(rows), columns, count)
        column = torch.empty(size, dtype=torch.uint8, device=x.device)
    inverse = torch.empty(count, dtype=torch.float32, device=x.device)
    codes, power_of_2 = (row, column, inverse), bool(getattr(quantizer, "power_of_2", False))
    if scales is None:
        amax = largest(rows, ends)
        count = quantizer.counter(x.device)
        _launch(rows, ends, codes, amax, count, quantizer.dtype, True, power_of_2)
    else:
        amax = torch.zeros_like(inverse)
        _launch(rows, ends, codes, scales, amax, quantizer.dtype)
    made = [None if each is None else each.view(quantizer.dtype) for each in (row, column)]
    return GroupedTensor(x.shape, x.dtype, quantizer, *made, inverse, ends), amax


def _launch(
    x: Tensor,
    ends: Tensor,
    codes: Sequence[Tensor | None],
    scales: Tensor | None,
    amax: Tensor | None,
    dtype: torch.dtype,
    is_amax: bool = False,
    power_of_2: bool = False,
) -> None:
    (rows, features), count = x.shape, len(ends)
    GROUPS.launch(
        _grid(rows, features, count), x, ends, *codes, scales, amax, count, rows, features,
        IS_AMAX=is_amax, MANTISSA=MANTISSA[dtype], POWER_OF_2=power_of_2,
        GROUPS=next_power_of_2(count),
    )  # fmt: skip


def cast_mx(x: Tensor, ends: Tensor, usage: Usage, quantizer: Any) -> GroupedMXTensor:
    """Cast groups of rows in MX blocks, of which none has rows of two groups.

    Args:
        x: The values, contiguous and not empty, of a multiple of 32 columns.
        ends: The row at which each group ends.
        usage: The copies that are written.
        quantizer: The first of the quantizers, which are alike.
    """
    rows, columns, count = x.shape[:-1].numel(), x.shape[-1], len(ends)
    parts: list[Tensor | None] = [None] * 4
    for i, (used, size) in enumerate(
        zip(usage, (rows * columns, room(rows, columns, count, filled=32)), strict=True)
    ):
        if used:
            for k, length in ((0, size), (1, size // 32)):
                parts[2 * i + k] = torch.empty(length, dtype=torch.uint8, device=x.device)
    MX_GROUPS.launch(
        _grid(rows, columns, count), x, ends, *parts, count, rows, columns,
        MANTISSA=MANTISSA[quantizer.dtype],
        GROUPS=next_power_of_2(count),
    )  # fmt: skip
    dtypes = (quantizer.dtype, torch.float8_e8m0fnu) * 2
    made = [None if t is None else t.view(d) for t, d in zip(parts, dtypes, strict=True)]
    shapes = x.shape, (rows, columns // 32)
    made[:2] = [None if t is None else t.view(s) for t, s in zip(made[:2], shapes, strict=True)]
    return GroupedMXTensor(x.shape, x.dtype, quantizer, *made, ends)


def _grid(rows: int, features: int, count: int) -> Callable[[Config], tuple[int]]:
    """A program for each tile that there may be: a group may have one that it does not fill."""

    def grid(config: Config) -> tuple[int]:
        down = cdiv(rows, config["BLOCK_ROWS"]) + count
        return (down * cdiv(features, config["BLOCK_COLUMNS"]),)

    return grid
