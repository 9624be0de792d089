"""A linear layer and the log-probabilities after it, as one op that never holds all logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from opfuse import Environment, Fusion, OperationContext, Optional
from opfuse.ops import BasicLinear, Bias, TokenLogProb, libraries
from opfuse.ops.arithmetic import plus_product, reusable
from opfuse.ops.authoring import rows_of
from opfuse.ops.token_log_prob import grads_of_rows, row_log_probs, row_logit_gradients

from . import chunks
from .conditions import by_chunks, cannot_run, chunks_pay, computed_again, is_frozen, no_top_tokens
from .fused import LinearLoss, is_of_bias_alone

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

    def _plan_rows(self, env: Environment) -> None:
        if not cannot_run(env):
            from .kernels import softmax, token_statistics  # they import Triton

            gradients = token_statistics.row_gradients
            self._values = token_statistics.row_statistics
            self._in_place = lambda logits, *given: gradients(logits, *given, reusable(logits))
            self._check = softmax.check_targets

    def fuser_forward(
        self, basic_op_ctxs: Ctxs, input_: Tensor, *, basic_op_extra_inputs: Any, **unused: Any
    ) -> tuple[Tensor, Any]:
        """See :meth:`opfuse.FusibleOperation.fuser_forward`."""
        if is_of_bias_alone(basic_op_ctxs):
            given = {"basic_op_extra_inputs": basic_op_extra_inputs}
            return self.run_separately(basic_op_ctxs, input_, **given)
        _, has_bias, no_extras = self._parts
        linear, last = basic_op_ctxs[0], basic_op_ctxs[-1]
        ((tokens,),) = basic_op_extra_inputs[-1:]
        (bias,) = basic_op_ctxs[1].params if has_bias else (None,)
        pairs = self._operands(linear, input_, last.requires_grad)
        classes = pairs[0][1].shape[0]
        numbers, flat = self._checked(tokens, torch.Size((*input_.shape[:-1], classes)))
        sums = None
        if self._keeps_gradient(basic_op_ctxs):
            sums = self._sums(basic_op_ctxs, pairs)
        found, kept, logits = [], [], None
        for place, _, of_part in chunks.chunks(pairs[0][0], flat, classes):
            del logits  # before there are new ones
            logits = self._logits(pairs, bias, place)
            values, of_rows = self._values(logits, of_part, numbers, last.requires_grad)
            found.append(values)
            kept.append(of_rows)
            if sums is not None:
                ones = values[0].new_ones(len(of_part))
                logits = self._in_place(logits, of_part, [ones], of_rows, numbers)
                self._add(sums, pairs, place, logits)
        y, *extras = [each.view((*tokens.shape, *each.shape[1:])) for each in _joined(found)]
        if last.requires_grad:
            left: Any = last
            left.shape, left.numbers, left.kept = input_.shape, numbers, sums is not None
            params = [param for ctx in basic_op_ctxs[:-1] for param in ctx.params]
            left.dtypes = [tensor.dtype for tensor in (input_, *params)]
            if sums is not None:
                linear.to_save = (self._linear_grads(linear, sums, linear.to_save)[0],)
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
        if is_of_bias_alone(basic_op_ctxs):
            given = {"basic_op_grad_extra_outputs": basic_op_grad_extra_outputs}
            return self.run_separately_backward(basic_op_ctxs, grad_output, **given)
        saved: Any = [ctx.saved_tensors for ctx in basic_op_ctxs]
        of_linear, *of_bias, (tokens, *kept) = saved
        linear, last = basic_op_ctxs[0], basic_op_ctxs[-1]
        left: Any = last
        extras = basic_op_grad_extra_outputs[-1]
        grads = grads_of_rows((grad_output, *extras), tokens.view(left.shape[:-1]))
        if left.kept:
            (dx,) = of_linear
            dy = grads[0].masked_fill(tokens == left.numbers.ignore_index, 0.0)  # type: ignore[union-attr]
            dx = dx * dy.to(dx.dtype)[:, None]  # of a token that does not count it may be infinite
            nothing = [None] * (len(left.dtypes) - 1)
            return self._result(basic_op_ctxs, (dx, *nothing), None)
        (bias,) = of_bias[0] if of_bias else (None,)
        pairs = self._saved_operands(linear)
        sums = self._sums(basic_op_ctxs, pairs)
        logits = None
        for rows, _, of_part in chunks.chunks(pairs[0][0], tokens, pairs[0][1].shape[0]):
            del logits
            logits = self._logits(pairs, bias, rows)
            of_grads, of_kept = [
                [None if each is None else each[rows] for each in given] for given in (grads, kept)
            ]
            logits = self._in_place(logits, of_part, of_grads, of_kept, left.numbers)
            self._add(sums, pairs, rows, logits)
        found = self._linear_grads(linear, sums, of_linear)
        return self._result(basic_op_ctxs, (*found, *([sums[0].db] if of_bias else [])), None)

    def _checked(self, tokens: Tensor, shape: torch.Size) -> tuple[Any, Tensor]:
        """The numbers of the op, and the tokens of each row; refuses what fits no such logits."""
        op = self._parts[0]
        op.check_targets(tokens, shape)
        numbers, flat = op.numbers_of(), tokens.flatten().long().contiguous()
        if self._check is not None:
            self._check(flat, shape[-1], numbers.ignore_index, "TokenLogProb: a token")
        return numbers, flat

    def _keeps_gradient(self, ctxs: Ctxs) -> bool:
        """Whether the forward keeps the gradient of each row of the input, and that is all."""
        needs = [need for ctx in ctxs[:-1] for need in ctx.param_requires_grad]
        alone = not any(needs) and not self._parts[0].num_extra_outputs
        return alone and ctxs[-1].requires_grad and ctxs[0].input_requires_grad

    # Pairs of operands, whose products add up to the logits; here one

    def _operands(self, ctx: Any, input_: Tensor, keep: bool) -> list[tuple[Tensor, Tensor]]:
        """They, of matrices; leaves on ``ctx`` what logits are computed from again, if asked."""
        x, weight = BasicLinear.operands(ctx, input_)
        rows = rows_of(x)
        if keep:
            saved = ctx.to_save
            ctx.to_save = rows, saved[1] if saved and saved[1] is not None else weight
        return [(rows, weight)]

    def _saved_operands(self, ctx: Any) -> list[tuple[Tensor, Tensor]]:
        """They, in the backward."""
        x, weight = ctx.saved_tensors
        return [(x, weight.to(x.dtype))]

    def _logits(self, pairs: Any, bias: Tensor | None, rows: slice) -> Tensor:
        """The logits of some rows."""
        (x, weight), *others = pairs
        logits = libraries.linear(x[rows], weight, bias, self._onednn)
        for other, matrix in others:
            logits = plus_product(logits, other[rows], matrix.t())
        return logits

    def _sums(self, ctxs: Ctxs, pairs: Any) -> list[chunks.Sums]:
        """The gradients of each pair, and in the first that of the bias."""
        return [chunks.Sums(*pairs[0], self._needs(ctxs), self._onednn)]

    @staticmethod
    def _add(sums: Any, pairs: Any, rows: slice, logits: Tensor) -> None:
        """Add the gradients of a chunk, of which ``logits`` is that of the logits."""
        for of_pair, (x, _) in zip(sums, pairs, strict=True):
            of_pair.add(rows, x[rows], logits)

    def _linear_grads(self, ctx: Any, sums: Any, saved: Any) -> tuple[Tensor | None, ...]:
        """The gradients of the input and of the linear's parameters, from what it saved."""
        return sums[0].dx, sums[0].dw


def _joined(parts: Any) -> list[Tensor | None]:
    """The same tensors of all chunks."""
    return [None if each[0] is None else torch.cat(each) for each in zip(*parts, strict=True)]


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


def fusions(op: type, build: type, said: str = "", linear: type = BasicLinear) -> list[Fusion]:
    """The fusions of a linear and an op of log-probabilities; the first of those that fit is used.

    Args:
        op: The op.
        build: The fused op.
        said: What their names say of it.
        linear: The linear.
    """
    pattern, name = (linear, Optional(Bias), op), f"linear+log-probability{said}"
    again = computed_again(pattern, build, _pays, name)
    return [*by_chunks(pattern, build, _frozen, name), again]


JOINT = fusions(TokenLogProb, LinearLogProb)
