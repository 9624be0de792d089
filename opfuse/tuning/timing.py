"""Times two ways to do the same, in turns."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import torch

from .clock import TURN, Call, Clock
from .table import REPEATS, THRESHOLD

MOST_NOISE = 0.02
"""Half the width of the interval of the speed that is good enough."""

TURNS, MOST_TURNS, _FEW_TURNS = 20, 640, 8
_CLEAR = 0.1  # when the interval is this far from 1, more turns add nothing
LEAST, _LONG, _LONGEST = 1.0, 2.0, 8.0  # seconds of all turns; 20 of slow functions take minutes
_CLOSE = 0.005  # below that noise what two processes find differs for other reasons
_DECIDES = (THRESHOLD - REPEATS, 1 - REPEATS, 1 + REPEATS)  # where a choice turns


class Timing(NamedTuple):
    """How two ways compare.

    Attributes:
        speed: Time of the first divided by that of the second: the median of the turns.
        noise: From that median to the end of a 95 % interval of it that is nearer 1, by ranks,
            which assumes nothing about noise. :func:`in_rounds` gives half the interval's width.
        first, second: Seconds of a call: the medians.
        eager: On a GPU, why the time of the host counts too, or ``""``.
    """

    speed: float
    noise: float
    first: float
    second: float
    eager: str = ""


def compare(
    first: Call | Sequence[Call],
    second: Call | Sequence[Call],
    device: torch.device,
    *,
    clear: bool = True,
    most: int = MOST_TURNS,
    least: float = 0.0,
) -> Timing:
    """Time two functions in turns, until the interval is narrow.

    Args:
        first: The first function, or one for each set of inputs.
        second: The second function, likewise.
        device: Where they compute.
        clear: Stop early if one is faster by far, or if a turn is slow and the interval narrow. Go
            on where the interval holds a speed around which a choice turns.
        most: The largest number of turns.
        least: Seconds of all turns, at least, unless one is faster by far: what slows a machine
            down for a moment may slow one of two functions more.
    """
    ways = [[way] if callable(way) else way for way in (first, second)]
    clock = Clock.of(device)
    times: tuple[list[float], list[float]] = ([], [])
    with clock.around():
        samplers, eager = clock.samplers(ways)
        for turn in range(most):
            for which in (0, 1) if turn % 2 else (1, 0):
                times[which].append(samplers[which]())
            if turn + 1 < _FEW_TURNS:
                continue
            low, middle, high = interval([a / b for a, b in zip(*times, strict=True)])
            noise = (high - low) / 2
            took = sum(max(each, TURN) for each in (*times[0], *times[1]))
            if clear and (took > _LONGEST or low > 1 + _CLEAR or high < 1 - _CLEAR):
                break
            if clear and noise > _CLOSE and any(low < speed < high for speed in _DECIDES):
                continue
            is_enough = turn + 1 >= TURNS or (clear and took > _LONG)
            if is_enough and noise <= MOST_NOISE and took >= least:
                break
    noise = high - middle if middle < 1 else middle - low
    return Timing(middle, noise, statistics.median(times[0]), statistics.median(times[1]), eager)


def in_rounds(ways: Sequence[Call], device: torch.device) -> list[Timing]:
    """Time several functions, each once a round, until the intervals are narrow, or it took long.

    What changes with time, such as the clock of a processor, changes all of them: so they can be
    compared with each other, too. Each round has another order, since what ran before a function
    changes its time.

    Args:
        ways: The functions.
        device: Where they compute.

    Returns:
        The timing of each against the first, which is as fast as itself.
    """
    clock, order, times = Clock.of(device), random.Random(0), [list[float]() for _ in ways]
    with clock.around():
        samplers, eager = clock.samplers([[way] for way in ways])
        for turn in range(2 * TURNS):
            for which in order.sample(range(len(ways)), len(ways)):
                times[which].append(samplers[which]())
            if turn + 1 < _FEW_TURNS:
                continue
            found = [interval([a / b for a, b in zip(times[0], t, strict=True)]) for t in times]
            took, width = sum(times[0]), max([high - low for low, _, high in found])
            is_narrow = width <= 2 * MOST_NOISE and (turn + 1 >= TURNS or took > _LONG)
            if is_narrow or took > 4 * _LONGEST:
                break
    first, *_ = middles = [*map(statistics.median, times)]
    rows = zip(found, middles, strict=True)
    return [Timing(speed, (high - low) / 2, first, own, eager) for (low, speed, high), own in rows]


def interval(values: list[float]) -> tuple[float, float, float]:
    """The median of values, and a 95 % interval of it by ranks (Conover 1999, section 3.2).

    Returns:
        Its lower end, the median, its upper end.
    """
    ordered, n = sorted(values), len(values)
    rank = max(math.floor(n / 2 - 0.98 * math.sqrt(n)), 0)
    return ordered[rank], statistics.median(ordered), ordered[n - 1 - rank]
