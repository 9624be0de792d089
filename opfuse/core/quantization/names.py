"""Names of ops, and the ops that a recipe skips."""

from __future__ import annotations

import difflib
import functools
import itertools
import weakref
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

_named: weakref.WeakSet[Any] = weakref.WeakSet()


def remember(op: Any) -> None:
    """Remember an op that got a name."""
    _named.add(op)
    check_names.cache_clear()


@functools.lru_cache(4096)
def first_match(name: str, patterns: tuple[str, ...]) -> str:
    """The first pattern that matches a name, or the name of an outer module; ``""``: none."""
    names = [*itertools.accumulate(name.split("."), "{}.{}".format)] if name else []
    return next((p for p in patterns if any(fnmatchcase(n, p) for n in names)), "")


def why_unquantized(ops: Sequence[Any], skip: tuple[str, ...], off: str) -> dict[int, str]:
    """The reasons why ops that you would expect to be quantized are not, by position.

    Args:
        ops: The ops of a chain.
        skip: Patterns of the names that the recipe skips.
        off: Why no plugin serves the recipe, or ``""``.

    Raises:
        ValueError: A pattern names a part of an op, and not the op.
    """
    found = {}
    for i, op in enumerate(ops):
        if skip:
            _refuse_part(op, skip)
        if not op.num_quantizers("forward"):
            if why := getattr(op, "unquantized", ""):
                found[i] = why
            continue
        if pattern := first_match(op.name, skip):
            found[i] = f"not quantized: skip names it, by {pattern!r}"
        elif off:
            found[i] = off
    return found


def _refuse_part(op: Any, skip: tuple[str, ...]) -> None:
    """Refuse a pattern for a linear inside an op that combines several."""
    if first_match(op.name, skip):
        return
    for inner in op.modules():
        name = getattr(inner, "name", "")
        if isinstance(name, str) and (pattern := first_match(name, skip)):
            raise ValueError(
                f"autocast(skip=...): {pattern!r} names {name!r}, which is a part of "
                f"{type(op).__name__} {op.name!r}: skip all of it, by {op.name!r}"
            )


@functools.lru_cache(64)
def check_names(patterns: tuple[str, ...]) -> None:
    """Refuse patterns that match no op.

    Raises:
        ValueError: One matches no existing op that would be quantized.
    """
    remembered = list(_named) if patterns else ()
    ops = [op for op in remembered if getattr(op, "num_quantizers", lambda _: 0)("forward")]
    known = {op.name: None for op in ops if op.name}
    for pattern in patterns:
        if any(first_match(name, (pattern,)) for name in known):
            continue
        if not known:
            raise ValueError(
                f"autocast(skip=...): {pattern!r} matches no op, since none that is quantized has "
                f"a name: call opfuse.assign_names(model) first, or give names to the constructors"
            )
        close = difflib.get_close_matches(pattern, known, 3, 0) or [*known][:3]
        raise ValueError(
            f"autocast(skip=...): {pattern!r} matches no op of a prepared model that is quantized; "
            f"{len(known)} have names, such as {', '.join(map(repr, close))}; "
            f"opfuse.assign_names(model) gives an op its dotted name"
        )
