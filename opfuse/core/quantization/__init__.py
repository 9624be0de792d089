"""Quantization as the core sees it.

Recipes are values, quantizers cast, and what they make has one of the documented formats.

The core ships no recipe. A plugin offers recipes through the hook ``opfuse_recipes`` and their
quantizers through ``opfuse_quantizer``.
"""

import sys
from typing import Any

from .coded_tensor import CodedTensor, QuantizedParameter
from .formats import BOTH, QuantizedTensor, Usage
from .quantizer import (
    COLUMNWISE,
    ROWWISE,
    Quantizer,
    QuantizerRole,
    Recipe,
    dequantize,
    nothing_recorded,
    unchanged,
)
from .weights import WeightCache

__all__ = [
    "BOTH",
    "COLUMNWISE",
    "ROWWISE",
    "CodedTensor",
    "QuantizedParameter",
    "QuantizedTensor",
    "Quantizer",
    "QuantizerRole",
    "Recipe",
    "Usage",
    "WeightCache",
    "dequantize",
    "nothing_recorded",
    "unchanged",
]


def __getattr__(name: str) -> Any:
    """The class of what leaves a chain quantized, which another package gives to ``opfuse``."""
    if name != "QuantizedActivation":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(sys.modules["opfuse"], name)
