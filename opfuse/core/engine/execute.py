"""Running a program: one loop per pass, one autograd function per chain.

The two loops run at every call of every chain, and on small tensors a call in Python costs as much
as an operation. So each loop is one function, and rare work is behind a flag of the program.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from ..fusible import declared
from ..overwriting import dispatch_modes, function_modes, may_write
from ..quantization import QuantizedTensor
from ..quantization.activation import entering, leaving
from ..quantization.parameter import plain
from ..quantization.scale_update import current_backward, in_backward
from ..ranks import Pass
from ..settings import current
from .agreement import reported
from .checks import as_many, refuse_gradients, refuse_none, refuse_result
from .program import Program
from .saved import leave, rebuilt, recompute, restore_more
from .side_tensors import BackwardExtras, ForwardExtras
from .step import Step
from .step_calls import lone_step, separate

any_autocast = torch._C._is_any_autocast_enabled
is_legacy_batchedtensor = torch._C._functorch.is_legacy_batchedtensor

Kwargs = Sequence[dict[str, Any]]
_TENSORS = Tensor, QuantizedTensor


def run_forward(
    func_ctx: Any, program: Program, kwargs: Kwargs | None, x: Any, *tensors: Tensor
) -> Any:
    """Run the forward steps.

    Args:
        func_ctx: The autograd function's context, which keeps what the backward steps need; None:
            there is no backward.
        program: The program.
        kwargs: Keyword arguments per basic op, or None.
        x: The chain's input.
        *tensors: The parameters, then the extra inputs that the caller gave.

    Returns:
        The output, or ``(output, *extra_outputs)``.
    """
    try:
        ctxs = program.pool.idle.pop()
    except IndexError:
        ctxs = program.pool.new()
    params = plain(tensors, program.dequantized) if program.dequantized else tensors
    entered = x
    for index, first, last in program.params:
        ctxs[index].params = params[first:last]
    extras = ForwardExtras(program, tensors, func_ctx is not None) if program.has_extras else None
    steps: Sequence[Step] = program.forward
    if type(x) is not Tensor:
        x, steps = _begin_with(program, "forward", x)
    for step in steps:
        if step.prepares:
            x = _prepare(step, x)
        if step.direct:
            x = step.run(ctxs[step.start], x)
            if type(x) is not Tensor and not isinstance(x, _TENSORS):
                refuse_result(program, step.run, x)
            continue
        start, stop, run = step.start, step.stop, step.run
        for index, op, name in step.numbers:
            setattr(ctxs[index], name, op.context_value(name))
        result = run(
            ctxs[start:stop],
            x,
            basic_op_extra_inputs=extras.given(step) if step.has_extras else step.no_extras,  # type: ignore[union-attr]
            prev_op_grad_output_quantizer=ctxs[start].prev_op_grad_output_quantizer,
            next_op_input_quantizer=ctxs[stop - 1].next_op_input_quantizer,
            basic_op_kwargs=kwargs[start:stop] if kwargs else ({},) * (stop - start),
        )
        try:
            x, outputs = result if type(result) is tuple else refuse_result(program, run, result)
        except ValueError:
            refuse_result(program, run, result)
        if not isinstance(x, _TENSORS):
            refuse_result(program, run, result)
        if step.has_extras:
            extras.keep(step, outputs, x)  # type: ignore[union-attr]
    if program.recipe is not None and isinstance(x, QuantizedTensor):
        x = leaving(x, None if program.compiling else program.recipe)
    x = leave(func_ctx, program, ctxs, x, (entered, *tensors), extras)
    if not program.compiling:
        program.pool.give_back(ctxs)
    return x if extras is None else extras.with_outputs(x, func_ctx)


def run_backward(func_ctx: Any, grad_output: Any, *grad_extra_outputs: Tensor) -> Any:
    """Run the backward steps, on contexts of their own.

    Args:
        func_ctx: The autograd function's context.
        grad_output: Gradient of the chain's output.
        *grad_extra_outputs: Gradients of the extra outputs that the caller got.

    Returns:
        The gradients of the arguments of :func:`run_forward`: None for the program and the keyword
        arguments, then those of the input, of the parameters, and of the caller's extra inputs.
    """
    program: Program = func_ctx.program
    # compiled autograd traces too, but the program was not made for it
    tracing = is_dynamo_compiling()
    if not tracing and any_autocast() and torch.is_autocast_enabled(program.autocast_device):
        with torch.autocast(program.autocast_device, enabled=False):
            return run_backward(func_ctx, grad_output, *grad_extra_outputs)
    ctxs, serve_again = _begin(func_ctx, program, tracing, grad_output, grad_extra_outputs)
    extras = (
        BackwardExtras(program, grad_output, grad_extra_outputs) if program.has_extras else None
    )
    steps: Sequence[Step] = program.backward
    dy, reached = grad_output, len(ctxs)
    if dy is None:  # the loss does not use the main output
        dy, steps, reached = _begin_late(func_ctx, ctxs, extras)
        if reached < 0:
            return (None,) * len(func_ctx.needs_input_grad)
    elif type(dy) is not Tensor:
        dy, steps = _begin_with(program, "backward", dy)
    if program.accumulating and not tracing:
        _offer_sums(func_ctx, ctxs, steps, reached)
    grads: list[Any] = [None] * len(ctxs)
    for step in steps:
        start, run = step.start, step.run
        if step.prepares:
            if step.recompute is not None:
                recompute(program, ctxs, start, func_ctx.dropped)
            dy = _prepare(step, dy)
        if step.direct:
            result = run(ctxs[start], dy)
            try:
                dy, grads[start] = (
                    result if type(result) is tuple else refuse_result(program, run, result)
                )
            except ValueError:
                refuse_result(program, run, result)
        else:
            dy = _run_fused_backward(program, step, ctxs, dy, grads, extras)
        if dy is None and start > program.last_without_gradient:
            refuse_none(program, run, start)
    if program.recipe is not None and isinstance(dy, QuantizedTensor):
        dy = leaving(dy, None if program.compiling else program.recipe)
    if reached < len(ctxs):
        grads[reached + 1 :] = [None] * (len(ctxs) - reached - 1)
        extras.forget_after(reached)  # type: ignore[union-attr]
    return _end(func_ctx, program, ctxs, dy, grads, extras, serve_again and reached == len(ctxs))


def _begin(
    func_ctx: Any, program: Program, tracing: bool, grad_output: Any, grad_extra_outputs: Any
) -> tuple[list[Any], bool]:
    """Return the contexts of a backward, and whether they may serve again.

    It refuses second derivatives and batched gradients.
    """
    if not tracing:
        batched = grad_output is not None and is_legacy_batchedtensor(grad_output)
        if grad_extra_outputs and not batched:
            given = [grad for grad in grad_extra_outputs if grad is not None]
            batched = any(map(is_legacy_batchedtensor, given))
        if batched or torch.is_grad_enabled():
            raise RuntimeError(
                "opfuse: the backward of a fused chain cannot be differentiated again "
                "(create_graph=True), nor batched (vectorize=True), unless its forward runs "
                "inside opfuse.options(double_backward=True)"
            )
        if program.advances and in_backward():
            current_backward().add(program.recipe, program.chain, program.env)  # type: ignore[arg-type]
    pool = program.pool
    try:
        ctxs = pool.idle.pop() if pool.idle and not tracing else pool.new()
    except IndexError:  # another thread took the last one
        ctxs = pool.new()
    tensors = func_ctx.saved_tensors
    if program.saves_quantized:
        tensors = rebuilt(tensors, func_ctx.quantized)
    for index, start, stop in program.saved.ranges:
        ctxs[index].saved_tensors = tensors[start:stop]
    if program.leaves_more:
        restore_more(func_ctx, program, ctxs, tensors)
    if tracing or not (dispatch_modes() or function_modes()) or may_write():
        return ctxs, not tracing
    for ctx in ctxs:  # a mode may hold the gradients between steps
        ctx.owns_grad_output = False
    return ctxs, False


def _run_fused_backward(
    program: Program,
    step: Step,
    ctxs: list[Any],
    dy: Any,
    grads: list[Any],
    extras: BackwardExtras | None,
) -> Any:
    """Run the backward of a fused step; return the gradient of its input."""
    given = extras.given(step) if extras and step.has_extras else step.no_extras
    result = step.run(ctxs[step.start : step.stop], dy, basic_op_grad_extra_outputs=given)
    if type(result) is not tuple or len(result) != 3:
        refuse_result(program, step.run, result)
    dx, of_params, of_extras = result
    grads[step.start : step.stop] = of_params
    if len(grads) != len(ctxs):
        who, count = type(step.op).__name__, step.stop - step.start
        raise RuntimeError(f"{who} must give parameter gradients for {count} basic ops")
    if extras and step.has_extras:
        extras.keep(step, of_extras)
    return dx


def _end(
    func_ctx: Any,
    program: Program,
    ctxs: list[Any],
    dy: Any,
    grads: list[Any],
    extras: BackwardExtras | None,
    serve_again: bool,
) -> tuple[Any, ...]:
    """Return the autograd function's result; clear the contexts if they are to be used again."""
    for index in program.without_params:
        if grads[index]:
            refuse_gradients(program, index, grads[index])
    dx = dy if program.input_requires_grad else None
    flat: Any
    flat, ends = ([None, None, dx], ()) if extras is None else extras.ends(dx)
    for index, first, last in program.params:
        of_op = grads[index]
        if type(of_op) is not tuple or len(of_op) != last - first:
            of_op = as_many(program, index, of_op, last - first)
        flat += of_op
    if program.accumulating:
        _accumulate(func_ctx, flat)
        for index, _, _ in program.accumulating:
            ctxs[index].grad_sum = None
    if serve_again:
        for index, _, _ in program.saved.ranges:
            ctxs[index].saved_tensors = None
        for index, name in program.saved.attributes:
            delattr(ctxs[index], name)
        program.pool.give_back(ctxs)
    return (*flat, *ends)


