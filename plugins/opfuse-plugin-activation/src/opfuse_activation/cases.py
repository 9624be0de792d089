"""The kernels that ``python -m opfuse_triton`` compiles; nothing else imports this."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from opfuse_triton import KernelCase, Operand
from opfuse_triton.elementwise import formulas, kernels, twins
from torch import Tensor

from opfuse import ops

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


def _case(name: str, op: Any, inputs: str, outputs: str, *shapes: Any) -> KernelCase:
    """A forward, or a backward if there is a ``dy``, by the kernels and by PyTorch's operations."""
    scaled = "scales" in inputs
    formula: Any = formulas.formula_of(op, scaled)
    values = formula.functions.numbers(op.numbers_of())
    numbers: tuple[Any, ...] = (op.numbers_of(),) if "dy" in inputs else ()
    names: tuple[str, ...]
    rest: tuple[Any, ...]
    if "dy" not in inputs:
        which, names, rest = "forward", ("x", "bias", "scales"), ("kept" in outputs,)
    elif scaled:
        which, names, rest = "scaled_backward", ("dy", "x", "scales"), (True,)
    else:
        which, names, rest = "backward", ("dy", "x"), ("dx" in outputs, "dbias" in outputs)

    def arguments(given: Mapping[str, Tensor]) -> list[Any]:
        dtype = (given["x"].dtype,) if which == "forward" else ()
        return [*[given.get(name) for name in names], *dtype, *rest]

    def run(**given: Tensor) -> tuple[Tensor, ...]:
        return _given(getattr(kernels, which)(formula, values, *arguments(given)))

    def separate(**given: Tensor) -> tuple[Tensor, ...]:
        return _given(getattr(twins, which)(op, *numbers, *arguments(given)))

    peer = _LIGER.get((inputs, outputs)) if op is _SWIGLU else None
    peers = {} if peer is None else {"liger-kernel": peer}
    tensors = _tensors(op, inputs, outputs)
    both, width = (_BF16, _FP32), 5024 if getattr(op, "glu_interleave_size", None) else 5001
    unaligned = [{"rows": 8192, "features": width}]
    return KernelCase(
        name, run, tensors, shapes, _SMALL, separate=separate, peers=peers, dtypes=both,
        unaligned=unaligned, turn=30, overwrites={} if op.gated else {"dx_ptr": "dy_ptr"},
    )  # fmt: skip


def _liger_swiglu(x: Tensor) -> Tensor:
    from liger_kernel.ops.swiglu import swiglu_fused_gate_up_forward

    return swiglu_fused_gate_up_forward(x)[1]  # type: ignore[no-any-return]


def _liger_swiglu_backward(dy: Tensor, x: Tensor) -> Tensor:
    from liger_kernel.ops.swiglu import swiglu_fused_gate_up_backward

    return swiglu_fused_gate_up_backward(x, dy)  # type: ignore[no-any-return]


_LIGER = {("x", "y"): _liger_swiglu, ("dy x", "dx"): _liger_swiglu_backward}
_BY_ONE, _BY_32 = ops.ClampedSwiGLU(glu_interleave_size=1), ops.SwiGLU(glu_interleave_size=32)

CASES = [
    _case("bias + GELU", _GELU, "x bias", "y kept", _HIDDEN, _NARROW),
    _case("bias + GELU, inference", _GELU, "x bias", "y", _HIDDEN, _NARROW),
    _case("bias + GELU backward", _GELU, "dy x", "dx dbias", _HIDDEN, _NARROW),
    _case("bias + GELU (erf) backward", ops.GELU(approximate="none"), "dy x", "dx dbias", _HIDDEN),
    _case("bias + GELU backward, bias only", _GELU, "dy x", "dbias", _NARROW),
    _case("SwiGLU", _SWIGLU, "x", "y", _LLAMA, _EXPERTS),
    _case("SwiGLU backward", _SWIGLU, "dy x", "dx", _LLAMA, _EXPERTS),
    _case("bias + SwiGLU", _SWIGLU, "x bias", "y kept", _LLAMA),
    _case("bias + SwiGLU backward", _SWIGLU, "dy x", "dx dbias", _LLAMA, _NARROW),
    _case("SwiGLU, by 32", _BY_32, "x", "y", _LLAMA),
    _case("bias + SwiGLU backward, by 32", _BY_32, "dy x", "dx dbias", _LLAMA),
    _case("bias + ClampedSwiGLU, by 1", _BY_ONE, "x bias", "y kept", _LLAMA),
    _case("bias + ClampedSwiGLU backward, by 1", _BY_ONE, "dy x", "dx dbias", _LLAMA),
    _case("bias + SiTUGLU backward", ops.SiTUGLU(), "dy x", "dx dbias", _LLAMA),
    _case("scaled SwiGLU", _SWIGLU, "x scales", "y", _EXPERTS),
    _case("scaled SwiGLU backward", _SWIGLU, "dy x scales", "dx dscales", _EXPERTS, _LLAMA),
    _case("scaled SReLU backward", ops.SReLU(), "dy x scales", "dx dscales", _EXPERTS),
]
"""Hidden layers of 4096 and 16384 features, Llama 3 8B, and experts of 768 features."""
