"""Runs of pointwise ops, norms and residual adds, and a loss; Inductor compiles each pass."""

from __future__ import annotations

from typing import Any

from opfuse import Fusion, hookimpl


@hookimpl
def opfuse_joint_fusions() -> list[Fusion]:
    """Any run of norms, activations, biases, scales, dropouts, extra inputs and outputs; a loss.

    They take the ops that no other fusion takes.
    """
    from . import fused, loss

    return [*fused.JOINT, *loss.JOINT]


@hookimpl
def opfuse_options() -> dict[str, Any]:
    """The smallest size to compile, the least work of the separate ops, and the backend."""
    from .conditions import DEFAULTS

    return DEFAULTS
