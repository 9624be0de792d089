"""The tensors of a case: their values, shapes and memory layouts."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .. import ops as built_in
from ..core.extra_dtypes import kinds_of
from ..core.op import BasicOperation

LAYOUTS = ("contiguous", "strided", "transposed", "permuted", "expanded", "sliced", "summed")


def normal(shape: tuple[int, ...], generator: torch.Generator, mixed: bool) -> Tensor:
    """Numbers around 1; ``mixed``: down to a thousandth of that, every other row far less."""
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    if mixed:
        values *= 2.0 ** -torch.randint(0, 11, shape, generator=generator)
        values[1::2] *= 2.0**-14 if values.ndim else 1.0
    return values


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


def extra_shape(op: BasicOperation, shape: tuple[int, ...], index: int) -> tuple[int, ...]:
    """The shape of an extra input of an op, for an input of ``shape``.

    Scales and whole numbers have one per row, split sizes one per group, all others have the shape
    of the op's input.
    """
    if isinstance(op, built_in.GroupedLinear):
        return shape[:-1] if index else (op.num_groups,)
    if isinstance(op, (built_in.RoPE, built_in.ApplyRoPE)):  # one for all heads
        return (*shape[:-2], *([op.rotary_dim] if op.num_extra_inputs == 2 else []))
    per_row = isinstance(op, built_in.ScaledActivation) or kinds_of(op)[index] != "floating"
    return shape[:-1] if per_row else shape


def whole_numbers(
    op: BasicOperation, shape: tuple[int, ...], index: int, generator: torch.Generator
) -> Tensor:
    """An extra input of integers or bools, for an input of ``shape``.

    Split sizes sum up to the rows; positions are below 4096, other integers below the number of
    features, as targets are. The first third of the targets is to be ignored, except for a sum; of
    one, that one.
    """
    size = extra_shape(op, shape, index)
    if isinstance(op, built_in.GroupedLinear):
        cuts = torch.randint(0, shape[0] + 1, (op.num_groups - 1,), generator=generator)
        return torch.tensor([0, *sorted(cuts.tolist()), shape[0]]).diff()
    if kinds_of(op)[index] == "bool":
        return torch.randint(0, 2, size, generator=generator).bool()
    most = 4096 if isinstance(op, built_in.RoPE) else max(1, shape[-1])
    numbers = torch.randint(0, most, size, generator=generator)
    ignores = isinstance(op, built_in.CrossEntropy) and op.reduction != "sum"
    if ignores or isinstance(op, built_in.TokenLogProb):
        numbers.view(-1)[: -(-numbers.numel() // 3)] = op.ignore_index
    return numbers


def next_width(op: BasicOperation, width: int) -> int | None:
    """Features that an op gives for ``width`` features, or None if it does not take that many."""
    if op.in_features not in (None, width) or width % (op.feature_ratio or 1):
        return None
    return width // (op.feature_ratio or 1) if op.out_features is None else op.out_features
