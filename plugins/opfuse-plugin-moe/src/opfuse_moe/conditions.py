"""The conditions of the fused ops, asked while planning. Importing this imports no Triton."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from opfuse_triton import Predicted, why_no_kernel
from opfuse_triton.calls import DTYPES

from opfuse import Environment
from opfuse.ops import GroupedLinear

CODES = (torch.float8_e4m3fn, torch.float8_e5m2)
"""Dtypes of codes that the kernels multiply."""

MOST_GROUPS = 1024
"""Groups whose ends a program looks through at once."""

PREDICTED = Predicted(
    "moe",
    {
        "grouped linear": (1.07, ["grouped product of a list"]),
        "grouped linear of one tensor": (1.0, ["grouped product"]),
        "grouped linear of codes": (2.30, ["grouped product of codes"]),
        "grouped linear backward": (1.0, ["its gradient", "gradient of the matrices"]),
        "grouped linear backward of codes": (
            2.20,
            ["its gradient of codes", "gradient of the matrices, of codes"],
        ),
        "grouped linear of MX codes": (2.32, ["grouped product of MX codes"]),
        "grouped linear backward of MX codes": (
            2.21,
            ["its gradient of MX codes", "gradient of the matrices, of MX codes"],
        ),
        "activated": (1.47, ["grouped product + SwiGLU"]),
        "gradients": (3.43, ["its gradient + that of SwiGLU"]),
    },
)
"""The speed of each fusion by the model: torch's product needs its matrices in one tensor."""


def why_not(op: GroupedLinear, env: Environment, *, coded: bool = False) -> str:
    """Why the kernels do not take the products of an op, as a sentence; empty: they do.

    Args:
        op: The op.
        env: Where it would run.
        coded: Whether they multiply codes where the op is quantized.
    """
    if why := why_no_kernel(env.device, env.capability):
        return why
    if env.recipe is not None:
        who = type(env.recipe).__name__
        why = f"{who} quantizes the groups, and this fusion multiplies plain tensors"
        if coded:
            why = _why_no_codes(op, env)
        if why:
            return why
    if env.compiling:
        return "torch.compile does not see into its kernels"
    if env.dtype not in DTYPES:
        return f"its kernels add up in fp32, and the ops in {str(env.dtype)[6:]}"
    if op.num_groups > MOST_GROUPS:
        return f"its kernels take up to {MOST_GROUPS} groups, and these are {op.num_groups}"
    return ""


def _why_no_codes(op: GroupedLinear, env: Environment) -> str:
    """Why the codes that a recipe makes are not multiplied; empty: they are, or there are none."""
    who, override = type(env.recipe).__name__, getattr(env.recipe, "backward_override", None)
    first = op.get_quantizer("forward", 0)
    if first is None:  # the recipe skips it
        return ""
    if not first.casts_groups:
        return f"the quantizers of {who} do not cast groups at once: the op casts one by one"
    if override is not None:
        return f"backward_override={override!r} needs what was cast, and the op casts each group"
    if env.options.get("fp8.products") == "emulated":
        return "products are emulated, as the option fp8.products says"
    name = env.architecture or "this GPU"
    if env.device.type == "cpu" or name == "gfx950":
        return ""
    if name.startswith("gfx"):
        return f"{name} does not multiply the FP8 codes of the OCP"
    if env.capability is not None and env.capability < (8, 9):
        return f"an FP8 product needs compute capability 8.9, and this is {name}"
    if _has_blocks(op) and env.capability is not None and env.capability[0] != 10:
        return f"its kernels multiply MX blocks on sm_100 and gfx950, and this is {name}"
    return ""


def _has_blocks(op: GroupedLinear) -> bool:
    """Whether a recipe quantizes in blocks along the rows."""
    first = op.get_quantizer("forward", 0)
    return first is not None and first.row_multiple > 1


def _name(op: GroupedLinear, env: Environment, name: str) -> str:
    """The name of a fusion in the table."""
    if env.recipe is None or op.get_quantizer("forward", 0) is None:
        return name
    return f"{name} of {'MX ' if _has_blocks(op) else ''}codes"


def alone(ops: Sequence[Any], env: Environment) -> bool | str:
    """Whether a grouped linear is multiplied by the kernels."""
    (op,) = ops
    if why := why_not(op, env, coded=True):
        return why
    name = _name(op, env, "grouped linear")
    if op.is_stacked and name == "grouped linear":
        name = "grouped linear of one tensor"
    return PREDICTED.why_not(name, env) or True


def backward_alone(ops: Sequence[Any], env: Environment) -> bool | str:
    """The same for its gradients."""
    (op,) = ops
    if why := why_not(op, env, coded=True):
        return why
    return PREDICTED.why_not(_name(op, env, "grouped linear backward"), env) or True


def activated(ops: Sequence[Any], env: Environment) -> bool | str:
    """Whether the activation goes into the product before it."""
    linear, scaled = ops
    if linear.scales_bias:
        return "its product is rounded before a scaled bias is added, and after that it activates"
    said = why_not(linear, env) or _why_no_functions(scaled, linear.out_features)
    return said or PREDICTED.why_not("activated", env) or True


def gradients(ops: Sequence[Any], env: Environment) -> bool | str:
    """Whether the gradient of the activation goes into the product that gives its argument."""
    scaled, linear = ops
    width = linear.in_features * scaled.feature_ratio
    said = why_not(linear, env) or _why_no_functions(scaled, width)
    return said or PREDICTED.why_not("gradients", env) or True


def _why_no_functions(scaled: Any, width: int) -> str:
    from opfuse_triton import functions_of

    activation = scaled.activation
    if functions_of(activation) is None:
        return f"{type(activation).__name__} has no device functions (Activation.device_functions)"
    parts = scaled.feature_ratio * (getattr(activation, "glu_interleave_size", None) or 1)
    return f"{width} features do not split into parts of {parts}" if width % parts else ""
