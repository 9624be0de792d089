"""The loss over logits whose classes are split among processes: VocabParallelCrossEntropy."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from opfuse.core.op_context import AllGrads, Outputs
from opfuse.core.overwriting import unseen
from opfuse.ops import cross_entropy
from opfuse.ops.arithmetic import added, multiplied, reusable, wide, widen, widened, with_shares
from opfuse.ops.authoring import rows_of

from .collectives import WithProcessGroup
from .ranks import Group, run_collective


class VocabParallelCrossEntropy(WithProcessGroup, cross_entropy.CrossEntropy):
    """:class:`CrossEntropy` of logits of which each process has its part of the classes.

    Takes logits ``(..., classes / processes)``, those of a linear that is split by columns, and the
    targets among all classes, the same on every process. Gives the same loss on every process.
    Each row takes two reductions, of its largest logit and of two or three sums; the logits are
    not gathered (Megatron-LM, Shoeybi et al. 2019). The backward takes none.

    Args:
        process_group: The processes; default: all.
        **numbers: As for :class:`CrossEntropy`; ``weight`` has all classes, and not together with
            ``label_smoothing``.

    Raises:
        NotImplementedError: In a call, class weights and label smoothing.
        RuntimeError: ``torch.distributed`` is not initialised.
        TypeError, ValueError: As for :class:`CrossEntropy`.
        IndexError: In a call, a target that is not a class; on a GPU the device reports it later.
    """

    saved_names = ("input", "targets", "lse")  # type: ignore[assignment]

    @classmethod
    def sample_inputs(cls, op: Any, features: int, out_features: int | None) -> list[Any]:
        """Those without class weights, which have the classes of all processes."""
        every = super().sample_inputs(op, features, out_features)
        return [sample for sample in every if "weight" not in dict(sample.kwargs)]

    context_names = ("numbers",)
    grad_input = "fresh"

    def __init__(self, process_group: Any = None, **numbers: Any) -> None:
        super().__init__(process_group, **numbers)
        rank = dist.get_rank(process_group)
        self.part = VocabPart(self._group, rank if self._group.size > 1 else 0)

    def fuser_forward(
        self, basic_op_ctxs: Any, input_: Tensor, *, basic_op_extra_inputs: Any, **_: Any
    ) -> Outputs:
        """The loss; saves ``(input, targets, lse)``, and leaves the numbers."""
        (ctx,), ((targets,),) = basic_op_ctxs, basic_op_extra_inputs
        self.check_targets(targets, input_.shape)
        numbers, rows, flat = self.numbers_of(), rows_of(input_), targets.flatten().long()
        losses, lse = self.part.row_losses(rows, flat, numbers)
        self.report_reductions(ctx, losses)
        if ctx.requires_grad:
            ctx.numbers = numbers
            kept = (input_, targets, lse) if ctx.input_requires_grad else (None, None, None)
            ctx.save_for_backward(*kept)
        return self.in_dtype(cross_entropy.reduced(losses, targets, numbers), ctx, input_), [()]

    def report_reductions(self, ctx: Any, losses: Tensor) -> None:
        """Tell reports what the two reductions send; for fusions too.

        Args:
            ctx: The context of the op.
            losses: The losses of all rows.
        """
        values = 3 + bool(self.label_smoothing)
        size = self.process_group_size
        self.report(ctx, 2 * (size - 1) / size * values * losses.nbytes, 0)

    def fuser_backward(
        self, basic_op_ctxs: Any, grad_output: Tensor, *, basic_op_grad_extra_outputs: Any
    ) -> AllGrads:
        """As :class:`CrossEntropy`, for the classes of this process."""
        (ctx,) = basic_op_ctxs
        x, targets, lse = ctx.saved_tensors
        if x is None:
            return None, [()], [(None,)]
        flat = targets.flatten().long()
        weights = cross_entropy.row_weights(grad_output.to(wide(x.dtype)), flat, ctx.numbers)
        dx = self.part.row_gradients(rows_of(x), flat, weights, lse, ctx.numbers).to(x.dtype)
        return dx.view(x.shape), [()], [(None,)]


class VocabPart(NamedTuple):
    """The classes of one process, and the arithmetic of the loss; for fusions too.

    Attributes:
        group: The processes.
        rank: This one; each has as many classes.
    """

    group: Group
    rank: int

    def row_losses(
        self, logits: Tensor, targets: Tensor, numbers: cross_entropy.LossNumbers
    ) -> tuple[Tensor, Tensor]:
        """The loss of each row, 0 where it is ignored, and the ``logsumexp`` over all classes.

        Args:
            logits: ``(rows, classes of this process)``.
            targets: ``(rows,)``, int64, among all classes.
            numbers: Of the op.

        Returns:
            Both of shape ``(rows,)``, in fp32 for half precision.
        """
        if cross_entropy.smoothed_weights(numbers, logits.dtype) is not None:
            who = "VocabParallelCrossEntropy: class weights and label smoothing together"
            raise NotImplementedError(f"{who} are for CrossEntropy, which has all logits")
        z, classes = (
            cross_entropy.capped(widen(logits), numbers.softcap),
            logits.shape[1] * self.group.size,
        )
        counted = cross_entropy.counts(targets, numbers)
        check_classes(targets, counted, classes, "VocabParallelCrossEntropy: target")
        largest = self.largest(z)
        # a row of infinities: the difference is NaN, as torch has it
        below = z - largest.unsqueeze(-1)
        sums = [torch.exp(below, out=reusable(below)).sum(-1), self.picked(z, targets)]
        if numbers.label_smoothing:
            sums.append(z.sum(-1))
        total = self.summed(sums)
        lse, smoothing = largest + total[0].log(), numbers.label_smoothing
        losses = lse - total[1] * (1 - smoothing)
        if smoothing:
            losses = losses - total[2] * (smoothing / classes)
        if numbers.z_loss:
            losses = losses + lse.square() * numbers.z_loss
        return torch.where(counted, losses, 0.0), lse

    def row_gradients(
        self,
        logits: Tensor,
        targets: Tensor,
        weights: Tensor,
        lse: Tensor,
        numbers: cross_entropy.LossNumbers,
        spare: cross_entropy.Spare = (None, None, None),
    ) -> Tensor:
        """The gradient of this process's logits, in fp32 for half precision.

        Args:
            logits: ``(rows, classes of this process)``.
            targets: ``(rows,)``, int64, among all classes.
            weights: The gradient of each row's loss, ``(rows,)``, in fp32 for half precision.
            lse: As :meth:`row_losses` gave it.
            numbers: Of the forward.
            spare: See :func:`opfuse.ops.cross_entropy.parts`.
        """
        _, smoothing, z_loss, softcap, *_ = numbers
        z = cross_entropy.capped(widened(logits, spare[0]), softcap, spare[0])
        below = torch.sub(z, lse.unsqueeze(-1), out=spare[1])
        factor = weights * (1 + 2 * z_loss * lse) if z_loss else weights
        dz = multiplied(torch.exp(below, out=reusable(below)), factor.unsqueeze(-1))
        if smoothing:
            of_all = weights * (smoothing / (z.shape[1] * self.group.size))
            dz = added(dz, of_all.unsqueeze(-1), -1)
        places, mine = self.places(targets, z.shape[1])
        at_places = torch.where(mine, weights * (smoothing - 1), 0.0)
        dz = with_shares(dz, places.unsqueeze(-1), at_places.unsqueeze(-1))
        return cross_entropy.uncapped(dz, z, softcap, spare[0])

    def largest(self, z: Tensor) -> Tensor:
        """The largest of each row over all processes."""
        largest = z.amax(-1) if z.shape[1] else z.new_full(z.shape[:1], -torch.inf)
        if self.group.size > 1:
            largest = unseen(largest, is_result=True)
            run_collective(self.group, "the largest logits", dist.all_reduce, largest, _MAX)
        return largest

    def summed(self, sums: list[Tensor]) -> Tensor:
        """Sums of rows over all processes, each ``(rows,)``, in one tensor."""
        total = torch.stack(sums)
        if self.group.size > 1:
            total = unseen(total, is_result=True)
            run_collective(self.group, "the sums of a softmax", dist.all_reduce, total)
        return total

    def picked(self, z: Tensor, targets: Tensor) -> Tensor:
        """The logit of each row's target, 0 where another process has it."""
        if not z.shape[1]:
            return z.new_zeros(targets.shape)
        places, mine = self.places(targets, z.shape[1])
        return torch.where(mine, z.gather(-1, places.unsqueeze(-1)).squeeze(-1), 0.0)

    def places(self, targets: Tensor, classes: int) -> tuple[Tensor, Tensor]:
        """The place of each target here, 0 where it has none; and where it has one."""
        places = targets - self.rank * classes
        mine = (places >= 0) & (places < classes)
        return places.where(mine, 0), mine


_MAX = dist.ReduceOp.MAX if dist.is_available() else None


def check_classes(targets: Tensor, counted: Tensor, classes: int, who: str) -> None:
    """Refuse targets that are not classes, without a sync with the host."""
    fine = ~counted | ((targets >= 0) & (targets < classes))
    if not targets.is_cpu:
        torch._assert_async(fine.all())
    elif not fine.all():
        bad = int(targets[~fine][0])
        raise IndexError(f"{who} {bad} is not one of {classes} classes")
