"""Configurations of the grouped products: tables, and the rule for which of them fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from opfuse_triton import Config, Target

Row = tuple[int, int, int, int, int]
"""``BLOCK_M``, ``BLOCK_N``, bytes of ``BLOCK_K``, warps and stages; large tiles come first."""

_PRODUCT: Mapping[str, Sequence[Row]] = {
    "cuda": ((128, 128, 128, 8, 3), (128, 128, 64, 8, 4), (64, 128, 128, 4, 3), (64, 64, 64, 4, 4)),
    "hip": ((128, 128, 128, 8, 2), (128, 64, 128, 8, 2), (64, 128, 128, 4, 2), (64, 64, 64, 4, 2)),
}
_GATED: Mapping[str, Sequence[Row]] = {
    "cuda": ((128, 64, 128, 8, 3), (128, 64, 64, 8, 4), (64, 64, 128, 8, 3), (64, 64, 64, 8, 4)),
    "hip": ((128, 64, 128, 8, 2), (64, 64, 128, 4, 2), (64, 64, 64, 4, 2)),
}

_GRADIENTS: Mapping[str, Sequence[Row]] = {
    "cuda": ((64, 64, 128, 8, 3), (64, 32, 128, 4, 4)),
    "hip": ((128, 64, 128, 8, 2), (64, 64, 128, 4, 2), (64, 64, 64, 4, 2)),
}

_OF_HALVES_IN_FP32: Mapping[str, Sequence[Row]] = {
    "cuda": ((64, 64, 64, 8, 3),),
    "hip": ((64, 64, 64, 4, 2),),
}
"""Of both halves, in fp32: larger tiles spill registers."""


def of_product(target: Target, facts: Mapping[str, Any]) -> Sequence[Config]:
    """The configurations of a grouped product, see :class:`opfuse_triton.Kernel`."""
    return _fitting(_PRODUCT[target.backend], target, facts)


def of_gated(target: Target, facts: Mapping[str, Any]) -> Sequence[Config]:
    """Those of a product with an activation, whose halves are two products."""
    return _of_halves(_GATED, target, facts)


def of_gradients(target: Target, facts: Mapping[str, Any]) -> Sequence[Config]:
    """Those of a product whose epilogue reads and writes both halves of an activation's input."""
    found = _of_halves(_GRADIENTS, target, facts)
    return found[1:] if target.arch == 100 and len(found) > 1 else found  # registers spill there


def of_wgrad(target: Target, facts: Mapping[str, Any]) -> Sequence[Config]:
    """Those of the gradient of the matrices; their size does not depend on the groups."""
    facts = {**facts, "groups": 1}
    return _fitting(_PRODUCT[target.backend], target, facts)


def _of_halves(
    table: Mapping[str, Sequence[Row]], target: Target, facts: Mapping[str, Any]
) -> Sequence[Config]:
    rows = table if _itemsize(facts) < 4 else _OF_HALVES_IN_FP32
    return _fitting(rows[target.backend], target, facts)


def _itemsize(facts: Mapping[str, Any]) -> int:
    """Bytes of a number of the rows that are multiplied."""
    return next(facts[name].itemsize for name in ("x", "dy") if name in facts)


def _fitting(rows: Sequence[Row], target: Target, facts: Mapping[str, Any]) -> Sequence[Config]:
    """The configurations that fit the GPU; first those that the average group fills."""
    itemsize = _itemsize(facts)
    fit = [row for row in rows if _fits(row, target, itemsize)] or rows[-1:]
    average = facts["rows"] / facts["groups"]
    filled = [row for row in fit if row[0] <= max(64, average)]
    ordered = [*filled, *[row for row in fit if row not in filled]]
    return [_config(row, itemsize) for row in ordered]


def _fits(row: Row, target: Target, itemsize: int) -> bool:
    """Whether the GPU has the shared memory and registers that a program needs."""
    height, width, depth, warps, stages = row
    held = stages - 1 if target.backend == "hip" else stages  # one stage is in registers
    crowded = itemsize == 4 and height * width > 2048 * warps // 2
    return held * (height + 2 * width) * depth <= target.shared_memory and not crowded


def _config(row: Row, itemsize: int) -> Config:
    height, width, depth, warps, stages = row
    constants = {"BLOCK_M": height, "BLOCK_N": width, "BLOCK_K": depth // itemsize}
    return Config(constants, num_warps=warps, num_stages=stages)
