"""Running a program: one loop per pass, one autograd function per chain."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.compiler import is_compiling

from .op import OperationContext
from .program import FilledContext, OpState, Program, Step
from .quantization import QuantizedTensor
from .routing import Slot

Kwargs = Sequence[dict[str, Any]]
Extras = dict[Slot, Tensor | None]


def run_forward(
    program: Program, kwargs: Kwargs | None, x: Any, tensors: tuple[Tensor, ...]
) -> tuple[Tensor, list[Tensor], list[OperationContext]]:
    """Run the forward steps.

    Args:
        program: What to run.
        kwargs: Keyword arguments per basic op, or None.
        x: The chain's input.
        tensors: The parameters, then the extra inputs that the caller gave.

    Returns:
        The output, the extra outputs for the caller, and the context of each basic op.
    """
    ctxs: list[OperationContext] = [
        (first == last and shared) or FilledContext(template, tensors[first:last], None)
        for template, first, last, _, _, shared in program.states
    ]
    extra_inputs: Extras = {}
    extra_outputs: Extras = {}
    if program.has_extras:
        extra_inputs = dict(zip(program.routing.external_inputs, tensors[program.num_params :], strict=True))
    for step in program.forward:
        op, start, stop, simple, details = step
        if details.prepare:
            x = _prepare(step, x)
        ctx = ctxs[start]
        if simple:
            x = op.op_forward(  # type: ignore[operator]
                ctx,
                x,
                prev_op_grad_output_quantizer=ctx.prev_op_grad_output_quantizer,
                next_op_input_quantizer=ctx.next_op_input_quantizer,
            )
            continue
        given = _gather(program, step, extra_inputs, extra_outputs) if details.has_extras else ((),) * (stop - start)
        x, outputs = op.fuser_forward(
            ctxs[start:stop],
            x,
            basic_op_extra_inputs=given,
            prev_op_grad_output_quantizer=ctx.prev_op_grad_output_quantizer,
            next_op_input_quantizer=ctxs[stop - 1].next_op_input_quantizer,
            basic_op_kwargs=kwargs[start:stop] if kwargs else ({},) * (stop - start),
        )
        if details.has_extras:
            _keep_outputs(program, step, outputs, extra_outputs)
    if isinstance(x, QuantizedTensor):
        x = x.dequantize()
    public = [extra_outputs[slot] for slot in program.routing.public_outputs] if program.has_extras else []
    return x, public, ctxs  # type: ignore[return-value]


def _prepare(step: Step, x: Any) -> Any:
    """Look at a tensor before it enters a step: cast it, or make it plain; insist on its width."""
    _, cast, takes_quantized, width, *_ = step.details
    if cast is not None:
        return cast(x)
    if not takes_quantized and isinstance(x, QuantizedTensor):
        x = x.dequantize()
    if width is not None and (not x.ndim or x.shape[-1] != width):
        raise ValueError(
            f"{type(step.op).__name__} expected {width} features in the last dimension, got shape {tuple(x.shape)}"
        )
    return x


def _gather(program: Program, step: Step, inputs: Extras, outputs: Extras) -> list[list[Tensor | None]]:
    """The extra inputs of each basic op of a step; None where the producer is inside the step."""
    gathered = []
    for i in range(step.start, step.stop):
        slots = []
        for k in range(program.routing.ops[i].num_extra_inputs):
            source = program.routing.sources.get((i, k))
            if source is None:
                slots.append(inputs[i, k])
            else:
                slots.append(None if step.start <= source[0] else outputs[source])
        gathered.append(slots)
    return gathered


def _refuse(step: Step, what: str, got: Sequence[Any]) -> NoReturn:
    raise RuntimeError(f"{type(step.op).__name__} must give {what}, gave {len(got)}")


def _per_basic_op(step: Step, tensors: Sequence[Any], what: str) -> Iterator[tuple[int, Sequence[Any]]]:
    if len(tensors) != step.stop - step.start:
        _refuse(step, f"{what} for {step.stop - step.start} basic ops", tensors)
    return zip(range(step.start, step.stop), tensors, strict=True)


def _keep_outputs(program: Program, step: Step, outputs: Sequence[Sequence[Tensor | None]], kept: Extras) -> None:
    """Check the extra outputs of a step against its ops' declarations and keep them."""
    routing = program.routing
    for i, tensors in _per_basic_op(step, outputs, "extra outputs"):
        if len(tensors) != (count := routing.ops[i].num_extra_outputs):
            _refuse(step, f"{count} extra outputs for {routing.name(i)}", tensors)
        for k, tensor in enumerate(tensors):
            if tensor is None and routing.needed_after((i, k), step.stop):
                who = f"{type(step.op).__name__} gave None for extra output {k} of {routing.name(i)}"
                raise RuntimeError(f"{who}, which is used outside of it")
            kept[i, k] = tensor


