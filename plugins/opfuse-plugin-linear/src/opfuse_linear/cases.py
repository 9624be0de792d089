"""The Triton product at the sizes of real models, for ``python -m opfuse_triton`` to check."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from opfuse_triton import KernelCase, Operand, functions_of
from torch import Tensor
from torch.nn import functional as F

from opfuse.ops import GELU, SReLU

from .gemm import KERNEL, multiply, takes

BF16 = torch.bfloat16


def _product(act: Any, keep: bool) -> Callable[..., Any]:
    """The product as the fused op runs it: the library's, if the kernel does not take it."""
    functions: Any = functions_of(act)

    def run(x: Tensor, weight: Tensor, bias: Tensor) -> Any:
        if takes(x, weight, bias):
            y, hidden = multiply(x, weight, bias, functions, keep=keep)
        else:
            hidden = F.linear(x, weight, bias)
            y = act.forward_value(hidden)
        return (y, hidden) if keep else y

    return run


def _operands(rows: int, depth: int, features: int, keep: bool) -> Mapping[str, Operand]:
    y = Operand((rows, features), BF16, output=True)
    found = {
        "x": Operand((rows, depth), BF16),
        "weight": Operand((features, depth), BF16),
        "bias": Operand((features,), BF16, "vector"),
        "y": y,
    }
    return found | {"hidden": y} if keep else found


def _twin(x: Tensor, weight: Tensor, bias: Tensor, act: Any, keep: bool) -> Any:
    hidden = F.linear(x, weight, bias)
    y = act.value(hidden)
    return (y, hidden) if keep else y


def _apart(x: Tensor, weight: Tensor, bias: Tensor, keep: bool) -> Any:
    hidden = F.linear(x, weight, bias)
    y = F.gelu(hidden, approximate="tanh")
    return (y, hidden) if keep else y


def _operations(**shape: int) -> int:
    return 2 * math.prod(shape.values())


# Peers: quack-kernels as of 0.6.4. Its products are not tuned here, which takes minutes


def _quack(x: Tensor, weight: Tensor, bias: Tensor, keep: bool) -> Any:
    from quack.gemm_interface import gemm_act

    how = {"activation": "gelu_tanh_approx", "store_preact": keep, "tuned": False}
    hidden, y = gemm_act(x, weight.t(), bias=bias, **how)
    return (y, hidden) if keep else y


_MLP = [
    {"rows": 8192, "depth": 1024, "features": 4096},
    {"rows": 512, "depth": 768, "features": 3072},
    {"rows": 1000, "depth": 144, "features": 784},
]
_WIDE = [{"rows": 8192, "depth": 4096, "features": 4096}]
_SMALL = [{"rows": 127, "depth": 64, "features": 264}, {"rows": 3, "depth": 72, "features": 40}]
_OTHERS = {"GELU (erf)": GELU(approximate="none"), "SReLU": SReLU()}
"""Those that take the most registers."""


def _gelu(name: str, keep: bool) -> KernelCase:
    separate = functools.partial(_apart, keep=keep)
    quack = functools.partial(_quack, keep=keep)
    return KernelCase(
        name, _product(GELU(), keep), functools.partial(_operands, keep=keep), _MLP + _WIDE,
        _SMALL, gemms=(KERNEL.name,), flops=_operations, separate=separate,
        peers={"quack-kernels": quack},
    )  # fmt: skip


CASES = [
    _gelu("linear + GELU", False),
    _gelu("linear + GELU, kept", True),
    *[
        KernelCase(
            f"linear + {name}, kept", _product(act, True), functools.partial(_operands, keep=True),
            _WIDE, [], gemms=(KERNEL.name,), flops=_operations, turn=80,
            twin=functools.partial(_twin, act=act, keep=True),
        )
        for name, act in _OTHERS.items()
    ],
]  # fmt: skip
