"""Places the ops of a case: the ops around them, and the casts between them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from .. import ops as built_in
from ..core.engine.chain import Chain
from ..core.engine.edges import Needs
from ..core.engine.planner import edges_of
from ..core.environment import Environment
from ..core.op import BasicOperation
from ..core.settings import current
from .cases import Case, Op, first_width, is_cast, undrawn
from .failures import Declined
from .running import only
from .tensors import next_width

DEEP = (4, 4)
"""Rows for a norm over two dimensions: 16 in all, so that none is refused for their number."""


@functools.lru_cache(maxsize=4096)
def next_width_behind(op: Op, width: int) -> int | None:
    """Features that an op gives for ``width`` features, or None if it does not take that many."""
    with undrawn():
        return width if is_cast(op) else next_width(op(), width)


def width_behind(ops: Sequence[Op], width: int) -> int:
    """Features that ops give for ``width`` features."""
    return functools.reduce(lambda at, op: next_width_behind(op, at) or at, ops, width)


def placed(case: Case, ops: tuple[Op, ...], width: int) -> Case:
    """The case with other ops, between ops that ask for the casts at their ends."""
    case = case.with_(ops=ops, rows=DEEP if is_deep(ops) else case.rows, before=(), after=())
    insists, ratio = first_width(tuple(op for op in ops if not is_cast(op)))
    case = case.with_(width=None if insists or width in (8, 8 * ratio) else width)
    if case.subject.passes == "backward" and is_cast(ops[0]):
        return case.with_(before=(Op(built_in.BasicLinear, min(width, 512), width),))
    if case.subject.passes == "forward" and is_cast(ops[-1]):
        behind = width_behind(ops, width)
        return case.with_(after=(Op(built_in.BasicLinear, behind, min(behind, 512)),))
    return case


def is_deep(ops: Sequence[Op]) -> bool:
    """Return whether a norm is over more than the last dimension."""
    norms = [op for op in ops if issubclass(op.cls, (built_in.LayerNorm, built_in.RMSNorm))]
    return any(isinstance(arg, tuple) for op in norms for arg in op.args[:1])


def matched(case: Case, ops: Sequence[BasicOperation] = ()) -> tuple[BasicOperation, ...]:
    """The ops that the fusion would replace, as its condition sees them: with their casts.

    They are of the case's ``ops``, or new ones.

    Raises:
        Declined: Nothing is cast where its pattern has a cast.
    """
    basic, recipe, start = ops or case.basic_ops(), case.recipe, len(case.before)
    stop = start + len(case.ops) - sum(map(is_cast, case.ops))
    if not case.edges:
        return tuple(basic[start:stop])
    env = environment(case.device, dtype=case.dtype, recipe=recipe)
    flags = (True,) * len(basic)
    needs = Needs(True, 0, flags, tuple((True,) * len(op.param_names or ()) for op in basic))
    with only():
        edges = edges_of(Chain(basic), env, needs, current.values._replace(recipe=recipe))
    begin, end = 2 * start + (not is_cast(case.ops[0])), 2 * stop + is_cast(case.ops[-1])
    view = edges.view(basic, case.subject.passes)
    found = [op for op, place in zip(view.ops, view.places, strict=True) if begin <= place < end]
    if len(found) != len(case.ops):
        raise Declined("nothing is cast where its pattern has a cast")
    return tuple(found)


def environment(device: str, **changes: Any) -> Environment:
    """The environment of a plain training step, with the options of plugins that are in force."""
    capability = torch.cuda.get_device_capability() if device == "cuda" else None
    env = Environment(torch.device(device), capability, torch.float32, requires_grad=True)
    options = {name: value for name, value in current.options if "." in name}
    return env._replace(options=options, **changes)
