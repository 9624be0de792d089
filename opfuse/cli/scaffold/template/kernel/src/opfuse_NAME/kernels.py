"""The kernel, one pass over memory. Only this file and the cases import Triton."""

from __future__ import annotations

from collections.abc import Mapping
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
    functions_of,
    next_power_of_2,
)
from opfuse_triton.machine import is_interpreting
from torch import Tensor
from torch.nn import Parameter


# only forward
@triton.jit
def bias_activation_kernel(
    x_ptr, bias_ptr, y_ptr, hidden_ptr, rows, features, numbers,
    VALUE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One tile of ``ROWS`` rows and ``COLUMNS`` features, masked where it ends."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    feature = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows) & (feature < features)
    at = row * features + feature
    x = tl.load(x_ptr + at, inside)
    bias = tl.load(bias_ptr + feature, feature < features)
    hidden = x.to(tl.float32) + bias.to(tl.float32)
    hidden = hidden.to(x.dtype)  # rounded, as between the separate ops
    if hidden_ptr is not None:
        tl.store(hidden_ptr + at, hidden, inside)
    y = VALUE(hidden.to(tl.float32), *numbers)
    tl.store(y_ptr + at, y.to(x.dtype), inside)


# only backward
@triton.jit
def bias_activation_grad_kernel(
    dy_ptr, x_ptr, dx_ptr, sums_ptr, rows, features, numbers,
    DERIVATIVE: tl.constexpr, STRIP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """``STRIP`` rows of ``COLUMNS`` features, ``ROWS`` at a time, masked where they end."""
    feature = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for step in range(0, STRIP, ROWS):
        row = tl.program_id(0).to(tl.int64) * STRIP + step + tl.arange(0, ROWS)[:, None]
        inside = (row < rows) & (feature < features)
        at = row * features + feature
        dy = tl.load(dy_ptr + at, inside, 0)
        x = tl.load(x_ptr + at, inside, 0).to(tl.float32)
        dx = dy.to(tl.float32) * DERIVATIVE(x, *numbers)
        dx = dx.to(dy.dtype)  # rounded, as between the separate ops
        if dx_ptr is not None:
            tl.store(dx_ptr + at, dx, inside)
        total += tl.where(inside, dx.to(tl.float32), 0.0)
    if sums_ptr is not None:
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        start = tl.program_id(0).to(tl.int64) * features
        tl.store(sums_ptr + start + column, tl.sum(total, 0), column < features)


# all
def configs(target: Target, facts: Mapping[str, Any]) -> list[Config]:
    """The best first; ``opfuse_triton`` says what the target and the facts have."""
    columns = min(next_power_of_2(facts["features"]), 512)
    # only forward
    return [Config({"ROWS": 4096 // columns, "COLUMNS": columns})]
    # only backward
    return [Config({"ROWS": min(2048 // columns, STRIP), "COLUMNS": columns})]
    # all


# only forward
KERNEL = Kernel(bias_activation_kernel, configs)
# only backward
STRIP = 128
"""The rows that one program sums."""

KERNEL = Kernel(bias_activation_grad_kernel, configs)
# all


# only forward
def bias_activation(
    x: Tensor, bias: Tensor, functions: DeviceFunctions, numbers: tuple[float, ...], keep: bool
) -> tuple[Tensor, Tensor | None]:
    """``activation(x + bias)`` and, if ``keep``, ``x + bias``."""
    y, hidden = torch.empty_like(x), torch.empty_like(x) if keep else None
    features = bias.numel()
    rows = x.numel() // features

    def grid(config: Config) -> tuple[int, int]:
        return cdiv(rows, config["ROWS"]), cdiv(features, config["COLUMNS"])

    arguments = x, bias, y, hidden, rows, features, numbers
    KERNEL.launch(grid, *arguments, VALUE=functions.value)
    return y, hidden


# only backward
def bias_activation_grad(
    dy: Tensor,
    x: Tensor,
    functions: DeviceFunctions,
    numbers: tuple[float, ...],
    needs_dx: bool,
    needs_dbias: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """``dy * activation'(x)``, and its sum over rows in fp32; None for what is not needed."""
    features = x.shape[-1]
    rows = x.numel() // features
    strips = cdiv(rows, STRIP)
    dx = torch.empty_like(x) if needs_dx else None
    sums = x.new_empty((strips, features), dtype=torch.float32) if needs_dbias else None

    def grid(config: Config) -> tuple[int, int]:
        return strips, cdiv(features, config["COLUMNS"])

    arguments = dy, x, dx, sums, rows, features, numbers
    KERNEL.launch(grid, *arguments, DERIVATIVE=functions.derivative, STRIP=STRIP)
    return dx, None if sums is None else sums.sum(0)


# all
def functions_for(activation: Any) -> DeviceFunctions | None:
    """What the kernel computes an activation with; None: it is gated, or has no functions."""
    found = functions_of(activation)
    return found if found is not None and found.linear_value is None else None


def takes(x: Tensor, other: Tensor, dtype: torch.dtype) -> bool:
    """Whether the kernel can take a call; the twin takes the others."""
    return (
        x.device.type == ("cpu" if is_interpreting() else "cuda")
        and x.dtype is dtype
        and {x.dtype, other.dtype} <= {torch.float32, torch.bfloat16, torch.float16}
        and {type(x), type(other)} <= {Tensor, Parameter}  # a subclass may do something else
        and x.is_contiguous()
        and other.is_contiguous()
        and x.numel() > 0
    )
