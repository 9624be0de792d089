"""The log-probabilities of tokens in Triton: the statistics of each row, and its gradient.

This module imports Triton.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from opfuse_triton import Config, Kernel, cdiv
from opfuse_triton.functions import exp
from torch import Tensor

from opfuse.ops.token_log_prob import TokenNumbers, row_log_probs

from .softmax import capped_share, configs, load_logits


@triton.jit
def base_of(highest):
    """What is subtracted from the logits of a row before ``exp``: the largest, if it is finite."""
    return tl.where(tl.abs(highest) == float("inf"), 0.0, highest)


@triton.jit
def rescaled(total, factor):
    """A sum of exponentials after its base moved; one of NaN stays NaN."""
    return tl.where(total == 0.0, 0.0, total * factor)


@triton.jit
def _statistics(
    start, token, classes, scale, softcap,
    ENTROPY: tl.constexpr, SQUARES: tl.constexpr, CAPPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of a row that is read once: its token's ``z``, the largest, ``base``, and three sums.

    With ``e = exp(z - base)`` the sums are those of ``e``, ``(z - base) e`` and ``e^2``.
    """
    highest, base, total, picked = float("-inf"), 0.0, 0.0, 0.0
    weighted, squares = 0.0, 0.0
    for first in range(0, classes, BLOCK):
        column = first + tl.arange(0, BLOCK)
        z = load_logits(start, column, classes, softcap, CAPPED) * scale
        picked += tl.sum(tl.where(column == token, z, 0.0))
        highest = tl.maximum(highest, tl.max(z))
        before = base
        base = base_of(highest)
        moved = before - base
        factor = exp(moved)
        e = exp(z - base)
        if ENTROPY:  # what is impossible has no share
            weighted = rescaled(weighted + moved * total, factor)
            weighted += tl.sum(tl.where(e == 0.0, 0.0, (z - base) * e))
        if SQUARES:
            squares = rescaled(squares, factor * factor) + tl.sum(e * e)
        total = rescaled(total, factor) + tl.sum(e)
    return picked, highest, base, total, weighted, squares


