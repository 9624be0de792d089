"""Liger-Kernel's Triton kernels as fusions: norms, gated activations, residual add + norm.

Nothing heavy is imported here: opfuse asks while it makes its first plan.
"""

from __future__ import annotations

from opfuse import Fusion, hookimpl


@hookimpl
def opfuse_forward_fusions() -> list[Fusion]:
    """RMSNorm, LayerNorm, SwiGLU, GEGLU, and residual add + RMSNorm."""
    from . import fused

    return fused.FORWARD


@hookimpl
def opfuse_backward_fusions() -> list[Fusion]:
    """The same, and extra output + RMSNorm."""
    from . import fused

    return fused.BACKWARD
