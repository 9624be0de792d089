"""Norms of which groups of rows have a factor and a summand of their own, in PyTorch's operations.

They run where a kernel does not take a call, and the tests compare the kernels with them. The
factor and the summand have any shapes that broadcast to the input's, and the dtype of the sums.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from opfuse.ops.arithmetic import added, multiplied

from . import LAYER, Norm

Forward = tuple[Tensor, Tensor | None, Tensor | None]
"""The results of a forward: output, mean and rstd."""
Gradients = tuple[Tensor, Tensor | None, Tensor | None]
"""The results of a backward: the gradients of the input, the factor and the summand."""
Shape = Sequence[int]


def groups_of(shape: Shape, *others: Shape) -> tuple[int, ...]:
    """The leading dimensions of an input that select a factor and a summand.

    The rows of each index in them follow one another, and share both.

    Args:
        shape: The shape of the input.
        *others: Those of the factor and the summand, which broadcast to it.
    """
    lead = 0
    for other in others:
        sizes = [*[1] * (len(shape) - len(other)), *other][:-1]
        lead = max([lead, *[place + 1 for place, size in enumerate(sizes) if size != 1]])
    return tuple(shape[:lead])


def forward(
    x: Tensor,
    factor: Tensor,
    summand: Tensor,
    eps: float,
    norm: Norm,
    dtype: torch.dtype,
    save: bool,
) -> Forward:
    """``normalized(x) * factor + summand``.

    Args:
        x: The input, ``(*rows, features)``.
        factor: The factor.
        summand: The summand.
        eps: Added under the root.
        norm: The norm, ``RMS`` or ``LAYER``, of the last dimension.
        dtype: The dtype of the output.
        save: Return the statistics, too.

    Returns:
        The output, and the mean (for ``LAYER``) and ``rstd`` of each row, of shape ``(*rows, 1)``.
    """
    wide, mean = x.to(factor.dtype), None
    if norm.kind == LAYER:
        n, mean, rstd = torch.native_layer_norm(wide, x.shape[-1:], None, None, eps)
    else:
        rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        n = wide * rstd
    y = added(multiplied(n, factor), summand).to(dtype)
    return (y, mean, rstd) if save else (y, None, None)


def backward(
    dy: Tensor,
    x: Tensor,
    factor: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    norm: Norm,
    of_factor: Shape | None,
    of_summand: Shape | None,
    owns: bool = False,
) -> Gradients:
    """The gradients, with ``g = dy factor`` and ``n`` the normalized input.

    ``dx = rstd (g - n mean(g n))``, for ``LAYER`` less ``rstd mean(g)``. Those of factor and
    summand are the sums of ``dy n`` and ``dy`` over what these were broadcast to.

    Args:
        dy: The gradient of the output.
        x: The input.
        factor: The factor.
        mean: As :func:`forward` gave it.
        rstd: Likewise.
        norm: The norm.
        of_factor: The shape of the gradient of the factor; None: it is not wanted.
        of_summand: The shape of the gradient of the summand; None: it is not wanted.
        owns: Whether the gradient of the input may be written over ``dy``; here it is not.
    """
    dy, n = dy.to(factor.dtype), x.to(factor.dtype)
    n = multiplied(n - mean if mean is not None else n.clone(), rstd)
    g = dy * factor
    dx = g - n * (g * n).mean(-1, keepdim=True)
    if norm.kind == LAYER:
        dx = added(dx, g.mean(-1, keepdim=True), -1.0)
    dx = multiplied(dx, rstd).to(x.dtype)
    dfactor = None if of_factor is None else multiplied(n, dy).sum_to_size(of_factor)
    return dx, dfactor, None if of_summand is None else dy.sum_to_size(of_summand)


def again(
    x: Tensor, factor: Tensor, summand: Tensor, mean: Tensor | None, rstd: Tensor,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """The output of :func:`forward` once more, from its statistics.

    Args:
        x: As there, and all others.
        factor: See ``x``.
        summand: See ``x``.
        mean: See ``x``.
        rstd: See ``x``.
        dtype: See ``x``.
    """
    n = x.to(factor.dtype)
    n = multiplied(n - mean if mean is not None else n.clone(), rstd)
    return added(multiplied(n, factor), summand).to(dtype)


def rows_in_groups(x: Tensor, groups: Shape) -> int:
    """The number of rows that share a factor and a summand."""
    return x.numel() // (math.prod(groups) * x.shape[-1])
