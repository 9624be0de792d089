"""What the lines of a program call: contexts, saved tensors, extra tensors, results."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from .. import quantization
from ..cast import Cast
from ..extra_dtypes import is_kind, refuse_kind
from ..op_context import OperationContext, summed
from ..quantization import QuantizedTensor, Quantizer, Recipe, Usage
from ..quantization.coded_tensor import entering, plain
from ..quantization.quantizer import same_quantizer
from ..settings import current
from . import checks
from .chain import Chain, Slot
from .step import Step

if TYPE_CHECKING:
    from .program import Program

__all__ = ["entering", "plain", "summed"]

Contexts = Mapping[int, Any]
"""The contexts of some ops, by their index."""

_OF_ONE_PASS = frozenset(
    "to_save params saved_tensors owns_grad_output is_reached grad_sum recomputable_output".split()
)
"""The attributes of a context that no forward passes on."""


# Contexts


class _DeclaredContext:
    """The context of an op that declares what it leaves; accepts nothing else."""

    __slots__ = tuple(vars(OperationContext()))
    save_for_backward = OperationContext.save_for_backward
    quantized_weight = OperationContext.quantized_weight


@functools.cache
def context_class(names: tuple[str, ...] | None) -> type[Any]:
    """The class of contexts of ops with these ``context_names``; None: any attribute may be set."""
    if names is None:
        return OperationContext
    title = f"OperationContext of an op whose context_names declare {', '.join(names) or 'nothing'}"
    return type(title, (_DeclaredContext,), {"__slots__": names})


def contexts(kinds: Sequence[tuple[type[Any], dict[str, Any]]]) -> list[Any]:
    """Contexts of these classes, with these attributes."""
    made = []
    for cls, attributes in kinds:
        made.append(ctx := cls())
        for name, value in attributes.items():
            setattr(ctx, name, value)
    return made


def cast_context(quantizer: Quantizer, usage: Usage) -> Any:
    """The context of a cast inside of a fused op."""
    ctx: Any = OperationContext()
    ctx.quantizer, ctx.usage = quantizer, usage
    return ctx


def kept_contexts(position: int, contexts: Contexts) -> tuple[dict[int, Any], list[Any]]:
    """What ops leave that declare nothing.

    Args:
        position: The number of tensors that the others save.
        contexts: Their contexts.

    Returns:
        For each the attributes of its context, and the range of its tensors; and all these tensors.
    """
    kept: dict[int, Any] = {}
    tensors: list[Any] = []
    for index, ctx in contexts.items():
        start = position + len(tensors)
        tensors += ctx.to_save or ()
        attributes = {name: v for name, v in vars(ctx).items() if name not in _OF_ONE_PASS}
        kept[index] = attributes, slice(start, position + len(tensors))
    return kept, tensors


def restore_context(ctx: Any, kept: tuple[dict[str, Any], slice], tensors: Sequence[Any]) -> None:
    """Give the context of a backward what :func:`kept_contexts` took."""
    vars(ctx).update(kept[0])
    ctx.saved_tensors = tensors[kept[1]]


def record_saved(program: Program, saved: Sequence[Any], kept: Mapping[int, Any]) -> None:
    """Tell the recorder of this thread what a forward saves.

    Args:
        program: The program.
        saved: All saved tensors.
        kept: What :func:`kept_contexts` returned.
    """
    found = {i: saved[start:stop] for i, start, stop in program.saved.ranges}
    found |= {i: saved[places] for i, (_, places) in kept.items()}
    if current.recorder is not None:
        current.recorder.saved(program, found)


# Results of steps


def forward_result(program: Program, step: Step, result: Any) -> tuple[Any, list[Any]]:
    """Check the result of ``fuser_forward``.

    Returns:
        The output, and all extra outputs of the step's ops.
    """
    run: Any = step.op.fuser_forward
    if type(result) is not tuple or len(result) != 2:
        checks.refuse_result(program, run, result)
    x, outputs = result
    if not isinstance(x, (Tensor, QuantizedTensor)):
        checks.refuse_result(program, run, result)
    if step.casts:
        check_cast_end(step, x, step.matched[-1], "fuser_forward")
        outputs = without_casts(step, outputs, "fuser_forward")
    if not step.has_extras:
        return x, []
    flat = []
    for i, tensors in checks.per_basic_op(step, outputs, program.chain, "extra outputs"):
        for k, tensor in enumerate(tensors):
            if tensor is None and program.chain.needed_after((i, k), step.stop):
                what = f"gave None for extra output {k} of {program.chain.name(i)}"
                raise RuntimeError(f"{type(step.op).__name__} {what}, which is used outside of it")
            flat.append(tensor)
    return x, flat


def backward_result(
    program: Program, index: int, count: int, run: Any, result: Any
) -> tuple[Any, tuple[Any, ...]]:
    """Check the result of ``op_backward``.

    Returns:
        The gradient of the input, and that of each of the ``count`` parameters.
    """
    if type(result) is not tuple or len(result) != 2:
        checks.refuse_result(program, run, result)
    return result[0], _param_grads(program, index, count, result[1])


def fused_backward_result(
    program: Program, step: Step, reached: int, result: Any
) -> tuple[Any, list[Any], list[Any]]:
    """Check the result of ``fuser_backward``.

    Args:
        program: The program.
        step: The step.
        reached: The last op that a gradient reaches.
        result: The result.

    Returns:
        The gradient of the input; those of all parameters; those of all extra inputs.
    """
    run: Any = step.op.fuser_backward
    if type(result) is not tuple or len(result) != 3:
        checks.refuse_result(program, run, result)
    dx, of_params, of_extras = result
    if step.casts:
        check_cast_end(step, dx, step.matched[0], "fuser_backward")
        of_params = without_casts(step, of_params, "fuser_backward")
        of_extras = without_casts(step, of_extras, "fuser_backward")
    if len(of_params) != step.stop - step.start:
        who, count = type(step.op).__name__, step.stop - step.start
        raise RuntimeError(f"{who} must give parameter gradients for {count} basic ops")
    grads: list[Any] = []
    for i, of_op in enumerate(of_params, step.start):
        first, last = program.chain.param_ranges[i]
        count = last - first
        grads += _param_grads(program, i, count, of_op) if i <= reached else (None,) * count
    if not step.has_extras:
        return dx, grads, []
    pairs = checks.per_basic_op(step, of_extras, program.chain, "extra-input gradients")
    return dx, grads, [grad for _, tensors in pairs for grad in tensors]


def _param_grads(program: Program, index: int, count: int, grads: Any) -> tuple[Any, ...]:
    if count == 0 and grads:
        checks.refuse_gradients(program, index, grads)
        return ()
    if type(grads) is tuple and len(grads) == count:
        return grads
    return checks.as_many(program, index, grads, count)


def check_cast_end(step: Step, given: Any, op: Any, method: str) -> None:
    """Refuse a result of another kind than that of the cast that a fused op ends with."""
    if given is None or not isinstance(op, Cast):
        return
    right = isinstance(given, QuantizedTensor) and same_quantizer(given.quantizer, op.quantizer)
    if not (right and given.usage.covers(op.usage)):
        what = repr(given) if isinstance(given, QuantizedTensor) else "a plain tensor"
        raise TypeError(
            f"{type(step.op).__name__}: {method} expected to give what "
            f"{type(op.quantizer).__name__} quantizes for {op.usage}, since it ends with a Cast; "
            f"got {what}"
        )


def without_casts(step: Step, entries: Any, method: str) -> list[Any]:
    """The entries of a result for basic ops; those for casts must be empty."""
    if len(entries) != len(step.matched):
        return entries  # type: ignore[no-any-return]  # too many, or too few: it is refused
    found = []
    for op, entry in zip(step.matched, entries, strict=True):
        if not isinstance(op, Cast):
            found.append(entry)
        elif entry and not all([part is None for part in entry]):
            raise RuntimeError(
                f"{type(step.op).__name__}: {method} gave tensors for a Cast, which has no "
                f"parameters and no extra tensors"
            )
    return found


def check_cast_contexts(step: Step, pass_name: str, *contexts: Any) -> None:
    """Refuse tensors that a fused op saved for a cast."""
    for ctx in contexts:
        if ctx.to_save:
            raise RuntimeError(
                f"{type(step.op).__name__}: fuser_{pass_name} gave tensors to save_for_backward of "
                f"a Cast, which saves nothing: they would be lost"
            )


def refuse_width(op: Any, width: int, x: Tensor) -> NoReturn:
    """Refuse a tensor of another width."""
    who = f"{type(op).__name__} expected {width} features in the last dimension"
    raise ValueError(f"{who}, got shape {tuple(x.shape)}")


def leaving(recipe: Recipe | None, x: QuantizedTensor) -> Tensor:
    """The output of a chain, if its last op, or its first, asks for a quantized one.

    Args:
        recipe: The recipe; None: a plain tensor is wanted, as while ``torch.compile`` traces.
        x: The computed tensor.

    Raises:
        ImportError: The package is missing that has tensors over codes.
    """
    if recipe is None or not getattr(x.quantizer, "quantizes", False):
        return x.dequantize()
    return quantization.QuantizedActivation(x, recipe)  # type: ignore[no-any-return]


# Extra tensors


def alias(output: Tensor | None) -> Tensor | None:
    """What a channel gives to a later op: it says that a gradient flows.

    The flag of a tensor that the caller may hold must not change.
    """
    if output is None or not output.is_floating_point():
        return output
    return output.detach().requires_grad_()


def traced_alias(output: Tensor | None) -> Tensor | None:
    """As :func:`alias`, in a way that ``torch.compile`` can trace."""
    if output is None or not output.is_floating_point():
        return output
    return output.clone().requires_grad_()


def checked_kind(chain: Chain, slot: Slot, tensor: Tensor) -> Tensor:
    """What a channel gives to an op; refused if that takes another kind."""
    if not is_kind(kind := chain.kinds[slot], tensor.dtype):
        who = f"extra input {slot[1]} of {chain.name(slot[0])}, out of a channel,"
        refuse_kind(who, kind, tensor.dtype)
    return tensor


def shape_of(x: Any) -> tuple[torch.Size, torch.dtype, torch.device]:
    """Shape, dtype and device of the gradient of a main output."""
    parts = x.tensors() if isinstance(x, QuantizedTensor) else (x,)
    return x.shape, x.dtype, next(part.device for part in parts if part is not None)


def refuse_overwritten(
    x: Tensor, extras: Sequence[Tensor], versions: Sequence[int], saved: Sequence[Tensor | None]
) -> None:
    """Refuse an overwritten saved tensor that autograd's check misses.

    That check starts after the forward. Of the saved tensors that share memory with a written one,
    those that were given as inputs were saved before the write.
    """
    pairs = zip(extras, versions, strict=True)
    written = [tensor for tensor, version in pairs if tensor._version != version]
    came_in = {id(_root(tensor)) for tensor in (x, *extras)}
    memory = {_memory(tensor) for tensor in written}
    for tensor in [tensor for tensor in saved if written and isinstance(tensor, Tensor)]:
        if id(_root(tensor)) in came_in and _memory(tensor) in memory:
            raise RuntimeError(
                "an in-place op overwrote an extra input that the backward of another op of the "
                "chain needs: pass in_place=False, or a copy"
            )


def unbound(outputs: list[Any], others: Sequence[Any]) -> list[Any]:
    """Outputs, those that are views turned into tensors, unless others own their memory.

    PyTorch refuses to write in place into a view that a Function returns. A fused op often returns
    its matrix in the shape of the input, which is such a view; the separate ops do not.
    """
    if not any([type(each) is Tensor and each._is_view() for each in outputs]):
        return outputs
    owned = [_memory(each) for each in (*outputs, *others) if isinstance(each, Tensor)]
    return [
        torch.ops.aten._unsafe_view.default(each, each.shape)
        if type(each) is Tensor and each._is_view() and owned.count(_memory(each)) == 1
        else each
        for each in outputs
    ]


def separate_memory(grads: list[Any], given: Tensor | None) -> list[Any]:
    """Gradients of which no two share memory: autograd would keep both as ``.grad``."""
    seen = {} if given is None else {_memory(given): given}
    return [
        grad.clone()
        if grad is not None and seen.setdefault(_memory(grad), grad) is not grad
        else grad
        for grad in grads
    ]


def _root(tensor: Tensor) -> Tensor | None:
    """The tensor itself, or the one that it is a view of."""
    return tensor._base if tensor._is_view() else tensor


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


# A backward that begins late


def zeros_of(op: int, ctx: Any) -> Tensor:
    """Zeros in place of the gradient of an op's output."""
    shape, dtype, device = ctx.shapes[op]
    return torch.zeros(shape, dtype=dtype, device=device)


