"""The softmax of a loss in Triton: its losses, and its gradient.

This module imports Triton.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from opfuse_triton import Config, Kernel, Target, cdiv, next_power_of_2
from opfuse_triton.functions import exp, reciprocal
from torch import Tensor
from torch.nn import functional as F

from opfuse.core.overwriting import unseen
from opfuse.ops.cross_entropy import LossNumbers

LOWEST = tl.constexpr(-3.4028234663852886e38)
"""Of fp32: what is less is ``-inf``, and ``exp(-inf - LOWEST)`` is 0."""


@triton.jit
def capped_share(z, softcap):
    """``tanh(z / softcap)``, off by at most 7e-7 if both functions are off by 2 ulp.

    So the capped logit is off by a few roundings of the cap, as it is in fp32 where the cap bends.
    :func:`opfuse_triton.functions.tanh` has a small relative error near 0 too; it takes more than
    twice the instructions.
    """
    return 1.0 - 2.0 * reciprocal(1.0 + exp(z * (2.0 / softcap)))


@triton.jit
def load_logits(start, column, classes, softcap, CAPPED: tl.constexpr):
    """Some logits of a row in fp32, capped; -inf where there is none."""
    z = tl.load(start + column, column < classes, other=float("-inf")).to(tl.float32)
    if CAPPED:
        z = tl.where(column < classes, softcap * capped_share(z, softcap), float("-inf"))
    return z


@triton.jit
def _columns(first, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    """The columns from one on, ``(STEPS, BLOCK)``."""
    return first + tl.arange(0, STEPS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]


@triton.jit
def _sums(
    start, target, classes, softcap,
    SMOOTHED: tl.constexpr, CAPPED: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of a row that is read once: its target's logit, the sum of all, and ``base`` and ``total``.

    ``total`` is the sum of ``exp(z - base)``, and NaN where a logit is infinite, as torch's softmax
    then is. Each of ``BLOCK`` lanes has its own until the end: threads wait for no others before.
    """
    highest = tl.full((BLOCK,), LOWEST, tl.float32)
    total, of_all = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for first in range(0, classes, STEPS * BLOCK):
        column = _columns(first, STEPS, BLOCK)
        z = load_logits(start, column, classes, softcap, CAPPED)
        if SMOOTHED:
            of_all += tl.sum(tl.where(column < classes, z, 0.0), 0)
        before = highest
        highest = tl.maximum(before, tl.max(z, 0))
        total = total * exp(before - highest) + tl.sum(exp(z - highest[None, :]), 0)
    base = tl.max(highest, 0)
    total = tl.sum(total * exp(highest - base), 0)
    picked = load_logits(start, tl.maximum(target, 0), classes, softcap, CAPPED)
    return picked, tl.sum(of_all, 0), base, total


@triton.jit
def _loss(
    picked, of_all, base, total, classes, smoothing, z_loss,
    SMOOTHED: tl.constexpr, SQUARED: tl.constexpr,
):  # fmt: skip
    """The loss of a row from its sums."""
    lse = tl.log(total) + base
    loss = lse - (1.0 - smoothing) * picked
    if SMOOTHED:
        loss -= smoothing * of_all / classes
    if SQUARED:
        loss += z_loss * lse * lse
    return loss


