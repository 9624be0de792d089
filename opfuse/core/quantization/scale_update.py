"""Advances the state of quantizers: after the outermost block of a forward, and a backward."""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Variable

from ..ranks import Group, RankError
from ..settings import current, is_captured
from .names import matching
from .observer import CALIBRATING
from .parameter import held_by
from .quantizer import Quantizer
from .recipe import Recipe


class PreparedOps:
    """The ops of a prepared model, in its order; dropped, never copied, with an op.

    Attributes:
        agreed: The quantizers that the processes of a group compared last, by recipe, group and
            mode.
    """

    def __init__(self, ops: Iterable[Any] = ()) -> None:
        self._ops = [weakref.ref(op) for op in ops]
        self.agreed: dict[Any, list[str]] = {}

    def __reduce__(self) -> tuple[type[PreparedOps], tuple[()]]:
        return PreparedOps, ()

    def ops(self) -> list[Any]:
        """The ops that still exist."""
        return [op for ref in self._ops if (op := ref()) is not None]


class _Ran:
    """What ran under a recipe.

    Attributes:
        ops: The ops, each with the groups of its chain.
        env: The environment of the last chain.
        skips: The patterns of ops that were left out.
    """

    def __init__(self) -> None:
        self.ops: dict[Any, list[Group]] = {}
        self.env: Any = None
        self.skips: set[tuple[str, ...]] = set()

    def add(self, chain: Any, env: Any, skips: Iterable[tuple[str, ...]]) -> None:
        """Add the ops of a chain."""
        self.ops.update(dict.fromkeys(chain.ops, chain.groups))
        self.env = env
        self.skips.update(skips)


class Block:
    """An outermost :class:`opfuse.autocast` block, and the ops that ran under stateful recipes.

    Args:
        group: The process group over which maxima are taken, or None.
    """

    def __init__(self, group: Any = None) -> None:
        self.group = group
        self.skips: dict[Recipe, set[tuple[str, ...]]] = {}
        self._ran: dict[Recipe, _Ran] = {}
        self._unrestored: dict[Recipe, list[Any]] = {}
        self._calibrating: set[Recipe] = set()
        self._captured = False

    def add(self, recipe: Recipe, chain: Any, env: Any) -> None:
        """Remember the ops of a chain that run with grad mode on, or for calibration.

        Raises:
            RuntimeError: The maxima are taken over a group, and the model is not prepared.
        """
        self.skips.setdefault(recipe, set()).add(current.skip)
        self._ran.setdefault(recipe, _Ran()).add(chain, env, [current.skip])
        self._captured |= current.captured
        if current.observer is not None and current.observer.records:
            self._calibrating.add(recipe)
        for op in chain.ops if self.group is not None else ():
            if not op._prepared.ops():
                raise RuntimeError(
                    f"autocast(amax_reduction_group=...) expected a prepared model, so that all "
                    f"ranks take the maxima of the same quantizers in the same order, got a "
                    f"{type(op).__name__} without: call opfuse.assign_names(model) first"
                )

    def begin(self, recipe: Recipe, ops: Iterable[Any]) -> None:
        """Note that ops run under a recipe, in whatever mode."""
        for op in ops:
            states = op._quantizers
            states.block = self
            if states.unrestored and recipe in states.unrestored:
                states.unrestored.discard(recipe)
                if current.observer is not CALIBRATING:  # which is to find the scales
                    self._unrestored.setdefault(recipe, []).append(op)

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
            if in_backward():
                continue  # a recomputation, which restores the state itself
            records = torch.is_grad_enabled() or recipe in self._calibrating
            if failed or not records:
                for op in of.ops:
                    # nothing was recorded for quantized parameters in this block
                    apart = [param.quantizer for param in held_by(op).values()]
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


class Backward:
    """One run of autograd, and the ops whose gradients it cast under stateful recipes."""

    def __init__(self, task: int) -> None:
        self._task = task
        self._ran: dict[tuple[Recipe, Any], _Ran] = {}

    @staticmethod
    def reached(recipe: Recipe, chain: Any, env: Any) -> None:
        """Remember a chain whose backward runs; the scales of gradients advance at its end."""
        task = torch._C._current_graph_task_id()
        if task == -1:
            return
        now = current.backward
        if now is None or now._task != task:
            now = current.backward = Backward(task)
            Variable._execution_engine.queue_callback(now.end)
        block = chain.ops[0]._quantizers.block
        key = recipe, block and block.group
        skips = block.skips.get(recipe, ()) if block else [()]
        now._ran.setdefault(key, _Ran()).add(chain, env, skips)

    def end(self) -> None:
        """Advance the scales of the gradients."""
        ran, self._ran = self._ran, {}
        for (recipe, group), of in ran.items():
            _advance(recipe, of, group, "backward")


def in_backward() -> bool:
    """Return whether autograd is computing gradients in this thread."""
    return torch._C._current_graph_task_id() != -1