class Pipeline(torch.autograd.Function):
    """The one autograd function: a whole chain, forward and backward."""

    forward = staticmethod(run_forward)
    backward = staticmethod(run_backward)  # type: ignore[assignment]


apply_eager: Any = super(torch.autograd.Function, Pipeline).apply
"""``Pipeline.apply`` without its functorch code, which is never needed here: saves a microsecond
per call.
"""


class _PipelineInGroup(Pipeline):
    """That of a chain with collectives, whose backward knows which call it belongs to."""

    @staticmethod
    def forward(func_ctx: Any, *args: Any) -> Any:
        func_ctx.call = current.running
        return run_forward(func_ctx, *args)

    @staticmethod
    def backward(func_ctx: Any, *grads: Any) -> Any:
        if is_dynamo_compiling():
            return run_backward(func_ctx, *grads)
        call = func_ctx.call
        running = Pass("backward", call.chain, call.turns, call.size)
        with reported(call.chain, running=running):
            return run_backward(func_ctx, *grads)


_in_group: Any = super(torch.autograd.Function, _PipelineInGroup).apply


def apply(program: Program, kwargs: Kwargs | None, x: Tensor, tensors: Sequence[Tensor]) -> Any:
    """Run the steps, as one autograd function if there is a backward."""
    if not program.requires_grad:
        return run_forward(None, program, kwargs, x, *tensors)
    if not program.compiling:
        return (_in_group if program.chain.groups else apply_eager)(program, kwargs, x, *tensors)
    tensors = _distinct(tensors, len(program.chain.param_sources))
    return Pipeline.apply(program, kwargs, x, *tensors)  # type: ignore[no-untyped-call]


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


