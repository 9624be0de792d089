"""Checks that the ranks of a process group fuse alike."""

from __future__ import annotations

from typing import Any

from torch import distributed as dist

from opfuse.core.plugins import manager
from opfuse.tuning.causes import causes, first_difference

from .ranks import Group, RankError


def check_ranks(group: dist.ProcessGroup | None = None) -> None:
    """Check that this process fuses the same as the other ranks of a group.

    Ranks that fuse differently still compute the same up to rounding, but not the same bits, and
    not in the same time. A chain with collectives compares what it runs by itself; this is for
    groups around chains, such as those of DDP and FSDP. The check compares the versions of torch
    and of the plugins in use, the selection, the options, the tuning tables, and the plans of
    chains that both have run. Every rank of the group must call it.

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
        own: dict[str, Any] = {**causes(), "the plans": _plans()}
    except Exception as error:  # all ranks must learn of it
        own = {"failed": f"{type(error).__name__}: {error}"}
    facts = Group(group).exchange({"what runs": "opfuse.check_ranks", **own})
    for rank, of_rank in zip(ranks, facts, strict=True):
        if "failed" in of_rank:
            raise RuntimeError(f"check_ranks on rank {rank}: {of_rank['failed']}")
    for rank, of_rank in zip(ranks[1:], facts[1:], strict=True):
        both = facts[0]["the plans"].keys() & of_rank["the plans"].keys()  # what both have run
        named = [{name: of[name] for name in own} for of in (facts[0], of_rank)]
        pair = [{**of, "the plans": {key: of["the plans"][key] for key in both}} for of in named]
        if difference := first_difference(*pair):
            raise RankError(f"rank {ranks[0]} and rank {rank} differ in {difference}")


def _plans() -> dict[str, list[str]]:
    """The newest plans of the living fusers, by chain and by what each was made for."""
    found: dict[str, set[str]] = {}
    for fuser in list(manager.fusers):
        newest = {}
        for key, (_, programs) in list(fuser._programs.items()):
            made_for = key._replace(device=key.device.type, generation=0, changes=0)
            for rows, program in programs.items():
                newest[f"{program.chain.title}, for {(*made_for, rows)}"] = program.plan
        for name, plan in newest.items():
            found.setdefault(name, set()).add(f"{plan.digest()} {plan}")
    return {name: sorted(plans) for name, plans in sorted(found.items())}