@triton.jit
def _gradient(
    z, column, target, weight, base, total, classes, smoothing, z_loss, softcap,
    SMOOTHED: tl.constexpr, SQUARED: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """The gradient of some logits of a row, whose loss has the gradient ``weight``."""
    scale, slope = weight / total, 1.0
    if SQUARED:
        scale *= 1.0 + 2.0 * z_loss * (tl.log(total) + base)
    if CAPPED:
        share = capped_share(z, softcap)
        z, slope = softcap * share, 1.0 - share * share
    dz = exp(z - base) * scale
    if SMOOTHED:
        dz -= weight * smoothing / classes
    there = column == target.to(tl.int32)  # a comparison of 64 bits takes two instructions
    return tl.where(there, dz - weight * (1.0 - smoothing), dz) * slope


@triton.jit
def softmax_kernel(
    logits, targets, weights, losses, classes, ignored, smoothing, z_loss, softcap,
    SMOOTHED: tl.constexpr, SQUARED: tl.constexpr, CAPPED: tl.constexpr,
    STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row, which is read twice: for its sums, and to be overwritten by its gradient."""
    row = tl.program_id(0).to(tl.int64)
    target, weight = tl.load(targets + row), tl.load(weights + row)
    start = logits + row * classes
    picked, of_all, base, total = _sums(
        start, target, classes, softcap, SMOOTHED, CAPPED, STEPS, BLOCK
    )
    loss = _loss(picked, of_all, base, total, classes, smoothing, z_loss, SMOOTHED, SQUARED)
    tl.store(losses + row, tl.where(target == ignored, 0.0, loss))
    tl.debug_barrier()
    for first in range(0, classes, STEPS * BLOCK):
        column = _columns(first, STEPS, BLOCK)
        z = tl.load(start + column, column < classes, other=0.0).to(tl.float32)
        dz = _gradient(
            z, column, target, weight, base, total, classes, smoothing, z_loss, softcap,
            SMOOTHED, SQUARED, CAPPED,
        )  # fmt: skip
        tl.store(start + column, dz.to(logits.dtype.element_ty), column < classes)


@triton.jit
def loss_kernel(
    logits, targets, losses, bases, totals,
    classes, stride, ignored, smoothing, z_loss, softcap,
    SMOOTHED: tl.constexpr, SQUARED: tl.constexpr, CAPPED: tl.constexpr,
    STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The loss of one row, which is read once; ``bases`` and ``totals``, or None, get its sums."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    picked, of_all, base, total = _sums(
        logits + row * stride, target, classes, softcap, SMOOTHED, CAPPED, STEPS, BLOCK
    )
    loss = _loss(picked, of_all, base, total, classes, smoothing, z_loss, SMOOTHED, SQUARED)
    tl.store(losses + row, tl.where(target == ignored, 0.0, loss))
    if bases is not None:
        tl.store(bases + row, base)
        tl.store(totals + row, total)


@triton.jit
def gradient_kernel(
    logits, targets, weights, bases, totals, gradient,
    classes, stride, smoothing, z_loss, softcap,
    SMOOTHED: tl.constexpr, SQUARED: tl.constexpr, CAPPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of some logits of one row, from the sums that its loss left."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    target = tl.load(targets + row)
    z = tl.load(logits + row * stride + column, column < classes, other=0.0).to(tl.float32)
    dz = _gradient(
        z, column, target, tl.load(weights + row),
        tl.load(bases + row), tl.load(totals + row), classes, smoothing, z_loss, softcap,
        SMOOTHED, SQUARED, CAPPED,
    )  # fmt: skip
    place = gradient + row * classes + column
    tl.store(place, dz.to(gradient.dtype.element_ty), column < classes)


def configs(target: Target, facts: Mapping[str, Any]) -> list[Config]:
    """Blocks as wide as a row, but no wider than registers hold."""
    widest = next_power_of_2(facts["classes"])
    pairs = [(4096, 8), (8192, 16), (2048, 4)]
    if target.backend == "cuda":  # elsewhere a thread would load 8 bytes
        pairs.append((4096, 16))
    made = [Config({"BLOCK": min(block, widest)}, num_warps=warps) for block, warps in pairs]
    return list(dict.fromkeys(made))


def _sum_configs(target: Target, facts: Mapping[str, Any]) -> list[Config]:
    """Lanes for 8 or 16 bytes of each thread."""
    widest, made = next_power_of_2(facts["classes"]), []
    for steps, lanes, warps in ((2, 2048, 8), (4, 1024, 4), (4, 2048, 8), (8, 1024, 4)):
        block = min(lanes, widest)
        made.append(Config({"STEPS": min(steps, widest // block), "BLOCK": block}, warps))
    return list(dict.fromkeys(made))


SOFTMAX = Kernel(softmax_kernel, _sum_configs)
LOSS = Kernel(loss_kernel, _sum_configs)
GRADIENT = Kernel(gradient_kernel, configs)


def softmax_in_place(
    logits: Tensor,
    targets: Tensor,
    weights: Tensor,
    numbers: LossNumbers,
    config: Config | None = None,
) -> Tensor:
    """Turn logits into their gradient, and give the losses, by one kernel.

    A target that is not a class is not noticed: see :func:`check_targets`.

    Args:
        logits: In fp32, bf16 or fp16; overwritten.
        targets: As for :func:`opfuse_loss.chunks.softmax_gradient`.
        weights: In fp32.
        numbers: As there.
        config: The configuration; None: the heuristic's.
    """
    rows, classes = logits.shape
    if not logits.numel():
        return torch.zeros_like(weights)
    losses = torch.empty_like(weights)
    SOFTMAX.launch(
        lambda config: (rows,),
        *(logits, targets, weights, losses, classes, numbers.ignore_index),
        *_numbers(numbers),
        config=config,
        **_options(numbers),
    )
    return losses


def softmax_gradient(
    logits: Tensor, targets: Tensor, weights: Tensor, numbers: LossNumbers
) -> tuple[Tensor, Tensor]:
    """:func:`opfuse_loss.chunks.softmax_gradient`, by kernels; arguments as there."""
    logits = unseen(logits, is_result=True)
    return softmax_in_place(logits, targets, weights, numbers), logits


def row_losses(
    logits: Tensor,
    targets: Tensor,
    numbers: LossNumbers,
    *,
    keep: bool = False,
    config: Config | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The loss of each row, 0 where it is ignored, and what the gradient needs of it.

    Args:
        logits: ``(rows, classes)``, of any distance between rows; in fp32, bf16 or fp16.
        targets: ``(rows,)``, int64, contiguous; one that is not a class is not noticed.
        numbers: Of the loss.
        keep: Whether a gradient follows.
        config: The configuration; None: the heuristic's.

    Returns:
        Both in fp32: ``(rows,)``, and if ``keep`` ``(2, rows)``.
    """
    rows, classes = logits.shape
    sums = logits.new_empty((2, rows), dtype=torch.float32) if keep else None
    if not logits.numel():
        return logits.new_zeros(rows, dtype=torch.float32), sums
    losses = logits.new_empty(rows, dtype=torch.float32)
    LOSS.launch(
        lambda config: (rows,),
        *(logits, targets, losses, *((None, None) if sums is None else sums.unbind())),
        *(classes, logits.stride(0), numbers.ignore_index, *_numbers(numbers)),
        config=config,
        **_options(numbers),
    )
    return losses, sums


def row_gradients(
    logits: Tensor,
    targets: Tensor,
    weights: Tensor,
    sums: Tensor,
    numbers: LossNumbers,
    config: Config | None = None,
) -> Tensor:
    """The gradient of the logits, a new tensor in their dtype.

    Args:
        logits: As :func:`row_losses` took them.
        targets: As there.
        weights: The gradient of each row's loss, 0 where it is ignored; in fp32.
        sums: What :func:`row_losses` gave.
        numbers: As there.
        config: The configuration; None: the heuristic's.
    """
    rows, classes = logits.shape
    gradient = logits.new_empty((rows, classes))
    if logits.numel():
        GRADIENT.launch(
            lambda config: (rows, cdiv(classes, config["BLOCK"])),
            *(logits, targets, weights, *sums.unbind(), gradient),
            *(classes, logits.stride(0), *_numbers(numbers)),
            config=config,
            **_options(numbers),
        )
    return gradient


def _numbers(numbers: LossNumbers) -> tuple[float, float, float]:
    softcap = numbers.softcap
    return numbers.label_smoothing, numbers.z_loss, 1.0 if softcap is None else softcap


def _options(numbers: LossNumbers) -> dict[str, bool]:
    return {
        "SMOOTHED": numbers.label_smoothing > 0,
        "SQUARED": numbers.z_loss > 0,
        "CAPPED": numbers.softcap is not None,
    }


def check_targets(
    targets: Tensor, classes: int, ignored: int, who: str = "CrossEntropy: a target"
) -> None:
    """Refuse a target that is not a class; on a GPU when its queue gets there, as torch does.

    Raises:
        IndexError: On a CPU.
    """
    if targets.is_cpu:  # PyTorch's loss of logits without memory
        logits = torch.zeros(()).expand(len(targets), classes)
        F.nll_loss(logits, targets, ignore_index=ignored, reduction="none")
    elif targets.is_cuda:
        fits = ((targets >= 0) & (targets < classes)) | (targets == ignored)
        torch._assert_async(fits.all(), f"{who} is out of bounds")
