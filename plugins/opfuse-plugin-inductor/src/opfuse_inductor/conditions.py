"""Where a run may be compiled, and where that pays."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Sequence
from typing import Any

import torch

from opfuse import Environment
from opfuse import ops as built_in
from opfuse.ops.authoring import op_class

from .reads import Reads

DEFAULTS: dict[str, Any] = {
    "inductor.min_elements": 1 << 14,
    "inductor.min_passes": 2,
    "inductor.backend": ("inductor", "eager"),
}
"""The smallest size to compile, the least work of the separate ops, and the backend."""


def option(env: Environment, name: str) -> Any:
    """One of the plugin's options."""
    default = DEFAULTS[name]
    return env.options.get(name, default[0] if isinstance(default, tuple) else default)


def unavailable(env: Environment) -> str | None:
    """Why nothing can be compiled here, whatever the ops are, or None."""
    kind = env.device.type
    if env.compiling:
        return "torch.compile is tracing, and compiles the ops itself"
    if kind not in ("cpu", "cuda"):
        return f"it compiles for cpu and cuda, the input is on {kind}"
    if env.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        return f"it does not compile for {env.dtype}"
    if option(env, "inductor.backend") == "eager":
        return None
    compiler = cpp_compiler() if kind == "cpu" else None
    if compiler is not None and shutil.which(compiler) is None:
        missing = f"{compiler!r} is not found (CXX names another one)"
        return f"Inductor needs a C++ compiler on a CPU, and {missing}"
    if kind == "cuda" and importlib.util.find_spec("triton") is None:
        return "Inductor needs Triton on a GPU, and it is not installed"
    if kind == "cuda" and env.capability is not None and env.capability < (7, 0):
        has = ".".join(map(str, env.capability))
        return f"Triton needs compute capability 7.0, this GPU has {has}"
    return None


def cpp_compiler() -> str | None:
    """The C++ compiler that Inductor calls; None: it finds it by itself."""
    if sys.platform == "win32":
        return None
    usual = "clang++" if sys.platform == "darwin" else "g++"
    return next(iter(os.environ.get("CXX", "").split()), usual)


def _unfit(ops: Sequence[Any]) -> str | None:
    for op in ops:
        name = op_class(op).__name__
        if isinstance(op, built_in.RMSNorm) and len(op.normalized_shape) > 1:
            return f"{name} normalizes over {len(op.normalized_shape)} dimensions, it takes one"
        if getattr(op, "cache_quantized_input", False):
            return f"{name} keeps its input in FP8, and compiled code keeps it as it is"
        if op.feature_ratio is None and not isinstance(op, (built_in.RMSNorm, built_in.Bias)):
            return f"{name} does not declare its feature_ratio"
    return Reads(ops).refusal


_ONE_PASS = {
    *(built_in.GELU, built_in.SiLU, built_in.ReLU),
    *(built_in.Bias, built_in.ConstantScale, built_in.AddExtraInput),
}


def passes(op: Any, device: str = "cpu") -> int:
    """How many passes over a tensor the op makes by itself, in each direction.

    Work that takes as long as some passes counts as that many.
    """
    if isinstance(op, (built_in.Identity, built_in.MakeExtraOutput)):
        return 0
    if isinstance(op, built_in.Dropout):
        return 2 if op.training and op.p else 0
    if isinstance(op, (built_in.RMSNorm, built_in.L2Normalization)):
        return 5
    if isinstance(op, (built_in.GatedActivation, built_in.ScaledActivation)):
        return 3
    if device == "cpu" and op_class(op) is built_in.GELU and op.approximate == "tanh":
        return 3  # PyTorch's kernel computes a slow tanh
    return 1 if op_class(op) in _ONE_PASS else 2


def _too_little(ops: Sequence[Any], env: Environment) -> str | None:
    count = sum(passes(op, env.device.type) for op in ops)
    least = option(env, "inductor.min_passes")
    if count >= least:
        return None
    made = "one pass" if count == 1 else f"{count} passes"
    does = f"the separate ops make {made} over memory, and PyTorch has a kernel for that"
    return f"{does}: {least} are worth compiling"


def too_small(ops: Sequence[Any], env: Environment) -> str | None:
    """Why the separate ops are as fast, by the size of the input; None: they seem to be slower.

    A measurement decides, and an unknown size is checked when the run is called.
    """
    if env.measured is not None or env.rows is None or env.features is None:
        return None
    least = option(env, "inductor.min_elements")
    good = built_in.GatedActivation, built_in.Identity  # PyTorch's own kernels for these
    if env.dtype is torch.float32 and all(isinstance(op, good) for op in ops):
        least *= 4
    if env.rows * env.features >= least and (env.rows > 1 or not least):
        return None
    size = f"{env.rows} rows or a few more of {env.features} features"
    return f"with {size} the separate ops are as fast"


def pays(ops: Any, env: Environment) -> bool | str:
    """Asked while planning: True, or the sentence that ``opfuse.explain`` shows."""
    return unavailable(env) or _unfit(ops) or _too_little(ops, env) or too_small(ops, env) or True


def benefit(ops: Any, env: Environment) -> float:
    """The passes over memory that disappear."""
    return 2 * (sum(passes(op, env.device.type) for op in ops) - 1) + 0.1 * len(ops)
