"""The dtypes that ops accept as extra inputs."""

from __future__ import annotations

from typing import NoReturn

import torch

from .op import BasicOperation

WORDS = {
    "floating": "a floating-point tensor",
    "integer": "an integer tensor",
    "bool": "a bool tensor",
}
"""The kinds of extra inputs, in words."""


def kinds_of(op: BasicOperation) -> tuple[str, ...]:
    """The kind of each extra input of an op: ``"floating"``, ``"integer"`` or ``"bool"``.

    Raises:
        ValueError: ``extra_input_dtypes`` does not have one of these for each extra input.
    """
    count, declared = op.num_extra_inputs, op.extra_input_dtypes
    if declared == ():
        return ("floating",) * count
    if isinstance(declared, str) or len(declared) != count or not WORDS.keys() >= {*declared}:
        words = ", ".join(map(repr, WORDS))
        raise ValueError(
            f"{type(op).__name__}.extra_input_dtypes must have one of {words} for each of its "
            f"{count} extra inputs, got {declared!r}"
        )
    return tuple(declared)


def is_kind(kind: str, dtype: torch.dtype) -> bool:
    """Return whether an extra input of this kind may have that dtype."""
    if kind == "integer":
        return not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)
    return dtype is torch.bool if kind == "bool" else dtype.is_floating_point


def refuse_kind(who: str, kind: str, dtype: torch.dtype) -> NoReturn:
    """Refuse an extra input of a dtype that the op does not take."""
    other = kind == "floating" and not dtype.is_complex
    hint = "; an op declares another kind in its extra_input_dtypes" if other else ""
    raise TypeError(f"{who} expected {WORDS[kind]}, got {dtype}{hint}")
