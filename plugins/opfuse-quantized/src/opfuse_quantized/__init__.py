"""Weights that are stored quantized, by any recipe.

Users call ``opfuse.quantized_model_init``.
"""

from .model_init import quantized_model_init
from .weight import QuantizedWeight

__all__ = ["QuantizedWeight", "quantized_model_init"]
