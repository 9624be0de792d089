"""A step: one op in place of a run of basic ops, from candidate to loop."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from ..cast import Cast
from ..op import BasicOperation


@dataclasses.dataclass(slots=True, eq=False)
class Step:
    """One call of one op over ``ops[start:stop]``, and over casts on their edges.

    Attributes:
        source: The :class:`~opfuse.core.records.FusionSource` that gave the fusion; None for a
            basic op by itself, and for a cast.
        begin, end: The same in half steps, see :mod:`opfuse.core.engine.edges`; there a cast has a
            place too.
        matched: The basic ops and the casts, in the order of the forward.
        start, stop: Which basic ops: none for a cast, which has the edge as both.
        benefit: How many reads and writes of tensors the fusion saves.
        measured: What was measured of it on this machine, or None.
        env: What its fusion was told about where it would run; None: nothing but what all are told.
        op: The basic op, or the fused op; None while it is not built.
        run: The bound method that a loop calls.
        direct: Whether that is ``op_forward`` or ``op_backward``, with one context.
        prepares: Whether something happens before the call: the incoming tensor is made plain or
            looked at, or an input is computed again.
        given: Whether an op of it got keyword arguments.
        takes_quantized: Whether the op takes a quantized tensor; if not, it is made plain.
        width: Last dimension to insist on.
        has_extras: Whether one of its basic ops has extra tensors.
        no_extras: For each basic op, no extra tensors.
        numbers: What goes into the contexts of its basic ops before it runs: ``(place, op, name)``
            (forward of a fused op only).
        owns: Whether the incoming gradient may be overwritten (backward only).
        with_output: How a fused op gives its output again beside its backward, if the step that
            runs before it waits for that (backward only).
        waits: Whether a basic op gives the gradient of its input first, and those of its parameters
            after the next step, which computes its input again (backward only).
        note: What there is more to say about it, for reports.
        recompute: Where the fused op before it starts, if that can give the input again (backward
            only).
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
    recompute: int | None = None
    with_output: Callable[..., Any] | None = None
    waits: bool = False
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
        """Which pass it replaces: ``"forward"``, ``"backward"`` or ``"joint"``."""
        return str(self.source.passes) if self.source else "joint"

    @property
    def places(self) -> Iterator[tuple[str, int]]:
        """The ops and edges it wants, each with the pass."""
        passes = ("forward", "backward") if self.passes == "joint" else (self.passes,)
        return itertools.product(passes, range(self.begin, self.end))
