"""Patterns that kernels over several processes have in common; each begins with a collective."""

from __future__ import annotations

from opfuse import OneOf, Optional
from opfuse.ops import AddExtraInput, Bias, LayerNorm, MakeExtraOutput, RMSNorm

from .collectives import AllReduce, ReduceScatter

REDUCE_ADD_NORM = (
    OneOf(AllReduce, ReduceScatter),
    Optional(Bias),
    AddExtraInput,
    Optional(MakeExtraOutput),
    OneOf(RMSNorm, LayerNorm),
)
"""The end of a layer that is split by rows, the residual, and the norm of the next layer.

The sum goes into the next residual where there is a ``MakeExtraOutput``. No package here fuses it.
A kernel that does reads the parts of all processes once, and writes the sum and its norm.
"""
