"""The maxima of a recipe's quantizers over the processes of a group."""

from __future__ import annotations

import functools
import json
import warnings
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from opfuse.core.quantization import Recipe
from opfuse.recipes.scale_update import Update

from .agreement import groups_of
from .ranks import Group

_turns: WeakKeyDictionary[Any, dict[Any, tuple[Group, Any]]] = WeakKeyDictionary()


def by_groups(run: Callable[..., None]) -> Callable[[Update], None]:
    """Wrap an update of quantizers: each group advances its own, after its processes agreed.

    The maxima are taken over the group that was given; or for a prepared model over all processes,
    as in Transformer Engine; or over those that a chain is split among, which run it together. A
    process alone never waits for others.
    """

    def run_by_groups(update: Update) -> None:
        if update.group is None and _is_alone():
            return run(update)
        parts: dict[Any, list[tuple[Any, Any]]] = {}
        for quantizer, op in update.quantizers:
            group = update.group or _group_of(update, op)
            parts.setdefault(group, []).append((quantizer, op))
        for group, found in parts.items():
            part = update._replace(quantizers=found)
            if group is None:
                run(part)
                continue
            with Group(group).comparing_once("update"):
                _agree(part, group)
                run(part, group)

    return run_by_groups


def _agree(update: Update, group: Any) -> None:
    """Take the turn of an update in a group, see :meth:`opfuse_distributed.ranks.Talk.take_turn`.

    Raises:
        RankError: Another process does something else, failed, or did not come.
    """
    models = [*update.prepared]
    prepared = next((model for model in models if update.prepared[model]), models[0])
    turns = _turns.setdefault(prepared, {})
    names = [op.name for _, op in update.quantizers]
    if (key := (update.recipe, group, update.mode, *names)) not in turns:
        facts = {
            "the model whose maxima they take together (autocast(amax_reduction_group=...) "
            "names those that run the same)": {str(i): name for i, name in enumerate(names)}
        }
        name = f"the update of {update.recipe} after a {update.mode}", "", "", 0
        turns[key] = Group(group), (name, (json.dumps(facts), ()))
    of, turn = turns[key]
    if (talk := of.talk) is not None:
        talk.take_turn(of, turn)


def _is_alone() -> bool:
    """Whether there is no other process."""
    return not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1


def _group_of(update: Update, op: Any) -> Any:
    """The process group over which the maxima of an op are taken if none is given, or None."""
    if _is_alone():
        return None
    world: Any = dist.group.WORLD
    found = None
    if update.recipe.reduce_amax:
        devices = [device.type for device in world._device_types]
        if update.prepared.get(op._prepared) and update.env.device.type in devices:
            return world
        chain = update.chains.get(op)
        groups = groups_of(chain) if chain is not None else ()
        found = max(groups, key=lambda group: group.size, default=None)
    if found is None or found.size < dist.get_world_size():
        _warn_of_rank(update.recipe)
    return found and (found.given or world)


@functools.cache
def _warn_of_rank(recipe: Recipe) -> None:
    """Warn once that a checkpoint has the state of only some processes."""
    warnings.warn(
        f"the state of {recipe} follows from what not all processes saw, and a checkpoint has that "
        f"of the process that writes it: call opfuse.assign_names(model), so that the maxima are "
        f"taken over all processes, or give autocast(amax_reduction_group=...)",
        stacklevel=2,
    )
