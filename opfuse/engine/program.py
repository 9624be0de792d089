"""Programs: a plan made executable. What can be decided once is decided here, not per call."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..debug import Watched
from ..environment import Environment
from ..fusible import declared
from ..op import BasicOperation, FusedOperation, asks_for_quantizers
from ..op_context import OperationContext
from ..overrides import op_class
from ..quantization import Quantizer
from .chain import Chain
from .choose import Choice
from .plan import FusionPlan, PlanStep
from .pool import ContextPool, pooled_context
from .step import Step


@dataclasses.dataclass(frozen=True)
class SavedState:
    """What the ops of a program leave for the backward, as they declare it.

    Attributes:
        ranges: ``(op, start, stop)``: which of all saved tensors are its.
        attributes: ``(op, name)``: the context attributes that are passed on.
        nothing: The ops that declare to save nothing.
        undeclared: The ops that may leave anything, so that their forward contexts are kept.
    """

    ranges: tuple[tuple[int, int, int], ...]
    attributes: tuple[tuple[int, str], ...]
    nothing: tuple[int, ...]
    undeclared: tuple[int, ...]

    @classmethod
    def of(cls, chain: Chain, first_backward: int, undeclared: set[int]) -> SavedState:
        """Of a chain; ``undeclared``: the ops whose declarations do not hold in this program."""
        ranges: list[tuple[int, int, int]] = []
        attributes: list[tuple[int, str]] = []
        nothing, open_ops, position = [], [], 0
        for i, op in enumerate(chain.ops):
            names = declared(op, "saved_names")
            if names is None or i in undeclared:
                open_ops.append(i)
                continue
            if i >= first_backward:
                attributes += [(i, name) for name in declared(op, "context_names")]
            if not names:
                nothing.append(i)
                continue
            ranges.append((i, position, position + len(names)))
            position += len(names)
        return cls(tuple(ranges), tuple(attributes), tuple(nothing), tuple(open_ops))


class Program:
    """An executable plan: forward and backward steps over the same basic ops.

    Attributes:
        forward, backward: The steps, in the order they run.
        first_backward: The first op that takes part in the backward.
        last_without_gradient: The ops behind this one must give a gradient of their input.
        params: ``(op, first, last)``: which tensors are its parameters, where it has some.
        without_params: The ops with a backward that have none, and must give no gradients for any.
        accumulating: As ``params``, for the ops that store the gradients of their parameters.
        called_before: The ops with a ``pre_fuser_forward``, and whether they have a backward.
        leaves_more: Whether the forward leaves more than saved tensors.
        saved: What the ops leave for the backward.
        recomputing: Basic op -> who can compute its input again: the fused op before it, where that
            starts, and the input's place among what the basic op saves, and among all that is
            saved.
        gradient_channels: The extra outputs that feed a channel through which a gradient comes
            back.
        pool: The contexts.
        is_plain: Whether a call has nothing to do but to run the steps.
        row_facts, rows: What of the number of rows the plan depends on, and its values.
    """

    def __init__(
        self,
        chain: Chain,
        plan: FusionPlan,
        env: Environment,
        autocast: torch.dtype | None,
        forward: Sequence[Step],
        backward: Sequence[Step],
        contexts: Sequence[dict[str, Any]],
        *,
        first_backward: int,
        undeclared: set[int],
        row_facts: tuple[str, ...],
    ) -> None:
        self.chain, self.plan = chain, plan
        self.forward, self.backward = tuple(forward), tuple(backward)
        self.recipe, self.compiling = env.recipe, env.compiling
        self.requires_grad, self.autocast = env.requires_grad, autocast
        self.double_backward = bool(env.options.get("double_backward"))
        known = torch.amp.is_autocast_available(env.device.type)
        self.autocast_device = env.device.type if known else "cpu"
        self.first_backward, self.num_params = first_backward, len(chain.param_sources)
        self.input_requires_grad = bool(contexts) and contexts[0]["input_requires_grad"]
        self.last_without_gradient = -1 if self.input_requires_grad else first_backward
        self.params, self.without_params = _param_ranges(chain, first_backward)
        self.accumulating = _accumulating(chain, env)
        self.has_extras = chain.has_extras
        self.writes_extras = any(getattr(op, "in_place", False) for op in chain.ops)
        self.has_silent_outputs = any(i < first_backward for i, _ in chain.public_outputs)
        sources = set(chain.sources.values()) if env.requires_grad else set()
        self.gradient_channels = frozenset(s for s in sources if s[0] >= first_backward)
        self.saved = SavedState.of(chain, first_backward, undeclared)
        self.recomputing = self._recomputing()
        more = self.saved.attributes, self.saved.undeclared, self.recomputing, self.accumulating
        self.leaves_more = self.has_extras or any(map(bool, more))
        self.pool = self._new_pool(contexts)
        self.row_facts, self.rows = row_facts, tuple([getattr(env, fact) for fact in row_facts])
        self.called_before = _called_before(chain, contexts)
        self.has_quantizer_state = _has_state(contexts)
        self.is_plain = not any((env.recipe, self.double_backward, self.called_before, autocast))

    def _recomputing(self) -> dict[int, tuple[Any, int, int, int]]:
        starts = {i: start for i, start, _ in self.saved.ranges}
        ops_at = {step.start: step.op for step in self.forward}
        found = {}
        for step in self.backward:
            if (first := step.recompute) is not None:
                place = declared(self.chain.ops[step.start], "saved_names").index("input")
                found[step.start] = ops_at[first], first, place, starts[step.start] + place
        return found

    def _new_pool(self, values: Sequence[dict[str, Any]]) -> ContextPool:
        undeclared = self.saved.undeclared
        classes = [
            OperationContext
            if self.compiling or i in undeclared
            else pooled_context(tuple(declared(op, "context_names")))
            for i, op in enumerate(self.chain.ops)
        ]
        return ContextPool(classes, values, undeclared)


def compile_program(
    chain: Chain,
    choice: Choice,
    env: Environment,
    autocast: torch.dtype | None,
    *,
    grads: tuple[bool, ...],
    first_backward: int,
    kwargs: Sequence[tuple[str, ...]],
) -> Program:
    """Turn a choice of fusions, already built, into a program.

    Args:
        chain: The chain.
        choice: The fusions taken; each step carries its fused op.
        env: Where the program runs.
        autocast: The dtype that autocast asks for, or None.
        grads: ``requires_grad`` of the input and of each parameter.
        first_backward: The first op that takes part in the backward.
        kwargs: Names of the keyword arguments given to each op.
    """
    forward, backward = _steps(chain, choice, env, first_backward)
    written = _negotiate_casts(forward, backward, env)
    # a joint fusion may leave what it likes, and under a recipe one saved tensor may be several
    undeclared = {i for s in choice.taken if s.passes == "joint" for i in range(s.start, s.stop)}
    undeclared |= set(range(len(chain.ops))) if env.recipe is not None else set()
    for step in forward:
        _finish(step, "forward", chain, kwargs, env)
    before: Step | None = None
    for step in backward:
        step.owns = step.cast is not None or (before is not None and _leaves_owned(before))
        _finish(step, "backward", chain, kwargs, env)
        _let_recompute(step, chain, forward, undeclared)
        before = step
    contexts = _context_values(chain, env, autocast, backward, written, first_backward, grads)
    plan = FusionPlan(_describe(forward, chain), _describe(backward, chain), choice.refused)
    options: dict[str, Any] = dict(
        first_backward=first_backward, undeclared=undeclared, row_facts=choice.row_facts
    )
    return Program(chain, plan, env, autocast, forward, backward, contexts, **options)


def _steps(
    chain: Chain, choice: Choice, env: Environment, first_backward: int
) -> tuple[list[Step], list[Step]]:
    """The steps of both passes, in the order they run."""
    forward = _cover(chain, [step for step in choice.taken if step.passes != "backward"])
    backward = _cover(chain, [step for step in choice.taken if step.passes != "forward"])[::-1]
    backward = [step for step in backward if step.stop > first_backward]
    return forward, backward if env.requires_grad else []


def _negotiate_casts(
    forward: Sequence[Step], backward: Sequence[Step], env: Environment
) -> tuple[dict[int, Quantizer], dict[int, Quantizer]]:
    """Who quantizes what goes from one step to the next, in both passes."""
    recipe = env.recipe
    of_backward = recipe is not None and recipe.backward_override is None
    written = _negotiate(forward, recipe is not None, "get_input_quantizer", "writes_output")
    return written, _negotiate(
        backward, of_backward, "get_grad_output_quantizer", "writes_grad_input"
    )


def _context_values(
    chain: Chain,
    env: Environment,
    autocast: torch.dtype | None,
    backward: Sequence[Step],
    written: tuple[dict[int, Quantizer], dict[int, Quantizer]],
    first_backward: int,
    grads: tuple[bool, ...],
) -> list[dict[str, Any]]:
    """What the engine writes on the context of each basic op; see :class:`OperationContext`."""
    recomputing = {step.recompute for step in backward}
    owned = {i for step in backward if step.owns for i in range(step.start, step.stop)}
    first_with_input = first_backward + (1 if first_backward or not grads[0] else 0)
    return [
        dict(
            requires_grad=env.requires_grad and i >= first_backward,
            input_requires_grad=env.requires_grad and i >= first_with_input,
            param_requires_grad=grads[1:][slice(*chain.param_ranges[i])],
            dtype=_dtype(chain.ops, i, autocast),
            backward_override=env.recipe.backward_override if env.recipe is not None else None,
            prev_op_grad_output_quantizer=written[1].get(i),
            next_op_input_quantizer=written[0].get(i),
            quantizers=op._quantizers.of(env.recipe),
            owns_grad_output=i in owned,
            may_recompute=i in recomputing,
        )
        for i, op in enumerate(chain.ops)
    ]


def separate(chain: Chain, index: int, step: Step) -> Step:
    """The backward step of a basic op, out of the step of a fused op that stands for it."""
    op = chain.ops[index]
    alone = dataclasses.replace(
        step,
        op=op,
        start=index,
        stop=index + 1,
        run=op.fuser_backward,
        direct=False,
        prepares=index == step.start and step.prepares,
        has_extras=bool(op.num_extra_inputs or op.num_extra_outputs),
        no_extras=((),),
        owns=False,
    )
    return alone


def _param_ranges(chain: Chain, first_backward: int) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    """Which parameters are whose; and who has none, of those that take part in the backward."""
    ranges = [(i, first, last) for i, (first, last) in enumerate(chain.param_ranges)]
    none = tuple(i for i, first, last in ranges if first == last and i >= first_backward)
    return tuple(found for found in ranges if found[1] < found[2]), none


def _has_state(contexts: Sequence[dict[str, Any]]) -> bool:
    """Whether a quantizer has state that lasts over steps."""
    quantizers = [q for values in contexts for mode in values["quantizers"] for q in mode]
    return any(quantizer.state_names for quantizer in quantizers)


def _called_before(
    chain: Chain, contexts: Sequence[dict[str, Any]]
) -> list[tuple[BasicOperation, bool]]:
    """The ops that are called before every forward, and whether they take part in a backward."""
    default = BasicOperation.pre_fuser_forward
    flags = zip(chain.ops, contexts, strict=True)
    return [
        (op, flag["requires_grad"])
        for op, flag in flags
        if type(op).pre_fuser_forward is not default
    ]


def _accumulating(chain: Chain, env: Environment) -> tuple[tuple[int, int, int], ...]:
    """See :class:`Program`."""
    ops = [i for i, op in enumerate(chain.ops) if op.accumulates_grads and env.requires_grad]
    if ops and env.compiling:
        who = f"{chain.name(ops[0])} puts gradients away itself (BasicOperation.accumulates_grads)"
        raise RuntimeError(f"{who}, which torch.compile does not see; run this chain in eager mode")
    return tuple((i, *chain.param_ranges[i]) for i in ops)


def _dtype(
    ops: Sequence[BasicOperation], index: int, autocast: torch.dtype | None
) -> torch.dtype | None:
    """The dtype an op computes in under autocast.

    What the next op casts anyway is made in its dtype.
    """
    wanted = ops[index].autocast_dtype
    cast_anyway = any(
        declared(following, "casts_input") for following in ops[index + 1 : index + 2]
    )
    return autocast if autocast is None or wanted is None or cast_anyway else wanted


def _cover(chain: Chain, taken: Sequence[Step]) -> list[Step]:
    """The steps of one pass, first op to last: those taken, and an op alone elsewhere."""
    steps = [copy.copy(step) for step in taken]
    covered = {i for step in steps for i in range(step.start, step.stop)}
    alone = [i for i in range(len(chain.ops)) if i not in covered]
    steps += [Step(None, i, i + 1, op=chain.ops[i]) for i in alone]
    return sorted(steps, key=lambda step: step.start)


def _finish(
    step: Step, pass_name: str, chain: Chain, kwargs: Sequence[tuple[str, ...]], env: Environment
) -> None:
    """Decide how a step is called."""
    op, forward = step.op, pass_name == "forward"
    ops = chain.ops[step.start : step.stop]
    step.has_extras = any(each.num_extra_inputs or each.num_extra_outputs for each in ops)
    step.no_extras = ((),) * len(ops)
    step.direct = not kwargs[step.start] and not step.has_extras and _is_direct(op, pass_name)
    step.run = getattr(op, f"op_{pass_name}" if step.direct else f"fuser_{pass_name}")
    if step.direct and forward:
        step.run = _with_quantizers(op)
    if env.options.get("debug") and not env.compiling:
        who = f"{type(op).__name__} [{', '.join(op_class(each).__name__ for each in ops)}]"
        step.run = Watched(step.run, who, any(getattr(each, "in_place", False) for each in ops))
    step.width = chain.later_widths.get(step.start) if forward else None
    step.prepares = env.recipe is not None or step.width is not None
    wanted = op.get_input_quantizer() if forward else op.get_grad_output_quantizer()
    step.takes_quantized = wanted is not None


def _is_direct(op: Any, pass_name: str) -> bool:
    """Whether a basic op's ``fuser_forward``, or backward, only calls its ``op_forward``."""
    method = f"fuser_{pass_name}"
    if not isinstance(op, BasicOperation) or method in vars(op):
        return False
    return getattr(type(op), method) is getattr(BasicOperation, method)


