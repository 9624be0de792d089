"""How large the tiles of a launch are."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from opfuse_triton import Config, Target, next_power_of_2

_TILES = {  # rows, columns and warps, by format and whether there is a columnwise copy
    ("none", False): (32, 128, 4),
    ("tensor", False): (32, 128, 4),
    ("tensor", True): (128, 64, 8),
    ("amax", False): (32, 128, 4),
    ("amax", True): (128, 64, 8),
    ("block", False): (32, 128, 4),
    ("block", True): (128, 128, 16),
    ("square", False): (128, 128, 16),
    ("square", True): (128, 128, 16),
    ("mx", False): (32, 128, 4),
    ("mx", True): (64, 64, 8),
}
_OF_HALVES = {  # two tiles at a time
    ("none", False): (16, 128, 4),
    ("tensor", True): (64, 64, 8),
    ("block", True): (128, 64, 8),
    ("mx", True): (32, 64, 4),
}
HIGHEST = 128
"""The height of each tile divides this."""
LEAST = 32
"""The least height of a tile, which MX blocks have."""


def configs(target: Target, facts: Mapping[str, Any]) -> list[Config]:
    """The tile for a launch of a kernel that casts."""
    # rows that are not aligned take an address for each number
    unaligned = facts.get("unaligned") or facts["features"] % 16
    tallest = {"tensor": 64, "none": 16}.get(facts["FORMAT"], HIGHEST) if unaligned else HIGHEST
    return [_config(
        target.backend == "hip",
        facts["FORMAT"].removeprefix("swizzled "),
        facts["column_ptr"] is not None,
        facts.get("sums_ptr") is not None,
        _up_to(facts["rows"], tallest),
        _up_to(facts["features"], 256),
        _halves(facts),
    )]  # fmt: skip


def _halves(facts: Mapping[str, Any]) -> str:
    """How a kernel writes two halves: ``"woven"``, ``"apart"``, or not at all: ``""``."""
    if facts.get("DERIVATIVE") is None or facts["LINEAR_VALUE"] is None:
        return ""
    return "woven" if facts["SIZE"] else "apart"


def _up_to(size: int, most: int) -> int:
    """The power of two that holds ``size``, within limits."""
    return min(most, max(LEAST, next_power_of_2(size)))


@functools.lru_cache(maxsize=1024)
def _config(
    hip: bool, form: str, column: bool, sums: bool, tallest: int, widest: int, halves: str
) -> Config:
    tall, wide, warps = _TILES[form, column]
    if halves == "apart":
        tall, wide, warps = _OF_HALVES.get((form, column), (tall, wide, warps))
    least = 32 if halves == "apart" else 64
    if sums and tall < least:  # the fewer sums are left to add up
        tall, warps = least, 8
    tile = {
        "BLOCK_ROWS": min(tall, tallest),
        "BLOCK_COLUMNS": min(wide // 2 if halves == "woven" else wide, widest),
    }
    return Config(tile, warps // 2 if hip else warps)  # of 64 threads half as many


def grid(rows: int, features: int, config: Config) -> tuple[int]:
    """A program for each tile."""
    tile = config.constants
    down, across = tile["BLOCK_ROWS"], tile["BLOCK_COLUMNS"]
    return (-(-rows // down) * -(-features // across),)
