"""Programs: executable plans, with a pool that keeps the contexts for the next call.

The pool is worth its code: creating the contexts of Linear + GELU + Linear takes 5 to 7 of the
35 us of a forward, and 20 to 40 of the 150 us of both passes.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from ..cast import Cast
from ..fusible import declared
from ..fusion import Fusion
from ..op import BasicOperation
from ..op_context import OperationContext
from ..quantization.parameter import dequantized
from ..tuning_table import setting
from .agreement import Reported
from .chain import Chain
from .invariant import InParts
from .measured import Facts
from .plan import FusionPlan
from .step import Step
from .step_calls import InRange, WithCasts


class PooledContext:
    """The reusable context of an op that declares what it leaves; accepts nothing else."""

    __slots__ = tuple(vars(OperationContext()))
    save_for_backward = OperationContext.save_for_backward
    quantized_weight = OperationContext.quantized_weight

    def __init__(self) -> None:
        for name, value in vars(OperationContext()).items():
            setattr(self, name, value)


# its name in an AttributeError
PooledContext.__name__ = "OperationContext of an op whose context_names declare nothing"


@functools.cache
def pooled_context(names: tuple[str, ...]) -> type[PooledContext]:
    """Return the class of contexts that also accept these ``context_names``.

    The fewer classes there are, the faster an interpreter reads their attributes.
    """
    title = f"OperationContext of an op whose context_names declare {', '.join(names)}"
    return type(title, (PooledContext,), {"__slots__": names}) if names else PooledContext


class ContextPool:
    """Creates contexts, and keeps those that hold nothing for other passes.

    Args:
        classes: The class of each basic op's context.
        values: Per basic op, the attributes that the engine sets; see :class:`OperationContext`.
        open_ops: The ops that may leave anything on their contexts, which are thus used once.

    Attributes:
        idle: The contexts that are free.
        give_back: Makes the contexts of a finished pass available again.
    """

    def __init__(
        self, classes: Sequence[Any], values: Sequence[dict[str, Any]], open_ops: Iterable[int]
    ) -> None:
        self.idle: list[list[Any]] = []
        self._classes, self._values, self._open = tuple(classes), tuple(values), tuple(open_ops)
        self.give_back: Callable[[list[Any]], None] = self.idle.append
        if self._open:
            self.give_back = self._renew

    def new(self) -> list[Any]:
        """One context per basic op, for one pass."""
        return [self._new(i) for i in range(len(self._values))]

    def _renew(self, contexts: list[Any]) -> None:
        """Replace the contexts that may hold anything, so that all can be used again."""
        for i in self._open:
            contexts[i] = self._new(i)
        self.idle.append(contexts)

    def _new(self, index: int) -> Any:
        ctx: Any = self._classes[index]()
        for name, value in self._values[index].items():
            setattr(ctx, name, value)
        return ctx


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
        facts: Everything that it was made from.
        env: The environment in which it runs.
        untraced: Whether an op reads sizes on the host to quantize, which cannot be traced.
        saves_quantized: Whether ops may save quantized tensors.
        recorded: Whether grad mode is on.
        advances: Whether a quantizer records values that advance its state.
        gradient_channels: The extra outputs that feed a channel through which a gradient returns.
        pool: The contexts.
        watcher: Called with the values that a forward leaves, or None.
        is_plain: Whether a call only runs the steps.
        row_facts, rows: The facts about the rows that the plan depends on, and their values.
        seen: Shape and contiguity of the last input with these rows, or None.
        turns: The last turn of each group, behind what it is for.
    """

    watcher: Callable[[Program, dict[int, Any]], None] | None = None

    seen: Any = None

    def __init__(
        self,
        facts: Facts,
        plan: FusionPlan,
        steps: tuple[Sequence[Step], Sequence[Step]],
        contexts: Sequence[dict[str, Any]],
        undeclared: set[int],
        row_facts: tuple[str, ...],
    ) -> None:
        self.facts, self.plan, self.autocast = facts, plan, facts.autocast
        self.chain, self.env = chain, env = facts.chain, facts.env
        self.recorded, first_backward, *_ = facts.needs
        self.forward, self.backward = map(tuple, steps)
        self._wrap_steps()
        self.recipe, self.compiling = env.recipe, env.compiling
        self.saves_quantized = bool(env.recipe or any(op._quantizers.own for op in chain.ops))
        self.requires_grad = env.requires_grad
        self.double_backward = bool(env.options.get("double_backward"))
        known = torch.amp.is_autocast_available(env.device.type)
        self.autocast_device = env.device.type if known else "cpu"
        self.first_backward, self.num_params = first_backward, len(chain.param_sources)
        self.input_requires_grad = bool(contexts) and contexts[0]["input_requires_grad"]
        self.last_without_gradient = -1 if self.input_requires_grad else first_backward
        self._set_params()
        pairs = zip(chain.ops, facts.edges.quantizers, strict=True)
        self.untraced = any(its and getattr(op, "reads_sizes", False) for op, its in pairs)
        self.has_extras = chain.has_extras
        self.writes_extras = any(getattr(op, "in_place", False) for op in chain.ops)
        self._set_outputs()
        self.saved = SavedState.of(chain, first_backward, undeclared)
        self.recomputing = self._recomputing()
        left = self.saved.attributes, self.saved.undeclared, self.recomputing, self.accumulating
        self.leaves_more = self.has_extras or any(left)
        self.pool = self._new_pool(contexts)
        self.turns: dict[Any, Any] = {}
        self.row_facts, self.rows = row_facts, tuple([getattr(env, fact) for fact in row_facts])
        self.called_before = self._called_before(contexts)
        used = [q for values in contexts for q in values["quantizers"].values()]
        self.advances = any(quantizer.pending_names for quantizer in used)
        lock = env.options.get("locked")
        self._lock = None if lock is None else (lock, setting(env.device))
        more = env.recipe, self.double_backward, self.called_before, self.autocast, chain.groups
        self.is_plain = not any(more) and self._lock is None

    def _wrap_steps(self) -> None:
        """Let steps report errors to other processes, or run on parts of a block of rows."""
        chain, env = self.chain, self.env
        for step in (*self.forward, *self.backward) if chain.groups else ():
            step.run = Reported(step.run, chain, step)
        in_parts = "invariant" in env.options and env.device.type == "cpu"
        for step in self.forward if in_parts else ():
            if step.op in chain.ops:
                shapes = [shape for shape, _ in self.facts.params[step.start]]
                step.run = InParts(step.run) if all(len(s) < 2 for s in shapes) else step.run

    def check_lock(self) -> None:
        """Refuse a call if something that is locked changed since the plan was made."""
        if self._lock is not None and not self.compiling:
            lock, planned = self._lock
            if planned != setting(self.env.device):
                lock.check()

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

    def _set_outputs(self) -> None:
        """Which extra outputs have no gradient, and which channels carry one."""
        chain, first = self.chain, self.first_backward
        silent = {i for i, op in enumerate(chain.ops) if getattr(op, "silent_outputs", False)}
        silent |= {*range(first)}
        outputs = enumerate(chain.public_outputs)
        self.silent_outputs = tuple([number for number, (i, _) in outputs if i in silent])
        sources = chain.sources.values() if self.env.requires_grad else ()
        self.gradient_channels = frozenset(s for s in sources if s[0] not in silent)

    def _set_params(self) -> None:
        """Set the ranges of parameters, and the places of those that are handled in another way.

        Raises:
            RuntimeError: In traced code an op puts its gradients away itself.
        """
        chain, quantizers = self.chain, self.facts.edges.quantizers
        ranges = [(i, start, stop) for i, (start, stop) in enumerate(chain.param_ranges)]
        self.params = tuple((i, a, b) for i, a, b in ranges if a < b)
        self.without_params = tuple(i for i, a, b in ranges[self.first_backward :] if a == b)
        self.dequantized = dequantized(chain.ops, chain.param_ranges, quantizers, self.env)
        ops = chain.ops if self.requires_grad else ()
        self.accumulating = tuple(ranges[i] for i, op in enumerate(ops) if op.accumulates_grads)
        if self.accumulating and self.compiling:
            raise RuntimeError(
                f"{chain.name(self.accumulating[0][0])} puts gradients away itself "
                f"(BasicOperation.accumulates_grads), which torch.compile does not see; run this "
                f"chain in eager mode"
            )

    def _called_before(
        self, contexts: Sequence[dict[str, Any]]
    ) -> list[tuple[BasicOperation, bool]]:
        """The ops that are called before every forward, and whether each has a backward."""
        default = BasicOperation.pre_fuser_forward
        pairs = [(op, of["requires_grad"]) for op, of in zip(self.chain.ops, contexts, strict=True)]
        return [pair for pair in pairs if type(pair[0]).pre_fuser_forward is not default]

    def _recomputing(self) -> dict[int, Recompute]:
        starts = {i: start for i, start, _ in self.saved.ranges}
        fused = {step.start: step for step in self.forward if step.stop > step.start}
        casts: dict[int, Any] = {s.start: s.matched[0] for s in self.forward if s.start == s.stop}
        found = {}
        for step in self.backward:
            if (first := step.recompute) is not None:
                place = declared(self.chain.ops[step.start], "saved_names").index("input")
                before, cast = fused[first], casts.get(step.start)
                run: Any = before.op.fuser_recompute
                if self.chain.groups:
                    run = Reported(run, self.chain, before)
                if before.casts:
                    run = WithCasts(run, before.matched)
                found[step.start] = Recompute(first, run, place, starts[step.start] + place, cast)
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
