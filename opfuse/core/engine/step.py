"""A step: one op that replaces a run of basic ops, from candidate to loop."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from ..cast import Cast
from ..op import BasicOperation


class Recompute(NamedTuple):
    """How the input of an op is computed again instead of being kept.

    Attributes:
        step: The step before it, in the forward.
        run: The ``fuser_recompute`` of that step.
        place, position: Index of the input among the op's saved tensors, and among all of them.
        cast: The cast to repeat, if it is a step of its own.
    """

    step: Step
    run: Callable[..., Any]
    place: int
    cast: Any
    position: int = -1

    @property
    def start(self) -> int:
        """The first basic op of the step before."""
        return self.step.start


@dataclasses.dataclass(slots=True, eq=False)
class Step:
    """One call of one op over ``ops[start:stop]``, and over casts on their edges.

    Attributes:
        source: The :class:`~opfuse.core.records.FusionSource` that gave the fusion; None for a
            basic op by itself, and for a cast.
        begin, end: Its range in half steps, see :mod:`opfuse.core.engine.edges`; casts have a place
            there too.
        matched: The basic ops and the casts, in the order of the forward.
        start, stop: Its range of basic ops; empty for a cast, whose edge is both.
        benefit: Number of tensor reads and writes that the fusion saves.
        env: The environment that was passed to its fusion; None: that of the plan.
        op: The basic op, or the fused op; None until it is built.
        has_extras: Whether one of its basic ops has extra tensors.
        numbers: Attributes to set on the contexts of its basic ops before it runs: ``(op, name)``
            (forward of a fused op only).
        owns: Whether the incoming gradient may be overwritten (backward only).
        note: Further remarks for reports.
        recompute: How the preceding step computes the input again, if it can (backward only).
    """

    source: Any
    begin: int
    end: int
    matched: tuple[BasicOperation, ...]
    benefit: float = 0.0
    env: Any = None
    op: Any = None
    numbers: tuple[tuple[int, str], ...] = ()
    owns: bool = False
    recompute: Recompute | None = None
    note: str = ""
    start: int = dataclasses.field(init=False)
    stop: int = dataclasses.field(init=False)
    has_extras: bool = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.start, self.stop = self.begin // 2, self.end // 2
        self.has_extras = any(op.num_extra_inputs or op.num_extra_outputs for op in self.matched)

    def remark(self, text: str) -> None:
        """Put a remark before those that it has."""
        self.note = "; ".join(filter(None, (text, self.note)))

    @property
    def casts(self) -> list[tuple[int, Cast]]:
        """Its casts, each with its edge."""
        found, edge = [], self.start
        for op in self.matched:
            if isinstance(op, Cast):
                found.append((edge, op))
            else:
                edge += 1
        return found

    @property
    def passes(self) -> str:
        """The pass that it replaces: ``"forward"``, ``"backward"`` or ``"joint"``."""
        return str(self.source.passes) if self.source else "joint"
