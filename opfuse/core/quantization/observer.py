"""Who sees the tensors that a recipe quantizes, by quantizers in front of the recipe's."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .formats import QuantizedTensor, Usage
from .quantizer import ROWWISE, Quantizer, unchanged


class Observer:
    """Sees each tensor that a recipe quantizes, by quantizers of its own in front of the recipe's.

    This one is for ``autocast(calibrating=True)``: nothing is quantized, and what the recipe's
    quantizers would see they record.

    Attributes:
        records: Whether quantizers record with grad mode off, too.
    """

    records = True

    def wrap(self, quantizer: Quantizer, op: Any, tensor: str) -> Quantizer:
        """What stands for a quantizer of an op."""
        return CalibratingQuantizer(quantizer)


CALIBRATING = Observer()


class CalibratingQuantizer(Quantizer):
    """Shows another quantizer each tensor, so that it records what it sees, and casts nothing.

    Args:
        quantizer: The other one.
    """

    quantizes = False

    def __init__(self, quantizer: Quantizer) -> None:
        self._recording = self._inner = quantizer
        self.pending_names = quantizer.pending_names  # type: ignore[misc]

    def quantize(
        self, tensor: Tensor, usage: Usage, out: QuantizedTensor | None = None
    ) -> QuantizedTensor:
        """See :meth:`Quantizer.quantize`."""
        if self.pending_names:
            self._inner.quantize(tensor, ROWWISE)
        return unchanged(tensor, usage, self)

    def requantize(self, tensor: Tensor, scales: QuantizedTensor, usage: Usage) -> QuantizedTensor:
        """See :meth:`Quantizer.requantize`."""
        return unchanged(tensor, usage, self)

    def unrecorded(self) -> Quantizer:
        """Itself: to calibrate is to record, with grad mode off too."""
        return self

    def describe(self) -> str:
        """Not quantized, and what it would be."""
        return f"not quantized; calibrates {self._inner.describe()}"
