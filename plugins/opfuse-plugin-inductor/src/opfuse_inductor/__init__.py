"""Runs of pointwise ops, norms and residual adds, each pass one function compiled by Inductor."""

from __future__ import annotations

from opfuse import Fusion, hookimpl


@hookimpl
def opfuse_joint_fusions() -> list[Fusion]:
    """Any run of norms, activations, biases, scales, dropouts, extra inputs and outputs that nothing else takes."""
    from . import fused

    return fused.JOINT
