"""The recipe that this plugin gives to opfuse.

Nothing heavy is imported here: opfuse asks while it makes its first plan.
"""

from __future__ import annotations

from opfuse import Quantizer, QuantizerRole, Recipe, hookimpl


@hookimpl
def opfuse_recipes() -> dict[str, type[Recipe]]:
    """The recipe by its name, for ``opfuse.autocast``."""
    from .recipes import Int8

    return {"NAME": Int8}


@hookimpl
def opfuse_quantizer(recipe: Recipe, role: QuantizerRole) -> Quantizer | None:
    """A quantizer for one tensor of an op; None: the recipe is another plugin's."""
    from .quantizers import Int8Quantizer
    from .recipes import Int8

    return Int8Quantizer() if isinstance(recipe, Int8) else None
