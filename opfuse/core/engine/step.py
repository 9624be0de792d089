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
        start: First basic op of the step before it.
        run: The ``fuser_recompute`` of that step.
        place, position: Index of the input among the op's saved tensors, and among all of them.
        cast: The cast to repeat, if it is a step of its own.
    """

    start: int
    run: Callable[..., Any]
    place: int
    cast: Any
    position: int = -1


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
        measured: Its measurement on this machine, or None.
        env: The environment that was passed to its fusion; None: that of the plan.
        op: The basic op, or the fused op; None until it is built.
        run: The bound method that a loop calls.
        direct: Whether that is ``op_forward`` or ``op_backward``, with one context.
        prepares: Whether something happens before the call: the incoming tensor is made plain or
            checked, or an input is computed again.
        given: Whether one of its ops got keyword arguments.
        takes_quantized: Whether the op takes a quantized tensor; if not, it is made plain.
        width: Required last dimension.
        has_extras: Whether one of its basic ops has extra tensors.
        no_extras: For each basic op, no extra tensors.
        numbers: Values to set on the contexts of its basic ops before it runs: ``(place, op,
            name)`` (forward of a fused op only).
        owns: Whether the incoming gradient may be overwritten (backward only).
        note: A further remark for reports.
        recompute: How the preceding step computes the input again, if it can (backward only).
    """

    source: Any
    begin: int
    end: int
    matched: tuple[BasicOperation, ...]
    benefit: float = 0.0
    measured: Any = None
    env: Any = None
    op: Any = None
    run: Callable[..., Any] = NotImplemented
    direct: bool = False
    prepares: bool = False
    given: bool = False
    takes_quantized: bool = False
    width: int | None = None
    has_extras: bool = False
    no_extras: tuple[tuple[()], ...] = ()
    numbers: tuple[tuple[int, Any, str], ...] = ()
    owns: bool = False
    recompute: Recompute | None = None
    note: str = ""
    start: int = dataclasses.field(init=False)
    stop: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.start, self.stop = self.begin // 2, self.end // 2

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
