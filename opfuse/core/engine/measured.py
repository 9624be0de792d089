"""Measurements of a chain's candidates on this machine, and the decisions that follow."""

from __future__ import annotations

import dataclasses
import enum
import numbers
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..environment import Environment
from ..fusion import PASSES
from ..identity import Identity
from ..introspection import op_class
from ..records import normalize
from ..tuning_table import NO_TABLE, Entries, Measurement, Table, subject_key
from .edges import Edges, Needs
from .step import Step

Shapes = Sequence[Sequence[tuple[tuple[int, ...], torch.dtype]]]
_NO_EDGES = Edges()
_COMMON = frozenset(
    {*vars(Identity()), "_captured", "_numbers", "_numbers_as_of", "_name", "_path", "_prepared"}
)
"""Attributes that the engine and the base classes set on an op; some vary between processes."""


@dataclasses.dataclass(frozen=True)
class Measurements:
    """Looks up the candidates of one chain.

    Attributes:
        table: The entries that apply here.
        env: The environment of the plan.
        needs: The gradients that it computes.
        edges: The casts of each pass.
        widths: Last dimension on each edge, if known.
        params: Shape and dtype of the parameters of each op.
        assumed: Whether every candidate counts as measured, in order to list all of them.
        input_dtype: The dtype of the chain's input, which autocast may cast.
    """

    env: Environment
    needs: Needs
    edges: Edges = _NO_EDGES
    widths: Sequence[int | None] = ()
    params: Shapes = ()
    table: Table = NO_TABLE
    assumed: bool = False
    input_dtype: torch.dtype | None = None

    def entries(self, step: Step) -> Entries:
        """The entries of a candidate, by the shape of its input."""
        if not self.table.entries:
            return {}
        return self.table.entries.get(subject_key(self.subject(step)), {})

    def subject(self, step: Step) -> dict[str, Any]:
        """The subject of a candidate's entry, as JSON-able data."""
        source, env, needs = step.source, self.env, self.needs
        of = range(step.start, step.stop)
        recipe = self.edges.recipe_of(env.recipe, step.start, step.stop)
        return {
            "plugin": source.distribution and [normalize(source.distribution), source.version],
            "fusion": source.name,
            "pass": source.passes,
            "ops": [describe(op) for op in step.matched if op_class(op).__name__ != "Cast"],
            "params": [[[list(shape), str(dtype)] for shape, dtype in self.params[i]] for i in of],
            "features": self.widths[step.start],
            "grads": [needs.inputs[step.start], [list(needs.params[i]) for i in of]],
            "backward_from": max(needs.first_backward - step.start, 0),
            "dtype": [str(env.dtype), str(env.dtype if step.start else self.input_dtype)],
            "recipe": recipe and repr(recipe),
            "casts": self._casts(step),
            "mode": [env.training, env.deterministic, env.compiling],
            "options": [[k, v] for k, v in sorted(env.options.items()) if "." in k],
        }

    def _casts(self, step: Step) -> list[list[Any]]:
        """The casts between its ops and at its ends, in both passes."""
        return [
            [name, edge - step.start, type(cast.quantizer).__name__, list(cast.usage)]
            for name, casts in (("forward", self.edges.forward), ("backward", self.edges.backward))
            for edge, cast in sorted(casts.items())
            if step.start <= edge <= step.stop
        ]


def describe(op: nn.Module) -> list[Any]:
    """The class of an op, and the constants of its constructor."""
    cls = op_class(op)
    constants = {
        name: _plain(value)
        for name, value in sorted(vars(op).items())
        if name not in _COMMON and _is_constant(value)
    }
    inside = [describe(child) for child in op.children()]
    return [f"{cls.__module__}.{cls.__qualname__}", constants, *inside]


def _is_constant(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_is_constant, value))
    if isinstance(value, dict):
        return all(map(_is_constant, (*value, *value.values())))
    plain = (bool, numbers.Real, str, enum.Enum, torch.dtype)
    return value is None or isinstance(value, plain)


