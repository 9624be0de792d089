"""A linear layer with a low-rank adapter and the log-probabilities after it, by chunks of rows."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from opfuse.ops import LowRankLinear, TokenLogProb
from opfuse.ops.authoring import added, rows_of

from . import chunks
from .log_prob import Ctxs, LinearLogProb, fusions


class LowRankLogProb(LinearLogProb):
    """As its base. The adapter's small product is added to the logits of each chunk.

    Its first half, ``scaling * dropout(x) A^T``, is computed for all rows at once, and kept.
    """

    def _operands(self, ctx: Any, input_: Tensor, keep: bool) -> list[tuple[Tensor, Tensor]]:
        op: Any = self.basic_ops[0]
        x, weight, low, b = op.operands(ctx, rows_of(input_), keep=keep)
        return [(x, weight), (low, b)]

    def _saved_operands(self, ctx: Any) -> list[tuple[Tensor, Tensor]]:
        x, _, low, weight, _, b = ctx.saved_tensors
        return [(x, weight.to(x.dtype)), (low, b.to(x.dtype))]

    def _sums(self, ctxs: Ctxs, pairs: Any) -> list[chunks.Sums]:
        linear: Any = ctxs[0]
        dx, (_, of_a, of_b) = linear.input_requires_grad, linear.param_requires_grad
        of_low = dx or of_a, of_b, False
        first, second = pairs
        needs = self._needs(ctxs)
        return [chunks.Sums(*first, needs, self._onednn), chunks.Sums(*second, of_low, False)]

    def _linear_grads(self, ctx: Any, sums: Any, saved: Any) -> tuple[Tensor | None, ...]:
        of_x, of_low = sums
        dx, da = of_x.dx, None
        if of_low.dx is not None:
            x, mask, _, _, a, _ = saved
            dlow, op = of_low.dx * ctx.scaling, LowRankLinear
            if dx is not None:
                dx = added(dx, op.dropped(dlow @ a.to(dlow.dtype), mask, ctx.dropout))
            if ctx.param_requires_grad[1]:
                da = dlow.t() @ op.dropped(x.to(dlow.dtype), mask, ctx.dropout)
        return dx, of_x.dw, da, of_low.dw


JOINT = fusions(TokenLogProb, LowRankLogProb, ", low rank", linear=LowRankLinear)
