"""A loss whose logits are there: read once in the forward, and once more for their gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from opfuse import Environment, FusedOperation, Fusion, OperationContext
from opfuse.ops import CrossEntropy
from opfuse.ops.authoring import rows_of
from opfuse.ops.cross_entropy import reduced, row_gradients, row_losses, row_weights
from opfuse.ops.libraries import PLAIN

from .conditions import DTYPES, HALF, PREDICTED, cannot_run, smoothed

Ctxs = list[OperationContext]


class LossByKernel(FusedOperation):
    """Cross entropy in two kernels: one reads the logits, the other reads them and writes once.

    Logits, targets, and two numbers of each row are kept. Nothing is overwritten, since others may
    have the logits. ``linear+loss``, which makes them itself, writes their gradient over them.
    """

    grad_input = "fresh"

    def fuser_forward(
        self, basic_op_ctxs: Ctxs, input_: Tensor, *, basic_op_extra_inputs: Any, **unused: Any
    ) -> tuple[Tensor, Any]:
        """See :meth:`opfuse.FusibleOperation.fuser_forward`."""
        op: Any = self.basic_ops[0]
        ctx: Any = basic_op_ctxs[0]
        ((targets,),) = basic_op_extra_inputs
        op.check_targets(targets, input_.shape)
        numbers, flat = op.numbers_of(), targets.flatten().long().contiguous()
        keep = ctx.requires_grad and ctx.input_requires_grad
        if takes(input_):
            from .kernels import softmax  # this imports Triton

            softmax.check_targets(flat, input_.shape[-1], numbers.ignore_index)
            losses, sums = softmax.row_losses(dense_rows(input_), flat, numbers, keep=keep)
        else:
            losses, sums = row_losses(rows_of(input_), flat, numbers), None
        if ctx.requires_grad:
            ctx.numbers = numbers
            ctx.to_save = (input_, targets, sums) if keep else (None, None, None)
        return op.in_dtype(reduced(losses, targets, numbers), ctx, input_), ((),)

    def fuser_backward(
        self, basic_op_ctxs: Ctxs, grad_output: Tensor, **unused: Any
    ) -> tuple[Tensor | None, Any, Any]:
        """See :meth:`opfuse.FusibleOperation.fuser_backward`."""
        ctx: Any = basic_op_ctxs[0]
        x, targets, sums = ctx.saved_tensors
        if x is None:
            return None, ((),), ((None,),)
        flat = targets.flatten().long().contiguous()
        wide = torch.float32 if x.dtype in HALF else x.dtype
        weights = row_weights(grad_output.to(wide), flat, ctx.numbers)
        if sums is None:
            dx = row_gradients(rows_of(x), flat, weights, ctx.numbers)
        else:
            from .kernels import softmax

            dx = softmax.row_gradients(dense_rows(x), flat, weights, sums, ctx.numbers)
        return dx.view(x.shape), ((),), ((None,),)


def takes(logits: Tensor) -> bool:
    """Whether the kernels take the tensor that came; planning knows only what was declared."""
    return type(logits) in PLAIN and logits.dtype in DTYPES


def dense_rows(logits: Tensor) -> Tensor:
    """The logits as a matrix whose rows have no gaps."""
    rows = rows_of(logits)
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _pays(ops: Sequence[Any], env: Environment) -> bool | str:
    """Asked while planning."""
    if env.compiling:
        return "under torch.compile the compiler fuses the loss"
    return cannot_run(env) or smoothed(ops[0]) or PREDICTED.why_not("cross entropy", env) or True


# a fusion that takes the linear too goes first
JOINT = [Fusion((CrossEntropy,), LossByKernel, _pays, benefit=1, name="cross entropy")]
