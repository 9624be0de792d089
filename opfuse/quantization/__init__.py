"""Quantization as the core sees it.

Recipes are values, quantizers cast, and quantized tensors are plain pairs.

The core ships no recipe. A plugin offers recipes through the hook ``opfuse_recipes`` and their
quantizers through ``opfuse_quantizer``.
"""

from .quantizer import QuantizedTensor, Quantizer, dequantize
from .recipe import QuantizerRole, Recipe

__all__ = ["QuantizedTensor", "Quantizer", "QuantizerRole", "Recipe", "dequantize"]
