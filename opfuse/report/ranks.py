"""Checks that the ranks of a process group fuse alike."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import distributed as dist

from ..core import tuning_table as tables
from ..core.engine.program import Program
from ..core.plugins import manager
from ..core.settings import current


def check_ranks(group: dist.ProcessGroup | None = None) -> None:
    """Check that this process fuses the same as the other ranks of a group.

    Ranks that fuse differently still compute the same up to rounding, but not the same bits, and
    not in the same time. The check compares the versions of torch and of the plugins in use, the
    selection, the options, the tuning tables, and the plans of chains that both have run. Every
    rank of the group must call it.

    Args:
        group: The process group; None: all ranks.

    Raises:
        RuntimeError: They differ; it is raised on every rank and names the first difference. Or
            ``torch.distributed`` is not initialized.
    """
    if not dist.is_initialized():
        raise RuntimeError("check_ranks: torch.distributed is not initialized")
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    try:
        own = _facts()
    except Exception as error:  # all ranks must learn of it
        own = {"failed": f"{type(error).__name__}: {error}"}
    facts = _gathered(own, group)
    for rank, of_rank in zip(ranks, facts, strict=True):
        if "failed" in of_rank:
            raise RuntimeError(f"check_ranks on rank {rank}: {of_rank['failed']}")
    for rank, of_rank in zip(ranks[1:], facts[1:], strict=True):
        for what, mine in facts[0].items():
            other = of_rank[what]
            if what == "the plans":  # of what both have run
                both = mine.keys() & other.keys()
                mine, other = ({key: plans[key] for key in both} for plans in (mine, other))
            if other != mine:
                difference = _difference(mine, other)
                raise RuntimeError(
                    f"rank {ranks[0]} and rank {rank} differ in {what}: {difference}"
                )


def _facts() -> dict[str, Any]:
    """The facts that ranks must agree on, as JSON-able data; causes come before effects."""
    active = manager.active(current.selection)
    devices = [torch.device("cpu")]
    if torch.cuda.is_available():
        devices.append(torch.device("cuda", torch.cuda.current_device()))
    return {
        "torch": torch.__version__,
        "the plugins": {record.distribution: record.version for record in active},
        "the selection of plugins": current.selection,
        "the options": {name: repr(value) for name, value in current.options},
        "the tuning tables": {
            device.type: tables.table_for(device).digest or "none" for device in devices
        },
        "the plans": _plans(),
    }


def _plans() -> dict[str, list[str]]:
    """The newest plans of the living fusers, by chain and by what each was made for."""
    found: dict[str, set[str]] = {}
    for fuser in list(manager.fusers):
        newest = {}
        for key, (_, programs) in list(fuser._programs.items()):
            made_for = key._replace(device=key.device.type, generation=0, changes=0)
            for rows, program in programs.items():
                if isinstance(program, Program):
                    newest[f"{program.chain.title}, for {(*made_for, rows)}"] = program.plan
        for name, plan in newest.items():
            found.setdefault(name, set()).add(f"{plan.digest()} {plan}")
    return {name: sorted(plans) for name, plans in sorted(found.items())}


def _difference(one: Any, other: Any) -> str:
    """The first difference between the facts of two ranks."""
    if not isinstance(one, dict):
        return f"{one!r} against {other!r}"
    key = min(key for key in {*one, *other} if one.get(key) != other.get(key))
    sides = [" ".join(str(facts.get(key, "none")).split()) for facts in (one, other)]
    return f"{key}: {sides[0]} against {sides[1]}"


def _gathered(facts: dict[str, Any], group: dist.ProcessGroup | None) -> list[dict[str, Any]]:
    """The facts of every rank, sent as text: ``all_gather_object`` needs NumPy."""
    device = torch.device("cpu")
    if "nccl" in dist.get_backend(group):
        device = torch.device("cuda", torch.cuda.current_device())
    text = json.dumps(facts).encode()
    longest = torch.tensor([len(text)], device=device)
    dist.all_reduce(longest, dist.ReduceOp.MAX, group)
    padded = torch.frombuffer(bytearray(text.ljust(int(longest))), dtype=torch.uint8).to(device)
    texts = [torch.empty_like(padded) for _ in range(dist.get_world_size(group))]
    dist.all_gather(texts, padded, group)
    return [json.loads(bytes(each.tolist())) for each in texts]
