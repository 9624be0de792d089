"""Shared by recipes: formats with a scale for each block, tensors over codes, a look at each cast.

Users call ``opfuse.quantized_model_init`` and ``opfuse.watch_quantization``. Authors of a recipe,
or of a kernel that reads its tensors, find the formats in :mod:`opfuse_quantized.formats`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .activation import QuantizedActivation as QuantizedActivation
    from .model_init import quantized_model_init as quantized_model_init
    from .watching import watch_quantization as watch_quantization
    from .weight import QuantizedWeight as QuantizedWeight

_WHERE = {
    "QuantizedActivation": "activation",
    "QuantizedWeight": "weight",
    "quantized_model_init": "model_init",
    "watch_quantization": "watching",
}
"""Importing only the formats does not import the rest."""
__all__ = sorted(_WHERE)


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'opfuse_quantized' has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_WHERE})
