"""Real models: chains in place of the forwards of a model's modules.

Users call ``opfuse.convert``. For authors of converters, this package
has the parts of the ordinary converter, and the declarations of the hook ``opfuse_converters``.
"""

from __future__ import annotations

import importlib
from typing import Any

_NAMES = {
    "building": ("NOTHING", "ORDINARY", "by_reading"),
    "converted_forward": ("ConvertedForward",),
    "converter": ("Conversion", "Converter"),
    "converting": ("convert", "converted", "count_convertible", "revert"),
    "holder": ("Held",),
    "layers": ("functions_of", "reaches"),
    "leaves": ("gated", "leaf_of"),
    "report": ("ConversionReport",),
}
"""The names of each module, which is imported at the first use of one."""
_WHERE = {name: module for module, names in _NAMES.items() for name in names}
__all__ = sorted(_WHERE)


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'opfuse_convert' has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
