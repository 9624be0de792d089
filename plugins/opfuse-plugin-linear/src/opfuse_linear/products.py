"""Launching the Triton products: which kernel takes which tensors, and how many programs run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import triton
from opfuse_triton import Config, DeviceFunctions, Kernel, Target, current_target, functions_of
from torch import Tensor
from triton.runtime import _allocation

from opfuse import OperationContext
from opfuse.core.authoring import matmul_precision

from . import gemm, tiles
from .kernels import DTYPES, PLAIN

BY_TILES = Kernel(gemm.gemm_by_tiles, tiles.by_tiles)
BY_POINTERS = Kernel(gemm.gemm_by_pointers, tiles.by_pointers)


class Product:
    """A Triton product in the place of some ops, for as long as their plan.

    Args:
        last: The op in the epilogue: an activation, or the residual add.
        config: One of :func:`configurations`; None: what the tables have.
    """

    def __init__(self, last: Any, config: Mapping[str, Any] | None) -> None:
        self._last, self._functions = last, functions_of(last)
        self._config = None if config is None else Config(**config)

    def activated(
        self,
        ctx: OperationContext,
        x: Tensor,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None],
    ) -> Tensor | None:
        """The activation of the product, or None for tensors that the kernels do not take.

        Args:
            ctx: The activation's context, on which its backward finds the saved values of the op.
            x: The input.
            weights: One; or gate and up.
            biases: One for each weight.
        """
        if not takes(x, weights, biases):
            return None
        functions, act = self._functions, self._last
        assert functions is not None
        if act.gated and len(weights) == 1:
            (weight,), (bias,) = weights, biases
            weights = weight.chunk(2)
            biases = (None, None) if bias is None else bias.chunk(2)
        given = functions, functions.numbers(act.numbers_of())
        keep = ctx.requires_grad and ctx.input_requires_grad
        y, hidden = multiply(x, weights, biases, *given, keep=keep, config=self._config)
        if ctx.requires_grad:
            act.operand(ctx, y if hidden is None else hidden)
        return y

    def added(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, addend: Tensor, scale: float
    ) -> Tensor | None:
        """``addend + scale * (x @ weight.T + bias)``, or None, as :meth:`activated`."""
        if not takes(x, (weight,), (bias,), addend):
            return None
        return multiply(x, (weight,), (bias,), addend=addend, scale=scale, config=self._config)[0]


def takes(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    addend: Tensor | None = None,
) -> bool:
    """Whether :func:`multiply` takes these tensors. It takes plain ones that fit, of any strides.

    Arguments as there.
    """
    dtype, device, outputs = x.dtype, x.device, weights[0].shape[0]
    vectors = [bias for bias in biases if bias is not None]
    others = weights if addend is None else [*weights, addend]
    return (
        all(type(t) in PLAIN and t.layout is torch.strided for t in (x, *others, *vectors))
        and all(t.device == device for t in (*others, *vectors))
        and dtype in DTYPES
        and all(t.dtype is dtype for t in others)
        and all(w.shape == (outputs, x.shape[-1]) for w in weights)
        and all(bias.dtype in DTYPES and bias.shape == (outputs,) for bias in vectors)
        and (addend is None or addend.shape == (*x.shape[:-1], outputs))
        and x.numel() > 0
        and outputs > 0
    )


def multiply(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    functions: DeviceFunctions | None = None,
    numbers: tuple[float, ...] = (),
    *,
    keep: bool = False,
    addend: Tensor | None = None,
    scale: float = 1.0,
    config: Config | Mapping[str, Any] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """``act(x @ w.T + bias)``, or ``addend + scale * (x @ w.T + bias)``, in one kernel.

    Args:
        x: ``(..., depth)``.
        weights: ``(features, depth)``; of a gated activation two, gate first.
        biases: One for each weight: ``(features,)``, or None.
        functions: The activation's; None: there is an addend.
        numbers: Those of the activation.
        keep: Whether to return the input of the activation, too.
        addend: ``(..., features)``.
        scale: With an addend.
        config: One of :func:`configurations`; None, or one of the kernel that does not take the
            tensors: what the tables have.

    Returns:
        ``(..., features)``; and if ``keep``, ``(..., features * len(weights))``, in the dtype of
        ``x``.
    """
    (w, *more), (bias, *more_biases) = weights, biases
    up, up_bias = (more[0], more_biases[0]) if more else (None, None)
    left = x.reshape(-1, x.shape[-1])
    (rows, depth), features = left.shape, w.shape[0]
    added = None if addend is None else addend.reshape(rows, features)
    y = x.new_empty((rows, features))
    hidden = x.new_empty((rows, features * len(weights))) if keep else None
    halves = (None, None) if hidden is None else (*hidden.split(features, 1), None)[:2]
    tensors = left, w, up, _dense(bias), _dense(up_bias), added, y, *halves
    target = current_target(x.device)
    precision = _precision(x.dtype, target)
    by_tiles = tiles.moves_tiles(target) and all(map(_moves, tensors))
    by_tiles = by_tiles and (x.dtype is not torch.float32 or precision == "tf32")
    fixed = {
        "VALUE": None if functions is None else functions.value,
        "LINEAR_VALUE": None if functions is None else functions.linear_value,
        "PRECISION": precision,
    }
    sizes = rows, features, depth
    rest = features * len(weights), None if scale == 1.0 else float(scale), numbers
    config = config if config is not None and _is_for_tiles(config) == by_tiles else None
    matrices = left, w, up, added
    if by_tiles:
        _lend_memory(x)
        strides = [0 if t is None else t.stride(0) for t in matrices]
    else:
        strides = [stride for t in matrices for stride in ((0, 0) if t is None else t.stride())]

    def grid(config: Config) -> tuple[int]:
        tall, wide = config["BLOCK_M"], config["BLOCK_N"]
        count = triton.cdiv(rows, tall) * triton.cdiv(features, wide)
        return (min(target.multiprocessors, count) if by_tiles else count,)

    kernel = BY_TILES if by_tiles else BY_POINTERS
    kernel.launch(grid, *tensors, *sizes, *strides, *rest, config=config, **fixed)
    lead = x.shape[:-1]
    return y.view(*lead, features), None if hidden is None else hidden.view(*lead, hidden.shape[1])


def configurations(
    device: torch.device,
    dtype: torch.dtype,
    sizes: tuple[int, int, int],
    *,
    gated: bool,
    functions: DeviceFunctions | None = None,
    keep: bool = False,
) -> list[dict[str, Any]]:
    """The possible values of ``config`` of :func:`multiply`, for JSON, the best guess first.

    Args:
        device: The device.
        dtype: Of the operands.
        sizes: Rows, features and depth.
        gated: Whether there are two weights.
        functions: Those of the activation.
        keep: Whether its input is stored too.
    """
    rows, features, depth = sizes
    target = current_target(device)
    facts = {"x": dtype, "rows": rows, "features": features, "depth": depth}
    facts |= {"up": dtype if gated else None, "hidden": dtype if keep else None}
    facts["VALUE"] = None if functions is None else functions.value
    aligned = features * dtype.itemsize % 16 == depth * dtype.itemsize % 16 == 0
    in_units = dtype is not torch.float32 or _precision(dtype, target) == "tf32"
    kernel = BY_TILES if aligned and in_units and tiles.moves_tiles(target) else BY_POINTERS
    return kernel.candidates(target, facts)


def _is_for_tiles(config: Config | Mapping[str, Any]) -> bool:
    constants = config.constants if isinstance(config, Config) else config["constants"]
    return "PARTS" in constants


def _dense(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.contiguous()


def _moves(tensor: Tensor | None) -> bool:
    """Whether TMA moves tiles of a matrix; a vector is loaded in another way."""
    return (
        tensor is None
        or tensor.ndim == 1
        or (
            tensor.stride(1) == 1
            and tensor.data_ptr() % 16 == 0
            and tensor.stride(0) * tensor.element_size() % 16 == 0
        )
    )


def _precision(dtype: torch.dtype, target: Target) -> str:
    """How fp32 operands are multiplied: in TF32 where PyTorch may do so."""
    allowed = dtype is torch.float32 and target.backend == "cuda"
    return matmul_precision("cuda") if allowed else "ieee"


def _lend_memory(x: Tensor) -> None:
    """Say where descriptors of tiles go, unless that was said before in this thread."""
    if x.is_cuda and isinstance(_allocation._allocator.get(), _allocation.NullAllocator):
        triton.set_allocator(_allocate)


def _allocate(size: int, alignment: int, stream: int | None) -> Tensor:
    return torch.empty(size, dtype=torch.int8, device="cuda")
