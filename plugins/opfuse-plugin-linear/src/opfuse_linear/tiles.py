"""Configurations of the Triton products: tables, and the rule for which of them fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import triton
from opfuse_triton import Config, Target
from opfuse_triton.functions import gelu_tanh, qgelu, relu, silu, srelu

CAN_SPECIALIZE = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 7)
"""Whether Triton's compiler can divide the work of these kernels among warps; that of 3.6 fails."""

LEAST_HEIGHT = 64
"""No tile has fewer rows, unless it has all of them."""

_EXTRA = 2048
"""Bytes of shared memory for barriers and the like."""

LIGHT = gelu_tanh, qgelu, relu, silu, srelu
"""Activations that a tile of 128x256 leaves enough registers for where their input is stored too.

On sm_90 the product is in registers. Compiled there, these take at most 204 of the 255 that a
thread has, and GELU with erf spills. Nothing is known of those of other packages.
"""

Row = tuple[int, int, int, int, int, int, bool, int]
"""``BLOCK_M``, ``BLOCK_N``, bytes of ``BLOCK_K``, ``GROUP``, warps, stages, ``SPECIALIZE``, and
``PARTS``, which is 0 for a product by pointers."""

# By whether the activation is gated. Then BLOCK_N is that of each of two products, or of each half
# of a gradient. Large tiles come first.
_BY_TILES: Mapping[tuple[int, bool], Sequence[Row]] = {
    (90, False): (
        (128, 256, 128, 8, 8, 4, False, 4),
        (128, 256, 128, 8, 4, 3, True, 4),
        (128, 256, 128, 8, 8, 4, False, 2),
        (128, 256, 128, 1, 8, 4, False, 4),
        (128, 256, 128, 8, 8, 3, False, 1),
        (256, 128, 128, 8, 8, 4, False, 4),
        (128, 128, 128, 8, 8, 4, False, 1),
        (64, 128, 128, 8, 4, 4, False, 1),
    ),
    (90, True): (
        (128, 128, 128, 8, 8, 4, False, 2),
        (128, 128, 128, 8, 4, 3, True, 2),
        (128, 128, 128, 1, 8, 4, False, 2),
        (128, 128, 128, 8, 8, 3, False, 2),
        (128, 64, 128, 8, 8, 4, False, 1),
        (64, 64, 128, 8, 4, 4, False, 1),
    ),
    (100, False): (
        (128, 256, 128, 8, 8, 3, True, 2),
        (128, 256, 128, 8, 8, 3, False, 2),
        (128, 256, 128, 1, 8, 3, True, 2),
        (128, 128, 128, 8, 8, 4, True, 2),
        (128, 128, 128, 8, 4, 4, True, 2),
        (128, 128, 128, 8, 8, 4, False, 2),
        (128, 64, 128, 8, 4, 4, False, 1),
    ),
    (100, True): (
        (128, 128, 128, 8, 8, 3, True, 2),
        (128, 128, 128, 8, 8, 3, False, 2),
        (128, 128, 128, 1, 8, 3, True, 2),
        (128, 64, 128, 8, 8, 4, True, 1),
        (128, 64, 128, 8, 8, 4, False, 1),
    ),
}
_BY_POINTERS: Mapping[tuple[str, bool], Sequence[Row]] = {
    ("cuda", False): (
        (128, 128, 128, 8, 8, 3, False, 0),
        (128, 128, 64, 8, 4, 4, False, 0),
        (128, 256, 128, 8, 8, 3, False, 0),
        (128, 128, 128, 1, 8, 3, False, 0),
        (64, 128, 64, 8, 4, 4, False, 0),
        (64, 64, 64, 8, 4, 4, False, 0),
    ),
    ("cuda", True): (
        (128, 64, 64, 8, 8, 4, False, 0),
        (128, 64, 128, 8, 8, 3, False, 0),
        (128, 64, 128, 1, 8, 3, False, 0),
        (64, 64, 64, 8, 8, 4, False, 0),
    ),
    ("hip", False): (
        (128, 128, 128, 8, 8, 2, False, 0),
        (256, 128, 128, 8, 8, 2, False, 0),
        (128, 128, 128, 1, 8, 2, False, 0),
        (128, 128, 64, 8, 4, 2, False, 0),
        (64, 128, 128, 8, 4, 2, False, 0),
    ),
    ("hip", True): (
        (128, 128, 64, 8, 8, 2, False, 0),
        (128, 64, 128, 8, 8, 2, False, 0),
        (128, 64, 64, 8, 4, 2, False, 0),
        (64, 64, 64, 8, 4, 2, False, 0),
    ),
}


