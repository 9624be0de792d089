"""Quantized tensors among saved ones: their parts as plain tensors, which autograd can keep."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .formats import QuantizedTensor


def is_of(kept: Any, output: Any) -> bool:
    """Return whether an op saved this very tensor or, if it is quantized, copies of it."""
    if not isinstance(kept, QuantizedTensor) or not isinstance(output, QuantizedTensor):
        return kept is output
    return {*map(id, kept.tensors())} <= {id(None), *map(id, output.tensors())}


def unpacked(saved: list[Any]) -> list[tuple[int, QuantizedTensor, int, int]]:
    """Move the tensors of quantized tensors to the end, so that all other places stay.

    Returns:
        For each: its place, the quantized tensor without its tensors, and their range.
    """
    found = []
    for place, entry in enumerate(tuple(saved)):
        if isinstance(entry, QuantizedTensor):
            parts = entry.tensors()
            shell = entry.over((None,) * len(parts))
            found.append((place, shell, len(saved), len(saved) + len(parts)))
            saved[place] = None
            saved.extend(parts)
    return found


def rebuilt(
    saved: tuple[Any, ...], quantized: Sequence[tuple[int, QuantizedTensor, int, int]]
) -> tuple[Any, ...]:
    """Undo :func:`unpacked`."""
    entries = list(saved)
    for place, shell, first, last in quantized:
        entries[place] = shell.over(saved[first:last])
    return tuple(entries)
