"""A linear layer and the log-probabilities after it, as one op that never holds all logits."""

from __future__ import annotations

from typing import Any

import torch
from opfuse_triton import is_interpreting
from torch import Tensor

from opfuse import Environment, Fusion, OperationContext, Optional
from opfuse.ops import BasicLinear, Bias, TokenLogProb
from opfuse.ops.token_log_prob import row_log_probs, row_logit_gradients

from . import chunks, kernels
from .conditions import plain_linear
from .fused import Products
from .loss import LinearLoss, is_frozen

Ctxs = list[OperationContext]


class LinearLogProb(LinearLoss):
    """Linear [+ bias] + log-probabilities of tokens, chunk by chunk of rows.

    With a frozen linear, and no other output, the forward keeps the gradient of each row of the
    input, and the backward scales it: that is exact for every loss. Otherwise the backward computes
    the logits again, which takes one more product.
    """

    def planned(self, env: Environment) -> None:
        """See :meth:`opfuse.FusedOperation.planned`."""
        Products.planned(self, env)

    def fuser_forward(
        self, basic_op_ctxs: Ctxs, input_: Tensor, *, basic_op_extra_inputs: Any, **unused: Any
    ) -> tuple[Tensor, Any]:
        """See :meth:`opfuse.FusibleOperation.fuser_forward`."""
        op, has_bias, no_extras = self._parts
        linear, last = basic_op_ctxs[0], basic_op_ctxs[-1]
        ((tokens,),) = basic_op_extra_inputs[-1:]
        x, weight = BasicLinear.operands(linear, input_)
        (bias,) = basic_op_ctxs[1].params if has_bias else (None,)
        op.check_tokens(tokens, torch.Size((*x.shape[:-1], weight.shape[0])))
        numbers, rows = op.numbers_of(), kernels._rows(x)
        flat = tokens.flatten().long().contiguous()
        needs, sums = self._needs(basic_op_ctxs), None
        if last.requires_grad and needs == (True, False, False) and not op.num_extra_outputs:
            sums = chunks.Sums(rows, weight, needs, self._onednn)
        found, logits = [], None
        for place, part, of_part in chunks.chunks(rows, flat, weight.shape[0]):
            del logits  # before there are new ones
            logits = kernels.linear(part, weight, bias, self._onednn)
            found.append(row_log_probs(logits, of_part, numbers))
            if sums is not None:
                ones = found[-1][0].new_ones(len(part))
                row_logit_gradients(logits, of_part, [ones], numbers, in_place=True)
                sums.add(place, part, logits)
        outputs = [torch.cat(each) for each in zip(*found, strict=True)]
        y, *extras = [each.view((*tokens.shape, *each.shape[1:])) for each in outputs]
        if last.requires_grad:
            left: Any = last
            left.shape, left.numbers, left.kept = input_.shape, numbers, sums is not None
            params = [ctx.params[0] for ctx in basic_op_ctxs[:-1]]
            left.dtypes = [tensor.dtype for tensor in (input_, *params)]
            saved = linear.to_save
            linear.to_save = rows, saved[1] if saved and saved[1] is not None else weight
            if sums is not None:
                linear.to_save = sums.dx, None
            for ctx in basic_op_ctxs[1:-1]:
                ctx.to_save = (None if sums is not None else bias,)
            last.to_save = (flat,)
        return y, [*no_extras[:-1], tuple(extras)]

    def fuser_backward(
        self,
        basic_op_ctxs: Ctxs,
        grad_output: Tensor,
        *,
        basic_op_grad_extra_outputs: Any = ((),),
        **unused: Any,
    ) -> tuple[Tensor | None, Any, Any]:
        """See :meth:`opfuse.FusibleOperation.fuser_backward`."""
        saved: Any = [ctx.saved_tensors for ctx in basic_op_ctxs]
        (x, weight), *of_bias, (tokens,) = saved
        (bias,) = of_bias[0] if of_bias else (None,)
        last: Any = basic_op_ctxs[-1]
        grads = [
            None
            if grad is None
            else grad.reshape((len(tokens), *grad.shape[len(last.shape) - 1 :]))
            for grad in (grad_output, *basic_op_grad_extra_outputs[-1])
        ]
        if last.kept:
            dx = x * grads[0].to(x.dtype)[:, None]  # type: ignore[union-attr]
            return self._result(basic_op_ctxs, (dx, *[None] * (len(saved) - 1)), None)
        weight = weight.to(x.dtype)
        sums = chunks.Sums(x, weight, self._needs(basic_op_ctxs), self._onednn)
        logits = None
        for rows, part, of_part in chunks.chunks(x, tokens, weight.shape[0]):
            del logits
            logits = kernels.linear(part, weight, bias, self._onednn)
            of_rows = [None if grad is None else grad[rows] for grad in grads]
            row_logit_gradients(logits, of_part, of_rows, last.numbers, in_place=True)
            sums.add(rows, part, logits)
        found = (sums.dx, sums.dw, sums.db)[: len(basic_op_ctxs)]
        return self._result(basic_op_ctxs, found, None)


def _chunks_pay(ops: Any, env: Environment) -> bool | str:
    """Asked while planning."""
    if env.compiling:
        return "under torch.compile the chunks would be one after the other in the graph"
    if env.device.type != "cpu" or is_interpreting():
        return (
            "on a GPU it has no kernel yet, and PyTorch's operations by chunks are many small ones"
        )
    return plain_linear(ops, env)


def _frozen(ops: Any, env: Environment) -> bool | str:
    """Whether the forward may keep the gradient of each row; asked while planning."""
    if not env.requires_grad:
        return _chunks_pay(ops, env)
    if not all(is_frozen(op) for op in ops[:-1]):
        return "the linear is trained, so its logits are computed again: prefer memory for that"
    if ops[-1].num_extra_outputs:
        return "the gradients of other outputs take the logits again: prefer memory for that"
    return _chunks_pay(ops, env)


def _in_backward(ops: Any, env: Environment) -> bool | str:
    if not env.requires_grad:
        return "no backward follows, in which something would be computed again"
    return _chunks_pay(ops, env)


_PATTERN = BasicLinear, Optional(Bias), TokenLogProb

JOINT = [
    Fusion(_PATTERN, LinearLogProb, _frozen, name="linear+log-probability"),
    Fusion(
        _PATTERN,
        LinearLogProb,
        _in_backward,
        benefit=1,
        name="linear+log-probability, computed again",
        trades_time=True,
    ),
]
