"""The output of a norm once more, from its input and statistics."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..configs import Config, cdiv, next_power_of_2
from ..kernels import Kernel
from ..targets import Target
from . import Norm


@triton.jit
def norm_again(
    x_ptr,
    weight_ptr,
    bias_ptr,
    mean_ptr,
    rstd_ptr,
    y_ptr,
    rows,
    features,
    ZERO_CENTERED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A tile of ``ROWS`` rows and ``BLOCK`` columns; rows may be of any width."""
    tiles = tl.cdiv(features, BLOCK)
    row = (tl.program_id(0) // tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(0) % tiles * BLOCK + tl.arange(0, BLOCK)[None, :]
    some, valid = row < rows, column < features
    inside = some & valid
    y = tl.load(x_ptr + row * features + column, inside, other=0.0).to(tl.float32)
    if mean_ptr is not None:
        y -= tl.load(mean_ptr + row, some, other=0.0)
    y *= tl.load(rstd_ptr + row, some, other=0.0)
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + column, valid, other=0.0).to(tl.float32)
        y *= weight + 1.0 if ZERO_CENTERED else weight
    if bias_ptr is not None:
        y += tl.load(bias_ptr + column, valid, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * features + column, y.to(y_ptr.dtype.element_ty), inside)


def _configs(target: Target, facts: Mapping[str, Any]) -> list[Config]:
    """Tiles of 4096 numbers, 32 per thread, at most 1024 of a row; then smaller ones."""
    block = min(1024, next_power_of_2(facts["features"]))
    found: dict[Config, None] = {}
    for size, warps in ((4096, 4), (2048, 4), (8192, 8)):
        found[Config({"ROWS": max(1, size // block), "BLOCK": block}, warps)] = None
    return list(found)


AGAIN = Kernel(norm_again, _configs)


def again(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    norm: Norm,
    dtype: torch.dtype | None,
) -> Tensor:
    """Launch :func:`opfuse_triton.norms.twins.again` for contiguous tensors with elements.

    Args:
        x: As there, and all others.
        weight: See ``x``.
        bias: See ``x``.
        mean: See ``x``.
        rstd: See ``x``.
        norm: See ``x``.
        dtype: See ``x``.
    """
    features = math.prod(x.shape[-norm.dims :])
    rows = x.numel() // features
    y = torch.empty_like(x, dtype=dtype or x.dtype)
    AGAIN.launch(
        lambda config: (cdiv(rows, config["ROWS"]) * cdiv(features, config["BLOCK"]),),
        *(x, weight, bias, mean, rstd, y, rows, features),
        ZERO_CENTERED=norm.zero_centered,
    )
    return y
