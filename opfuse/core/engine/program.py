"""Programs: executable plans, one for each key of a chain.

A program is straight-line Python, see :mod:`opfuse.core.engine.source`: one function for the
forward and one for the backward, under one autograd function. Rare calls have functions of their
own, which are written at their first need: what comes in is quantized, a recorder or a profiler
watches, a gradient is missing.
"""

from __future__ import annotations

import functools
import keyword
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import profiler
from torch.compiler import is_dynamo_compiling

from ..fusible import declared
from ..fusion import Fusion
from ..op import BasicOperation
from ..op_context import OperationContext
from ..overwriting import dispatch_modes, function_modes, may_write
from ..quantization.coded_tensor import brings_codes, params_to_dequantize
from ..settings import current
from . import checks
from .facts import Facts, Recompute, Step
from .plan import FusionPlan
from .source import Source, Variant, is_builtin
from .write_backward import Backward
from .write_forward import Forward

any_autocast = torch._C._is_any_autocast_enabled
is_legacy_batchedtensor = torch._C._functorch.is_legacy_batchedtensor

Kwargs = Sequence[dict[str, Any]]


def _identifier(op: Any, name: str) -> str:
    if not name.isidentifier() or keyword.iskeyword(name):
        raise ValueError(f"{type(op).__name__}.context_names expected names, got {name!r}")
    return name


