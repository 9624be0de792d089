"""The kernels' arithmetic, in PyTorch's operations.

They run where a kernel does not take a call, and the tests compare the kernels with them. They
take any device, any layout, subclasses of Tensor, and fp64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import L2, LAYER, Norm, normalized_dtype
from .drop import Drop, dropout

Forward = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]
"""The results of a forward: output, sum, mean and rstd."""
Backward = tuple[Tensor | None, Tensor | None, Tensor | None]
"""The results of a backward: the gradients of the input, the weight and the bias."""


def forward(
    x: Tensor,
    extra: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    norm: Norm,
    dtype: torch.dtype | None,
    keep: bool,
    save: bool,
    into: Tensor | None = None,
    drop: Drop | None = None,
) -> Forward:
    """The norm of ``x``, or of ``x + extra`` rounded to its dtype; formulas: :mod:`opfuse.ops`.

    Args:
        x: The input, ``(*rows, *features)``.
        extra: A tensor of the same shape that is added to it.
        weight: The factor of the normalized values, of shape ``features``.
        bias: A summand after that, of the same shape.
        eps: Added under the root.
        norm: The norm.
        dtype: The dtype of the output; None: that of what is normalized.
        keep: Return the sum, too.
        save: Return the statistics, too.
        into: The memory of ``extra``, for the sum; None: a new tensor.
        drop: What is dropped from ``x`` first; None: nothing.

    Returns:
        The output; the sum; the mean of each row, for ``LAYER``; and ``rstd``, what a row is
        multiplied by. Both are in fp32 (fp64 for fp64), of shape ``(*rows, 1, ...)``. None for what
        is missing or not wanted.
    """
    total = None
    if drop is not None:
        x = dropout(x, None, drop)
    if extra is not None:
        x = total = x + extra if into is None else into.add_(x)
    wide, axes = _wide(x.dtype), tuple(range(-norm.dims, 0))
    n, mean = x.to(wide), None
    if norm.kind == LAYER:
        mean = n.mean(axes, keepdim=True)
        n = n - mean
    square = n.square()
    square = square.sum(axes, True) if norm.kind == L2 else square.mean(axes, True)
    rstd = torch.rsqrt(square + eps)
    y = n * rstd
    if weight is not None:
        y = y * _scale(weight, wide, norm)
    if bias is not None:
        y = y + bias.to(wide)
    return (
        y.to(dtype or x.dtype),
        total if keep else None,
        *((mean, rstd) if save else (None, None)),
    )


def backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    extra: Tensor | None,
    norm: Norm,
    needs: tuple[bool, bool, bool],
    owns: bool = False,
) -> Backward:
    """The gradients of a norm, with ``g = dy weight`` and ``n`` the normalized input.

    ``RMS``: ``dx = rstd (g - n mean(g n))``; ``LAYER``: the same less ``rstd mean(g)``; ``L2``:
    ``dx = rstd (dy - n sum(dy n))``. Then ``dw = sum(dy n)`` and ``db = sum(dy)`` over the rows.

    Args:
        dy: The gradient of the output, in its shape.
        x: The input that was normalized.
        weight: As for :func:`forward`; it may be None where ``dx`` is not wanted.
        mean: As :func:`forward` gave it.
        rstd: Likewise.
        extra: Another gradient of ``x``, which is added to ``dx``.
        norm: The norm.
        needs: Which gradients are wanted: of the input, of the weight, of the bias.
        owns: Whether ``dx`` may be written into the memory of ``dy``; here it is not.

    Returns:
        ``dx``, in the dtype of ``x`` promoted with that of ``extra``; ``dw``, in the dtype of the
        weight or in that of ``rstd``; ``db``, in that of ``rstd``. None for what is not wanted.
    """
    axes, rows = tuple(range(-norm.dims, 0)), tuple(range(x.ndim - norm.dims))
    n = x.to(rstd.dtype) if mean is None else x.to(rstd.dtype) - mean
    n, dy, dx = n * rstd, dy.to(rstd.dtype), None
    if needs[0]:
        g = dy if weight is None else dy * _scale(weight, rstd.dtype, norm)
        product = (g * n).sum(axes, True) if norm.kind == L2 else (g * n).mean(axes, True)
        dx = g - n * product
        if norm.kind == LAYER:
            dx = dx - g.mean(axes, keepdim=True)
        dx = rstd * dx
        dx = dx.to(x.dtype) if extra is None else (dx + extra).to(normalized_dtype(x, extra))
    dw, db = dy * n if needs[1] else None, dy if needs[2] else None
    # a sum over no dimension would be one over all
    sums = [None if of is None else of.sum(rows) if rows else of.clone() for of in (dw, db)]
    return dx, sums[0], sums[1]


def again(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    norm: Norm,
    dtype: torch.dtype | None,
) -> Tensor:
    """The output of :func:`forward` once more: ``(x - mean) rstd weight + bias``.

    Args:
        x: The input that was normalized.
        weight: As for :func:`forward`.
        bias: Likewise.
        mean: As :func:`forward` gave it.
        rstd: Likewise.
        norm: The norm.
        dtype: The dtype of the output; None: that of ``x``.
    """
    y = x.to(rstd.dtype) if mean is None else x.to(rstd.dtype) - mean
    y = y * rstd
    if weight is not None:
        y = y * _scale(weight, rstd.dtype, norm)
    if bias is not None:
        y = y + bias.to(rstd.dtype)
    return y.to(dtype or x.dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


def _scale(weight: Tensor, dtype: torch.dtype, norm: Norm) -> Tensor:
    return weight.to(dtype) + 1 if norm.zero_centered else weight.to(dtype)
