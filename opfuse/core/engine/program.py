"""Programs: executable plans. Everything that can be decided once is decided here, not per call."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..cast import Cast
from ..environment import Environment
from ..fusible import declared, numbers_of
from ..fusion import Fusion
from ..introspection import op_class
from ..op import BasicOperation, FusedOperation
from ..op_context import OperationContext
from ..quantization import Quantizer
from ..quantization.parameter import dequantized, note_of
from .chain import Chain
from .edges import Edges, Needs, View
from .measured import Measurements
from .plan import FusionPlan, PlanStep
from .pool import ContextPool, pooled_context
from .selection import Selection
from .step import Step
from .step_calls import InRange, TrackedCast, WithCasts, finish, lone_step

_BESIDE = "fuser_backward_with_output"


@dataclasses.dataclass(frozen=True)
class SavedState:
    """The state that the ops of a program declare to leave for the backward.

    Attributes:
        ranges: ``(op, start, stop)``: the range of each op's saved tensors.
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
        """Make it for a chain; the declarations of the ops in ``undeclared`` do not hold here."""
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


class Recompute(NamedTuple):
    """How the input of an op is computed again instead of being kept.

    Attributes:
        start: First basic op of the fused op before it.
        run: The ``fuser_recompute`` of that fused op.
        place, position: Index of the input among the op's saved tensors, and among all of them.
        cast: The cast to repeat, if it is a step of its own.
    """

    start: int
    run: Callable[..., Any]
    place: int
    position: int
    cast: Cast | None


