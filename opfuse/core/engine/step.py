"""A step: one op that replaces a run of basic ops, from candidate to loop."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from ..cast import Cast
from ..introspection import op_class
from ..op import BasicOperation


class Recompute(NamedTuple):
    """How the input of an op is computed again instead of being kept.

    Attributes:
        step: The step before it, in the forward.
        run: The ``fuser_recompute`` of that step.
        place: Index of the input among the op's saved tensors.
        cast: The cast to repeat, if it is a step of its own.
    """

    step: Step
    run: Callable[..., Any]
    place: int
    cast: Any


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
        has_casts: Whether it covers a cast.
        note: Further remarks for reports.
    """

    source: Any
    begin: int
    end: int
    matched: tuple[BasicOperation, ...]
    benefit: float = 0.0
    env: Any = None
    op: Any = None
    note: str = ""
    start: int = dataclasses.field(init=False)
    stop: int = dataclasses.field(init=False)
    has_extras: bool = dataclasses.field(init=False)
    has_casts: bool = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.start, self.stop = self.begin // 2, self.end // 2
        self.has_casts = len(self.matched) > self.stop - self.start
        self.has_extras = any(op.num_extra_inputs or op.num_extra_outputs for op in self.matched)

    def remark(self, text: str) -> None:
        """Put a remark before those that it has."""
        self.note = "; ".join(filter(None, (text, self.note)))

    @classmethod
    def alone(cls, op: BasicOperation, place: int) -> Step:
        """A step of an op, or of a cast, by itself."""
        return cls(None, place, place + 1, (op,), op=op)

    @property
    def indexed(self) -> list[tuple[int, BasicOperation]]:
        """Its ops, each with its index, and its casts, each with its edge."""
        found, index = [], self.start
        for op in self.matched:
            found.append((index, op))
            index += not isinstance(op, Cast)
        return found

    @property
    def casts(self) -> list[tuple[int, Cast]]:
        """Its casts, each with its edge."""
        return [(edge, op) for edge, op in self.indexed if isinstance(op, Cast)]

    @property
    def passes(self) -> str:
        """The pass that it replaces: ``"forward"``, ``"backward"`` or ``"joint"``."""
        return str(self.source.passes) if self.source else "joint"

    @property
    def title(self) -> str:
        """The names of its ops and casts."""
        return " + ".join(op_class(op).__name__ for op in self.matched)

    def separate(self, pass_name: str, last: int | None = None) -> list[Step]:
        """The steps of its ops and casts, in the order of a pass.

        Args:
            pass_name: ``"forward"`` or ``"backward"``.
            last: The last op that takes part; None: all do.
        """
        found = [
            Step.alone(op, 2 * i + (not isinstance(op, Cast)))
            for i, op in self.indexed
            if last is None or i <= last
        ]
        return found if pass_name == "forward" else found[::-1]
