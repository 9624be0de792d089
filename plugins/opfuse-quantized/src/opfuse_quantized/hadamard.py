"""The Hadamard transform with random signs, which spreads an outlier over its neighbours.

It is orthogonal: a product that sums over transformed values of both operands is the product of
the values themselves.
"""

from __future__ import annotations

import torch
from torch import Tensor

SIZE = 16
"""The number of neighbours that are mixed."""


def mixed(values: Tensor, signs: int) -> Tensor:
    """Multiply each 16 neighbours by ``diag(signs) @ H / 4``, where ``H`` is Sylvester's matrix.

    The sums are in the dtype of ``values``: of numbers 1 apart, then 2, 4 and 8.

    Args:
        values: Floating point, ``(..., n)``, where ``n`` is a multiple of 16.
        signs: Bit ``i`` says whether the ``i``-th of 16 neighbours is negated first.
    """
    return _sums(values * _signs(values, signs)) * 0.25


def unmixed(values: Tensor, signs: int) -> Tensor:
    """Undo :func:`mixed`: multiply by the transpose of the matrix, which is its inverse.

    Args:
        values: Floating point, ``(..., n)``, where ``n`` is a multiple of 16.
        signs: The signs that were passed to :func:`mixed`.
    """
    return _sums(values) * 0.25 * _signs(values, signs)


def _sums(values: Tensor) -> Tensor:
    groups = values.reshape(-1, SIZE).t().contiguous()  # long rows add faster than short ones
    for apart in (1, 2, 4, 8):
        one, other = groups.view(SIZE // (2 * apart), 2, apart, -1).unbind(1)
        groups = torch.stack([one + other, one - other], 1)
    return groups.view(SIZE, -1).t().reshape(values.shape)


def _signs(values: Tensor, signs: int) -> Tensor:
    """1 or -1 for each value; by arithmetic, since a table would be copied to the device."""
    bit = torch.arange(values.shape[-1], device=values.device) % SIZE
    return (1 - 2 * ((signs >> bit) & 1)).to(values.dtype)
