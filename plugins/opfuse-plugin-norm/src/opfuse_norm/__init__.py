"""Fusions of normalizations, dropouts, and the adds of residuals around them."""

from __future__ import annotations

from typing import Any

from opfuse import Fusion, hookimpl


@hookimpl
def opfuse_forward_fusions() -> list[Fusion]:
    """A norm alone, and the add of a residual before it."""
    from . import fused

    return fused.FORWARD


@hookimpl
def opfuse_backward_fusions() -> list[Fusion]:
    """The backward of a norm, and with it the add of the residual's gradient."""
    from . import fused

    return fused.BACKWARD


@hookimpl
def opfuse_joint_fusions() -> list[Fusion]:
    """A dropout, the add of a residual and a norm after it; a norm and what modulates it.

    And a norm on a CPU.
    """
    from . import by_output, drops, modulated

    return [*drops.JOINT, *modulated.JOINT, *by_output.JOINT]


@hookimpl
def opfuse_options() -> dict[str, Any]:
    """Let twins run where no kernel can, for tests; on a CPU, which norms keep their output."""
    return {"norm.twins": False, "norm.by_output": ("inside", "always", "never")}
