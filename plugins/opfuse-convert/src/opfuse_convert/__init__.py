"""Real models: chains in place of the forwards of a model's modules.

Users call ``opfuse.convert`` and ``opfuse.plan_memory``. For authors of converters, this package
has the parts of the ordinary converter, and the declarations of the hook ``opfuse_converters``.
"""

from __future__ import annotations

import importlib
from typing import Any

_WHERE = {
    "Held": "holder",
    "NOTHING": "building",
    "ORDINARY": "building",
    "Conversion": "converter",
    "ConversionReport": "report",
    "ConvertedForward": "converted_forward",
    "Converter": "converter",
    "MemoryPlan": "memory.plan",
    "by_reading": "building",
    "convert": "converting",
    "converted": "converting",
    "count_convertible": "converting",
    "functions_of": "layers",
    "gated": "leaves",
    "leaf_of": "leaves",
    "plan_memory": "memory.planning",
    "reaches": "layers",
    "revert": "converting",
}
"""The module of each name, imported at first use."""
__all__ = sorted(_WHERE)


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'opfuse_convert' has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