def _collect_saved(program: Program, ctxs: Sequence[Any]) -> tuple[list[Tensor | None], dict[int, Any]]:
    """Take what the ops saved out of their contexts.

    Returns:
        The saved tensors, in the order of the declarations, and behind them those of the ops that declare
        nothing; the contexts of the latter, by op.
    """
    saved: list[Tensor | None] = []
    for index, count in program.saving:
        to_save = ctxs[index].to_save
        if to_save is None and not ctxs[index].requires_grad:
            to_save = (None,) * count
        if to_save is None or len(to_save) != count:
            who = next(step for step in program.plan.forward if 0 <= index - step.start < len(step.basic_ops))
            by = f"{who.op} ({who.distribution or 'no plugin'})"
            what = f"{program.routing.name(index)} declares {count} saved tensors"
            raise RuntimeError(f"{what}, but the forward of {by} saved {len(to_save or ())} for it")
        saved += to_save
    left: dict[int, Any] = {}
    for index in program.keeping:
        ctx = left[index] = ctxs[index]
        start = len(saved)
        ctx.saved_quantized = None
        if ctx.to_save is not None:
            if program.recipe is not None and any([isinstance(entry, QuantizedTensor) for entry in ctx.to_save]):
                ctx.saved_quantized = _save_quantized(ctx.to_save, saved)
            else:
                saved += ctx.to_save
            ctx.to_save = None
        ctx.params = ()
        ctx.saved_range = (start, len(saved))
    return saved, left


def _backward_context(state: OpState, index: int, kept: dict[int, Any], saved: tuple[Any, ...]) -> OperationContext:
    """The context of a basic op in backward: a new one, with what its forward left."""
    template, _, _, start, stop, shared = state
    if shared is not None:
        return shared
    if stop > start:
        return FilledContext(template, (), saved[start:stop])
    ctx, left = OperationContext(), kept[index]
    vars(ctx).update(vars(left))
    start, stop = left.saved_range
    if left.saved_quantized is None:
        ctx.saved_tensors = saved[start:stop]
    else:
        ctx.saved_tensors = tuple(
            [
                saved[first] if cls is None else cls.rebuild(saved[first:last], quantizer, dtype)
                for first, last, cls, quantizer, dtype in left.saved_quantized
            ]
        )
    return ctx


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


def _refuse_overwritten(inputs: Sequence[Tensor], written: Sequence[Tensor], saved: Sequence[Tensor | None]) -> None:
    """Refuse what autograd's check of saved tensors misses, since it starts when the forward is over.

    Of the saved tensors that share memory with a written one, those that came in were saved before.
    """
    came_in = {id(tensor._base if tensor._is_view() else tensor) for tensor in inputs}
    memory = {_memory(tensor) for tensor in written}
    for tensor in saved:
        root = tensor._base if tensor is not None and tensor._is_view() else tensor
        if tensor is not None and id(root) in came_in and _memory(tensor) in memory:
            raise RuntimeError(
                "an in-place op overwrote an extra input that the backward of another op of the chain needs: "
                "pass in_place=False, or a copy"
            )


