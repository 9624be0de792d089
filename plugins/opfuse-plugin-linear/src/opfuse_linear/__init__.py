"""Fusions of linear layers with bias, activation, scale and residual add."""

from __future__ import annotations

from typing import Any

from opfuse import Fusion, hookimpl


@hookimpl
def opfuse_forward_fusions() -> list[Fusion]:
    """Linear + bias [+ activation], linear [+ bias] + add, linear + scale + add."""
    from . import fused

    return fused.FORWARD


@hookimpl
def opfuse_backward_fusions() -> list[Fusion]:
    """The backward of linear [+ bias] [+ activation], bias + activation, linear + scale, extra
    output + linear.
    """
    from . import fused

    return fused.BACKWARD


@hookimpl
def opfuse_options() -> dict[str, Any]:
    """Whether the output of an activation is computed again, instead of being kept for the linear
    behind it.
    """
    return {"linear.recompute": False}
