"""One process: the cases of one plugin, with lines of JSON before and after each part."""

from __future__ import annotations

import functools
import json
import pathlib
import sys
import time
from collections.abc import Callable, Collection
from typing import Any

import torch

from opfuse.testing import interpreter

from ..machine import is_interpreting
from ..recorded import load_cases
from .measuring import judge_variants, measure, measure_compiled, parts
from .timing import Clock


def run(
    plugin: str,
    where: str,
    write: Callable[[dict[str, Any]], None],
    clock: Clock,
    deadline: float,
    wanted: Collection[str],
) -> None:
    """Judge and time every case.

    Args:
        plugin: Name of the plugin.
        where: ``module:object``, its cases.
        write: Called with ``{"begins": part}`` before each step of a part, and with its row.
        clock: The clock, and the device.
        deadline: No part begins after that, by the clock.
        wanted: Names of the parts: not those that are done, or ended an earlier process.
    """
    for part in parts(load_cases(where), clock.device.type == "cuda"):
        if part.name not in wanted or clock.now() > deadline:
            continue
        tell = functools.partial(write, {"begins": part.name})
        tell()
        began = time.monotonic()
        torch.manual_seed(0)
        if part.shape is None:
            row = judge_variants(part.case, clock, deadline, tell)
        elif part.compiled:
            row = measure_compiled(part.case, part.shape, clock)
        else:
            row = measure(plugin, part.case, part.shape, clock, deadline, tell)
        write(row | {"part": part.name, "plugin": plugin, "took": time.monotonic() - began})


def main(plugin: str, where: str, out: str, seconds: str, *wanted: str) -> None:
    """Run as a process, with the names of the parts at the end."""
    device = torch.device("cpu" if is_interpreting() else "cuda")
    clock = Clock(device)
    if is_interpreting():
        interpreter.install()
    with pathlib.Path(out).open("a", encoding="utf-8") as file:

        def write(row: dict[str, Any]) -> None:
            file.write(json.dumps(row) + "\n")
            file.flush()

        if device.type == "cuda":
            write({"limits": clock.limits()})
        run(plugin, where, write, clock, time.monotonic() + float(seconds), wanted)


if __name__ == "__main__":
    main(*sys.argv[1:])
