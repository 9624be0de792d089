"""Turns the fusions chosen for a chain into a program.

Everything that can be decided once is decided here, not per call.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..cast import Cast
from ..environment import Environment
from ..fusible import declared, numbers_of
from ..introspection import op_class
from ..op import BasicOperation, FusedOperation
from ..quantization import Quantizer
from ..quantization.parameter import note_of
from .chain import Chain
from .edges import Edges, Needs, View
from .measured import Measurements
from .plan import FusionPlan, PlanStep
from .program import Program
from .selection import Selection
from .step import Step
from .step_calls import TrackedCast, finish, lone_step

_BESIDE = "fuser_backward_with_output"


def compile_program(
    chain: Chain,
    choice: Selection,
    env: Environment,
    autocast: torch.dtype | None,
    measurements: Measurements,
    kwargs: Sequence[tuple[str, ...]],
) -> Program:
    """Turn a choice of fusions, already built, into a program.

    Args:
        chain: The chain.
        choice: The fusions taken; each step carries its fused op.
        env: The environment in which the program runs.
        autocast: The dtype that autocast asks for, or None.
        measurements: The casts, the needed gradients, and the measurements.
        kwargs: Names of the keyword arguments given to each op.
    """
    edges, needs = measurements.edges, measurements.needs
    forward, backward = _steps(chain, choice, env, edges, needs)
    # a joint fusion may leave anything
    undeclared = {i for s in choice.taken if s.passes == "joint" for i in range(s.start, s.stop)}
    for step in forward:
        finish(step, "forward", chain, kwargs, env, edges)
        step.numbers = _numbers(step, chain, needs.first_backward) if env.requires_grad else ()
        step.note = note_of(step.matched, env.recipe)
    recomputable = {
        step.stop: step
        for step in forward
        if isinstance(step.op, FusedOperation) and step.op.recomputes and step.stop > step.start
    }
    behind = {step.begin: step for step in forward if step.begin % 2 == 0}
    before: Step | None = None
    for step in backward:
        step.owns = before is not None and _leaves_owned(before)
        finish(step, "backward", chain, kwargs, env, edges)
        if step.start in recomputable and step.start not in undeclared:
            _let_recompute(step, chain, recomputable[step.start], behind.get(2 * step.start))
        if before is not None:
            _let_wait(before, step, needs, env)
        before = step
    contexts = _context_values(chain, env, autocast, (forward, backward), edges, needs)
    plan = FusionPlan(
        _describe(forward, chain, edges),
        _describe(backward, chain, edges),
        choice.refused,
        measurements.table.digest,
    )
    steps = forward, backward
    facts = tuple(sorted({*choice.row_facts, *edges.row_facts}))
    return Program(chain, plan, env, autocast, steps, contexts, measurements, undeclared, facts)


def _steps(
    chain: Chain, choice: Selection, env: Environment, edges: Edges, needs: Needs
) -> tuple[list[Step], list[Step]]:
    """The steps of both passes, in the order they run."""
    forward = [step for step in choice.taken if step.passes != "backward"]
    backward = [step for step in choice.taken if step.passes != "forward"]
    forward = _cover(edges.view(chain.ops, "forward"), forward)
    backward = _cover(edges.view(chain.ops, "backward"), backward)[::-1]
    backward = [step for step in backward if step.end > 2 * needs.first_backward + 1]
    return forward, backward if env.requires_grad else []


def _context_values(
    chain: Chain,
    env: Environment,
    autocast: torch.dtype | None,
    steps: tuple[Sequence[Step], Sequence[Step]],
    edges: Edges,
    needs: Needs,
) -> list[dict[str, Any]]:
    """The attributes that the engine sets on each context; see :class:`OperationContext`."""
    forward, backward = steps
    recomputing = {step.recompute for step in backward}
    # a fused op that begins with a cast takes a plain tensor, which must not be quantized before
    inside = {step.begin for step in forward if step.source}
    inside_backward = {step.end - 1 for step in backward if step.source}
    owned = {i for step in backward if step.owns for i in range(step.start, step.stop)}
    prefers_memory = autocast is not None and env.options.get("prefer") == "memory"
    recipe = env.recipe
    return [
        dict(
            requires_grad=env.requires_grad and i >= needs.first_backward,
            input_requires_grad=needs.inputs[i],
            param_requires_grad=needs.params[i],
            dtype=_dtype(chain.ops, i, autocast),
            backward_override=getattr(recipe, "backward_override", None),
            prev_op_grad_output_quantizer=_quantizer(edges.backward, i, inside_backward),
            next_op_input_quantizer=_quantizer(edges.forward, i + 1, inside),
            quantizers=edges.quantizers[i],
            weights=op._weights if recipe is not None else None,
            owns_grad_output=i in owned,
            may_recompute=i in recomputing,
            saves_params=prefers_memory and {*needs.params[i]} == {True},
        )
        for i, op in enumerate(chain.ops)
    ]


def _quantizer(casts: Mapping[int, Cast], edge: int, inside: set[int]) -> Quantizer | None:
    return casts[edge].quantizer if edge in casts and 2 * edge not in inside else None


def _dtype(
    ops: Sequence[BasicOperation], index: int, autocast: torch.dtype | None
) -> torch.dtype | None:
    """The dtype an op computes in under autocast.

    An output that the next op casts anyway is computed in the dtype of that op.
    """
    wanted = ops[index].autocast_dtype
    cast_anyway = any(
        declared(following, "casts_input") for following in ops[index + 1 : index + 2]
    )
    return autocast if autocast is None or wanted is None or cast_anyway else wanted


def _cover(view: View, taken: Sequence[Step]) -> list[Step]:
    """The steps of one pass, first op to last: those taken, and single ops and casts elsewhere."""
    steps = [copy.copy(step) for step in taken]
    covered = {place for step in steps for place in range(step.begin, step.end)}
    alone = [k for k, place in enumerate(view.places) if place not in covered]
    steps += [lone_step(view.ops[k], view.places[k]) for k in alone]
    return sorted(steps, key=lambda step: step.begin)


def _numbers(step: Step, chain: Chain, first: int) -> tuple[tuple[int, Any, str], ...]:
    """The numbers of a fused step's ops that their backward, from op ``first`` on, reads."""
    places = range(max(step.start, first), step.stop if step.source else 0)  # an op sets its own
    ops = [(i, chain.ops[i]) for i in places]
    return tuple([(i, op, name) for i, op in ops for name in numbers_of(op)])


