"""The sums of partial sums: one kernel for all that add up columns, always in the same order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from .configs import Config, next_power_of_2
from .kernels import Kernel
from .targets import Target


@triton.jit
def column_sums(
    partial_ptr, first_ptr, second_ptr, strips, width, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """The sums of one or two sets of partial sums, over the programs that wrote them."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = column < width
    row = tl.program_id(1) * strips + tl.arange(0, ROWS)[:, None]
    end = (tl.program_id(1) + 1) * strips
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for _ in range(0, strips, ROWS):
        at = row.to(tl.int64) * width + column[None, :]
        total += tl.load(partial_ptr + at, (row < end) & valid[None, :], other=0.0)
        row += ROWS
    result = tl.sum(total, 0)
    if tl.program_id(1) == 0:
        tl.store(first_ptr + column, result.to(first_ptr.dtype.element_ty), valid)
    elif second_ptr is not None:
        tl.store(second_ptr + column, result.to(second_ptr.dtype.element_ty), valid)


def _configs(target: Target, facts: Mapping[str, Any]) -> list[Config]:
    """Up to 256 partial sums at a time, and as many columns as make 4096 numbers of that."""
    rows = min(256, next_power_of_2(facts["strips"]))
    return [Config({"ROWS": rows, "BLOCK": 4096 // rows}, 8)]


COLUMN_SUMS = Kernel(column_sums, _configs)


def sum_strips(sums: Tensor, first: Tensor, second: Tensor | None = None) -> Tensor:
    """Write the sums over partial sums in fp32, which follow one another; return the first.

    Args:
        sums: ``(strips, width)``, or two of these, contiguous.
        first: Where those of the first go, ``width`` numbers of any dtype.
        second: Where those of the second go, if there is one.
    """
    strips, width = sums.shape[-2:]
    COLUMN_SUMS.launch(
        lambda config: (-(-width // config.constants["BLOCK"]), 1 if second is None else 2),
        *(sums, first, second, strips, width),
    )
    return first
