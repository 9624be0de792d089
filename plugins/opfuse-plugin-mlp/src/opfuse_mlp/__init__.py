"""Fusions of whole MLPs, which keep less for the backward and compute it again."""

from __future__ import annotations

from typing import Any

from opfuse import Fusion, hookimpl


@hookimpl
def opfuse_joint_fusions() -> list[Fusion]:
    """[Norm +] linear [+ bias] + activation + linear [+ bias], with adapters too.

    And a norm or an activation alone.
    """
    from . import activation, fused

    return [*fused.JOINT, *activation.JOINT]


@hookimpl
def opfuse_options() -> dict[str, Any]:
    """Keep the output of the norm, or of the activation, rather than compute it again."""
    return {"mlp.keep_norm": False, "mlp.keep_activation": False}
