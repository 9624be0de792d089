"""What a check raises: that a fusion is wrong, or that it does not take a case."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

UNUSED = "it is not used for its own chain, and gives no reason"


class Failure(AssertionError):
    """A check found a fault.

    The suite adds which check, which fusion, and the smallest failing case.
    """


@contextlib.contextmanager
def saying(before: str = "", hint: str = "") -> Iterator[None]:
    """Add words before and after the message of a failure, for a ``with`` block."""
    try:
        yield
    except Failure as failure:
        raise Failure(f"{before}{failure}{hint}") from failure


class Declined(Exception):
    """The fusion refused this case, with the reason."""


@contextlib.contextmanager
def blamed() -> Iterator[None]:
    """Turn an error that is raised inside into a failure: the separate ops ran."""
    try:
        yield
    except (Failure, Declined):
        raise
    except Exception as error:
        text = str(error).strip()
        text = f"{text[:600]}..." if text[600:] else text
        raise Failure(f"it raised {type(error).__name__}: {text}") from error
