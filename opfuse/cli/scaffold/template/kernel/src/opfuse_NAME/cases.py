"""What ``python -m opfuse_triton check`` compiles, and tests count; no model imports it."""

from __future__ import annotations

from typing import Any

import torch
from opfuse import ops
from opfuse_triton import KernelCase, Operand, functions_of
from torch import Tensor

from . import kernels


def run(**tensors: Tensor) -> Any:
    """Launch what the fusion launches."""
    given: Any = {**tensors, "functions": functions_of(ops.GELU()), "numbers": ()}
    # only forward
    return kernels.bias_activation(**given, keep=True)
    # only backward
    return kernels.bias_activation_grad(**given, needs_dx=True, needs_dbias=True)
    # all


def tensors(rows: int, features: int) -> dict[str, Operand]:
    """What ``run`` takes and gives, in this order."""
    full = (rows, features), torch.bfloat16
    # only forward
    return {
        "x": Operand(*full),
        "bias": Operand((features,), torch.bfloat16, "vector"),
        "y": Operand(*full, output=True),
        "hidden": Operand(*full, output=True),
    }
    # only backward
    return {
        "dy": Operand(*full),
        "x": Operand(*full),
        "dx": Operand(*full, output=True),
        "dbias": Operand((features,), torch.float32, "vector", output=True),
    }
    # all


CASES = [
    KernelCase(
        "bias + GELU",
        run,
        tensors,
        shapes=[{"rows": 8192, "features": 4096}],
        small=[{"rows": 9, "features": 1000}, {"rows": 300, "features": 192}],
    )
]
