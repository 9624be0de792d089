"""For each call: the kernels, or the twin where they do not take the tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from opfuse_triton.elementwise.formulas import IDENTITY, Formula
from torch import Tensor

from opfuse.core.quantization import QuantizedTensor

from . import twins
from .conditions import ANY_SHAPE, DTYPES, PLAIN, has_blocks, output_shape, takes
from .kernels import launch_nvfp4
from .kernels.launch import FORWARD, Casting, PartsCasting, backward, forward, is_unaligned
from .kernels.launch_norms import norm
from .kernels.tiles import HIGHEST
from .nvfp4 import NVFP4Quantizer
from .twins import Into

__all__ = ["activation", "cast", "gradient", "norm"]


def cast(x: Any, into: Into) -> QuantizedTensor:
    """:func:`opfuse_fp8.twins.cast`, by the kernels if they take the call."""
    quantizer = into.quantizer
    known = type(x) in PLAIN and x.dtype in DTYPES and x.ndim and x.numel()  # `takes` of one
    if not known or not (isinstance(quantizer, ANY_SHAPE) or has_blocks(into, x.shape)):
        return twins.cast(x, into)
    x = x.contiguous()
    if isinstance(quantizer, NVFP4Quantizer):
        return launch_nvfp4.cast(x, into)
    casting = Casting(into, x.shape, x.dtype, x.device, values=x)
    if x.shape[-1] % 16 or x.storage_offset() * x.itemsize % 16:  # there may be a launch per copy
        forward(IDENTITY, (), x, None, None, casting)
        return casting.made()
    rest = casting.rows, casting.columns, ()
    given = {**casting.constants, **IDENTITY.forward}
    FORWARD.launch(None, x, None, None, *casting.pointers, *rest, **given)
    return casting.made() if given["FORMAT"] == "none" else casting.result


def cast_parts(parts: Sequence[Tensor], into: Into) -> QuantizedTensor | None:
    """The rows of several matrices as one, if the kernels take each where it is; or None."""
    if not all(map(takes, parts)) or any(map(is_unaligned, parts)):
        return None
    if any([len(part) % HIGHEST or part.dtype is not parts[0].dtype for part in parts]):
        return None
    return PartsCasting(into, parts).made()


def activation(
    formula: Formula,
    op: Any,
    x: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    keep: bool,
    into: Into,
) -> tuple[QuantizedTensor, Tensor | None]:
    """:func:`opfuse_fp8.twins.activation`, by the kernels if they take the call."""
    shape = output_shape(op, x.shape)
    fits = dtype in DTYPES and (bias is None or bias.shape == x.shape[-1:])
    if shape is None or not (fits and takes(x, bias) and has_blocks(into, shape)):
        return twins.activation(op, x, bias, dtype, keep, into)
    kept = torch.empty_like(x, dtype=dtype) if keep else None
    casting = Casting(into, shape, dtype, x.device)
    forward(formula, formula.functions.numbers(op.numbers_of()), x, bias, kept, casting)
    return casting.made(), kept


def gradient(
    formula: Formula,
    op: Any,
    numbers: Any,
    dy: Tensor,
    x: Tensor | None,
    needs_sums: bool,
    into: Into,
) -> tuple[QuantizedTensor, Tensor | None]:
    """:func:`opfuse_fp8.twins.gradient`, by the kernels if they take the call."""
    # autograd gives expanded ones, from a sum
    dy = (dy if x is None else dy.to(x.dtype)).contiguous()
    shape, known = (dy.shape, dy) if x is None else (x.shape, None)
    parts = 2 if formula.gated and not formula.size else 1
    fits = x is None or dy.shape == output_shape(op, shape)
    if not (fits and takes(dy, x) and has_blocks(into, shape, parts)):
        return twins.gradient(op, numbers, dy, x, needs_sums, into)

    casting = Casting(into, shape, dy.dtype, dy.device, values=known)
    sums = backward(formula, formula.functions.numbers(numbers or ()), dy, x, needs_sums, casting)
    return casting.made(), sums
