"""Where a compiled run may stand, and where it pays."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Sequence
from typing import Any

import torch

from opfuse import Environment
from opfuse.core.authoring import op_class
from opfuse.ops import (
    GELU,
    AddExtraInput,
    Bias,
    ConstantScale,
    Dropout,
    GatedActivation,
    Identity,
    L2Normalization,
    MakeExtraOutput,
    ReLU,
    RMSNorm,
    ScaledActivation,
    SiLU,
)

from .reads import Reads

DEFAULTS: dict[str, Any] = {
    "inductor.min_elements": 1 << 14,
    "inductor.min_passes": 2,
    "inductor.backend": ("inductor", "eager"),
}
"""From which size on it compiles, how much the separate ops must do, and what compiles."""


def option(env: Environment, name: str) -> Any:
    """One of the plugin's options."""
    default = DEFAULTS[name]
    return env.options.get(name, default[0] if isinstance(default, tuple) else default)


def unavailable(env: Environment) -> str | None:
    """Why nothing can be compiled here, whatever the ops do, or None."""
    kind = env.device.type
    if env.compiling:
        return "torch.compile is tracing, and compiles the ops itself"
    if kind not in ("cpu", "cuda"):
        return f"it compiles for cpu and cuda, the input is on {kind}"
    if env.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        return f"it does not compile for {env.dtype}"
    if option(env, "inductor.backend") == "eager":
        return None
    if (
        kind == "cpu"
        and (compiler := cpp_compiler()) is not None
        and shutil.which(compiler) is None
    ):
        return (
            f"Inductor needs a C++ compiler on a CPU, and {compiler!r} is not found "
            "(CXX names another one)"
        )
    if kind == "cuda" and importlib.util.find_spec("triton") is None:
        return "Inductor needs Triton on a GPU, and it is not installed"
    if kind == "cuda" and env.capability is not None and env.capability < (7, 0):
        return (
            "Triton needs compute capability 7.0, "
            f"this GPU has {env.capability[0]}.{env.capability[1]}"
        )
    return None


def cpp_compiler() -> str | None:
    """The C++ compiler that Inductor calls; None: it finds it by itself."""
    if sys.platform == "win32":
        return None
    return (
        os.environ.get("CXX", "").split() or ["clang++" if sys.platform == "darwin" else "g++"]
    )[0]


def _unfit(ops: Sequence[Any]) -> str | None:
    for op in ops:
        name = op_class(op).__name__
        if isinstance(op, RMSNorm) and len(op.normalized_shape) > 1:
            return f"{name} normalizes over {len(op.normalized_shape)} dimensions, it takes one"
        if getattr(op, "cache_quantized_input", False):
            return f"{name} keeps its input in FP8, and compiled code keeps it as it is"
        if op.feature_ratio is None and not isinstance(op, (RMSNorm, Bias)):
            return f"{name} does not declare its feature_ratio"
    return Reads(ops).refusal


def passes(op: Any, device: str = "cpu") -> int:
    """How many passes over a tensor the op makes by itself, in each direction.

    What takes as long as some passes counts as that many.
    """
    if isinstance(op, (Identity, MakeExtraOutput)):
        return 0
    if isinstance(op, Dropout):
        return 2 if op.training and op.p else 0
    if isinstance(op, (RMSNorm, L2Normalization)):
        return 5
    if isinstance(op, (GatedActivation, ScaledActivation)):
        return 3
    if device == "cpu" and op_class(op) is GELU and op.approximate == "tanh":
        return 3  # PyTorch's kernel computes a slow tanh
    return 1 if op_class(op) in (GELU, SiLU, ReLU, Bias, ConstantScale, AddExtraInput) else 2


def _too_little(ops: Sequence[Any], env: Environment) -> str | None:
    count, least = (
        sum(passes(op, env.device.type) for op in ops),
        option(env, "inductor.min_passes"),
    )
    if count >= least:
        return None
    made = "one pass" if count == 1 else f"{count} passes"
    return (
        f"the separate ops make {made} over memory, and PyTorch has a kernel for that: "
        f"{least} are worth compiling"
    )


def too_small(ops: Sequence[Any], env: Environment) -> str | None:
    """Why the separate ops are as fast, by the size of the input; None: they are not, as it seems.

    What was measured tells, and a size that is not known is seen when it runs.
    """
    if env.measured is not None or env.rows is None or env.features is None:
        return None
    least = option(env, "inductor.min_elements")
    if env.dtype is torch.float32 and all(
        isinstance(op, (GatedActivation, Identity)) for op in ops
    ):
        least *= 4  # what PyTorch has for these is good
    if env.rows * env.features >= least and (env.rows > 1 or not least):
        return None
    return (
        f"with {env.rows} rows or a few more of {env.features} features "
        "the separate ops are as fast"
    )


def pays(ops: Any, env: Environment) -> bool | str:
    """Asked while planning: True, or the sentence that ``opfuse.explain`` shows."""
    return unavailable(env) or _unfit(ops) or _too_little(ops, env) or too_small(ops, env) or True


def benefit(ops: Any, env: Environment) -> float:
    """The passes over memory that disappear."""
    return 2 * (sum(passes(op, env.device.type) for op in ops) - 1) + 0.1 * len(ops)
