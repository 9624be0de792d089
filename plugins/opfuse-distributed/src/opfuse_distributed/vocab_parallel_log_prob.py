"""Log-probabilities under logits whose classes are split among processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from opfuse.core.op_context import AllGrads, Outputs
from opfuse.ops.arithmetic import widen, widened
from opfuse.ops.authoring import rows_of
from opfuse.ops.cross_entropy import Spare, capped
from opfuse.ops.token_log_prob import (
    RowStatistics,
    TokenLogProb,
    TokenNumbers,
    cooled,
    gradients_from,
    grads_of_rows,
    possible,
)

from .collectives import WithProcessGroup
from .ranks import gather_into, run_collective
from .vocab_parallel import VocabPart, check_classes


class VocabParallelTokenLogProb(WithProcessGroup, TokenLogProb):
    """:class:`TokenLogProb` of logits of which each process has its part of the classes.

    Takes logits ``(..., classes / processes)``, those of a linear that is split by columns, and the
    tokens among all classes, the same on every process. Gives the same on every process. Each row
    takes two reductions, of its largest logit and of two to four sums, and with ``top_k`` a gather
    of as many logits and their classes; the logits are not gathered. The backward takes none.

    Args:
        process_group: The processes; default: all.
        **numbers: As for :class:`TokenLogProb`.

    Raises:
        RuntimeError: ``torch.distributed`` is not initialised.
        TypeError, ValueError: As for :class:`TokenLogProb`; classes are those of all processes.
        IndexError: In a call, a token that is not a class; on a GPU the device reports it later.
    """

    saved_names = ("input", "targets", "lse", "entropy", "log_squares", "top")  # type: ignore[assignment]
    context_names = ("numbers",)
    grad_input = "fresh"

    def __init__(self, process_group: Any = None, **numbers: Any) -> None:
        super().__init__(process_group, **numbers)
        rank = dist.get_rank(process_group)
        self.part = LogProbPart(self._group, rank if self._group.size > 1 else 0)

    def check_targets(self, tokens: Tensor, shape: torch.Size) -> None:
        """As :meth:`TokenLogProb.check_targets`, for the classes of all processes."""
        whole = [*shape[:-1], *[size * self.process_group_size for size in shape[-1:]]]
        super().check_targets(tokens, torch.Size(whole))

    def fuser_forward(
        self, basic_op_ctxs: Any, input_: Tensor, *, basic_op_extra_inputs: Any, **_: Any
    ) -> Outputs:
        """The log-probabilities, and what else is asked for."""
        (ctx,), ((tokens,),) = basic_op_ctxs, basic_op_extra_inputs
        self.check_targets(tokens, input_.shape)
        numbers = self.numbers_of()
        found, kept = self.part.row_log_probs(rows_of(input_), tokens.flatten().long(), numbers)
        self.report_reductions(ctx, found[0], input_.shape[-1])
        y, *extras = [each.view((*tokens.shape, *each.shape[1:])) for each in found]
        if ctx.requires_grad:
            ctx.numbers = numbers
            ctx.to_save = (input_, tokens, *kept) if ctx.input_requires_grad else (None,) * 6
        return y, [tuple(extras)]

    def report_reductions(self, ctx: Any, log_probs: Tensor, classes: int) -> None:
        """Tell reports what the reductions send; for fusions too.

        Args:
            ctx: The context of the op.
            log_probs: Those of all rows.
            classes: Of this process.
        """
        size, values = self.process_group_size, 3 + self.entropy + self.log_sum_squares
        sent = 2 * (size - 1) / size * values * log_probs.nbytes
        of_top = 16 * min(self.top_k, classes) * log_probs.numel()
        self.report(ctx, sent + (size - 1) * of_top, 0)

    def fuser_backward(
        self, basic_op_ctxs: Any, grad_output: Tensor, *, basic_op_grad_extra_outputs: Any
    ) -> AllGrads:
        """As :class:`TokenLogProb`, for the classes of this process."""
        (ctx,), (of_extras,) = basic_op_ctxs, basic_op_grad_extra_outputs
        x, tokens, *kept = ctx.saved_tensors
        if x is None:
            return None, [()], [(None,)]
        grads = grads_of_rows((grad_output, *of_extras), tokens)
        given = tokens.flatten().long(), grads, kept, ctx.numbers
        dx = self.part.row_gradients(rows_of(x), *given).to(x.dtype)
        return dx.view(x.shape), [()], [(None,)]


Kept = Sequence[Tensor | None]


class LogProbPart(VocabPart):
    """The classes of one process, and the arithmetic of log-probabilities; for fusions too."""

    __slots__ = ()

    def row_log_probs(
        self, logits: Tensor, tokens: Tensor, numbers: TokenNumbers
    ) -> tuple[tuple[Tensor, ...], Kept]:
        """What the op gives of each row, and what the gradient needs of it.

        Args:
            logits: ``(rows, classes of this process)``.
            tokens: ``(rows,)``, int64, among all classes.
            numbers: Of the op.

        Returns:
            The outputs in their order; and of each row logsumexp, entropy, ``log(sum(p^2))`` and
            the top tokens, or None. In fp32 for half precision.
        """
        z = cooled(capped(widen(logits), numbers.softcap), numbers)
        counted = tokens != numbers.ignore_index
        classes = logits.shape[1] * self.group.size
        check_classes(tokens, counted, classes, "VocabParallelTokenLogProb: token")
        largest = self.largest(z)
        below = z - largest[:, None]  # a row of infinities: it is NaN, as torch has it
        e = below.exp()
        sums = [e.sum(-1), self.picked(below, tokens)]
        if numbers.log_sum_squares:
            sums.append(e.square().sum(-1))
        if numbers.entropy:  # the last, since it may overwrite
            sums.insert(2, torch.linalg.vecdot(e, possible(below)))
        total, picked, *others = self.summed(sums)
        log = total.log()
        lse = largest + log
        found = [torch.where(counted, picked - log, 0.0)]
        entropy = log_squares = top = None
        if numbers.entropy:
            entropy = log - others.pop(0) / total
            found.append(entropy)
        if numbers.logsumexp:
            found.append(largest.where(largest.isinf(), lse))
        if numbers.log_sum_squares:
            log_squares = others.pop(0).log() - 2 * log
            found.append(log_squares)
        if numbers.top_k:
            values, top = self._top(z, numbers.top_k)
            found += [top, values - lse[:, None]]
        return tuple(found), (lse, entropy, log_squares, top)

    def _top(self, z: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The largest of each row over all processes, and their classes."""
        values, top = z.topk(min(count, z.shape[1]), -1)
        if self.group.size == 1:
            return values, top
        mine = torch.stack((values.double(), (top + self.rank * z.shape[1]).double()))
        size = self.group.size
        of_all = mine.new_empty((2 * size, *values.shape))
        run_collective(self.group, "the most probable tokens", gather_into, of_all, mine)
        # (processes, 2, rows, count) to two of (rows, processes * count)
        pairs = of_all.view(size, 2, *values.shape).permute(1, 2, 0, 3).flatten(2)
        best, places = pairs[0].topk(count, -1)
        return best.to(z.dtype), pairs[1].gather(-1, places).long()

    def row_gradients(  # type: ignore[override]
        self,
        logits: Tensor,
        tokens: Tensor,
        grads: Sequence[Tensor | None],
        kept: Kept,
        numbers: TokenNumbers,
        spare: Spare = (None, None, None),
    ) -> Tensor:
        """The gradient of this process's logits, in fp32 for half precision.

        Args:
            logits: ``(rows, classes of this process)``.
            tokens: ``(rows,)``, int64, among all classes.
            grads: Of the output and of the extra outputs, ``(rows, ...)``; None: there is none.
            kept: As :meth:`row_log_probs` gave it.
            numbers: Of the forward.
            spare: See :func:`opfuse.ops.cross_entropy.parts`.
        """
        lse, *others = kept
        z = capped(widened(logits, spare[0]), numbers.softcap, spare[0])
        log_p = cooled(z, numbers, spare[1])
        log_p = torch.sub(log_p, lse[:, None], out=spare[1])  # type: ignore[index]
        p = torch.exp(log_p, out=spare[2])
        given = RowStatistics(*others), z, possible(log_p), p, tokens, grads, numbers

        def places_of(tokens: Tensor, shares: Tensor) -> tuple[Tensor, Tensor]:
            places, mine = self.places(tokens, logits.shape[1])
            return places, torch.where(mine, shares, 0.0)

        return gradients_from(*given, places_of, spare)
