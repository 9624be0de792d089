"""Layers that a ``tp_plan`` of transformers has split among processes.

The library replaces the forward of such a module. The new one is known by identity: its code is
that of the library's style, and its variables are the module, its own forward, a style and a mesh.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

from opfuse_convert.grammar import MISSING, Place
from opfuse_convert.grammar.reads import class_places
from opfuse_convert.parallel import is_inner, split_by_torch, split_of
from torch import nn

from opfuse.core.introspection import hook_kinds
from opfuse.ops.authoring import op_class

_HOME = "transformers.distributed.tensor_parallel"
_MODES = {"ColwiseParallel": "column", "RowwiseParallel": "row"}
_METHODS = (
    "transform_inputs_pre_forward",
    "context_around_forward",
    "transform_output_post_forward",
    "should_use_local_tensors",
)
_QUANTIZED = "_hf_quantized_needs_local_tp"


def style_of(module: nn.Module) -> tuple[Any, Any] | str | None:
    """The style around a module's forward, and its mesh.

    Returns:
        Both, or a sentence that says why what is around it is unknown; None: it is not a style.
    """
    forward, home = vars(module).get("forward"), sys.modules.get(_HOME)
    if home is None or not is_inner(forward, home.TensorParallelLayer.install_forward.__code__):
        return None
    held = inspect.getclosurevars(forward).nonlocals  # type: ignore[arg-type]
    own, style, cls = held["original_forward"], held["self"], op_class(module)
    if held["module"] is not module or getattr(own, "__self__", None) is not module:
        return "the style around its forward is for another module"
    if getattr(own, "__func__", None) not in (cls.forward, type(module).forward):
        return "the style around its forward calls another one"
    return style, held["mesh"]


def places_of(style: Any) -> list[Place]:
    """What the computation of a style depends on."""
    name = type(style).__name__
    methods = [p for m in _METHODS for p in class_places(type(style), m, f"{name}.{m}")[1]]
    return methods + [
        Place(vars(style), k, v, f"the {k} of {name}") for k, v in vars(style).items()
    ]


def splits(module: Any) -> Any:
    """How a linear layer is split among processes; see ``opfuse_convert.parallel.Splits``."""
    found = style_of(module)
    if not isinstance(found, tuple):
        return split_by_torch(module) if found is None else found
    style, mesh = found
    mode = _MODES.get(type(style).__name__)
    if mode is None or type(style) is not getattr(sys.modules[_HOME], type(style).__name__):
        return f"it is split among processes in the style {type(style).__name__}"
    if hook_kinds(module):
        return f"it has {hook_kinds(module)} hooks"
    if hasattr(module, _QUANTIZED):
        return "its weight is quantized and split among processes"
    ends = style.input_layouts, style.output_layouts, style.use_local_output
    unquantized = Place(vars(module), _QUANTIZED, MISSING, f"its {_QUANTIZED}")
    return split_of(module, mode, mesh, *ends), [*places_of(style), unquantized]
