"""A linear layer and the log-probabilities after it, whose classes are split among processes."""

from __future__ import annotations

from typing import Any

from opfuse_distributed.vocab_parallel_log_prob import VocabParallelTokenLogProb
from torch import Tensor

from opfuse import Environment
from opfuse.ops.cross_entropy import gradients_by_parts

from .log_prob import LinearLogProb, fusions


class SplitLinearLogProb(LinearLogProb):
    """As its base: each chunk of rows takes the reductions that the op takes for all rows.

    The backward takes none. PyTorch's operations compute the rows.
    """

    def fuser_forward(self, basic_op_ctxs: Any, *given: Any, **more: Any) -> Any:
        """See :meth:`opfuse.FusibleOperation.fuser_forward`."""
        y, extras = super().fuser_forward(basic_op_ctxs, *given, **more)
        classes = basic_op_ctxs[0].params[0].shape[0]
        self._parts[0].report_reductions(basic_op_ctxs[-1], y, classes)
        return y, extras

    def _plan_rows(self, env: Environment) -> None:
        part = self._parts[0].part
        self._values = lambda *given: part.row_log_probs(*given[:3])
        self._in_place = lambda *given: _gradients_in_place(part, *given)


def _gradients_in_place(
    part: Any, logits: Tensor, tokens: Tensor, grads: Any, kept: Any, numbers: Any
) -> Tensor:
    def of_part(spare: Any, some: Tensor, of_some: Tensor, *others: Any) -> Tensor:
        rows = others[: len(grads)], others[len(grads) :]
        return part.row_gradients(some, of_some, *rows, numbers, spare)

    return gradients_by_parts(of_part, logits, tokens, *grads, *kept, in_place=True)


JOINT = fusions(VocabParallelTokenLogProb, SplitLinearLogProb, ", split classes")
