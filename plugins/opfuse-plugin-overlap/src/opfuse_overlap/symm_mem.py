"""torch's fused products over symmetric memory: ``torch.ops.symm_mem``."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from opfuse_distributed.collectives import AllGather, ReduceScatter
from opfuse_distributed.ranks import take_turn
from torch import Tensor

from opfuse import Environment

from .pieces import Link

_NAMES = "symm_mem::fused_all_gather_matmul", "symm_mem::fused_matmul_reduce_scatter"


def why_not(op: Any, env: Environment) -> str:
    """Why these products do not take a collective, as a sentence; empty: they do.

    Args:
        op: The collective.
        env: Where it would run.
    """
    if not isinstance(op, (AllGather, ReduceScatter)):
        return f"symm_mem has no product with a {type(op).__name__}: overlap.provider='c10d' has"
    if env.recipe is not None:
        who = type(env.recipe).__name__
        return f"symm_mem multiplies plain tensors here, and {who} quantizes them"
    import torch.distributed._symmetric_memory

    key = env.device.type.upper()
    if not all(torch._C._dispatch_has_kernel_for_dispatch_key(name, key) for name in _NAMES):
        return f"torch has the products of symm_mem for CUDA, and this is {env.device.type}"
    return ""


def _name(link: Link) -> str:
    group: Any = link.group.given or dist.group.WORLD
    return str(group.group_name)


def gather_multiply(
    link: Link, part: Tensor, right: Tensor, keep: bool = False
) -> tuple[Tensor, Tensor | None]:
    """The product of the rows of all processes; and these rows, if they are kept.

    Args:
        link: The collectives.
        part: This process's rows.
        right: What they are multiplied by, ``(columns, n)``.
        keep: Whether the gathered rows are wanted.
    """
    if link.size == 1:
        return part.mm(right), part if keep else None
    take_turn(link.group, "a gather by symm_mem", (part,))
    rows, (out,) = torch.ops.symm_mem.fused_all_gather_matmul(
        part.contiguous(), [right], 0, _name(link), return_A=keep
    )
    return out, rows


def multiply_scatter(link: Link, whole: Tensor, right: Tensor) -> Tensor:
    """This process's rows of the sum of all products.

    Args:
        link: The collectives.
        whole: The rows of all processes, of which this process has some columns.
        right: What they are multiplied by, ``(columns, n)``.
    """
    if link.size == 1:
        return whole.mm(right)
    take_turn(link.group, "a scatter by symm_mem", (whole,))
    given = whole.contiguous(), right, "sum", 0, _name(link)
    out: Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(*given)
    return out
