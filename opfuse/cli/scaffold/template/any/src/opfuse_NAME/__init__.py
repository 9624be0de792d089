"""The fusions that this plugin gives to opfuse.

Nothing heavy is imported here: opfuse asks while it makes its first plan.
"""

from __future__ import annotations

from opfuse import Fusion, hookimpl


@hookimpl
def opfuse_PASS_fusions() -> list[Fusion]:
    """What this plugin fuses."""
    from . import fused

    return fused.PASS
