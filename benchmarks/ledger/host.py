"""``python -m benchmarks.ledger host``: the Python of a training step of a Llama block.

It needs no GPU: the step runs on meta tensors, planned as on an H100. Triton compiles the kernels,
and a driver that does nothing launches them. Counted are the functions of opfuse and its plugins:
their calls, and the time in them, without that of what they call outside of opfuse. The profiler
makes each call slower, so the times are there to be compared. The last column is the CPU time of
whole steps, without the profiler: with Triton's JIT at each launch, relative to what is remembered.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from opfuse_triton import TARGETS, launcher, machine
from torch.nn import functional as F

import opfuse

from ..launcher import idle_driver
from .launches import OTHERS, Sizes, llama
from .pretending import planned_for

RECIPES = {
    "converted": None,
    "delayed FP8": "fp8-delayed",
    "current FP8": "fp8-current",
    "FP8 blocks": "fp8-block",
    "MXFP8": "mxfp8",
}


@contextlib.contextmanager
def idle(arch: int = 90) -> Iterator[None]:
    """Within the context, meta tensors count as tensors on a GPU where every launch is free.

    Args:
        arch: The GPU, see :data:`opfuse_triton.TARGETS`.
    """
    nobody: ContextVar[Any] = ContextVar("nobody", default=None)
    someone: ContextVar[Any] = ContextVar("someone", default=("kernels take meta tensors",))
    with contextlib.ExitStack() as stack:
        for context in (
            planned_for(TARGETS[arch]),
            opfuse.plugins.using(OTHERS),
            idle_driver(),
            mock.patch.object(launcher, "pretended", nobody),  # launches go to the driver
            mock.patch.object(machine, "recorded", someone),
            mock.patch.object(F, "scaled_mm", _product),
            mock.patch.object(torch, "_scaled_mm", _product),
        ):
            stack.enter_context(context)
        yield


def _product(left: Any, right: Any, *unused: Any, **given: Any) -> Any:
    dtype = given.get("output_dtype") or given["out_dtype"]
    return left.new_empty((left.shape[0], right.shape[1]), dtype=dtype)


def profiled(step: Callable[[], Any]) -> dict[str, tuple[int, float]]:
    """The calls of each function of opfuse and its plugins in one step, and microseconds."""
    with cProfile.Profile() as profile:
        step()
    sources = _sources()
    found: dict[str, tuple[int, float]] = {}
    for entry in profile.getstats():
        code = entry.code
        if isinstance(code, str):
            continue
        file = Path(code.co_filename)
        for folder in sources.intersection(file.parents):
            name = f"{file.relative_to(folder.parent)}:{code.co_firstlineno} {code.co_name}"
            calls, time = found.get(name, (0, 0.0))
            found[name] = calls + entry.callcount, time + 1e6 * entry.inlinetime
    return found


def by_jit(step: Callable[[], Any], turns: int) -> float:
    """The CPU time of steps whose launches are all by Triton's JIT, relative to that of others."""
    ratios = []
    for _ in range(turns):
        remembered = _seconds(step)
        with mock.patch.object(launcher, "_watching", lambda knobs: (True,)):
            ratios.append(_seconds(step) / remembered)
    return statistics.median(ratios)


def _seconds(step: Callable[[], Any]) -> float:
    start = time.process_time()
    for _ in range(5):
        step()
    return time.process_time() - start


def _sources() -> set[Path]:
    """The folders of the packages that are imported: an environment may have such a name, too."""
    packages = [module for name, module in sys.modules.items() if name.startswith("opfuse")]
    tops = [module for module in packages if "." not in module.__name__]
    return {Path(path) for module in tops for path in getattr(module, "__path__", ())}


def main(arguments: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ledger host")
    parser.add_argument("--details", type=int, default=0, help="so many functions of each step")
    parser.add_argument("--turns", type=int, default=15, help="steps; the time is their median")
    parser.add_argument("--only", choices=RECIPES, help="one of the steps")
    asked, os.environ["OPFUSE_TUNING"] = parser.parse_args(arguments), ""
    block = llama(Sizes(), convert=True)
    print("| One step of a block | calls | us | by JIT |\n|---|---|---|---|")
    for name in [asked.only] if asked.only else RECIPES:
        recipe = RECIPES[name]

        def step(recipe: Any = recipe) -> None:
            with opfuse.autocast(enabled=recipe is not None, recipe=recipe):
                block()

        with idle(100 if name == "MXFP8" else 90):
            for _ in range(3):
                step()
            turns = [profiled(step) for _ in range(asked.turns)]
            slower = by_jit(step, asked.turns)
        calls = sum(often for often, _ in turns[0].values())
        used = statistics.median([sum(us for _, us in turn.values()) for turn in turns])
        print(f"| {name} | {calls} | {used:.0f} | {slower:.2f} |", flush=True)
        medians = {
            key: statistics.median([t[key][1] for t in turns if key in t]) for key in turns[0]
        }
        for key in sorted(medians, key=medians.__getitem__, reverse=True)[: asked.details]:
            print(f"    {turns[0][key][0]:4} {medians[key]:7.1f} us {key}")


if __name__ == "__main__":
    main()
