"""How a candidate is looked up in a table: its subject, and the entry that applies to an input."""

from __future__ import annotations

import enum
import numbers
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..core.cast import Identity
from ..core.engine.facts import Candidate, Facts
from ..core.introspection import op_class
from ..core.records import FusionSource, normalize
from .table import Entries, Measurement

_COMMON = frozenset({*vars(Identity()), "_captured", "_name", "_path", "_prepared"})
"""Attributes that the engine and the base classes set on an op; some vary between processes."""


def subject_of(facts: Facts, candidate: Candidate) -> dict[str, Any]:
    """The subject of a candidate's entry, as JSON-able data."""
    source, env, needs = candidate.source, facts.env, facts.needs
    of = range(candidate.start, candidate.stop)
    recipe = facts.edges.recipe_of(env.recipe, candidate.start, candidate.stop)
    return {
        "plugin": source.distribution and [normalize(source.distribution), source.version],
        "fusion": source.name,
        "pass": source.passes,
        "ops": [describe(op) for op in candidate.matched if op_class(op).__name__ != "Cast"],
        "params": [[[list(shape), str(dtype)] for shape, dtype in facts.params[i]] for i in of],
        "features": facts.chain.widths[candidate.start],
        "grads": [needs.inputs[candidate.start], [list(needs.params[i]) for i in of]],
        "backward_from": max(needs.first_backward - candidate.start, 0),
        "dtype": [str(env.dtype), str(env.dtype if candidate.start else facts.input_dtype)],
        "recipe": recipe and repr(recipe),
        "casts": _casts(facts, candidate),
        "mode": [env.training, env.deterministic, env.compiling],
        "options": [[k, v] for k, v in sorted(env.options.items()) if "." in k],
    }


def _casts(facts: Facts, candidate: Candidate) -> list[list[Any]]:
    """The casts between its ops and at its ends, in both passes."""
    passes = ("forward", facts.edges.forward), ("backward", facts.edges.backward)
    return [
        [name, edge - candidate.start, type(cast.quantizer).__name__, list(cast.usage)]
        for name, casts in passes
        for edge, cast in sorted(casts.items())
        if candidate.start <= edge <= candidate.stop
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


def trades_time(source: FusionSource) -> bool:
    """Whether a fusion declares to trade time for memory."""
    return "trades_time" in getattr(source.fusion, "declares", ())


def applicable_entry(
    entries: Entries, known: Mapping[str, Any], *, trades_time: bool, prefer: str
) -> Measurement | None:
    """Return the entry that applies to an input; None: nothing was measured for it.

    If the input is only partly known, one wrong entry counts for all; otherwise all entries that
    fit must lead to the same decision.

    Args:
        entries: The entries, by the shape of the input.
        known: The known fields of :class:`opfuse.core.environment.Shape`.
        trades_time: Whether the fusion declares to trade time for memory.
        prefer: The option ``prefer``.
    """
    fitting = {s: found for s, found in entries.items() if known.items() <= s._asdict().items()}
    if wrong := [found for found in fitting.values() if found.wrong]:
        return wrong[0]
    refused = {bool(f.refusal(trades_time=trades_time, prefer=prefer)) for f in fitting.values()}
    return fitting[max(fitting)] if len(refused) == 1 else None
