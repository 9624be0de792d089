"""Names of ops, and which of them a recipe leaves alone."""

from __future__ import annotations

import difflib
import functools
import itertools
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

_known: dict[str, None] = {}


def remember(name: str) -> None:
    """Take note of a name that an op got."""
    if name:
        _known[name] = None


@functools.lru_cache(4096)
def matching(name: str, patterns: tuple[str, ...]) -> str:
    """The first pattern that matches a name, or that of a module around it; ``""``: none."""
    around = itertools.accumulate(name.split("."), "{}.{}".format)
    names = [*around] if name else []
    return next((p for p in patterns if any(fnmatchcase(n, p) for n in names)), "")


def why_unquantized(ops: Sequence[Any], skip: tuple[str, ...], off: str) -> dict[int, str]:
    """Why ops are not quantized that you would expect to be, by position.

    Args:
        ops: The ops of a chain.
        skip: Patterns of what the recipe skips.
        off: Why nothing serves the recipe, or ``""``.
    """
    found = {}
    for i, op in enumerate(ops):
        why = off if op.num_quantizers("forward") else op.unquantized
        if pattern := matching(op.name, skip) if op.num_quantizers("forward") else "":
            why = f"not quantized: skip names it, by {pattern!r}"
        if why:
            found[i] = why
    return found


def check_names(patterns: tuple[str, ...]) -> None:
    """Refuse patterns that match no op.

    Raises:
        ValueError: One matches no name that any op got.
    """
    if patterns:
        _check(patterns, len(_known))


@functools.lru_cache(64)
def _check(patterns: tuple[str, ...], known: int) -> None:
    for pattern in patterns:
        if any(matching(name, (pattern,)) for name in _known):
            continue
        if not _known:
            raise ValueError(
                f"autocast(skip=...): {pattern!r} matches no op, since none has a name: call "
                f"opfuse.prepare(model) first, or give ops a name when you make them"
            )
        close = difflib.get_close_matches(pattern, _known, 3, 0) or [*_known][:3]
        raise ValueError(
            f"autocast(skip=...): {pattern!r} matches no op of a prepared model; {known} names are "
            f"known, such as {', '.join(map(repr, close))}; opfuse.prepare(model) gives an op its "
            f"dotted name"
        )
