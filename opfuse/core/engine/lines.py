"""What the lines of a program call: contexts, saved tensors, extra tensors, results."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from .. import quantization
from ..cast import Cast
from ..op import is_kind, refuse_kind
from ..op_context import OperationContext, alias, summed
from ..quantization import BOTH, QuantizedTensor, Quantizer, Recipe, Usage
from ..quantization.coded_tensor import first_tensor, plain
from ..quantization.formats import rebuild, unpack
from ..quantization.quantizer import same_quantizer
from . import checks
from .blueprint import Blueprint
from .chain import Chain, Slot
from .facts import Recompute, Step

__all__ = ["alias", "first_tensor", "plain", "rebuild", "summed", "unpack"]

Contexts = Mapping[int, Any]
"""The contexts of some ops, by their index."""

_OF_ONE_PASS = (
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


def in_range(title: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """A method in a range that ``torch.profiler`` shows under a title."""

    def ranged(*args: Any, **kwargs: Any) -> Any:
        with torch.profiler.record_function(title):
            return run(*args, **kwargs)

    return ranged


class CastContext(_DeclaredContext):
    """The context of a cast inside of a fused op; made by :func:`contexts` from :func:`of_cast`."""

    __slots__ = ("pass_name", "quantizer", "step", "usage")
    pass_name: str
    step: Step

    def save_for_backward(self, *tensors: Any) -> None:
        """Refuse what a fused op saves for a cast."""
        if tensors:
            what = "gave tensors to save_for_backward of a Cast, which saves nothing"
            who = f"{type(self.step.op).__name__}: fuser_{self.pass_name}"
            raise RuntimeError(f"{who} {what}: they would be lost")


def of_cast(
    step: Step, pass_name: str, quantizer: Quantizer, usage: Usage
) -> tuple[type[Any], dict[str, Any]]:
    """Class and attributes of the context of a cast.

    Args:
        step: The step of the fused op.
        pass_name: The pass.
        quantizer: The quantizer of the cast.
        usage: The copies that it makes.
    """
    own = {"quantizer": quantizer, "usage": usage, "step": step, "pass_name": pass_name}
    return CastContext, vars(OperationContext()) | own


def leftover_attributes(ctx: Any) -> dict[str, Any]:
    """What an op leaves on its context, if it declares nothing."""
    return {name: value for name, value in vars(ctx).items() if name not in _OF_ONE_PASS}


# Results of steps


def forward_result(
    program: Blueprint,
    step: Step,
    counts: Sequence[int],
    used: Sequence[tuple[int, Slot]],
    result: Any,
) -> tuple[Any, list[Any]]:
    """Check the result of ``fuser_forward``.

    Args:
        program: The program.
        step: The step.
        counts: The number of extra outputs of each of its basic ops.
        used: Those that are used outside of the step: the place among all of them, and the slot.
        result: The result.

    Returns:
        The output, and all extra outputs of the step's ops.
    """
    chain, method = program.chain, "fuser_forward"
    is_pair = type(result) is tuple and len(result) == 2
    if not is_pair or not isinstance(result[0], (Tensor, QuantizedTensor)):
        checks.refuse_result(program, step.op, method, result)
    x, outputs = result
    if step.cast_places:
        (outputs,) = without_casts(step, method, x, step.matched[-1], outputs)
    if not step.has_extras:
        return x, []
    if [*map(len, outputs)] != counts:
        checks.refuse_counts(step, outputs, counts, chain, "extra outputs")
    flat = [*itertools.chain.from_iterable(outputs)]
    for number, (i, k) in used:
        if flat[number] is None:
            what = f"gave None for extra output {k} of {chain.name(i)}"
            raise RuntimeError(f"{type(step.op).__name__} {what}, which is used outside of it")
    return x, flat


def backward_result(program: Blueprint, op: Any, index: int, result: Any) -> tuple[Any, Any]:
    """Check the result of ``op_backward``.

    Returns:
        The gradient of the input, and that of each parameter.
    """
    if type(result) is not tuple or len(result) != 2:
        checks.refuse_result(program, op, "op_backward", result)
    return result[0], checks.param_grads(program.chain, index, result[1])


def fused_backward_result(
    program: Blueprint, step: Step, reached: int, counts: Sequence[int], result: Any
) -> tuple[Any, list[Any], list[Any]]:
    """Check the result of ``fuser_backward``.

    Args:
        program: The program.
        step: The step.
        reached: The last op that a gradient reaches.
        counts: The number of extra inputs of each of its basic ops.
        result: The result.

    Returns:
        The gradient of the input; those of all parameters; those of all extra inputs.
    """
    chain, method = program.chain, "fuser_backward"
    if type(result) is not tuple or len(result) != 3:
        checks.refuse_result(program, step.op, method, result)
    dx, of_params, of_extras = result
    if step.cast_places:
        given = dx, step.matched[0], of_params, of_extras
        of_params, of_extras = without_casts(step, method, *given)
    if len(of_params) != step.stop - step.start:
        who, count = type(step.op).__name__, step.stop - step.start
        raise RuntimeError(f"{who} must give parameter gradients for {count} basic ops")
    grads: list[Any] = []
    for i, of_op in enumerate(of_params, step.start):
        first, last = chain.param_ranges[i]
        if i > reached or type(of_op) is not tuple or len(of_op) != last - first:
            of_op = checks.param_grads(chain, i, of_op if i <= reached else None)
        grads += of_op
    if not step.has_extras:
        return dx, grads, []
    if [*map(len, of_extras)] != counts:
        checks.refuse_counts(step, of_extras, counts, chain, "extra-input gradients")
    return dx, grads, [*itertools.chain.from_iterable(of_extras)]


def without_casts(step: Step, method: str, given: Any, op: Any, *results: Any) -> list[Any]:
    """The entries of results for basic ops; those for casts must be empty.

    Args:
        step: The step.
        method: The method that gave the results.
        given: What it computes.
        op: What it ends with: what a cast gives is of that cast.
        *results: The results, with an entry for each op and cast.
    """
    if given is not None and isinstance(op, Cast):
        right = isinstance(given, QuantizedTensor) and (
            given.quantizer is op.quantizer or same_quantizer(given.quantizer, op.quantizer)
        )
        if not right or not ((here := given.usage) == BOTH or here.covers(op.usage)):
            got = repr(given) if isinstance(given, QuantizedTensor) else "a plain tensor"
            what = f"what {type(op.quantizer).__name__} quantizes for {op.usage}"
            who = f"{type(step.op).__name__}: {method} expected to give"
            raise TypeError(f"{who} {what}, since it ends with a Cast; got {got}")
    found = []
    for entries in results:
        if len(entries) == len(step.matched):  # else there are too many, or too few: it is refused
            entries = [*entries]
            for place in step.cast_places:  # from the last on
                entry = entries.pop(place)
                if entry and not all([part is None for part in entry]):
                    what = "gave tensors for a Cast, which has no parameters and no extra tensors"
                    raise RuntimeError(f"{type(step.op).__name__}: {method} {what}")
        found.append(entries)
    return found


def refuse_width(op: Any, width: int, x: Tensor) -> NoReturn:
    """Refuse a tensor of another width."""
    who = f"{type(op).__name__} expected {width} features in the last dimension"
    raise ValueError(f"{who}, got shape {tuple(x.shape)}")


def as_output(recipe: Recipe | None, x: QuantizedTensor) -> Tensor:
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


def checked_kind(chain: Chain, slot: Slot, tensor: Tensor) -> Tensor:
    """What a channel gives to an op; refused if that takes another kind."""
    if not is_kind(kind := chain.kinds[slot], tensor.dtype):
        who = f"extra input {slot[1]} of {chain.name(slot[0])}, out of a channel,"
        refuse_kind(who, kind, tensor.dtype)
    return tensor


def meta_of(x: Any) -> tuple[torch.Size, torch.dtype, torch.device]:
    """Shape, dtype and device of the gradient of a main output."""
    if not isinstance(x, QuantizedTensor):
        return x.shape, x.dtype, x.device
    return x.shape, x.dtype, next(part.device for part in x.tensors() if part is not None)


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


def free_views(outputs: list[Any], others: Sequence[Any]) -> list[Any]:
    """Outputs, those that are views turned into tensors, unless others own their memory.

    PyTorch refuses to write in place into a view that a Function returns. A fused op often returns
    its matrix in the shape of the input, which is such a view; the separate ops do not.
    """
    views = []
    for k, each in enumerate(outputs):
        if type(each) is Tensor and each._is_view():
            views.append(k)
    if views:
        every = [each for each in (*outputs, *others) if isinstance(each, Tensor)]
        # `_memory`, which is not called for each
        owned = [t.untyped_storage()._cdata if t.layout is torch.strided else id(t) for t in every]
        for k in views:
            if owned.count(_memory(each := outputs[k])) == 1:
                outputs[k] = torch.ops.aten._unsafe_view.default(each, each.shape)
    return outputs


def separate_memory(grads: list[Any], given: Tensor | None) -> list[Any]:
    """Gradients of which no two share memory: autograd would keep both as ``.grad``."""
    seen: dict[int, Tensor] = {}
    separate: list[Any] = []
    for grad in (given, *grads):  # a function for the key would be called for each
        if grad is not None:
            strided = grad.layout is torch.strided
            memory = grad.untyped_storage()._cdata if strided else id(grad)
            if seen.setdefault(memory, grad) is not grad:
                grad = grad.clone()
        separate.append(grad)
    return separate[1:]


def _root(tensor: Tensor) -> Tensor | None:
    """The tensor itself, or the one that it is a view of."""
    return tensor._base if tensor._is_view() else tensor


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


def pending_state(contexts: Sequence[Any]) -> list[tuple[Tensor, Tensor]]:
    """The state that the quantizers of some ops record into, and copies of it."""
    quantizers = [quantizer for ctx in contexts for quantizer in ctx.quantizers.values()]
    state = [getattr(q, name) for q in quantizers for name in q.pending_names]
    return [(tensor, tensor.clone()) for tensor in state]


# Inputs that are computed again instead of being kept


def drop_recomputable(cast: Cast | None, ctx: Any, kept: Any) -> tuple[Any, Usage | None]:
    """Drop an input that the step before can compute again.

    For a quantized one the scales are kept, so that the same cast can be repeated.

    Args:
        cast: The cast between them, if it is a step of its own.
        ctx: The context of the first op of that step.
        kept: The input as it was saved.

    Returns:
        What is kept of it, and which copies it had; None: all of it is kept.
    """
    output, ctx.recomputable_output = ctx.recomputable_output, None
    if output is None or not _is_of(kept, output, cast):
        return kept, None
    if isinstance(kept, QuantizedTensor):
        return kept.without_data(), kept.copies
    return None, Usage()


def drop_among(how: Recompute, ctx: Any, kept: Sequence[Any]) -> tuple[Any, Usage | None]:
    """The same for an op of a fused op that has not declared what it keeps: all of it comes."""
    before, rest = kept[: how.place], kept[how.place :]
    entry, dropped = drop_recomputable(how.cast, ctx, rest[0] if rest else None)
    return (*before, entry, *rest[1:]) if rest else kept, dropped


def recompute(how: Recompute, before: Contexts, ctx: Any, usage: Usage) -> None:
    """Restore an input that was not kept.

    Args:
        how: How it is computed again.
        before: The contexts of the ops of the step before.
        ctx: The context of the op that it is the input of.
        usage: The copies that it had.
    """
    shell, ctxs = ctx.saved_tensors[how.place], []
    for i, op in how.step.indexed_ops:
        if isinstance(op, Cast):
            ctxs += contexts([of_cast(how.step, "recompute", op.quantizer, usage)])
            ctxs[-1].saved_tensors = (shell,)
        else:
            ctxs.append(before[i])
    again: Any = how.run(ctxs)
    if how.cast is not None:
        again = how.cast.quantizer.requantize(again, shell, usage)
    saved = [*ctx.saved_tensors]
    saved[how.place] = again.only(usage) if isinstance(shell, QuantizedTensor) else again
    ctx.saved_tensors = tuple(saved)


def _is_of(kept: Any, output: Any, cast: Cast | None) -> bool:
    """Return whether an op saved this very tensor, copies of it, or what a cast makes of it."""
    if not isinstance(kept, QuantizedTensor):
        return kept is output and cast is None
    if cast is not None:
        return same_quantizer(kept.quantizer, cast.quantizer)
    if not isinstance(output, QuantizedTensor):
        return False
    return {*map(id, kept.tensors())} <= {id(None), *map(id, output.tensors())}


# Ops that store the gradients of their parameters themselves


def wanted_params(program: Blueprint, ctx: Any) -> list[list[Any]]:
    """For each op that stores gradients its parameters; None for those that get none here.

    Args:
        program: The program.
        ctx: The autograd function's context.
    """
    return [
        [
            param if _accumulates(edge) else None
            for param, edge in zip(params, ctx.next_functions[1 + first : 1 + last], strict=True)
        ]
        for (_, first, last), params in zip(program.accumulators, ctx.accumulating, strict=True)
    ]


def _accumulates(edge: tuple[Any, int]) -> bool:
    """Return whether this backward adds to ``.grad``: ``torch.autograd.grad`` does not."""
    try:
        return edge[0] is not None and torch._C._will_engine_execute_node(edge[0])
    except RuntimeError:  # torch.autograd.grad was asked for this very gradient, and returns it
        return False


def accumulate(op: Any, wanted: Sequence[Any], params: Any, grads: Sequence[Any]) -> Sequence[Any]:
    """Let an op store gradients itself; return those that it did not store.

    Args:
        op: The op.
        wanted: Its parameters; None for those that get no gradient.
        params: Its parameters.
        grads: Their gradients.
    """
    if all([param is None for param in wanted]):
        return grads
    pairs = [*zip(wanted, grads, strict=True)]
    left = op.accumulate_grads(params, tuple([None if p is None else grad for p, grad in pairs]))
    return [grad if p is None else new for (p, grad), new in zip(pairs, left, strict=True)]
