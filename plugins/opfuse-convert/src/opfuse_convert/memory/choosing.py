"""The choice of an option for each unit: the least time that a number of bytes allows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple


class Option(NamedTuple):
    """One way to run a unit.

    Attributes:
        nbytes: The bytes that it keeps.
        seconds: The seconds that it adds to a step.
        name: What it is, in words.
        actions: Pairs of the number of a part and an action.
    """

    nbytes: int
    seconds: float
    name: str = ""
    actions: tuple[Any, ...] = ()


class Point(NamedTuple):
    """A choice for the units so far, with the least time for its bytes.

    Attributes:
        nbytes: Bytes of all units.
        ticks: Microseconds added, by all.
        before: The point without the last unit; None: there are no units.
        option: The number of the last unit's option.
    """

    nbytes: int
    ticks: int
    before: Point | None = None
    option: int = 0


def pareto(options: Iterable[Option]) -> list[Option]:
    """Options, the fewest bytes first, each with less time than all that keep fewer."""
    best: list[Option] = []
    for option in sorted(options, key=lambda each: (each.nbytes, each.seconds, each.name)):
        if not best or option.seconds < best[-1].seconds:
            best.append(option)
    return best


def front(units: Sequence[Sequence[Option]]) -> list[Point]:
    """All choices of which none has fewer bytes for the same time or less, the fewest bytes first.

    Units are merged one by one, and what is dominated is dropped at once: that is exact, since what
    follows adds the same to both.

    Args:
        units: The options of each unit.
    """
    points = [Point(0, 0)]
    for options in units:
        ticks = [round(option.seconds * 1e6) for option in options]
        sums = [
            (point.nbytes + option.nbytes, point.ticks + tick, number, index)
            for index, point in enumerate(points)
            for number, (option, tick) in enumerate(zip(options, ticks, strict=True))
        ]
        merged: list[Point] = []
        for nbytes, total, number, index in sorted(sums):
            if not merged or total < merged[-1].ticks:
                merged.append(Point(nbytes, total, points[index], number))
        points = merged
    return points


def options_of(point: Point, units: Sequence[Sequence[Option]], kinds: Sequence[str]) -> list[int]:
    """The number of the option of each unit; of units of one kind the earlier ones keep the least.

    Args:
        point: The choice.
        units: The options of each unit, those with fewer bytes first.
        kinds: The kind of each unit.
    """
    numbers = [0] * len(units)
    for place in reversed(range(len(units))):
        numbers[place] = point.option
        point = point.before  # type: ignore[assignment]
    for kind in dict.fromkeys(kinds):
        places = [place for place, its in enumerate(kinds) if its == kind]
        for place, number in zip(places, sorted(numbers[p] for p in places), strict=True):
            numbers[place] = number
    return numbers