def _advance(recipe: Recipe, ran: _Ran, given: Any, mode: str) -> None:
    """Advance the quantizers of a mode: of the ops that ran, or of all ops of a prepared model.

    Ops that were always skipped are left out. The maxima are taken over the group that was given;
    or for a prepared model over all processes, as in Transformer Engine; or over those that a chain
    is split among, which run it together. A process alone never waits for others.
    """
    together: dict[PreparedOps, list[Any]] = {}  # what an op was prepared with is asked once
    ops: dict[Any, None] = {}
    for op in ran.ops:
        if (prepared := op._prepared) not in together:
            together[prepared] = prepared.ops()
            ops.update(dict.fromkeys(together[prepared]))
        ops[op] = None
    if () not in ran.skips:  # no block without names to skip
        ops = {op: None for op in ops if not all(matching(op.name, skip) for skip in ran.skips)}
    before, current.environment = current.environment, ran.env
    try:
        for op in ops if mode == "forward" else ():
            op._quantizers.use(op, recipe)
    finally:
        current.environment = before
    is_distributed = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    parts: dict[Any, dict[int, tuple[Quantizer, str]]] = {}
    for op in ops:
        group = given
        if given is None and is_distributed:
            group = _group_of(recipe, ran.env.device, together.get(op._prepared), ran.ops.get(op))
        for quantizer in op._quantizers.of_mode(op, recipe, mode):
            if quantizer.pending_names:  # ops may share one
                parts.setdefault(group, {})[id(quantizer)] = quantizer, op.name
    for group, found in parts.items():
        if group is not None and any(together.values()):
            _agree(recipe, group, mode, [name for _, name in found.values()], together)
        with torch.no_grad():
            recipe.update([quantizer for quantizer, _ in found.values()], group)


def _group_of(recipe: Recipe, device: torch.device, prepared: Any, groups: Any) -> Any:
    """The process group over which the maxima of an op are taken, or None.

    Args:
        recipe: The recipe.
        device: The device of its state.
        prepared: The ops of the prepared model that it belongs to, if there are any.
        groups: Those of its chain, if it ran.
    """
    world: Any = dist.group.WORLD
    found = None
    if recipe.reduce_amax:
        if prepared and device.type in [known.type for known in world._device_types]:
            return world
        found = max(groups or (), key=lambda group: group.size, default=None)
    size = 1 if found is None else found.size
    if size < dist.get_world_size():
        _warn_of_rank(recipe, size)
    return found and (found.given or world)


def _agree(
    recipe: Recipe, group: Any, mode: str, names: list[str], together: Mapping[PreparedOps, Any]
) -> None:
    """Compare the quantizers with the other processes of a group, if they are new.

    Raises:
        RankError: They differ, or another process did not come.
    """
    known = next(prepared for prepared, ops in together.items() if ops).agreed
    if known.get((recipe, group, mode)) == names:
        return
    facts = {
        "the chain": f"the update of {type(recipe).__name__} after a {mode}",
        "what it is called with": {"quantizers": len(names)},
        "the ops with quantizers": {str(i): name for i, name in enumerate(names)},
    }
    if (talk := Group(group).talk) is not None:
        try:
            talk.compare(facts)
        except RankError as error:
            raise RankError(
                f"the maxima of {recipe} are taken over all processes that run a prepared model, "
                f"unless autocast(amax_reduction_group=...) names those that run the same: {error}"
            ) from None
    known[recipe, group, mode] = names


def _warn_unrestored(recipe: Recipe, ops: list[Any]) -> None:
    """Warn that state starts from its defaults although a checkpoint was loaded."""
    names = [*dict.fromkeys(op.name or type(op).__name__ for op in ops)]
    text, *loaded = ops[0]._quantizers.describe_loaded(recipe)
    of_others = f"for {' and '.join(loaded)}, which waits, and " if loaded else ""
    more = f" and {len(names) - 9} more" if len(names) > 9 else ""
    warnings.warn(
        f"the checkpoint has quantizer state {of_others}none for the recipe in force, {text}: it "
        f"was not loaded into {', '.join(names[:9])}{more}. New state starts from its defaults. "
        f"A target of torch.distributed.checkpoint must have it before: call "
        f"opfuse.assign_names(model, recipe=...) first",
        stacklevel=3,
    )


@functools.cache
def _warn_of_rank(recipe: Recipe, size: int) -> None:
    """Warn once that a checkpoint has the state of only some processes."""
    who = "this process alone" if size == 1 else f"{size} processes"
    warnings.warn(
        f"the state of {recipe} follows from what {who} saw, and a checkpoint that one process "
        f"writes has that of no other: call opfuse.assign_names(model), so that the maxima are "
        f"taken over all processes, or give autocast(amax_reduction_group=...)",
        stacklevel=2,
    )
