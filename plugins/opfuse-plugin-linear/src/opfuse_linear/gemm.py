"""``act(x @ w.T + bias)`` in one Triton kernel: the kernel, its configurations, and its launch.

Tiles are loaded and stored through descriptors, by TMA where the GPU has it. The activation is a
device function, see :func:`opfuse_triton.functions_of`. Products are added up in fp32, and rounded
before the activation as the linear layer rounds them: the activation gets what its backward reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from opfuse_triton import (
    Config,
    DeviceFunctions,
    Kernel,
    Target,
    cdiv,
    current_target,
    functions_of,
)
from torch import Tensor
from triton.runtime import _allocation

from opfuse import OperationContext
from opfuse.ops.authoring import matmul_precision

from .kernels import DTYPES, HALF, PLAIN

# The kernel


@triton.jit
def _place(tile, row_tiles, column_tiles, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
           GROUP: tl.constexpr):  # fmt: skip
    """First row and column of a tile: ``GROUP`` rows of tiles are gone through column by column.

    Programs that run at the same time then share what they read in the cache.
    """
    group = tile // (GROUP * column_tiles)
    first = group * GROUP
    height = min(row_tiles - first, GROUP)
    within = tile - first * column_tiles
    return (first + within % height) * BLOCK_M, within // height * BLOCK_N


@triton.jit
def _half(tile, INDEX: tl.constexpr):
    """The left or the right half of the columns of a tile."""
    return tile.reshape(tile.shape[0], 2, tile.shape[1] // 2).permute(0, 2, 1).split()[INDEX]


@triton.jit
def _part(tile, INDEX: tl.constexpr, COUNT: tl.constexpr):
    """One of 1, 2 or 4 parts of the columns of a tile."""
    if COUNT == 1:
        part = tile
    elif COUNT == 2:
        part = _half(tile, INDEX)
    else:
        part = _half(_half(tile, INDEX // 2), INDEX % 2)
    return part


@triton.jit
def linear_activation_kernel(
    x, w, bias, y, hidden, rows, features, depth, x_stride, w_stride, numbers,
    VALUE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr, PARTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``y``, and in ``hidden`` what the activation gets, unless it is None; both are contiguous.

    ``x`` is ``(rows, depth)``, ``w`` ``(features, depth)``; ``bias`` may be None. Each program
    takes every ``num_programs``-th tile. The loops over tiles and depth are flattened into one: the
    first loads of a tile are under way while the one before is stored. The epilogue takes
    ``PARTS`` parts of the columns one after the other, which need fewer registers and less shared
    memory.
    """
    dtype: tl.constexpr = x.dtype.element_ty
    WIDTH: tl.constexpr = BLOCK_N // PARTS
    of_x = tl.make_tensor_descriptor(x, [rows, depth], [x_stride, 1], [BLOCK_M, BLOCK_K])
    of_w = tl.make_tensor_descriptor(w, [features, depth], [w_stride, 1], [BLOCK_N, BLOCK_K])
    of_y = tl.make_tensor_descriptor(y, [rows, features], [features, 1], [BLOCK_M, WIDTH])
    if hidden is not None:
        of_hidden = tl.make_tensor_descriptor(
            hidden, [rows, features], [features, 1], [BLOCK_M, WIDTH]
        )
    row_tiles, column_tiles = tl.cdiv(rows, BLOCK_M), tl.cdiv(features, BLOCK_N)
    programs = tl.num_programs(0)
    stored = tl.program_id(0)  # a counter of its own: no value lives from a tile's loads to its end
    for tile in tl.range(tl.program_id(0), row_tiles * column_tiles, programs, flatten=True):
        row, column = _place(tile, row_tiles, column_tiles, BLOCK_M, BLOCK_N, GROUP)
        product = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for step in range(tl.cdiv(depth, BLOCK_K)):
            left = of_x.load([row, step * BLOCK_K])
            right = of_w.load([column, step * BLOCK_K])
            product = tl.dot(left, right.T, product, input_precision=PRECISION)
        row, column = _place(stored, row_tiles, column_tiles, BLOCK_M, BLOCK_N, GROUP)
        stored += programs
        for i in tl.static_range(PARTS):
            start = column + i * WIDTH
            part = _part(product, i, PARTS)
            if bias is not None:
                feature = start + tl.arange(0, WIDTH)
                added = tl.load(bias + feature, feature < features, other=0.0)
                part += added.to(dtype).to(tl.float32)[None, :]
            rounded = part.to(dtype)
            if hidden is not None:
                of_hidden.store([row, start], rounded)
            of_y.store([row, start], VALUE(rounded.to(tl.float32), *numbers).to(dtype))


