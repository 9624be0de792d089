"""Quantization as the core sees it.

Recipes are values, quantizers cast, and what they make has one of the documented formats.

The core ships no recipe. A plugin offers recipes through the hook ``opfuse_recipes`` and their
quantizers through ``opfuse_quantizer``.
"""

from .activation import QuantizedActivation
from .formats import QuantizedTensor, Usage
from .parameter import QuantizedParameter
from .quantizer import BOTH, COLUMNWISE, ROWWISE, Quantizer, dequantize, nothing_recorded, unchanged
from .recipe import QuantizerRole, Recipe
from .weights import WeightCache

__all__ = [
    "BOTH",
    "COLUMNWISE",
    "ROWWISE",
    "QuantizedActivation",
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
