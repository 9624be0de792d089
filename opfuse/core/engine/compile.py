"""Turns the fusions chosen for a chain into a program.

Everything that can be decided once is decided here, not per call.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..cast import Cast
from ..fusible import declared
from ..introspection import op_class
from ..quantization import Quantizer
from ..quantization.coded_tensor import note_of
from .chain import Chain
from .edges import Edges, View
from .facts import Facts
from .plan import FusionPlan, PlanStep
from .program import Program
from .selection import Selection
from .step import Recompute, Step
from .step_calls import lone_step


def compile_program(facts: Facts, choice: Selection) -> Program:
    """Turn a choice of fusions, already built, into a program.

    Args:
        facts: The chain, and everything that its plan is made from.
        choice: The fusions taken; each step carries its fused op.
    """
    chain, env, needs, edges = facts.chain, facts.env, facts.needs, facts.edges
    forward, backward = _steps(facts, choice)
    # a joint fusion may leave anything
    undeclared = {i for s in choice.taken if s.passes == "joint" for i in range(s.start, s.stop)}
    for step in forward:
        step.numbers = _numbers(step, chain, needs.first_backward) if env.requires_grad else ()
        step.remark(note_of(step.matched, env.recipe))
    before: Step | None = None
    for step in backward:
        step.owns = before is not None and _leaves_owned(before, facts)
        if step.start not in undeclared:
            _let_recompute(step, facts, forward)
        before = step
    contexts = _context_values(facts, forward, backward)
    steps = forward, backward
    described = [tuple(_describe(step, chain, edges) for step in of_pass) for of_pass in steps]
    known = ",".join(known.digest for known in facts.known if known.digest)
    plan = FusionPlan(described[0], described[1], choice.refused, known)
    row_facts = tuple(sorted({*choice.row_facts, *edges.row_facts}))
    return Program(facts, plan, steps, contexts, undeclared, row_facts)


def _steps(facts: Facts, choice: Selection) -> tuple[list[Step], list[Step]]:
    """The steps of both passes, in the order they run."""
    ops, edges, first = facts.chain.ops, facts.edges, facts.needs.first_backward
    forward = [step for step in choice.taken if step.passes != "backward"]
    backward = [step for step in choice.taken if step.passes != "forward"]
    forward = _cover(edges.view(ops, "forward"), forward)
    backward = _cover(edges.view(ops, "backward"), backward)[::-1]
    backward = [step for step in backward if step.end > 2 * first + 1]
    return forward, backward if facts.env.requires_grad else []


def _context_values(
    facts: Facts, forward: Sequence[Step], backward: Sequence[Step]
) -> list[dict[str, Any]]:
    """The attributes that the engine sets on each context; see :class:`OperationContext`."""
    env, needs, edges = facts.env, facts.needs, facts.edges
    recomputing = {step.recompute.start for step in backward if step.recompute}
    # a fused op that begins with a cast takes a plain tensor, which must not be quantized before
    inside = {step.begin for step in forward if step.source}
    inside_backward = {step.end - 1 for step in backward if step.source}
    owned = {i for step in backward if step.owns for i in range(step.start, step.stop)}
    prefers_memory = facts.autocast is not None and env.options.get("prefer") == "memory"
    recipe = env.recipe
    return [
        dict(
            requires_grad=env.requires_grad and i >= needs.first_backward,
            input_requires_grad=needs.inputs[i],
            param_requires_grad=needs.params[i],
            dtype=_dtype(facts, i),
            backward_override=getattr(recipe, "backward_override", None),
            prev_op_grad_output_quantizer=_quantizer(edges.backward, i, inside_backward),
            next_op_input_quantizer=_quantizer(edges.forward, i + 1, inside),
            quantizers=edges.quantizers[i],
            weights=op._weights if recipe is not None else None,
            owns_grad_output=i in owned,
            may_recompute=i in recomputing,
            saves_params=prefers_memory and {*needs.params[i]} == {True},
        )
        for i, op in enumerate(facts.chain.ops)
    ]


def _quantizer(casts: Mapping[int, Cast], edge: int, inside: set[int]) -> Quantizer | None:
    return casts[edge].quantizer if edge in casts and 2 * edge not in inside else None


def _dtype(facts: Facts, index: int) -> torch.dtype | None:
    """The dtype an op computes in under autocast.

    An output that the next op casts anyway is computed in the dtype of that op.
    """
    op, *following = facts.chain.ops[index : index + 2]
    cast_anyway = any(declared(each, "casts_input") for each in following)
    own = None if facts.autocast is None or cast_anyway else op.autocast_dtype
    return own or facts.autocast


def _cover(view: View, taken: Sequence[Step]) -> list[Step]:
    """The steps of one pass, first op to last: those taken, and single ops and casts elsewhere."""
    steps = [copy.copy(step) for step in taken]
    covered = {place for step in steps for place in range(step.begin, step.end)}
    alone = [k for k, place in enumerate(view.places) if place not in covered]
    steps += [lone_step(view.ops[k], view.places[k]) for k in alone]
    return sorted(steps, key=lambda step: step.begin)


def _numbers(step: Step, chain: Chain, first: int) -> tuple[tuple[int, str], ...]:
    """The numbers of a fused step's ops that their backward, from op ``first`` on, reads."""
    places = range(max(step.start, first), step.stop if step.source else 0)  # an op sets its own
    ops = [(i, chain.ops[i]) for i in places]
    named = [(i, op, name) for i, op in ops for name in declared(op, "context_names")]
    return tuple([(i, name) for i, op, name in named if _is_number(op, name)])


