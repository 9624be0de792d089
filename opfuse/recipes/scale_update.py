"""Advances the state of quantizers: after the outermost block of a forward, and a backward."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd import Variable

from ..core.quantization.coded_tensor import quantized_parameters
from ..core.quantization.names import first_match
from ..core.quantization.quantizer import CALIBRATING, Quantizer, Recipe
from ..core.quantization.state import PreparedOps
from ..core.settings import current, is_captured
from ..core.tools import Wrapped, require

current_task = torch._C._current_graph_task_id
"""The number of the run of autograd that computes gradients in this thread, or ``NO_TASK``."""

NO_TASK = -1


class Pass(NamedTuple):
    """A pass of a chain under a recipe, as its plan knows it.

    Attributes:
        recipe: The recipe.
        chain: The chain.
        env: The environment of the plan.
        quantizers: Those that record what the pass casts, by op. An op is missing if the recipe
            skips it, or if it has quantized parameters, which bring their quantizers.
    """

    recipe: Recipe
    chain: Any
    env: Any
    quantizers: Mapping[Any, Sequence[Quantizer]]

    @classmethod
    def of(cls, program: Any, mode: str) -> Pass:
        """That of a program which is being made."""
        chain, recipe, skip = program.chain, program.recipe, current.skip
        known = [
            op for op in chain.ops if not (quantized_parameters(op) or first_match(op.name, skip))
        ]
        return cls(recipe, chain, program.env, {op: _recording(op, recipe, mode) for op in known})


_pending = operator.attrgetter("pending_names")


def _recording(op: Any, recipe: Recipe, mode: str) -> Sequence[Quantizer]:
    return [*filter(_pending, op._quantizers.of_mode(op, recipe, mode))]


class _Ran(NamedTuple):
    """What ran under a recipe.

    Attributes:
        ops: The ops, each with its chain.
        quantizers: See :class:`Pass`.
        skips: The patterns of ops that were left out.
        env: The environment of the first chain.
    """

    ops: dict[Any, Any]
    quantizers: dict[Any, Sequence[Quantizer]]
    skips: set[tuple[str, ...]]
    env: Any

    def add(self, part: Pass, skip: tuple[str, ...]) -> None:
        """Add the ops of a chain."""
        self.ops.update(dict.fromkeys(part.chain.ops, part.chain))
        self.quantizers.update(part.quantizers)
        self.skips.add(skip)


class Block:
    """An outermost :class:`opfuse.autocast` block, and the ops that ran under stateful recipes.

    Args:
        group: The process group over which maxima are taken, or None.
    """

    def __init__(self, group: Any = None) -> None:
        self.group = group
        self._ran: dict[Recipe, _Ran] = {}
        self._unrestored: dict[Recipe, list[Any]] = {}
        self._calibrating: set[Recipe] = set()
        self._captured = False

    def begin(self, part: Pass, records: bool) -> None:
        """Note that a chain runs under a recipe, and whether its state advances.

        Raises:
            RuntimeError: The maxima are taken over a group, and the model is not prepared.
        """
        recipe, ops = part.recipe, part.chain.ops
        skip, observer = current.values.skip, current.values.observer
        for op in ops:
            states = op._quantizers
            states.called = self, skip
            if states.unrestored and recipe in states.unrestored:
                states.unrestored.discard(recipe)
                if observer is not CALIBRATING:  # which is to find the scales
                    self._unrestored.setdefault(recipe, []).append(op)
        if not records:  # grad mode is off, and nothing is calibrated
            return
        self._ran.setdefault(recipe, _Ran({}, {}, set(), part.env)).add(part, skip)
        self._captured |= current.is_capturing
        if observer is not None and observer.records:
            self._calibrating.add(recipe)
        for op in ops if self.group is not None else ():
            if not op._prepared.ops():
                raise RuntimeError(
                    f"autocast(amax_reduction_group=...) expected a prepared model, so that all "
                    f"ranks take the maxima of the same quantizers in the same order, got a "
                    f"{type(op).__name__} without: call opfuse.assign_names(model) first"
                )

    def begin_backward(self, part: Pass) -> None:
        """Note that the backward of a chain runs, whose scales advance at the end of autograd."""
        task = current_task()
        if current.autograd_run is None or current.autograd_run.task != task:
            current.autograd_run = AutogradRun(task)
            Variable._execution_engine.queue_callback(current.autograd_run.end)
        _, skip = part.chain.ops[0]._quantizers.called
        ran = current.autograd_run.ran
        ran.setdefault((part.recipe, self.group), _Ran({}, {}, set(), part.env)).add(part, skip)

    def end(self, *, failed: bool) -> None:
        """Advance the state of the ops that ran, or discard their records.

        It does not advance after an exception, nor with grad mode off unless the block calibrates.

        Raises:
            RuntimeError: A CUDA graph captured a forward and not this, which no replay would do.
        """
        ran, self._ran = self._ran, {}
        for recipe, ops in self._unrestored.items():
            _warn_unrestored(recipe, ops)
        for recipe, of in ran.items():
            if current_task() != NO_TASK:
                continue  # a recomputation, which restores the state itself
            if failed or not (torch.is_grad_enabled() or recipe in self._calibrating):
                for op in of.ops:
                    # nothing was recorded for quantized parameters in this block
                    params = quantized_parameters(op).values()
                    apart = [param.quantized.quantizer for param in params]
                    for quantizer in op._quantizers.of_mode(op, recipe, "forward"):
                        if all(quantizer is not one for one in apart):
                            quantizer.discard()
            elif self._captured and not is_captured(of.env.device):
                raise RuntimeError(
                    f"the scales of {recipe} advance at the end of opfuse.autocast, and a CUDA "
                    f"graph captured a forward without that end: they would stay as they are in "
                    f"every replay; enter autocast inside of what is captured"
                )
            else:
                _advance(recipe, of, self.group, "forward")


class AutogradRun:
    """One run of autograd, and the ops whose gradients it casts under stateful recipes.

    Attributes:
        task: Its number in torch.
        ran: What ran, by the recipe and the group of the block of the forward.
    """

    def __init__(self, task: int) -> None:
        self.task = task
        self.ran: dict[tuple[Recipe, Any], _Ran] = {}

    def end(self) -> None:
        """Advance the scales of the gradients."""
        ran, self.ran = self.ran, {}
        for (recipe, group), of in ran.items():
            _advance(recipe, of, group, "backward")


def begin_backward(part: Pass) -> None:
    """Tell the block in which a chain ran that its backward runs, under a recipe with state."""
    if current_task() != NO_TASK:  # its function may be called by itself
        block, _ = part.chain.ops[0]._quantizers.called
        (block or Block()).begin_backward(part)


class Update(NamedTuple):
    """The quantizers that advance at once.

    Attributes:
        recipe: Their recipe.
        mode: ``"forward"`` or ``"backward"``: of the values that they have seen.
        group: The process group over which the maxima are taken, as the user gave it, or None.
        quantizers: Each with its op, those of a prepared model in its order.
        chains: The chain in which an op ran.
        prepared: The ops of each prepared model, by what its ops share.
        env: The environment of the first chain.
    """

    recipe: Recipe
    mode: str
    group: Any
    quantizers: Sequence[tuple[Quantizer, Any]]
    chains: Mapping[Any, Any]
    prepared: Mapping[Any, Sequence[Any]]
    env: Any


def _advance(recipe: Recipe, ran: _Ran, group: Any, mode: str) -> None:
    """Advance the quantizers of a mode: of the ops that ran, or of all ops of a prepared model.

    Ops that were always skipped are left out.
    """
    prepared: dict[PreparedOps, list[Any]] = {}  # what an op was prepared with is asked once
    ops: dict[Any, None] = {}
    for op in ran.ops:
        if op._prepared not in prepared:
            prepared[op._prepared] = op._prepared.ops()
            ops.update(dict.fromkeys(prepared[op._prepared]))
        ops[op] = None
    if () not in ran.skips:  # no block without names to skip
        ops = {op: None for op in ops if not all(first_match(op.name, skip) for skip in ran.skips)}
    found: dict[int, tuple[Quantizer, Any]] = {}
    for op in ops:
        quantizers, states = ran.quantizers.get(op), op._quantizers
        if quantizers is None and (states.own or states._by_recipe.get(recipe, True)):
            if mode == "forward" and (states.borrows or recipe not in states._by_recipe):
                states.use(op, recipe, ran.env)
            quantizers = _recording(op, recipe, mode)
        for quantizer in quantizers or ():  # ops may share one
            found[id(quantizer)] = quantizer, op
    if found:
        given = recipe, mode, group, [*found.values()], ran.ops, prepared, ran.env
        _wrapped_update(Update(*given))


def _update(update: Update, group: Any = None) -> None:
    """Advance quantizers, over the maxima of a group.

    Args:
        update: The quantizers, and what they ran in.
        group: The process group; None: this process alone.
    """
    world = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    if update.group is not None or (world and update.recipe.reduce_amax):
        who = f"{update.recipe} on several processes"
        require("distributed", who, current.selection)
    with torch.no_grad():
        update.recipe.update([quantizer for quantizer, _ in update.quantizers], group)


_wrapped_update = Wrapped("opfuse_wrap_update", _update)


def _warn_unrestored(recipe: Recipe, ops: list[Any]) -> None:
    """Warn that state was not in the checkpoint that was loaded, naming the ops."""
    names = [*dict.fromkeys(op.name or type(op).__name__ for op in ops)]
    states = ops[0]._quantizers
    loaded = " and ".join(sorted(states._loaded))
    others = f"has quantizer state for {loaded}, and none" if loaded else "has none"
    more = f" and {len(names) - 9} more" if len(names) > 9 else ""
    warnings.warn(
        f"the checkpoint that was loaded, or the chain before, {others} for the recipe in force, "
        f"{states._text(recipe)}: none was restored in {', '.join(names[:9])}{more}. There scales "
        f"that were in use stay as they were, and new ones start over. What "
        f"torch.distributed.checkpoint loads into must have it before: call "
        f"opfuse.assign_names(model, recipe=...) first",
        stacklevel=3,
    )
