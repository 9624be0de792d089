"""The Triton kernels and their PyTorch twins. Importing this imports no Triton."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..calls import DTYPES as DTYPES

RMS, LAYER, L2 = "rms", "layer", "l2"
"""The three norms, as the kernels call them."""


class Norm(NamedTuple):
    """A kind of norm.

    Attributes:
        kind: ``RMS``, ``LAYER`` or ``L2``.
        dims: How many of the last dimensions are normalized together.
        zero_centered: The factor is ``1 + weight``.
    """

    kind: str
    dims: int
    zero_centered: bool


MOST_FEATURES = 65536
"""The widest row that the kernels take."""

MOST_ROWS = (1 << 30) - (1 << 14)
"""The most rows that the kernels of norms take: a program counts its rows, and those of a step
further, in 32 bits. Elements are counted in 64.
"""


def normalized_dtype(x: Tensor, extra: Tensor | None, into: Tensor | None = None) -> torch.dtype:
    """The dtype of what is normalized: that of ``x``, of ``x + extra``, or of where the sum goes.

    The gradient of ``x`` with another one added to it has it too.
    """
    if extra is None:
        return x.dtype
    return torch.promote_types(x.dtype, extra.dtype) if into is None else into.dtype
