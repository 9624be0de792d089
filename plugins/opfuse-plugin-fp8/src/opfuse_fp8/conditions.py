"""Where the kernels run. Importing this imports no Triton."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import torch

from opfuse import Environment

from .quantizers import BlockQuantizer, CurrentQuantizer, DelayedQuantizer, MXQuantizer

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What the kernels read and cast. They compute in fp32."""

_KNOWN = BlockQuantizer, CurrentQuantizer, DelayedQuantizer, MXQuantizer
_CODES = torch.float8_e4m3fn, torch.float8_e5m2


def of_quantizer(quantizer: Any) -> str:
    """Why the kernels cannot cast as a quantizer does, as a sentence; empty: they can."""
    name = type(quantizer).__name__
    if type(quantizer) not in _KNOWN:
        known = ", ".join(cls.__name__ for cls in _KNOWN)
        return f"its kernels cast as {known} do, and this is a {name}"
    if quantizer.dtype not in _CODES:
        return f"its kernels make E4M3 and E5M2, and the {name} makes {quantizer.dtype}"
    if getattr(quantizer, "square", False):
        return "its kernels have a scale for 1 x 32 values, and here 32 x 32 share one"
    return ""


def of_machine(env: Environment) -> str:
    """Why no kernel can run there, as a sentence; empty: one can."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed: on Linux, python -m pip install triton"
    if env.device.type == "cuda":
        old = torch.version.hip is None and env.capability is not None and env.capability < (8, 0)
        return "its kernels need a GPU of compute capability 8.0 or newer" if old else ""
    interpreting = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")
    if env.device.type == "cpu" and interpreting:
        return ""
    return f"its kernels run on a GPU, and this is {env.device.type}"


def why_not(env: Environment, quantizer: Any, activation: Any = None) -> str:
    """Why a kernel cannot run, as a sentence; empty: it can.

    Args:
        env: Where it is to run.
        quantizer: What it is to cast with.
        activation: The activation in it, or None.
    """
    if why := of_machine(env) or of_quantizer(quantizer):
        return why
    if env.dtype not in DTYPES:
        name = str(env.dtype).removeprefix("torch.")
        return f"its kernels compute in fp32, and the ops in {name}"
    if env.compiling:
        return "its kernels are not in graphs: torch.compile fuses the separate ops"
    if activation is None:
        return ""
    from . import formulas

    return formulas.why_not(activation)


def runs(quantizer: Any, env: Environment, activation: Any = None) -> bool | str:
    """Where a kernel can run, or its twin is wanted; else the sentence."""
    if env.options.get("fp8.twins"):
        return of_quantizer(quantizer) or True
    return why_not(env, quantizer, activation) or True
