"""The launches that ``python -m opfuse_triton`` compiles; nothing else imports this."""

from __future__ import annotations

import functools
from typing import Any

import torch
from opfuse_triton import KernelCase, Operand, functions_of
from torch import Tensor

from opfuse import ops

from . import kernels


def _run(op: Any, dy: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    functions, y = functions_of(op), torch.empty_like(dy)
    assert functions is not None
    size = getattr(op, "glu_interleave_size", None) or 0
    return kernels.launch(dy, z, y, functions, functions.numbers(op.numbers_of()), size), y


def _twin(op: Any, dy: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    return op.backward_value(dy, z), op.forward_value(z)


def _tensors(ratio: int, rows: int, features: int) -> dict[str, Operand]:
    narrow, wide = (rows, features), (rows, ratio * features)
    return {
        "dy": Operand(narrow, torch.bfloat16),
        "z": Operand(wide, torch.bfloat16),
        "dz": Operand(wide, torch.bfloat16, output=True),
        "y": Operand(narrow, torch.bfloat16, output=True),
    }


_MODELS = ({"rows": 8192, "features": 14336},)
_SMALL = ({"rows": 67, "features": 1792}, {"rows": 9, "features": 160})  # halves of 32 in turns

CASES = [
    KernelCase(
        f"{name}, its input's gradient and its output",
        functools.partial(_run, op),
        functools.partial(_tensors, op.feature_ratio),
        _MODELS,
        _SMALL,
        separate=functools.partial(_twin, op),
        unaligned=[{"rows": 8192, "features": width}],
        turn=60,
    )
    for name, op, width in (
        ("SwiGLU", ops.SwiGLU(), 5001),
        ("interleaved ClampedSwiGLU", ops.ClampedSwiGLU(glu_interleave_size=32), 5024),
        ("GELU", ops.GELU(), 5001),
    )
]
