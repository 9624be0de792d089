"""For each call: the kernel, launched or as a torch operation in a graph, or the twin.

``torch.compile`` sees one operation per kernel: ``opfuse_activation::forward``, ``::backward`` and
``::scaled_backward``. Eager calls launch the kernels themselves, which takes less time.
"""

from __future__ import annotations

from typing import Any

import torch
from opfuse_triton import Config
from torch import Tensor
from torch.compiler import is_compiling

from . import formulas, kernels, twins
from .conditions import DTYPES
from .formulas import Formula

Two = tuple[Tensor | None, Tensor | None]
_PLAIN = Tensor, torch.nn.Parameter  # subclasses have their ways


def forward(
    formula: Formula,
    config: Config | None,
    op: Any,
    x: Tensor,
    bias: Tensor | None,
    scales: Tensor | None,
    dtype: torch.dtype,
    keep: bool,
) -> tuple[Tensor, Tensor | None]:
    """:func:`opfuse_activation.twins.forward`, by the kernel if it takes the call."""
    fits = bias is None or bias.shape == x.shape[-1:]
    if not (fits and dtype in DTYPES and _takes(formula, x, bias, scales)):
        return twins.forward(op, x, bias, scales, dtype, keep)
    numbers = formula.functions.numbers(op.numbers_of())
    if is_compiling():
        what = formula.names, list(numbers), formula.size, formula.rounds
        y, *kept = torch.ops.opfuse_activation.forward(x, bias, scales, dtype, keep, *what)
        return y, kept[0] if keep else None
    return kernels.forward(formula, numbers, x, bias, scales, dtype, keep, config)


def backward(
    formula: Formula,
    config: Config | None,
    op: Any,
    numbers: Any,
    dy: Tensor,
    x: Tensor,
    needs_x: bool,
    needs_sums: bool,
    owns: bool,
) -> Two:
    """:func:`opfuse_activation.twins.backward`, by the kernels if they take the call."""
    # autograd gives expanded ones, from a sum
    dy = dy.to(x.dtype).contiguous()
    if not _takes(formula, x, dy):
        return twins.backward(op, numbers, dy, x, needs_x, needs_sums, owns)
    values = formula.functions.numbers(numbers)
    if is_compiling():
        what = formula.names, list(values), formula.size, formula.rounds
        made = torch.ops.opfuse_activation.backward(dy, x, needs_x, needs_sums, *what)
        return _placed(made, needs_x, needs_sums)
    return kernels.backward(formula, values, dy, x, needs_x, needs_sums, owns, config)


def scaled_backward(
    formula: Formula,
    config: Config | None,
    op: Any,
    numbers: Any,
    dy: Tensor,
    x: Tensor,
    scales: Tensor | None,
    needs_scales: bool,
) -> Two:
    """:func:`opfuse_activation.twins.scaled_backward`, by the kernel if it takes the call."""
    dy = dy.contiguous()
    if not _takes(formula, x, dy, scales):
        return twins.scaled_backward(op, numbers, dy, x, scales, needs_scales)
    values = formula.functions.numbers(numbers)
    if is_compiling():
        what = formula.names, list(values), formula.size, formula.rounds
        made = torch.ops.opfuse_activation.scaled_backward(dy, x, scales, needs_scales, *what)
        return _placed(made, scales is not None, needs_scales)
    return kernels.scaled_backward(formula, values, dy, x, scales, needs_scales, config)


def _takes(formula: Formula, x: Tensor, *others: Tensor | None) -> bool:
    """Whether the kernels take these tensors."""
    if not x.ndim or not x.numel() or (formula.gated and x.shape[-1] % (2 * (formula.size or 1))):
        return False
    for tensor in (x, *others):
        if tensor is not None and not (
            type(tensor) in _PLAIN
            and tensor.dtype in DTYPES
            and tensor.is_contiguous()
            and tensor.device == x.device
        ):
            return False
    return True


def _placed(made: list[Tensor], first: bool, second: bool) -> Two:
    """The tensors of a list in their places, None where there is none."""
    return made[0] if first else None, made[-1] if second else None


_WHAT = "str[] functions, float[] numbers, int size, bool rounds"
torch.library.define(
    "opfuse_activation::forward",
    f"(Tensor x, Tensor? bias, Tensor? scales, ScalarType dtype, bool keep, {_WHAT}) -> Tensor[]",
)
torch.library.define(
    "opfuse_activation::backward",
    f"(Tensor dy, Tensor x, bool needs_x, bool needs_sums, {_WHAT}) -> Tensor[]",
)
torch.library.define(
    "opfuse_activation::scaled_backward",
    f"(Tensor dy, Tensor x, Tensor? scales, bool needs_scales, {_WHAT}) -> Tensor[]",
)


def _forward(
    x: Tensor,
    bias: Tensor | None,
    scales: Tensor | None,
    dtype: torch.dtype,
    keep: bool,
    functions: list[str],
    numbers: list[float],
    size: int,
    rounds: bool,
) -> list[Tensor]:
    formula = formulas.named_formula(tuple(functions), size, rounds)
    return _there(kernels.forward(formula, tuple(numbers), x, bias, scales, dtype, keep))


def _fake_forward(
    x: Tensor, bias: Any, scales: Any, dtype: torch.dtype, keep: bool, functions: list[str], *_: Any
) -> list[Tensor]:
    y = x.new_empty((*x.shape[:-1], x.shape[-1] // (len(functions) // 2)), dtype=dtype)
    return [y, torch.empty_like(x, dtype=dtype)] if keep else [y]


def _backward(
    dy: Tensor,
    x: Tensor,
    needs_x: bool,
    needs_sums: bool,
    functions: list[str],
    numbers: list[float],
    size: int,
    rounds: bool,
) -> list[Tensor]:
    formula = formulas.named_formula(tuple(functions), size, rounds)
    made = kernels.backward(formula, tuple(numbers), dy, x, needs_x, needs_sums, False)
    return _there(made)


def _fake_backward(dy: Tensor, x: Tensor, needs_x: bool, needs_sums: bool, *_: Any) -> list[Tensor]:
    dx, sums = torch.empty_like(x), x.new_empty(x.shape[-1:])
    return _there((dx if needs_x else None, sums if needs_sums else None))


def _scaled_backward(
    dy: Tensor,
    x: Tensor,
    scales: Tensor | None,
    needs_scales: bool,
    functions: list[str],
    numbers: list[float],
    size: int,
    rounds: bool,
) -> list[Tensor]:
    formula = formulas.named_formula(tuple(functions), size, rounds)
    made = kernels.scaled_backward(formula, tuple(numbers), dy, x, scales, needs_scales)
    return _there(made)


def _fake_scaled_backward(
    dy: Tensor, x: Tensor, scales: Tensor | None, needs_scales: bool, *_: Any
) -> list[Tensor]:
    dtype = torch.float32 if scales is None else scales.dtype
    dscales = x.new_empty(x.shape[:-1], dtype=dtype) if needs_scales else None
    return _there((None if scales is None else torch.empty_like(x), dscales))


def _there(made: tuple[Tensor | None, Tensor | None]) -> list[Tensor]:
    return [tensor for tensor in made if tensor is not None]


for _kernel, _fake in (
    (_forward, _fake_forward),
    (_backward, _fake_backward),
    (_scaled_backward, _fake_scaled_backward),
):
    _name = f"opfuse_activation::{_kernel.__name__[1:]}"
    torch.library.impl(_name, ("cpu", "cuda"), _kernel)
    torch.library.register_fake(_name, _fake)
