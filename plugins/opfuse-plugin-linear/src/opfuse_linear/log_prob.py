"""A linear layer and the log-probabilities after it, as one op that never holds all logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from opfuse import Environment, Fusion, OperationContext, Optional
from opfuse.ops import BasicLinear, Bias, TokenLogProb, VocabParallelTokenLogProb
from opfuse.ops.token_log_prob import grads_of_rows, row_log_probs, row_logit_gradients

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

    _values: Any = staticmethod(lambda *given: (row_log_probs(*given[:3]), ()))
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

            gradients = token_statistics.row_gradients
            self._values = token_statistics.row_statistics
            self._in_place = lambda logits, *given: gradients(logits, *given, logits)
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
        found, kept, logits = [], [], None
        for place, part, of_part in chunks.chunks(rows, flat, weight.shape[0]):
            del logits  # before there are new ones
            logits = kernels.linear(part, weight, bias, self._onednn)
            values, of_rows = self._values(logits, of_part, numbers, last.requires_grad)
            found.append(values)
            kept.append(of_rows)
            if sums is not None:
                ones = values[0].new_ones(len(part))
                self._in_place(logits, of_part, [ones], of_rows, numbers)
                sums.add(place, part, logits)
        y, *extras = [each.view((*tokens.shape, *each.shape[1:])) for each in _joined(found)]
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
            last.to_save = (flat, *(_joined(kept) if sums is None else ()))
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
        (x, weight), *of_bias, (tokens, *kept) = saved
        (bias,) = of_bias[0] if of_bias else (None,)
        last: Any = basic_op_ctxs[-1]
        extras = basic_op_grad_extra_outputs[-1]
        grads = grads_of_rows((grad_output, *extras), tokens.view(last.shape[:-1]))
        if last.kept:
            dx = x * grads[0].to(x.dtype)[:, None]  # type: ignore[union-attr]
            return self._result(basic_op_ctxs, (dx, *[None] * (len(saved) - 1)), None)
        weight = weight.to(x.dtype)
        sums = chunks.Sums(x, weight, self._needs(basic_op_ctxs), self._onednn)
        logits = None
        for rows, part, of_part in chunks.chunks(x, tokens, weight.shape[0]):
            del logits
            logits = kernels.linear(part, weight, bias, self._onednn)
            of_grads, of_kept = [
                [None if each is None else each[rows] for each in given] for given in (grads, kept)
            ]
            self._in_place(logits, of_part, of_grads, of_kept, last.numbers)
            sums.add(rows, part, logits)
        found = (sums.dx, sums.dw, sums.db)[: len(basic_op_ctxs)]
        return self._result(basic_op_ctxs, found, None)


def _joined(parts: Any) -> list[Tensor | None]:
    """The same tensors of all chunks."""
    return [None if each[0] is None else torch.cat(each) for each in zip(*parts, strict=True)]


def no_top_tokens(op: Any, env: Environment) -> str:
    """Why kernels do not compute the op, as a sentence; empty: they do, or nothing runs them."""
    if not op.top_k or isinstance(op, VocabParallelTokenLogProb):  # PyTorch's operations
        return ""
    return "" if choice.cannot_run(env, "its kernel") else "its kernel gives no top tokens"


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


def fusions(op: type, build: type, said: str = "") -> list[Fusion]:
    """The fusions of a linear and an op of log-probabilities; the first of those that fit is used.

    Args:
        op: The op.
        build: The fused op.
        said: What their names say of it.
    """
    pattern, name = (BasicLinear, Optional(Bias), op), f"linear+log-probability{said}"
    trades: Any = {"trades_time": True}
    return [
        Fusion(pattern, build, _frozen_on_cpu, name=name),
        Fusion(pattern, build, _frozen_on_gpu, name=f"{name}, on a GPU", **trades),
        Fusion(pattern, build, _in_backward, benefit=1, name=f"{name}, computed again", **trades),
    ]


JOINT = fusions(TokenLogProb, LinearLogProb)
