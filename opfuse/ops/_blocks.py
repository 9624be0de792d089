"""Blocks of rows that fit a core's cache, for formulas of several steps on a CPU."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..core.overwriting import may_write
from .arithmetic import wide

BLOCK = 1 << 18
"""The number of values in a block.

A few temporaries in fp32 fit a cache, and a call in Python is a small part of it.
"""

LEAST = 1 << 19
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


def scaled_by_blocks(
    x: Tensor, scale: Tensor | None, eps: float, count: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """``x rstd scale``, and ``rstd = 1 / sqrt(sum(x^2) / count + eps)``, by blocks of rows."""
    wider = wide(x.dtype)
    y, rstd = torch.empty_like(x, dtype=dtype), x.new_empty((*x.shape[:-1], 1), dtype=wider)
    for of_x, rows, of_rstd in blocks(x, y, rstd):
        of_x = of_x.to(wider)
        torch.rsqrt(of_x.square().sum(-1, keepdim=True).div_(count).add_(eps), out=of_rstd)
        if scale is None:
            torch.mul(of_x, of_rstd, out=rows)
        else:
            torch.mul(of_x * of_rstd, scale, out=rows)
    return y, rstd


def gradients_by_blocks(
    dy: Tensor, x: Tensor, rstd: Tensor, scale: Tensor | None, count: int, wants: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """The wanted gradients of ``x`` and ``scale`` in :func:`scaled_by_blocks`, by blocks."""
    needs_x, needs_weight = wants
    dx, dw, wider = torch.empty_like(x) if needs_x else None, None, rstd.dtype
    for rows, g, of_x, of_rstd in blocks(x if dx is None else dx, dy, x, rstd):
        normalized, g = of_x.to(wider).mul(of_rstd), g.to(wider)
        product = g * normalized
        if needs_weight:
            dw = product.sum(0) if dw is None else dw.add_(product.sum(0))
        if dx is None:
            continue
        if scale is not None:
            product, g = product.mul_(scale), g * scale
        mean = product.sum(-1, keepdim=True).div_(-count)
        torch.mul(torch.addcmul(g, normalized, mean), of_rstd, out=rows)
    return dx, dw
