"""A linear layer and the loss after it, whose classes are split among processes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from opfuse import Environment, Fusion, Optional
from opfuse.ops import BasicLinear, Bias, VocabParallelCrossEntropy
from opfuse.ops.cross_entropy import gradients_by_parts

from .fused import Products
from .loss import LinearLoss, in_forward


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

    def planned(self, env: Environment) -> None:
        """See :meth:`opfuse.FusedOperation.planned`."""
        Products.planned(self, env)
        part = self._parts[0].part
        self._softmax = lambda *given: _softmax_gradient(part, *given)
        self._row_losses = lambda *given: part.row_losses(*given)[0]


def _softmax_gradient(
    part: Any, logits: Tensor, targets: Tensor, weights: Tensor, numbers: Any
) -> tuple[Tensor, Tensor]:
    """As :func:`opfuse_linear.chunks.softmax_gradient`, for the classes of this process."""
    losses, lse = part.row_losses(logits, targets, numbers)

    def of_part(spare: Any, *rows: Tensor) -> Tensor:
        return part.row_gradients(*rows, numbers, spare)

    return losses, gradients_by_parts(of_part, logits, targets, weights, lse, in_place=True)


def _on_cpu(ops: Any, env: Environment) -> bool | str:
    if env.device.type != "cpu":
        return "on a GPU the same chunks have a fusion that trades time for memory"
    return in_forward(ops, env)


def _elsewhere(ops: Any, env: Environment) -> bool | str:
    if env.device.type == "cpu":
        return "on a CPU the same chunks have a fusion that takes no more time"
    return in_forward(ops, env)


_PATTERN = BasicLinear, Optional(Bias), VocabParallelCrossEntropy

JOINT = [
    Fusion(_PATTERN, SplitLinearLoss, _on_cpu, name="linear+loss, split classes", needs_rows=True),
    Fusion(
        _PATTERN,
        SplitLinearLoss,
        _elsewhere,
        name="linear+loss, split classes, on a GPU",
        needs_rows=True,
        trades_time=True,
    ),
]
