"""Fusions of bias and activation, of gated activations, and of activations with scales."""

from __future__ import annotations

from typing import Any

from opfuse import Fusion, hookimpl


@hookimpl
def opfuse_forward_fusions() -> list[Fusion]:
    """[Bias +] activation, and an activation times a scale per row."""
    from . import fused

    return fused.FORWARD


@hookimpl
def opfuse_backward_fusions() -> list[Fusion]:
    """The backward of the same: one pass for the gradient and the sums over rows."""
    from . import fused

    return fused.BACKWARD


@hookimpl
def opfuse_options() -> dict[str, Any]:
    """Use PyTorch's operations where the kernels cannot run; for tests."""
    return {"activation.twins": False}