def run_differentiable(
    program: Program, kwargs: Kwargs | None, x: Tensor, tensors: Sequence[Tensor]
) -> Any:
    """Run the ops unfused, recorded by autograd: for second derivatives and functorch."""
    if program.recipe is not None:
        raise RuntimeError(
            f"second derivatives and functorch transforms do not pass the rounding of "
            f"{program.recipe}"
        )
    for index, op in enumerate(program.chain.ops):
        if not declared(op, "differentiable"):
            raise RuntimeError(
                f"second derivatives and functorch transforms: {program.chain.name(index)} is not "
                f"declared to be differentiable (BasicOperation.differentiable)"
            )
    return run_forward(None, program, kwargs, x, *tensors)


def _begin_late(
    func_ctx: Any, ctxs: Sequence[Any], extras: BackwardExtras | None
) -> tuple[Any, Sequence[Step], int]:
    """Find where the backward begins if the main output gets no gradient.

    Steps that get no gradient at all are skipped. If the shape is unknown where the last gradient
    arrives, the backward begins with zeros at the nearest later step whose shape is known; the
    results of these extra steps are discarded.

    Returns:
        The initial gradient, which is zero; the remaining steps; and the last op that a gradient
        reaches, or -1.
    """
    program: Program = func_ctx.program
    reached = -1 if extras is None else extras.last_given()
    if extras is None or reached < 0:
        return None, (), reached
    extras.reach_no_further(ctxs[reached + 1 :])
    last = reached if reached in func_ctx.shapes else min(i for i in func_ctx.shapes if i > reached)
    position = next(p for p, s in enumerate(program.backward) if s.start <= last < s.stop)
    step = program.backward[position]
    first = [step]
    if any(step.op is other.op for other in program.forward):  # not fused, or by a joint fusion
        last = step.stop - 1
        for ctx in ctxs[reached + 1 : step.stop]:
            ctx.is_reached = False
    else:  # by a fusion that may not handle zeros: the ops run one by one
        first = separate(step, "backward", last)
    for i in range(step.start, last):
        ctxs[i].owns_grad_output = False
    shape, dtype, device = func_ctx.shapes[last]
    zeros = torch.zeros(shape, dtype=dtype, device=device)
    steps = [*first, *program.backward[position + 1 :]]
    _restart(program, steps, reached, extras)
    return zeros, steps, reached


