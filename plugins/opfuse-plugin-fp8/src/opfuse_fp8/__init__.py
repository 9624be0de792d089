"""FP8 recipes: delayed, current, block and MX scaling, under Transformer Engine's names."""

from __future__ import annotations

from typing import Any

from opfuse import Environment, Fusion, Quantizer, QuantizerRole, Recipe, hookimpl

from . import quantizers, recipes
from .quantizers import *  # noqa: F403
from .recipes import *  # noqa: F403

__all__ = [*recipes.__all__, *quantizers.__all__]


@hookimpl
def opfuse_recipes() -> dict[str, type[Recipe]]:
    """The recipes by name."""
    return {
        "fp8-delayed": recipes.DelayedScaling,
        "fp8-current": recipes.Float8CurrentScaling,
        "fp8-block": recipes.Float8BlockScaling,
        "mxfp8": recipes.MXFP8BlockScaling,
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
    """A cast, alone or with the activation or the norm before it."""
    from . import fused, fused_norms

    return [*fused.FORWARD, *fused_norms.FORWARD]


@hookimpl
def opfuse_backward_fusions() -> list[Fusion]:
    """A cast of a gradient, alone or with the activation and the bias that give it."""
    from . import fused

    return fused.BACKWARD


@hookimpl
def opfuse_options() -> dict[str, Any]:
    """Whether PyTorch's operations stand in where the kernels cannot run; for tests."""
    return {"fp8.twins": False}
