"""Device functions for groups of rows: a program finds its tile by itself, from where groups end.

The host never reads the ends, an int32 tensor. A tile never has rows of two groups.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tiles_of(ends, groups, rows, columns, GROUPS: tl.constexpr, BLOCK_M: tl.constexpr):
    """The first row of each group, its end, and its number of tiles.

    ``columns`` are the tiles side by side. ``GROUPS`` is the power of two from ``groups`` on.
    """
    group = tl.arange(0, GROUPS)
    known = group < groups
    first = tl.load(ends + group - 1, known & (group > 0), other=0)
    stop = tl.load(ends + group, known, other=0)
    # whatever the ends are, no row is outside of the tensor
    first = tl.minimum(tl.maximum(first, 0), rows)
    stop = tl.minimum(tl.maximum(stop, first), rows)
    stop = tl.where(known, stop, first)
    return first, stop, (stop - first + BLOCK_M - 1) // BLOCK_M * columns


@triton.jit
def place_of(tile, first, stop, tiles, GROUPS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Group, first row, end of the group's rows, and column of a tile.

    The tiles of a column follow one another, and share what they read of the matrix in the cache.
    """
    last = tl.cumsum(tiles)
    group = tl.sum((last <= tile).to(tl.int32))
    here = tl.arange(0, GROUPS) == group
    start = tl.sum(tl.where(here, first, 0))
    end = tl.sum(tl.where(here, stop, 0))
    within = tile - tl.sum(tl.where(here, last - tiles, 0))
    height = (end - start + BLOCK_M - 1) // BLOCK_M
    return group, start + within % height * BLOCK_M, end, within // height


@triton.jit
def filled_of(group, first, stop, groups, rows, GROUPS: tl.constexpr, FILLED: tl.constexpr):
    """Where a group begins if each is filled up to a multiple of some rows, and its rows then.

    Whatever the ends are, it is within the ``rows + (FILLED - 1) * groups`` that there may be.
    """
    filled = (stop - first + FILLED - 1) // FILLED
    index = tl.arange(0, GROUPS)
    start = tl.sum(tl.where(index < group, filled, 0))
    most = (rows + (FILLED - 1) * groups) // FILLED
    start = tl.minimum(start, most)
    height = tl.minimum(tl.sum(tl.where(index == group, filled, 0)), most - start)
    return start * FILLED, height * FILLED
