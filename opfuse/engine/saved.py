"""What the forward leaves for the backward: saved tensors, attributes, whole contexts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..quantization import QuantizedTensor
from .checks import forward_of, refuse_saved, saved_nothing
from .extras import ForwardExtras
from .program import Program


def take_saved(program: Program, ctxs: Sequence[Any], kept: bool) -> list[Tensor | None]:
    """Take what the ops saved off their contexts; a list of it if there is a backward."""
    saved: list[Tensor | None] = []
    for index, start, stop in program.saved.ranges:
        ctx = ctxs[index]
        to_save, ctx.to_save, ctx.params = ctx.to_save, None, ()
        if ctx.saved_tensors is not None:
            refuse_saved(program, index, ctx)
        if kept:
            if to_save is None or len(to_save) != stop - start:
                to_save = saved_nothing(program, index, stop - start, ctx, to_save)
            saved += to_save
    for index in program.saved.nothing:
        ctx = ctxs[index]
        if ctx.to_save is not None or ctx.saved_tensors is not None:
            refuse_saved(program, index, ctx)
        ctx.params = ()
    return saved


def leave(
    func_ctx: Any,
    program: Program,
    ctxs: Sequence[Any],
    x: Any,
    tensors: Sequence[Tensor],
    saved: list[Tensor | None],
    extras: ForwardExtras | None,
) -> None:
    """Leave what the backward needs on the autograd function's context."""
    if program.leaves_more:
        if program.saved.attributes:
            func_ctx.attributes = _take_attributes(program, ctxs)
        if program.recomputing:
            func_ctx.dropped = _drop_recomputable(program, ctxs, saved)
        if program.saved.undeclared:
            func_ctx.left = _keep_contexts(program, ctxs, saved)
        if extras is not None:
            extras.refuse_overwritten(x, saved)
            func_ctx.shapes = extras.shapes
        if program.accumulating:
            func_ctx.accumulating = [tensors[first:last] for _, first, last in program.accumulating]
    func_ctx.save_for_backward(*saved)
    func_ctx.program = program
    if not program.compiling:
        func_ctx.materialize_grads = False  # what set_materialize_grads does


def restore_more(
    func_ctx: Any, program: Program, ctxs: Sequence[Any], tensors: tuple[Any, ...]
) -> None:
    """Write on the contexts of the backward what few chains leave: attributes, whole contexts."""
    if program.saved.attributes:
        left = zip(program.saved.attributes, func_ctx.attributes, strict=True)
        for (index, name), value in left:
            setattr(ctxs[index], name, value)
    if program.saved.undeclared:
        _restore_contexts(ctxs, func_ctx.left, tensors)


def _take_attributes(program: Program, ctxs: Sequence[Any]) -> list[Any]:
    """Take what the contexts pass on to the backward."""
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
    """Take the contexts of ops that declare nothing, and append what they saved to ``saved``."""
    left: dict[int, Any] = {}
    for index in program.saved.undeclared:
        ctx = left[index] = ctxs[index]
        start = len(saved)
        ctx.saved_quantized = None
        if ctx.to_save is not None:
            if program.recipe is not None and any(
                [isinstance(entry, QuantizedTensor) for entry in ctx.to_save]
            ):
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
                    saved[first]
                    if cls is None
                    else cls.rebuild(saved[first:last], quantizer, dtype)
                    for first, last, cls, quantizer, dtype in ctx.saved_quantized
                ]
            )


def _drop_recomputable(
    program: Program, ctxs: Sequence[Any], saved: list[Tensor | None]
) -> list[int]:
    """Do not keep the inputs that a fused op can compute again; return whose they are."""
    dropped = []
    for index, (_, start, _, place) in program.recomputing.items():
        output, ctxs[start].recomputable_output = ctxs[start].recomputable_output, None
        if output is not None and saved[place] is output:
            saved[place] = None
            dropped.append(index)
    return dropped


def recompute(program: Program, ctxs: Sequence[Any], index: int, dropped: list[int]) -> None:
    """Put an input back that was not kept, after that of the op that computes it."""
    if index not in dropped:
        return
    op, start, place, _ = program.recomputing[index]
    saved = ctxs[index].saved_tensors
    if saved[place] is None:
        recompute(program, ctxs, start, dropped)
        ctxs[index].saved_tensors = (
            *saved[:place],
            op.fuser_recompute(ctxs[start:index]),
            *saved[place + 1 :],
        )


def _save_quantized(entries: Sequence[Any], saved: list[Tensor | None]) -> list[tuple[Any, ...]]:
    """Append the tensors of ``entries`` to ``saved``; return where each is and what rebuilds it."""
    layout: list[tuple[Any, ...]] = []
    for entry in entries:
        if isinstance(entry, QuantizedTensor):
            parts = entry.tensors()
            layout.append(
                (len(saved), len(saved) + len(parts), type(entry), entry.quantizer, entry.dtype)
            )
            saved.extend(parts)
        else:
            layout.append((len(saved), len(saved) + 1, None, None, None))
            saved.append(entry)
    return layout