def _plain(value: Any) -> Any:
    """Convert a constant to JSON-able data; numbers of other packages become text."""
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return [[_plain(key), _plain(item)] for key, item in value.items()]
    return value if type(value) in (bool, int, float, str, type(None)) else repr(value)


def counting(
    entries: Entries, known: Mapping[str, Any], *, trades_time: bool, prefer: str
) -> Measurement | None:
    """Return the entry that applies to an input; None: nothing was measured for it.

    If the input is only partly known, one wrong entry counts for all; otherwise all entries that
    fit must lead to the same decision.

    Args:
        entries: The entries, by the shape of the input.
        known: The known fields of :class:`opfuse.core.tuning_table.Shape`.
        trades_time: Whether the fusion declares to trade time for memory.
        prefer: The option ``prefer``.
    """
    fitting = {
        shape: found
        for shape, found in entries.items()
        if all(getattr(shape, name) == value for name, value in known.items())
    }
    if wrong := [found for found in fitting.values() if found.wrong]:
        return wrong[0]
    refused = {
        bool(found.refusal(trades_time=trades_time, prefer=prefer)) for found in fitting.values()
    }
    return fitting[max(fitting)] if len(refused) == 1 else None


# The choice among candidates


def worth(step: Step, prefer: str) -> tuple[float, float]:
    """The gains of a measured candidate, most important first."""
    found: Measurement = step.measured
    if prefer == "memory" and found.saved_bytes > 0:
        return found.saved_bytes, found.seconds
    return 0, max(found.seconds, 0.0)


def best_cover(candidates: Sequence[Step], length: int, prefer: str = "speed") -> list[Step]:
    """Return the non-overlapping candidates of one pass with the largest gain.

    Among candidates that overlap, directly or through others, the gain is the time they save if
    all were measured here (memory first, if that is preferred), and the declared benefit otherwise.
    """
    chosen = []
    for group in overlapping(candidates):
        measured = all(step.measured is not None for step in group)
        values = [worth(step, prefer) if measured else (0, step.benefit) for step in group]
        chosen += _best_of(group, values, length)
    return chosen


def overlapping(candidates: Sequence[Step]) -> Iterator[list[Step]]:
    """The candidates in groups, none of which overlaps another."""
    group: list[Step] = []
    end = 0
    for step in sorted(candidates, key=lambda step: step.begin):
        if group and step.begin >= end:
            yield group
            group = []
        group.append(step)
        end = max(end, step.end)
    if group:
        yield group


def _best_of(
    candidates: Sequence[Step], values: Sequence[tuple[float, float]], length: int
) -> list[Step]:
    """Dynamic programming over half steps.

    The best cover from ``i`` on either skips ``i`` or takes a candidate that begins there. Ties:
    more ops covered by fewer fusions, then names.
    """
    best: list[tuple[float, float, int, int, tuple[tuple[str, str], ...], tuple[Step, ...]]]
    best = [(0.0, 0.0, 0, 0, (), ())] * (length + 1)
    starting: dict[int, list[tuple[Step, tuple[float, float]]]] = {}
    for candidate, value in zip(candidates, values, strict=True):
        starting.setdefault(candidate.begin, []).append((candidate, value))
    for i in reversed(range(length)):
        best[i] = best[i + 1]
        for c, (first, second) in starting.get(i, ()):
            cost, more, left, count, names, rest = best[c.end]  # smaller is better
            name = c.source.distribution or "", c.source.name
            option = (
                cost - first,
                more - second,
                left - len(c.matched),
                count + 1,
                (name, *names),
                (c, *rest),
            )
            best[i] = min(best[i], option, key=lambda cover: cover[:5])
    return list(best[0][5])


