"""FP8 and FP4 recipes, under Transformer Engine's names."""

from __future__ import annotations

from typing import Any

from opfuse import Environment, Fusion, Quantizer, QuantizerRole, Recipe, hookimpl

from . import nvfp4, quantizers, recipes, te_checkpoint
from .hardware import support
from .nvfp4 import *  # noqa: F403
from .quantizers import *  # noqa: F403
from .recipes import *  # noqa: F403
from .te_checkpoint import *  # noqa: F403

__all__ = [*recipes.__all__, *quantizers.__all__, *nvfp4.__all__, *te_checkpoint.__all__, "support"]


@hookimpl
def opfuse_recipes() -> dict[str, type[Recipe]]:
    """The recipes by name."""
    return {
        "fp8-delayed": recipes.DelayedScaling,
        "fp8-current": recipes.Float8CurrentScaling,
        "fp8-block": recipes.Float8BlockScaling,
        "mxfp8": recipes.MXFP8BlockScaling,
        "nvfp4": recipes.NVFP4BlockScaling,
        "fp8-custom": recipes.CustomRecipe,
    }


@hookimpl
def opfuse_quantizer(
    recipe: Recipe, role: QuantizerRole, env: Environment | None
) -> Quantizer | None:
    """A quantizer for a tensor under one of the recipes."""
    return quantizers.make(recipe, role, None if env is None else env.device)


@hookimpl
def opfuse_forward_fusions() -> list[Fusion]:
    """Linears whose products run in FP8, and activations that are computed again."""
    from . import memory, products

    return [*products.FORWARD, *memory.FORWARD]


@hookimpl
def opfuse_backward_fusions() -> list[Fusion]:
    """The backward of linears, in FP8."""
    from . import products

    return products.BACKWARD


@hookimpl
def opfuse_options() -> dict[str, Any]:
    """Whether products run in FP8: where that pays, wherever PyTorch can, or nowhere."""
    return {"fp8.products": "auto"}
