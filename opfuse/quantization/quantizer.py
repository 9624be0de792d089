"""Quantizers and what they make."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor


@dataclasses.dataclass(slots=True, eq=False, repr=False)
class QuantizedTensor:
    """Quantized data and its scale: a plain pair, not a tensor subclass.

    Args:
        data: The quantized values, shape of the original tensor.
        scale: What ``quantizer`` needs to recover the values; its shape is the quantizer's own
            affair.
        quantizer: The quantizer that made it and can undo it.
        dtype: The dtype of the original tensor, which :meth:`dequantize` gives back.

    A recipe with two copies of a tensor (one per GEMM direction) subclasses it, and overrides
    :meth:`tensors`, :meth:`rebuild` and :meth:`dequantize`.
    """

    data: Tensor
    scale: Tensor | None
    quantizer: Quantizer
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        """Shape of the original tensor."""
        return self.data.shape

    def tensors(self) -> tuple[Tensor | None, ...]:
        """Everything to keep for the backward."""
        return self.data, self.scale

    @classmethod
    def rebuild(
        cls, tensors: Sequence[Tensor | None], quantizer: Quantizer, dtype: torch.dtype
    ) -> QuantizedTensor:
        """A quantized tensor over what :meth:`tensors` gave, after it was saved and restored."""
        data, scale = tensors
        assert data is not None
        return cls(data, scale, quantizer, dtype)

    def dequantize(self, *, columnwise: bool = False) -> Tensor:
        """The values as a plain tensor of ``dtype``.

        Args:
            columnwise: Use the copy quantized for a GEMM that reduces over rows, where there is
                one.
        """
        return self.quantizer.dequantize(self)

    def __repr__(self) -> str:
        return f"QuantizedTensor({tuple(self.shape)}, {self.data.dtype} for {self.dtype})"


class Quantizer(ABC):
    """Casts a tensor down, and back.

    Attributes:
        state_names: Names of the tensor attributes that last over steps. They go into the op's
            ``state_dict`` and follow it to another device; update them in place.
    """

    state_names: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def quantize(self, tensor: Tensor) -> QuantizedTensor:
        """Quantize ``tensor``; may update the state."""

    @abstractmethod
    def dequantize(self, quantized: QuantizedTensor) -> Tensor:
        """The plain tensor, of ``quantized.dtype``, that ``quantized`` stands for."""

    def __call__(self, tensor: Tensor | QuantizedTensor) -> QuantizedTensor:
        """Quantize ``tensor`` unless it already is quantized."""
        return tensor if isinstance(tensor, QuantizedTensor) else self.quantize(tensor)


def dequantize(tensor: Tensor | QuantizedTensor, *, columnwise: bool = False) -> Tensor:
    """A plain tensor from a plain or quantized one."""
    return (
        tensor.dequantize(columnwise=columnwise) if isinstance(tensor, QuantizedTensor) else tensor
    )
