"""The products, in PyTorch's operations."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


def rows_of(tensor: Tensor) -> Tensor:
    """``(..., n)`` with one row dimension, ``(rows, n)``; a view where there can be one."""
    return tensor if tensor.ndim == 2 else tensor.unsqueeze(0).flatten(0, -2)


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x @ weight.T + bias``: ``(..., n)`` times ``(m, n)``, in the dtype of ``x``."""
    return F.linear(x, weight, None if bias is None else bias.to(x.dtype))


def grad_of_weight(dy: Tensor, x: Tensor) -> Tensor:
    """``dy.T @ x``: of ``(rows, m)`` and ``(rows, n)``, the gradient ``(m, n)`` of a weight."""
    return dy.t().mm(x)
