"""A linear layer and the divergence from a teacher after it, which never hold all logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from opfuse import Environment, Optional
from opfuse.core.overwriting import may_write
from opfuse.ops import BasicLinear, Bias

from .conditions import by_chunks
from .fused import LinearLoss, in_forward
from .losses import Distillation
from .losses.distillation import Teacher


class LinearDistillation(LinearLoss):
    """As its base: each chunk of rows computes the logits of student and teacher."""

    def _plan_rows(self, env: Environment) -> None:
        """PyTorch's operations compute the rows."""
        self._softmax, self._row_losses = _differentiated, _losses

    def _targets(self, given: Any, shape: torch.Size, recorded: bool) -> tuple[Tensor, Any]:
        """The number of each row, by which a chunk finds the teacher's rows, and the teacher."""
        op, (hidden, head, targets) = self._parts[0], given
        teacher = op.teacher(hidden, head, targets, shape, recorded)
        places = torch.arange(shape[:-1].numel(), device=targets.device)
        return places.where(op.counts(targets), teacher.ignore_index), teacher

    def _reduced(self, losses: Tensor, given: Any, *unused: Any) -> Tensor:
        result: Tensor = self._parts[0].reduced(losses, given[-1])
        return result


def _losses(logits: Tensor, places: Tensor, teacher: Teacher) -> Tensor:
    return teacher.compare(logits, places.clamp(min=0))[0]


def _differentiated(
    logits: Tensor, places: Tensor, weights: Tensor, teacher: Teacher
) -> tuple[Tensor, Tensor]:
    """As :func:`opfuse_loss.chunks.softmax_gradient`, with a teacher in the place of targets."""
    losses, gradient = teacher.compare(logits, places.clamp(min=0))
    counted = (places != teacher.ignore_index).unsqueeze(-1)
    gradient = torch.where(counted, gradient * weights.unsqueeze(-1), 0.0)
    writes = may_write(logits, gradient)
    return losses, logits.copy_(gradient) if writes else gradient.to(logits.dtype)


JOINT = by_chunks(
    (BasicLinear, Optional(Bias), Distillation),
    LinearDistillation,
    in_forward,
    "linear+distillation",
    interpreted=False,
    needs=("rows",),
)
