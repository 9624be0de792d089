"""Bias + activation in one pass over memory: a Triton kernel, and its torch twin.

The twin runs where the kernel does not: without Triton or a GPU, and for an activation that the
kernel does not know. Only this file imports Triton, which exists on Linux only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from opfuse import has_same_math
from opfuse.ops import GELU, ReLU, SiLU

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What the kernel computes in."""

FORMS = ("relu", "silu", "gelu tanh", "gelu none")
"""What the kernel calls the activations it knows."""


def known(activation: Any) -> str | None:
    """What the kernel calls an activation; None: it does not know it.

    It does not know a GELU that overrides ``value``, for one.
    """
    if has_same_math(activation, GELU):
        return f"gelu {activation.approximate}"
    return next(
        (name for cls, name in ((ReLU, "relu"), (SiLU, "silu")) if has_same_math(activation, cls)),
        None,
    )


def bias_activation(
    x: Tensor, bias: Tensor, activation: Any, name: str | None, *, dtype: torch.dtype, keep: bool
) -> tuple[Tensor, Tensor | None]:
    """``activation(x + bias)`` in ``dtype``, and ``x + bias`` if ``keep``.

    ``name`` is what :func:`known` gives for the activation.
    """
    if name is not None and runs_on_triton(x, bias, dtype):
        return _launch(x, bias, name, keep)
    hidden = (x + bias).to(x.dtype).to(dtype)
    return activation.forward_value(hidden), hidden if keep else None


def runs_on_triton(x: Tensor, bias: Tensor, dtype: torch.dtype) -> bool:
    """Whether the kernel takes this call, rather than the twin."""
    return (
        triton is not None
        and x.device.type == ("cpu" if is_interpreted() else "cuda")
        and x.dtype is dtype
        and {x.dtype, bias.dtype} <= set(DTYPES)
        and {type(x), type(bias)} <= {Tensor, Parameter}  # subclasses have their ways
        and x.is_contiguous()
        and bias.is_contiguous()
        and x.numel() > 0
    )


def is_interpreted() -> bool:
    """Whether Triton runs kernels in Python, to test them (``TRITON_INTERPRET=1``)."""
    return triton is not None and not isinstance(_kernel, triton.JITFunction)


def _launch(x: Tensor, bias: Tensor, activation: str, keep: bool) -> tuple[Tensor, Tensor | None]:
    y = torch.empty_like(x)
    hidden = torch.empty_like(x) if keep else None
    features = bias.numel()
    rows = x.numel() // features
    width = min(triton.next_power_of_2(features), 512)
    height = 4096 // width
    grid = (triton.cdiv(rows, height), triton.cdiv(features, width))
    with torch.cuda.device_of(x):  # Triton launches on the current device
        _kernel[grid](
            x, bias, y, hidden, rows, features, activation, keep, HEIGHT=height, WIDTH=width
        )
    return y, hidden


if triton is not None:

    @triton.jit
    def _kernel(
        x_ptr,
        bias_ptr,
        y_ptr,
        hidden_ptr,
        rows,
        features,
        ACTIVATION: tl.constexpr,
        KEEP: tl.constexpr,
        HEIGHT: tl.constexpr,
        WIDTH: tl.constexpr,
    ):
        """One tile of ``HEIGHT`` rows and ``WIDTH`` features, masked where it ends."""
        row = tl.program_id(0) * HEIGHT + tl.arange(0, HEIGHT)[:, None]
        feature = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)[None, :]
        inside = (row < rows) & (feature < features)
        at = row.to(tl.int64) * features + feature
        x = tl.load(x_ptr + at, inside)
        bias = tl.load(bias_ptr + feature, feature < features)
        hidden = x.to(tl.float32) + bias.to(tl.float32)
        hidden = hidden.to(x.dtype)  # rounded, as between the separate ops
        if KEEP:
            tl.store(hidden_ptr + at, hidden, inside)
        h = hidden.to(tl.float32)
        if ACTIVATION == "relu":
            y = tl.where(h < 0, 0.0, h)  # keeps NaN, which tl.maximum loses
        elif ACTIVATION == "silu":
            y = h * tl.sigmoid(h)
        elif ACTIVATION == "gelu none":
            y = 0.5 * h * (1 + tl.erf(0.7071067811865476 * h))
        else:  # GELU in its tanh form, since (1 + tanh(u)) / 2 = sigmoid(2 u)
            y = h * tl.sigmoid(1.5957691216057308 * (h + 0.044715 * h * h * h))
        tl.store(y_ptr + at, y.to(x.dtype), inside)