def moves_tiles(target: Target) -> bool:
    """Whether the GPU has TMA and a matrix unit that reads shared memory."""
    return isinstance(target.arch, int) and target.arch // 10 in (9, 10)


def by_tiles(target: Target, facts: Mapping[str, Any]) -> Sequence[Config]:
    """The configurations of the product by tiles, see :class:`opfuse_triton.Kernel`."""
    return _fitting(_BY_TILES[int(target.arch) // 10 * 10, _is_gated(facts)], target, facts)


def by_pointers(target: Target, facts: Mapping[str, Any]) -> Sequence[Config]:
    """The configurations of the product by pointers, see :class:`opfuse_triton.Kernel`."""
    return _fitting(_BY_POINTERS[target.backend, _is_gated(facts)], target, facts)


def _is_gated(facts: Mapping[str, Any]) -> bool:
    """Whether there are two products, or a product from which both halves of a gradient come."""
    return facts.get("up") is not None or facts.get("up_addend") is not None


def _fitting(rows: Sequence[Row], target: Target, facts: Mapping[str, Any]) -> Sequence[Config]:
    """The configurations that fit the GPU; first those whose tiles keep it busy."""
    fit = [row for row in rows if _fits(row, target, facts)] or rows[-1:]
    busy = [row for row in fit if _tiles(row, facts) >= target.multiprocessors]
    ordered = [*busy, *reversed([row for row in fit if row not in busy])]
    return [_config(row, facts["x"].itemsize) for row in ordered]


def _fits(row: Row, target: Target, facts: Mapping[str, Any]) -> bool:
    """Whether the GPU has the shared memory and registers that a program needs."""
    height, width, depth, _, warps, stages, specialize, parts = row
    gated = _is_gated(facts)
    operands = 1 if facts.get("up") is None else 2
    held = stages - 1 if target.backend == "hip" else stages  # one stage is in registers
    shared = held * (height + operands * width) * depth
    if parts:
        stored = height * width // parts * facts["x"].itemsize
        shared += stored * (2 if specialize and facts.get("addend") is not None else 1) + _EXTRA
    turned = facts.get("addend") is not None and facts.get("VALUE") is not None
    fp32, stores = facts["x"].itemsize == 4, facts.get("hidden") is not None or turned
    if specialize and not CAN_SPECIALIZE:
        return False
    if not _halves_fit(height * width, parts, facts):
        return False
    if not parts:  # each thread holds so many products
        crowded = fp32 and (operands * height * width > 2048 * warps or (gated and depth > 64))
        crowded |= target.backend == "cuda" and gated and stores and depth > 64
        if stores and not gated and (turned or not _is_light(facts)):
            crowded |= height > 128 or (target.backend == "cuda" and height * width > 2048 * warps)
        if target.backend == "cuda" and (facts["depth"] % 16 or facts["features"] % 16):
            # each number is loaded by itself, from an address of its own
            crowded |= operands * height * width > (
                64 * 64 if stores and operands == 1 else 64 * 128
            )
    elif not stores:
        crowded = False
    elif specialize:  # the threads that store have 168 registers each
        crowded = fp32 or (gated and warps == 4) or turned
    else:
        in_registers = int(target.arch) < 100 and not gated and height * width > 128 * 128
        crowded = in_registers and (turned or (parts < 4 and not _is_light(facts)))
    return shared <= target.shared_memory and not crowded


def _is_light(facts: Mapping[str, Any]) -> bool:
    """Whether the activation is one of :data:`LIGHT`."""
    return any(facts.get("VALUE") is known for known in LIGHT)


def _halves_fit(area: int, parts: int, facts: Mapping[str, Any]) -> bool:
    """Whether registers are left for both halves of a gradient: for those of most activations."""
    if facts.get("up_addend") is None or any(facts["UP_VALUE"] is known for known in LIGHT):
        return True
    return area <= (128 * 64 if parts else 64 * 64)


def _tiles(row: Row, facts: Mapping[str, Any]) -> int:
    return -(-facts["rows"] // row[0]) * -(-facts["features"] // row[1])


def _config(row: Row, itemsize: int) -> Config:
    height, width, depth, group, warps, stages, specialize, parts = row
    constants = {"BLOCK_M": height, "BLOCK_N": width, "BLOCK_K": depth // itemsize, "GROUP": group}
    if parts:
        constants |= {"SPECIALIZE": specialize, "PARTS": parts}
    return Config(constants, num_warps=warps, num_stages=stages)
