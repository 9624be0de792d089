"""A linear layer and the divergence from a teacher after it, which never hold all logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from opfuse import Environment, Optional
from opfuse.core.overwriting import may_write
from opfuse.ops import BasicLinear, Bias
from opfuse.ops.authoring import rows_of

from .conditions import by_chunks
from .fused import Ctxs, LinearLoss, in_forward
from .losses import Distillation
from .losses.distillation import Teacher


class LinearDistillation(LinearLoss):
    """As its base: each chunk of rows computes the logits of student and teacher."""

    def _plan_rows(self, env: Environment) -> None:
        """PyTorch's operations compute the rows."""
        self._softmax, self._row_losses = _differentiated, _losses

    def fuser_forward(
        self, basic_op_ctxs: Ctxs, input_: Tensor, *, basic_op_extra_inputs: Any, **unused: Any
    ) -> tuple[Tensor, Any]:
        """See :meth:`opfuse.FusibleOperation.fuser_forward`."""
        op, has_bias, no_extras = self._parts
        linear, last = basic_op_ctxs[0], basic_op_ctxs[-1]
        hidden, matrix, targets = basic_op_extra_inputs[-1]
        x, weight = BasicLinear.operands(linear, input_)
        (bias,) = basic_op_ctxs[1].params if has_bias else (None,)
        shape, rows = torch.Size((*x.shape[:-1], weight.shape[0])), rows_of(x)
        teacher = op.teacher(hidden, matrix, targets, shape, last.requires_grad)
        # a chunk finds the teacher's rows by their numbers
        places = torch.arange(len(rows), device=x.device)
        places = places.where(op.counts(targets), teacher.ignore_index)
        if last.requires_grad:
            losses = self._differentiated(basic_op_ctxs, rows, weight, bias, places, teacher)
            left: Any = last
            left.shape, params = input_.shape, [ctx.params[0] for ctx in basic_op_ctxs[:-1]]
            left.dtypes = [tensor.dtype for tensor in (input_, *params)]
        else:
            losses = self._losses(rows, weight, bias, places, teacher)
        return op.reduced(losses, targets), no_extras


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
