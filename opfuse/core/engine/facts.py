"""The facts that a plan is made from, and how a candidate is looked up among measurements."""

from __future__ import annotations

import dataclasses
import enum
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..cast import Identity
from ..environment import Environment
from ..hookspecs import Run
from ..introspection import op_class
from ..plugins import manager
from ..records import PluginRecord, normalize
from ..tuning_table import NO_TABLE, Entries, Measurement, Table, subject_key
from .chain import Chain
from .edges import Edges, Needs
from .step import Step

Shapes = Sequence[Sequence[tuple[tuple[int, ...], torch.dtype]]]
_COMMON = frozenset({*vars(Identity()), "_captured", "_name", "_path", "_prepared"})
"""Attributes that the engine and the base classes set on an op; some vary between processes."""


@dataclasses.dataclass(frozen=True)
class Facts:
    """Everything that a plan of a chain is made from.

    Attributes:
        chain: The chain.
        env: The environment of the plan.
        needs: The gradients that it computes.
        edges: The casts of each pass.
        params: Shape and dtype of the parameters of each op.
        kwargs: Names of the keyword arguments given to each op.
        autocast: The dtype that autocast asks for, or None.
        input_dtype: The dtype of the chain's input, which autocast may cast.
        table: The measurements that apply here.
        assumed: Whether every candidate counts as measured, in order to list all of them.
        tools: The tools that wrap what runs.
    """

    chain: Chain
    env: Environment
    needs: Needs
    edges: Edges
    params: Shapes
    kwargs: Sequence[tuple[str, ...]]
    autocast: torch.dtype | None = None
    input_dtype: torch.dtype | None = None
    table: Table = NO_TABLE
    assumed: bool = False
    tools: Sequence[PluginRecord] = ()

    def wrap(self, hook: str, run: Run, **given: Any) -> Run:
        """What the tools make of a function; see :meth:`PluginManager.wrap`."""
        return manager.wrap(self.tools, hook, run, facts=self, **given)

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
            "features": self.chain.widths[step.start],
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
    return value is None or isinstance(value, (bool, numbers.Real, str, enum.Enum, torch.dtype))


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
    fitting = {s: found for s, found in entries.items() if known.items() <= s._asdict().items()}
    if wrong := [found for found in fitting.values() if found.wrong]:
        return wrong[0]
    refused = {
        bool(found.refusal(trades_time=trades_time, prefer=prefer)) for found in fitting.values()
    }
    return fitting[max(fitting)] if len(refused) == 1 else None
