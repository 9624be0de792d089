"""Programs: executable plans, one for each key of a chain.

A program is straight-line Python, see :mod:`opfuse.core.engine.source`: one function for the
forward and one for the backward, under one autograd function. Rare calls have functions of their
own, which are written at their first need: what comes in is quantized, a recorder or a profiler
watches, a gradient is missing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import profiler
from torch.compiler import is_dynamo_compiling

from ..overwriting import dispatch_modes, function_modes, may_write
from ..quantization.coded_tensor import brings_codes
from ..settings import current
from . import checks
from .blueprint import Blueprint
from .source import Source, Variant
from .write_backward import Backward
from .write_forward import Forward

any_autocast = torch._C._is_any_autocast_enabled
is_legacy_batchedtensor = torch._C._functorch.is_legacy_batchedtensor

Kwargs = Sequence[dict[str, Any]]


class Program(Blueprint):
    """An executable plan: a blueprint, and the functions that are written from it.

    Attributes:
        is_plain: Whether a call only runs the functions.
        row_facts, rows: The facts about the rows that the plan depends on, and their values.
        seen: Shape and contiguity of the last input with these rows, or None.
        run: The function of a forward that has nothing rare.
        call: What runs a call that needs more, and what tools make of it.
        run_backward: The ``backward`` of its autograd function.
    """

    row_facts: tuple[str, ...] = ()
    rows: Any = None
    seen: Any = None

    def __init__(self, *data: Any) -> None:
        super().__init__(*data)
        self.run_backward = self.wrap("backward", _run_backward)
        self.saves_call = self.run_backward is not _run_backward
        self.call = self.wrap("forward", _run_call)
        more = self.double_backward, self.pre_forward_ops, self.autocast
        self.is_plain = self.call is _run_call and not any(more)
        self._functions: dict[Any, Callable[..., Any]] = {}
        self.run = self.function("forward", False, False, False)

    def wrap(self, pass_name: str, run: Any) -> Any:
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
            function = write(self, Variant(*variant)).write().compile()
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
        back = program.wrap("backward", program.backward_of([torch.empty(0)], traced=True))
    passes = {"forward": staticmethod(run), "backward": staticmethod(back)}
    made: Any = type("OpfuseChain", (torch.autograd.Function,), passes)
    if program.compiling:
        return made.apply
    made._backward_cls.program = program
    # without torch's functorch code, which is never needed here, a call takes a microsecond less
    return super(torch.autograd.Function, made).apply
