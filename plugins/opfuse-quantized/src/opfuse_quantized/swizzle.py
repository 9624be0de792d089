"""Scales of blocks in the order in which tensor cores of NVIDIA's read them.

Tiles of 128 rows and 4 scales follow each other, row after row of tiles; those that jut out are
filled with zeros. In a tile, scale ``c`` of row ``r`` is number ``16 (r % 32) + 4 (r // 32) + c``.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

ROWS, SCALES = 128, 4
"""The sides of a tile."""


def swizzled_size(rows: int, scales: int) -> int:
    """The number of elements of swizzled scales.

    Args:
        rows: How many rows there are.
        scales: How many scales a row has.
    """
    return -(-rows // ROWS) * -(-scales // SCALES) * ROWS * SCALES


def swizzled(scale: Tensor) -> Tensor:
    """Swizzle scales.

    Args:
        scale: ``(rows, scales)``, of one byte each.

    Returns:
        A flat tensor of the same dtype.
    """
    rows, columns = scale.shape
    room = F.pad(scale.view(torch.uint8), (0, -columns % SCALES, 0, -rows % ROWS))
    down, across = room.shape[0] // ROWS, room.shape[1] // SCALES
    tiles = room.view(down, 4, 32, across, SCALES).permute(0, 3, 2, 1, 4)
    return tiles.reshape(-1).view(scale.dtype)


def unswizzled(flat: Tensor, rows: int, scales: int) -> Tensor:
    """Undo :func:`swizzled`.

    Args:
        flat: The swizzled scales.
        rows: How many rows there are.
        scales: How many scales a row has.

    Returns:
        ``(rows, scales)``, contiguous, of the same dtype.
    """
    down, across = -(-rows // ROWS), -(-scales // SCALES)
    tiles = flat.view(torch.uint8).view(down, across, 32, 4, SCALES).permute(0, 3, 2, 1, 4)
    whole = tiles.reshape(down * ROWS, across * SCALES)
    return whole[:rows, :scales].contiguous().view(flat.dtype)
