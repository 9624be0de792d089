"""Fusions of rotary position embeddings, of queries and keys at once, with their norms."""

from __future__ import annotations

from typing import Any

from opfuse import Fusion, hookimpl


@hookimpl
def opfuse_forward_fusions() -> list[Fusion]:
    """[Norm +] rotation, of one tensor or of two that are swapped."""
    from . import fused

    return fused.FORWARD


@hookimpl
def opfuse_backward_fusions() -> list[Fusion]:
    """The backward of the same."""
    from . import fused

    return fused.BACKWARD


@hookimpl
def opfuse_options() -> dict[str, Any]:
    """Use PyTorch's operations where the kernels cannot run; for tests."""
    return {"rope.twins": False}
