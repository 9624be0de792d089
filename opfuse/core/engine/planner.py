"""Makes the program for the key of a call: everything that can be decided once is decided here."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..cast import Cast
from ..environment import Environment, device_name, shape_of
from ..fused_op import FusedOperation
from ..fusible import declared
from ..introspection import is_dtensor, op_class, standing_for
from ..plugins import manager
from ..quantization import Quantizer
from ..quantization.coded_tensor import note_of
from ..quantization.names import check_names
from ..recipe_lookup import why_off
from ..records import FusionSource
from ..settings import Settings
from ..tools import check_options
from .chain import Chain
from .checks import check_attributes, check_differentiable, check_kwargs, check_tensors
from .facts import Candidate, Facts, Needs, Recompute, Shapes, Step, ToolFacts, edges_of
from .plan import FusionPlan, PlanStep, Refusal
from .program import Program
from .selection import check_expansion, choose


class Key(NamedTuple):
    """Everything that a plan depends on.

    Attributes:
        grads: For the input, the parameters and the extra inputs, whether each needs a gradient;
            None: grad mode is off.
        dtype, device: Dtype and device of the input.
        autocast: The dtype that autocast asks for, or None.
        training: For each op, whether it is in training mode.
        generation: The generation of the plugins.
        changes: How often an op or a class of ops was changed.
        deterministic: Whether PyTorch is to use deterministic algorithms.
        compiling: Whether ``torch.compile`` traces.
        kwargs: For each op, the names of its keyword arguments; or None.
        extras: Dtype and device of each extra input, or None.
        settings: The settings of the thread.
    """

    grads: tuple[bool, ...] | None
    dtype: torch.dtype
    device: torch.device
    autocast: torch.dtype | None
    training: tuple[bool, ...]
    generation: int
    changes: int
    deterministic: bool
    compiling: bool
    kwargs: tuple[tuple[str, ...], ...] | None
    extras: tuple[tuple[torch.dtype, torch.device], ...] | None
    settings: Settings


_SHAPE_FACTS = "row_alignment", "rows", "features", "contiguous"
_MOST_ALIGNED = 128  # what NVFP4 needs; MX needs 32, and kernels of half precision 8 or 16


def rows_of(facts: tuple[str, ...], input: Tensor | None) -> tuple[Any, ...]:
    """Facts about the rows of an input, named as in :class:`Environment`."""
    known: dict[str, Any] = {"row_alignment": 1}
    if input is not None:
        alignment = math.gcd(input.shape[:-1].numel(), _MOST_ALIGNED)
        known = {"row_alignment": alignment, **shape_of(input)._asdict()}
    return tuple([known.get(fact) for fact in facts])


def make_program(
    chain: Chain,
    owner: nn.Module | None,
    key: Key,
    input: Tensor | None,
    tensors: Sequence[Tensor] | None = None,
) -> Program:
    """Make the program for a key, where no mode sees that plugins look at tensors.

    Args:
        chain: The chain.
        owner: The op whose own call this is, if it is one.
        key: The key.
        input: The input, for its number of rows; None while tracing.
        tensors: The parameters, for their shapes; None: they are looked at.
    """
    settings = key.settings
    given = key.dtype, key.device, key.autocast, key.extras or ()
    check_tensors(chain, owner, *given, input is None or is_dtensor(input))
    check_kwargs(chain, key.kwargs)
    off = why_off(settings.recipe, settings.selection)
    check_names(settings.skip)
    env = _environment(key, input)._replace(recipe=None if off else settings.recipe)
    needs = _needs(chain, key.grads)
    double_backward = env.options.get("double_backward")
    if double_backward:
        check_differentiable(chain, env.recipe)
    elif env.requires_grad:
        check_attributes(chain)
    sources = () if double_backward else manager.sources(settings.selection)
    check_options(settings.options, settings.selection)
    edges = edges_of(chain, env, needs, settings, off)
    kwargs = key.kwargs or ((),) * len(chain.ops)
    facts = Facts(
        chain, env, needs, edges, _shapes(chain, tensors), kwargs,
        autocast=key.autocast, input_dtype=key.dtype,
        tools=manager.active_tools(settings.selection), needs_tools=settings.tools,
    )  # fmt: skip
    if sources:
        asked = [tool for tool in facts.tools if "opfuse_facts" in tool.hooks]
        answers = [manager.ask(tool, "opfuse_facts", ToolFacts, facts=facts) for tool in asked]
        facts = dataclasses.replace(facts, tool_facts=[*filter(None, answers)])
    return _build(facts, sources)


def _shapes(chain: Chain, tensors: Sequence[Tensor] | None) -> Shapes:
    """Shape and dtype of the parameters of each op."""
    if tensors is None:
        named = [(op, name) for op in chain.ops for name in op.param_names or ()]
        with torch.no_grad():
            tensors = [op.read_parameter(name, standing_for) for op, name in named]
    described = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
    return [described[slice(*span)] for span in chain.param_ranges]


def _environment(key: Key, input: Tensor | None) -> Environment:
    """The environment of a plan, from its key."""
    device = key.device
    return Environment(
        device=device,
        capability=torch.cuda.get_device_capability(device) if device.type == "cuda" else None,
        dtype=key.autocast or key.dtype,
        training=any(key.training),
        requires_grad=key.grads is not None and any(key.grads),
        **dict(zip(_SHAPE_FACTS, rows_of(_SHAPE_FACTS, input), strict=True)),
        device_name=device_name(device.type, device.index if device.type == "cuda" else None),
        **processor(device),
        deterministic=key.deterministic,
        options=dict(key.settings.options),
        compiling=key.compiling,
    )


def processor(device: torch.device) -> dict[str, Any]:
    """The fields of :class:`Environment` about the processor."""
    if device.type != "cuda":
        return {"multiprocessors": torch.get_num_threads() if device.type == "cpu" else 1}
    found = torch.cuda.get_device_properties(device)
    name = getattr(found, "gcnArchName", "") if torch.version.hip else ""
    architecture = name.partition(":")[0] or f"sm_{found.major}{found.minor}"
    return {"multiprocessors": found.multi_processor_count, "architecture": architecture}


def _build(facts: Facts, sources: Sequence[FusionSource]) -> Program:
    """Choose fusions and build their ops; choose again without those whose build fails."""
    excluded: set[tuple[Any, int, int]] = set()
    while True:
        chosen = choose(facts, sources, excluded)
        steps: list[Step] = []
        for candidate in chosen.taken:
            step = build_step(candidate, candidate.env)
            if step is None:
                excluded.add((candidate.source, candidate.begin, candidate.end))
                break
            steps.append(step)
        else:
            return compile_program(facts, steps, chosen.refused, chosen.row_facts)


def build_step(candidate: Candidate, env: Environment) -> Step | None:
    """The step of a candidate; None, after a warning, if its author's code fails."""
    fused, source = candidate.op, candidate.source
    try:
        if fused is None:
            fused = source.fusion.build(candidate.matched)
        if isinstance(fused, FusedOperation):
            fused.planned(env)
    except Exception as error:
        what = "build" if fused is None else "planned"
        source.warn(f"its {what} raised {type(error).__name__}: {error}")
        return None
    check_expansion(source, fused, candidate.matched)
    return dataclasses.replace(candidate, op=fused)


