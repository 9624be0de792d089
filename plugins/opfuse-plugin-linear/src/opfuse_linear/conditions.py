"""The conditions of the fused ops, asked while planning."""

from __future__ import annotations

from typing import Any

import torch

from opfuse import Environment, has_same_math
from opfuse.ops import GELU, Activation, SiLU, libraries

from . import choice, kernels

MIN_FEATURES_APART = 128
"""Features from which an activation stays a step of its own in training on a CPU.

Its input is kept, so it cannot go into the matrix product: fusing saves a few microseconds of
Python, no time of the arithmetic, and a compiler of activations saves more.
"""

MIN_SPEED = 1.02
"""Measured speed of a linear's backward below which it is left to the fusions after it."""


def epilogue(act: Activation) -> tuple[str, str] | None:
    """The name in oneDNN of an activation at the end of a matrix product, if it has one."""
    if has_same_math(act, GELU):
        return "gelu", act.approximate
    return ("swish", "") if has_same_math(act, SiLU) else None


def plain_linear(ops: Any, env: Environment) -> bool | str:
    """Whether the product multiplies plain tensors, as these fusions do."""
    if env.recipe is None:
        return True
    return (
        f"{type(env.recipe).__name__} quantizes the linear, "
        "and this fusion multiplies plain tensors"
    )


def exact(ops: Any, env: Environment) -> bool | str:
    """Under a recipe the operands of a product are in fp32; their values are not rounded."""
    if env.recipe is None or env.dtype in (torch.float32, torch.float64):
        return True
    return plain_linear(ops, env)


def _with_activation(ops: Any, env: Environment) -> bool | str:
    if env.device.type != "cpu":
        gelu = len(ops) == 3 and epilogue(ops[2]) == ("gelu", "tanh")
        return (gelu and kernels.has_gelu_epilogue(env)) or (
            "on a GPU only bias + GELU (tanh), in half precision and without a backward, "
            "go into the product"
        )
    if not env.requires_grad or max(ops[0].in_features, ops[0].out_features) < MIN_FEATURES_APART:
        return True
    return (
        "on a CPU the backward needs the activation's input, "
        "so the activation cannot go into the product"
    )


def activation_fits(ops: Any, env: Environment) -> bool | str:
    """Whether a Triton product, or a library's, takes the activation of a forward."""
    if (refusal := exact(ops, env)) is not True:
        return refusal
    refused = choice.refusal(ops, env)
    apart = _with_activation(ops, env) if refused else True
    return apart if apart is True or env.device.type == "cpu" else f"{apart}; {refused}"


def _plain_and_pays(ops: Any, env: Environment) -> bool | str:
    if adds_nothing(env):
        return (
            f"on this {env.device.type.upper()}, in {str(env.dtype)[6:]}, "
            "it would do what the ops do one by one"
        )
    enough = pays(ops, env)
    return plain_linear(ops, env) if enough is True else enough


def activation_pays(ops: Any, env: Environment) -> bool | str:
    """Whether fusing the backward of a linear, with an activation or without, is faster."""
    apart = _with_activation(ops, env) if isinstance(ops[-1], Activation) else True
    return _plain_and_pays(ops, env) if apart is True else apart


def alone_pays(ops: Any, env: Environment) -> bool | str:
    """Whether there is a faster library for a forward that is only a product."""
    if env.device.type != "cpu":
        return "a product with nothing around it has one library here"
    return _plain_and_pays(ops, env)


def scale_pays(ops: Any, env: Environment) -> bool | str:
    """Whether fusing the backward of linear + scale is faster."""
    return _plain_and_pays(ops, env) if env.device.type == "cpu" else plain_linear(ops, env)


def pays(ops: Any, env: Environment) -> bool | str:
    """Whether there are enough features for a fused backward to be faster."""
    if env.measured is not None:
        return True
    features = max(op.in_features or 0 for op in ops)
    if env.device.type == "cpu" and features < kernels.MIN_FEATURES:
        return f"{features} features are too few for it to pay on a CPU"
    return True


def scales_gradient(env: Environment) -> bool:
    """Whether a pass over the gradient is cheaper than a scale in each matrix product."""
    return env.device.type == "cpu"


def adds_nothing(env: Environment) -> bool:
    """Whether the backward of a linear is the same matrix products fused or not."""
    if env.device.type != "cpu" or env.dtype is not torch.float32:
        return True
    if env.measured is not None:
        return env.measured < MIN_SPEED
    return not libraries.onednn_is_faster()
