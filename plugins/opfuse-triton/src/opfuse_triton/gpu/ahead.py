"""Compiling what the cases launch, on all cores, before anything is timed."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any

import torch

from ..cases import KernelCase
from ..recorded import load_cases, record
from ..targets import Target
from .measuring import EVERYTHING, Wanted, variants

Work = tuple[int, KernelCase, Mapping[str, int], torch.dtype, int]
"""The turn of a case, the case, a shape, the dtype in place of bfloat16, and the offset."""


def compile_ahead(
    places: Iterable[str],
    target: Target,
    seconds: float,
    wanted: Wanted = EVERYTHING,
    *,
    begin: Callable[[list[str]], Any] = subprocess.Popen,
    wait: Callable[[float], None] = time.sleep,
    now: Callable[[], float] = time.monotonic,
) -> None:
    """Compile into Triton's cache on disk, in a process for each core.

    What fails here fails again where it is measured, and is told there.

    Args:
        places: ``module:object`` of lists of cases.
        target: What to compile for; no GPU is used.
        seconds: After that, processes that still compile are ended.
        wanted: What is measured afterwards.
        begin: Starts a process.
        wait: Sleeps.
        now: The clock.
    """
    end, count = now() + seconds, len(os.sched_getaffinity(0))
    command = [sys.executable, "-m", __name__, json.dumps(asdict(target)), json.dumps(wanted)]
    processes = [begin([*command, str(number), str(count), *places]) for number in range(count)]
    while any(process.poll() is None for process in processes) and now() < end:
        wait(0.2)
    for process in processes:
        process.kill()
        process.wait()


def work(places: Iterable[str], wanted: Wanted = EVERYTHING) -> list[Work]:
    """Everything that the command launches, what it measures first in front."""
    found: list[Work] = []
    for case in [case for where in places for case in load_cases(where)]:
        real = case.shapes if wanted.takes(case, False) else ()
        found += [(case.turn, case, shape, torch.bfloat16, 0) for shape in real]
        for _, shape, dtype, offset in variants(case) if wanted.takes(case, True) else ():
            found.append((case.turn, case, shape, dtype, offset))
    return sorted(found, key=lambda one: one[0])


def compile_launches(target: Target, one: Work) -> None:
    """Compile the launches of a case; at its real shapes every candidate of each kernel."""
    _, case, shape, dtype, offset = one
    for launch in record(case, shape, target, None, dtype, offset).launches:
        configs = [launch.config]
        if shape in case.shapes:
            configs = launch.kernel.possible(target, launch.facts)
        for config in configs:
            with contextlib.suppress(Exception):
                replace(launch, config=config).compile()


def main(target: str, wanted: str, number: str, count: str, *places: str) -> None:
    """Compile the share of one of the processes."""
    of = Target(**json.loads(target))
    for one in work(places, Wanted(*json.loads(wanted)))[int(number) :: int(count)]:
        if one[1].fits(of):
            with contextlib.suppress(Exception):
                compile_launches(of, one)


if __name__ == "__main__":
    main(*sys.argv[1:])