class Program:
    """An executable plan: forward and backward steps over the same basic ops.

    Attributes:
        facts: Everything that it was made from; its ``chain``, ``env`` and ``autocast``.
        forward, backward: The steps, in the order they run.
        contexts: The attributes of each op's context.
        first_backward: The first op that takes part in the backward.
        grad_mode: Whether grad mode is on.
        trains: Whether it is an autograd function.
        entry_casts: For each pass, the cast of what comes in, or None.
        saved_ranges: ``(op, first, last)``: the range of each op's saved tensors.
        saved_attributes: ``(op, name)``: the context attributes that are passed on.
        num_saved: The number of tensors that are saved by declaration.
        undeclared_ops: The ops that may leave anything, so that all of their contexts is kept.
        saves_quantized: Whether ops may save quantized tensors.
        free_ops: The ops that may leave anything on their contexts.
        unpooled_ops: The ops whose contexts serve one call: those, and all that are not of opfuse.
        recomputations: Basic op -> how its input is computed again.
        params_to_dequantize: The quantized parameters that belong to ops that quantize nothing.
        accumulators: ``(op, first, last)``: the range of parameters of each op that stores their
            gradients.
        silent_outputs: Which of the chain's extra outputs have no gradient.
        gradient_channels: The extra outputs that feed a channel through which a gradient returns.
        writes_extras: Whether an op writes into its extra inputs.
        pre_forward_ops: The ops with a ``pre_fuser_forward``, and whether they have a backward.
        advances: Whether a quantizer records values that advance its state.
        is_plain: Whether a call only runs the functions.
        row_facts, rows: The facts about the rows that the plan depends on, and their values.
        seen: Shape and contiguity of the last input with these rows, or None.
        run: The function of a forward that has nothing rare.
        call: What runs a call that needs more, and what tools make of it.
        run_backward: The ``backward`` of its autograd function.
        saves_call: Whether a forward leaves ``current.call`` for that.
    """

    row_facts: tuple[str, ...] = ()
    rows: Any = None
    seen: Any = None

    def __init__(
        self,
        facts: Facts,
        plan: FusionPlan,
        steps: tuple[Sequence[Step], Sequence[Step]],
        contexts: Sequence[dict[str, Any]],
        recomputations: Mapping[int, Recompute],
    ) -> None:
        self.facts, self.plan, self.autocast = facts, plan, facts.autocast
        self.recomputations = recomputations
        self.chain, self.env = chain, env = facts.chain, facts.env
        self.grad_mode, self.first_backward, *_ = facts.needs
        self.forward, self.backward = map(tuple, steps)
        self.recipe, self.compiling = env.recipe, env.compiling
        self.contexts = [vars(OperationContext()) | values for values in contexts]
        self.requires_grad = env.requires_grad
        self.double_backward = bool(env.options.get("double_backward"))
        self.trains = self.requires_grad and not self.double_backward
        known = torch.amp.is_autocast_available(env.device.type)
        self.autocast_device = env.device.type if known else "cpu"
        self.num_params = len(chain.param_sources)
        self.input_requires_grad = bool(contexts) and contexts[0]["input_requires_grad"]
        casts = facts.edges.forward.get(0), facts.edges.backward.get(len(chain.ops))
        self.entry_casts = dict(zip(("forward", "backward"), casts, strict=True))
        self._set_saved()
        self._set_gradients()
        ranges, quantizers = chain.param_ranges, facts.edges.quantizers
        self.params_to_dequantize = params_to_dequantize(chain.ops, ranges, quantizers, env)
        self.writes_extras = any(getattr(op, "in_place", False) for op in chain.ops)
        default = BasicOperation.pre_fuser_forward
        pairs = [(op, of["requires_grad"]) for op, of in zip(chain.ops, contexts, strict=True)]
        self.pre_forward_ops = [p for p in pairs if type(p[0]).pre_fuser_forward is not default]
        self.advances = any(q.pending_names for of_op in quantizers for q in of_op.values())
        self.run_backward = self.wrapped("backward", _run_backward)
        self.saves_call = self.run_backward is not _run_backward
        self.call = self.wrapped("forward", _run_call)
        more = self.double_backward, self.pre_forward_ops, self.autocast
        self.is_plain = self.call is _run_call and not any(more)
        self._functions: dict[Any, Callable[..., Any]] = {}
        self.run = self.function("forward", False, False, False)

    def _set_saved(self) -> None:
        """Set what stays between the passes."""
        fused = [(s, range(s.start, s.stop)) for s in self.forward if s.source]
        joint = {
            i for step, of in fused if step.passes == "joint" for i in of
        }  # may leave anything
        self.saved_ranges: list[tuple[int, int, int]] = []
        self.saved_attributes: list[tuple[int, str]] = []
        self.undeclared_ops: list[int] = []
        self.num_saved = 0
        for i, op in enumerate(self.chain.ops):
            names = declared(op, "saved_names")
            if names is None or i in joint:
                self.undeclared_ops.append(i)
            elif i >= self.first_backward:
                attributes = [(i, _identifier(op, name)) for name in declared(op, "context_names")]
                self.saved_attributes += attributes
                first, self.num_saved = self.num_saved, self.num_saved + len(names)
                self.saved_ranges += [(i, first, self.num_saved)] if names else []
        own = any(op._quantizers.own for op in self.chain.ops)
        self.saves_quantized = own or self.recipe is not None
        # functions are the fusions of Transformer Engine: their ops may write anything
        of_functions = {i for s, of in fused if not isinstance(s.source.fusion, Fusion) for i in of}
        passes, ops = ("forward", "backward"), enumerate(self.chain.ops)
        foreign = [i for i, op in ops if not all(is_builtin(op, name) for name in passes)]
        self.free_ops = of_functions.union(self.undeclared_ops)
        self.unpooled_ops = self.free_ops.union(foreign)

    def _set_gradients(self) -> None:
        """Set where gradients flow other than through the main tensors.

        Raises:
            RuntimeError: In traced code an op puts its gradients away itself.
        """
        chain, first = self.chain, self.first_backward
        ops = [*enumerate(chain.ops)]
        silent = {i for i, op in ops if i < first or getattr(op, "silent_outputs", False)}
        outputs = enumerate(chain.public_outputs)
        self.silent_outputs = [number for number, (i, _) in outputs if i in silent]
        self.gradient_channels = {slot for slot in chain.sources.values() if slot[0] not in silent}
        putting = [i for i, op in ops if self.requires_grad and op.accumulates_grads]
        self.accumulators = [(i, *chain.param_ranges[i]) for i in putting]
        if putting and self.compiling:
            what = "puts gradients away itself (BasicOperation.accumulates_grads)"
            how = "which torch.compile does not see; run this chain in eager mode"
            raise RuntimeError(f"{chain.name(putting[0])} {what}, {how}")

    def wrapped(self, pass_name: str, run: Any) -> Any:
        """What tools make of what runs a pass."""
        return self.facts.wrap("opfuse_wrap_pass", run, program=self, pass_name=pass_name)

    @functools.cached_property
    def untraced_call(self) -> Any:
        """:attr:`call`, for callers that ``torch.compile`` gave up on: it does not trace this."""
        disable: Any = torch.compiler.disable
        return disable(self.call)

    @property
    def code(self) -> str:
        """The source of both passes, as an ordinary call runs them."""
        passes: list[Source] = [Forward(self, Variant("forward"))]
        passes += [Backward(self, Variant("backward"))] if self.trains else []
        return "\n".join(source.write().text for source in passes)

    # The functions of calls

    def forward_of(self, x: Tensor) -> Callable[..., Any]:
        """The function of a forward: one autograd function if there is a backward.

        Args:
            x: The chain's input.
        """
        codes = type(x) is not Tensor and brings_codes(x, self.entry_casts["forward"])
        variant = "forward", codes, profiler._is_profiler_enabled, bool(current.recorders)
        return self._functions.get(variant) or self.function(*variant)

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
            codes = brings_codes(grads[0], self.entry_casts["backward"])
        owns = traced or not (dispatch_modes() or function_modes()) or may_write()
        ranged = profiler._is_profiler_enabled and not traced
        variant = "backward", codes, ranged, False, traced, owns, reached
        return self._functions.get(variant) or self.function(*variant)

    def function(self, *variant: Any) -> Callable[..., Any]:
        """The function of a pass for calls of a kind; for its arguments see :class:`Variant`."""
        if (function := self._functions.get(variant)) is None:
            is_forward = variant[0] == "forward"
            write = Forward if is_forward else Backward
            function = write(self, Variant(*variant)).write().compiled()
            self.facts.check_tools()
            if is_forward and self.trains:
                function = _applied(self, function)
            self._functions.setdefault(variant, function)
        return function


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


