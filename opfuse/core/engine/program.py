"""Programs: executable plans, one for each key of a chain.

A program is straight-line Python, see :mod:`opfuse.core.engine.writing`: one function for the
forward and one for the backward, under one autograd function. Rare calls have functions of their
own, which are written at their first need: what comes in is quantized, a recorder or a profiler
watches, a gradient is missing.
"""

from __future__ import annotations

import dataclasses
import keyword
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import profiler
from torch.compiler import is_dynamo_compiling

from ..fusible import declared
from ..fusion import Fusion
from ..hookspecs import Run
from ..op import BasicOperation
from ..op_context import OperationContext
from ..overwriting import dispatch_modes, function_modes, may_write
from ..quantization.coded_tensor import brings_codes, dequantized
from ..scale_update import current_backward, in_backward
from .chain import Chain
from .facts import Facts
from .plan import FusionPlan
from .step import Recompute, Step
from .step_calls import separate
from .write_backward import LateStart, write_backward
from .write_forward import write_forward

any_autocast = torch._C._is_any_autocast_enabled
is_legacy_batchedtensor = torch._C._functorch.is_legacy_batchedtensor

Kwargs = Sequence[dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class SavedState:
    """The state that the ops of a program declare to leave for the backward.

    Attributes:
        ranges: ``(op, start, stop)``: the range of each op's saved tensors.
        attributes: ``(op, name)``: the context attributes that are passed on.
        undeclared: The ops that may leave anything, so that all of their contexts is kept.
        context_names: The context attributes that each op declares.
    """

    ranges: tuple[tuple[int, int, int], ...]
    attributes: tuple[tuple[int, str], ...]
    undeclared: tuple[int, ...]
    context_names: tuple[tuple[str, ...], ...]

    @property
    def num_declared(self) -> int:
        """The number of tensors that are saved by declaration."""
        return self.ranges[-1][2] if self.ranges else 0

    @classmethod
    def of(cls, chain: Chain, first_backward: int, undeclared: set[int]) -> SavedState:
        """Make it for a chain; the declarations of the ops in ``undeclared`` do not hold here."""
        ranges: list[tuple[int, int, int]] = []
        attributes: list[tuple[int, str]] = []
        open_ops, position = [], 0
        for i, op in enumerate(chain.ops):
            names = declared(op, "saved_names")
            if names is None or i in undeclared:
                open_ops.append(i)
            elif i >= first_backward:
                attributes += [(i, _identifier(op, name)) for name in declared(op, "context_names")]
                if names:
                    ranges.append((i, position, position + len(names)))
                position += len(names)
        names = tuple([tuple(declared(op, "context_names")) for op in chain.ops])
        return cls(tuple(ranges), tuple(attributes), tuple(open_ops), names)


def _identifier(op: Any, name: str) -> str:
    if not name.isidentifier() or keyword.iskeyword(name):
        raise ValueError(f"{type(op).__name__}.context_names expected names, got {name!r}")
    return name


class Program:
    """An executable plan: forward and backward steps over the same basic ops.

    Attributes:
        forward, backward: The steps, in the order they run.
        first_backward: The first op that takes part in the backward.
        last_without_gradient: The ops after this one must return a gradient of their input.
        params: ``(op, first, last)``: the range of each op's parameters, if it has some.
        dequantized: The quantized parameters that belong to ops that quantize nothing.
        accumulating: As ``params``, for the ops that store the gradients of their parameters.
        called_before: The ops with a ``pre_fuser_forward``, and whether they have a backward.
        saved: What the ops leave for the backward.
        recomputing: Basic op -> how its input is computed again.
        facts: Everything that it was made from.
        env: The environment in which it runs.
        contexts: The attributes of each op's context.
        untraced: Whether an op reads sizes on the host to quantize, which cannot be traced.
        fresh: The ops that may leave anything on their contexts, which thus serve one call.
        saves_quantized: Whether ops may save quantized tensors.
        recorded: Whether grad mode is on.
        advances: Whether a quantizer records values that advance its state.
        gradient_channels: The extra outputs that feed a channel through which a gradient returns.
        is_plain: Whether a call only runs the functions.
        row_facts, rows: The facts about the rows that the plan depends on, and their values.
        seen: Shape and contiguity of the last input with these rows, or None.
        run: The function of a forward that has nothing rare.
        call: What runs a call that needs more: a function of the fuser, and what tools make of it.
        run_backward: The ``backward`` of its autograd function.
        leaves_call: Whether a forward leaves ``current.call`` for that.
    """

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
        self.recipe, self.compiling = env.recipe, env.compiling
        self.saves_quantized = bool(env.recipe or any(op._quantizers.own for op in chain.ops))
        self.requires_grad = env.requires_grad
        self.double_backward = bool(env.options.get("double_backward"))
        self.trains = self.requires_grad and not self.double_backward
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
        # functions are the fusions of Transformer Engine: their ops may write anything
        foreign = [s for s in self.forward if s.source and not isinstance(s.source.fusion, Fusion)]
        places = [i for step in foreign for i in range(step.start, step.stop)]
        self.fresh = {*places, *self.saved.undeclared}
        self.recomputing = self._recomputing()
        self.contexts = [vars(OperationContext()) | values for values in contexts]
        self.row_facts, self.rows = row_facts, tuple([getattr(env, fact) for fact in row_facts])
        self._set_calls(contexts)
        self._functions: dict[Any, Callable[..., Any]] = {}
        self.run = self._forward_function(False, False, False)

    def _set_calls(self, contexts: Sequence[dict[str, Any]]) -> None:
        """What happens around a call of the functions."""
        self.called_before = self._called_before(contexts)
        used = [q for values in contexts for q in values["quantizers"].values()]
        self.advances = any(quantizer.pending_names for quantizer in used)
        more = self.recipe, self.double_backward, self.called_before, self.autocast
        self.is_plain = not any(more)
        self.run_backward = self._wrap("backward", _run_backward)
        self.leaves_call = self.run_backward is not _run_backward

    def set_call(self, run: Run) -> None:
        """Set what runs a call, from what does without tools."""
        self.call = self._wrap("forward", run)
        self.is_plain &= self.call is run

    def _wrap(self, pass_name: str, run: Run) -> Run:
        given = dict(program=self, pass_name=pass_name)
        return self.facts.wrap("opfuse_wrap_pass", run, **given)

    @property
    def code(self) -> str:
        """The source of both passes, as an ordinary call runs them."""
        passes = [write_forward(self, self.forward)]
        if self.trains:
            passes.append(write_backward(self, self.backward, self.contexts, traced=self.compiling))
        return "\n".join(source.text for source in passes)

    # Calling

    def __call__(
        self, kwargs: Kwargs | None, x: Tensor, *tensors: Tensor, recorded: bool = False
    ) -> Any:
        """Run it, as one autograd function if there is a backward.

        Args:
            kwargs: Keyword arguments per basic op, or None.
            x: The chain's input.
            *tensors: The parameters, then the extra inputs that the caller gave.
            recorded: Whether the recorder of this thread is told what the forward saves.
        """
        if self.compiling:
            run = self.run
        else:
            quantized = type(x) is not Tensor and brings_codes(x, self.facts.edges.forward.get(0))
            run = self._forward_function(quantized, recorded, profiler._is_profiler_enabled)
        if not self.trains:
            return run(None, kwargs, x, *tensors)
        if self.compiling:
            tensors = tuple(_distinct(tensors, self.num_params))
        return run(kwargs, x, *tensors)

    def backward_of(
        self, grads: Sequence[Any], *, traced: bool = False
    ) -> Callable[..., Any] | None:
        """The function of a backward; None: no gradient reaches an op.

        Args:
            grads: The gradients of the outputs.
            traced: Whether compiled autograd traces it.
        """
        reached, codes = None, False
        if grads[0] is None:
            pairs = zip(self.chain.public_outputs, grads[1:], strict=True)
            reached = max([i for (i, _), grad in pairs if grad is not None], default=-1)
            if reached < 0:
                return None
        elif type(grads[0]) is not Tensor:
            codes = brings_codes(grads[0], self.last_cast)
        owns = traced or not (dispatch_modes() or function_modes()) or may_write()
        ranged = profiler._is_profiler_enabled and not traced
        return self._backward_function(reached, codes, owns, traced, ranged)

    @property
    def last_cast(self) -> Any:
        """The first cast of the backward, if it is of the incoming gradient."""
        return self.facts.edges.backward.get(len(self.chain.ops))

    # Functions

    def _forward_function(self, codes: bool, recorded: bool, ranged: bool) -> Callable[..., Any]:
        """The function of a forward.

        Args:
            codes: Whether its input is quantized already.
            recorded: Whether a recorder is told what it saves.
            ranged: Whether it marks the ranges of fused steps for a profiler.
        """
        key = "forward", codes, recorded, ranged
        if (function := self._functions.get(key)) is None:
            steps: Sequence[Step] = self.forward
            if codes:
                steps = _with_codes(steps, "forward", self.facts.edges.forward.get(0))
            function = write_forward(self, steps, ranged=ranged, recorded=recorded).compiled()
            function = _function(self, function) if self.trains else function
            self._functions.setdefault(key, function)
        return function

    def _backward_function(
        self, reached: int | None, codes: bool, owns: bool, traced: bool, ranged: bool
    ) -> Callable[..., Any]:
        """The function of a backward.

        Args:
            reached: The last op that a gradient reaches; None: the main output has one.
            codes: Whether that is quantized already.
            owns: Whether steps may overwrite gradients.
            traced: Whether compiled autograd traces it.
            ranged: As for the forward.
        """
        key = reached, codes, owns, traced, ranged
        if (function := self._functions.get(key)) is None:
            steps: Sequence[Step] = self.backward
            late, values = None, [dict(of) for of in self.contexts]
            if codes:
                steps = _with_codes(steps, "backward", self.last_cast)
            if reached is not None:
                steps, late = self._late_start(reached, values)
            if not owns:
                for of_op in values:
                    of_op["owns_grad_output"] = False
            source = write_backward(self, steps, values, late, traced=traced, ranged=ranged)
            function = self._functions.setdefault(key, source.compiled())
        return function

    def _late_start(
        self, reached: int, values: Sequence[dict[str, Any]]
    ) -> tuple[Sequence[Step], LateStart]:
        """The steps of a backward in which the main output gets no gradient.

        Steps that get no gradient at all are skipped. If the shape is unknown where the last
        gradient arrives, the backward begins with zeros at the nearest later step whose shape is
        known; the results of these extra steps are discarded.

        Args:
            reached: The last op that a gradient reaches.
            values: The attributes of the contexts, which are changed.
        """
        known = [s.stop - 1 for s in self.forward if s.stop > s.start and s.has_extras]
        last = reached if reached in known else min(i for i in known if i > reached)
        position = next(p for p, s in enumerate(self.backward) if s.start <= last < s.stop)
        step = self.backward[position]
        first = [step]
        if any(step.op is other.op for other in self.forward):  # not fused, or by a joint fusion
            last = step.stop - 1
            for of_op in values[reached + 1 : step.stop]:
                of_op["is_reached"] = False
        else:  # by a fusion that may not handle zeros: the ops run one by one
            first = separate(step, "backward", last)
        for i in range(step.start, last):
            values[i]["owns_grad_output"] = False
        steps = [*first, *self.backward[position + 1 :]]
        at = next(p for p, step in enumerate(steps) if step.start <= reached)
        if at and steps[at].stop > reached + 1:  # as above, it may not handle zeros
            steps[at : at + 1] = separate(steps[at], "backward")
        low = min(step.start for step in steps)
        watched = [i for i in range(max(reached + 1, low), len(values)) if values[i]["quantizers"]]
        return steps, LateStart(reached, last, tuple(watched))

    # Facts

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
        firsts = {i: first for i, first, _ in self.saved.ranges}
        return {
            step.start: how._replace(position=firsts[step.start] + how.place)
            for step in self.backward
            if (how := step.recompute) is not None
        }


def _with_codes(steps: Sequence[Step], pass_name: str, cast: Any) -> Sequence[Step]:
    """The steps of a pass whose input its first cast need not quantize any more."""
    if steps[0].source and cast in steps[0].matched:
        return [*separate(steps[0], pass_name), *steps[1:]]
    return steps


def _distinct(tensors: Sequence[Tensor], count: int) -> list[Tensor]:
    """Replace repeated parameters by views: Dynamo accepts no tensor twice.

    Args:
        tensors: The parameters, then other tensors, which stay as they are.
        count: The number of parameters.
    """
    found: list[Tensor] = []
    for i, tensor in enumerate(tensors):
        again = i < count and any([tensor is other for other in tensors[:i]])
        found.append(tensor.view_as(tensor) if again else tensor)
    return found


# The autograd function


def _run_backward(ctx: Any, *grads: Any) -> Any:
    program: Program = ctx.program
    if is_dynamo_compiling():
        # compiled autograd traces too, but an eager program was not made for it
        name = _write_untraced(program, *[grad is None for grad in grads])
        return getattr(program, name)(ctx, *grads) if name else (None,) * len(ctx.needs_input_grad)
    if any_autocast() and torch.is_autocast_enabled(program.autocast_device):
        with torch.autocast(program.autocast_device, enabled=False):
            return _run_backward(ctx, *grads)
    batched = False
    for grad in grads:
        batched = batched or (grad is not None and is_legacy_batchedtensor(grad))
    if batched or torch.is_grad_enabled():
        raise RuntimeError(
            "opfuse: the backward of a fused chain cannot be differentiated again "
            "(create_graph=True), nor batched (vectorize=True), unless its forward runs "
            "inside opfuse.options(double_backward=True)"
        )
    if program.advances and in_backward():
        current_backward().add(program.recipe, program.chain, program.env)  # type: ignore[arg-type]
    if (run := program.backward_of(grads)) is None:
        return (None,) * len(ctx.needs_input_grad)
    return run(ctx, *grads)


def _write_untraced(program: Program, *missing: bool) -> str:
    """Write a backward while compiled autograd traces; return the name of its attribute.

    It is ``""`` if no gradient reaches an op.
    """
    grads = [None if none else torch.empty(0) for none in missing]
    if (run := program.backward_of(grads, traced=True)) is None:
        return ""
    name = f"_traced_{id(run)}"
    setattr(program, name, run)
    return name


_write_untraced._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch.compiler.assume_constant_result


def _function(program: Program, run: Callable[..., Any]) -> Any:
    """The ``apply`` of the autograd function of a program."""
    if program.compiling:  # nothing is decided later
        back: Any = program.backward_of([torch.empty(0)], traced=True)
        passes = {"forward": staticmethod(run), "backward": staticmethod(back)}
        return cast(Any, type("Pipeline", (torch.autograd.Function,), passes)).apply
    passes = {"forward": staticmethod(run), "backward": staticmethod(program.run_backward)}
    made: Any = type("Pipeline", (torch.autograd.Function,), passes)
    made._backward_cls.program = program
    # without torch's functorch code, which is never needed here, a call takes a microsecond less
    return super(torch.autograd.Function, made).apply
