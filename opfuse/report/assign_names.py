"""Names for the ops of a model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import torch
from torch import nn

from ..core.environment import Environment
from ..core.fused_op import FusedOperation
from ..core.op import BasicOperation
from ..core.quantization import Recipe
from ..core.quantization.names import first_match
from ..core.quantization.state import PreparedOps
from ..core.recipe_lookup import offered
from .replaced_forward import KEPT_AS

M = TypeVar("M", bound=nn.Module)


def assign_names(model: M, recipe: Recipe | str | None = None, skip: Iterable[str] = ()) -> M:
    """Name each op of a model by its place there, and record which ops belong together.

    An op's ``name`` becomes its dotted name in ``model.named_modules()``, unless its constructor
    got one. The basic ops inside a ``Linear`` get the name of the ``Linear``, and those of a
    converted module (:func:`opfuse.convert`) the name of the module they read from. A recipe finds
    the name in the roles of its tensors. ``autocast(amax_reduction_group=...)`` needs a prepared
    model: every rank then takes the maxima of the same quantizers, in this order, whatever ran.

    Args:
        model: The model. Call this on every rank, before the first call under a recipe, and again
            after its ops change.
        recipe: A recipe, or its name, whose quantizers are made now. Then ``model.state_dict()``
            has the same keys before and after the first step, as ``torch.distributed.checkpoint``
            needs it of what it loads into.
        skip: The patterns of ``autocast``: these ops get none.

    Returns:
        The model.

    Raises:
        RuntimeError: An op already has quantizers that know it by another name. Parameters are on
            the meta device, and there is a recipe.
    """
    ops: dict[BasicOperation, str] = {}
    fused: dict[FusedOperation, str] = {}
    paths = {module: path for path, module in model.named_modules()}
    for module, path in paths.items():
        if (kept := vars(module).get(KEPT_AS)) is not None:
            kept.path = path
            for op, name in kept.names(paths):
                ops.setdefault(op, name)
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
    if recipe is not None:
        _make_quantizers(ops, offered(recipe, "assign_names"), tuple(skip))
    return model


def _make_quantizers(ops: Iterable[BasicOperation], recipe: Recipe, skip: tuple[str, ...]) -> None:
    """Make the quantizers of ops for a recipe, on the device of their parameters."""
    device = torch.get_default_device()
    for op in ops:
        sources = map(op.param_source, op.param_names or ())
        params = [module._parameters.get(name) for module, name in sources]
        device = next((param.device for param in params if param is not None), device)
        if device.type == "meta":
            raise RuntimeError(
                f"assign_names(recipe=...) expected parameters that have memory, got those of "
                f"{type(op).__name__} {op.name!r} on the meta device: call model.to_empty first"
            )
        if not first_match(op.name, skip):
            op._quantizers.use(op, recipe, Environment(device, None, torch.float32, recipe))
