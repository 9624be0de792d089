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
from .measuring import judge_variants, measure, parts
from .timing import Clock, own_stream


def run(
    plugin: str,
    where: str,
    write: Callable[[dict[str, Any]], None],
    clock: Clock,
    deadline: float,
    skip: Collection[str] = (),
) -> None:
    """Judge and time every case.

    Args:
        plugin: Name of the plugin.
        where: ``module:object``, its cases.
        write: Called with ``{"begins": part}`` before each step of a part, and with its row.
        clock: The clock, and the device.
        deadline: No part begins after that, by the clock.
        skip: Parts that are left out: they are done, or ended an earlier process.
    """
    for case in sorted(load_cases(where), key=lambda case: case.turn):
        for part, shape in parts(case, clock.device.type == "cuda"):
            if part in skip or clock.now() > deadline:
                continue
            tell = functools.partial(write, {"begins": part})
            tell()
            torch.manual_seed(0)
            if shape is None:
                row = judge_variants(case, clock, deadline, tell)
            else:
                row = measure(plugin, case, shape, clock, deadline, tell)
            write(row | {"part": part, "plugin": plugin})


def main(plugin: str, where: str, out: str, seconds: str, *skip: str) -> None:
    """Run as a process, with the parts that are left out at the end."""
    device = torch.device("cpu" if is_interpreting() else "cuda")
    clock = Clock(device)
    if is_interpreting():
        interpreter.install()
    with pathlib.Path(out).open("a", encoding="utf-8") as file:

        def write(row: dict[str, Any]) -> None:
            file.write(json.dumps(row) + "\n")
            file.flush()

        with own_stream(device):
            if device.type == "cuda":
                write({"limits": clock.limits()})
            run(plugin, where, write, clock, time.monotonic() + float(seconds), skip)


if __name__ == "__main__":
    main(*sys.argv[1:])