@triton.jit
def statistics_kernel(
    logits, tokens, log_probs, entropies, lses, log_squares, bases, logs, means, logs_of_squares,
    classes, stride, ignored, scale, softcap,
    ENTROPY: tl.constexpr, SQUARES: tl.constexpr, CAPPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The statistics of one row, which is read once; those of which the pointer is None are not.

    The last four pointers get what the gradient needs. As in torch's softmax ``logs`` is NaN where
    a logit is infinite.
    """
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(tokens + row)
    picked, highest, base, total, weighted, squares = _statistics(
        logits + row * stride, token, classes, scale, softcap, ENTROPY, SQUARES, CAPPED, BLOCK
    )
    if lses is not None:
        tl.store(lses + row, tl.log(total) + base)
    log = tl.log(tl.where(highest == float("inf"), float("nan"), total))
    tl.store(log_probs + row, tl.where(token == ignored, 0.0, picked - base - log))
    mean, log_of_squares = weighted / total, tl.log(squares)
    if ENTROPY:
        tl.store(entropies + row, log - mean)
    if SQUARES:
        tl.store(log_squares + row, log_of_squares - 2.0 * log)
    if bases is not None:
        tl.store(bases + row, base)
        tl.store(logs + row, log)
        if ENTROPY:
            tl.store(means + row, mean)
        if SQUARES:
            tl.store(logs_of_squares + row, log_of_squares)


@triton.jit
def log_prob_gradient_kernel(
    logits, tokens, of_log_probs, of_entropies, of_lses, of_squares,
    bases, logs, means, logs_of_squares, gradient,
    classes, stride, ignored, scale, softcap,
    CAPPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of some logits of one row, from those of its statistics; None: there is none.

    ``gradient`` may be the logits.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    z = tl.load(logits + row * stride + column, column < classes, other=0.0).to(tl.float32)
    slope = scale
    if CAPPED:
        share = capped_share(z, softcap)
        z, slope = softcap * share, scale * (1.0 - share * share)
    z = z * scale - tl.load(bases + row)
    p, factor, chosen = exp(z - tl.load(logs + row)), 0.0, 0.0
    if of_log_probs is not None:
        token = tl.load(tokens + row)
        chosen = tl.where(token == ignored, 0.0, tl.load(of_log_probs + row))
        factor -= chosen
    if of_lses is not None:
        factor += tl.load(of_lses + row)
    dz = p * factor
    if of_entropies is not None:  # what is impossible has no share
        surprise = tl.where(p == 0.0, 0.0, z - tl.load(means + row))
        dz -= p * surprise * tl.load(of_entropies + row)
    if of_squares is not None:
        q = exp(2.0 * z - tl.load(logs_of_squares + row))
        dz += 2.0 * (q - p) * tl.load(of_squares + row)
    if of_log_probs is not None:
        dz = tl.where(column == token, dz + chosen, dz)
    place = gradient + row * classes + column
    tl.store(place, (dz * slope).to(gradient.dtype.element_ty), column < classes)


STATISTICS = Kernel(statistics_kernel, configs)
GRADIENT = Kernel(log_prob_gradient_kernel, configs)
Kept = tuple[Tensor | None, ...]


def row_statistics(
    logits: Tensor,
    tokens: Tensor,
    numbers: TokenNumbers,
    keep: bool = False,
    config: Config | None = None,
) -> tuple[tuple[Tensor, ...], Kept]:
    """What :class:`opfuse.ops.TokenLogProb` gives of each row, but no top tokens.

    Args:
        logits: ``(rows, classes)``, of any distance between rows; in fp32, bf16 or fp16.
        tokens: ``(rows,)``, int64, contiguous; one that is not a class is not noticed: see
            :func:`opfuse_loss.kernels.softmax.check_targets`.
        numbers: Of the op.
        keep: Whether a gradient follows.
        config: The configuration; None: the heuristic's.

    Returns:
        The outputs in the order of the op, and what :func:`row_gradients` needs: two numbers, or
        four, or None; each ``(rows,)`` in fp32.
    """
    rows, classes = logits.shape
    asked = *_asked(numbers), keep, keep, keep and numbers.entropy, keep and numbers.log_sum_squares
    found = [logits.new_empty(rows, dtype=torch.float32) if each else None for each in asked]
    outputs, kept = tuple(each for each in found[:4] if each is not None), tuple(found[4:])
    if not logits.numel():
        return row_log_probs(logits, tokens, numbers), kept
    STATISTICS.launch(
        lambda config: (rows,),
        *(logits, tokens, *found),
        *(classes, logits.stride(0), numbers.ignore_index, *_numbers(numbers)),
        config=config,
        ENTROPY=numbers.entropy,
        SQUARES=numbers.log_sum_squares,
        CAPPED=numbers.softcap is not None,
    )
    return outputs, kept


def row_gradients(
    logits: Tensor,
    tokens: Tensor,
    grads: Sequence[Tensor | None],
    kept: Kept,
    numbers: TokenNumbers,
    out: Tensor | None = None,
    config: Config | None = None,
) -> Tensor:
    """The gradient of the logits, in their dtype.

    Args:
        logits: As :func:`row_statistics` took them.
        tokens: As there.
        grads: Of its outputs, each ``(rows,)``; None: there is none.
        kept: What it kept.
        numbers: As there.
        out: Where to write it, contiguous: over the logits, perhaps; None: a new tensor.
        config: The configuration; None: the heuristic's.
    """
    rows, classes = logits.shape
    out = logits.new_empty((rows, classes)) if out is None else out
    if logits.numel():
        given = iter([None if grad is None else grad.float().contiguous() for grad in grads])
        of_outputs = [next(given) if each else None for each in _asked(numbers)]
        GRADIENT.launch(
            lambda config: (rows, cdiv(classes, config["BLOCK"])),
            *(logits, tokens, *of_outputs, *kept, out),
            *(classes, logits.stride(0), numbers.ignore_index, *_numbers(numbers)),
            config=config,
            CAPPED=numbers.softcap is not None,
        )
    return out


def _asked(numbers: TokenNumbers) -> tuple[bool, ...]:
    """Which outputs there are, in the order of the kernels' pointers."""
    return True, numbers.entropy, numbers.logsumexp, numbers.log_sum_squares


def _numbers(numbers: TokenNumbers) -> tuple[float, float]:
    return 1.0 / numbers.temperature, 1.0 if numbers.softcap is None else numbers.softcap
