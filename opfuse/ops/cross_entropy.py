"""The loss of a classifier or a language model: CrossEntropy."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..core.fusible import check_real
from ..core.op_context import AllGrads, Outputs
from ..core.overwriting import may_write, tracing
from . import _blocks
from ._common import ExtraTensorOperation, expected, require, rows_of, shows, whole
from ._samples import sample_targets, samples
from .arithmetic import added, multiplied, wide, widened, with_shares

REDUCTIONS = ("mean", "sum", "none")


class LossNumbers(NamedTuple):
    """The numbers of a :class:`CrossEntropy`, named like its arguments, and its class weights.

    The backward uses those of its forward.
    """

    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float | None = None
    reduction: str = "mean"
    weight: Tensor | None = None


class RowLoss(ExtraTensorOperation):
    """The base of losses that read logits ``(..., classes)`` and a target for each row of them.

    The targets are one extra input, integers of shape ``(...)``.
    """

    num_extra_inputs = 1
    extra_input_dtypes = ("integer",)
    saved_names = ("input", "targets")
    context_names = ("numbers",)
    grad_input = "fresh"
    differentiable = True
    autocast_dtype = torch.float32
    sample_extra_inputs = sample_targets
    _numbers: ClassVar[Any]  # a NamedTuple of the op's attributes of these names
    # what an argument is to be, whether a value is, and the class of the error if not ValueError
    _ranges: ClassVar[dict[str, tuple[Any, ...]]] = {
        "ignore_index": (
            "a whole number as ignore_index",
            lambda n: whole(n) is not None,
            TypeError,
        )
    }
    _targets: ClassVar[str] = "targets"  # what an error calls them
    _outputs: Callable[..., Sequence[Tensor]]  # of the context, logits, targets and numbers
    _row_gradients: Callable[..., Tensor]  # of rows of logits, targets, gradients and numbers

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._ranges:
            if name in self.real_numbers or (name == "softcap" and value is not None):
                value = check_real(self, name, value)
            what, fits, *error = self._ranges[name]
            require(self, fits(value), what, value, *error)
        super().__setattr__(name, value)
        if name == "weight" or (name == "label_smoothing" and self.weight is not None):
            self._count_change()  # fusions may take one and not both

    def numbers_of(self) -> Any:
        """The current numbers."""
        return self._numbers(*[getattr(self, name) for name in self._numbers._fields])

    def check_targets(self, targets: Tensor, shape: torch.Size) -> None:
        """Refuse targets that do not fit logits of this shape; for fusions too.

        Raises:
            ValueError: They have another shape.
        """
        if not shape or targets.shape != shape[:-1]:
            what = f"of shape {tuple(shape[:-1])} for logits of shape {tuple(shape)}"
            raise ValueError(expected(self, f"{self._targets} {what}", tuple(targets.shape)))

    def fuser_forward(
        self, basic_op_ctxs: Any, input_: Tensor, *, basic_op_extra_inputs: Any, **_: Any
    ) -> Outputs:
        """The outputs; saves ``(input, targets)``, the input as it came, and leaves the numbers."""
        (ctx,), ((targets,),) = basic_op_ctxs, basic_op_extra_inputs
        self.check_targets(targets, input_.shape)
        numbers = self.numbers_of()
        output, *extra_outputs = self._outputs(ctx, input_, targets, numbers)
        if ctx.requires_grad:
            ctx.numbers = numbers
            ctx.to_save = (input_, targets) if ctx.input_requires_grad else (None, None)
        return output, [tuple(extra_outputs)]

    def fuser_backward(
        self, basic_op_ctxs: Any, grad_output: Tensor, *, basic_op_grad_extra_outputs: Any
    ) -> AllGrads:
        """The gradient of the logits, by the numbers of the forward."""
        (ctx,), (grad_extras,) = basic_op_ctxs, basic_op_grad_extra_outputs
        x, targets = ctx.saved_tensors
        if x is None:
            return None, [()], [(None,)]
        dx = self._row_gradients(rows_of(x), targets, (grad_output, *grad_extras), ctx.numbers)
        return dx.view(x.shape), [()], [(None,)]


class CrossEntropy(RowLoss):
    """The cross entropy of logits and targets, as ``torch.nn.functional.cross_entropy``.

    Takes logits ``(..., classes)`` and one extra input, integer targets of shape ``(...)``. Gives
    the mean or the sum of the rows' losses as a tensor without dimensions, or the losses in the
    shape of the targets. It computes in fp32 for half precision; the output has the dtype of the
    input, under autocast fp32. The loss of a row is ``logsumexp(z) - z[target]``.

    Args:
        ignore_index: Rows with this target have no loss and no gradient, and the mean does not
            count them. The mean over no rows is NaN.
        label_smoothing: How much of a row's target is spread over all classes (Szegedy et al.
            2016).
        z_loss: Adds ``z_loss * logsumexp(z)^2`` to the loss of a row, which keeps logits small
            (PaLM, Chowdhery et al. 2022).
        softcap: ``z`` is ``softcap * tanh(logits / softcap)`` (Gemma 2); None: ``z`` is the logits.
        weight: The weight of each class, ``(classes,)``, which becomes a buffer, as in
            ``torch.nn.CrossEntropyLoss``. The loss of a row, with its z-loss, is multiplied by that
            of its target, and the mean divides by their sum. What ``label_smoothing`` spreads has
            the weight of its own class. The backward reads it again.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        output_dtype: The dtype of the loss; None: as above.

    Raises:
        TypeError: An argument of the wrong type; in a call, targets that are not integers.
        ValueError: An argument out of range; in a call, targets or class weights of another shape.
        IndexError: In a call, a target that is not a class; on a GPU the device reports it later.
    """

    real_numbers = ("label_smoothing", "z_loss")
    sample_inputs = samples(
        {},
        {"ignore_index": 1, "label_smoothing": 0.2, "z_loss": 0.01, "softcap": 3.0},
        {"reduction": "sum", "ignore_index": 0},
        {"reduction": "none"},
        lambda classes: {"weight": (0.5, *[2.0] * (classes - 1)), "z_loss": 0.01},
        lambda classes: {"weight": (0.5, *[2.0] * (classes - 1)), "label_smoothing": 0.2},
    )
    _numbers = LossNumbers
    weight: Tensor | None
    _ranges = RowLoss._ranges | {
        "output_dtype": (
            "a floating-point torch.dtype as output_dtype",
            lambda dtype: dtype is None or getattr(dtype, "is_floating_point", None) is True,
            TypeError,
        ),
        "reduction": ("'mean', 'sum' or 'none' as reduction", lambda name: name in REDUCTIONS),
        "label_smoothing": ("label_smoothing between 0 and 1", lambda share: 0 <= share <= 1),
        "z_loss": ("z_loss of at least 0", lambda factor: factor >= 0),
        "softcap": ("a softcap above 0, or None", lambda cap: cap is None or cap > 0),
    }

    def __init__(
        self,
        *,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        softcap: float | None = None,
        weight: Tensor | Sequence[float] | None = None,
        reduction: str = "mean",
        output_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.register_buffer("weight", None if weight is None else torch.as_tensor(weight))
        self.ignore_index, self.reduction = ignore_index, reduction
        self.output_dtype = output_dtype
        self.label_smoothing, self.z_loss, self.softcap = label_smoothing, z_loss, softcap

    extra_repr = shows(*LossNumbers._fields[:-1], "output_dtype")

    @property
    def batch_invariant(self) -> tuple[str, ...]:  # type: ignore[override]
        """``"rows"``, if it gives the loss of each row."""
        return ("rows",) if self.reduction == "none" else ()

    def check_targets(self, targets: Tensor, shape: torch.Size) -> None:
        """See :class:`RowLoss`; refuses class weights of another shape, too."""
        super().check_targets(targets, shape)
        classes = (shape[-1] * getattr(self, "process_group_size", 1),)
        if self.weight is not None and self.weight.shape != classes:
            raise ValueError(expected(self, f"weight of shape {classes}", tuple(self.weight.shape)))

    def in_dtype(self, loss: Tensor, ctx: Any, input_: Tensor) -> Tensor:
        """The loss in the dtype that the op gives; for fusions too."""
        return loss.to(self.output_dtype or ctx.dtype or input_.dtype)

    def _outputs(self, ctx: Any, logits: Tensor, targets: Tensor, numbers: Any) -> Sequence[Tensor]:
        losses = row_losses(rows_of(logits), targets.flatten(), numbers)
        return [self.in_dtype(reduced(losses, targets, numbers), ctx, logits)]

    def _row_gradients(
        self, rows: Tensor, targets: Tensor, grads: Sequence[Tensor | None], numbers: Any
    ) -> Tensor:
        """``dx = w ((1 + 2 z_loss lse) softmax(z) - q)``, where ``q`` is the smoothed target.

        ``w`` is the gradient of the row's loss, times the weight of its class; a ``softcap``
        multiplies by ``1 - (z/softcap)^2``. With class weights and smoothing, see
        :func:`smoothed_weights`.
        """
        (grad,), targets = grads, targets.flatten()
        assert grad is not None
        weights = row_weights(grad.to(wide(rows.dtype)), targets, numbers)
        return row_gradients(rows, targets, weights, numbers)


# Parts of rows that fit a core's cache, for formulas of a softmax on a CPU; for fusions too

Spare = tuple[Tensor | None, Tensor | None, Tensor | None]
"""Tensors in the dtype and shape of a part's arithmetic, which it may overwrite; or no tensors."""

