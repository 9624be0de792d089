"""The Triton products at the sizes of real models, for ``python -m opfuse_triton`` to check."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from opfuse_triton import KernelCase, Operand, functions_of
from torch import Tensor
from torch.nn import functional as F

from opfuse.ops import GELU, QGELU, ReLU, SiLU, SiTUGLU, SReLU, SwiGLU

from .products import BY_POINTERS, BY_TILES, activation_gradient, multiply

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


def _kept_twin(act: Any) -> Callable[..., Any]:
    def twin(x: Tensor, weight: Tensor, bias: Tensor) -> Any:
        hidden = F.linear(x, weight, bias)
        return act.value(hidden), hidden

    return twin


def _before_linear(dy: Tensor, weight: Tensor, hidden: Tensor, *, act: Any) -> Any:
    functions: Any = functions_of(act)
    numbers = functions.numbers(act.numbers_of())
    return activation_gradient(dy, weight, hidden, functions, numbers, sums=True)


def _before_linear_apart(dy: Tensor, weight: Tensor, hidden: Tensor, *, act: Any) -> Any:
    dx = torch.ops.aten.gelu_backward(dy.mm(weight), hidden, approximate=act.approximate)
    return dx, dx.sum(0)


def _before_swiglu_apart(dy: Tensor, weight: Tensor, hidden: Tensor) -> Any:
    gradient, (gate, up) = dy.mm(weight), hidden.chunk(2, 1)
    of_gate = torch.ops.aten.silu_backward(gradient * up, gate)
    dx = torch.cat([of_gate, gradient * F.silu(gate)], 1)
    return dx, dx.sum(0)


def _before_linear_twin(dy: Tensor, weight: Tensor, hidden: Tensor, *, act: Any) -> Any:
    dx = act.backward_value(dy.mm(weight), hidden)
    return dx, dx.sum(0)


def _gradient_operands(
    rows: int, outputs: int, features: int, halves: int = 1
) -> Mapping[str, Operand]:
    full = Operand((rows, halves * features), BF16)
    return {
        "dy": Operand((rows, outputs), BF16),
        "weight": Operand((outputs, features), BF16),
        "hidden": full,
        "dx": replace(full, output=True),
        "db": Operand((halves * features,), BF16, "vector", output=True),
    }


def _gated_apart(x: Tensor, weight: Tensor, up: Tensor, bias: Tensor) -> Tensor:
    return F.silu(F.linear(x, weight, bias)) * F.linear(x, up, bias)


def _gated_kept_apart(x: Tensor, weight: Tensor, up: Tensor, bias: Tensor) -> Any:
    gate, linear = F.linear(x, weight, bias), F.linear(x, up, bias)
    return F.silu(gate) * linear, torch.cat([gate, linear], -1)


def _operations(**shape: int) -> int:
    return 2 * math.prod(shape.values())


def _both_operations(**shape: int) -> int:
    return 2 * _operations(**shape)


# Peers: quack-kernels as of 0.6.4. Its products are not tuned here, which takes minutes


def _quack_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return _quack_gelu_kept(x, weight, bias, False)[0]


def _quack_gelu_kept(
    x: Tensor, weight: Tensor, bias: Tensor, keep: bool = True
) -> tuple[Tensor, Tensor]:
    from quack.gemm_interface import gemm_act

    how = {"activation": "gelu_tanh_approx", "store_preact": keep, "tuned": False}
    hidden, y = gemm_act(x, weight.t(), bias=bias, **how)
    return y, hidden


def _quack_add(x: Tensor, weight: Tensor, bias: Tensor, addend: Tensor) -> Tensor:
    from quack.gemm_interface import gemm_add

    return gemm_add(x, weight.t(), addend, bias=bias, tuned=False)  # type: ignore[no-any-return]


_MLP = [
    {"rows": 8192, "depth": 1024, "features": 4096},
    {"rows": 512, "depth": 768, "features": 3072},
]
_GATED = [{"rows": 8192, "depth": 4096, "features": 14336}]
_DOWN = [
    {"rows": 8192, "depth": 4096, "features": 1024},
    {"rows": 8192, "depth": 14336, "features": 4096},
]
_WIDE = [{"rows": 8192, "depth": 4096, "features": 4096}]
_TANH = GELU()
_KEPT = {
    "GELU (tanh), wide": _TANH,
    "GELU (erf)": GELU(approximate="none"),
    "QGELU": QGELU(),
    "ReLU": ReLU(),
    "SReLU": SReLU(),
    "SiLU": SiLU(),
}
"""The activations of one value: which tiles of 128x256 spill differs between them."""
_BACK = [
    {"rows": 8192, "outputs": 1024, "features": 4096},
    {"rows": 8192, "outputs": 12288, "features": 49152},
    {"rows": 1000, "outputs": 129, "features": 771},
]
_BACK_GATED = [{"rows": 8192, "outputs": 4096, "features": 14336}, _BACK[-1]]
_BACK_SMALL = [
    {"rows": 130, "outputs": 64, "features": 264},
    {"rows": 3, "outputs": 65, "features": 31},
]
_ODD = [{"rows": 1000, "depth": 129, "features": 771}]
_SMALL = [{"rows": 127, "depth": 64, "features": 264}, {"rows": 3, "depth": 65, "features": 31}]

CASES = [
    KernelCase(
        "linear + GELU", _product(_GELU), _operands(), _MLP + _ODD, _SMALL,
        gemms=_GEMMS, flops=_operations, unaligned=_ODD,
        separate=lambda x, weight, bias: F.gelu(F.linear(x, weight, bias), approximate="tanh"),
        peers={"quack-kernels": _quack_gelu},
    ),
    KernelCase(
        "linear + GELU, kept", _product(_GELU, keep=True), _operands("hidden"), _MLP + _ODD,
        _SMALL, gemms=_GEMMS, flops=_operations, unaligned=_ODD, separate=_training_apart,
        peers={"quack-kernels": _quack_gelu_kept},
    ),
    *[
        KernelCase(
            f"linear + {name}, kept", _product(functions_of(act), keep=True), _operands("hidden"),
            _WIDE, [], gemms=_GEMMS, flops=_operations, twin=_kept_twin(act), turn=80,
            separate=_training_apart if act is _TANH else None,
        )
        for name, act in _KEPT.items()
    ],
    *[
        KernelCase(
            f"gradient of {name} before a linear", functools.partial(_before_linear, act=act),
            _gradient_operands, _BACK, _BACK_SMALL, gemms=_GEMMS, flops=_operations,
            separate=functools.partial(_before_linear_apart, act=act), turn=70,
        )
        for name, act in (("GELU", GELU()), ("GELU (erf)", GELU(approximate="none")))
    ],
    *[
        KernelCase(
            f"gradient of {name} before a linear", functools.partial(_before_linear, act=act),
            functools.partial(_gradient_operands, halves=2), _BACK_GATED, _BACK_SMALL,
            gemms=_GEMMS, flops=_operations, separate=separate, turn=70,
            twin=functools.partial(_before_linear_twin, act=act),
        )
        for name, act, separate in (
            ("SwiGLU", SwiGLU(), _before_swiglu_apart), ("SiTUGLU", SiTUGLU(), None)
        )
    ],
    KernelCase(
        "linear + add", _product(), _operands("addend"), _DOWN + _ODD, _SMALL,
        gemms=_GEMMS, flops=_operations, unaligned=_ODD,
        separate=lambda x, weight, bias, addend: F.linear(x, weight, bias) + addend,
        peers={"quack-kernels": _quack_add},
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
        twin=_gated_kept_apart, separate=_gated_apart,
    ),
]  # fmt: skip
