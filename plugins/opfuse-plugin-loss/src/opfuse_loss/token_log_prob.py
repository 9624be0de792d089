"""Log-probabilities of tokens whose logits are there: read once, and once more for the gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from opfuse import Environment, FusedOperation, Fusion, OperationContext
from opfuse.ops import TokenLogProb
from opfuse.ops.authoring import rows_of
from opfuse.ops.token_log_prob import grads_of_rows, row_log_probs, row_logit_gradients

from .conditions import PREDICTED, cannot_run, no_top_tokens
from .cross_entropy import dense_rows, takes

Ctxs = list[OperationContext]


class LogProbByKernel(FusedOperation):
    """Log-probabilities in two kernels: one reads the logits, the other reads them and writes once.

    Logits, tokens, and two to four numbers of each row are kept. Nothing is overwritten, since
    others may have the logits. ``linear+log-probability`` writes their gradient over its own.
    """

    grad_input = "fresh"

    def fuser_forward(
        self, basic_op_ctxs: Ctxs, input_: Tensor, *, basic_op_extra_inputs: Any, **unused: Any
    ) -> tuple[Tensor, Any]:
        """See :meth:`opfuse.FusibleOperation.fuser_forward`."""
        op: Any = self.basic_ops[0]
        ctx: Any = basic_op_ctxs[0]
        ((tokens,),) = basic_op_extra_inputs
        op.check_targets(tokens, input_.shape)
        numbers, flat = op.numbers_of(), tokens.flatten().long().contiguous()
        keep, kept = ctx.requires_grad and ctx.input_requires_grad, ()
        if takes(input_):
            from .kernels import softmax, token_statistics  # they import Triton

            who = "TokenLogProb: a token"
            softmax.check_targets(flat, input_.shape[-1], numbers.ignore_index, who)
            rows = dense_rows(input_)
            found, kept = token_statistics.row_statistics(rows, flat, numbers, keep)
        else:
            found = row_log_probs(rows_of(input_), flat, numbers)
        if ctx.requires_grad:
            ctx.numbers = numbers
            ctx.to_save = (input_, tokens, *kept) if keep else (None, None)
        y, *extras = [each.view(tokens.shape) for each in found]
        return y, (tuple(extras),)

    def fuser_backward(
        self, basic_op_ctxs: Ctxs, grad_output: Tensor, *, basic_op_grad_extra_outputs: Any
    ) -> tuple[Tensor | None, Any, Any]:
        """See :meth:`opfuse.FusibleOperation.fuser_backward`."""
        ctx: Any = basic_op_ctxs[0]
        x, tokens, *kept = ctx.saved_tensors
        if x is None:
            return None, ((),), ((None,),)
        flat = tokens.flatten().long().contiguous()
        grads = grads_of_rows((grad_output, *basic_op_grad_extra_outputs[0]), tokens)
        if not kept:
            dx = row_logit_gradients(rows_of(x), flat, grads, ctx.numbers)
        else:
            from .kernels import token_statistics

            dx = token_statistics.row_gradients(
                dense_rows(x), flat, grads, tuple(kept), ctx.numbers
            )
        return dx.view(x.shape), ((),), ((None,),)


def _pays(ops: Sequence[Any], env: Environment) -> bool | str:
    """Asked while planning."""
    if env.compiling:
        return "under torch.compile the compiler fuses the log-probabilities"
    refused = cannot_run(env) or no_top_tokens(ops[0], env)
    return refused or PREDICTED.why_not("log-probabilities", env) or True


# a fusion that takes the linear too goes first
JOINT = [Fusion((TokenLogProb,), LogProbByKernel, _pays, benefit=1, name="log-probabilities")]
