"""Advances the state of quantizers at the end of the outermost block of a forward."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch

from ..settings import current, is_captured
from .names import matching
from .parameter import held_by
from .quantizer import Quantizer
from .recipe import Recipe


class PreparedOps:
    """The ops of a prepared model, in its order; dropped, never copied, with an op."""

    def __init__(self, ops: Iterable[Any] = ()) -> None:
        self._ops = [weakref.ref(op) for op in ops]

    def __reduce__(self) -> tuple[type[PreparedOps], tuple[()]]:
        return PreparedOps, ()

    def ops(self) -> list[Any]:
        """The ops that still exist."""
        return [op for ref in self._ops if (op := ref()) is not None]


class Block:
    """An outermost :class:`opfuse.autocast` block, and the ops that ran under stateful recipes.

    Args:
        group: The process group over which maxima are taken, or None.
    """

    def __init__(self, group: Any = None) -> None:
        self.group = group
        self._ran: dict[Recipe, tuple[dict[Any, None], Any]] = {}
        self._skips: dict[Recipe, set[tuple[str, ...]]] = {}
        self._calibrating: set[Recipe] = set()
        self._captured = False

    def add(self, recipe: Recipe, ops: Iterable[Any], env: Any) -> None:
        """Remember the ops that run with grad mode on, or for calibration.

        Raises:
            RuntimeError: The maxima are taken over a group, and the model is not prepared.
        """
        ran, _ = self._ran.setdefault(recipe, ({}, env))
        self._captured |= current.captured
        self._skips.setdefault(recipe, set()).add(current.skip)
        if current.observer is not None and current.observer.records:
            self._calibrating.add(recipe)
        for op in ops:
            if self.group is not None and not op._prepared.ops():
                raise RuntimeError(
                    f"autocast(amax_reduction_group=...) expected a prepared model, so that all "
                    f"ranks take the maxima of the same quantizers in the same order, got a "
                    f"{type(op).__name__} without: call opfuse.assign_names(model) first"
                )
            ran[op] = None

    def end(self, *, failed: bool) -> None:
        """Advance the state of the ops that ran, or discard their records.

        It does not advance after an exception, nor with grad mode off unless the block calibrates.

        Raises:
            RuntimeError: A CUDA graph captured a forward and not this, which no replay would do.
        """
        for recipe, (ran, env) in self._ran.items():
            if in_backward():
                continue  # a recomputation, which restores the state itself
            records = torch.is_grad_enabled() or recipe in self._calibrating
            if failed or not records:
                for op in ran:
                    # nothing was recorded for quantized parameters in this block
                    apart = [param.quantizer for param in held_by(op).values()]
                    for quantizer in op._quantizers.of_forward(op, recipe):
                        if all(quantizer is not one for one in apart):
                            quantizer.discard()
            elif self._captured and not is_captured(env.device):
                raise RuntimeError(
                    f"the scales of {recipe} advance at the end of opfuse.autocast, and a CUDA "
                    f"graph captured a forward without that end: they would stay as they are in "
                    f"every replay; enter autocast inside of what is captured"
                )
            else:
                quantizers = _quantizers(recipe, ran, env, self._skips[recipe])
                with torch.no_grad():
                    recipe.update(quantizers, self.group)


def in_backward() -> bool:
    """Return whether autograd is computing gradients in this thread."""
    return torch._C._current_graph_task_id() != -1


def _quantizers(
    recipe: Recipe, ran: Iterable[Any], env: Any, skips: set[tuple[str, ...]]
) -> list[Quantizer]:
    """The quantizers with pending state of the ops that ran, or of all ops of a prepared model.

    Ops that were always skipped are left out.
    """
    together: dict[PreparedOps, list[Any]] = {}  # what an op was prepared with is asked once
    ops: dict[Any, None] = {}
    for op in ran:
        if (prepared := op._prepared) not in together:
            together[prepared] = prepared.ops()
            ops.update(dict.fromkeys(together[prepared]))
        ops[op] = None
    if () not in skips:  # no block without names to skip
        ops = {op: None for op in ops if not all(matching(op.name, skip) for skip in skips)}
    before, current.environment = current.environment, env
    try:
        used = [quantizer for op in ops for quantizer in op._quantizers.use(op, recipe).values()]
    finally:
        current.environment = before
    found = {id(quantizer): quantizer for quantizer in used}  # ops may share
    return [quantizer for quantizer in found.values() if quantizer.pending_names]
