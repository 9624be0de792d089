"""The fusions that this plugin gives to opfuse; its op is in ``ops``.

Nothing heavy is imported here: opfuse asks while it makes its first plan.
"""

from __future__ import annotations

from opfuse import Fusion, hookimpl


@hookimpl
def opfuse_forward_fusions() -> list[Fusion]:
    """LayerScale + residual add."""
    from . import fused

    return fused.FORWARD
