"""Fusions of whole MLPs, which keep less for the backward and compute it again."""

from __future__ import annotations

from typing import Any

from opfuse import Fusion, hookimpl


@hookimpl
def opfuse_joint_fusions() -> list[Fusion]:
    """[Norm +] linear [+ bias] + activation + linear [+ bias], with adapters too; a norm alone."""
    from . import fused

    return fused.JOINT


@hookimpl
def opfuse_options() -> dict[str, Any]:
    """Keep the output of the norm, rather than compute it again from its input."""
    return {"mlp.keep_norm": False}