# A call that needs more than the functions


def _run_call(
    fuser: Any,
    program: Program,
    input: Tensor,
    tensors: Sequence[Tensor],
    extra_inputs: Sequence[Tensor],
    kwargs: Kwargs | None,
) -> Any:
    if kwargs and not program.double_backward and torch.is_grad_enabled():
        checks.check_constants(program.chain, kwargs)
    for op, requires_grad in program.pre_forward_ops:
        op.pre_fuser_forward(requires_grad=requires_grad)
    for recorder in current.recorders:
        recorder.record(fuser, program, (input, tensors, kwargs))
    if program.compiling:
        given = _distinct(tensors, program.num_params) if program.trains else tensors
        return program.run(kwargs, input, *given)
    run = program.forward_of(input)
    if program.autocast is not None:  # the ops cast themselves
        with torch.autocast(program.autocast_device, enabled=False):
            return run(kwargs, input, *tensors)
    try:
        return run(kwargs, input, *tensors)
    except Exception:
        fuser.explain_failure(input, extra_inputs)
        raise


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


def _applied(program: Program, run: Callable[..., Any]) -> Any:
    """The ``apply`` of the autograd function of a program."""
    back: Any = program.run_backward
    if program.compiling:  # nothing is decided later
        back = program.wrapped("backward", program.backward_of([torch.empty(0)], traced=True))
    passes = {"forward": staticmethod(run), "backward": staticmethod(back)}
    made: Any = type("OpfuseChain", (torch.autograd.Function,), passes)
    if program.compiling:
        return made.apply
    made._backward_cls.program = program
    # without torch's functorch code, which is never needed here, a call takes a microsecond less
    return super(torch.autograd.Function, made).apply