def _separate(grads: list[Tensor | None], seen: dict[int, Tensor]) -> list[Tensor | None]:
    """Copy what shares memory with another gradient without being it: autograd would keep both as ``.grad``."""
    shared = [grad is not None and seen.setdefault(_memory(grad), grad) is not grad for grad in grads]
    return [grad.clone() if grad is not None and copy else grad for grad, copy in zip(grads, shared, strict=True)]


def _save_quantized(entries: Sequence[Any], saved: list[Tensor | None]) -> list[tuple[Any, ...]]:
    """Append the tensors of ``entries`` to ``saved``; return where each is and what rebuilds it."""
    layout: list[tuple[Any, ...]] = []
    for entry in entries:
        if isinstance(entry, QuantizedTensor):
            parts = entry.tensors()
            layout.append((len(saved), len(saved) + len(parts), type(entry), entry.quantizer, entry.dtype))
            saved.extend(parts)
        else:
            layout.append((len(saved), len(saved) + 1, None, None, None))
            saved.append(entry)
    return layout


def run_backward(
    program: Program, left: dict[int, Any], saved: tuple[Any, ...], grad_output: Any, grad_public: Sequence[Tensor]
) -> list[Tensor | None]:
    """Run the backward steps.

    Args:
        program: What to run.
        left: The contexts that the forward left, by op, where its declarations do not suffice.
        saved: What it saved.
        grad_output: Gradient of the chain's output.
        grad_public: Gradients of the extra outputs that the caller got.

    Returns:
        The gradients of the input, of the parameters, and of the extra inputs that the caller gave.
    """
    routing, dy = program.routing, grad_output
    grad_params: list[Any] = [None] * len(routing.ops)
    grad_inputs: Extras = {}
    grad_outputs: Extras = {}
    if program.has_extras:
        grad_outputs = dict(zip(routing.public_outputs, grad_public, strict=True))
    states = program.states
    for step in program.backward:
        op, start, stop, simple, details = step
        if details.prepare:
            dy = _prepare(step, dy)
        if simple:
            ctx = _backward_context(states[start], start, left, saved)
            dy, grad_params[start] = op.op_backward(ctx, dy)  # type: ignore[operator]
            continue
        ctxs = [_backward_context(states[i], i, left, saved) for i in range(start, stop)]
        given: Any = ((),) * (stop - start)
        if details.has_extras:
            given = [
                [grad_outputs.get((i, k)) for k in range(routing.ops[i].num_extra_outputs)] for i in range(start, stop)
            ]
        dy, grad_params[start:stop], grads = op.fuser_backward(ctxs, dy, basic_op_grad_extra_outputs=given)
        if len(grad_params) != len(routing.ops):
            raise RuntimeError(f"{type(op).__name__} must give parameter gradients for {stop - start} basic ops")
        if details.has_extras:
            _keep_grads(program, step, grads, grad_inputs, grad_outputs)
    if isinstance(dy, QuantizedTensor):
        dy = dy.dequantize()
    ends: list[Tensor | None] = [dy if states[0].template.input_requires_grad else None]
    if program.has_extras:
        ends += [grad_inputs.get(slot) for slot in routing.external_inputs]
        ends = ends if is_compiling() else _separate(ends, {_memory(grad_output): grad_output})
    flat = ends[:1]
    for i, count in program.num_params_of:
        of_op = (None,) * count if grad_params[i] is None else tuple(grad_params[i])
        if len(of_op) != count:
            raise RuntimeError(f"{routing.name(i)} must give {count} parameter gradients, gave {len(of_op)}")
        flat += of_op
    return flat + ends[1:]


