"""The conditions of the fusions, and their benefits. Importing this imports no Triton."""

from __future__ import annotations

from typing import Any

from opfuse_triton.elementwise.passes import why_not

from opfuse import Environment, has_same_math
from opfuse.ops import GELU, ReLU, SiLU


def runs(ops: Any, env: Environment) -> bool | str:
    """Accept if a kernel can run, or its twin is wanted."""
    return bool(env.options.get("activation.twins")) or why_not(ops[-1], env) or True


def runs_alone(ops: Any, env: Environment) -> bool | str:
    """The same, for ops that take several passes over memory in PyTorch."""
    if is_one_kernel(ops[-1]):
        return f"PyTorch has a kernel for {type(ops[-1]).__name__}"
    return runs(ops, env)


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
