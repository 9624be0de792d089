"""A linear layer and the log-probabilities after it, as one op that never holds all logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from opfuse import Environment, Fusion, OperationContext, Optional
from opfuse.ops import BasicLinear, Bias, TokenLogProb
from opfuse.ops.token_log_prob import row_log_probs, row_logit_gradients

from . import choice, chunks, kernels
from .fused import Products
from .loss import LinearLoss, by_kernels, chunks_pay, is_frozen

Ctxs = list[OperationContext]


class LinearLogProb(LinearLoss):
    """Linear [+ bias] + log-probabilities of tokens, chunk by chunk of rows.

    With a frozen linear, and no other output, the forward keeps the gradient of each row of the
    input, and the backward scales it: that is exact for every loss. Otherwise the backward computes
    the logits again, which takes one more product.
    """

    _values: Any = staticmethod(lambda *given: (row_log_probs(*given[:3]), None))
    _in_place: Any = staticmethod(
        lambda logits, tokens, grads, _, numbers: row_logit_gradients(
            logits, tokens, grads, numbers, in_place=True
        )
    )

    def planned(self, env: Environment) -> None:
        """See :meth:`opfuse.FusedOperation.planned`."""
        Products.planned(self, env)
        if not choice.cannot_run(env, "its kernel"):
            from . import softmax, token_statistics  # they import Triton

            self._values, self._in_place = token_statistics.row_statistics, _by_kernel
            self._check = softmax.check_targets

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
        if self._check is not None:
            self._check(flat, weight.shape[0], numbers.ignore_index, "TokenLogProb: a token")
        needs, sums = self._needs(basic_op_ctxs), None
        if last.requires_grad and needs == (True, False, False) and not op.num_extra_outputs:
            sums = chunks.Sums(rows, weight, needs, self._onednn)
        found, logits = [], None
        for place, part, of_part in chunks.chunks(rows, flat, weight.shape[0]):
            del logits  # before there are new ones
            logits = kernels.linear(part, weight, bias, self._onednn)
            values, kept = self._values(logits, of_part, numbers, sums is not None)
            found.append(values)
            if sums is not None:
                ones = values[0].new_ones(len(part))
                self._in_place(logits, of_part, [ones], kept, numbers)
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
            self._in_place(logits, of_part, of_rows, None, last.numbers)
            sums.add(rows, part, logits)
        found = (sums.dx, sums.dw, sums.db)[: len(basic_op_ctxs)]
        return self._result(basic_op_ctxs, found, None)


def _by_kernel(logits: Tensor, tokens: Tensor, grads: Any, kept: Any, numbers: Any) -> None:
    """Turn logits into their gradient; with what was kept of the rows, or None."""
    from . import token_statistics

    if kept is None:
        _, kept = token_statistics.row_statistics(logits, tokens, numbers, keep=True)
    token_statistics.row_gradients(logits, tokens, grads, kept, numbers, out=logits)


def no_top_tokens(op: Any, env: Environment) -> str:
    """Why kernels do not compute the op, as a sentence; empty: they do, or nothing runs them."""
    by_kernel = not choice.cannot_run(env, "its kernel")
    return "its kernel gives no top tokens" if by_kernel and op.top_k else ""


def _pays(ops: Any, env: Environment) -> bool | str:
    """Asked while planning."""
    return no_top_tokens(ops[-1], env) or chunks_pay(ops, env)


def _frozen(ops: Any, env: Environment) -> bool | str:
    """Whether the forward may keep the gradient of each row; asked while planning."""
    if not env.requires_grad:
        return _pays(ops, env)
    if not all(is_frozen(op) for op in ops[:-1]):
        return "the linear is trained, so its logits are computed again: prefer memory for that"
    if ops[-1].num_extra_outputs:
        return "the gradients of other outputs take the logits again: prefer memory for that"
    return _pays(ops, env)


def _frozen_on_cpu(ops: Any, env: Environment) -> bool | str:
    if by_kernels(env):
        return "on a GPU the same chunks have a fusion that trades time for memory"
    return _frozen(ops, env)


def _frozen_on_gpu(ops: Any, env: Environment) -> bool | str:
    if not by_kernels(env):
        return "on a CPU the same chunks have a fusion that takes no more time"
    return _frozen(ops, env)


def _in_backward(ops: Any, env: Environment) -> bool | str:
    if not env.requires_grad:
        return "no backward follows, in which something would be computed again"
    return _pays(ops, env)


_PATTERN = BasicLinear, Optional(Bias), TokenLogProb

JOINT = [
    Fusion(_PATTERN, LinearLogProb, _frozen_on_cpu, name="linear+log-probability"),
    Fusion(
        _PATTERN,
        LinearLogProb,
        _frozen_on_gpu,
        name="linear+log-probability, on a GPU",
        trades_time=True,
    ),
    # the others go first
    Fusion(
        _PATTERN,
        LinearLogProb,
        _in_backward,
        benefit=1,
        name="linear+log-probability, computed again",
        trades_time=True,
    ),
]
