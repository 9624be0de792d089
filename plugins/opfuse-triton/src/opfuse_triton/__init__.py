"""For authors of plugins with Triton kernels: launch them, record them, pick their tiles.

The rest of opfuse never imports this package, and importing opfuse never imports Triton. A plugin
imports Triton where its kernels are, see the page "Write a Triton kernel"; its conditions ask
``why_no_kernel``, and code that no plan chooses ``kernels_run``: these need no Triton.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .activations import DeviceFunctions as DeviceFunctions
    from .activations import functions_of as functions_of
    from .cases import KernelCase as KernelCase
    from .cases import Operand as Operand
    from .configs import Config as Config
    from .configs import cdiv as cdiv
    from .configs import next_power_of_2 as next_power_of_2
    from .kernels import Kernel as Kernel
    from .launches import Launch as Launch
    from .launches import recording as recording
    from .machine import is_interpreting as is_interpreting
    from .machine import kernels_run as kernels_run
    from .machine import why_no_kernel as why_no_kernel
    from .predicted import Predicted as Predicted
    from .targets import TARGETS as TARGETS
    from .targets import Target as Target
    from .targets import current_target as current_target
    from .targets import target as target

_NAMES = {
    "activations": ("DeviceFunctions", "functions_of"),
    "cases": ("KernelCase", "Operand"),
    "configs": ("Config", "cdiv", "next_power_of_2"),
    "kernels": ("Kernel",),
    "launches": ("Launch", "recording"),
    "machine": ("is_interpreting", "kernels_run", "why_no_kernel"),
    "predicted": ("Predicted",),
    "targets": ("TARGETS", "Target", "current_target", "target"),
}
_WHERE = {name: module for module, names in _NAMES.items() for name in names}
__all__ = sorted(_WHERE)


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'opfuse_triton' has no attribute {name!r}")
    if _WHERE[name] not in ("machine", "predicted") and importlib.util.find_spec("triton") is None:
        what = f"opfuse_triton.{name} needs Triton, which is not installed"
        raise ImportError(f"{what}: on Linux, python -m pip install triton")
    return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_WHERE})
