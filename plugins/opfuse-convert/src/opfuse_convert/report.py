"""The report of :func:`opfuse.convert`, as text and as JSON-able data."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import nn

from opfuse.core.introspection import op_class
from opfuse.core.settings import Recorder
from opfuse.report.calls import saved_bytes
from opfuse.report.isolation import isolated
from opfuse.tuning.whole import switched_off

from .building import NOTHING, ORDINARY
from .choosing import nothing_in_graphs


class Converted(NamedTuple):
    """A module whose forward a chain replaces.

    Attributes:
        path: Its dotted name.
        cls: Its class.
        ops: The ops of the chain.
        converter: The converter that recognised it.
        distribution: The converter's plugin; None: the core.
    """

    path: str
    cls: str
    ops: tuple[str, ...]
    converter: str
    distribution: str | None


class Left(NamedTuple):
    """A module that was not converted, and the reason."""

    path: str
    cls: str
    reason: str


class Measured(NamedTuple):
    """The memory and the fusions of one forward.

    Attributes:
        saved: Bytes kept for the backward, apart from parameters.
        fused: How often each fusion ran in it, by its name and its plugin's.
        in_graphs: Number of chains of each class in graphs of ``torch.compile``.
    """

    saved: int
    fused: dict[str, int]
    in_graphs: dict[str, int]


@dataclasses.dataclass(frozen=True, repr=False)
class ConversionReport:
    """The converted modules, the others, and the reasons; ``str()`` has a line for each class.

    Attributes:
        converted: A row for each converted module.
        left: A row for each that was looked at and left as it is.
        before: What a forward kept before; None: no inputs were given.
        after: What it keeps now.
    """

    converted: tuple[Converted, ...]
    left: tuple[Left, ...]
    before: Measured | None = None
    after: Measured | None = None

    def __str__(self) -> str:
        lines = []
        if self.converted:
            done = Counter((row.cls, row.ops, _by_whom(row)) for row in self.converted)
            lines.append(f"converted: {_modules(len(self.converted))}")
            lines += [f"  {cls} x {n} -> {' '.join(ops)}{by}" for (cls, ops, by), n in done.items()]
        else:
            lines.append("converted: nothing")
        told = [row for row in self.left if row.reason != NOTHING]
        if told:
            left = Counter((row.cls, row.reason) for row in told)
            lines.append(f"left as they are: {_modules(len(told))}")
            lines += [f"  {cls} x {n}: {reason}" for (cls, reason), n in left.items()]
        if self.after is not None and self.before is not None:
            fused = [f"{name} x {count}" for name, count in self.after.fused.items()]
            lines.append(f"fused: {', '.join(fused) or 'nothing'}")
            graphs = [f"{name} x {count}" for name, count in self.after.in_graphs.items()]
            chains = f"the chains of {', '.join(graphs)}" if graphs else "no chain"
            lines.append(f"under torch.compile: {chains}, other modules run their own forward")
            sizes = [_size(which.saved) for which in (self.before, self.after)]
            lines.append(f"kept for the backward: {sizes[0]} before, {sizes[1]} now")
        return "\n".join(lines)

    __repr__ = __str__

    def to_dict(self) -> dict[str, Any]:
        """Return the same as JSON-able data."""
        return {
            "converted": [row._asdict() | {"ops": list(row.ops)} for row in self.converted],
            "left": [row._asdict() for row in self.left],
            "before": self.before and self.before._asdict(),
            "after": self.after and self.after._asdict(),
        }


def _by_whom(row: Converted) -> str:
    """The name of a plugin's converter, in brackets, or ``""``."""
    named = row.distribution and row.converter != ORDINARY
    return f" ({row.converter})" if named else ""


def _size(count: int) -> str:
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 else f"{count / 2**10:.1f} KiB"


def _modules(count: int) -> str:
    return "1 module" if count == 1 else f"{count} modules"


class _Fused(Recorder):
    """Counts the fusions that run, and the chains that graphs would have."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.in_graphs: Counter[str] = Counter()
        self.apart: list[Any] = []

    def replaced(self, replaced: Any, module: nn.Module, tensors: Any) -> None:
        """Count a chain, or note that it does not run in graphs."""
        if replaced.in_graphs() and not replaced.why_not_in_graph(module, *tensors):
            self.in_graphs[op_class(module).__name__] += 1
        else:
            self.apart.append(replaced)

    def record(self, fuser: Any, program: Any, given: Any) -> None:
        """Count those of a call."""
        for step in (*program.plan.forward, *program.plan.backward):
            if step.fusion is not None:
                self.counts[f"{step.fusion} ({step.distribution or 'registered in code'})"] += 1


def measured(model: nn.Module, inputs: Sequence[Any]) -> Measured:
    """Run a forward in the caller's mode, and return what it keeps and which fusions ran.

    The model stays as it is. A dict as the last input has inputs by name.
    """
    recorder = graphs = _Fused()
    by_name = inputs[-1] if isinstance(inputs[-1], dict) else {}
    given = inputs[:-1] if isinstance(inputs[-1], dict) else inputs
    with isolated(model, who="opfuse.convert"), contextlib.ExitStack() as stack:
        with recorder:
            saved = saved_bytes(lambda: model(*given, **by_name), model.parameters())
        apart = [] if nothing_in_graphs() else recorder.apart
        while apart:  # converted modules inside these run by themselves then
            stack.enter_context(switched_off(apart))
            graphs = _Fused()
            with graphs:
                model(*given, **by_name)
            apart = graphs.apart
    return Measured(saved, dict(recorder.counts), dict(graphs.in_graphs))