def _is_number(op: Any, name: str) -> bool:
    """Return whether one of an op's ``context_names`` is a number of the op, not of a call."""
    try:
        return not isinstance(op.context_value(name), Tensor)
    except AttributeError:
        return False


def _let_recompute(step: Step, facts: Facts, forward: Sequence[Step]) -> None:
    """Let a backward step do without its input, if the forward step before can compute it again.

    The step notes where only the cast of the input is in the way.
    """
    before = next((s for s in forward if s.start < s.stop == step.start), None)
    if before is None or not before.op.recomputes or step.start == step.stop:
        return
    first = facts.chain.ops[step.start]
    names, params = declared(first, "saved_names") or (), first.param_names
    if "input" not in names:
        return
    if params and {*names} <= {"input", *params} and not any(facts.needs.params[step.start]):
        return  # a frozen linear keeps none
    cast: Any = None
    kept = ""
    behind = next((s for s in forward if s.begin == 2 * step.start), None)
    if behind is not None and behind.stop > behind.start:
        kept = f"{type(behind.op).__name__} casts it inside"
    elif behind is not None and not (cast := behind.matched[0]).quantizer.requantizes:
        by = type(cast.quantizer).__name__
        kept = f"{by} cannot cast it again with the scale of the forward"
    if kept:
        step.remark(f"its input is not computed again: {kept}")
        return
    run: Any = before.op.fuser_recompute
    run = facts.wrap("opfuse_wrap_step", run, step=before, pass_name="recompute")
    step.recompute = Recompute(before, run, names.index("input"), cast)


def _leaves_owned(step: Step, facts: Facts) -> bool:
    """Return whether the gradient that a backward step returns belongs to the chain.

    It may otherwise be in a tensor that the caller passed by keyword.
    """
    assert step.op is not None
    if any(facts.kwargs[step.start : step.stop]):
        return False
    given = declared(step.op, "grad_input")
    return given == "fresh" or (given == "same" and step.owns)


def _describe(step: Step, chain: Chain, edges: Edges) -> PlanStep:
    """A step as report data."""
    names = tuple(op_class(op).__name__ for op in chain.ops[step.start : step.stop])
    casts = tuple((edge, type(cast.quantizer).__name__) for edge, cast in step.casts)
    whys = dict.fromkeys(edges.unquantized.get(i, "") for i in range(step.start, step.stop))
    note = "; ".join(filter(None, (step.note, *whys)))
    given: dict[str, Any] = dict(casts=casts, note=note)
    if (source := step.source) is None:
        return PlanStep(names[0] if names else f"Cast[{casts[0][1]}]", names, step.start, **given)
    origin = source.name, source.distribution, source.version
    given["fallback"] = step.op.fallback
    return PlanStep(type(step.op).__name__, names, step.start, *origin, **given)
