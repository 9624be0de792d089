"""FP8 recipes: delayed, current, block and MX scaling, under Transformer Engine's names."""

from __future__ import annotations

from opfuse import Environment, Quantizer, QuantizerRole, Recipe, hookimpl

from .quantizers import (
    BlockQuantizer,
    CurrentQuantizer,
    DelayedQuantizer,
    IdentityQuantizer,
    MXQuantizer,
    make,
)
from .recipes import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
)

__all__ = [
    "BlockQuantizer",
    "CurrentQuantizer",
    "CustomRecipe",
    "DelayedQuantizer",
    "DelayedScaling",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Format",
    "IdentityQuantizer",
    "MXFP8BlockScaling",
    "MXQuantizer",
]


@hookimpl
def opfuse_recipes() -> dict[str, type[Recipe]]:
    """The recipes by name."""
    return {
        "fp8-delayed": DelayedScaling,
        "fp8-current": Float8CurrentScaling,
        "fp8-block": Float8BlockScaling,
        "mxfp8": MXFP8BlockScaling,
        "fp8-custom": CustomRecipe,
    }


@hookimpl
def opfuse_quantizer(
    recipe: Recipe, role: QuantizerRole, env: Environment | None
) -> Quantizer | None:
    """A quantizer for a tensor under one of the recipes."""
    return make(recipe, role, None if env is None else env.device)
