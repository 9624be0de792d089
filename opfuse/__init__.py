"""opfuse: fuse chains of PyTorch operations, forward and backward, with every fusion a plugin."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from . import ops
from .core import plugins
from .core.engine.fuser import OperationFuser
from .core.engine.plan import FusionPlan
from .core.environment import Environment
from .core.errors import CallRefusedError, PluginWarning
from .core.fused_op import FusedOperation
from .core.fusible import FusibleOperation
from .core.fusion import Fusion, OneOf, OneOrMore, Optional, Subclasses
from .core.hookspecs import hookimpl
from .core.introspection import has_same_math
from .core.op import BasicOperation
from .core.op_context import OperationContext
from .core.options import options
from .core.plugins import (
    register_backward_fusion,
    register_forward_backward_fusion,
    register_forward_fusion,
)
from .core.quantization import Quantizer, QuantizerRole, Recipe
from .core.sequential import Sequential
from .recipes.autocast import autocast
from .recipes.checkpoint import checkpoint_contexts

if TYPE_CHECKING:
    from .report.assign_names import assign_names
    from .report.explain import explain
    from .tuning import tune
    from .tuning.table import TuningWarning

__version__ = "0.1.0"

# fmt: off
__all__ = [
    "BasicOperation",
    "CallRefusedError",
    "Environment",
    "FusedOperation",
    "FusibleOperation",
    "Fusion",
    "FusionPlan",
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
    "checkpoint_contexts",
    "explain",
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

_AT_FIRST_USE = {
    "TuningWarning": "tuning.table",
    "assign_names": "report.assign_names",
    "explain": "report.explain",
    "tune": "tuning",
}

# fmt: off
_GIVEN_BY = {
    "opfuse-convert": ("opfuse.convert", "opfuse.converted", "opfuse.revert", "opfuse convert"),
    "opfuse-memory": ("opfuse.plan_memory",),
    "opfuse-graphs": ("opfuse.graphed", "opfuse.ungraphed"),
    "opfuse-reproducible": (
        "opfuse.LockError", "opfuse.freeze", "opfuse freeze", "option locked", "option invariant",
    ),
    "opfuse": ("option debug", "tool autocast"),
    "opfuse-distributed": (
        "tool distributed", "opfuse.check_ranks", "opfuse.ops.AllGather", "opfuse.ops.AllReduce",
        "opfuse.ops.CopyToTensorParallelRegion", "opfuse.ops.ReduceScatter",
        "opfuse.ops.TokenCombine", "opfuse.ops.TokenDispatch",
        "opfuse.ops.VocabParallelCrossEntropy", "opfuse.ops.VocabParallelTokenLogProb",
        "opfuse.ops.Layout", "opfuse.ops.TensorParallel",
    ),
    "opfuse-quantized": (
        "opfuse.QuantizedActivation", "opfuse.quantized_model_init", "opfuse.watch_quantization",
    ),
    "opfuse-plugin-fp8": (
        "opfuse.from_te_extra_state",
        "fp8-delayed", "fp8-current", "fp8-block", "mxfp8", "nvfp4",
    ),
}
# fmt: on
"""What an error names the package of: attributes, commands, options and recipes."""


def __getattr__(name: str) -> Any:
    if name in ("report", "testing", "tuning"):
        return importlib.import_module(f"opfuse.{name}")
    if name in _AT_FIRST_USE:
        value = getattr(importlib.import_module(f"opfuse.{_AT_FIRST_USE[name]}"), name)
    else:
        value = plugins.manager.give("opfuse.attributes", name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    given = plugins.manager.entry_points["opfuse.attributes"]
    return sorted({*globals(), *_AT_FIRST_USE, *given, "report", "testing", "tuning"})


# reads metadata, imports no plugin
plugins.manager.discover({name: package for package in _GIVEN_BY for name in _GIVEN_BY[package]})
