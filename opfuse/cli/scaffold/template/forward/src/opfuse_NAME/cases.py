"""What ``python -m opfuse_triton check`` compiles, and tests count; no model imports it."""

from __future__ import annotations

from typing import Any

import torch
from opfuse import ops
from opfuse_triton import KernelCase, Operand, functions_of
from torch import Tensor

from . import kernels


def run(x: Tensor, bias: Tensor) -> Any:
    """Launch what the fusion launches."""
    functions: Any = functions_of(ops.GELU())
    return kernels.bias_activation(x, bias, functions, (), keep=True)


def tensors(rows: int, features: int) -> dict[str, Operand]:
    """What ``run`` takes and gives, in this order."""
    full = (rows, features), torch.bfloat16
    return {
        "x": Operand(*full),
        "bias": Operand((features,), torch.bfloat16, "vector"),
        "y": Operand(*full, output=True),
        "hidden": Operand(*full, output=True),
    }


CASES = [
    KernelCase(
        "bias + GELU",
        run,
        tensors,
        shapes=[{"rows": 8192, "features": 4096}],
        small=[{"rows": 9, "features": 1000}, {"rows": 3, "features": 4096}],
    )
]
