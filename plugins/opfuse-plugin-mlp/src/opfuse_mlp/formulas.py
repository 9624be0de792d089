"""The arithmetic, in PyTorch's operations: products, the norm again, and the kernel's twin."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from opfuse.ops import Activation


def rows_of(tensor: Tensor) -> Tensor:
    """``(..., n)`` with one row dimension, ``(rows, n)``; a view where there can be one."""
    return tensor if tensor.ndim == 2 else tensor.unsqueeze(0).flatten(0, -2)


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x @ weight.T + bias``: ``(..., n)`` times ``(m, n)``, in the dtype of ``x``."""
    return F.linear(x, weight, None if bias is None else bias.to(x.dtype))


def grad_of_weight(dy: Tensor, x: Tensor) -> Tensor:
    """``dy.T @ x``: of ``(rows, m)`` and ``(rows, n)``, the gradient ``(m, n)`` of a weight."""
    return dy.t().mm(x)


def normalized_again(ctx: Any, saved: Any, params: Any, dtype: torch.dtype | None) -> Tensor:
    """The output of a norm again, from its input and statistics.

    It is ``(x - mean) rstd weight + bias``, where RMSNorm has no mean and no bias.

    Args:
        ctx: The norm's context in the backward.
        saved: The tensors that it saved: the input, the weight or None, the mean if there is one,
            and rstd.
        params: Its weight and its bias as they were; None: there is none.
        dtype: The dtype of its output; None: that of the input.
    """
    (x, _, *mean, rstd), (weight, bias) = saved, params
    wide = rstd.dtype
    y: Tensor = x.to(wide) - mean[0] if mean else x.to(wide)
    y = y * rstd
    if weight is not None:
        y *= weight.to(wide) + 1 if ctx.zero_centered_gamma else weight.to(wide)
    if bias is not None:
        y += bias.to(wide)
    return y.to(dtype or x.dtype)


def gradients(
    activation: Activation, dy: Tensor, z: Tensor, with_output: bool
) -> tuple[Tensor, Tensor | None]:
    """The gradient of an activation's input, and its output again.

    Args:
        activation: The activation, with the numbers of the forward.
        dy: Gradient of the output, ``(rows, n)``, which is overwritten if that is allowed.
        z: The input, ``(rows, n)``; of a gated activation ``(rows, 2 n)``.
        with_output: Return the output, too.

    Returns:
        Both in the dtype of ``z``; None: the output is not needed.
    """
    y = activation.forward_value(z) if with_output else None
    return activation.backward_value(dy, z, out=None if activation.gated else dy), y
