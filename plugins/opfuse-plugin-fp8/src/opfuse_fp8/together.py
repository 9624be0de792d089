"""The codes of several weights as rows of one tensor, which one product then reads as they are.

The core has each weight cast by itself, so the rows wait here for the kernels that write codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

waiting: ContextVar[side_by_side | None] = ContextVar("opfuse_fp8_rows", default=None)
"""The rows that wait for codes; None: codes go anywhere."""


class side_by_side:
    """Within the context, kernels write the rowwise codes of some weights into one tensor.

    Memory is taken for the first of them.

    Args:
        quantizers: Those of the weights, in the order of the rows.
        sizes: How many rows each weight has.
    """

    def __init__(self, quantizers: Sequence[Any], sizes: Sequence[int]) -> None:
        self._quantizers, self._sizes = list(quantizers), sizes
        self._parts: Sequence[Tensor] = ()

    def __enter__(self) -> None:
        self._token = waiting.set(self)

    def __exit__(self, *exc_info: object) -> None:
        waiting.reset(self._token)

    def take(self, quantizer: Any, shape: torch.Size, device: torch.device) -> Tensor | None:
        """Memory for the codes that a quantizer's kernel writes, as bytes, once; None: any.

        Args:
            quantizer: The quantizer.
            shape: The shape of the codes.
            device: Their device.
        """
        if quantizer not in self._quantizers:
            return None
        place = self._quantizers.index(quantizer)
        if shape[:-1] != (self._sizes[place],):
            return None
        self._quantizers[place] = None
        if not self._parts:
            whole = torch.empty((sum(self._sizes), shape[-1]), dtype=torch.uint8, device=device)
            self._parts = torch.split_with_sizes(whole, self._sizes)
        part = self._parts[place]
        return part if (part.shape, part.device) == (shape, device) else None


def as_one(tensors: Sequence[Tensor]) -> Tensor | None:
    """Matrices as one, if each begins where the one before ends in the same memory; or None."""
    first, *others = tensors
    if is_compiling() or type(first) is not Tensor or not first.is_contiguous():
        return None
    end, memory = first.storage_offset() + first.numel(), first.untyped_storage()._cdata
    for tensor in others:
        if type(tensor) is not Tensor or not tensor.is_contiguous():
            return None
        if tensor.storage_offset() != end or tensor.untyped_storage()._cdata != memory:
            return None
        if (tensor.dtype, tensor.shape[1]) != (first.dtype, first.shape[1]):
            return None
        end += tensor.numel()
    return first.as_strided((sum([len(t) for t in tensors]), first.shape[1]), first.stride())
