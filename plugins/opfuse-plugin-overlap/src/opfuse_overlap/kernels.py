"""The collectives and the products that the fused ops consist of.

A collective is started, and waited for later. A product writes into the rows of a result.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from opfuse_distributed.ranks import Group, Pending, gather_into, scatter_into, start_collective
from torch import Tensor

from opfuse.ops import BasicLinear


def gather(group: Group, what: str, whole: Tensor, part: Tensor) -> Pending:
    """Start to fill ``whole`` with the parts of all processes, in rank order."""
    return start_collective(group, what, gather_into, whole, part)


def scatter(group: Group, what: str, part: Tensor, whole: Tensor) -> Pending:
    """Start to fill ``part`` with this process's part of the sum of all ``whole``."""
    return start_collective(group, what, scatter_into, part, whole)


def reduce(group: Group, what: str, tensor: Tensor) -> Pending:
    """Start to replace a tensor by the sum of those of all processes."""
    return start_collective(group, what, dist.all_reduce, tensor)


def largest(group: Group, what: str, tensor: Tensor) -> Tensor:
    """Replace a tensor by the elementwise maximum of those of all processes."""
    if group.size > 1:
        start_collective(group, what, dist.all_reduce, tensor, dist.ReduceOp.MAX).wait()
    return tensor


def product(rows: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """``rows @ weight.T + bias``.

    Args:
        rows: ``(n, in_features)``.
        weight: ``(out_features, in_features)``.
        bias: ``(out_features,)``, or None.
        out: ``(n, out_features)``.
    """
    if bias is None:
        torch.mm(rows, weight.t(), out=out)
    else:
        torch.addmm(bias, rows, weight.t(), out=out)


def grad_of_input(dy: Tensor, weight: Tensor, out: Tensor) -> None:
    """``dy @ weight``.

    Args:
        dy: ``(n, out_features)``.
        weight: As for :func:`product`.
        out: ``(n, in_features)``.
    """
    torch.mm(dy, weight, out=out)


def add_grad_of_input(dy: Tensor, weight: Tensor, out: Tensor) -> None:
    """Add ``dy @ weight``; arguments as for :func:`grad_of_input`."""
    torch.addmm(out, dy, weight, out=out)


def grad_of_weight(ctx: Any, dy: Tensor, x: Tensor) -> Tensor:
    """``dy.T @ x``, added to the sum that takes it, if the context has one.

    Args:
        ctx: The context of the linear in the backward; None: nothing takes it.
        dy: ``(n, out_features)``.
        x: ``(n, in_features)``.
    """
    added = None if ctx is None else BasicLinear.added_grad(ctx, dy, x)
    return dy.t().mm(x) if added is None else added
