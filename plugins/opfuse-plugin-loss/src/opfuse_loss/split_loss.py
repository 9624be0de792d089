"""A linear layer and the loss after it, whose classes are split among processes."""

from __future__ import annotations

from typing import Any

import torch
from opfuse_distributed.vocab_parallel import VocabParallelCrossEntropy
from torch import Tensor

from opfuse import Environment, Optional
from opfuse.ops import BasicLinear, Bias
from opfuse.ops.cross_entropy import gradients_by_parts

from .conditions import by_chunks
from .fused import LinearLoss, in_forward


class SplitLinearLoss(LinearLoss):
    """As its base: each chunk of rows takes the two reductions that the op takes for all rows.

    The softmax is computed by PyTorch's operations.
    """

    def fuser_forward(self, basic_op_ctxs: Any, *given: Any, **more: Any) -> Any:
        """See :meth:`opfuse.FusibleOperation.fuser_forward`."""
        result = super().fuser_forward(basic_op_ctxs, *given, **more)
        ((targets,),) = more["basic_op_extra_inputs"][-1:]
        wide = torch.float64 if given[0].dtype is torch.float64 else torch.float32
        losses = torch.empty(targets.shape, dtype=wide, device="meta")
        self._parts[0].report_reductions(basic_op_ctxs[-1], losses)
        return result

    def _plan_rows(self, env: Environment) -> None:
        part = self._parts[0].part
        self._softmax = lambda *given: _softmax_gradient(part, *given)
        self._row_losses = lambda *given: part.row_losses(*given)[0]


def _softmax_gradient(
    part: Any, logits: Tensor, targets: Tensor, weights: Tensor, numbers: Any
) -> tuple[Tensor, Tensor]:
    """As :func:`opfuse_loss.chunks.softmax_gradient`, for the classes of this process."""
    losses, lse = part.row_losses(logits, targets, numbers)

    def of_part(spare: Any, *rows: Tensor) -> Tensor:
        return part.row_gradients(*rows, numbers, spare)

    return losses, gradients_by_parts(of_part, logits, targets, weights, lse, in_place=True)


JOINT = by_chunks(
    (BasicLinear, Optional(Bias), VocabParallelCrossEntropy),
    SplitLinearLoss,
    in_forward,
    "linear+loss, split classes",
    interpreted=False,
    needs=("rows",),
)
