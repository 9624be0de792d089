"""What ``python -m opfuse_triton`` compiles and counts; never imported otherwise."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from opfuse_triton import KernelCase, Operand
from torch import Tensor

from opfuse import ops

from . import formulas, kernels, twins

_HIDDEN = {"rows": 8192, "features": 16384}
_NARROW = {"rows": 8192, "features": 4096}
_LLAMA = {"rows": 8192, "features": 14336}
_EXPERTS = {"rows": 32768, "features": 768}
_SMALL = [{"rows": 19, "features": 512}, {"rows": 5, "features": 192}]
_BF16, _FP32 = torch.bfloat16, torch.float32
_GELU, _SWIGLU = ops.GELU(), ops.SwiGLU()


def _tensors(op: Any, names: str, outputs: str) -> Callable[..., Mapping[str, Operand]]:
    """The operands of these names, in bf16; scales in fp32."""

    def tensors(rows: int, features: int) -> dict[str, Operand]:
        width = features * (2 if op.gated else 1)
        vector = {name: ((width,), _BF16) for name in ("bias", "dbias")}
        vector |= {name: ((rows,), _FP32) for name in ("scales", "dscales")}

        def operand(name: str, output: bool) -> Operand:
            if name in vector:
                return Operand(*vector[name], "vector", output)
            return Operand((rows, features if name in ("y", "dy") else width), _BF16, output=output)

        found = {name: operand(name, False) for name in names.split()}
        return found | {name: operand(name, True) for name in outputs.split()}

    return tensors


def _given(made: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    return tuple([tensor for tensor in made if tensor is not None])


def _forward(name: str, op: Any, inputs: str, outputs: str, *shapes: Any) -> KernelCase:
    scaled = "scales" in inputs
    formula: Any = formulas.formula_of(op, scaled)
    keep = "kept" in outputs

    def run(x: Tensor, bias: Any = None, scales: Any = None) -> tuple[Tensor, ...]:
        numbers = formula.functions.numbers(op.numbers_of())
        return _given(kernels.forward(formula, numbers, x, bias, scales, _BF16, keep))

    def separate(x: Tensor, bias: Any = None, scales: Any = None) -> tuple[Tensor, ...]:
        return _given(twins.forward(op, x, bias, scales, _BF16, keep))

    peers = {"liger-kernel": _liger_swiglu} if (op, inputs) == (_SWIGLU, "x") else {}
    tensors = _tensors(op, inputs, outputs)
    return KernelCase(name, run, tensors, shapes, _SMALL, separate=separate, peers=peers)


def _backward(name: str, op: Any, outputs: str, *shapes: Any) -> KernelCase:
    needs = "dx" in outputs, "dbias" in outputs
    formula: Any = formulas.formula_of(op)
    numbers = op.numbers_of()

    def run(dy: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        values = formula.functions.numbers(numbers)
        return _given(kernels.backward(formula, values, dy, x, *needs, False))

    def separate(dy: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        return _given(twins.backward(op, numbers, dy, x, *needs, False))

    peers = {"liger-kernel": _liger_swiglu_backward} if (op, outputs) == (_SWIGLU, "dx") else {}
    tensors = _tensors(op, "dy x", outputs)
    return KernelCase(name, run, tensors, shapes, _SMALL, separate=separate, peers=peers)


def _scaled_backward(name: str, op: Any, *shapes: Any) -> KernelCase:
    formula: Any = formulas.formula_of(op, True)
    numbers = op.numbers_of()

    def run(dy: Tensor, x: Tensor, scales: Tensor) -> tuple[Tensor, ...]:
        values = formula.functions.numbers(numbers)
        return _given(kernels.scaled_backward(formula, values, dy, x, scales, True))

    def separate(dy: Tensor, x: Tensor, scales: Tensor) -> tuple[Tensor, ...]:
        return _given(twins.scaled_backward(op, numbers, dy, x, scales, True))

    tensors = _tensors(op, "dy x scales", "dx dscales")
    return KernelCase(name, run, tensors, shapes, _SMALL, separate=separate)


def _liger_swiglu(x: Tensor) -> Tensor:
    from liger_kernel.ops.swiglu import swiglu_fused_gate_up_forward

    return swiglu_fused_gate_up_forward(x)[1]  # type: ignore[no-any-return]


def _liger_swiglu_backward(dy: Tensor, x: Tensor) -> Tensor:
    from liger_kernel.ops.swiglu import swiglu_fused_gate_up_backward

    return swiglu_fused_gate_up_backward(x, dy)  # type: ignore[no-any-return]


_BY_ONE, _BY_32 = ops.ClampedSwiGLU(glu_interleave_size=1), ops.SwiGLU(glu_interleave_size=32)

CASES = [
    _forward("bias + GELU", _GELU, "x bias", "y kept", _HIDDEN, _NARROW),
    _forward("bias + GELU, inference", _GELU, "x bias", "y", _HIDDEN, _NARROW),
    _backward("bias + GELU backward", _GELU, "dx dbias", _HIDDEN, _NARROW),
    _backward("bias + GELU (erf) backward", ops.GELU(approximate="none"), "dx dbias", _HIDDEN),
    _backward("bias + GELU backward, bias only", _GELU, "dbias", _NARROW),
    _forward("SwiGLU", _SWIGLU, "x", "y", _LLAMA, _EXPERTS),
    _backward("SwiGLU backward", _SWIGLU, "dx", _LLAMA, _EXPERTS),
    _forward("bias + SwiGLU", _SWIGLU, "x bias", "y kept", _LLAMA),
    _backward("bias + SwiGLU backward", _SWIGLU, "dx dbias", _LLAMA, _NARROW),
    _forward("SwiGLU, by 32", _BY_32, "x", "y", _LLAMA),
    _backward("bias + SwiGLU backward, by 32", _BY_32, "dx dbias", _LLAMA),
    _forward("bias + ClampedSwiGLU, by 1", _BY_ONE, "x bias", "y kept", _LLAMA),
    _backward("bias + ClampedSwiGLU backward, by 1", _BY_ONE, "dx dbias", _LLAMA),
    _backward("bias + SiTUGLU backward", ops.SiTUGLU(), "dx dbias", _LLAMA),
    _forward("scaled SwiGLU", _SWIGLU, "x scales", "y", _EXPERTS),
    _scaled_backward("scaled SwiGLU backward", _SWIGLU, _EXPERTS, _LLAMA),
    _scaled_backward("scaled SReLU backward", ops.SReLU(), _EXPERTS),
]
"""Hidden layers of 4096 and 16384 features, Llama 3 8B, and experts of 768 features."""
