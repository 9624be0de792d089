"""Makes chains of ops for the classes of a pattern, and places them among others."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import ops as built_in
from ..core.engine.chain import Chain
from ..core.engine.facts import Needs
from ..core.engine.planner import edges_of
from ..core.environment import Environment
from ..core.fusion import OneOf, OneOrMore, Optional, Subclasses
from ..core.op import BasicOperation
from ..core.settings import current
from .cases import CAST, Case, Op, insisted, is_cast, makes, undrawn
from .failures import Declined
from .running import only
from .tensors import next_width


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
    rows = next((op.rows for op in ops if op.rows), case.rows)
    case = case.with_(ops=ops, rows=rows, before=(), after=())
    case = case.with_(width=None if width == 8 or insisted(case.chain_ops) else width)
    behind = width_behind(ops, width)
    if case.subject.passes == "backward" and is_cast(ops[0]):
        return case.with_(before=(Op(built_in.BasicLinear, min(width, 512), width),))
    if case.subject.passes == "forward" and is_cast(ops[-1]):
        return case.with_(after=(Op(built_in.BasicLinear, behind, min(behind, 512)),))
    return case


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


# Ops of the classes of a pattern


class CubicActivation(built_in.Activation):
    """An activation unknown to every plugin: ``x + 0.1 x^3``."""

    number_names = ()

    def value(self, x: Tensor) -> Tensor:
        """The function."""
        return x + 0.1 * x**3

    def derivative(self, x: Tensor) -> Tensor:
        """Its derivative."""
        return 1 + 0.3 * x**2


class CubicGLU(built_in.GatedActivation):
    """A gated activation unknown to every plugin."""

    number_names = ()
    value = CubicActivation.value
    derivative = CubicActivation.derivative


def _built_in_classes() -> tuple[type[BasicOperation], ...]:
    every = [getattr(built_in, name) for name in built_in.__all__ if name != "Cast"]
    alone = [cls for cls in every if not getattr(cls, "needs_tools", ())]
    classes = [cls for cls in alone if issubclass(cls, BasicOperation)]
    # representatives first
    classes.sort(key=lambda cls: cls not in (built_in.GELU, built_in.Bias))
    return (*classes, CubicActivation, CubicGLU)


def classes_of(element: Any) -> list[type]:
    """The classes of ops to try for a pattern element; an abstract one needs a maker."""
    if isinstance(element, OneOf):
        return list(dict.fromkeys(cls for inner in element.elements for cls in classes_of(inner)))
    if isinstance(element, Subclasses):
        every = (element.cls, *_built_in_classes())
        return list(dict.fromkeys(cls for cls in every if issubclass(cls, element.cls)))
    return [element]


@functools.lru_cache(maxsize=4096)
def samples_of(cls: Any, width: int, out: int | None, makers: Any = ()) -> tuple[Op, ...]:
    """The ways to make an op of a class for an input of ``width`` features, the plainest first.

    They are what a suite says, or ``sample_inputs`` of the class, or what its constructor takes.

    Args:
        cls: The class.
        width: Features of the input.
        out: Features of the output, for an op that may give any number; it is made in one way.
        makers: Classes, and how a suite makes their ops.
    """
    if make := dict(makers).get(cls):
        made = make(width)
        return (made,) if isinstance(made, Op) else tuple(made)
    if cls is built_in.Cast:
        return (CAST,)
    offered = getattr(cls, "sample_inputs", lambda op, *features: ())(Op, width, out)
    if found := tuple(filter(makes, offered)):
        return found if out is None or found == samples_of(cls, width, None) else found[:1]
    return tuple(filter(makes, (Op(cls), Op(cls, width))))[:1]


# Chains of such ops


def structures(pattern: Sequence[Any]) -> Iterator[list[Any]]:
    """The pattern with each optional element and without, each repeated one once and twice."""

    def forms(element: Any) -> list[list[Any]]:
        if isinstance(element, Optional):
            return [[element.element], []]
        repeated = isinstance(element, OneOrMore)
        return [[element.element], [element.element] * 2] if repeated else [[element]]

    for chosen in itertools.product(*map(forms, pattern)):
        if flat := [*itertools.chain(*chosen)]:
            yield flat


def chains(
    case: Case,
    elements: Sequence[Any],
    width: int,
    out: int | None = None,
    one_by_one: bool = False,
) -> list[tuple[Op, ...]]:
    """Chains of one structure, the plainest one first.

    Then comes one for every other class and sample at every place. Where an element is repeated,
    all its places vary at once.

    Args:
        case: One of the fusion.
        elements: The structure.
        width: Features of the input.
        out: Features that matrix products give; None: as their samples have them.
        one_by_one: The places of a repeated element vary each alone, too.
    """

    @functools.cache
    def options(place: int, at: int) -> list[tuple[Op, int]]:
        """The ops that are possible at a place, and the width of each one's output."""
        classes = classes_of(elements[place])
        found = [op for cls in classes for op in samples_of(cls, at, out, case.subject.makers)]
        return [(op, behind) for op in found if (behind := next_width_behind(op, at)) is not None]

    def find(
        numbers: Mapping[int, int], chosen: tuple[Op, ...] = (), at: int = width
    ) -> tuple[Op, ...]:
        """The chain whose op at a place has this number among what is possible, if it fits.

        Without a number, it is the first op that fits.
        """
        if len(chosen) == len(elements):
            return chosen
        found = options(len(chosen), at)
        number = numbers.get(len(chosen))
        for op, behind in found if number is None else found[number : number + 1]:
            if rest := find(numbers, (*chosen, op), behind):
                return rest
        return ()

    made = {find({}): None}
    for _, group in itertools.groupby(range(len(elements)), lambda place: id(elements[place])):
        places = list(group)
        count = len(options(places[0], width))
        for number in range(count):
            together = find({place: (number + i) % count for i, place in enumerate(places)})
            made[together] = None
            if one_by_one or not together:
                made |= dict.fromkeys(find({place: number}) for place in places)
    return [*filter(None, made)]