def zeros_like(dy: Any) -> Tensor:
    """Zeros, since no gradient reaches the ops behind."""
    return torch.zeros_like(dy.dequantize() if isinstance(dy, QuantizedTensor) else dy)


def pending_state(contexts: Sequence[Any]) -> list[tuple[Tensor, Tensor]]:
    """The state that the quantizers of some ops record into, and copies of it."""
    quantizers = [quantizer for ctx in contexts for quantizer in ctx.quantizers.values()]
    state = [getattr(q, name) for q in quantizers for name in q.pending_names]
    return [(tensor, tensor.clone()) for tensor in state]


def restore_state(pending: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Undo what quantizers recorded since :func:`pending_state`: only zeros reached them."""
    for tensor, before in pending:
        tensor.copy_(before)


# Inputs that are computed again instead of being kept


def drop_recomputable(program: Program, contexts: Contexts, saved: list[Any]) -> dict[int, Usage]:
    """Drop the inputs that a step can compute again.

    For a quantized one the scales are kept, so that the same cast can be repeated.

    Args:
        program: The program.
        contexts: The contexts of the first ops of these steps.
        saved: All saved tensors.

    Returns:
        The ops that the inputs belong to, and which copies each had.
    """
    dropped = {}
    for index, how in program.recomputing.items():
        ctx = contexts[how.start]
        output, ctx.recomputable_output = ctx.recomputable_output, None
        kept: Any = saved[how.position]
        if output is None or not _is_of(kept, output, how.cast):
            continue
        quantized = isinstance(kept, QuantizedTensor)
        dropped[index] = kept.copies if quantized else Usage()
        saved[how.position] = kept.without_data() if quantized else None
    return dropped


def recompute(program: Program, contexts: Contexts, index: int, dropped: dict[int, Usage]) -> None:
    """Restore an input that was not kept, after the input of the op that computes it."""
    if index not in dropped:
        return
    how = program.recomputing[index]
    saved: tuple[Any, ...] = contexts[index].saved_tensors
    shell, usage = saved[how.place], dropped[index]
    quantized = isinstance(shell, QuantizedTensor)
    if shell is None or (quantized and not any(shell.copies)):
        recompute(program, contexts, how.start, dropped)
        ctxs: list[Any] = []
        position = how.start
        for op in how.step.matched:
            if isinstance(op, Cast):
                ctxs.append(ctx := cast_context(op.quantizer, usage))
                ctx.saved_tensors = (shell,)
            else:
                ctxs.append(contexts[position])
                position += 1
        again = how.run(ctxs)
        if how.cast is not None:
            again = how.cast.quantizer.requantize(again, shell, usage)
        if quantized:
            again = again.only(usage)
        contexts[index].saved_tensors = (*saved[: how.place], again, *saved[how.place + 1 :])


def _is_of(kept: Any, output: Any, cast: Cast | None) -> bool:
    """Return whether an op saved this very tensor, copies of it, or what a cast makes of it."""
    if not isinstance(kept, QuantizedTensor):
        return kept is output and cast is None
    if cast is not None:
        return same_quantizer(kept.quantizer, cast.quantizer)
    if not isinstance(output, QuantizedTensor):
        return False
    return {*map(id, kept.tensors())} <= {id(None), *map(id, output.tensors())}


# Quantized tensors among saved ones: their parts as plain tensors, which autograd can keep


def unpack(saved: list[Any]) -> list[tuple[int, QuantizedTensor, int, int]]:
    """Move the tensors of quantized tensors to the end, so that all other places stay.

    Returns:
        For each: its place, the quantized tensor without its tensors, and their range.
    """
    found = []
    for place, entry in enumerate(tuple(saved)):
        if isinstance(entry, QuantizedTensor):
            parts = entry.tensors()
            shell = entry.over((None,) * len(parts))
            found.append((place, shell, len(saved), len(saved) + len(parts)))
            saved[place] = None
            saved.extend(parts)
    return found


def rebuild(
    saved: tuple[Any, ...], quantized: Sequence[tuple[int, QuantizedTensor, int, int]]
) -> tuple[Any, ...]:
    """Undo :func:`unpack`."""
    entries = list(saved)
    for place, shell, first, last in quantized:
        entries[place] = shell.over(saved[first:last])
    return tuple(entries)


# Ops that store the gradients of their parameters themselves


def accumulate(program: Program, ctx: Any, grads: list[Any]) -> list[Any]:
    """Let ops that store gradients themselves do so.

    Args:
        program: The program.
        ctx: The autograd function's context.
        grads: All gradients; the first two do not belong to parameters.

    Returns:
        The gradients, without those that were stored.
    """
    for (index, first, last), params in zip(program.accumulating, ctx.accumulating, strict=True):
        added = _added(ctx, first, last)
        if any(added):
            here = range(2 + first, 2 + last)
            given = [grads[i] if adds else None for i, adds in zip(here, added, strict=True)]
            left = program.chain.ops[index].accumulate_grads(params, tuple(given))
            for i, adds, grad in zip(here, added, left, strict=True):
                grads[i] = grad if adds else grads[i]
    return grads


def offer_sums(program: Program, taken: Collection[int], ctx: Any, contexts: Contexts) -> None:
    """Let products add to the sums of ops that store gradients themselves, where they are kept.

    Not to ops that share a parameter whose sum is replaced: which gradient comes first is only
    known once all are there.

    Args:
        program: The program.
        taken: The ops whose step gives what an op's backward gives.
        ctx: The autograd function's context.
        contexts: The contexts of the ops.
    """
    for (index, first, last), params in zip(program.accumulating, ctx.accumulating, strict=True):
        total = None
        if index in taken:
            pairs = zip(params, _added(ctx, first, last), strict=True)
            wanted = tuple([param if adds else None for param, adds in pairs])
            if any(param is not None for param in wanted):
                total = program.chain.ops[index].grad_sum(wanted)
        if total is not None and total[1] != 1 and _is_shared(params, ctx.accumulating):
            total = None
        if index in contexts:
            contexts[index].grad_sum = total


def _is_shared(params: Sequence[Any], of_ops: Sequence[Sequence[Any]]) -> bool:
    """Return whether one of an op's parameters is there more than once in those of all ops."""
    every = [id(param) for of_op in of_ops for param in of_op]
    return any(every.count(id(param)) > 1 for param in params)


def _added(ctx: Any, first: int, last: int) -> list[bool]:
    """Return of which parameters this backward adds the gradients to ``.grad``."""
    if is_dynamo_compiling():
        return [True] * (last - first)
    return [_accumulates(edge) for edge in ctx.next_functions[1 + first : 1 + last]]


def _accumulates(edge: tuple[Any, int]) -> bool:
    """Return whether this backward adds to ``.grad``: ``torch.autograd.grad`` does not."""
    try:
        return edge[0] is not None and torch._C._will_engine_execute_node(edge[0])
    except RuntimeError:  # torch.autograd.grad was asked for this very gradient, and returns it
        return False
