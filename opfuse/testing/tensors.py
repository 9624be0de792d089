"""The tensors of a case: their values, shapes and memory layouts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import ops as built_in
from ..core.op import BasicOperation, kinds_of
from ..core.quantization import QuantizedTensor

LAYOUTS = ("contiguous", "strided", "transposed", "permuted", "expanded", "sliced", "summed")


def normal(shape: tuple[int, ...], generator: torch.Generator, mixed: bool) -> Tensor:
    """Numbers around 1; ``mixed``: down to a thousandth of that, every other row far less."""
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    if mixed:
        values *= 2.0 ** -torch.randint(0, 11, shape, generator=generator)
        values[1::2] *= 2.0**-14 if values.ndim else 1.0
    return values


def place(tensor: Tensor, numbers: Sequence[Any]) -> Tensor:
    """Write 0 or numbers of ops, and their negatives, into both ends of a tensor.

    An op may compute otherwise at exactly one of them, where that is a number of every dtype.
    """
    plain = (n for n in numbers if type(n) is float and abs(n) <= 16 and n * 16 % 1 == 0)
    flat, placed = tensor.view(-1), [s * n for n in dict.fromkeys(plain) for s in (1, -1)]
    for number, value in enumerate(placed[: len(flat) // 4]):
        flat[number] = flat[-1 - number] = value
    return tensor


def lay_out(tensor: Tensor, layout: str) -> Tensor:
    """A tensor of the same values in another memory layout.

    Two layouts change values: ``expanded`` repeats its first row, and ``summed`` is one number, as
    the gradient of a sum.
    """
    if not tensor.ndim or layout == "contiguous":
        return tensor
    if layout == "strided":
        return torch.stack((tensor, tensor), -1)[..., 0]
    if layout == "transposed":
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "permuted":  # (rows, batch, features) in memory
        return tensor.transpose(0, -2).contiguous().transpose(0, -2) if tensor.ndim > 2 else tensor
    if layout == "summed":
        return tensor.flatten()[0].expand(tensor.shape) if tensor.numel() else tensor
    if layout == "expanded":
        return tensor[:1].expand(tensor.shape) if tensor.ndim > 1 and tensor.shape[0] else tensor
    fill = math.nan if tensor.is_floating_point() else 1
    around = tensor.new_full([size + 2 for size in tensor.shape], fill)
    part = around[tuple(slice(1, size + 1) for size in tensor.shape)]
    return part.copy_(tensor)


def parts_of(tensor: Any) -> list[Tensor]:
    """The plain tensors that a tensor, quantized or not, consists of; none of anything else."""
    parts = tensor.tensors() if isinstance(tensor, QuantizedTensor) else (tensor,)
    return [part for part in parts if isinstance(part, Tensor)]


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same shape, dtype and bits."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    # a copy, since one number may have any stride
    each = (t.detach().clone(memory_format=torch.contiguous_format) for t in (one, other))
    return torch.equal(*(copy.view(-1).view(torch.uint8) for copy in each))


def input_shapes(basic: Sequence[BasicOperation], shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The shape of each op's input, if that of the first op is ``shape``."""
    shapes = []
    for op in basic:
        shapes.append(shape)
        if isinstance(op, built_in.Reshape):
            shape = tuple(torch.empty(shape, device="meta").reshape(op.shape).shape)
        if isinstance(op, (built_in.CrossEntropy, built_in.TokenLogProb)):
            shape = shape[:-1] if getattr(op, "reduction", "none") == "none" else ()
        elif shape:
            shape = (*shape[:-1], next_width(op, shape[-1]) or shape[-1])
    return shapes


def extra_inputs(
    op: BasicOperation, shape: tuple[int, ...], generator: torch.Generator
) -> Sequence[Any]:
    """The extra inputs of an op for an input of ``shape``: integers, bools, or the shape of others.

    An op says it in ``sample_extra_inputs``. Without it, floating-point numbers have the shape of
    the input. Of others there is one per row; integers are below the number of features.
    """
    if hasattr(op, "sample_extra_inputs"):
        return op.sample_extra_inputs(shape, generator)  # type: ignore[no-any-return]

    def default(kind: str) -> Any:
        most = 2 if kind == "bool" else max(1, *shape[-1:])
        if kind == "floating":
            return shape
        numbers = torch.randint(0, most, shape[:-1], generator=generator)
        return numbers.bool() if kind == "bool" else numbers

    return [*map(default, kinds_of(op))]


def next_width(op: BasicOperation, width: int) -> int | None:
    """Features that an op gives for ``width`` features, or None if it does not take that many."""
    if op.in_features not in (None, width) or width % (op.feature_ratio or 1):
        return None
    return width // (op.feature_ratio or 1) if op.out_features is None else op.out_features
