"""Fusions of linear layers with bias, activation, scale and residual add."""

from __future__ import annotations

from opfuse import Fusion, hookimpl


@hookimpl
def opfuse_forward_fusions() -> list[Fusion]:
    """Linear + bias [+ activation], linear [+ bias] + add, linear + scale + add."""
    from . import fused

    return fused.FORWARD


@hookimpl
def opfuse_backward_fusions() -> list[Fusion]:
    """The backward of a linear with the ops around it, and of bias + activation.

    The runs with a linear are linear [+ bias] [+ activation], linear + scale, extra output +
    linear, and three linears of one input. Those who have quack-kernels get activation + linear.
    """
    from . import by_quack, fused, one_input

    return [*fused.BACKWARD, *one_input.BACKWARD, *by_quack.backward_fusions()]
