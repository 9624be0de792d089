"""Casts that no plan chose, as of a weight: by the kernels where they run."""

from __future__ import annotations

from torch import Tensor

from opfuse.core.quantization import QuantizedTensor

from . import conditions
from .twins import Into


def cast(tensor: Tensor, into: Into) -> QuantizedTensor | None:
    """:func:`opfuse_fp8.library.cast`; None: no kernel makes this cast.

    Args:
        tensor: The values.
        into: The quantizer, and what it makes.
    """
    if not conditions.by_kernels(tensor, into.quantizer):
        return None
    from . import library  # this imports Triton

    return library.cast(tensor, into)