def _restart(program: Program, steps: list[Step], reached: int, extras: BackwardExtras) -> None:
    """Let nothing out of the steps of later ops: zeros times what is not finite are NaN."""
    at = next(p for p, step in enumerate(steps) if step.start <= reached)
    if at and steps[at].stop > reached + 1:  # as above, it may not handle zeros
        steps[at : at + 1] = separate(steps[at], "backward")
        at = next(p for p, step in enumerate(steps) if step.start <= reached)
    if at:
        again = lone_step(program.chain.ops[reached + 1], 2 * reached + 3)
        again.direct, again.prepares, again.run = True, True, extras.begin_again
        steps.insert(at, again)


def _begin_with(program: Program, pass_name: str, x: Any) -> tuple[Any, Sequence[Step]]:
    """Return the initial tensor of a pass if it is not a plain tensor, and the steps.

    Codes are used if the first cast would produce such codes; a fused op that contains this cast is
    then replaced by its ops. Otherwise the tensor is made plain.
    """
    edge = len(program.chain.ops) * (pass_name == "backward")
    cast = getattr(program.facts.edges, pass_name).get(edge)
    x, steps = entering(x, cast), getattr(program, pass_name)
    if isinstance(x, QuantizedTensor) and steps[0].source and cast in steps[0].matched:
        steps = (*separate(steps[0], pass_name), *steps[1:])
    return x, steps


def _accumulate(func_ctx: Any, grads: list[Any]) -> None:
    """Let ops that store gradients themselves do so.

    The first three of ``grads`` do not belong to parameters.
    """
    program: Program = func_ctx.program
    for (index, first, last), of_op in zip(
        program.accumulating, func_ctx.accumulating, strict=True
    ):
        added = _added(func_ctx, first, last)
        if any(added):
            here = range(3 + first, 3 + last)
            given = [grads[i] if adds else None for i, adds in zip(here, added, strict=True)]
            left = program.chain.ops[index].accumulate_grads(of_op, tuple(given))
            for i, adds, grad in zip(here, added, left, strict=True):
                if adds:
                    grads[i] = grad


def _offer_sums(func_ctx: Any, ctxs: Sequence[Any], steps: Sequence[Step], reached: int) -> None:
    """Let products add to the sums of ops that store gradients themselves, where they are kept.

    Only to ops by themselves, and to fused ops that declare it: others may change what an op's
    backward gives. Nor to ops that share a parameter whose sum is replaced: which gradient comes
    first is only known once all are there.
    """
    program: Program = func_ctx.program
    takers = [step for step in steps if step.source is None or step.op.adds_to_sum]
    taken = {index for step in takers for index in range(step.start, step.stop)}
    for (index, first, last), params in zip(
        program.accumulating, func_ctx.accumulating, strict=True
    ):
        total = None
        if index in taken and index <= reached:
            pairs = zip(params, _added(func_ctx, first, last), strict=True)
            wanted = tuple([param if adds else None for param, adds in pairs])
            if any(param is not None for param in wanted):
                total = program.chain.ops[index].grad_sum(wanted)
        if total is not None and total[1] != 1 and _is_shared(params, func_ctx.accumulating):
            total = None
        ctxs[index].grad_sum = total


def _is_shared(params: Sequence[Any], of_ops: Sequence[Sequence[Any]]) -> bool:
    """Return whether one of an op's parameters is there more than once in those of all ops."""
    every = [id(param) for of_op in of_ops for param in of_op]
    return any(every.count(id(param)) > 1 for param in params)


def _added(func_ctx: Any, first: int, last: int) -> list[bool]:
    """Return of which parameters this backward adds the gradients to ``.grad``."""
    if is_dynamo_compiling():
        return [True] * (last - first)
    return [_accumulates(edge) for edge in func_ctx.next_functions[1 + first : 1 + last]]


def _accumulates(edge: tuple[Any, int]) -> bool:
    """Return whether this backward adds to ``.grad``: ``torch.autograd.grad`` does not."""
    try:
        return edge[0] is not None and torch._C._will_engine_execute_node(edge[0])
    except RuntimeError:  # torch.autograd.grad was asked for this very gradient, and returns it
        return False


def _prepare(step: Step, x: Any) -> Any:
    """Prepare a tensor for a step: make it plain, and check its width."""
    if not step.takes_quantized and isinstance(x, QuantizedTensor):
        x = x.dequantize()
    if step.width is not None and (not x.shape or x.shape[-1] != step.width):
        who = f"{type(step.op).__name__} expected {step.width} features in the last dimension"
        raise ValueError(f"{who}, got shape {tuple(x.shape)}")
    return x
