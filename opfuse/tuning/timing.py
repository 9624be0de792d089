"""Times two ways to do the same, in turns."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

MOST_NOISE = 0.02
"""Half the width of the interval of the speed that is good enough."""

TURNS, MOST_TURNS, _FEW_TURNS = 20, 80, 8
_CLEAR = 0.1  # when the interval is this far from 1, more turns add nothing
_SECONDS = 0.001  # of a turn, at least
_LONG = 2.0  # seconds of all turns; slow functions vary less, and 20 turns of them take minutes


class Timing(NamedTuple):
    """How two ways compare.

    Attributes:
        speed: Time of the first divided by that of the second: the median of the turns.
        noise: Half the width of a 95 % interval of that median, by ranks, which assumes nothing
            about the noise.
        first, second: Seconds of a call: the medians.
    """

    speed: float
    noise: float
    first: float
    second: float


def compare(
    first: Callable[[], object],
    second: Callable[[], object],
    device: torch.device,
    *,
    clear: bool = True,
    most: int = MOST_TURNS,
) -> Timing:
    """Time two functions in turns, until the interval is narrow.

    Args:
        first: The first function.
        second: The second function.
        device: Where they compute; its queue is waited for.
        clear: Stop early if one is faster by far, or if a turn is slow and the interval narrow.
        most: The largest number of turns.
    """
    ways = first, second
    calls = [_calls(way, device) for way in ways]
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(most):
        for which in (0, 1) if turn % 2 else (1, 0):
            times[which].append(_time(ways[which], calls[which], device))
        if turn + 1 < _FEW_TURNS:
            continue
        low, middle, high = interval([a / b for a, b in zip(*times, strict=True)])
        noise = (high - low) / 2
        is_long = clear and sum(map(sum, times)) > _LONG
        if (turn + 1 >= TURNS or is_long) and noise <= MOST_NOISE:
            break
        if clear and (low > 1 + _CLEAR or high < 1 - _CLEAR):
            break
    return Timing(middle, noise, statistics.median(times[0]), statistics.median(times[1]))


def interval(values: list[float]) -> tuple[float, float, float]:
    """The median of values, and a 95 % interval of it by ranks (Conover 1999, section 3.2).

    Returns:
        Its lower end, the median, its upper end.
    """
    ordered, n = sorted(values), len(values)
    rank = max(math.floor(n / 2 - 0.98 * math.sqrt(n)), 0)
    return ordered[rank], statistics.median(ordered), ordered[n - 1 - rank]


def _calls(way: Callable[[], object], device: torch.device) -> int:
    """How many calls a turn takes; warms up."""
    way()
    _time(way, 1, device)
    return max(1, math.ceil(_SECONDS / max(_time(way, 1, device), 1e-9)))


def _time(way: Callable[[], object], calls: int, device: torch.device) -> float:
    """Seconds of a call.

    With one thread on a CPU it is CPU time, which does not count what other programs get. With more
    it is the time on the clock: CPU time would be the sum of theirs, as if nothing ran at once.
    """
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    now = time.process_time if alone else time.perf_counter
    _wait(device)
    start = now()
    for _ in range(calls):
        way()
    _wait(device)
    return (now() - start) / calls


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
