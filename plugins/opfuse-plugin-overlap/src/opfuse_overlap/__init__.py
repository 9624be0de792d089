"""Communication of tensor-parallel linear layers beside their products."""

from __future__ import annotations

from typing import Any

from opfuse import Fusion, hookimpl


@hookimpl
def opfuse_joint_fusions() -> list[Fusion]:
    """Gather or copy to the region + linears, linear + reduce-scatter or all-reduce."""
    from . import fused

    return fused.JOINT


@hookimpl
def opfuse_options() -> dict[str, Any]:
    """The options.

    ``overlap.use``: whether the fusions are used where they were not measured: where this plugin
    expects them to pay, everywhere, or nowhere. ``overlap.provider``: pieces with collectives of
    ``torch.distributed``, or torch's fused operations over symmetric memory. ``overlap.pieces``:
    the number of pieces; 0: as many as were measured to be fastest, or as the rows suggest.
    """
    return {
        "overlap.use": ("auto", "always", "never"),
        "overlap.provider": ("c10d", "symm_mem"),
        "overlap.pieces": 0,
    }
