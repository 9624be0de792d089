"""For each call: the kernels, or the twin where they do not take the tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from opfuse.core.quantization import COLUMNWISE, ROWWISE, QuantizedTensor, Usage

from . import twins
from .conditions import DTYPES, PLAIN, has_blocks, output_shape
from .formulas import Formula
from .kernels.launch import IDENTITY, Casting, backward, forward, takes_two_passes


def cast(
    x: Any, quantizer: Any, usage: Usage, again: QuantizedTensor | None = None
) -> QuantizedTensor:
    """:func:`opfuse_fp8.twins.cast`, by the kernels if they take the call."""
    if type(x) in PLAIN and not x.is_contiguous():
        x = x.contiguous()
    if not (takes(x) and has_blocks(quantizer, usage, x.shape)):
        return twins.cast(x, quantizer, usage, again)
    casting = Casting(quantizer, usage, x.shape, x.dtype, x.device, again=again, values=x)
    forward(IDENTITY, (), x, None, None, casting)
    return casting.made()


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
    shape = output_shape(op, x.shape)
    fits = dtype in DTYPES and (bias is None or bias.shape == x.shape[-1:])
    if shape is None or not (fits and takes(x, bias) and has_blocks(quantizer, usage, shape)):
        return twins.activation(op, x, bias, dtype, keep, quantizer, usage, again)
    kept = torch.empty_like(x, dtype=dtype) if keep else None
    casting = Casting(quantizer, usage, shape, dtype, x.device, again=again)
    forward(formula, formula.numbers(op.numbers_of()), x, bias, kept, casting)
    return casting.made(), kept


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
    shape, known = (dy.shape, dy) if x is None else (x.shape, None)
    parts = 2 if formula.gated and not formula.size else 1
    fits = x is None or dy.shape == output_shape(op, shape)
    if not (fits and takes(dy, x) and has_blocks(quantizer, usage, shape, parts)):
        return twins.gradient(op, numbers, dy, x, needs_sums, quantizer, usage)

    def launched(copies: Usage, sums_too: bool) -> tuple[QuantizedTensor, Tensor | None]:
        casting = Casting(quantizer, copies, shape, dy.dtype, dy.device, values=known)
        sums = backward(formula, formula.numbers(numbers or ()), dy, x, sums_too, casting)
        return casting.made(), sums

    if not takes_two_passes(formula, quantizer, usage):
        return launched(usage, needs_sums)
    (row, sums), (column, _) = launched(ROWWISE, needs_sums), launched(COLUMNWISE, False)
    pairs = zip(row.tensors(), column.tensors(), strict=True)
    return row.rebuild([a if b is None else b for a, b in pairs]), sums


def takes(first: Any, *others: Tensor | None) -> bool:
    """Whether the kernels take these tensors."""
    if not isinstance(first, Tensor) or not first.ndim or not first.numel():
        return False
    return all(
        tensor is None
        or (
            type(tensor) in PLAIN
            and tensor.dtype in DTYPES
            and tensor.is_contiguous()
            and tensor.device == first.device
        )
        for tensor in (first, *others)
    )
