"""Programs: a plan made executable. Everything that can be decided once is decided here, not per call."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ..environment import Environment
from ..op import BasicOperation, FusedOperation, FusibleOperation, OperationContext, declared
from ..overrides import op_class
from ..quantization import Quantizer
from .chain import Routing
from .choose import Candidate, Choice
from .debug import Watched
from .plan import FusionPlan, PlanStep


class Step(NamedTuple):
    """One call of one op over ``ops[start:stop]``.

    Attributes:
        op: A basic op, or the fused op that stands for several.
        start, stop: Which basic ops.
        simple: Whether ``op_forward`` / ``op_backward`` can be called directly.
        prepares: Whether anything happens to the incoming tensor first, as follows.
        cast: The quantizer to cast it with.
        takes_quantized: Whether the op takes a quantized tensor; if not, it is made plain.
        width: Last dimension to insist on.
        has_extras: Whether one of its basic ops has extra tensors.
        owns: Whether the incoming gradient may be overwritten (backward only).
        recompute: Where the fused op before it starts, if that can give the input again (backward only).
    """

    op: FusibleOperation
    start: int
    stop: int
    simple: bool
    prepares: bool
    cast: Quantizer | None
    takes_quantized: bool
    width: int | None
    has_extras: bool
    owns: bool
    recompute: int | None = None

    def call(self, direction: str) -> Call:
        """What a loop needs of it."""
        method = getattr(self.op, ("op_" if self.simple else "fuser_") + direction)
        prepared, wired = self if self.prepares else None, self if self.has_extras else None
        return method, self.start, self.stop, self.simple, prepared, wired, ((),) * (self.stop - self.start)


Call = tuple[Callable[..., Any], int, int, bool, "Step | None", "Step | None", tuple[tuple[()], ...]]
"""A step in a loop: the bound method, which basic ops, ``simple``, the step if it prepares, the step if it has extras,
and no extra tensors for each basic op.