def _keep_grads(
    program: Program, step: Step, grads: Sequence[Sequence[Tensor | None]], grad_inputs: Extras, grad_outputs: Extras
) -> None:
    """Keep the gradients of a step's extra inputs, or add them to those of the channel's producer."""
    routing = program.routing
    for i, tensors in _per_basic_op(step, grads, "extra-input gradients"):
        if len(tensors) != (count := routing.ops[i].num_extra_inputs):
            _refuse(step, f"{count} extra-input gradients for {routing.name(i)}", tensors)
        for k, grad in enumerate(tensors):
            source = routing.sources.get((i, k))
            if source is None:
                grad_inputs[i, k] = grad
            elif source[0] < step.start and grad is not None:
                before = grad_outputs.get(source)
                grad_outputs[source] = grad if before is None else before + grad


class Pipeline(torch.autograd.Function):
    """The one autograd function: a whole chain, forward and backward."""

    @staticmethod
    def forward(func_ctx: Any, program: Program, kwargs: Kwargs | None, x: Tensor, *tensors: Tensor) -> Any:
        """Run the forward steps and keep what the backward steps need."""
        given = tensors[program.num_params :] if program.writes_extras and not is_compiling() else ()
        versions = [tensor._version for tensor in given] if given else []
        y, extra_outputs, ctxs = run_forward(program, kwargs, x, tensors)
        saved, func_ctx.left = _collect_saved(program, ctxs)
        if given:
            written = [tensor for tensor, version in zip(given, versions, strict=True) if tensor._version != version]
            if written:
                _refuse_overwritten((x, *given), written, saved)
        func_ctx.save_for_backward(*saved)
        func_ctx.program = program
        if not extra_outputs:
            return y
        if program.has_silent_outputs:
            slots = zip(program.routing.public_outputs, extra_outputs, strict=True)
            func_ctx.mark_non_differentiable(*[tensor for (i, _), tensor in slots if i < program.boundary])
        return (y, *extra_outputs)

    @staticmethod
    def backward(func_ctx: Any, grad_output: Tensor, *grad_extra_outputs: Tensor) -> Any:
        """Run the backward steps on new contexts."""
        program: Program = func_ctx.program
        if not is_compiling():
            if torch.is_grad_enabled() or torch._C._functorch.is_legacy_batchedtensor(grad_output):
                raise RuntimeError(
                    "opfuse: the backward of a fused chain cannot be differentiated again (create_graph=True), nor "
                    "batched (vectorize=True), unless its forward runs inside opfuse.options(double_backward=True)"
                )
            if torch.is_autocast_enabled(program.autocast_device):
                with torch.autocast(program.autocast_device, enabled=False):
                    return Pipeline.backward(func_ctx, grad_output, *grad_extra_outputs)
        saved = func_ctx.saved_tensors
        return None, None, *run_backward(program, func_ctx.left, saved, grad_output, grad_extra_outputs)


apply_eager: Any = super(torch.autograd.Function, Pipeline).apply
"""``Pipeline.apply`` without what it does for functorch, which never gets here: a microsecond per call."""


def run_without_grad(program: Program, kwargs: Kwargs | None, x: Tensor, tensors: tuple[Tensor, ...]) -> Any:
    """Run the forward steps alone: the output, or ``(output, *extra_outputs)``."""
    y, extra_outputs, _ = run_forward(program, kwargs, x, tensors)
    return (y, *extra_outputs) if extra_outputs else y


def run_differentiable(program: Program, kwargs: Kwargs | None, x: Tensor, tensors: tuple[Tensor, ...]) -> Any:
    """Run the ops unfused and let autograd record them: for second derivatives and functorch transforms."""
    if program.recipe is not None:
        raise RuntimeError(f"second derivatives and functorch transforms do not pass the rounding of {program.recipe}")
    for index, op in enumerate(program.routing.ops):
        if not op.differentiable:
            raise RuntimeError(
                f"second derivatives and functorch transforms need ops made of differentiable torch operations, "
                f"{program.routing.name(index)} is not declared to be (BasicOperation.differentiable)"
            )
    return run_without_grad(program, kwargs, x, tensors)
