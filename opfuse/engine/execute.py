"""Running a program: one loop per pass, one autograd function per chain.

The two loops run at every call of every chain. They stay in one function each and put off what is rare, since on small
tensors a call in Python costs as much as an operation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from ..op import declared
from ..quantization import QuantizedTensor
from .extras import BackwardExtras, ForwardExtras
from .program import Program, Step, refuse_saved

any_autocast = torch._C._is_any_autocast_enabled
is_legacy_batchedtensor = torch._C._functorch.is_legacy_batchedtensor

Kwargs = Sequence[dict[str, Any]]
_TENSORS = Tensor, QuantizedTensor


def run_forward(func_ctx: Any, program: Program, kwargs: Kwargs | None, x: Any, *tensors: Tensor) -> Any:
    """Run the forward steps.

    Args:
        func_ctx: The autograd function's context, to keep on it what the backward steps need; None: there is no
            backward.
        program: What to run.
        kwargs: Keyword arguments per basic op, or None.
        x: The chain's input.
        *tensors: The parameters, then the extra inputs that the caller gave.

    Returns:
        The output, or ``(output, *extra_outputs)``.
    """
    try:
        ctxs = program.unused.pop()
    except IndexError:
        ctxs = program.new_contexts()
    for index, first, last in program.params:
        ctxs[index].params = tensors[first:last]
    extras = ForwardExtras(program, tensors, func_ctx is not None) if program.has_extras else None
    for run, start, stop, simple, prepared, wired, nothing in program.forward_calls:
        if prepared is not None:
            x = _prepare(prepared, x)
        ctx = ctxs[start]
        if simple:
            x = run(
                ctx,
                x,
                prev_op_grad_output_quantizer=ctx.prev_op_grad_output_quantizer,
                next_op_input_quantizer=ctx.next_op_input_quantizer,
            )
            if type(x) is not Tensor and not isinstance(x, _TENSORS):
                _refuse_result(program, run, x)
            continue
        result = run(
            ctxs[start:stop],
            x,
            basic_op_extra_inputs=nothing if wired is None else extras.given(wired),  # type: ignore[union-attr]
            prev_op_grad_output_quantizer=ctx.prev_op_grad_output_quantizer,
            next_op_input_quantizer=ctxs[stop - 1].next_op_input_quantizer,
            basic_op_kwargs=kwargs[start:stop] if kwargs else ({},) * (stop - start),
        )
        try:
            x, outputs = result if type(result) is tuple else _refuse_result(program, run, result)
        except ValueError:
            _refuse_result(program, run, result)
        if not isinstance(x, _TENSORS):
            _refuse_result(program, run, result)
        if wired is not None:
            extras.keep(wired, outputs, x)  # type: ignore[union-attr]
    if program.recipe is not None and isinstance(x, QuantizedTensor):
        x = x.dequantize()
    saved: list[Tensor | None] = []
    for index, start, stop in program.saving:
        ctx = ctxs[index]
        to_save, ctx.to_save, ctx.params = ctx.to_save, None, ()
        if ctx.saved_tensors is not None:
            refuse_saved(program, index, ctx)
        if func_ctx is not None:
            if to_save is None or len(to_save) != stop - start:
                to_save = _saved_nothing(program, index, stop - start, ctx, to_save)
            saved += to_save
    for index in program.unsaved:
        ctx = ctxs[index]
        if ctx.to_save is not None or ctx.saved_tensors is not None:
            refuse_saved(program, index, ctx)
        ctx.params = ()
    if func_ctx is not None:
        if program.leaving:
            func_ctx.attributes = _take_attributes(program, ctxs)
        if program.recomputing:
            func_ctx.dropped = _drop_recomputable(program, ctxs, saved)
        if program.keeping:
            func_ctx.left = _keep_contexts(program, ctxs, saved)
        if extras is not None:
            extras.refuse_overwritten(x, saved)
            func_ctx.outputs = extras.shapes
        if program.accumulating:
            func_ctx.accumulating = [tensors[first:last] for _, first, last in program.accumulating]
        func_ctx.save_for_backward(*saved)
        func_ctx.program = program
        if not program.compiling:
            func_ctx.materialize_grads = False  # what set_materialize_grads does
    if not program.compiling:
        if program.keeping:
            program.renew(ctxs)
        program.unused.append(ctxs)
    return x if extras is None else extras.beside(x, func_ctx)


def run_backward(func_ctx: Any, grad_output: Any, *grad_extra_outputs: Tensor) -> Any:
    """Run the backward steps, on other contexts than the forward's.

    Args:
        func_ctx: The autograd function's context.
        grad_output: Gradient of the chain's output.
        *grad_extra_outputs: Gradients of the extra outputs that the caller got.

    Returns:
        The gradients of what :func:`run_forward` takes: the program and the keyword arguments have none, then those of
        the input, of the parameters, and of the extra inputs that the caller gave.
    """
    program: Program = func_ctx.program
    tracing = is_dynamo_compiling()  # by compiled autograd too, which then meets a program that was not made for it
    if not tracing:
        batched = grad_output is not None and is_legacy_batchedtensor(grad_output)
        if batched or torch.is_grad_enabled() or (grad_extra_outputs and any(map(_is_batched, grad_extra_outputs))):
            raise RuntimeError(
                "opfuse: the backward of a fused chain cannot be differentiated again (create_graph=True), nor "
                "batched (vectorize=True), unless its forward runs inside opfuse.options(double_backward=True)"
            )
        if any_autocast() and torch.is_autocast_enabled(program.autocast_device):
            with torch.autocast(program.autocast_device, enabled=False):
                return run_backward(func_ctx, grad_output, *grad_extra_outputs)
    saved = func_ctx.saved_tensors
    try:
        ctxs = program.unused.pop() if program.unused and not tracing else program.new_contexts()
    except IndexError:  # another thread was quicker
        ctxs = program.new_contexts()
    for index, start, stop in program.saving:
        ctxs[index].saved_tensors = saved[start:stop]
    for (index, name), value in zip(program.leaving, func_ctx.attributes) if program.leaving else ():  # noqa: B905
        setattr(ctxs[index], name, value)
    if program.keeping:
        _restore_contexts(ctxs, func_ctx.left, saved)
    extras = BackwardExtras(program, grad_output, grad_extra_outputs) if program.has_extras else None
    dy, reached = grad_output, len(ctxs)
    calls: Sequence[Any] = program.backward_calls
    if dy is None:  # the loss does not use the main output
        dy, calls, reached = _begin_late(func_ctx, ctxs, extras)
        if reached < 0:
            return (None,) * len(func_ctx.needs_input_grad)
    grads: list[Any] = [None] * len(ctxs)
    for run, start, stop, simple, prepared, wired, nothing in calls:
        if prepared is not None:
            if prepared.recompute is not None:
                _recompute(program, ctxs, start, func_ctx.dropped)
            dy = _prepare(prepared, dy)
        if simple:
            result = run(ctxs[start], dy)
            try:
                dy, grads[start] = result if type(result) is tuple else _refuse_result(program, run, result)
            except ValueError:
                _refuse_result(program, run, result)
            if dy is None and start > program.first_gradient:
                _refuse_none(program, run, start)
            continue
        given = nothing if wired is None else extras.given(wired)  # type: ignore[union-attr]
        result = run(ctxs[start:stop], dy, basic_op_grad_extra_outputs=given)
        try:
            dy, of_params, of_extras = result if type(result) is tuple else _refuse_result(program, run, result)
        except ValueError:
            _refuse_result(program, run, result)
        if dy is None and start > program.first_gradient:
            _refuse_none(program, run, start)
        grads[start:stop] = of_params
        if len(grads) != len(ctxs):
            who = type(run.__self__).__name__
            raise RuntimeError(f"{who} must give parameter gradients for {stop - start} basic ops")
        if wired is not None:
            extras.keep(wired, of_extras)  # type: ignore[union-attr]
    if program.recipe is not None and isinstance(dy, QuantizedTensor):
        dy = dy.dequantize()
    for index in program.bare:
        if grads[index]:
            _refuse_gradients(program, index, grads[index])
    if reached < len(ctxs):
        grads[reached + 1 :] = [None] * (len(ctxs) - reached - 1)
        extras.forget_after(reached)  # type: ignore[union-attr]
    dx = dy if program.input_requires_grad else None
    flat: Any
    flat, ends = ([None, None, dx], ()) if extras is None else extras.ends(dx)
    for index, first, last in program.params:
        of_op = grads[index]
        if type(of_op) is not tuple or len(of_op) != last - first:
            of_op = _as_many(program, index, of_op, last - first)
        flat += of_op
    if program.accumulating:
        _accumulate(func_ctx, flat)
    if not tracing and reached == len(ctxs):
        for index, _, _ in program.saving:
            ctxs[index].saved_tensors = None
        for index, name in program.leaving:
            delattr(ctxs[index], name)
        if program.keeping:
            program.renew(ctxs)
        program.unused.append(ctxs)
    return (*flat, *ends)


class Pipeline(torch.autograd.Function):
    """The one autograd function: a whole chain, forward and backward."""

    forward = staticmethod(run_forward)
    backward = staticmethod(run_backward)  # type: ignore[assignment]


apply_eager: Any = super(torch.autograd.Function, Pipeline).apply
"""``Pipeline.apply`` without what it does for functorch, which never gets here: a microsecond per call."""


def run_differentiable(program: Program, kwargs: Kwargs | None, x: Tensor, tensors: Sequence[Tensor]) -> Any:
    """Run the ops unfused and let autograd record them: for second derivatives and functorch transforms."""
    if program.recipe is not None:
        raise RuntimeError(f"second derivatives and functorch transforms do not pass the rounding of {program.recipe}")
    for index, op in enumerate(program.routing.ops):
        if not declared(op, "differentiable"):
            who = f"{program.routing.name(index)} is not declared to be differentiable (BasicOperation.differentiable)"
            raise RuntimeError(f"second derivatives and functorch transforms: {who}")
    return run_forward(None, program, kwargs, x, *tensors)


def _is_batched(grad: Tensor | None) -> bool:
    return grad is not None and is_legacy_batchedtensor(grad)


def _begin_late(func_ctx: Any, ctxs: Sequence[Any], extras: BackwardExtras | None) -> tuple[Any, Sequence[Any], int]:
    """Where the backward begins if no gradient comes to the main output: steps that get none at all are skipped.

    Returns:
        The gradient to begin with, which is zero; the calls that are left; and the last op that a gradient reaches, or
        -1. What begins behind it, since shapes in between are not known, is forgotten afterwards.
    """
    program: Program = func_ctx.program
    reached = -1 if extras is None else extras.last_given()
    if reached < 0:
        return None, (), reached
    last = reached if reached in func_ctx.outputs else min(i for i in func_ctx.outputs if i > reached)
    position, step = next((p, s) for p, s in enumerate(program.backward) if s.start <= last < s.stop)
    first = [step]
    if any(step.op is other.op for other in program.forward):  # not fused, or by a joint fusion
        last = step.stop - 1
    else:  # by a fusion that may not expect zeros: the ops run one by one
        first = [program.separate(i, step) for i in reversed(range(step.start, last + 1))]
    for i in range(step.start, last):
        ctxs[i].owns_grad_output = False
    shape, dtype, device = func_ctx.outputs[last]
    calls = [one.call("backward") for one in first]
    return torch.zeros(shape, dtype=dtype, device=device), (*calls, *program.backward_calls[position + 1 :]), reached


def _refuse_result(program: Program, run: Any, result: Any) -> NoReturn:
    """Refuse what an op gave instead of a tuple, which might be a tensor that unpacks by rows."""
    method = run.__name__
    got = type(result).__name__
    if isinstance(result, tuple):
        got = f"({', '.join(type(item).__name__ for item in result)})"
    wanted = {
        "op_forward": "its output, a tensor",
        "fuser_forward": "a tuple of its output, a tensor, and the extra outputs of each basic op",
        "op_backward": "a tuple of the gradient of its input and those of its parameters",
        "fuser_backward": "a tuple of the gradients of its input, of the parameters and of the extra inputs of each op",
    }
    raise TypeError(f"{_by(program, run)}: {method} must return {wanted[method]}, got {got}")


def _by(program: Program, run: Any) -> str:
    """An op as errors call it, with who gave it."""
    op = type(run.__self__).__name__
    steps = (*program.plan.forward, *program.plan.backward)
    return next((f"{op} ({step.owner})" for step in steps if step.op == op and step.fusion), op)


def _refuse_none(program: Program, run: Any, start: int) -> NoReturn:
    """Refuse a gradient that is missing although somebody needs it: it would be lost without a word."""
    needs = program.routing.name(start - 1) if start else "the input of the chain"
    what = f"{run.__name__} gave None as the gradient of its input, which {needs} needs"
    raise RuntimeError(f"{_by(program, run)}: {what}; give zeros if it is zero")


def _refuse_gradients(program: Program, index: int, grads: Any) -> None:
    """Refuse gradients for parameters that an op does not have."""
    if any(grad is not None for grad in tuple(grads)):
        name = program.routing.name(index)
        raise RuntimeError(f"{name} has no parameters, but its backward gave {len(tuple(grads))} gradients for some")


def _as_many(program: Program, index: int, grads: Any, count: int) -> tuple[Any, ...]:
    """The parameter gradients of an op as a tuple."""
    several: tuple[Any, ...] = (None,) * count if grads is None else tuple(grads)
    if len(several) != count:
        raise RuntimeError(f"{program.routing.name(index)} must give {count} parameter gradients, gave {len(several)}")
    return several


def _accumulate(func_ctx: Any, grads: list[Any]) -> None:
    """Let the ops that do so put the gradients of their parameters away; the first three are not of parameters."""
    program: Program = func_ctx.program
    for (index, first, last), of_op in zip(program.accumulating, func_ctx.accumulating, strict=True):
        here = slice(3 + first, 3 + last)
        if is_dynamo_compiling() or any(map(_accumulates, func_ctx.next_functions[1 + first : 1 + last])):
            grads[here] = program.routing.ops[index].accumulate_grads(of_op, tuple(grads[here]))


def _accumulates(edge: tuple[Any, int]) -> bool:
    """Whether this backward adds up the gradient of a parameter: ``torch.autograd.grad`` does not."""
    try:
        return edge[0] is not None and torch._C._will_engine_execute_node(edge[0])
    except RuntimeError:  # somebody asks torch.autograd.grad for this very gradient, and gets it
        return False


def _prepare(step: Step, x: Any) -> Any:
    """Look at a tensor before it enters a step: cast it, or make it plain; insist on its width."""
    if step.cast is not None:
        return step.cast(x)
    if not step.takes_quantized and isinstance(x, QuantizedTensor):
        x = x.dequantize()
    if step.width is not None and (not x.ndim or x.shape[-1] != step.width):
        who = f"{type(step.op).__name__} expected {step.width} features in the last dimension"
        raise ValueError(f"{who}, got shape {tuple(x.shape)}")
    return x


def _saved_nothing(program: Program, index: int, count: int, ctx: Any, to_save: Any) -> tuple[None, ...]:
    """What an op saves that takes no part in the backward; every other must save what it declares."""
    if to_save is None and not ctx.requires_grad:
        return (None,) * count
    what = f"{program.routing.name(index)} declares {count} saved tensors"
    raise RuntimeError(f"{what}, but the forward of {_forward_of(program, index)} saved {len(to_save or ())} for it")


def _take_attributes(program: Program, ctxs: Sequence[Any]) -> list[Any]:
    """Take what the contexts pass on to the backward."""
    values = []
    for index, name in program.leaving:
        try:
            values.append(getattr(ctxs[index], name))
        except AttributeError:
            what = f"{program.routing.name(index)} declares the context attribute {name!r}"
            raise RuntimeError(f"{what}, but the forward of {_forward_of(program, index)} did not leave it") from None
        delattr(ctxs[index], name)
    return values


def _forward_of(program: Program, index: int) -> str:
    """Whose forward ran a basic op."""
    step = next(step for step in program.plan.forward if 0 <= index - step.start < len(step.basic_ops))
    return f"{step.op} ({step.distribution or 'no plugin'})"


def _keep_contexts(program: Program, ctxs: Sequence[Any], saved: list[Tensor | None]) -> dict[int, Any]:
    """Take the contexts of the ops that declare nothing, and append what they saved to ``saved``."""
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
    return left


def _restore_contexts(ctxs: Sequence[Any], left: dict[int, Any], saved: tuple[Any, ...]) -> None:
    """Write what the forward left on its contexts on those of the backward."""
    for index, ctx in left.items():
        vars(ctxs[index]).update(vars(ctx))
        start, stop = ctx.saved_range
        ctxs[index].saved_tensors = saved[start:stop]
        if ctx.saved_quantized is not None:
            ctxs[index].saved_tensors = tuple(
                [
                    saved[first] if cls is None else cls.rebuild(saved[first:last], quantizer, dtype)
                    for first, last, cls, quantizer, dtype in ctx.saved_quantized
                ]
            )


def _drop_recomputable(program: Program, ctxs: Sequence[Any], saved: list[Tensor | None]) -> list[int]:
    """Do not keep the inputs that a fused op can compute again; return whose they are."""
    dropped = []
    for index, (_, start, _, place) in program.recomputing.items():
        output, ctxs[start].recomputable = ctxs[start].recomputable, True
        if saved[place] is output:
            saved[place] = None
            dropped.append(index)
    return dropped


def _recompute(program: Program, ctxs: Sequence[Any], index: int, dropped: list[int]) -> None:
    """Put an input back that was not kept, after that of the op that computes it."""
    if index not in dropped:
        return
    op, start, place, _ = program.recomputing[index]
    saved = ctxs[index].saved_tensors
    if saved[place] is None:
        _recompute(program, ctxs, start, dropped)
        ctxs[index].saved_tensors = (*saved[:place], op.fuser_recompute(ctxs[start:index]), *saved[place + 1 :])


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
