"""The conditions of the fusions, and their benefits. Importing this imports no Triton."""

from __future__ import annotations

from typing import Any

import torch
from opfuse_triton import why_no_kernel

from opfuse import Environment, has_same_math
from opfuse.ops import GELU, ReLU, ScaledActivation, SiLU

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that the kernels read and write. They compute in fp32."""


def activation_of(op: Any) -> Any:
    """The activation that an op is, or that it scales."""
    return op.activation if isinstance(op, ScaledActivation) else op


def why_not(op: Any, env: Environment) -> str:
    """Why no kernel can run for an activation, as a sentence; empty: one can.

    Args:
        op: The activation, or the op that scales it.
        env: The environment.
    """
    if why := why_no_kernel(env.device, env.capability):
        return why
    if env.dtype not in DTYPES:
        return (
            f"its kernels compute in fp32, and the ops in {str(env.dtype).removeprefix('torch.')}"
        )
    from opfuse_triton.elementwise import formulas

    activation = activation_of(op)
    name, formula = type(activation).__name__, formulas.formula_of(activation)
    if formula is None:
        return f"{name} has no device functions (Activation.device_functions)"
    if env.compiling and not formula.names:
        return f"a graph cannot name the device functions of {name}: define them in a module"
    return ""


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