_MOST_ELSEWHERE = 1 << 26
"""The number of logits in a part on a GPU: a few temporaries of them are small there."""


def parts(rows: Tensor, *others: Tensor | None) -> list[Any]:
    """Parts of rows whose temporaries are small, on a CPU with memory for them.

    The memory is the same for all parts. What a part frees may go back to the system, and the next
    part then waits for other pages. Where calls are traced there is one part.

    Args:
        rows: A matrix.
        others: Tensors with as many rows; None: there is none.

    Returns:
        For each part a :data:`Spare`, and then its rows of each argument.
    """
    spare: Spare = None, None, None
    least, most = _blocks.LEAST, _blocks.BLOCK
    if not rows.is_cpu:
        least = most = _MOST_ELSEWHERE
    if tracing() or rows.numel() <= least:
        return [(spare, rows, *others)]
    count = max(1, most // rows.shape[-1])
    first = torch.split(rows, count)
    given = [[None] * len(first) if each is None else torch.split(each, count) for each in others]
    spares: list[Any] = [spare] * len(first)
    if rows.is_cpu and may_write(rows, *others):
        made = rows.new_empty((3, count, rows.shape[-1]), dtype=wide(rows.dtype))
        spares = [made[:, : len(part)].unbind() for part in first]
    return list(zip(spares, first, *given, strict=True))


def gradients_by_parts(
    of_part: Callable[..., Tensor], rows: Tensor, *others: Tensor | None, in_place: bool = False
) -> Tensor:
    """A gradient in the dtype of the rows, computed by :func:`parts`.

    Args:
        of_part: Called with each of the parts.
        rows: See there.
        others: See there.
        in_place: Whether to overwrite the rows, if that may be.
    """
    found = parts(rows, *others)
    if not may_write(rows, *others) or (len(found) == 1 and not in_place):
        of_all = [of_part(*part).to(rows.dtype) for part in found]
        return of_all[0] if len(of_all) == 1 else torch.cat(of_all)
    out = rows if in_place else torch.empty_like(rows)
    for place, part in zip(torch.split(out, len(found[0][1]) or 1), found, strict=True):
        place.copy_(of_part(*part))
    return out


# The arithmetic, row by row; for fusions too


def smoothed_weights(numbers: LossNumbers, dtype: torch.dtype) -> Tensor | None:
    """The class weights in a dtype, if they are more than a factor of each row; else None.

    The functions of rows that know no class weights give what :func:`reduced` and
    :func:`row_weights` multiply. But what smoothing spreads has weights of its own:
    :func:`row_losses` and :func:`row_gradients` know these.
    """
    weight = numbers.weight if numbers.label_smoothing else None
    return None if weight is None else weight.to(dtype)


def _of_targets(targets: Tensor, numbers: LossNumbers, dtype: torch.dtype) -> Tensor:
    """The class weight of each row, 0 where it is ignored; without class weights 1."""
    counted = counts(targets, numbers)
    if numbers.weight is None:
        return counted
    places = targets.long().clamp(0, len(numbers.weight) - 1)  # who computes losses refuses others
    return torch.where(counted, numbers.weight.to(dtype)[places], 0.0)


def row_losses(logits: Tensor, targets: Tensor, numbers: LossNumbers) -> Tensor:
    """The loss of each row, 0 where it is ignored; in fp32 for half precision.

    Args:
        logits: ``(rows, classes)``.
        targets: ``(rows,)``.
        numbers: Of the op.
    """
    targets = targets.long()
    losses = [_losses(numbers, *part) for part in parts(logits, targets)]
    of_all = losses[0] if len(losses) == 1 else torch.cat(losses)
    if not (numbers.label_smoothing or numbers.z_loss):
        return of_all  # 0 where a row is ignored
    return torch.where(counts(targets, numbers), of_all, 0.0)


def _losses(numbers: LossNumbers, spare: Spare, logits: Tensor, targets: Tensor) -> Tensor:
    ignored, smoothing, z_loss, *_ = numbers
    z = capped(widened(logits, spare[0]), numbers.softcap, spare[0])
    log_p, weight = torch.log_softmax(z, -1, out=spare[1]), smoothed_weights(numbers, z.dtype)
    # it refuses targets that are not classes, without a sync with the host
    losses = F.nll_loss(log_p, targets, weight, ignore_index=ignored, reduction="none")
    if smoothing:
        of_all = log_p.mean(-1) if weight is None else log_p.mv(weight) / log_p.shape[-1]
        losses = losses * (1 - smoothing) - of_all * smoothing
    if z_loss:
        of_row = 1.0 if weight is None else _of_targets(targets, numbers, z.dtype)
        losses = losses + z.logsumexp(-1).square() * z_loss * of_row
    return losses


def reduced(losses: Tensor, targets: Tensor, numbers: LossNumbers) -> Tensor:
    """Reduce the losses of rows; ``targets`` have the shape of the unreduced output.

    Args:
        losses: ``(rows,)``, 0 where a row is ignored.
        targets: The targets.
        numbers: Of the op.
    """
    flat = targets.flatten()
    if numbers.weight is not None and not numbers.label_smoothing:
        losses = losses * _of_targets(flat, numbers, losses.dtype)
    if numbers.reduction == "none":
        return losses.view(targets.shape)
    total = losses.sum()
    if numbers.reduction == "sum":
        return total
    return total / _of_targets(flat, numbers, losses.dtype).sum()


def counts(targets: Tensor, numbers: LossNumbers) -> Tensor:
    """The rows that have a loss; in int64, since other dtypes may wrap ``ignore_index``."""
    return targets.long() != numbers.ignore_index


def row_weights(grad_output: Tensor, targets: Tensor, numbers: LossNumbers) -> Tensor:
    """The gradient of each row's loss, 0 where it is ignored.

    Args:
        grad_output: Gradient of the op's output.
        targets: ``(rows,)``.
        numbers: Of the forward.
    """
    if numbers.reduction == "mean":
        grad_output = grad_output / mean_divisor(targets, numbers, grad_output.dtype)
    grad = grad_output.flatten()
    if numbers.weight is not None and not numbers.label_smoothing:
        grad = grad * _of_targets(targets, numbers, grad.dtype)
    return torch.where(counts(targets, numbers), grad, 0.0)


def mean_divisor(targets: Tensor, numbers: LossNumbers, dtype: torch.dtype) -> Tensor:
    """What a mean divides gradients by; 1 for no rows, where torch gives zeros too."""
    total = _of_targets(targets, numbers, dtype).sum()
    if numbers.weight is None:
        return total.clamp(min=1)
    return total.where(counts(targets, numbers).any(), 1)


def row_gradients(logits: Tensor, targets: Tensor, weights: Tensor, numbers: LossNumbers) -> Tensor:
    """The gradient of the logits, in their dtype.

    Args:
        logits: ``(rows, classes)``.
        targets: ``(rows,)``.
        weights: The gradient of each row's loss, ``(rows,)``, in fp32 for half precision.
        numbers: Of the forward.
    """
    targets, weights = targets.unsqueeze(-1), weights.unsqueeze(-1)
    places = targets.long().where(counts(targets, numbers), 0)
    return gradients_by_parts(functools.partial(_gradients, numbers), logits, places, weights)


def _gradients(
    numbers: LossNumbers, spare: Spare, logits: Tensor, places: Tensor, weights: Tensor
) -> Tensor:
    smoothing, z_loss, softcap = numbers.label_smoothing, numbers.z_loss, numbers.softcap
    z = capped(widened(logits, spare[0]), softcap, spare[0])
    weight, share = smoothed_weights(numbers, z.dtype), smoothing / logits.shape[-1]
    of_target, shares, factor = weights, share * weights if smoothing else None, weights
    if weight is not None and shares is not None:
        of_target, shares = weights * weight[places], shares * weight
        factor = of_target * (1 - smoothing) + shares.sum(-1, keepdim=True)
    if z_loss:
        factor = factor + 2 * z_loss * of_target * z.logsumexp(-1, keepdim=True)
    dz = multiplied(torch.softmax(z, -1, out=spare[1]), factor)
    if shares is not None:
        dz = added(dz, shares, -1)
    dz = with_shares(dz, places, of_target * (smoothing - 1))
    return uncapped(dz, z, softcap, spare[0])


def uncapped(dz: Tensor, z: Tensor, softcap: float | None, out: Tensor | None = None) -> Tensor:
    """``dz (1 - (z / softcap)^2)``, the gradient before the cap; None: ``dz``.

    With ``out``, which may be ``z``, it overwrites that and ``dz``.
    """
    if softcap is None:
        return dz
    share = torch.square(torch.div(z, softcap, out=out), out=out)
    return torch.addcmul(dz, dz, share, value=-1, out=None if out is None else dz)


def capped(logits: Tensor, softcap: float | None, out: Tensor | None = None) -> Tensor:
    """``softcap * tanh(logits / softcap)``, in ``out`` if that is given; None: the logits."""
    if softcap is None:
        return logits
    return torch.mul(torch.tanh(torch.div(logits, softcap, out=out), out=out), softcap, out=out)
