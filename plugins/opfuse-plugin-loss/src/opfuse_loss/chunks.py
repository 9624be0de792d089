"""The arithmetic of a linear and its loss by chunks of rows, in PyTorch primitives.

The logits of one chunk exist at a time. Their gradient overwrites them, and is multiplied at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from opfuse.core.overwriting import may_write
from opfuse.ops.arithmetic import added, multiplied, widened, with_shares
from opfuse.ops.authoring import add_product, adds_itself, wide
from opfuse.ops.cross_entropy import LossNumbers, Spare, capped, parts, uncapped
from opfuse.ops.libraries import linear

LEAST_ROWS, MOST_ROWS = 128, 512
"""Rows of a chunk: as many as features, so its logits take no more memory than the weight does.

The weight, and its gradient, pass through memory once per chunk; from the larger number on, that
takes no time compared with the products.
"""

ROWS_ON_GPU = 2048
"""Rows of a chunk on a GPU, at least: fewer do not fill it."""

LOGITS = 1 << 22
"""How many logits a chunk has where that is more rows."""

CLASSES, CLASSES_ON_GPU = 1 << 11, 1 << 14
"""How many classes are multiplied at once where a library does not add up in fp32 itself."""

LIFT = 1024.0
"""The factor of gradients of logits in fp16 that are at most 1; its range ends at 64 times that."""


def rows_of_chunk(classes: int, features: int, on_gpu: bool = False) -> int:
    """How many rows a chunk has."""
    least = ROWS_ON_GPU if on_gpu else LEAST_ROWS
    return max(least, min(features, MOST_ROWS), LOGITS // max(1, classes))


def chunks(x: Tensor, targets: Tensor, classes: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """The chunks of rows: which rows, these of ``x``, and these of the targets.

    There is one, whose results are not added up, where nothing may be overwritten.
    """
    count, start = rows_of_chunk(classes, x.shape[1], on_gpu=not x.is_cpu), 0
    count = count if may_write() else max(1, len(x))
    for part, of_part in zip(torch.split(x, count), torch.split(targets, count), strict=True):
        yield slice(start, start + len(part)), part, of_part
        start += len(part)


def lift(numbers: LossNumbers, one: Tensor) -> Tensor:
    """The factor of gradients of logits in fp16: a power of two, with which they are in its range.

    Args:
        numbers: Of the loss. Class weights and a z-loss, if it has them, are factors of gradients.
        one: 1 in fp32.
    """
    largest = one * (1 + 64 * getattr(numbers, "z_loss", 0.0))  # for a logsumexp of 32
    if (weight := getattr(numbers, "weight", None)) is not None:
        largest = largest * weight.abs().amax()
    return LIFT / largest.clamp(min=1e-30).log2().floor().exp2()


def softmax_gradient(
    logits: Tensor, targets: Tensor, weights: Tensor, numbers: LossNumbers
) -> tuple[Tensor, Tensor]:
    """The losses of logits, and their gradient; the twin of the kernel.

    Args:
        logits: ``(rows, classes)``, contiguous; overwritten by the gradient if they may be.
        targets: ``(rows,)``.
        weights: The factor of the gradient of each row's loss: 0 where it is ignored; in fp32 for
            half precision.
        numbers: Of the loss.

    Returns:
        The loss of each row, 0 where it is ignored, in the dtype of ``weights``; and the gradient.
    """
    writes, losses, gradients = may_write(logits, weights), [], []
    for spare, *given in parts(logits, targets, weights):
        of_part, dz = _of_part(numbers, spare, *given)
        losses.append(of_part)
        gradients.append(given[0].copy_(dz) if writes else dz.to(logits.dtype))
    return torch.cat(losses), logits if writes else torch.cat(gradients)


def _of_part(
    numbers: LossNumbers, spare: Spare, logits: Tensor, targets: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    ignored, smoothing, z_loss, softcap, *_ = numbers
    z = capped(widened(logits, spare[0]), softcap, spare[0])
    picked = F.nll_loss(z, targets, ignore_index=ignored, reduction="none")
    mean = z.mean(-1) if smoothing else None
    dz = torch.softmax(z, -1, out=spare[1])
    lse = z.amax(-1) - dz.amax(-1).log()  # the softmax of the largest logit is no 0
    losses = lse + picked * (1 - smoothing)
    if mean is not None:
        losses = losses - mean * smoothing
    factor = weights
    if z_loss:
        losses = losses + lse.square() * z_loss
        factor = weights * (1 + 2 * z_loss * lse)
    dz = multiplied(dz, factor.unsqueeze(-1))
    if smoothing:
        dz = added(dz, (weights * (smoothing / z.shape[-1])).unsqueeze(-1), -1)
    places = targets.masked_fill(targets == ignored, 0).unsqueeze(-1)
    dz = with_shares(dz, places, (weights * (smoothing - 1)).unsqueeze(-1))
    return torch.where(targets == ignored, 0.0, losses), uncapped(dz, z, softcap, spare[0])


class Sums:
    """The gradients of a linear, added up over chunks, in fp32 for half precision.

    Attributes:
        dx, dw, db: Those of the input, ``(rows, in)``, of the weight and of the bias; None: it is
            not needed.

    Args:
        x: The input, ``(rows, in)``.
        weight: The weight.
        needs: Which of the three are needed.
        onednn: See :func:`opfuse.ops.libraries.linear`.
    """

    def __init__(
        self, x: Tensor, weight: Tensor, needs: tuple[bool, bool, bool], onednn: bool | None
    ) -> None:
        self._weight, self._onednn, self._wide = weight, onednn, wide(x.dtype)
        shapes = x.shape, weight.shape, weight.shape[:1]
        writes = may_write()
        # what is not the first chunk's is added; without classes nothing is
        self.dx, self.dw, self.db = [
            (x.new_empty if len(weight) else x.new_zeros)(shape if writes else 0, dtype=self._wide)
            if needed
            else None
            for shape, needed in zip(shapes, needs, strict=True)
        ]

    def add(self, rows: slice, x: Tensor, d: Tensor) -> None:
        """Add the gradients of a chunk.

        Args:
            rows: Which rows of the input it is.
            x: These rows.
            d: The gradient of their logits.
        """
        start = rows.start
        if not may_write():  # then there is one chunk
            a, b, weight = [each.to(self._wide) for each in (d, x, self._weight)]
            self.db = None if self.db is None else a.sum(0)
            self.dw = None if self.dw is None else a.t().mm(b)
            self.dx = None if self.dx is None else a.mm(weight)
            return
        if self.db is not None:
            _put(self.db, d.sum(0, dtype=self._wide), start)
        if self.dw is not None and adds_itself(self.dw, d):
            add_product(self.dw, d.t(), x, beta=1 if start else 0)
        elif self.dw is not None:
            for some in self._slices(d):
                _put(self.dw[some], _wide_product(d[:, some].t(), x, self._wide), start)
        if self.dx is not None:
            self._put_dx(self.dx[rows], d)

    def _put_dx(self, place: Tensor, d: Tensor) -> None:
        """Write the gradient of some rows of the input."""
        if d.dtype is self._wide and d.is_cpu:
            place.copy_(linear(d, self._weight.t(), None, self._onednn))
        elif d.dtype is self._wide:
            torch.mm(d, self._weight, out=place)
        elif adds_itself(place, d):
            torch.mm(d, self._weight, out_dtype=self._wide, out=place)
        elif d.dtype is torch.float16:  # by parts, since the weight is made wider
            for some in self._slices(d):
                _put(place, _wide_product(d[:, some], self._weight[some], self._wide), some.start)
        else:
            place.copy_(d.mm(self._weight))

    @staticmethod
    def _slices(d: Tensor) -> list[slice]:
        """The classes to multiply at once, where the library does not add up in fp32 itself."""
        count = CLASSES if d.is_cpu else CLASSES_ON_GPU
        return [slice(start, start + count) for start in range(0, d.shape[1], count)]


def _put(place: Tensor, part: Tensor, start: int) -> None:
    """Add a part to a sum, or begin the sum with it where it is the first one."""
    if start:
        place += part
    else:
        place.copy_(part)


def _wide_product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """The product of two matrices in half precision, in a wider dtype where that is possible.

    fp16, whose range a sum over rows may leave, is never rounded to.
    """
    return a.to(dtype).mm(b.to(dtype)) if a.dtype is torch.float16 else a.mm(b)


def scaled(tensor: Tensor | None, scale: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """``tensor * scale`` of a matrix or vector in a dtype; with a scale a new tensor."""
    if tensor is None or scale is None:
        return None if tensor is None else tensor.to(dtype)
    if tensor.dtype is dtype:
        return tensor * scale
    if not may_write(tensor, scale):
        return (tensor * scale).to(dtype)
    out = torch.empty_like(tensor, dtype=dtype)
    if not tensor.is_cpu:
        return torch.mul(tensor, scale, out=out)  # rounded to its dtype
    for spare, part, place in parts(torch.atleast_2d(tensor), torch.atleast_2d(out)):
        place.copy_(torch.mul(part, scale, out=spare[0]))
    return out


Softmax = Callable[[Tensor, Tensor, Tensor, LossNumbers], tuple[Tensor, Tensor]]
"""The type of :func:`softmax_gradient`, and of a kernel for it."""


def gradients(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    weights: Tensor,
    numbers: LossNumbers,
    needs: tuple[bool, bool, bool],
    *,
    onednn: bool | None = None,
    softmax: Softmax = softmax_gradient,
) -> tuple[Tensor, Sums]:
    """The loss of each row, and the gradients of a linear, chunk by chunk.

    Args:
        x: The input, ``(rows, in)``.
        weight: The weight, of the same dtype.
        bias: The bias, or None.
        targets: ``(rows,)``, int64.
        weights: The factor of the gradient of each row's loss, ``(rows,)``.
        numbers: Of the loss.
        needs: Which gradients are needed: of the input, of the weight, of the bias.
        onednn: See :func:`opfuse.ops.libraries.linear`.
        softmax: The function that turns logits into their gradient.
    """
    sums, losses = Sums(x, weight, needs, onednn), []
    d: Any = None
    for rows, part, of_part in chunks(x, targets, weight.shape[0]):
        del d  # before there are new logits
        d = linear(part, weight, bias, onednn)
        of_rows, d = softmax(d, of_part, weights[rows], numbers)
        losses.append(of_rows)
        sums.add(rows, part, d)
    return torch.cat(losses), sums
