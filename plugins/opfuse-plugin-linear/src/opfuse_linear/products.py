"""Launching the Triton products: which kernel takes which tensors, and how many programs run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import triton
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
        keep = ctx.requires_grad and ctx.input_requires_grad and not act.saves_output
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
    rows, features = len(left), w.shape[0]
    added = None if addend is None else addend.reshape(rows, features)
    y = x.new_empty((rows, features))
    hidden = x.new_empty((rows, features * len(weights))) if keep else None
    halves = (None, None) if hidden is None else (*hidden.split(features, 1), None)[:2]
    tensors = left, w, up, _dense(bias), _dense(up_bias), added, None, y, *halves, None
    values = (None, None) if functions is None else (functions.value, functions.linear_value)
    factor = None if scale == 1.0 else float(scale)
    _launch(tensors, features * len(weights), factor, numbers, values, config)
    lead = x.shape[:-1]
    return y.view(*lead, features), None if hidden is None else hidden.view(*lead, hidden.shape[1])


def activation_gradient(
    grad_output: Tensor,
    weight: Tensor,
    hidden: Tensor,
    functions: DeviceFunctions,
    numbers: tuple[float, ...] = (),
    *,
    sums: bool = False,
    config: Config | Mapping[str, Any] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """``act'(hidden) * (grad_output @ weight)`` in one kernel: of an activation before a linear.

    Args:
        grad_output: Gradient of the linear's output, ``(..., out)``.
        weight: ``(out, in)``.
        hidden: The input of the activation, ``(..., in)``; of a gated one ``(..., 2 * in)``, first
            the gate.
        functions: Those of the activation.
        numbers: Those of the activation.
        sums: Whether to add up the result over all rows, too: the gradient of a bias before it.
        config: As for :func:`multiply`.

    Returns:
        What has the shape of ``hidden``; and if ``sums``, of its last dimension.
    """
    dy, width = grad_output.reshape(-1, grad_output.shape[-1]), hidden.shape[-1]
    before = hidden.reshape(-1, width)
    y = before.new_empty(before.shape)
    partial = None
    if sums:  # for tiles of any height
        count = cdiv(len(dy), tiles.LEAST_HEIGHT)
        partial = dy.new_zeros((count, width), dtype=torch.float32)
    value, linear = functions.value, functions.linear_value
    values = functions.derivative, linear
    gate, up, first, second = before, None, y, None
    if linear is not None:
        values += value, functions.linear_derivative
        (gate, up), (first, second) = before.chunk(2, 1), y.chunk(2, 1)
    tensors = dy, weight, None, None, None, gate, up, first, None, second, partial
    _launch(tensors, width, None, numbers, values, config, turned=True)
    return y.view(hidden.shape), None if partial is None else partial.sum(0).to(dy.dtype)


def _launch(
    tensors: Sequence[Tensor | None],
    hidden_stride: int,
    scale: float | None,
    numbers: tuple[float, ...],
    values: Sequence[Any],
    config: Config | Mapping[str, Any] | None,
    *,
    turned: bool = False,
) -> None:
    """Launch the kernel that takes these tensors, in the order of its parameters.

    Args:
        tensors: Those that are absent are None.
        hidden_stride: Of the rows of what is kept, or of the gradient.
        scale: With an addend.
        numbers: Of the activation.
        values: Device functions of the activation: ``VALUE``, ``LINEAR_VALUE`` and, for the
            gradient of a gated one, ``UP_VALUE`` and ``UP_LINEAR_VALUE``.
        config: As for :func:`multiply`.
        turned: Whether the second tensor is ``(depth, features)``.
    """
    left, w, up, added, y = [tensors[i] for i in (0, 1, 2, 5, 7)]
    assert left is not None and w is not None and y is not None
    (rows, depth), features = left.shape, y.shape[1]
    target = current_target(left.device)
    precision = _precision(left.dtype, target)
    by_tiles = tiles.moves_tiles(target) and all(map(_moves, tensors))
    wide = left.dtype is torch.float32  # which is multiplied only where depth is contiguous
    by_tiles = by_tiles and (not wide or (precision == "tf32" and not turned))
    names = "VALUE", "LINEAR_VALUE", "UP_VALUE", "UP_LINEAR_VALUE"
    fixed: dict[str, Any] = dict.fromkeys(names) | dict(zip(names, values, strict=False))
    fixed["PRECISION"] = precision
    config = config if config is not None and _is_for_tiles(config) == by_tiles else None
    matrices = left, w if by_tiles or not turned else w.t(), up, added
    if by_tiles:
        _lend_memory(left)
        strides = [0 if t is None else t.stride(0) for t in matrices]
        fixed["TURNED"] = turned
    else:
        strides = [stride for t in matrices for stride in ((0, 0) if t is None else t.stride())]
    kernel = BY_TILES if by_tiles else BY_POINTERS
    given = *tensors, rows, features, depth, *strides, hidden_stride, scale, numbers

    def grid(config: Config) -> tuple[int]:
        tall, wide = config["BLOCK_M"], config["BLOCK_N"]
        count = cdiv(rows, tall) * cdiv(features, wide)
        return (min(target.multiprocessors, count) if by_tiles else count,)

    kernel.launch(grid, *given, config=config, **fixed)


def configurations(
    device: torch.device,
    dtype: torch.dtype,
    sizes: tuple[int, int, int],
    *,
    gated: bool,
    functions: DeviceFunctions | None = None,
    keep: bool = False,
    turned: bool = False,
) -> list[dict[str, Any]]:
    """The possible values of ``config`` of :func:`multiply`, for JSON, the best guess first.

    Args:
        device: The device.
        dtype: Of the operands.
        sizes: Rows, features and depth.
        gated: Whether there are two weights.
        functions: Those of the activation.
        keep: Whether its input is stored too.
        turned: Whether they are for :func:`activation_gradient`.
    """
    rows, features, depth = sizes
    target = current_target(device)
    facts = {"x": dtype, "rows": rows, "features": features, "depth": depth}
    facts |= {"up": dtype if gated else None, "hidden": dtype if keep else None}
    facts["VALUE"] = None if functions is None else functions.value
    facts["addend"] = dtype if turned else None
    if turned and functions is not None and functions.linear_value is not None:
        facts |= {"up_addend": dtype, "UP_VALUE": functions.value}
    aligned = features * dtype.itemsize % 16 == depth * dtype.itemsize % 16 == 0
    in_units = dtype is not torch.float32 or _precision(dtype, target) == "tf32"
    in_units = in_units and not (turned and dtype is torch.float32)
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
