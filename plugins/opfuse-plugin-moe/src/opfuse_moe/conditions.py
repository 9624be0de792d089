"""The conditions of the fused ops, asked while planning. Importing this imports no Triton."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from opfuse_triton import why_no_kernel, why_unmeasured

from opfuse import Environment
from opfuse.ops import GroupedLinear

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that the kernels read and write. They add up in fp32."""

MOST_GROUPS = 1024
"""Groups whose ends a program looks through at once."""

SPEEDS = {"forward": 1.07, "backward": 1.04, "stacked": 1.0, "activated": 1.43, "gradients": 2.53}
"""Speed by the ledger's model, relative to the separate ops: the lowest at the sizes of two models,
on five GPUs. A test computes them again.
"""


def why_not(op: GroupedLinear, env: Environment) -> str:
    """Why the kernels do not take the products of an op, as a sentence; empty: they do."""
    if why := why_no_kernel(env.device, env.capability):
        return why
    if env.recipe is not None:
        who = type(env.recipe).__name__
        return f"{who} quantizes the groups, and this fusion multiplies plain tensors"
    if env.compiling:
        return "torch.compile does not see into its kernels"
    if env.dtype not in DTYPES:
        return f"its kernels add up in fp32, and the ops in {str(env.dtype)[6:]}"
    if op.num_groups > MOST_GROUPS:
        return f"its kernels take up to {MOST_GROUPS} groups, and these are {op.num_groups}"
    return ""


def alone(ops: Sequence[Any], env: Environment, passes: str = "forward") -> bool | str:
    """Whether a grouped linear is multiplied by the kernels.

    Of matrices in one tensor torch's grouped product needs no copy.
    """
    speed = SPEEDS["stacked" if ops[0].is_stacked else passes]
    return why_not(ops[0], env) or why_unmeasured(env, speed) or True


def backward_alone(ops: Sequence[Any], env: Environment) -> bool | str:
    """The same for its gradients."""
    return alone(ops, env, "backward")


def activated(ops: Sequence[Any], env: Environment) -> bool | str:
    """Whether the activation goes into the product before it."""
    linear, scaled = ops
    if linear.scales_bias:
        return "its product is rounded before a scaled bias is added, and after that it activates"
    said = why_not(linear, env) or _why_no_functions(scaled, linear.out_features)
    return said or why_unmeasured(env, SPEEDS["activated"]) or True


def gradients(ops: Sequence[Any], env: Environment) -> bool | str:
    """Whether the gradient of the activation goes into the product that gives its argument."""
    scaled, linear = ops
    width = linear.in_features * scaled.feature_ratio
    said = why_not(linear, env) or _why_no_functions(scaled, width)
    return said or why_unmeasured(env, SPEEDS["gradients"]) or True


def _why_no_functions(scaled: Any, width: int) -> str:
    from opfuse_triton import functions_of

    activation = scaled.activation
    if functions_of(activation) is None:
        return f"{type(activation).__name__} has no device functions (Activation.device_functions)"
    parts = scaled.feature_ratio * (getattr(activation, "glu_interleave_size", None) or 1)
    return f"{width} features do not split into parts of {parts}" if width % parts else ""
