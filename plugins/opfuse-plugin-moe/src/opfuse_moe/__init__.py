"""Fusions of the experts of a mixture: grouped products, with the gate between them."""

from __future__ import annotations

from opfuse import Fusion, hookimpl


@hookimpl
def opfuse_forward_fusions() -> list[Fusion]:
    """A grouped linear, and the scaled activation after it."""
    from . import fused

    return fused.FORWARD


@hookimpl
def opfuse_backward_fusions() -> list[Fusion]:
    """The backward of a grouped linear, and of the scaled activation before it."""
    from . import fused

    return fused.BACKWARD
