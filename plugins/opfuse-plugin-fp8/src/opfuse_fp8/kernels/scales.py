"""The kernel that advances delayed scales: one launch, however many there are."""
# kernels take what they are given

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import triton
import triton.language as tl
from opfuse_triton import Config, Kernel, Target, next_power_of_2
from torch import Tensor


@triton.jit
def advance_scales(
    scale_ptr, amax_ptr, history_ptr, count_ptr, fact_ptr, rows_ptr, length,
    APART: tl.constexpr, MOST_RECENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program for each row, see :func:`opfuse_fp8.delayed.advance`."""
    row = tl.program_id(0).to(tl.int64)
    if rows_ptr is not None:
        row = tl.load(rows_ptr + row)
    most = tl.load(fact_ptr + 3 * row)
    power = tl.load(fact_ptr + 3 * row + 1)
    amax = tl.load(amax_ptr + APART * row)
    if tl.load(fact_ptr + 3 * row + 2) == 0.0:
        amax = tl.where(amax < 0.0, 0.0, amax)
    tl.debug_barrier()  # all threads have read it
    tl.store(amax_ptr + APART * row, -1.0)
    if amax == float("inf"):
        tl.atomic_add(count_ptr + row, 1)
    if amax >= 0.0:
        start = history_ptr + row * length
        past = tl.zeros((BLOCK,), tl.float32)
        broken = tl.zeros((BLOCK,), tl.int32)
        for first in range(1, length, BLOCK):
            at = first + tl.arange(0, BLOCK)
            old = tl.load(start + at, at < length, 0.0)
            past = tl.maximum(past, tl.where(old == old, old, 0.0))
            broken |= (old != old).to(tl.int32)
            tl.debug_barrier()  # a thread writes where another one reads
            tl.store(start + at - 1, tl.where(at == 1, 0.0, old), at < length)
        tl.store(start + length - 1, tl.where(length == 1, 0.0, amax))
        largest = amax
        usable = largest < float("inf")
        if not MOST_RECENT:
            largest = tl.maximum(largest, tl.max(past, 0))
            usable = (largest < float("inf")) & (tl.max(broken, 0) == 0)
        scale = tl.div_rn(tl.div_rn(most, tl.where(largest > 0.0, largest, 1.0)), power)
        scale = tl.where(scale == float("inf"), 3.4028234663852886e38, scale)
        if usable & (largest > 0.0):
            tl.store(scale_ptr + APART * row, scale)


def _configs(target: Target, facts: Mapping[str, Any]) -> list[Config]:
    """A row at a time, with 8 numbers per thread of four warps."""
    return [Config({"BLOCK": min(1024, next_power_of_2(facts["length"]))}, 4)]


ADVANCE = Kernel(advance_scales, _configs)


def advance(
    scales: Tensor,
    amaxes: Tensor,
    histories: Tensor,
    counts: Tensor,
    facts: Tensor,
    rows: Tensor | None,
    *,
    most_recent: bool,
) -> None:
    """See :func:`opfuse_fp8.delayed.advance`."""
    ADVANCE.launch(
        (len(scales if rows is None else rows),),
        *(scales, amaxes, histories, counts, facts, rows, histories.shape[1]),
        APART=scales.stride(0),
        MOST_RECENT=most_recent,
    )