# Configurations

Row = tuple[int, int, int, int, int, int, int]
"""``BLOCK_M``, ``BLOCK_N``, bytes of ``BLOCK_K``, ``GROUP``, ``PARTS``, warps and stages."""

_ROWS: Mapping[str, Sequence[Row]] = {  # large tiles come first
    "90": (
        (128, 256, 128, 8, 4, 8, 4),
        (128, 256, 128, 8, 2, 8, 3),
        (128, 128, 128, 8, 2, 8, 4),
        (128, 128, 128, 8, 2, 4, 4),
        (64, 128, 128, 8, 1, 4, 4),
    ),
    "100": (
        (128, 256, 128, 8, 4, 8, 3),
        (128, 256, 128, 8, 2, 8, 3),
        (128, 128, 128, 8, 2, 8, 4),
        (128, 128, 128, 8, 2, 4, 4),
        (128, 64, 128, 8, 1, 4, 4),
    ),
    "cuda": ((128, 128, 64, 8, 1, 8, 3), (64, 128, 64, 8, 1, 4, 4), (64, 64, 64, 8, 1, 4, 4)),
    "hip": ((128, 128, 128, 8, 1, 8, 2), (128, 128, 64, 8, 1, 4, 2), (64, 64, 128, 8, 1, 4, 2)),
}
_EXTRA = 2048
"""Bytes of shared memory for barriers and the like."""


def _configs(target: Target, facts: Mapping[str, Any]) -> Sequence[Config]:
    """The configurations that fit the GPU; first those whose tiles keep it busy."""
    rows, itemsize = _ROWS[_family(target)], facts["x"].itemsize
    fit = [row for row in rows if _fits(row, target, itemsize)] or rows[-1:]
    busy = [row for row in fit if _tiles(row, facts) >= target.multiprocessors]
    ordered = [*busy, *reversed([row for row in fit if row not in busy])]
    return [_config(row, itemsize) for row in ordered]


def _family(target: Target) -> str:
    """The key of a GPU's rows: those with TMA have rows of their own."""
    generation = f"{str(target.arch)[:-1]}0"
    return generation if generation in _ROWS else target.backend


def _fits(row: Row, target: Target, itemsize: int) -> bool:
    """Whether the GPU has the shared memory that a program needs."""
    height, width, depth, _, parts, _, stages = row
    held = stages - 1 if target.backend == "hip" else stages  # one stage is in registers
    by_tma = _family(target) != target.backend
    stored = height * width // parts * itemsize + _EXTRA if by_tma else 0
    return held * (height + width) * depth + stored <= target.shared_memory