A plain tuple and a bound method, since unpacking a named tuple and looking up a module's attribute are slow.
"""


class Program:
    """An executable plan: forward and backward steps over the same basic ops.

    Attributes:
        accumulating: ``(op, first, last)``: which tensors are the parameters of an op that stores their gradients.
        templates: Per basic op, what the fuser writes on its context; see :class:`OperationContext`.
        params: ``(op, first, last)``: which tensors are its parameters, where it has some.
        bare: The ops that have none, and must give no gradients for any.
        flowing: The extra outputs that feed a channel through which a gradient comes back.
        unsaved: The ops that declare to save nothing.
        first_gradient: The ops behind this one must give a gradient of their input.
        saving: ``(op, start, stop)``: which saved tensors are its, where the declarations say how many.
        leaving: ``(op, name)``: the attributes that contexts pass on, where the declarations name them.
        keeping: The ops that may leave anything, so that their forward contexts are kept.
        row_facts, rows: What of the number of rows the plan depends on, and its values.
        recomputing: Basic op -> who can compute its input again: the fused op before it, where that starts, and
            the input's place among what the basic op saves, and among all that is saved.
        unused: Contexts that hold nothing, for other passes, since making them costs as much as the ops.
    """

    def __init__(
        self,
        routing: Routing,
        plan: FusionPlan,
        env: Environment,
        templates: Sequence[dict[str, Any]],
        steps: tuple[Sequence[Step], Sequence[Step]],
        *,
        boundary: int,
        free: set[int],
        row_facts: tuple[str, ...],
    ) -> None:
        self.routing = routing
        self.plan = plan
        self.autocast_device = env.device.type if torch.amp.is_autocast_available(env.device.type) else "cpu"
        self.recipe = env.recipe
        self.is_special = env.recipe is not None  # there is more to check in a call
        self.requires_grad = env.requires_grad
        self.forward, self.backward = tuple(steps[0]), tuple(steps[1])
        self.forward_calls = tuple(step.call("forward") for step in self.forward)
        self.backward_calls = tuple(step.call("backward") for step in self.backward)
        if env.options.get("debug") and not env.compiling:
            self.forward_calls = tuple(self._watched(step, "forward") for step in self.forward)
            self.backward_calls = tuple(self._watched(step, "backward") for step in self.backward)
        self.boundary = boundary
        self.num_params = len(routing.param_sources)
        self.accumulating = _accumulating(routing, env)
        self.has_extras = routing.has_extras
        self.writes_extras = any(getattr(op, "in_place", False) for op in routing.ops)
        self.has_silent_outputs = any(i < boundary for i, _ in routing.public_outputs)
        sources = set(routing.sources.values()) if env.requires_grad else set()
        self.flowing = frozenset(slot for slot in sources if slot[0] >= boundary)
        self.double_backward = bool(env.options.get("double_backward"))
        self.compiling = env.compiling
        self.templates = tuple(templates)
        self.input_requires_grad = bool(templates) and templates[0]["input_requires_grad"]
        self.params = tuple((i, first, last) for i, (first, last) in enumerate(routing.param_ranges) if last > first)
        self.bare = tuple(i for i, (first, last) in enumerate(routing.param_ranges) if last == first and i >= boundary)
        saving, leaving, keeping, position = [], [], [], 0
        saved = [declared(op, "saved_names") for op in routing.ops]
        for i, op in enumerate(routing.ops):
            names = saved[i]
            if names is None or i in free:
                keeping.append(i)
                continue
            if i >= boundary:
                leaving += [(i, name) for name in declared(op, "context_names")]
            if names:
                saving.append((i, position, position + len(names)))
                position += len(names)
        self.saving, self.leaving, self.keeping = tuple(saving), tuple(leaving), tuple(keeping)
        self.unsaved = tuple(i for i, names in enumerate(saved) if names == () and i not in keeping)
        self.first_gradient = -1 if self.input_requires_grad else boundary
        starts = {i: start for i, start, _ in saving}
        ops_at = {step.start: step.op for step in self.forward}
        self.recomputing: dict[int, tuple[Any, int, int, int]] = {}
        for step in self.backward:
            if step.recompute is not None:
                place = saved[step.start].index("input")
                first = step.recompute
                self.recomputing[step.start] = ops_at[first], first, place, starts[step.start] + place
        self.row_facts = row_facts
        self.rows = tuple([getattr(env, fact) for fact in row_facts])
        self.unused: list[list[Any]] = []
        self._context_classes: list[Any] = [
            OperationContext
            if env.compiling or i in keeping
            else lent(tuple(declared(op, "context_names")))
            for i, op in enumerate(routing.ops)
        ]

    def _watched(self, step: Step, direction: str) -> Call:
        call = step.call(direction)
        ops = self.routing.ops[step.start : step.stop]
        who = f"{type(step.op).__name__} [{', '.join(op_class(op).__name__ for op in ops)}]"
        return (Watched(call[0], who, any(getattr(op, "in_place", False) for op in ops)), *call[1:])

    def separate(self, index: int, step: Step) -> Step:
        """The backward step of a basic op, out of the step of a fused op that stands for it."""
        op = self.routing.ops[index]
        first = index == step.start
        return step._replace(
            op=op,
            start=index,
            stop=index + 1,
            simple=False,
            prepares=first and step.prepares,
            has_extras=bool(op.num_extra_inputs or op.num_extra_outputs),
            owns=False,
        )

    def new_contexts(self) -> list[Any]:
        """One context per basic op, for one pass."""
        return [self._new_context(i) for i in range(len(self.templates))]

    def renew(self, contexts: list[Any]) -> None:
        """Replace the contexts that may hold anything, so that all can serve another pass."""
        for i in self.keeping:
            contexts[i] = self._new_context(i)

    def _new_context(self, index: int) -> Any:
        ctx: Any = self._context_classes[index]()
        for name, value in self.templates[index].items():
            setattr(ctx, name, value)
        return ctx


class _Lent:
    """The context of an op that declares what it leaves: it takes nothing else, so that it can serve again."""

    __slots__ = tuple(vars(OperationContext()))
    save_for_backward = OperationContext.save_for_backward

    def __init__(self) -> None:
        for name, value in vars(OperationContext()).items():
            setattr(self, name, value)


_Lent.__name__ = "OperationContext of an op whose context_names declare nothing"  # as an AttributeError calls it


@functools.cache
def lent(names: tuple[str, ...]) -> type[_Lent]:
    """The class of such a context, which takes the op's ``context_names`` too.

    The fewer classes there are, the faster an interpreter reads their attributes.
    """
    title = f"OperationContext of an op whose context_names declare {', '.join(names)}"
    return type(title, (_Lent,), {"__slots__": names}) if names else _Lent


def refuse_saved(program: Program, index: int, ctx: Any) -> None:
    """Refuse tensors that an op saves otherwise than by ``save_for_backward``, or although it declares to save none."""
    if ctx.saved_tensors is not None:
        what = "wrote saved_tensors on its context in its forward: give tensors to ctx.save_for_backward"
        raise RuntimeError(f"{program.routing.name(index)} {what}")
    if any(tensor is not None for tensor in ctx.to_save):
        what = "declares saved_names = (), and its forward gave tensors to save_for_backward"
        raise RuntimeError(f"{program.routing.name(index)} {what}: they would be lost; declare their names, in order")
    ctx.to_save = None


def _accumulating(routing: Routing, env: Environment) -> tuple[tuple[int, int, int], ...]:
    """See :class:`Program`."""
    ops = [i for i, op in enumerate(routing.ops) if op.accumulates_grads and env.requires_grad]
    if ops and env.compiling:
        who = f"{routing.name(ops[0])} puts gradients away itself (BasicOperation.accumulates_grads)"
        raise RuntimeError(f"{who}, which torch.compile does not see; run this chain in eager mode")
    return tuple((i, *routing.param_ranges[i]) for i in ops)


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
    # a joint fusion may leave what it likes, and under a recipe one saved tensor may be several
    free = {i for c in choice.taken if c.kind == "joint" for i in range(c.start, c.stop)}
    free |= set(range(len(routing.ops))) if env.recipe is not None else set()
    forward_steps = [run.step(routing, kwargs, env, owns=False, forward=True) for run in forward]
    backward_steps: list[Step] = []
    for run in backward:
        owns = run.cast is not None or bool(backward_steps and _leaves_owned(backward_steps[-1]))
        step = run.step(routing, kwargs, env, owns=owns, forward=False)
        backward_steps.append(step._replace(**_recomputation(routing, forward, step, free)))
    recomputing = {step.recompute for step in backward_steps}
    owned = {i for step in backward_steps if step.owns for i in range(step.start, step.stop)}
    templates = [
        dict(
            requires_grad=env.requires_grad and i >= boundary,
            input_requires_grad=env.requires_grad and (i > boundary or (i == boundary == 0 and grads[0])),
            param_requires_grad=grads[1:][slice(*routing.param_ranges[i])],
            dtype=_dtype(routing.ops, i, autocast),
            backward_override=env.recipe.backward_override if env.recipe is not None else None,
            prev_op_grad_output_quantizer=grad_quantizers.get(i),
            next_op_input_quantizer=output_quantizers.get(i),
            quantizers=op._quantizers.of(env.recipe),
            owns_grad_output=i in owned,
            recomputable=i in recomputing,
        )
        for i, op in enumerate(routing.ops)
    ]
    plan = FusionPlan(_describe(forward, routing.ops), _describe(backward, routing.ops), choice.refused)
    steps = forward_steps, backward_steps
    return Program(routing, plan, env, templates, steps, boundary=boundary, free=free, row_facts=choice.row_facts)


def _dtype(ops: Sequence[BasicOperation], index: int, autocast: torch.dtype | None) -> torch.dtype | None:
    """The dtype an op computes in under autocast; what the next one would cast anyway is made in that one's dtype."""
    wanted = ops[index].autocast_dtype
    cast_anyway = any(declared(following, "casts_input") for following in ops[index + 1 : index + 2])
    return autocast if autocast is None or wanted is None or cast_anyway else wanted


