"""Runs of pointwise ops, norms and adds, a loss, log-probabilities; Inductor compiles each pass."""

from __future__ import annotations

from typing import Any

from opfuse import Fusion, hookimpl


@hookimpl
def opfuse_joint_fusions() -> list[Fusion]:
    """Any run of norms, activations, biases, scales, dropouts, extra inputs and outputs.

    And a loss, log-probabilities of tokens, and rotations by cosines and sines that are given. They
    take the ops that no other fusion takes.
    """
    from . import fused, log_prob, loss, rotation

    return [*fused.JOINT, *loss.JOINT, *log_prob.JOINT, *rotation.JOINT]


@hookimpl
def opfuse_options() -> dict[str, Any]:
    """The smallest size to compile, the least work of the separate ops, and the backend."""
    from .conditions import DEFAULTS

    return DEFAULTS
