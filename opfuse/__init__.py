"""opfuse: fuse chains of PyTorch operations, forward and backward, with every fusion a plugin."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

from . import ops
from .core import plugins
from .core.context_managers import autocast, checkpoint_contexts, options
from .core.engine.fuser import OperationFuser
from .core.engine.plan import FusionPlan
from .core.environment import Environment
from .core.errors import LockError, PluginWarning, TuningWarning
from .core.fused_op import FusedOperation
from .core.fusible import FusibleOperation
from .core.fusion import Fusion, OneOf, OneOrMore, Optional, Subclasses
from .core.hookspecs import hookimpl
from .core.introspection import has_same_math
from .core.op import BasicOperation
from .core.op_context import OperationContext
from .core.plugins import (
    register_backward_fusion,
    register_forward_backward_fusion,
    register_forward_fusion,
)
from .core.quantization import Quantizer, QuantizerRole, Recipe
from .core.sequential import Sequential

if TYPE_CHECKING:
    from .core.assign_names import assign_names
    from .core.lock import freeze
    from .report.explain import explain
    from .report.ranks import check_ranks
    from .tuning import tune

__version__ = "0.1.0"

# fmt: off
__all__ = [
    "BasicOperation",
    "Environment",
    "FusedOperation",
    "FusibleOperation",
    "Fusion",
    "FusionPlan",
    "LockError",
    "OneOf",
    "OneOrMore",
    "OperationContext",
    "OperationFuser",
    "Optional",
    "PluginWarning",
    "Quantizer",
    "QuantizerRole",
    "Recipe",
    "Sequential",
    "Subclasses",
    "TuningWarning",
    "assign_names",
    "autocast",
    "check_ranks",
    "checkpoint_contexts",
    "explain",
    "freeze",
    "has_same_math",
    "hookimpl",
    "ops",
    "options",
    "plugins",
    "register_backward_fusion",
    "register_forward_backward_fusion",
    "register_forward_fusion",
    "tune",
]
# fmt: on

_AT_FIRST_USE = {  # those of other packages are not in __all__: they need not be installed
    "assign_names": "opfuse.core.assign_names",
    "check_ranks": "opfuse.report.ranks",
    "convert": "opfuse_convert",
    "converted": "opfuse_convert",
    "explain": "opfuse.report.explain",
    "freeze": "opfuse.core.lock",
    "plan_memory": "opfuse_convert",
    "quantized_model_init": "opfuse_quantized",
    "revert": "opfuse_convert",
    "tune": "opfuse.tuning",
    "watch_quantization": "opfuse_quantized",
}


def __getattr__(name: str) -> Any:
    if name in ("report", "testing", "tuning"):
        return importlib.import_module(f"opfuse.{name}")
    if name not in _AT_FIRST_USE:
        raise AttributeError(f"module 'opfuse' has no attribute {name!r}")
    try:
        module = importlib.import_module(_AT_FIRST_USE[name])
    except ModuleNotFoundError as error:
        if error.name != _AT_FIRST_USE[name] or error.name.startswith("opfuse."):
            raise
        package = error.name.replace("_", "-")
        what = f"opfuse.{name} needs the package {package}, which is not installed"
        raise ImportError(f"{what}: python -m pip install {package}") from None
    value = globals()[name] = getattr(module, name)
    return value


def __dir__() -> list[str]:
    names = [
        name
        for name, where in _AT_FIRST_USE.items()
        if where.startswith("opfuse.") or importlib.util.find_spec(where) is not None
    ]
    return sorted({*globals(), *names, "report", "testing", "tuning"})


plugins.manager.discover()  # reads metadata, imports no plugin
