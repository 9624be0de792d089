"""The Triton products at the sizes of real models, for ``python -m opfuse_triton`` to check."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from opfuse_triton import KernelCase, Operand, functions_of
from torch import Tensor
from torch.nn import functional as F

from opfuse.ops import GELU, SwiGLU
from opfuse.ops.cross_entropy import LossNumbers

from . import chunks
from .products import BY_POINTERS, BY_TILES, multiply
from .softmax import softmax_in_place

BF16 = torch.bfloat16
_GELU, _SWIGLU = functions_of(GELU()), functions_of(SwiGLU())
_GEMMS = BY_TILES.name, BY_POINTERS.name


def _product(functions: Any = None, **how: Any) -> Callable[..., Any]:
    """A product as a case runs it."""

    def run(x: Tensor, weight: Tensor, bias: Tensor, up: Any = None, addend: Any = None) -> Any:
        weights, biases = ((weight,), (bias,)) if up is None else ((weight, up), (bias, bias))
        y, hidden = multiply(x, weights, biases, functions, addend=addend, **how)
        return y if hidden is None else (y, hidden)

    return run


def _operands(*others: str) -> Callable[..., Mapping[str, Operand]]:
    """The operands of a product, with those of ``"up"``, ``"addend"`` and ``"hidden"`` it has."""

    def operands(rows: int, depth: int, features: int) -> Mapping[str, Operand]:
        weight, full = Operand((features, depth), BF16), Operand((rows, features), BF16)
        width = features * (2 if "up" in others else 1)
        known = {
            "x": Operand((rows, depth), BF16),
            "weight": weight,
            "up": weight,
            "bias": Operand((features,), BF16, "vector"),
            "addend": full,
            "y": replace(full, output=True),
            "hidden": Operand((rows, width), BF16, output=True),
        }
        wanted = {"x", "weight", "bias", "y", *others}
        return {name: operand for name, operand in known.items() if name in wanted}

    return operands


def _training_apart(x: Tensor, weight: Tensor, bias: Tensor) -> Any:
    hidden = F.linear(x, weight, bias)
    return F.gelu(hidden, approximate="tanh"), hidden


def _gated_apart(x: Tensor, weight: Tensor, up: Tensor, bias: Tensor) -> Tensor:
    return F.silu(F.linear(x, weight, bias)) * F.linear(x, up, bias)


def _gated_kept_apart(x: Tensor, weight: Tensor, up: Tensor, bias: Tensor) -> Any:
    gate, linear = F.linear(x, weight, bias), F.linear(x, up, bias)
    return F.silu(gate) * linear, torch.cat([gate, linear], -1)


def _softmax(
    logits: Tensor, targets: Tensor, weights: Tensor, *, numbers: LossNumbers
) -> tuple[Tensor, Tensor]:
    losses = softmax_in_place(logits, targets, weights, numbers)
    return logits, losses


def _softmax_twin(
    logits: Tensor, targets: Tensor, weights: Tensor, *, numbers: LossNumbers
) -> tuple[Tensor, Tensor]:
    losses = chunks.softmax_in_place(logits, targets, weights, numbers)
    return logits, losses


def _draw_targets(rows: int, classes: int) -> dict[str, Tensor]:
    targets, weights = torch.randint(classes, (rows,)), torch.rand(rows)
    targets[::7], weights[::7] = LossNumbers().ignore_index, 0.0
    return {"targets": targets, "weights": weights}


def _operations(rows: int, depth: int, features: int) -> int:
    return 2 * rows * depth * features


def _both_operations(**shape: int) -> int:
    return 2 * _operations(**shape)


def _softmax_operands(rows: int, classes: int) -> Mapping[str, Operand]:
    return {
        "logits": Operand((rows, classes), BF16),
        "targets": Operand((rows,), torch.int64, "vector"),
        "weights": Operand((rows,), torch.float32, "vector"),
        "gradient": Operand((rows, classes), BF16, output=True),
        "losses": Operand((rows,), torch.float32, "vector", output=True),
    }


def _twice_and_once(rows: int, classes: int) -> int:
    """A row is wider than what a program keeps: it is read twice, and written once."""
    return 3 * rows * classes * BF16.itemsize


_ALL = LossNumbers(label_smoothing=0.1, z_loss=1e-4, softcap=30.0)
_VOCABULARIES = [{"rows": 512, "classes": 128256}, {"rows": 512, "classes": 32000}]
_FEW = [{"rows": 5, "classes": 5000}, {"rows": 3, "classes": 65}]

_MLP = [
    {"rows": 8192, "depth": 1024, "features": 4096},
    {"rows": 512, "depth": 768, "features": 3072},
]
_GATED = [{"rows": 8192, "depth": 4096, "features": 14336}]
_DOWN = [{"rows": 8192, "depth": 4096, "features": 1024}]
_ODD = [{"rows": 1000, "depth": 129, "features": 771}]
_SMALL = [{"rows": 127, "depth": 64, "features": 264}, {"rows": 3, "depth": 65, "features": 31}]

CASES = [
    KernelCase(
        "linear + GELU", _product(_GELU), _operands(), _MLP + _ODD, _SMALL,
        gemms=_GEMMS, flops=_operations, unaligned=_ODD,
        separate=lambda x, weight, bias: F.gelu(F.linear(x, weight, bias), approximate="tanh"),
    ),
    KernelCase(
        "linear + GELU, kept", _product(_GELU, keep=True), _operands("hidden"), _MLP + _ODD,
        _SMALL, gemms=_GEMMS, flops=_operations, unaligned=_ODD, separate=_training_apart,
    ),
    KernelCase(
        "linear + add", _product(), _operands("addend"), _DOWN + _ODD, _SMALL,
        gemms=_GEMMS, flops=_operations, unaligned=_ODD,
        separate=lambda x, weight, bias, addend: F.linear(x, weight, bias) + addend,
    ),
    KernelCase(
        "linear + scale + add", _product(scale=0.5), _operands("addend"), _DOWN, _SMALL[:1],
        gemms=_GEMMS, flops=_operations, unaligned=_ODD,
        separate=lambda x, weight, bias, addend: F.linear(x, weight, bias) * 0.5 + addend,
    ),
    KernelCase(
        "gate and up + SwiGLU", _product(_SWIGLU), _operands("up"), _GATED + _ODD, _SMALL,
        gemms=_GEMMS, flops=_both_operations, unaligned=_ODD, separate=_gated_apart,
    ),
    KernelCase(
        "gate and up + SwiGLU, kept", _product(_SWIGLU, keep=True), _operands("up", "hidden"),
        _GATED + _ODD, _SMALL, gemms=_GEMMS, flops=_both_operations, unaligned=_ODD,
        twin=_gated_kept_apart,
    ),
    *[
        KernelCase(
            name, functools.partial(_softmax, numbers=numbers), _softmax_operands, _VOCABULARIES,
            _FEW, floor=_twice_and_once, twin=functools.partial(_softmax_twin, numbers=numbers),
            draw=_draw_targets, unaligned=[{"rows": 512, "classes": 50257}], turn=20,
        )
        for name, numbers in (("softmax of a loss", LossNumbers()), ("with all options", _ALL))
    ],
]  # fmt: skip