class Program:
    """An executable plan: forward and backward steps over the same basic ops.

    Attributes:
        forward, backward: The steps, in the order they run.
        first_backward: The first op that takes part in the backward.
        last_without_gradient: The ops after this one must return a gradient of their input.
        params: ``(op, first, last)``: the range of each op's parameters, if it has some.
        dequantized: The quantized parameters that belong to ops that quantize nothing.
        without_params: The ops with a backward and without parameters, which must return no
            parameter gradients.
        accumulating: As ``params``, for the ops that store the gradients of their parameters.
        called_before: The ops with a ``pre_fuser_forward``, and whether they have a backward.
        leaves_more: Whether the forward leaves more than saved tensors.
        saved: What the ops leave for the backward.
        recomputing: Basic op -> how its input is computed again.
        env: The environment in which it runs.
        untraced: Whether an op reads sizes on the host to quantize, which cannot be traced.
        saves_quantized: Whether ops may save quantized tensors.
        recorded: Whether grad mode is on.
        advances: Whether a quantizer records values that advance its state.
        gradient_channels: The extra outputs that feed a channel through which a gradient returns.
        pool: The contexts.
        watcher: Called with the values that a forward leaves, or None.
        is_plain: Whether a call only runs the steps.
        measurements: The measurements that it was chosen by.
        row_facts, rows: The facts about the rows that the plan depends on, and their values.
        seen: Shape and contiguity of the last input with these rows, or None.
    """

    watcher: Callable[[Program, dict[int, Any]], None] | None = None

    seen: Any = None

    def __init__(
        self,
        chain: Chain,
        plan: FusionPlan,
        env: Environment,
        autocast: torch.dtype | None,
        steps: tuple[Sequence[Step], Sequence[Step]],
        contexts: Sequence[dict[str, Any]],
        measurements: Measurements,
        undeclared: set[int],
        row_facts: tuple[str, ...],
    ) -> None:
        self.chain, self.plan, self.measurements = chain, plan, measurements
        self.recorded, first_backward, *_ = measurements.needs
        self.forward, self.backward = map(tuple, steps)
        self.env, self.recipe, self.compiling = env, env.recipe, env.compiling
        self.saves_quantized = bool(env.recipe or any(op._quantizers.own for op in chain.ops))
        self.requires_grad, self.autocast = env.requires_grad, autocast
        self.double_backward = bool(env.options.get("double_backward"))
        known = torch.amp.is_autocast_available(env.device.type)
        self.autocast_device = env.device.type if known else "cpu"
        self.first_backward, self.num_params = first_backward, len(chain.param_sources)
        self.input_requires_grad = bool(contexts) and contexts[0]["input_requires_grad"]
        self.last_without_gradient = -1 if self.input_requires_grad else first_backward
        self.params, self.without_params = _param_ranges(chain, first_backward)
        self.dequantized = dequantized(
            chain.ops, chain.param_ranges, measurements.edges.quantizers, env
        )
        self.accumulating = _accumulating(chain, env)
        self.has_extras, self.untraced = chain.has_extras, _untraced(chain, measurements.edges)
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
        self.called_before, self.advances = _called_before(chain, contexts), _advances(contexts)
        self.is_plain = not any((env.recipe, self.double_backward, self.called_before, autocast))

    def watched(self, watcher: Callable[[Program, dict[int, Any]], None]) -> Program:
        """A copy for one call that reports what it leaves for the backward to ``watcher``."""
        twin = copy.copy(self)
        twin.watcher, twin.leaves_more = watcher, True
        return twin

    def profiled(self) -> Program:
        """A copy for one call with a ``torch.profiler`` range around each fused step."""
        if self.compiling:
            return self
        twin = copy.copy(self)
        for name in ("forward", "backward"):
            steps = [copy.copy(step) for step in getattr(self, name)]
            for step in [step for step in steps if step.source]:
                step.run = InRange(step, name, step.run)
                step.with_output = step.with_output and InRange(step, name, step.with_output)
            setattr(twin, name, tuple(steps))
        return twin

    def _recomputing(self) -> dict[int, Recompute]:
        starts = {i: start for i, start, _ in self.saved.ranges}
        fused = {step.start: step for step in self.forward if step.stop > step.start}
        casts: dict[int, Any] = {s.start: s.matched[0] for s in self.forward if s.start == s.stop}
        found = {}
        for step in self.backward:
            if (first := step.recompute) is not None:
                place = declared(self.chain.ops[step.start], "saved_names").index("input")
                before, cast = fused[first], casts.get(step.start)
                run = before.op.fuser_recompute
                if before.casts:
                    run = WithCasts(run, before.matched)
                position = starts[step.start] + place
                found[step.start] = Recompute(first, run, place, position, cast)
        return found

    def _new_pool(self, values: Sequence[dict[str, Any]]) -> ContextPool:
        # functions are the fusions of Transformer Engine: their ops may write anything
        foreign = [s for s in self.forward if s.source and not isinstance(s.source.fusion, Fusion)]
        places = {i for step in foreign for i in range(step.start, step.stop)}
        open_ops = sorted(places.union(self.saved.undeclared))
        classes = [
            OperationContext
            if self.compiling or i in open_ops
            else pooled_context(tuple(declared(op, "context_names")))
            for i, op in enumerate(self.chain.ops)
        ]
        return ContextPool(classes, values, open_ops)


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


def _param_ranges(chain: Chain, first_backward: int) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    """The parameter range of each op; and the ops of the backward that have no parameters."""
    ranges = [(i, first, last) for i, (first, last) in enumerate(chain.param_ranges)]
    none = tuple(i for i, first, last in ranges if first == last and i >= first_backward)
    return tuple(found for found in ranges if found[1] < found[2]), none


def _untraced(chain: Chain, edges: Edges) -> bool:
    """Return whether an op reads sizes on the host to quantize, which cannot be traced."""
    pairs = zip(chain.ops, edges.quantizers, strict=True)
    return any(its and getattr(op, "reads_sizes", False) for op, its in pairs)


def _advances(contexts: Sequence[dict[str, Any]]) -> bool:
    """Return whether a quantizer records values that advance its state."""
    return any(q.pending_names for values in contexts for q in values["quantizers"].values())


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
    """The parameter ranges of the ops that store their gradients."""
    ops = [i for i, op in enumerate(chain.ops) if op.accumulates_grads and env.requires_grad]
    if ops and env.compiling:
        who = f"{chain.name(ops[0])} puts gradients away itself (BasicOperation.accumulates_grads)"
        raise RuntimeError(f"{who}, which torch.compile does not see; run this chain in eager mode")
    return tuple((i, *chain.param_ranges[i]) for i in ops)


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
