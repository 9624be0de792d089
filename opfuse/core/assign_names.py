"""Names for the ops of a model."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import nn

from .fused_op import FusedOperation
from .op import BasicOperation
from .quantization.scale_update import PreparedOps
from .replaced_forward import replaced_forward

M = TypeVar("M", bound=nn.Module)


def assign_names(model: M) -> M:
    """Name each op of a model by its place there, and record which ops belong together.

    An op's ``name`` becomes its dotted name in ``model.named_modules()``, unless its constructor
    got one. The basic ops inside a ``Linear`` get the name of the ``Linear``, and those of a
    converted module (:func:`opfuse.convert`) the name of the module they read from. A recipe finds
    the name in the roles of its tensors. ``autocast(amax_reduction_group=...)`` needs a prepared
    model: every rank then takes the maxima of the same quantizers, in this order, whatever ran.

    Args:
        model: The model. Call this on every rank, before the first call under a recipe, and again
            after its ops change.

    Returns:
        The model.

    Raises:
        RuntimeError: An op already has quantizers that know it by another name.
    """
    ops: dict[BasicOperation, str] = {}
    fused: dict[FusedOperation, str] = {}
    paths = {module: path for path, module in model.named_modules()}
    for module, path in paths.items():
        replaced = replaced_forward(module)
        chain: Any = () if replaced is None else replaced.chain or ()
        for op in chain:
            read = [source.module for source in op._sources.values()]
            ops.setdefault(op, next((paths[each] for each in read if each in paths), path))
        if isinstance(module, BasicOperation):
            ops.setdefault(module, path)
        elif isinstance(module, FusedOperation):
            fused[module] = path
            for op in module.basic_ops:
                ops.setdefault(op, path)  # type: ignore[arg-type]
    for op, path in ops.items():  # all, before any is renamed
        op._check_name(op._name or path)
    for named, path in [*fused.items(), *ops.items()]:
        named._set_name("_path", path)
    prepared = PreparedOps(ops)
    for op in ops:
        op._prepared = prepared
    return model
