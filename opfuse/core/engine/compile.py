"""Turns the fusions chosen for a chain into a program.

Everything that can be decided once is decided here, not per call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..cast import Cast
from ..fusible import declared
from ..introspection import op_class
from ..quantization import Quantizer
from ..quantization.coded_tensor import note_of
from .edges import View
from .facts import Facts
from .plan import FusionPlan, PlanStep
from .program import Program
from .selection import Selection
from .step import Recompute, Step


def compile_program(facts: Facts, choice: Selection) -> Program:
    """Turn a choice of fusions, already built, into a program.

    Args:
        facts: The chain, and everything that its plan is made from.
        choice: The fusions taken; each step carries its fused op.
    """
    steps = forward, backward = _steps(facts, choice)
    found = [_recompute(step, facts, forward) for step in backward]
    again = [*zip(backward, found, strict=True)]
    recomputing = {step.start: how for step, how in again if isinstance(how, Recompute)}
    notes = [how if isinstance(how, str) else "" for how in found]
    contexts = _context_values(facts, forward, backward, recomputing)
    recipe = facts.env.recipe
    digest = ",".join(known.digest for known in facts.known if known.digest)
    of_forward = [_describe(step, note_of(step.matched, recipe), facts) for step in forward]
    of_backward = [_describe(*pair, facts) for pair in zip(backward, notes, strict=True)]
    plan = FusionPlan(tuple(of_forward), tuple(of_backward), choice.refused, digest)
    program = Program(facts, plan, steps, contexts, recomputing)
    program.row_facts = tuple(sorted({*choice.row_facts, *facts.edges.row_facts}))
    return program


def _steps(facts: Facts, choice: Selection) -> tuple[list[Step], list[Step]]:
    """The steps of both passes, in the order they run."""
    ops, edges, first = facts.chain.ops, facts.edges, facts.needs.first_backward
    forward = [step for step in choice.taken if step.passes != "backward"]
    backward = [step for step in choice.taken if step.passes != "forward"]
    forward = _cover(edges.view(ops, "forward"), forward)
    backward = _cover(edges.view(ops, "backward"), backward)[::-1]
    backward = [step for step in backward if step.end > 2 * first + 1]
    return forward, backward if facts.env.requires_grad else []


def _cover(view: View, taken: Sequence[Step]) -> list[Step]:
    """The steps of one pass, first op to last: those taken, and single ops and casts elsewhere."""
    covered = {place for step in taken for place in range(step.begin, step.end)}
    placed = zip(view.ops, view.places, strict=True)
    alone = [Step.alone(op, place) for op, place in placed if place not in covered]
    return sorted([*taken, *alone], key=lambda step: step.begin)


def _context_values(
    facts: Facts,
    forward: Sequence[Step],
    backward: Sequence[Step],
    recomputing: Mapping[int, Recompute],
) -> list[dict[str, Any]]:
    """The attributes that the engine sets on each context; see :class:`OperationContext`."""
    env, needs, edges = facts.env, facts.needs, facts.edges
    again = {how.step.start for how in recomputing.values()}
    # a fused op that begins with a cast takes a plain tensor, which must not be quantized before
    inside = {step.begin for step in forward if step.source}
    inside_backward = {step.end - 1 for step in backward if step.source}
    owned = _owned(facts, backward)
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
            may_recompute=i in again,
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


def _owned(facts: Facts, backward: Sequence[Step]) -> set[int]:
    """The ops that may overwrite the incoming gradient, since the step before gave it away.

    It may otherwise be in a tensor that the caller passed by keyword.
    """
    owned: set[int] = set()
    owns = False
    for step in backward:
        of = range(step.start, step.stop)
        owned |= {*of} if owns else set()
        given = declared(step.op, "grad_input")
        owns = given == "fresh" or (given == "same" and owns)
        owns &= not any(facts.kwargs[i] for i in of)
    return owned


def _recompute(step: Step, facts: Facts, forward: Sequence[Step]) -> Recompute | str:
    """How the forward step before can compute the input of a backward step again.

    Returns:
        A note for reports if it cannot: only where the cast of the input is in the way.
    """
    keeps_anything = step.source and step.passes == "joint"
    before = next((s for s in forward if s.start < s.stop == step.start < step.stop), None)
    if before is None or not before.op.recomputes or keeps_anything:
        return ""
    first = facts.chain.ops[step.start]
    names, params = declared(first, "saved_names") or (), first.param_names
    only_params = params and {*names} <= {"input", *params}
    if "input" not in names or (only_params and not any(facts.needs.params[step.start])):
        return ""  # a frozen linear keeps none
    behind = next((s for s in forward if s.begin == 2 * step.start), None)
    cast: Any = None if behind is None else behind.matched[0]
    kept = "its input is not computed again:"
    if behind is not None and behind.stop > behind.start:
        return f"{kept} {type(behind.op).__name__} casts it inside"
    if cast is not None and not cast.quantizer.requantizes:
        by = type(cast.quantizer).__name__
        return f"{kept} {by} cannot cast it again with the scale of the forward"
    run: Any = before.op.fuser_recompute
    run = facts.wrap("opfuse_wrap_step", run, step=before, pass_name="recompute")
    return Recompute(before, run, names.index("input"), cast)


def _describe(step: Step, note: str, facts: Facts) -> PlanStep:
    """A step as report data."""
    places, source = range(step.start, step.stop), step.source
    names = tuple(op_class(facts.chain.ops[i]).__name__ for i in places)
    casts = tuple((edge, type(cast.quantizer).__name__) for edge, cast in step.casts)
    reasons = dict.fromkeys(facts.edges.unquantized.get(i, "") for i in places)
    notes = "; ".join(filter(None, [note, step.note, *reasons]))
    given: dict[str, Any] = dict(casts=casts, note=notes)
    if source is None:
        return PlanStep(names[0] if names else f"Cast[{casts[0][1]}]", names, step.start, **given)
    origin = source.name, source.distribution, source.version
    given["fallback"] = step.op.fallback
    return PlanStep(type(step.op).__name__, names, step.start, *origin, **given)
