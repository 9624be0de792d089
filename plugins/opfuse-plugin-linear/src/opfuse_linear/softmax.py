"""The Triton kernel of the loss: a chunk of logits becomes its gradient in place.

This file imports Triton.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from opfuse_triton import Config, Kernel, Target
from opfuse_triton.functions import tanh
from torch import Tensor

from opfuse.ops.cross_entropy import LossNumbers


@triton.jit
def softmax_kernel(
    logits,
    targets,
    weights,
    losses,
    classes,
    ignored,
    smoothing,
    z_loss,
    softcap,
    SMOOTHED: tl.constexpr,
    SQUARED: tl.constexpr,
    CAPPED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row, which is read twice: for its sums, and to be overwritten by its gradient."""
    row = tl.program_id(0).to(tl.int64)
    target, weight = tl.load(targets + row), tl.load(weights + row)
    start = logits + row * classes
    highest, base, total, of_all, picked = float("-inf"), 0.0, 0.0, 0.0, 0.0
    for first in range(0, classes, BLOCK):
        column = first + tl.arange(0, BLOCK)
        z = tl.load(start + column, column < classes, other=float("-inf")).to(tl.float32)
        if CAPPED:
            z = tl.where(column < classes, softcap * tanh(z / softcap), float("-inf"))
        picked += tl.sum(tl.where(column == target, z, 0.0))
        if SMOOTHED:
            of_all += tl.sum(tl.where(column < classes, z, 0.0))
        highest = tl.maximum(highest, tl.max(z))
        before = base
        base = tl.where(tl.abs(highest) == float("inf"), 0.0, highest)  # as torch.logsumexp does
        before_now = tl.where(total > 0.0, total * tl.exp(before - base), 0.0)
        total = before_now + tl.sum(tl.exp(z - base))
    lse = tl.log(total) + base
    loss, scale = lse - (1.0 - smoothing) * picked, weight / total
    if SMOOTHED:
        loss -= smoothing * of_all / classes
    if SQUARED:
        loss += z_loss * lse * lse
        scale *= 1.0 + 2.0 * z_loss * lse
    tl.store(losses + row, tl.where(target == ignored, 0.0, loss))
    tl.debug_barrier()
    for first in range(0, classes, BLOCK):
        column = first + tl.arange(0, BLOCK)
        z = tl.load(start + column, column < classes, other=0.0).to(tl.float32)
        slope = 1.0
        if CAPPED:
            t = tanh(z / softcap)
            z, slope = softcap * t, 1.0 - t * t
        dz = tl.exp(z - base) * scale
        if SMOOTHED:
            dz -= weight * smoothing / classes
        dz = tl.where(column == target, dz - weight * (1.0 - smoothing), dz) * slope
        tl.store(start + column, dz.to(logits.dtype.element_ty), column < classes)


def _configs(target: Target, facts: Mapping[str, Any]) -> list[Config]:
    """Blocks as wide as a row, but no wider than registers hold."""
    widest = triton.next_power_of_2(facts["classes"])
    pairs = (4096, 8), (8192, 16), (2048, 4), (4096, 4)
    made = [Config({"BLOCK": min(block, widest)}, num_warps=warps) for block, warps in pairs]
    return list(dict.fromkeys(made))


SOFTMAX = Kernel(softmax_kernel, _configs)


def softmax_in_place(
    logits: Tensor,
    targets: Tensor,
    weights: Tensor,
    numbers: LossNumbers,
    config: Config | None = None,
) -> Tensor:
    """:func:`opfuse_linear.chunks.softmax_in_place`, by the kernel.

    Args:
        logits: In fp32, bf16 or fp16.
        targets: As there.
        weights: In fp32.
        numbers: As there.
        config: The configuration; None: the heuristic's.
    """
    rows, classes = logits.shape
    _check(targets, classes, numbers.ignore_index)
    losses = torch.zeros_like(weights)
    if not logits.numel():
        return losses
    softcap = numbers.softcap
    SOFTMAX.launch(
        lambda config: (rows,),
        *(logits, targets, weights, losses, classes),
        *(numbers.ignore_index, numbers.label_smoothing, numbers.z_loss),
        1.0 if softcap is None else softcap,
        config=config,
        SMOOTHED=numbers.label_smoothing > 0,
        SQUARED=numbers.z_loss > 0,
        CAPPED=softcap is not None,
    )
    return losses


def _check(targets: Tensor, classes: int, ignored: int) -> None:
    """Refuse a target that is not a class; on a GPU when its queue gets there, as torch does."""
    if targets.is_meta:
        return
    fits = ((targets >= 0) & (targets < classes)) | (targets == ignored)
    if targets.is_cuda:
        torch._assert_async(fits.all(), "CrossEntropy: a target is out of bounds")
    elif not fits.all():
        raise IndexError(f"Target {targets[~fits][0].item()} is out of bounds.")
