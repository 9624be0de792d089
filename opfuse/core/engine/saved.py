"""Passes state from forward to backward: saved tensors, attributes, whole contexts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..cast import Cast
from ..quantization import QuantizedTensor, Usage
from ..quantization.quantizer import same_quantizer
from .checks import forward_of, refuse_saved, saved_nothing
from .program import Program
from .side_tensors import ForwardExtras, unbound
from .step_calls import WithCasts


def leave(
    func_ctx: Any,
    program: Program,
    ctxs: Sequence[Any],
    x: Any,
    tensors: Sequence[Tensor],
    extras: ForwardExtras | None,
) -> Any:
    """Move what the ops saved from their contexts to the backward, if there is one.

    Args:
        func_ctx: The autograd function's context, or None.
        program: The program that ran.
        ctxs: The contexts of its forward.
        x: The chain's output.
        tensors: The chain's input, then the parameters, then the extra inputs.
        extras: The extra tensors of the pass, or None.

    Returns:
        The output; see :func:`opfuse.core.engine.side_tensors.unbound`.
    """
    saved: list[Any] = []
    for index, start, stop in program.saved.ranges:
        ctx = ctxs[index]
        to_save, ctx.to_save, ctx.params = ctx.to_save, None, ()
        if ctx.saved_tensors is not None:
            refuse_saved(program, index, ctx)
        if func_ctx is not None:
            if to_save is None or len(to_save) != stop - start:
                to_save = saved_nothing(program, index, stop - start, ctx, to_save)
            saved += to_save
    for index in program.saved.nothing:
        ctx = ctxs[index]
        if ctx.to_save is not None or ctx.saved_tensors is not None:
            refuse_saved(program, index, ctx)
        ctx.params = ()
    if func_ctx is None:
        return x
    if program.leaves_more:
        _leave_more(func_ctx, program, ctxs, tensors[1:], saved)
    if program.saves_quantized:
        func_ctx.quantized = _unpacked(saved)
    if extras is not None:
        extras.refuse_overwritten(x, saved)
        func_ctx.shapes = extras.shapes
    func_ctx.save_for_backward(*saved)
    func_ctx.program = program
    if program.compiling:
        return x
    func_ctx.materialize_grads = False  # as set_materialize_grads does
    if extras is not None and program.chain.public_outputs:
        return extras.unbound(x, (*tensors, *saved))
    return unbound([x], (*tensors, *saved))[0] if x._is_view() else x


def _leave_more(
    func_ctx: Any,
    program: Program,
    ctxs: Sequence[Any],
    tensors: Sequence[Tensor],
    saved: list[Tensor | None],
) -> None:
    """Pass on the state that few chains have in addition to saved tensors."""
    if program.saved.attributes:
        func_ctx.attributes = _take_attributes(program, ctxs)
    if program.recomputing:
        func_ctx.dropped = _drop_recomputable(program, ctxs, saved)
    if program.saved.undeclared:
        func_ctx.left = _keep_contexts(program, ctxs, saved)
    if program.accumulating:
        func_ctx.accumulating = [tensors[first:last] for _, first, last in program.accumulating]
    if program.watcher is not None:
        found = {i: saved[start:stop] for i, start, stop in program.saved.ranges}
        found |= {i: saved[slice(*ctxs[i].saved_range)] for i in program.saved.undeclared}
        program.watcher(program, found)


def restore_more(
    func_ctx: Any, program: Program, ctxs: Sequence[Any], tensors: tuple[Any, ...]
) -> None:
    """Set the rarer state on the contexts of the backward: attributes, whole contexts."""
    if program.saved.attributes:
        left = zip(program.saved.attributes, func_ctx.attributes, strict=True)
        for (index, name), value in left:
            setattr(ctxs[index], name, value)
    if program.saved.undeclared:
        for index, ctx in func_ctx.left.items():
            vars(ctxs[index]).update(vars(ctx))
            ctxs[index].saved_tensors = tensors[slice(*ctx.saved_range)]


def _take_attributes(program: Program, ctxs: Sequence[Any]) -> list[Any]:
    """Take the attributes that the contexts pass on to the backward."""
    values = []
    for index, name in program.saved.attributes:
        try:
            values.append(getattr(ctxs[index], name))
        except AttributeError:
            what = f"{program.chain.name(index)} declares the context attribute {name!r}"
            raise RuntimeError(
                f"{what}, but the forward of {forward_of(program, index)} did not leave it"
            ) from None
        delattr(ctxs[index], name)
    return values


def _keep_contexts(
    program: Program, ctxs: Sequence[Any], saved: list[Tensor | None]
) -> dict[int, Any]:
    """Take the contexts of ops that declare nothing, and append their tensors to ``saved``."""
    left: dict[int, Any] = {}
    for index in program.saved.undeclared:
        ctx = left[index] = ctxs[index]
        start = len(saved)
        if ctx.to_save is not None:
            saved += ctx.to_save
            ctx.to_save = None
        ctx.params = ()
        ctx.saved_range = (start, len(saved))
    return left


def _drop_recomputable(
    program: Program, ctxs: Sequence[Any], saved: list[Tensor | None]
) -> dict[int, Usage]:
    """Drop the inputs that a fused op can compute again.

    For a quantized one the scales are kept, so that the same cast can be repeated.

    Returns:
        The ops that they belong to, and which copies each had.
    """
    dropped = {}
    for index, how in program.recomputing.items():
        output, ctxs[how.start].recomputable_output = ctxs[how.start].recomputable_output, None
        kept: Any = saved[how.position]
        if output is None or not _is_of(kept, output, how.cast):
            continue
        quantized = isinstance(kept, QuantizedTensor)
        dropped[index] = kept.copies if quantized else Usage()
        saved[how.position] = kept.without_data() if quantized else None
    return dropped


def recompute(program: Program, ctxs: Sequence[Any], index: int, dropped: dict[int, Usage]) -> None:
    """Restore an input that was not kept, after the input of the op that computes it."""
    if index not in dropped:
        return
    how = program.recomputing[index]
    saved: tuple[Any, ...] = ctxs[index].saved_tensors
    shell, usage = saved[how.place], dropped[index]
    quantized = isinstance(shell, QuantizedTensor)
    if shell is None or (quantized and not any(shell.copies)):
        recompute(program, ctxs, how.start, dropped)
        given = {"scales": shell, "usage": usage} if isinstance(how.run, WithCasts) else {}
        again = how.run(ctxs[how.start : index], **given)
        if how.cast is not None:
            again = how.cast.quantizer.requantize(again, shell, usage)
        if quantized:
            again = again.only(usage)
        ctxs[index].saved_tensors = (*saved[: how.place], again, *saved[how.place + 1 :])


# Quantized tensors among saved ones: their parts as plain tensors, which autograd can keep


def _is_of(kept: Any, output: Any, cast: Cast | None) -> bool:
    """Return whether an op saved this very tensor, copies of it, or what a cast makes of it."""
    if not isinstance(kept, QuantizedTensor):
        return kept is output and cast is None
    if cast is not None:
        return same_quantizer(kept.quantizer, cast.quantizer)
    if not isinstance(output, QuantizedTensor):
        return False
    return {*map(id, kept.tensors())} <= {id(None), *map(id, output.tensors())}


def _unpacked(saved: list[Any]) -> list[tuple[int, QuantizedTensor, int, int]]:
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


def rebuilt(
    saved: tuple[Any, ...], quantized: Sequence[tuple[int, QuantizedTensor, int, int]]
) -> tuple[Any, ...]:
    """Undo :func:`_unpacked`."""
    entries = list(saved)
    for place, shell, first, last in quantized:
        entries[place] = shell.over(saved[first:last])
    return tuple(entries)