def beaten(joint: Step, others: Sequence[Step], length: int, prefer: str) -> str:
    """Return why others are preferred to a joint fusion over the same ops, or ``""``.

    They are if all that overlap, directly or through others, are measured, and gain more without it
    than with it.

    Args:
        joint: The joint fusion.
        others: Fusions of one pass, or joint ones.
        length: The number of half steps.
        prefer: The option ``prefer``.
    """
    others = [step for step in others if step is not joint and not _preceded(step, others)]
    (near,) = [group for group in overlapping([joint, *others]) if joint in group]
    near.remove(joint)
    if not near or any(step.measured is None for step in (joint, *near)):
        return ""
    without = _brought(near, length, prefer)
    beside = _brought([step for step in near if not _overlap(step, joint)], length, prefer)
    own = worth(joint, prefer)
    ahead = without[0] - beside[0], without[1] - beside[1]
    if ahead <= own:
        return ""
    one_pass = all(step.passes != "joint" for step in near)
    who = "the forward and backward fusions" if one_pass else "other fusions"
    what = "save more memory" if ahead[0] > own[0] else "are faster together"
    return f"{who} of these ops {what}, measured here"


def _preceded(step: Step, others: Sequence[Step]) -> bool:
    """Return whether a candidate of higher precedence may take one of its ops."""
    if step.passes != "joint":
        return False
    return any(
        o.source.rank < step.source.rank and _overlap(o, step)
        for o in others
        if o.passes != "joint"
    )


def _overlap(one: Step, other: Step) -> bool:
    return one.begin < other.end and other.begin < one.end


def _brought(candidates: Sequence[Step], length: int, prefer: str) -> tuple[float, ...]:
    """The gains of the best covers of measured candidates, joint ones first."""
    chosen: list[Step] = []
    for name in PASSES:
        free = [step for step in candidates if step.passes == name]
        joint = [step for step in chosen if step.passes == "joint"]
        free = [step for step in free if not any(_overlap(step, other) for other in joint)]
        chosen += best_cover(free, length, prefer)
    values = [worth(step, prefer) for step in chosen]
    return tuple(map(sum, zip((0, 0.0), *values, strict=True)))


def _gains(loser: Step, winners: Sequence[Step], prefer: str) -> tuple[str, str] | None:
    """Describe the measured gains of winners and loser; None: not all are measured."""
    if any(step.measured is None for step in (loser, *winners)):
        return None
    of: list[Mapping[str, float]] = [
        {
            "bytes": sum(step.measured.saved_bytes for step in steps),
            "us": sum(step.measured.seconds for step in steps) * 1e6,
        }
        for steps in (winners, [loser])
    ]
    unit = "bytes" if prefer == "memory" and of[0]["bytes"] != of[1]["bytes"] else "us"
    return f"{of[0][unit]:.0f} {unit}", f"{of[1][unit]:.0f} {unit}"


def conflict(loser: Step, winners: Sequence[Step], prefer: str) -> str:
    """Return why a candidate lost to those that overlap it."""
    if not winners:
        return "another set of fusions has the larger total benefit"
    first = min(
        winners, key=lambda winner: (winner.source.rank, PASSES.index(winner.passes), winner.begin)
    )
    who = f"overlaps {first.source.name}" + (
        f" of {first.source.distribution}" if first.source.distribution else ""
    )
    if first.source.rank != loser.source.rank:
        return f"{who}, which has precedence"
    if PASSES.index(first.passes) < PASSES.index(loser.passes):
        return f"{who}, and joint fusions choose first"
    if (measured := _gains(loser, winners, prefer)) is not None:
        return f"{who}, which saves {measured[0]} a call against {measured[1]}, measured here"
    gain = sum(winner.benefit for winner in winners)
    if gain != loser.benefit:
        return f"{who}, which saves {gain:g} tensor reads and writes against {loser.benefit:g}"
    covers_more = sum(len(winner.matched) for winner in winners) > len(loser.matched)
    return f"{who}, which saves as much and " + (
        "covers more ops" if covers_more else "comes first by name"
    )
