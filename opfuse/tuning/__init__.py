"""Measures fusions on this machine, and writes what it found into the tables that plans read.

Not imported by opfuse itself, but for the tool :mod:`opfuse.tuning.tool`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .measuring import tune
    from .report import Result, TuningReport

__all__ = ["Result", "TuningReport", "tune"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'opfuse.tuning' has no attribute {name!r}")
    module = ".measuring" if name == "tune" else ".report"
    return getattr(importlib.import_module(module, __name__), name)
