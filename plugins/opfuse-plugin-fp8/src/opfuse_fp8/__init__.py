"""FP8 and FP4 recipes, under Transformer Engine's names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from opfuse import Environment, Fusion, Quantizer, QuantizerRole, Recipe, hookimpl

from . import direct, nvfp4, quantizers, recipes, te_checkpoint
from .nvfp4 import *  # noqa: F403
from .quantizers import *  # noqa: F403
from .recipes import *  # noqa: F403
from .te_checkpoint import *  # noqa: F403

__all__ = [*recipes.__all__, *quantizers.__all__, *nvfp4.__all__, *te_checkpoint.__all__]

quantizers.bind_kernels(direct.cast, direct.cast_groups, direct.cast_parts)


@hookimpl
def opfuse_recipes() -> dict[str, type[Recipe]]:
    """The recipes by name."""
    return {**recipes.BY_NAME}


@hookimpl
def opfuse_quantizer(
    recipe: Recipe, role: QuantizerRole, env: Environment | None, siblings: Sequence[Quantizer]
) -> Quantizer | None:
    """A quantizer for a tensor under one of the recipes; linears side by side may share one."""
    return recipes.make(recipe, role, None if env is None else env.device, siblings)


@hookimpl
def opfuse_forward_fusions() -> list[Fusion]:
    """Products in FP8, casts with the ops before them, activations that are computed again."""
    from . import fused, fused_norms, memory, products

    return [*products.FORWARD, *fused.FORWARD, *fused_norms.FORWARD, *memory.FORWARD]


@hookimpl
def opfuse_backward_fusions() -> list[Fusion]:
    """Products in FP8; casts of a gradient, with the activation and the bias that give it."""
    from . import fused, products

    return [*products.BACKWARD, *fused.BACKWARD]


@hookimpl
def opfuse_options() -> dict[str, Any]:
    """The options.

    ``fp8.products``: whether products run in FP8, where that pays, wherever PyTorch can, or
    nowhere. ``fp8.twins``: whether PyTorch's operations stand in where kernels cannot run.
    """
    return {"fp8.products": ("auto", "native", "emulated"), "fp8.twins": False}
