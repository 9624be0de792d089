"""The fusions that this plugin gives to opfuse.

Nothing heavy is imported here: opfuse asks while it makes its first plan.
"""

from __future__ import annotations

from opfuse import Fusion, hookimpl


@hookimpl
def opfuse_backward_fusions() -> list[Fusion]:
    """The gradients of bias + activation."""
    from . import fused

    return fused.BACKWARD