def _recomputation(routing: Routing, forward: Sequence[_Run], step: Step, free: set[int]) -> dict[str, Any]:
    """What to change in a backward step if a fused op before it can compute its input again."""
    op = routing.ops[step.start]
    names = declared(op, "saved_names") or ()
    for run in forward:
        if run.stop == step.start and isinstance(run.op, FusedOperation) and run.op.recomputes:
            if "input" in names and step.start not in free:
                return {"prepares": True, "recompute": run.start}
    return {}


def _leaves_owned(step: Step) -> bool:
    """Whether the gradient that a backward step returns belongs to the chain."""
    given = declared(step.op, "grad_input")
    return given == "fresh" or (given == "same" and step.owns)


@dataclasses.dataclass
class _Run:
    """A step while it is being put together."""

    op: FusibleOperation
    start: int
    stop: int
    candidate: Candidate | None = None
    cast: Quantizer | None = None

    def step(
        self, routing: Routing, kwargs: Sequence[tuple[str, ...]], env: Environment, *, owns: bool, forward: bool
    ) -> Step:
        method = "fuser_forward" if forward else "fuser_backward"
        simple = (
            isinstance(self.op, BasicOperation)
            and getattr(type(self.op), method) is getattr(BasicOperation, method)
            and method not in vars(self.op)
            and not (self.op.num_extra_inputs or self.op.num_extra_outputs)
            and not kwargs[self.start]
        )
        width = routing.later_widths.get(self.start) if forward else None
        prepares = env.recipe is not None or width is not None
        wanted = self.op.get_input_quantizer() if forward else self.op.get_grad_output_quantizer()
        extras = any(op.num_extra_inputs or op.num_extra_outputs for op in routing.ops[self.start : self.stop])
        preparation = prepares, self.cast, wanted is not None, width
        return Step(self.op, self.start, self.stop, simple, *preparation, extras, owns)


def _cover(routing: Routing, taken: Sequence[Candidate]) -> list[_Run]:
    runs = [_Run(candidate.op, candidate.start, candidate.stop, candidate) for candidate in taken if candidate.op]
    covered = {i for run in runs for i in range(run.start, run.stop)}
    runs += [_Run(op, i, i + 1) for i, op in enumerate(routing.ops) if i not in covered]
    return sorted(runs, key=lambda run: run.start)


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
