"""The emulated products of a linear under a recipe, of dequantized values in fp32; and operands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..core.quantization import COLUMNWISE, ROWWISE, QuantizedTensor, Quantizer, Usage, dequantize
from ..core.quantization.formats import each_only
from ..core.quantization.quantizer import same_quantizer
from ..core.quantization.weights import WeightCache, may_remember
from ..core.settings import current
from ._common import rows_of

_TILE, _TILE_OF_HALF = 4, 32
"""Multiples of the features that a CPU's libraries multiply at once."""


def tiled(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    """Input and weights; in a block of rows on a CPU with features that fill tiles.

    In bf16, oneDNN takes values of the next row for those that a tile lacks, times zero. If one of
    these is infinite, the product of a finite row is NaN (PyTorch 2.13, Xeon with AMX). In fp32 and
    fp64, on processors of AMD, MKL adds up the features beyond a multiple of 4 in an order that
    depends on the place of the row (PyTorch 2.13, EPYC of family 26).
    """
    short = -x.shape[-1] % (_TILE if x.element_size() > 2 else _TILE_OF_HALF)
    if not short or not x.is_cpu or "invariant" not in dict(current.options):
        return x, *weights
    return tuple([F.pad(tensor, (0, short)) for tensor in (x, *weights)])


def quantized_operands(
    ctx: Any, input_: Tensor | QuantizedTensor, names: Sequence[str]
) -> tuple[QuantizedTensor, list[QuantizedTensor]]:
    """Quantize the operands; save them quantized, or as they were.

    Weights that have one quantizer together are one matrix, which stands for all of them.

    Args:
        ctx: The context of a linear whose first parameters are its weights.
        input_: The input.
        names: The names of the weights' quantizers.
    """
    params, wants = ctx.params[: len(names)], ctx.param_requires_grad[: len(names)]
    override, wgrad, dgrad = ctx.backward_override, any(wants), ctx.input_requires_grad
    quantized = ctx.requires_grad and override is None  # the backward is too
    x: Any = input_  # what comes quantized was checked
    if not isinstance(x, QuantizedTensor):
        x = ctx.quantizers["input"](x, Usage(True, quantized and wgrad))
    usage = Usage(True, quantized and dgrad)
    first, last = ctx.quantizers[names[0]], ctx.quantizers[names[-1]]
    shared = len(names) > 1 and (first._recording or first) is (last._recording or last)
    if shared and all([same_quantizer(first, ctx.quantizers[name]) for name in names]):
        weights = [_as_rows_of_one(ctx.weights, names, params, first, usage)]
    else:
        weights = []
        for i, name in enumerate(names):
            weights.append(ctx.weights.quantized(name, params[i], ctx.quantizers[name], usage))
    if ctx.requires_grad:  # the backward reads its own copies, or those of the forward
        read = COLUMNWISE if override is None else ROWWISE
        saved: list[Any] = each_only((x, *weights), read)
        if override == "high_precision":
            dtype = ctx.dtype or x.dtype
            saved = [dequantize(tensor).to(dtype) for tensor in (input_, *params)]
        of_x, *of_weights = saved
        of_weights = of_weights if dgrad else []
        rest = [None] * (len(names) - len(of_weights))
        ctx.to_save = (of_x if wgrad else None, *of_weights, *rest)
    return x, weights


def _as_rows_of_one(
    cache: WeightCache,
    names: Sequence[str],
    params: Sequence[Tensor],
    quantizer: Quantizer,
    usage: Usage,
) -> QuantizedTensor:
    """Weights that are cast as the rows of one matrix, or that were, if all are as they were."""
    known = all([may_remember(param, quantizer) for param in params])
    pairs = list(zip(names, params, strict=True)) if known else []
    found = [cache.reusable(name, param, quantizer) for name, param in pairs]
    first = found[0] if found else None
    if first is not None and all([each is first for each in found]):
        if first.usage.covers(usage):
            return first
        usage = Usage(*map(max, usage, first.usage))
    made = quantizer.quantize_parts(params, usage)
    for name, param in pairs:
        cache.remember(name, param, quantizer, made)
    return made


def quantized_backward(
    ctx: Any, grad_output: Tensor | QuantizedTensor, sizes: Sequence[int]
) -> tuple[Tensor | None, tuple[Tensor | None, ...]]:
    """The gradients of the input and of each weight, from what :func:`quantized_operands` saved.

    If the recipe has no override, the gradient is quantized too, and the products are exact except
    for the rounding of their result. Otherwise they use plain tensors in the compute dtype.

    Args:
        ctx: The context of the backward.
        grad_output: The gradient of the output, quantized or not.
        sizes: The output features of each weight.
    """
    x, *weights = ctx.saved_tensors
    dtype, override = ctx.dtype or grad_output.dtype, ctx.backward_override
    dy: Any = grad_output
    if override is None:
        dy = ctx.quantizers["grad_output"](dy, Usage(weights[0] is not None, x is not None))
    read = COLUMNWISE if override is None else ROWWISE

    def plain(tensor: Any, usage: Usage) -> Tensor:
        if override is None:
            return tensor.widened(usage)  # type: ignore[no-any-return]
        return dequantize(tensor, usage).to(dtype)

    dx: Tensor | None = None
    grads: list[Tensor | None] = [None] * len(sizes)
    if weights[0] is not None:
        rows, given = plain(dy, ROWWISE), [weight for weight in weights if weight is not None]
        parts = torch.split_with_sizes(rows, sizes, -1) if len(given) > 1 else [rows]
        first, *more = [part @ plain(w, read) for part, w in zip(parts, given, strict=True)]
        dx = sum(more, first).to(dtype)
    if x is not None:
        parts, x = torch.split_with_sizes(plain(dy, COLUMNWISE), sizes, -1), plain(x, read)
        wants = zip(parts, ctx.param_requires_grad, strict=False)  # biases come after the weights
        grads = [
            rows_of(dy).t().mm(rows_of(x)).to(dtype) if wanted else None for dy, wanted in wants
        ]
    return dx, tuple(grads)