def _needs(chain: Chain, grads: tuple[bool, ...] | None) -> Needs:
    """The gradients that are needed, given which tensors require grad."""
    ops, count = len(chain.ops), 1 + len(chain.param_sources)
    flags = grads or (False,) * (count + len(chain.external_inputs))
    params = [flags[1:count][slice(*span)] for span in chain.param_ranges]
    wanting = [i for i, of_op in enumerate(params) if any(of_op)]
    extras = zip(chain.external_inputs, flags[count:], strict=True)
    wanting += [i for (i, _), wanted in extras if wanted]
    first = 0 if flags[0] else min(wanting, default=ops)
    first_with_input = 0 if flags[0] else first + 1
    inputs = tuple(i >= first_with_input for i in range(ops))
    return Needs(grads is not None, first, inputs, tuple(params))


# From the choice to the program


def compile_program(
    facts: Facts,
    fused: Sequence[Step],
    refused: tuple[Refusal, ...] = (),
    row_facts: Sequence[str] = (),
) -> Program:
    """Turn the steps of fusions into a program.

    Args:
        facts: The chain, and everything that its plan is made from.
        fused: The steps of the fusions taken.
        refused: The candidates that were not.
        row_facts: The facts about the rows that the choice depends on.
    """
    steps = forward, backward = _steps(facts, fused)
    found = [_recompute(step, facts, forward) for step in backward]
    again = [*zip(backward, found, strict=True)]
    recomputing = {step.start: how for step, how in again if isinstance(how, Recompute)}
    notes = [how if isinstance(how, str) else "" for how in found]
    contexts = _context_values(facts, forward, backward, recomputing)
    recipe = facts.env.recipe
    digest = ",".join(known.digest for known in facts.tool_facts if known.digest)
    of_forward = [_describe(step, note_of(step.matched, recipe), facts) for step in forward]
    of_backward = [_describe(*pair, facts) for pair in zip(backward, notes, strict=True)]
    plan = FusionPlan(tuple(of_forward), tuple(of_backward), refused, digest)
    program = Program(facts, plan, steps, contexts, recomputing)
    program.row_facts = tuple(sorted({*row_facts, *facts.edges.row_facts}))
    return program


def _steps(facts: Facts, fused: Sequence[Step]) -> tuple[list[Step], list[Step]]:
    """The steps of both passes, in the order they run."""
    ops, edges, first = facts.chain.ops, facts.edges, facts.needs.first_backward
    forward = [step for step in fused if step.passes != "backward"]
    backward = [step for step in fused if step.passes != "forward"]
    forward = _cover(edges.view(ops, "forward"), forward)
    backward = _cover(edges.view(ops, "backward"), backward)[::-1]
    backward = [step for step in backward if step.end > 2 * first + 1]
    return forward, backward if facts.env.requires_grad else []


def _cover(view: Mapping[int, Any], taken: Sequence[Step]) -> list[Step]:
    """The steps of one pass, first op to last: those taken, and single ops and casts elsewhere."""
    covered = {place for step in taken for place in range(step.begin, step.end)}
    alone = [Step.alone(op, place) for place, op in view.items() if place not in covered]
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
    is_joint = step.source and step.passes == "joint"
    keeps_anything = is_joint and not step.op.keeps_input_as_first
    before = next((s for s in forward if s.start < s.stop == step.start < step.stop), None)
    if before is None or not before.op.recomputes or keeps_anything:
        return ""
    if before.start < facts.needs.first_backward:  # its contexts are not there in the backward
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
