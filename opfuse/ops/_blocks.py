"""Blocks of rows that fit a core's cache, for formulas of several steps on a CPU."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..core.overwriting import may_write
from .arithmetic import wide, widened

BLOCK = 1 << 17
"""The number of values in a block.

A few temporaries in fp32 fit a cache, and a call in Python is a small part of it.
"""

LEAST = 1 << 18
"""The number of values from which blocks pay off."""


def in_blocks(x: Tensor, *others: Tensor) -> bool:
    """Return whether to compute by blocks: for a large, dense tensor on a CPU, in an eager pass.

    ``others`` must be dense too.
    """
    # the size last: a trace has none
    if not x.is_cpu or torch.is_grad_enabled() or not may_write(x) or x.numel() <= LEAST:
        return False
    return x.ndim > 1 and all([tensor.is_contiguous() for tensor in (x, *others)])


def blocks(x: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Blocks of rows of tensors with equally many rows."""
    tensors = [tensor.view(-1, tensor.shape[-1]) for tensor in (x, *others)]
    rows = max(1, BLOCK // x.shape[-1])
    return zip(*[torch.split(tensor, rows) for tensor in tensors], strict=True)


def memory(count: int, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Memory for so many blocks of a tensor in a dtype; each block is written over the last one.

    New memory for each block would cost more than a cast, since the system clears its pages.
    """
    rows = min(x.shape[:-1].numel(), max(1, BLOCK // x.shape[-1]))
    return x.new_empty((count, rows, x.shape[-1]), dtype=dtype).unbind()


def scaled_by_blocks(
    x: Tensor, scale: Tensor | None, eps: float, count: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """``x rstd scale``, and ``rstd = 1 / sqrt(sum(x^2) / count + eps)``, by blocks of rows."""
    wider = wide(x.dtype)
    y, rstd = torch.empty_like(x, dtype=dtype), x.new_empty((*x.shape[:-1], 1), dtype=wider)
    values, squares = memory(2, x, wider)
    for of_x, rows, of_rstd in blocks(x, y, rstd):
        here = slice(len(of_x))
        of_x = widened(of_x, values[here])
        mean = torch.mul(of_x, of_x, out=squares[here]).sum(-1, keepdim=True).div_(count)
        normalized = torch.mul(of_x, torch.rsqrt(mean.add_(eps), out=of_rstd), out=values[here])
        rows.copy_(normalized if scale is None else normalized.mul_(scale))
    return y, rstd


def gradients_by_blocks(
    dy: Tensor, x: Tensor, rstd: Tensor, scale: Tensor | None, count: int, wants: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """The wanted gradients of ``x`` and ``scale`` in :func:`scaled_by_blocks`, by blocks."""
    needs_x, needs_weight = wants
    dx, dw = torch.empty_like(x) if needs_x else None, None
    gradients, values, products = memory(3, x, rstd.dtype)
    for rows, g, of_x, of_rstd in blocks(x if dx is None else dx, dy, x, rstd):
        here = slice(len(of_x))
        g = widened(g, gradients[here])
        normalized = torch.mul(widened(of_x, values[here]), of_rstd, out=values[here])
        product = torch.mul(g, normalized, out=products[here])
        if needs_weight:
            dw = product.sum(0) if dw is None else dw.add_(product.sum(0))
        if dx is None:
            continue
        if scale is not None:
            product.mul_(scale)
            g = torch.mul(g, scale, out=gradients[here])
        mean = product.sum(-1, keepdim=True).div_(-count)
        torch.addcmul(g, normalized, mean, out=product).mul_(of_rstd)
        rows.copy_(product)
    return dx, dw
