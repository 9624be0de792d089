"""The plugin contract, and nothing else.

A plugin is a distribution with an entry point in group ``opfuse.v1`` that names a module or object whose
functions are marked with :data:`opfuse.hookimpl`. Every hook returns declarations and is called while
planning, never during a forward or backward pass. Adding an argument to a hook is compatible (an
implementation may take fewer); anything else opens group ``opfuse.v2``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from .fusion import FusionLike
    from .quantization import Quantizer, QuantizerRole, Recipe

GROUP = "opfuse.v1"
"""The entry-point group of this contract."""

hookspec = pluggy.HookspecMarker("opfuse")
hookimpl = pluggy.HookimplMarker("opfuse")


@hookspec
def opfuse_forward_fusions() -> list[FusionLike]:
    """Fusions of the forward pass.

    The fused op implements ``fuser_forward`` and leaves in every context exactly what the basic ops would.
    """
    raise NotImplementedError


@hookspec
def opfuse_backward_fusions() -> list[FusionLike]:
    """Fusions of the backward pass.

    The fused op implements ``fuser_backward`` and relies only on what the basic ops leave in their contexts.
    """
    raise NotImplementedError


@hookspec
def opfuse_joint_fusions() -> list[FusionLike]:
    """Fusions of both passes by one fused op, which may keep what it likes between them."""
    raise NotImplementedError


@hookspec
def opfuse_recipes() -> dict[str, type[Recipe]]:
    """Quantization recipes by name: frozen dataclasses derived from :class:`opfuse.Recipe`."""
    raise NotImplementedError


@hookspec(firstresult=True)
def opfuse_quantizer(recipe: Recipe, role: QuantizerRole) -> Quantizer | None:
    """A new quantizer for a tensor of ``role`` under ``recipe``; None for a recipe of somebody else."""
    raise NotImplementedError
