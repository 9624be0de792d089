"""Layers of transformers, which the library wraps in gradient checkpointing.

That wrapper looks at the keyword arguments, so a trace of it holds for those alone that it was made
with. The layer inside only passes them on. A converted layer is wrapped once more, from outside: a
checkpoint computes the chain again.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from opfuse import Conversion, Environment
from opfuse.authoring import op_class
from opfuse.conversion import by_tracing

_LAYER = "transformers.modeling_layers", "GradientCheckpointingLayer"
_WRAPPER = "forward_with_checkpointing"


def is_layer(module: nn.Module) -> bool:
    """Whether a module derives from the base class of the library's layers."""
    return any((cls.__module__, cls.__name__) == _LAYER for cls in type(module).__mro__)


def build(module: Any, env: Environment) -> Conversion | str:
    """The longest chain in the forward of a layer, whatever keyword arguments it passes on."""
    forward: Any = op_class(module).forward
    while forward.__code__.co_name == _WRAPPER:
        forward = forward.__wrapped__
    return by_tracing(module, forward=forward)
