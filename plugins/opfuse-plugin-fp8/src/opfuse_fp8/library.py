"""For each call: the kernels, or the twin where they do not take the tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from opfuse.core.quantization import QuantizedTensor, Usage

from . import twins
from .conditions import DTYPES
from .formulas import Formula
from .kernels import launch
from .quantizers import BlockQuantizer, MXQuantizer

_PLAIN = Tensor, torch.nn.Parameter  # subclasses have their ways


def cast(
    x: Any, quantizer: Any, usage: Usage, again: QuantizedTensor | None = None
) -> QuantizedTensor:
    """:func:`opfuse_fp8.twins.cast`, by the kernels if they take the call."""
    if type(x) in _PLAIN and not x.is_contiguous():
        x = x.contiguous()
    if not (takes(x) and has_blocks(quantizer, usage, x.shape)):
        return twins.cast(x, quantizer, usage, again)
    return launch.cast(x, quantizer, usage, again)


def activation(
    formula: Formula,
    op: Any,
    x: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    keep: bool,
    quantizer: Any,
    usage: Usage,
    again: QuantizedTensor | None = None,
) -> tuple[QuantizedTensor, Tensor | None]:
    """:func:`opfuse_fp8.twins.activation`, by the kernels if they take the call."""
    fits = (bias is None or bias.shape == x.shape[-1:]) and _splits(formula, x)
    if not (
        fits
        and dtype in DTYPES
        and takes(x, bias)
        and has_blocks(quantizer, usage, _output(formula, x.shape))
    ):
        return twins.activation(op, x, bias, dtype, keep, quantizer, usage, again)
    numbers = formula.numbers(op.numbers_of())
    return launch.activation(formula, numbers, x, bias, dtype, keep, quantizer, usage, again)


def gradient(
    formula: Formula,
    op: Any,
    numbers: Any,
    dy: Tensor,
    x: Tensor | None,
    needs_sums: bool,
    quantizer: Any,
    usage: Usage,
) -> tuple[QuantizedTensor, Tensor | None]:
    """:func:`opfuse_fp8.twins.gradient`, by the kernels if they take the call."""
    # autograd gives expanded ones, from a sum
    dy = (dy if x is None else dy.to(x.dtype)).contiguous()
    shape = dy.shape if x is None else x.shape
    parts = 2 if formula.gated and not formula.size else 1
    fits = x is None or (_splits(formula, x) and dy.shape == _output(formula, x.shape))
    if not (fits and takes(dy, x) and has_blocks(quantizer, usage, shape, parts)):
        return twins.gradient(op, numbers, dy, x, needs_sums, quantizer, usage)
    values = formula.numbers(numbers or ())
    return launch.gradient(formula, values, dy, x, needs_sums, quantizer, usage)


def takes(first: Any, *others: Tensor | None) -> bool:
    """Whether the kernels take these tensors."""
    if not isinstance(first, Tensor) or not first.ndim or not first.numel():
        return False
    for tensor in (first, *others):
        if tensor is not None and not (
            type(tensor) in _PLAIN
            and tensor.dtype in DTYPES
            and tensor.is_contiguous()
            and tensor.device == first.device
        ):
            return False
    return True


def _splits(formula: Formula, x: Tensor) -> bool:
    """Whether the features of a gated activation split evenly."""
    return not formula.gated or bool(x.ndim and x.shape[-1] % (2 * (formula.size or 1)) == 0)


def _output(formula: Formula, shape: torch.Size) -> torch.Size:
    return torch.Size((*shape[:-1], shape[-1] // 2)) if formula.gated else shape


def has_blocks(quantizer: Any, usage: Usage, shape: torch.Size, parts: int = 1) -> bool:
    """Whether blocks are whole where they have to be, also within halves that lie side by side."""
    columns = shape[-1]
    rows = shape.numel() // max(columns, 1)
    if isinstance(quantizer, MXQuantizer):
        across = usage.rowwise and columns % (32 * parts)
        return not (across or (usage.columnwise and rows % 32))
    if isinstance(quantizer, BlockQuantizer) and parts > 1:
        return not ((usage.rowwise or quantizer.block[0] > 1) and columns % (128 * parts))
    return True
