"""Calls of Liger's kernels, in the forms that write only into new tensors.

They cast as Liger's Gemma does, which computes in fp32 to the end, as the ops do. Only this file
imports Liger and Triton, when a kernel is looked for.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

_MODE, _BY_ROWS = "gemma", True
MOST_FEATURES = 65536
"""Liger's kernels keep a row in one block."""


@functools.cache
def unavailable(device: torch.device) -> str:
    """Why Liger's kernels do not run on a device, or ``""``."""
    for name in ("triton", "liger_kernel"):
        if importlib.util.find_spec(name) is None:
            return f"{name.replace('_', '-')} is not installed"
    interpreted = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")
    if device.type != ("cpu" if interpreted else "cuda"):
        return f"Triton has no driver for {device.type} here"
    return ""


def takes(*tensors: Any, params: Sequence[Any] = ()) -> bool:
    """Return whether these are plain, contiguous, alike in dtype and features, and not empty."""
    x = tensors[0]
    plain = all(type(t) in (Tensor, Parameter) and t.is_contiguous() for t in (*tensors, *params))
    return (
        plain
        and x.numel() > 0
        and x.shape[-1] <= MOST_FEATURES
        and all(t.dtype is x.dtype for t in tensors)
        and {(p.dtype, p.shape) for p in params} <= {(p.dtype, x.shape[-1:]) for p in params[:1]}
    )


@functools.cache
def _of(module: str) -> Any:
    return importlib.import_module(f"liger_kernel.ops.{module}")


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    """The output ``(..., n)``, and ``1 / rms`` as ``(..., 1)``."""
    y, _, rstd, *_ = _of("rms_norm").rms_norm_forward(x, weight, eps, offset, _MODE, _BY_ROWS)
    return y, rstd.view(*x.shape[:-1], 1)


def add_rms_norm(
    x: Tensor, extra: Tensor, weight: Tensor, eps: float, offset: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The norm of ``x + extra``, that sum, and ``1 / rms`` as ``(..., 1)``."""
    run = _of("fused_add_rms_norm").fused_add_rms_norm_forward
    y, total, rstd, *_ = run(x, extra, weight, eps, offset, _MODE)
    return y, total, rstd.view(*x.shape[:-1], 1)


def rms_norm_grads(grad_output: Tensor, *rest: Any) -> tuple[Tensor, Tensor | None]:
    """The gradients of the input and of the weight.

    Args:
        grad_output: Of the norm's output.
        *rest: The gradient of the extra output, if there is one, then the input, the weight,
            ``1 / rms``, the offset of the weight, and whose gradient is wanted.
    """
    *extra, x, weight, rstd, offset, wanted = rest
    block = _of("utils").calculate_settings(x.shape[-1])
    mode = _of("rms_norm")._str_to_casting_mode[_MODE]
    x, rstd, needs = x.view(-1, x.shape[-1]), rstd.view(-1), any(wanted)
    if extra:
        run = _of("fused_add_rms_norm").fused_add_rms_norm_backward
        dx, _, dw = run(
            grad_output, *extra, x, weight, rstd, offset, mode, *block, 2, False, needs_dw=needs
        )
        return dx, dw
    run = _of("rms_norm").rms_norm_backward
    return run(  # type: ignore[no-any-return]
        grad_output, x, weight, rstd, offset, mode, *block, False, _BY_ROWS, needs_dw=needs
    )


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The output ``(..., n)``, mean and ``1 / std`` as ``(..., 1)``."""
    y, _, mean, rstd, *_ = _of("layer_norm").layer_norm_forward(x, weight, bias, eps)
    return y, mean.view(*x.shape[:-1], 1), rstd.view(*x.shape[:-1], 1)


def layer_norm_grads(
    grad_output: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, wanted: Any
) -> tuple[Any, ...]:
    """The gradients of the input, the weight and the bias, which has the weight's dtype."""
    run, x = _of("layer_norm").layer_norm_backward, x.view(-1, x.shape[-1])
    return run(grad_output, x, weight, weight, mean.view(-1), rstd.view(-1), *wanted)  # type: ignore[no-any-return]


def swiglu(x: Tensor) -> Tensor:
    """``silu(a) b`` of the halves of ``(..., 2 n)``."""
    return _of("swiglu").swiglu_fused_gate_up_forward(x)[1]  # type: ignore[no-any-return]


def swiglu_grads(grad_output: Tensor, x: Tensor) -> Tensor:
    """The gradient of :func:`swiglu`."""
    return _of("swiglu").swiglu_fused_gate_up_backward(x, grad_output).view_as(x)  # type: ignore[no-any-return]


def geglu(x: Tensor) -> Tensor:
    """``gelu(a) b`` of the halves of ``(..., 2 n)``, tanh form; the kernel takes copies of them."""
    return _of("geglu").geglu_forward(*_halves(x))[2]  # type: ignore[no-any-return]


def geglu_grads(grad_output: Tensor, x: Tensor) -> Tensor:
    """The gradient of :func:`geglu`; the kernel overwrites copies of the halves."""
    return torch.cat(_of("geglu").geglu_backward(*_halves(x), grad_output), -1)


def _halves(x: Tensor) -> list[Tensor]:
    return [half.clone(memory_format=torch.contiguous_format) for half in x.chunk(2, -1)]
