"""The kernels' arithmetic in PyTorch's operations, for machines without kernels and for tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Two = tuple[Tensor | None, Tensor | None]
Three = tuple[Tensor | None, Tensor | None, Tensor | None]


def forward(
    op: Any, x: Tensor, bias: Tensor | None, scales: Tensor | None, dtype: torch.dtype, keep: bool
) -> tuple[Tensor, Tensor | None]:
    """``act(x + bias) * scales[..., None]``.

    Args:
        op: The activation.
        x: The input ``(..., features)``; twice the features of the output if the op is gated.
        bias: ``(features,)`` as ``x``, or None. The sum is rounded to the dtype of ``x``.
        scales: ``x.shape[:-1]``, or None.
        dtype: The dtype of the output; half precision is computed in fp32.
        keep: Whether to return the input of the activation.

    Returns:
        The output; the input of the activation in ``dtype``, or None.
    """
    hidden = (x if bias is None else (x + bias).to(x.dtype)).to(dtype)
    if scales is None:
        y = op.forward_value(hidden)
    else:
        y = (op.forward_value(_widen(hidden)) * _widen(scales).unsqueeze(-1)).to(dtype)
    return y, hidden if keep else None


def backward(
    op: Any,
    numbers: Any,
    dy: Tensor,
    x: Tensor,
    needs_x: bool,
    needs_sums: bool,
    needs_y: bool = False,
    owns: bool = False,
) -> Three:
    """The gradient of an activation, its sum over all rows, and the output again.

    Args:
        op: The activation.
        numbers: The op's numbers in the forward.
        dy: The gradient of the output.
        x: What the activation was applied to.
        needs_x: Whether to return the gradient.
        needs_sums: Whether to return the sums.
        needs_y: Whether to return the output.
        owns: Whether a result may overwrite ``dy``.

    Returns:
        The gradient of ``x``; the sums ``(features,)``; the output. All are in the dtype of ``x``.
        None for what is not wanted.
    """
    if dy.dtype is not x.dtype:
        dy = dy.to(x.dtype)
    op = op.with_numbers(numbers)
    y = op.forward_value(x) if needs_y else None
    if not (needs_x or needs_sums):
        return None, None, y
    dx = op.backward_value(dy, x, out=dy if owns and not op.gated else None)
    sums = dx.unsqueeze(0).flatten(0, -2).sum(0) if needs_sums else None
    return dx if needs_x else None, sums, y


def scaled_backward(
    op: Any, numbers: Any, dy: Tensor, x: Tensor, scales: Tensor | None, needs_scales: bool
) -> Two:
    """The gradients of an activation times a scale per row.

    Args:
        op: The activation.
        numbers: The op's numbers in the forward.
        dy: The gradient of the output.
        x: What the activation was applied to.
        scales: ``x.shape[:-1]``; None: the gradient of ``x`` is not needed.
        needs_scales: Whether that of the scales is.

    Returns:
        The gradient of ``x`` in the dtype of ``dy``, or None; that of the scales in their dtype, or
        None, or in fp32 where there are no scales.
    """
    op, wide_x, wide_dy = op.with_numbers(numbers), _widen(x), _widen(dy)
    dx = dscales = None
    if scales is not None:
        dx = op.backward_value(wide_dy * _widen(scales).unsqueeze(-1), wide_x).to(dy.dtype)
    if needs_scales:
        dscales = (op.forward_value(wide_x) * wide_dy).sum(-1)
        dscales = dscales if scales is None else dscales.to(scales.dtype)
    return dx, dscales


def _widen(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype.itemsize == 2 else tensor
