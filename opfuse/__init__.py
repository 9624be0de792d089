"""opfuse: fuse chains of PyTorch operations, forward and backward, with every fusion a plugin."""

from . import ops, plugins
from .contexts import autocast, checkpoint_contexts, options, quantized_model_init
from .conversion import ConversionReport, convert, converted, revert
from .converter import Conversion, Converter
from .engine.fuser import OperationFuser
from .engine.plan import FusionPlan
from .environment import Environment
from .errors import PluginWarning, TuningWarning
from .fusible import FusibleOperation
from .fusion import Fusion, OneOf, OneOrMore, Optional, Subclasses
from .hookspecs import hookimpl
from .op import BasicOperation, FusedOperation
from .op_context import OperationContext
from .overrides import computes_as
from .plugins import (
    register_backward_fusion,
    register_forward_backward_fusion,
    register_forward_fusion,
)
from .prepare import prepare
from .quantization import Quantizer, QuantizerRole, Recipe
from .quantization.watch import watch_quantization
from .ranks import check_ranks
from .report.explain import explain
from .sequential import Sequential
from .tuning import tune

__version__ = "0.1.0"

# fmt: off
__all__ = [
    "BasicOperation",
    "Conversion",
    "ConversionReport",
    "Converter",
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
    "autocast",
    "check_ranks",
    "checkpoint_contexts",
    "computes_as",
    "convert",
    "converted",
    "explain",
    "hookimpl",
    "ops",
    "options",
    "plugins",
    "prepare",
    "quantized_model_init",
    "register_backward_fusion",
    "register_forward_backward_fusion",
    "register_forward_fusion",
    "revert",
    "tune",
    "watch_quantization",
]
# fmt: on

plugins.manager.discover()  # reads metadata, imports no plugin