def _with_quantizers(op: BasicOperation) -> Callable[..., Any]:
    """``op_forward`` of two arguments: what it asks for beside them it gets from its context."""
    forward: Any = op.op_forward
    by_position, by_name = asks_for_quantizers(op)
    if not (by_position or by_name):
        return forward  # type: ignore[no-any-return]

    @functools.wraps(forward)
    def run(ctx: OperationContext, x: Any) -> Any:
        before = [getattr(ctx, name) for name in by_position]
        return forward(ctx, x, *before, **{name: getattr(ctx, name) for name in by_name})

    run.op = op  # type: ignore[attr-defined]
    return run


def _let_recompute(step: Step, chain: Chain, forward: Sequence[Step], undeclared: set[int]) -> None:
    """Say in a backward step if a fused op before it can compute its input again."""
    names = declared(chain.ops[step.start], "saved_names") or ()
    for before in forward:
        fused = before.stop == step.start and isinstance(before.op, FusedOperation)
        if fused and before.op.recomputes and "input" in names and step.start not in undeclared:
            step.prepares, step.recompute = True, before.start


def _leaves_owned(step: Step) -> bool:
    """Whether the gradient that a backward step returns belongs to the chain."""
    assert step.op is not None
    given = declared(step.op, "grad_input")
    return given == "fresh" or (given == "same" and step.owns)