def _config(row: Row, itemsize: int) -> Config:
    height, width, depth, group, parts, warps, stages = row
    tile = {"BLOCK_M": height, "BLOCK_N": width, "BLOCK_K": depth // itemsize}
    return Config({**tile, "GROUP": group, "PARTS": parts}, num_warps=warps, num_stages=stages)


def _tiles(row: Row, facts: Mapping[str, Any]) -> int:
    return cdiv(facts["rows"], row[0]) * cdiv(facts["features"], row[1])


KERNEL = Kernel(linear_activation_kernel, _configs)


def configurations(
    device: torch.device, dtype: torch.dtype, rows: int, features: int
) -> list[dict[str, Any]]:
    """The possible values of ``config`` of :func:`multiply`, for JSON, the best guess first."""
    facts = {"x": dtype, "rows": rows, "features": features}
    return KERNEL.candidates(current_target(device), facts)


# The launch


def takes(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether :func:`multiply` takes these tensors.

    They are plain ones that fit, and both matrices and the result have contiguous rows that begin
    at multiples of 16 bytes. On a GPU fp32 may be multiplied in TF32.
    """
    dtype, device = x.dtype, x.device
    both = x, weight
    return (
        are_aligned(*both)
        and dtype in DTYPES
        and (dtype in HALF or not x.is_cuda or matmul_precision("cuda") == "tf32")
        and weight.shape == (weight.shape[0], x.shape[-1])
        and x.numel() > 0
        and weight.numel() > 0
        and weight.shape[0] * dtype.itemsize % 16 == 0
        and (
            bias is None
            or (
                type(bias) in PLAIN
                and bias.dtype in DTYPES
                and bias.device == device
                and bias.shape == weight.shape[:1]
            )
        )
    )


def are_aligned(*tensors: Tensor | None) -> bool:
    """Whether these are plain tensors of one dtype, whose rows begin at multiples of 16 bytes."""
    first = tensors[0]
    for t in tensors:
        if t is None or type(t) not in PLAIN or t.layout is not torch.strided or not t.ndim:
            return False
        if t.dtype is not first.dtype or t.device != first.device or t.stride(-1) != 1:
            return False
        steps = [stride * t.element_size() for stride in t.stride()[:-1]]
        if t.data_ptr() % 16 or not all([step > 0 and step % 16 == 0 for step in steps]):
            return False
    return True


class Product:
    """The product in the place of some ops, for as long as their plan.

    Args:
        act: The activation.
        config: One of :func:`configurations`; None: what the tables have.
    """

    def __init__(self, act: Any, config: Mapping[str, Any] | None) -> None:
        self._of: tuple[Any, Any] = act, functions_of(act)
        self._config = None if config is None else Config(**config)

    def __call__(
        self, ctx: OperationContext, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor | None:
        """The activation of the product, or None for tensors that the kernel does not take.

        Args:
            ctx: The activation's context, on which its backward finds the saved values of the op.
            x: The input.
            weight: The weight.
            bias: The bias, or None.
        """
        if not takes(x, weight, bias):
            return None
        act, functions = self._of
        given = functions, functions.numbers(act.numbers_of())
        keep = ctx.requires_grad and ctx.input_requires_grad and not act.saves_output
        y, hidden = multiply(x, weight, bias, *given, keep=keep, config=self._config)
        if ctx.requires_grad:
            act.operand(ctx, y if hidden is None else hidden)
        return y


def multiply(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    functions: DeviceFunctions,
    numbers: tuple[float, ...] = (),
    *,
    keep: bool = False,
    config: Config | Mapping[str, Any] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """``act(x @ weight.T + bias)`` of tensors that :func:`takes` takes.

    Args:
        x: ``(..., depth)``.
        weight: ``(features, depth)``.
        bias: ``(features,)``, or None.
        functions: Those of the activation, which is not gated.
        numbers: Those of the activation.
        keep: Whether to return the input of the activation, too.
        config: One of :func:`configurations`; None: what the tables have.

    Returns:
        ``(..., features)`` in the dtype of ``x``; and the same of the input, or None.
    """
    left = x.reshape(-1, x.shape[-1])
    (rows, depth), features = left.shape, weight.shape[0]
    target = current_target(left.device)
    if left.is_cuda and isinstance(_allocation._allocator.get(), _allocation.NullAllocator):
        triton.set_allocator(_allocate)  # of descriptors; a caller's own is left alone
    precision = "tf32" if x.dtype is torch.float32 and target.backend == "cuda" else "ieee"
    y = x.new_empty((*x.shape[:-1], features))
    hidden = torch.empty_like(y) if keep else None
    bias = None if bias is None else bias.contiguous()

    def grid(config: Config) -> tuple[int]:
        count = cdiv(rows, config["BLOCK_M"]) * cdiv(features, config["BLOCK_N"])
        return (min(target.multiprocessors, count),)

    KERNEL.launch(
        grid, left, weight, bias, y, hidden, rows, features, depth, left.stride(0),
        weight.stride(0), numbers, config=config, VALUE=functions.value, PRECISION=precision,
    )  # fmt: skip
    return y, hidden


def _allocate(size: int, alignment: int, stream: int | None) -> Tensor:
    return torch.empty(size, dtype=torch.int8, device="cuda")
