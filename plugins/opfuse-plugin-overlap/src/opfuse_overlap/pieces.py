"""Products and collectives in pieces of rows, so that one runs beside the other.

A matrix that all processes share has a part of its rows on each: ``rows`` of them, in rank order.
Piece ``i`` is rows ``start`` to ``stop`` of each part. While a product of one piece is computed,
the next one is on its way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from . import kernels

Multiply = Callable[[Tensor, Tensor], None]
"""Multiplies rows, and writes the result into the second matrix."""


class Link:
    """The collectives of an op over matrices: each is started, and gives what to wait for.

    Attributes:
        size: The number of processes.
        rank: This process among them; None: all of them are simulated in this one.

    Args:
        op: An op with a collective.
    """

    def __init__(self, op: Any) -> None:
        self.group, self._what = op.collective_group, type(op).__name__
        self.size = self.group.size
        simulated = self.size > 1 and self.group.talk is None
        self.rank = None if simulated else dist.get_rank(self.group.given)

    def gather(self, part: Tensor) -> tuple[Tensor, Any]:
        """The parts of all processes, one below the other."""
        if self.size == 1:
            return part, DONE
        part = part.contiguous()
        whole = part.new_empty((self.size * part.shape[0], *part.shape[1:]))
        return whole, kernels.gather(self.group, self._what, whole, part)

    def scatter(self, whole: Tensor, part: Tensor) -> Any:
        """Fill a part with this process's rows of the sum."""
        if self.size == 1:
            part.copy_(whole)
            return DONE
        return kernels.scatter(self.group, self._what, part, whole)

    def reduce(self, tensor: Tensor) -> Any:
        """Replace a matrix by the sum."""
        return DONE if self.size == 1 else kernels.reduce(self.group, self._what, tensor)

    def largest(self, tensor: Tensor) -> Tensor:
        """Replace a tensor by the maximum of those of all processes."""
        return kernels.largest(self.group, self._what, tensor)


class _Done:
    """What needs no waiting."""

    def wait(self) -> None:
        """Go on."""


DONE = _Done()


def bounds(rows: int, count: int, height: int = 1) -> list[tuple[int, int]]:
    """Divide rows into at most ``count`` pieces, of which the first may be higher by ``height``.

    All are a multiple of it, which divides the rows.
    """
    units = rows // height
    count = max(1, min(count, units))
    each, more = divmod(units, count)
    stops = [height * (each * (i + 1) + min(i + 1, more)) for i in range(count)]
    return list(zip([0, *stops[:-1]], stops, strict=True))


def wait(pending: Sequence[Any]) -> None:
    """Wait for collectives, in the order in which they were started."""
    for each in pending:
        each.wait()


def gather_multiply(
    link: Link,
    part: Tensor,
    count: int,
    multiply: Multiply,
    out: Tensor,
    *,
    keep: bool = False,
    height: int = 1,
    meanwhile: Callable[[], None] | None = None,
) -> Tensor | None:
    """Multiply the rows of all processes, first one's own, while the others' are on their way.

    Args:
        link: The collectives.
        part: This process's rows.
        count: The number of pieces.
        multiply: The product of some rows.
        out: The result, of all rows.
        keep: Whether the gathered rows are wanted.
        height: Of how many rows a piece is a multiple.
        meanwhile: Called once all pieces are on their way.

    Returns:
        The gathered rows, or None.
    """
    rows, own = part.shape[0], link.rank
    pieces = [(span, *link.gather(part[slice(*span)])) for span in bounds(rows, count, height)]
    whole = pieces[0][1] if len(pieces) == 1 else None
    if keep and whole is None:
        whole = part.new_empty((link.size * rows, *part.shape[1:]))
    if meanwhile is not None:
        meanwhile()
    if own is not None:
        multiply(part, out[own * rows : (own + 1) * rows])
    for (start, stop), staged, pending in pieces:
        pending.wait()
        if keep and whole is not None and whole is not staged:
            per_rank = whole.view(link.size, rows, *part.shape[1:])
            per_rank[:, start:stop] = staged.view(link.size, stop - start, *part.shape[1:])
        for first, last in _runs(link, len(pieces) == 1):
            into = out[first * rows + start : (last - 1) * rows + stop]
            multiply(staged[first * (stop - start) : last * (stop - start)], into)
    return whole if keep else None


def multiply_scatter(
    link: Link, whole: Tensor, count: int, multiply: Multiply, out: Tensor
) -> list[Any]:
    """Multiply the rows of all processes, and send each piece of the result on its way.

    Args:
        link: The collectives.
        whole: The rows of all processes, of which this process has some columns.
        count: The number of pieces.
        multiply: The product of some rows.
        out: This process's rows of the sum.

    Returns:
        What to wait for before ``out`` is read.
    """
    rows, pending = out.shape[0], []
    spans = bounds(rows, count)
    for start, stop in spans:
        height = stop - start
        staged = out.new_empty((link.size * height, out.shape[1]))
        if len(spans) == 1:
            multiply(whole, staged)
        for rank in range(link.size) if len(spans) > 1 else ():
            of_rank = whole[rank * rows + start : rank * rows + stop]
            multiply(of_rank, staged[rank * height : (rank + 1) * height])
        pending.append(link.scatter(staged, out[start:stop]))
    return pending


def multiply_reduce(
    link: Link, whole: Tensor, count: int, multiply: Multiply, out: Tensor
) -> list[Any]:
    """Multiply rows, and send each piece of the result on its way to be added up.

    Args:
        link: The collectives.
        whole: The rows.
        count: The number of pieces.
        multiply: The product of some rows.
        out: The sum.

    Returns:
        What to wait for before ``out`` is read.
    """
    pending = []
    for start, stop in bounds(whole.shape[0], count):
        multiply(whole[start:stop], out[start:stop])
        pending.append(link.reduce(out[start:stop]))
    return pending


def _runs(link: Link, in_one: bool) -> list[tuple[int, int]]:
    """The ranks whose rows are multiplied at once: first and last, all but this process."""
    if in_one:  # the rows of neighbours follow each other
        cut = [0, link.size] if link.rank is None else [0, link.rank, link.rank + 1, link.size]
        runs = list(zip(cut[::2], cut[1::2], strict=True))
    else:
        runs = [(rank, rank + 1) for rank in range(link.size) if rank != link.rank]
    return [(first, last) for first, last in runs if first < last]
