"""The launches that ``python -m opfuse_triton`` compiles; nothing else imports this."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from opfuse_triton import KernelCase, Operand
from opfuse_triton.elementwise import formulas, kernels, twins
from opfuse_triton.norms import LAYER, RMS, Norm, forward
from opfuse_triton.norms import twins as norm_twins
from torch import Tensor

from opfuse import ops

_BF16, _FP32 = torch.bfloat16, torch.float32
_MODELS = ({"rows": 8192, "features": 14336},)
_SMALL = ({"rows": 67, "features": 1792}, {"rows": 9, "features": 160})  # halves of 32 in turns
_WIDTHS = tuple([{"rows": 8192, "features": features} for features in (2048, 4096, 8192)])


def _gradients(name: str, op: Any, with_sums: bool) -> KernelCase:
    """The gradient of an activation's input, its sums for the bias, and the output once more."""
    formula: Any = formulas.formula_of(op)
    numbers = op.numbers_of()
    values = formula.functions.numbers(numbers)
    needs = True, with_sums, True

    def tensors(rows: int, features: int) -> dict[str, Operand]:
        width = features * op.feature_ratio
        narrow, wide = Operand((rows, features), _BF16), Operand((rows, width), _BF16)
        found = {"dy": narrow, "z": wide, "dz": Operand(wide.shape, _BF16, output=True)}
        if with_sums:
            found["sums"] = Operand((width,), _BF16, "vector", output=True)
        return found | {"y": Operand(narrow.shape, _BF16, output=True)}

    def given(made: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
        return tuple([tensor for tensor in made if tensor is not None])

    def run(dy: Tensor, z: Tensor) -> tuple[Tensor, ...]:
        return given(kernels.backward(formula, values, dy, z, *needs))

    def separate(dy: Tensor, z: Tensor) -> tuple[Tensor, ...]:
        return given(twins.backward(op, numbers, dy, z, *needs))

    size = getattr(op, "glu_interleave_size", None)
    unaligned = [{"rows": 8192, "features": 5024 if size else 5001}]  # halves of 32 in turns
    return KernelCase(
        name, run, tensors, _MODELS, _SMALL, separate=separate, unaligned=unaligned, turn=60,
        overwrites={"y_ptr": "dy_ptr"},
    )  # fmt: skip


def _norm(name: str, kind: str) -> KernelCase:
    """The output of a norm once more."""
    norm = Norm(kind, 1, False)

    def tensors(rows: int, features: int) -> Mapping[str, Operand]:
        full, row = Operand((rows, features), _BF16), Operand((rows, 1), _FP32, "vector")
        vector = Operand((features,), _BF16, "vector")
        found = {"x": full, "weight": vector, "rstd": row}
        if kind == LAYER:
            found |= {"bias": vector, "mean": row}
        return found | {"y": Operand((rows, features), _BF16, output=True)}

    def of(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def compute(x: Tensor, weight: Tensor, rstd: Tensor, **others: Tensor) -> Tensor:
            bias, mean = others.get("bias"), others.get("mean")
            return run(x, weight, bias, mean, rstd, norm, None)

        return compute

    run, separate = of(forward.again), of(norm_twins.again)
    return KernelCase(
        name, run, tensors, _WIDTHS, _SMALL, separate=separate, dtypes=(_BF16, _FP32), turn=60
    )


CASES = [
    _gradients("SwiGLU, gradient and output", ops.SwiGLU(), False),
    _gradients("bias + SwiGLU, gradients and output", ops.SwiGLU(), True),
    _gradients(
        "ClampedSwiGLU by 32, gradient and output", ops.ClampedSwiGLU(glu_interleave_size=32), False
    ),
    _gradients("bias + GELU, gradients and output", ops.GELU(), True),
    _norm("RMSNorm again", RMS),
    _norm("LayerNorm again", LAYER),
]
"""What the backward of an MLP computes; its forward has the kernels of activations and norms."""
