"""A linear layer, log-probabilities and a loss of rewards: the logits are computed once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from opfuse import Environment, OperationContext, Optional
from opfuse.ops import BasicLinear, Bias, LowRankLinear, TokenLogProb
from opfuse.ops.authoring import wide

from . import chunks
from .conditions import by_chunks, chunks_pay, gradients_in_forward, no_top_tokens
from .log_prob import Ctxs, LinearLogProb
from .losses import GRPO
from .low_rank import LowRankLogProb


class LinearPolicyLoss(LinearLogProb):
    """Linear [+ bias] + log-probabilities + a loss, chunk by chunk of rows.

    The loss tells the gradient of a token's log-probability by that one alone. So the forward turns
    the logits of a chunk into their gradient at once, for a loss whose gradient is 1, and the
    backward scales the gradients, as for cross entropy. Neither input nor logits are kept.
    """

    def __init__(self, basic_ops: Sequence[Any]) -> None:
        super().__init__(basic_ops)
        self._parts = basic_ops[-2], len(basic_ops) == 4, ((),) * len(basic_ops)
        self._loss = (basic_ops[-1],)  # in a tuple: looking up a module's attributes is slow

    def fuser_forward(
        self, basic_op_ctxs: Ctxs, input_: Tensor, *, basic_op_extra_inputs: Any, **more: Any
    ) -> tuple[Tensor, Any]:
        """See :meth:`opfuse.FusibleOperation.fuser_forward`."""
        (_, has_bias, no_extras), (loss,) = self._parts, self._loss
        *before, last = basic_op_ctxs
        linear, differentiates = before[0], last.requires_grad
        if differentiates and others_matter(loss):  # its numbers have changed since it was planned
            given = {"basic_op_extra_inputs": basic_op_extra_inputs, **more}
            return self.run_separately(basic_op_ctxs, input_, **given)
        *_, (tokens,), extras = basic_op_extra_inputs
        (bias,) = before[1].params if has_bias else (None,)
        pairs = self._operands(linear, input_, differentiates)
        classes = pairs[0][1].shape[0]
        numbers, flat = self._checked(tokens, torch.Size((*input_.shape[:-1], classes)))
        rows = torch.zeros(len(flat), dtype=wide(pairs[0][0].dtype), device=input_.device)
        sums = self._sums(before, pairs) if differentiates else None
        logits = None
        for place, _, of_part in chunks.chunks(pairs[0][0], flat, classes):
            del logits  # before there are new ones
            logits = self._logits(pairs, bias, place)
            (values,), kept = self._values(logits, of_part, numbers, differentiates)
            rows = rows.slice_scatter(values, 0, place.start, place.stop)
            if sums is not None:
                grads = _gradient(loss, rows.view(tokens.shape), extras).view(-1)[place]
                logits = self._in_place(logits, of_part, [grads], kept, numbers)
                self._add(sums, pairs, place, logits)
        y = rows.view(tokens.shape)
        result, metrics = loss.fuser_forward([last], y, basic_op_extra_inputs=[extras])
        if sums is not None:
            left: Any = last
            params = [param for ctx in before[:-1] for param in ctx.params]
            left.shape = input_.shape
            left.dtypes = [tensor.dtype for tensor in (input_, *params)]
            linear.to_save = self._linear_grads(linear, sums, linear.to_save)
            for ctx in before[1:-1]:
                ctx.to_save = (sums[0].db,)
            before[-1].to_save = last.to_save = ()
        return result, [*no_extras[:-1], *metrics]

    def fuser_backward(
        self,
        basic_op_ctxs: Ctxs,
        grad_output: Tensor,
        *,
        basic_op_grad_extra_outputs: Any = ((),),
        **unused: Any,
    ) -> tuple[Tensor | None, Any, Any]:
        """See :meth:`opfuse.FusibleOperation.fuser_backward`."""
        left: Any = basic_op_ctxs[-1]
        if not hasattr(left, "shape"):
            given = {"basic_op_grad_extra_outputs": basic_op_grad_extra_outputs}
            return self.run_separately_backward(basic_op_ctxs, grad_output, **given)
        saved: Any = [ctx.saved_tensors for ctx in basic_op_ctxs]
        of_linear, *of_bias, _, _ = saved
        grads = *of_linear, *[db for (db,) in of_bias]
        dx, of_ops, (*of_extras, of_tokens) = self._result(basic_op_ctxs, grads, grad_output)
        of_extras[-1] = of_tokens
        return dx, of_ops, [*of_extras, (None,) * self._loss[0].num_extra_inputs]


class LowRankPolicyLoss(LinearPolicyLoss, LowRankLogProb):
    """The same of a linear with a low-rank adapter."""


def _gradient(loss: Any, log_probs: Tensor, extras: Any) -> Tensor:
    """The gradient by all log-probabilities; that of a token is right if its own is there."""
    ctx: Any = OperationContext()
    ctx.requires_grad = ctx.input_requires_grad = True
    loss.fuser_forward([ctx], log_probs, basic_op_extra_inputs=[extras])
    gradient: Tensor = ctx.to_save[0]
    return gradient


def others_matter(loss: GRPO) -> str:
    """Why the gradient of a token's log-probability depends on others; empty: it does not."""
    if loss.importance_sampling_level != "token":
        return "its ratios are of whole sequences"
    if loss.loss_type == "vespo":
        return "its weights are of whole sequences"
    if loss.off_policy_mask_threshold is not None:
        return "off_policy_mask_threshold masks whole sequences"
    return "it takes the entropy" if "entropy" in loss.input_names else ""


def _pays(ops: Any, env: Environment) -> bool | str:
    """Asked while planning."""
    *before, of_rows, loss = ops
    if refused := no_top_tokens(of_rows, env):
        return refused
    if env.requires_grad and (why := others_matter(loss)):
        return f"{why}, so no gradient of a token is known before all log-probabilities are"
    if of_rows.num_extra_outputs:
        return "the gradients of other outputs of TokenLogProb come from elsewhere"
    if env.requires_grad and env.dtype is torch.float16:
        return "the gradient of a token may be too small for fp16 before the backward scales it"
    pays = chunks_pay([*before, of_rows], env)
    return gradients_in_forward(ops, env) if pays is True else pays


_REST, _NAME = (Optional(Bias), TokenLogProb, GRPO), "linear+log-probability+loss"

JOINT = [
    *by_chunks((BasicLinear, *_REST), LinearPolicyLoss, _pays, _NAME, needs=("rows",)),
    *by_chunks(
        (LowRankLinear, *_REST), LowRankPolicyLoss, _pays, f"{_NAME}, low rank", needs=("rows",)
    ),
]
