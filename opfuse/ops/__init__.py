"""The basic ops, and ``Linear``, which combines two of them. A file is loaded at first use."""

import importlib
import typing

from ..core.cast import Cast, Identity, Quantize
from ..core.plugins import manager

if typing.TYPE_CHECKING:
    from .activation import GELU, QGELU, Activation, ReLU, SiLU, SReLU
    from .basic_linear import BasicLinear
    from .cross_entropy import CrossEntropy
    from .gated import (
        GEGLU,
        GLU,
        QGEGLU,
        ClampedSwiGLU,
        GatedActivation,
        ReGLU,
        SiTUGLU,
        SReGLU,
        SwiGLU,
    )
    from .grouped_linear import GroupedLinear
    from .linear import Bias, Linear
    from .low_rank_linear import LowRankLinear
    from .modulate import Modulate
    from .norm import L2Normalization, LayerNorm, RMSNorm
    from .parallel_linear import ParallelLinear
    from .pointwise import ConstantScale, Dropout, Reshape, TrackedDropout
    from .residual import AddExtraInput, MakeExtraOutput, SwapExtraInput
    from .rope import ApplyRoPE, RoPE
    from .scaled import (
        ScaledActivation,
        ScaledClampedQGeGLU,
        ScaledSiTUGLU,
        ScaledSReLU,
        ScaledSwiGLU,
    )
    from .token_log_prob import TokenLogProb

# fmt: off
__all__ = [
    "GEGLU", "GELU", "GLU", "QGEGLU", "QGELU", "Activation", "AddExtraInput", "ApplyRoPE",
    "BasicLinear", "Bias", "Cast", "ClampedSwiGLU", "ConstantScale", "CrossEntropy", "Dropout",
    "GatedActivation", "GroupedLinear", "Identity", "L2Normalization", "LayerNorm", "Linear",
    "LowRankLinear", "MakeExtraOutput", "Modulate", "ParallelLinear", "Quantize", "RMSNorm",
    "ReGLU", "ReLU", "Reshape", "RoPE", "SReGLU", "SReLU", "ScaledActivation",
    "ScaledClampedQGeGLU", "ScaledSReLU", "ScaledSiTUGLU", "ScaledSwiGLU", "SiLU", "SiTUGLU",
    "SwapExtraInput", "SwiGLU", "TokenLogProb", "TrackedDropout",
]
# fmt: on

_FILES = {
    "activation": "GELU QGELU Activation ReLU SiLU SReLU",
    "basic_linear": "BasicLinear",
    "cross_entropy": "CrossEntropy",
    "gated": "GEGLU GLU QGEGLU ClampedSwiGLU GatedActivation ReGLU SiTUGLU SReGLU SwiGLU",
    "grouped_linear": "GroupedLinear",
    "linear": "Bias Linear",
    "low_rank_linear": "LowRankLinear",
    "modulate": "Modulate",
    "norm": "L2Normalization LayerNorm RMSNorm",
    "parallel_linear": "ParallelLinear",
    "pointwise": "ConstantScale Dropout Reshape TrackedDropout",
    "residual": "AddExtraInput MakeExtraOutput SwapExtraInput",
    "rope": "ApplyRoPE RoPE",
    "scaled": "ScaledActivation ScaledClampedQGeGLU ScaledSiTUGLU ScaledSReLU ScaledSwiGLU",
    "token_log_prob": "TokenLogProb",
}
"""The ops in each file."""
_FILE_OF = {op: file for file, ops in _FILES.items() for op in ops.split()}


def __getattr__(name: str) -> typing.Any:
    if name in _FILES:
        return importlib.import_module(f"opfuse.ops.{name}")
    if name in _FILE_OF:
        op = getattr(importlib.import_module(f"opfuse.ops.{_FILE_OF[name]}"), name)
    else:
        op = manager.give("opfuse.ops", name)
    globals()[name] = op
    return op


def __dir__() -> list[str]:
    return sorted({*globals(), *_FILES, *_FILE_OF, *manager.entry_points["opfuse.ops"]})