def _let_recompute(step: Step, chain: Chain, before: Step, behind: Step | None) -> None:
    """Mark in a backward step that its input need not be kept, or why it is kept.

    Args:
        step: The backward step.
        chain: The chain.
        before: The forward step that computed the input, and can compute it again.
        behind: The forward step that begins with the cast of the input, if there is one.
    """
    if step.start == step.stop:
        return
    if "input" not in (declared(chain.ops[step.start], "saved_names") or ()):
        return
    if before.end % 2 or behind is None:  # its output is the op's input
        kept = ""
    elif behind.stop > behind.start:
        kept = f"{type(behind.op).__name__} casts it inside"
    elif not (cast := behind.casts[0][1]).quantizer.requantizes:
        by = type(cast.quantizer).__name__
        kept = f"{by} cannot cast it again with the scale of the forward"
    else:
        kept, fused = "", behind.run if behind.source else None
        behind.direct, behind.run = True, TrackedCast(cast, fused)
    if kept:
        step.note = f"its input is not computed again: {kept}"
    else:
        step.prepares, step.recompute = True, before.start


def _let_wait(step: Step, following: Step, needs: Needs, env: Environment) -> None:
    """Let a backward step wait for its input, if the next one recomputes that on the way."""
    fused: Any = following.op
    split = step.direct and declared(step.op, "splits_backward") and all(needs.params[step.start])
    if not split or step.recompute != following.start or following.end != step.begin - 1:
        return
    plain = not (following.casts or env.recipe or env.options.get("debug"))
    if following.source and following.passes == "joint" and plain:
        # overriding only fuser_backward invalidates fuser_backward_with_output
        places = [vars(each).keys() for each in (fused, *type(fused).__mro__)]
        first = next(keys for keys in places if keys & {"fuser_backward", _BESIDE})
        following.with_output = fused.fuser_backward_with_output if _BESIDE in first else None
        step.waits = following.with_output is not None


def _leaves_owned(step: Step) -> bool:
    """Return whether the gradient that a backward step returns belongs to the chain.

    It may otherwise be in a tensor that the caller passed by keyword.
    """
    assert step.op is not None
    if step.given:
        return False
    given = declared(step.op, "grad_input")
    return given == "fresh" or (given == "same" and step.owns)


def _describe(steps: Sequence[Step], chain: Chain, edges: Edges) -> tuple[PlanStep, ...]:
    """The steps as report data."""
    rows = []
    for step in steps:
        names = tuple(op_class(op).__name__ for op in chain.ops[step.start : step.stop])
        casts = tuple((edge, type(cast.quantizer).__name__) for edge, cast in step.casts)
        notes = [str(step.measured)] if step.measured else []
        whys = [edges.unquantized.get(i, "") for i in range(step.start, step.stop)]
        notes += dict.fromkeys(whys)
        row = PlanStep(
            names[0] if names else f"Cast[{casts[0][1]}]",
            names,
            step.start,
            casts=casts,
            note="; ".join(filter(None, [step.note, *notes])),
        )
        if (source := step.source) is not None:
            row = dataclasses.replace(
                row,
                op=type(step.op).__name__,
                fusion=source.name,
                distribution=source.distribution,
                version=source.version,
                fallback=step.op.fallback,
            )
        rows.append(row)
    return tuple(rows)
