"""Parts of rows that fit a core's cache, for formulas of a softmax on a CPU; for fusions too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..core.precision import wide, widen
from . import _blocks

Spare = tuple[Tensor | None, Tensor | None, Tensor | None]


def parts(rows: Tensor, *others: Tensor | None) -> list[Any]:
    """Parts of rows whose temporaries fit a cache, and memory for them; elsewhere one part.

    The memory is the same for all parts. What a part frees may go back to the system, and the next
    part then waits for other pages.

    Args:
        rows: A matrix.
        others: Tensors with as many rows; None: there is none.

    Returns:
        For each part three tensors that it may overwrite, in the dtype of the arithmetic, or three
        times None, and then its rows of each argument.
    """
    spare: Spare = None, None, None
    if not rows.is_cpu or rows.numel() <= _blocks.LEAST or _blocks.tracing():
        return [(spare, rows, *others)]
    count = max(1, _blocks.BLOCK // rows.shape[-1])
    first = torch.split(rows, count)
    given = [[None] * len(first) if each is None else torch.split(each, count) for each in others]
    spares: list[Any] = [spare] * len(first)
    if _blocks.writes_out(rows, *[each for each in others if each is not None]):
        made = rows.new_empty((3, count, rows.shape[-1]), dtype=wide(rows.dtype))
        spares = [made[:, : len(part)].unbind() for part in first]
    return list(zip(spares, first, *given, strict=True))


def gradients_by_parts(
    of_part: Callable[..., Tensor], rows: Tensor, *others: Tensor | None, in_place: bool = False
) -> Tensor:
    """A gradient in the dtype of the rows, computed by :func:`parts`.

    Args:
        of_part: Called with each of the parts.
        rows: See there.
        others: See there.
        in_place: Whether to overwrite the rows.
    """
    found = parts(rows, *others)
    if not in_place and found[0][0][0] is None:  # where nothing may be overwritten, or in one part
        of_all = [of_part(*part).to(rows.dtype) for part in found]
        return of_all[0] if len(of_all) == 1 else torch.cat(of_all)
    out = rows if in_place else torch.empty_like(rows)
    for place, part in zip(torch.split(out, len(found[0][1]) or 1), found, strict=True):
        place.copy_(of_part(*part))
    return out


def widened(x: Tensor, out: Tensor | None) -> Tensor:
    """``widen(x)``, in ``out`` if that is given and another dtype is needed."""
    return widen(x) if out is None or x.dtype is out.dtype else out.copy_(x)
