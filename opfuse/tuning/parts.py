"""Parts of a chain as programs of their own: to compare a fusion with the separate ops."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.cast import Cast
from ..core.engine.chain import Chain
from ..core.engine.facts import Candidate, Edges, Facts, Needs, Step, ToolFacts
from ..core.engine.planner import build_step, compile_program
from ..core.engine.program import Program
from ..core.engine.selection import find_candidates
from ..core.environment import Environment
from ..core.records import FusionSource

BACKEND = "inductor"
_numbers = itertools.count()


@dataclasses.dataclass(frozen=True, eq=False)
class MeasuredCall:
    """One call of a chain, kept to be made again.

    Attributes:
        program: The program that ran.
        input: The chain's input.
        extras: The extra inputs that the caller gave.
        kwargs: Keyword arguments per basic op.
    """

    program: Program
    input: Tensor
    extras: Sequence[Tensor]
    kwargs: Sequence[dict[str, Any]]

    def extra(self, slot: tuple[int, int]) -> Tensor:
        """The extra input that the caller gave for ``(op, slot)``."""
        return self.extras[self.program.chain.arguments[slot]]


class Assumed(ToolFacts):
    """Every candidate counts as measured, and as fast as can be, in order to list all of them."""

    def fields(self, candidate: Candidate, read: Callable[[str], Any]) -> Mapping[str, Any]:
        """Let no estimate of its speed refuse it."""
        return {"measured": math.inf}


def candidates(call: MeasuredCall, sources: Iterable[FusionSource]) -> list[Candidate]:
    """Every candidate of a call, whatever its estimated speed.

    Args:
        call: The call.
        sources: The fusions on offer.
    """
    facts = dataclasses.replace(call.program.facts, tool_facts=(Assumed(),))
    return find_candidates(facts, sources)


def as_compiled(program: Program) -> Program:
    """A program as it would be while ``torch.compile`` traces, to measure candidates there."""
    twin = copy.copy(program)
    twin.env = program.env._replace(
        compiling=True, rows=None, features=None, contiguous=None, row_alignment=1
    )
    twin.facts = dataclasses.replace(program.facts, env=twin.env)
    return twin


def compiled(way: Callable[..., Any]) -> Callable[..., Any]:
    """A function compiled as a whole."""

    def function(*args: Any) -> Any:
        return way(*args)

    # code of its own: Dynamo gives up on one that it compiled eight times
    function.__code__ = function.__code__.replace(co_name=f"part_{next(_numbers)}")
    return torch.compile(function, fullgraph=True, dynamic=False, backend=BACKEND)


def extent(candidate: Candidate) -> range:
    """The basic ops that must run to compare a candidate with the separate ops.

    They are its own and, if it ends with a cast, the op that asked for it.
    """
    forward_reader = candidate.passes != "backward" and candidate.end % 2
    backward_reader = candidate.passes == "backward" and candidate.begin % 2 == 0
    return range(candidate.start - bool(backward_reader), candidate.stop + bool(forward_reader))


def part_program(
    call: MeasuredCall,
    span: range,
    candidate: Candidate | None = None,
    *,
    configuration: Any = None,
    exact: bool = False,
    grads: bool = True,
) -> Program:
    """A program of part of a chain, with one fusion or none; its quantizers record nothing.

    Args:
        call: The call of the whole chain.
        span: The range of basic ops.
        candidate: The candidate, or None: the ops run separately.
        configuration: For the candidate, see ``FusedOperation.configurations``.
        exact: In fp64, without a recipe.
        grads: Have a backward, if the whole chain has one.

    Raises:
        RuntimeError: The fused op cannot be built.
    """
    program = call.program
    chain = Chain(program.chain.ops[span.start : span.stop], part=True, is_complete=True)
    whole = program.facts
    first = min(max(whole.needs.first_backward - span.start, 0), len(span)) if grads else len(span)
    here = slice(span.start, span.stop)
    inputs, params = whole.needs.inputs[here], whole.needs.params[here]
    if first == len(span):
        inputs, params = (False,) * len(span), tuple((False,) * len(flags) for flags in params)
    needs = Needs(False, first, inputs, params)
    env = program.env._replace(requires_grad=first < len(span), configuration=configuration)
    autocast = program.autocast
    edges = Edges(  # each on the side of the op that reads it
        _shifted(whole.edges.forward, span.start, span.stop - 1),
        _shifted(whole.edges.backward, span.start, span.stop, first=1),
        [{k: q.unrecorded() for k, q in qs.items()} for qs in whole.edges.quantizers[here]],
    )
    if exact:
        env, autocast = env._replace(dtype=torch.float64, recipe=None), None
        edges = Edges({}, {}, [{}] * len(span))
    names = [*map(tuple, call.kwargs[here])]
    facts = Facts(chain, env, needs, edges, whole.params[here], names, autocast)
    taken = () if candidate is None else (_moved(candidate, span.start, chain, edges, env),)
    return compile_program(facts, taken)


def _shifted(casts: Mapping[int, Cast], start: int, last: int, first: int = 0) -> dict[int, Cast]:
    """The casts on the edges of a part, by quantizers that record nothing."""
    return {
        edge - start: Cast(cast.quantizer.unrecorded(), cast.usage)
        for edge, cast in casts.items()
        if start + first <= edge <= last
    }


def _moved(candidate: Candidate, start: int, chain: Chain, edges: Edges, env: Environment) -> Step:
    """The step of a candidate of the whole chain, built for a part of it."""
    begin, end = candidate.begin - 2 * start, candidate.end - 2 * start
    view = edges.view(chain.ops, candidate.passes if candidate.casts else "joint")
    matched = tuple(op for place, op in view.items() if begin <= place < end)
    moved = dataclasses.replace(candidate, begin=begin, end=end, matched=matched)
    step = build_step(moved, (candidate.env or env)._replace(configuration=env.configuration))
    if step is None:
        raise RuntimeError("it cannot be built, see the warning")
    return step
