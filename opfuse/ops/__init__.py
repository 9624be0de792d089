"""The basic ops, and ``Linear``, which combines two of them. Some are loaded at first use."""

import importlib
import typing

from ..core.cast import Cast, Identity, Quantize
from .activation import GELU, QGELU, Activation, ReLU, SiLU, SReLU
from .basic_linear import BasicLinear
from .cross_entropy import CrossEntropy
from .distributed import AllGather, AllReduce, CopyToTensorParallelRegion, ReduceScatter
from .experts import TokenCombine, TokenDispatch
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
from .norm import L2Normalization, LayerNorm, RMSNorm
from .parallel_linear import ParallelLinear
from .pointwise import ConstantScale, Dropout, Reshape, TrackedDropout
from .residual import AddExtraInput, MakeExtraOutput, SwapExtraInput
from .rope import ApplyRoPE, RoPE
from .scaled import ScaledActivation, ScaledClampedQGeGLU, ScaledSiTUGLU, ScaledSReLU, ScaledSwiGLU
from .token_log_prob import TokenLogProb

if typing.TYPE_CHECKING:
    from .low_rank_linear import LowRankLinear
    from .vocab_parallel import VocabParallelCrossEntropy
    from .vocab_parallel_log_prob import VocabParallelTokenLogProb

__all__ = [
    "GEGLU",
    "GELU",
    "GLU",
    "QGEGLU",
    "QGELU",
    "Activation",
    "AddExtraInput",
    "AllGather",
    "AllReduce",
    "ApplyRoPE",
    "BasicLinear",
    "Bias",
    "Cast",
    "ClampedSwiGLU",
    "ConstantScale",
    "CopyToTensorParallelRegion",
    "CrossEntropy",
    "Dropout",
    "GatedActivation",
    "GroupedLinear",
    "Identity",
    "L2Normalization",
    "LayerNorm",
    "Linear",
    "LowRankLinear",
    "MakeExtraOutput",
    "ParallelLinear",
    "Quantize",
    "RMSNorm",
    "ReGLU",
    "ReLU",
    "ReduceScatter",
    "Reshape",
    "RoPE",
    "SReGLU",
    "SReLU",
    "ScaledActivation",
    "ScaledClampedQGeGLU",
    "ScaledSReLU",
    "ScaledSiTUGLU",
    "ScaledSwiGLU",
    "SiLU",
    "SiTUGLU",
    "SwapExtraInput",
    "SwiGLU",
    "TokenCombine",
    "TokenDispatch",
    "TokenLogProb",
    "TrackedDropout",
    "VocabParallelCrossEntropy",
    "VocabParallelTokenLogProb",
]

_AT_FIRST_USE = {
    "LowRankLinear": "low_rank_linear",
    "VocabParallelCrossEntropy": "vocab_parallel",
    "VocabParallelTokenLogProb": "vocab_parallel_log_prob",
}


def __getattr__(name: str) -> typing.Any:
    if name not in _AT_FIRST_USE:
        raise AttributeError(f"module 'opfuse.ops' has no attribute {name!r}")
    return getattr(importlib.import_module(f"opfuse.ops.{_AT_FIRST_USE[name]}"), name)
