"""Lines of text: wrapped, in columns, with numbers of things."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Sequence

_WIDTH = 100


def wrap(text: str, indent: str, rest: str | None = None) -> list[str]:
    """A text as lines after ``indent``, all but the first after ``rest`` if given."""
    width, rest = max(_WIDTH, len(indent) + 40), indent if rest is None else rest
    wrapper = textwrap.TextWrapper(width, indent, rest, break_long_words=False)
    wrapper.break_on_hyphens = False
    return wrapper.wrap(text)


def table(rows: Collection[Sequence[str]], numbers_from: int = 99) -> list[str]:
    """Rows of cells as lines of columns.

    Args:
        rows: The rows.
        numbers_from: The first column that is aligned on the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        pairs = enumerate(zip(row, widths, strict=True))
        cells = [cell.rjust(n) if i >= numbers_from else cell.ljust(n) for i, (cell, n) in pairs]
        lines.append("  ".join(cells).rstrip())
    return lines


def counted(number: int, noun: str) -> str:
    """A number with its noun, in the plural if needed."""
    return f"{number} {noun}" + ("" if number == 1 else "s")


def as_bytes(count: int) -> str:
    """A number of bytes with a unit."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(count) >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"