def _negotiate(
    steps: Sequence[Step], enabled: bool, wants: str, writes: str
) -> dict[int, Quantizer]:
    """Ask consumers for quantizers and producers whether they write them; where not, cast.

    Returns:
        For the producers that do write it: the index of the basic op at the edge -> the quantizer.
    """
    agreed: dict[int, Quantizer] = {}
    for position, step in enumerate(steps if enabled else ()):
        quantizer: Quantizer | None = getattr(step.op, wants)()
        if quantizer is None:
            continue
        producer = steps[position - 1] if position else None
        if producer is not None and getattr(producer.op, writes)(quantizer):
            agreed[producer.stop - 1 if writes == "writes_output" else producer.start] = quantizer
        else:
            step.cast = quantizer
    return agreed


def _describe(steps: Sequence[Step], chain: Chain) -> tuple[PlanStep, ...]:
    """The steps as report data."""
    rows = []
    for step in steps:
        if step.cast is not None:
            rows.append(PlanStep(f"Cast[{type(step.cast).__name__}]", (), step.start))
        names = tuple(op_class(op).__name__ for op in chain.ops[step.start : step.stop])
        if step.source is None:
            rows.append(PlanStep(names[0], names, step.start))
        else:
            who = step.source.name, step.source.distribution, step.source.version
            rows.append(PlanStep(type(step.op).__name__, names, step.start, *who))
    return tuple(rows)
