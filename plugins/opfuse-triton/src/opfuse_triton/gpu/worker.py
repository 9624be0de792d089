"""One process: the cases of one plugin, a line of JSON before and after each part."""

from __future__ import annotations

import json
import pathlib
import sys
import time
from collections.abc import Callable, Collection
from typing import Any

import torch

from opfuse.testing import interpreter

from ..machine import is_interpreting
from ..recorded import describe, load_cases
from .measuring import judge_variants, measure
from .timing import Clock


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
        write: Called with ``{"begins": part}`` before each part, and with its row after it.
        clock: The clock, and the device.
        deadline: No part begins after that, by the clock.
        skip: Parts that are left out: they are done, or ended an earlier process.
    """
    for case in sorted(load_cases(where), key=lambda case: case.turn):
        shapes = case.small[:1] if clock.device.type != "cuda" else case.shapes
        parts = [("", None), *[(describe(shape), shape) for shape in shapes]]
        for title, shape in parts:
            part = f"{case.name}: {title}" if title else case.name
            if part in skip or clock.now() > deadline:
                continue
            write({"begins": part})
            torch.manual_seed(0)
            if shape is None:
                row = judge_variants(case, clock, deadline)
            else:
                row = measure(plugin, case, shape, clock, deadline)
            row |= {"part": part, "plugin": plugin, "case": case.name, "shape": title}
            write(row)


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

        if device.type == "cuda":
            write({"limits": clock.limits()})
        run(plugin, where, write, clock, time.monotonic() + float(seconds), skip)


if __name__ == "__main__":
    main(*sys.argv[1:])
