"""The conditions of the fusions, and their benefits. Importing this imports no Triton."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from opfuse_triton import Predicted
from opfuse_triton.elementwise.passes import why_not

from opfuse import Environment, has_same_math
from opfuse.ops import GELU, ReLU, SiLU

PREDICTED = Predicted(
    "activation",
    {
        "bias+activation": (1.33, ["bias + GELU", "bias + GELU, inference", "bias + SwiGLU"]),
        "bias+activation backward": (
            1.29,
            [
                "bias + GELU backward",
                "bias + GELU (erf) backward",
                "bias + GELU backward, bias only",
            ],
        ),
        "activation": (2.00, ["SwiGLU", "SwiGLU, by 32"]),
        "activation backward": (2.60, ["SwiGLU backward"]),
        "scaled activation": (8.33, ["scaled SwiGLU"]),
        "scaled activation backward": (13.0, ["scaled SwiGLU backward", "scaled SReLU backward"]),
    },
)
"""The speed of each fusion by the model."""


def runs(name: str) -> Callable[[Any, Environment], bool | str]:
    """The condition of a fusion: a kernel can run and does not wait, or its twin is wanted.

    Args:
        name: One of :data:`PREDICTED`. What is named ``"activation"`` is no single op of PyTorch.
    """
    alone = name.startswith("activation")

    def when(ops: Any, env: Environment) -> bool | str:
        if alone and is_one_kernel(ops[-1]):
            return f"PyTorch has a kernel for {type(ops[-1]).__name__}"
        twins = bool(env.options.get("activation.twins"))
        return twins or why_not(ops[-1], env) or PREDICTED.why_not(name, env) or True

    return when


def is_one_kernel(op: Any) -> bool:
    """Return whether PyTorch has one kernel for the activation, and one for its gradient."""
    return any(has_same_math(op, cls) for cls in (GELU, ReLU, SiLU))


# How many tensors as large as the input are not read or written any more. PyTorch's operations for
# SwiGLU move 2.5 forward where a kernel moves 1.5, and 5.5 backward instead of 2.5; others more


def saved_forward(ops: Any, env: Environment) -> float:
    """Of the forward: with a bias, the sum is written only if a backward reads it."""
    alone = 0.0 if is_one_kernel(ops[-1]) else 1.0
    return alone if len(ops) == 1 else alone + (1.0 if env.requires_grad else 2.0)


def saved_backward(ops: Any, env: Environment) -> float:
    """Of the backward: with a bias, the gradient is not read again for the sum over rows."""
    alone = 0.0 if is_one_kernel(ops[-1]) else 3.0
    return alone if len(ops) == 1 else alone + 1.0
