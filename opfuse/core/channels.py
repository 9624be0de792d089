"""Declarations of extra inputs: the dtypes that ops accept, and names that several share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from .op import BasicOperation

Slot = tuple[int, int]

_WORDS = {
    "floating": "a floating-point tensor",
    "integer": "an integer tensor",
    "bool": "a bool tensor",
}


def kinds_of(op: BasicOperation) -> tuple[str, ...]:
    """The kind of each extra input of an op: ``"floating"``, ``"integer"`` or ``"bool"``.

    Raises:
        ValueError: ``extra_input_dtypes`` does not have one of these for each extra input.
    """
    count, declared = op.num_extra_inputs, op.extra_input_dtypes
    if declared == ():
        return ("floating",) * count
    if isinstance(declared, str) or len(declared) != count or not _WORDS.keys() >= {*declared}:
        words = ", ".join(map(repr, _WORDS))
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
    raise TypeError(f"{who} expected {_WORDS[kind]}, got {dtype}{hint}")


def check_extra(
    op: BasicOperation,
    index: int,
    title: str,
    extra: Any,
    kind: str,
    wanted: torch.dtype | None,
    device: torch.device,
) -> None:
    """Refuse an extra input of another kind, on another device, or of another dtype.

    Args:
        op: The op that takes it.
        index: Index of the extra input.
        title: The name of the op in error messages.
        extra: The tensor, or its ``(dtype, device)``.
        kind: The kind that the op takes.
        wanted: The dtype of the input, which floating-point extras must have; None: any.
        device: The device of the input.

    Raises:
        TypeError: It has another dtype.
        ValueError: It is on another device.
    """
    name = op.extra_input_names[index]
    who = f"extra input {index if name is None else f'{index} ({name!r})'} of {title}"
    dtype, where = (extra.dtype, extra.device) if isinstance(extra, Tensor) else extra
    if not is_kind(kind, dtype):
        refuse_kind(who, kind, dtype)
    if where != device:
        raise ValueError(f"{who} is on {where}, the input is on {device}")
    if wanted is not None and kind == "floating" and dtype != wanted:
        raise TypeError(f"{who} expected {wanted} as the input, got {dtype}")


def arguments_of(
    ops: Sequence[BasicOperation], slots: Iterable[Slot], title: Callable[[int], str]
) -> tuple[list[Slot], dict[Slot, int]]:
    """Assign the caller's extra inputs to slots; slots of one name share an argument.

    Args:
        ops: The basic ops of a chain.
        slots: ``(op, slot)`` of each extra input that the caller gives, in order.
        title: Returns the name of an op in error messages, by its number.

    Returns:
        The first slot of each argument, in order; and for each slot, the number of its argument.

    Raises:
        ValueError: Inputs of one name that take different dtypes, or one that is written into.
    """
    firsts: list[Slot] = []
    numbers: dict[Slot, int] = {}
    named: dict[str, int] = {}
    for slot in slots:
        name = ops[slot[0]].extra_input_names[slot[1]]
        number = len(firsts) if name is None else named.setdefault(name, len(firsts))
        if number == len(firsts):
            firsts.append(slot)
        else:
            _check_shared(ops, firsts[number], slot, title)
        numbers[slot] = number
    return firsts, numbers


def takers(
    ops: Sequence[BasicOperation],
    firsts: Sequence[Slot],
    numbers: dict[Slot, int],
    title: Callable[[int], str],
) -> list[str]:
    """For each argument its name, if it has one, and the ops that take it, for messages.

    Args:
        ops: The basic ops of a chain.
        firsts: The first slots, from :func:`arguments_of`.
        numbers: The argument numbers, from :func:`arguments_of`.
        title: As for :func:`arguments_of`.
    """
    found: list[dict[str, None]] = [{} for _ in firsts]
    for (i, _), number in numbers.items():
        found[number][title(i)] = None
    names = [ops[i].extra_input_names[k] for i, k in firsts]
    return [
        f"{f'{name!r} of ' if name else ''}{' and '.join(who)}"
        for name, who in zip(names, found, strict=True)
    ]


def _check_shared(
    ops: Sequence[BasicOperation], first: Slot, other: Slot, title: Callable[[int], str]
) -> None:
    """Refuse two inputs of one name whose ops cannot take the same tensor."""
    what = f"extra input name {ops[first[0]].extra_input_names[first[1]]!r}"
    both = [(kinds_of(ops[i])[k], f"{title(i)} as extra input {k}") for i, k in (first, other)]
    if both[0][0] != both[1][0]:
        demands = " but ".join(f"{_WORDS[kind]} by {who}" for kind, who in both)
        raise ValueError(f"{what} is wanted as {demands}: give them different names")
    for i, _ in (first, other):
        if getattr(ops[i], "in_place", False):
            raise ValueError(
                f"{what} is read by {title(first[0])} and {title(other[0])}, and {title(i)} "
                f"writes into it: pass in_place=False, or give them different names"
            )
