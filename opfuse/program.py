"""Programs: a plan made executable. Everything that can be decided once is decided here, not per call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from .op import BasicOperation, FusedOperation, FusibleOperation, OperationContext, op_class
from .plan import Candidate, Choice, FusionPlan, PlanStep
from .quantization import Quantizer
from .routing import Routing
from .scope import Environment


class Step(NamedTuple):
    """One call of one op over ``ops[start:stop]``; loops unpack the first five, the rest is rarely needed.

    Attributes:
        op: A basic op, or the fused op that stands for several.
        start, stop: Which basic ops.
        simple: Whether ``op_forward`` / ``op_backward`` can be called directly.
        details: The rest.
    """

    op: FusibleOperation
    start: int
    stop: int
    simple: bool
    details: StepDetails


class StepDetails(NamedTuple):
    """What a step does beyond calling its op.

    Attributes:
        prepare: Whether the incoming tensor needs a look: ``cast``, ``width``, or dequantizing.
        cast: The quantizer to cast the incoming tensor with.
        takes_quantized: Whether the op takes a quantized tensor.
        width: Last dimension to insist on.
        owns: Whether the incoming gradient may be overwritten (backward only).
        has_extras: Whether one of its basic ops has extra tensors.
    """

    prepare: bool
    cast: Quantizer | None
    takes_quantized: bool
    width: int | None
    owns: bool
    has_extras: bool


class ContextTemplate(NamedTuple):
    """What the fuser writes on the context of one basic op; see :class:`OperationContext`."""

    requires_grad: bool
    input_requires_grad: bool
    param_requires_grad: tuple[bool, ...]
    dtype: torch.dtype | None
    backward_override: str | None
    prev_op_grad_output_quantizer: Quantizer | None
    next_op_input_quantizer: Quantizer | None
    quantizers: tuple[tuple[Quantizer, ...], tuple[Quantizer, ...]]
    owns_grad_output: bool


class FilledContext(OperationContext):
    """A context filled in by the fuser."""

    def __init__(self, template: ContextTemplate, params: tuple[Any, ...], saved: tuple[Any, ...] | None) -> None:
        (
            self.requires_grad,
            self.input_requires_grad,
            self.param_requires_grad,
            self.dtype,
            self.backward_override,
            self.prev_op_grad_output_quantizer,
            self.next_op_input_quantizer,
            self.quantizers,
            self.owns_grad_output,
        ) = template
        self.params = params
        self.saved_tensors = saved
        self.to_save = None


class OpState(NamedTuple):
    """What a program knows about one basic op's context.

    Attributes:
        template: What the fuser writes on it.
        first, last: Which tensors are the op's parameters.
        start, stop: Which saved tensors are its; ``stop < start`` where its declarations do not say how many,
            and its forward context is kept.
        shared: A context for every call's backward, where the op's declarations say that it leaves nothing.
    """

    template: ContextTemplate
    first: int
    last: int
    start: int
    stop: int
    shared: FilledContext | None


class Program:
    """An executable plan: forward and backward steps over the same basic ops.

    Attributes:
        states: Per basic op, what concerns its context.
        saving: ``(op, number of saved tensors)`` where the declarations say how many.
        keeping: The ops whose forward contexts are kept.
        num_params_of: ``(op, number of parameters)`` where there are some.
    """

    def __init__(
        self,
        routing: Routing,
        plan: FusionPlan,
        env: Environment,
        templates: Sequence[ContextTemplate],
        steps: tuple[Sequence[Step], Sequence[Step]],
        *,
        boundary: int,
        free: set[int],
    ) -> None:
        self.routing = routing
        self.plan = plan
        self.autocast_device = env.device.type if torch.amp.is_autocast_available(env.device.type) else "cpu"
        self.recipe = env.recipe
        self.requires_grad = env.requires_grad
        self.forward, self.backward = tuple(steps[0]), tuple(steps[1])
        self.boundary = boundary
        self.num_params = len(routing.param_sources)
        self.has_extras = routing.has_extras
        self.writes_extras = any(getattr(op, "in_place", False) for op in routing.ops)
        self.has_silent_outputs = any(i < boundary for i, _ in routing.public_outputs)
        self.double_backward = bool(env.options.get("double_backward"))
        self.num_params_of = tuple((i, b - a) for i, (a, b) in enumerate(routing.param_ranges) if b > a)
        states, position = [], 0
        for i, (op, template, (first, last)) in enumerate(
            zip(routing.ops, templates, routing.param_ranges, strict=True)
        ):
            declared = op.saved_names is not None and not op.context_names and i not in free
            count = len(op.saved_names or ()) if declared else -1
            shared = FilledContext(template, (), ()) if count == 0 else None
            states.append(OpState(template, first, last, position, position + count, shared))
            position += max(count, 0)
        self.states = tuple(states)
        self.saving = tuple((i, s.stop - s.start) for i, s in enumerate(states) if s.stop > s.start)
        self.keeping = tuple(i for i, s in enumerate(states) if s.stop < s.start)


def compile_program(
    routing: Routing,
    choice: Choice,
    env: Environment,
    autocast: torch.dtype | None,
    *,
    grads: tuple[bool, ...],
    boundary: int,
    kwargs: Sequence[tuple[str, ...]],
) -> Program:
    """Turn a choice of fusions, already built, into a program.

    Args:
        routing: The chain.
        choice: The fusions taken; each candidate carries its fused op.
        env: Where the program runs.
        autocast: The dtype that autocast asks for, or None.
        grads: ``requires_grad`` of the input and of each parameter.
        boundary: The first op that takes part in the backward.
        kwargs: Names of the keyword arguments given to each op.
    """
    forward = _cover(routing, [c for c in choice.taken if c.kind != "backward"])
    backward = _cover(routing, [c for c in choice.taken if c.kind != "forward"])[::-1] if env.requires_grad else []
    backward = [run for run in backward if run.stop > boundary]
    quantized_backward = env.recipe is not None and env.recipe.backward_override is None
    output_quantizers = _negotiate(forward, env.recipe is not None, "get_input_quantizer", "writes_output")
    grad_quantizers = _negotiate(backward, quantized_backward, "get_grad_output_quantizer", "writes_grad_input")
    forward_steps = [run.step(routing, kwargs, env, owns=False, forward=True) for run in forward]
    backward_steps: list[Step] = []
    for run in backward:
        owns = run.cast is not None or bool(backward_steps and _leaves_owned(backward_steps[-1]))
        backward_steps.append(run.step(routing, kwargs, env, owns=owns, forward=False))
    owned = {i for step in backward_steps if step.details.owns for i in range(step.start, step.stop)}
    templates = [
        ContextTemplate(
            requires_grad=env.requires_grad and i >= boundary,
            input_requires_grad=env.requires_grad and (i > boundary or (i == boundary == 0 and grads[0])),
            param_requires_grad=grads[1:][slice(*routing.param_ranges[i])],
            dtype=autocast,
            backward_override=env.recipe.backward_override if env.recipe is not None else None,
            prev_op_grad_output_quantizer=grad_quantizers.get(i),
            next_op_input_quantizer=output_quantizers.get(i),
            quantizers=op._quantizers.of(env.recipe),
            owns_grad_output=i in owned,
        )
        for i, op in enumerate(routing.ops)
    ]
    # a joint fusion may leave what it likes, and under a recipe one saved tensor may be several
    free = {i for c in choice.taken if c.kind == "joint" for i in range(c.start, c.stop)}
    free |= set(range(len(routing.ops))) if env.recipe is not None else set()
    plan = FusionPlan(_describe(forward, routing.ops), _describe(backward, routing.ops), choice.refused)
    return Program(routing, plan, env, templates, (forward_steps, backward_steps), boundary=boundary, free=free)


def _leaves_owned(step: Step) -> bool:
    """Whether the gradient that a backward step returns belongs to the chain."""
    return step.op.grad_input == "fresh" or (step.op.grad_input == "same" and step.details.owns)


class _Run:
    """A step while it is being put together."""

    def __init__(self, op: FusibleOperation, start: int, stop: int, candidate: Candidate | None) -> None:
        self.op = op
        self.start = start
        self.stop = stop
        self.candidate = candidate
        self.cast: Quantizer | None = None

    def step(
        self, routing: Routing, kwargs: Sequence[tuple[str, ...]], env: Environment, *, owns: bool, forward: bool
    ) -> Step:
        method = "fuser_forward" if forward else "fuser_backward"
        simple = (
            isinstance(self.op, BasicOperation)
            and getattr(type(self.op), method) is getattr(BasicOperation, method)
            and not (self.op.num_extra_inputs or self.op.num_extra_outputs)
            and not kwargs[self.start]
        )
        width = routing.later_widths.get(self.start) if forward else None
        prepare = env.recipe is not None or width is not None
        wanted = None
        if env.recipe is not None:
            wanted = self.op.get_input_quantizer() if forward else self.op.get_grad_output_quantizer()
        extras = any(op.num_extra_inputs or op.num_extra_outputs for op in routing.ops[self.start : self.stop])
        details = StepDetails(prepare, self.cast, wanted is not None, width, owns, extras)
        return Step(self.op, self.start, self.stop, simple, details)


def _cover(routing: Routing, taken: Sequence[Candidate]) -> list[_Run]:
    by_start = {candidate.start: candidate for candidate in taken}
    runs = []
    position = 0
    while position < len(routing.ops):
        candidate = by_start.get(position)
        if candidate is None:
            runs.append(_Run(routing.ops[position], position, position + 1, None))
        else:
            assert isinstance(candidate.op, FusedOperation)
            runs.append(_Run(candidate.op, position, candidate.stop, candidate))
        position = runs[-1].stop
    return runs


def _negotiate(runs: Sequence[_Run], enabled: bool, wants: str, writes: str) -> dict[int, Quantizer]:
    """Ask each consumer for its quantizer and each producer whether it can write it; where not, cast.

    Returns:
        For the producers that do write it: the index of the basic op at the edge -> the quantizer.
    """
    agreed: dict[int, Quantizer] = {}
    if not enabled:
        return agreed
    for position, run in enumerate(runs):
        quantizer: Quantizer | None = getattr(run.op, wants)()
        if quantizer is None:
            continue
        producer = runs[position - 1] if position else None
        if producer is not None and getattr(producer.op, writes)(quantizer):
            agreed[producer.stop - 1 if writes == "writes_output" else producer.start] = quantizer
        else:
            run.cast = quantizer
    return agreed


def _describe(runs: Sequence[_Run], ops: Sequence[BasicOperation]) -> tuple[PlanStep, ...]:
    steps = []
    for run in runs:
        if run.cast is not None:
            steps.append(PlanStep(f"Cast[{type(run.cast).__name__}]", (), run.start))
        names = tuple(op_class(op).__name__ for op in ops[run.start : run.stop])
        if run.candidate is None:
            steps.append(PlanStep(names[0], names, run.start))
        else:
            source = run.candidate.source
            steps.append(
                PlanStep(type(run.op).__name__, names, run.start, source.name, source.distribution, source.version)
            )
    return tuple(steps)
