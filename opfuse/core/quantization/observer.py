"""Observers of the tensors that a recipe quantizes, which wrap the recipe's quantizers."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .formats import QuantizedTensor, Usage
from .quantizer import ROWWISE, Quantizer, unchanged


class Observer:
    """Observes each tensor that a recipe quantizes, with quantizers that wrap the recipe's.

    This one is for ``autocast(calibrating=True)``: nothing is quantized, but the recipe's
    quantizers record what they would see.

    Attributes:
        records: Whether quantizers record with grad mode off, too.
    """

    records = True

    def wrap(self, quantizer: Quantizer, op: Any, tensor: str) -> Quantizer:
        """The quantizer that replaces a quantizer of an op."""
        return CalibratingQuantizer(quantizer)


CALIBRATING = Observer()


class CalibratingQuantizer(Quantizer):
    """Lets another quantizer record each tensor, and casts nothing.

    Args:
        quantizer: The other quantizer.
    """

    quantizes = False

    def __init__(self, quantizer: Quantizer) -> None:
        self._recording = self._inner = quantizer
        self.pending_names = quantizer.pending_names  # type: ignore[misc]

    def quantize(
        self, tensor: Tensor, usage: Usage, out: QuantizedTensor | None = None
    ) -> QuantizedTensor:
        """Record the tensor, and return it unchanged."""
        if self.pending_names:
            self._inner.quantize(tensor, ROWWISE)
        return unchanged(tensor, usage, self)

    def requantize(self, tensor: Tensor, scales: QuantizedTensor, usage: Usage) -> QuantizedTensor:
        """Return the tensor unchanged."""
        return unchanged(tensor, usage, self)

    def unrecorded(self) -> Quantizer:
        """Itself: calibration records with grad mode off too."""
        return self

    def describe(self) -> str:
        """That it is not quantized, and the format it would have."""
        return f"not quantized; calibrates {self._inner.describe()}"
