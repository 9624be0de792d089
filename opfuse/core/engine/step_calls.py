"""Steps of single ops, and the range of a step in a profile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..cast import Cast
from ..introspection import op_class
from ..op import BasicOperation
from .step import Step


def lone_step(op: BasicOperation, place: int) -> Step:
    """A step of an op, or of a cast, by itself."""
    return Step(None, place, place + 1, (op,), op=op)


def separate(step: Step, pass_name: str, last: int | None = None) -> list[Step]:
    """The steps of the ops and casts of a fused step, in the order of the pass.

    Args:
        step: A step of that pass.
        pass_name: ``"forward"`` or ``"backward"``.
        last: The last op that takes part; None: all do.
    """
    found: list[Step] = []
    index = step.start
    for op in step.matched:
        if last is not None and index > last:
            break
        is_cast = isinstance(op, Cast)
        found.append(alone := lone_step(op, 2 * index + (not is_cast)))
        alone.recompute = step.recompute if index == step.start and not is_cast else None
        index += not is_cast
    return found if pass_name == "forward" else found[::-1]


class InRange:
    """Wraps the method of a fused step in a range that ``torch.profiler`` shows.

    The range names the fusion, the plugin, the pass and the ops.
    """

    def __init__(self, step: Step, pass_name: str, run: Callable[..., Any]) -> None:
        self.__self__, self.__name__ = step.op, run.__name__
        self._run, source = run, step.source
        ops = " + ".join(op_class(op).__name__ for op in step.matched)
        owner = f" of {source.distribution}" if source.distribution else ""
        self._title = f"{source.name}{owner}, {pass_name}: {ops}"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it."""
        with torch.profiler.record_function(self._title):
            return self._run(*args, **kwargs)
