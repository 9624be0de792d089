"""A linear layer and the loss after it, as one op that never holds all logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from opfuse import Environment, OperationContext, Optional
from opfuse.ops import BasicLinear, Bias, CrossEntropy, libraries
from opfuse.ops.authoring import rows_of, wide
from opfuse.ops.cross_entropy import mean_divisor, reduced, row_losses, row_weights

from . import chunks
from .conditions import by_chunks, cannot_run, chunks_pay, computed_again, gradients_in_forward

Ctxs = list[OperationContext]


class LinearLoss(libraries.Products):
    """Linear [+ bias] + cross entropy, chunk by chunk of rows.

    The forward computes the gradients too, for a loss whose gradient is 1, and the backward scales
    them. Neither the input nor the logits are kept.
    """

    grad_input = "fresh"
    _softmax: Any = staticmethod(chunks.softmax_gradient)
    _row_losses: Any = staticmethod(row_losses)
    _check: Any = None

    def __init__(self, basic_ops: Sequence[Any]) -> None:
        super().__init__(basic_ops)
        # in a tuple, since looking up a module's attributes is slow
        self._parts = basic_ops[-1], len(basic_ops) == 3, ((),) * len(basic_ops)

    def planned(self, env: Environment) -> None:
        """See :meth:`opfuse.FusedOperation.planned`."""
        super().planned(env)
        self._plan_rows(env)

    def _plan_rows(self, env: Environment) -> None:
        """Choose what computes rows of logits: a kernel, if one can run."""
        if not cannot_run(env):
            from .kernels import softmax  # this imports Triton

            self._softmax, self._check = softmax.softmax_gradient, softmax.check_targets
            self._row_losses = lambda *given: softmax.row_losses(*given)[0]

    def fuser_forward(
        self, basic_op_ctxs: Ctxs, input_: Tensor, *, basic_op_extra_inputs: Any, **unused: Any
    ) -> tuple[Tensor, Any]:
        """See :meth:`opfuse.FusibleOperation.fuser_forward`."""
        _, has_bias, no_extras = self._parts
        linear, last = basic_op_ctxs[0], basic_op_ctxs[-1]
        given = basic_op_extra_inputs[-1]
        x, weight = BasicLinear.operands(linear, input_)
        (bias,) = basic_op_ctxs[1].params if has_bias else (None,)
        shape, rows = torch.Size((*x.shape[:-1], weight.shape[0])), rows_of(x)
        flat, numbers = self._targets(given, shape, last.requires_grad)
        if last.requires_grad:
            losses = self._differentiated(basic_op_ctxs, rows, weight, bias, flat, numbers)
            left: Any = last
            left.shape, params = input_.shape, [ctx.params[0] for ctx in basic_op_ctxs[:-1]]
            left.dtypes = [tensor.dtype for tensor in (input_, *params)]
        else:
            losses = self._losses(rows, weight, bias, flat, numbers)
        return self._reduced(losses, given, numbers, last, x), no_extras

    def _targets(self, given: Any, shape: torch.Size, recorded: bool) -> tuple[Tensor, Any]:
        """The target of each row, ``(rows,)``, and the numbers of the op."""
        op, (targets,) = self._parts[0], given
        op.check_targets(targets, shape)
        flat, numbers = targets.flatten().long().contiguous(), op.numbers_of()
        if self._check is not None:
            self._check(flat, shape[-1], numbers.ignore_index)
        return flat, numbers

    def _reduced(self, losses: Tensor, given: Any, numbers: Any, ctx: Any, x: Tensor) -> Tensor:
        """The result, from the loss of each row."""
        result: Tensor = self._parts[0].in_dtype(reduced(losses, given[0], numbers), ctx, x)
        return result

    def _losses(self, x: Tensor, weight: Any, bias: Any, targets: Any, numbers: Any) -> Tensor:
        """The loss of each row, without a gradient."""
        found = [
            self._row_losses(libraries.linear(part, weight, bias, self._onednn), of_part, numbers)
            for _, part, of_part in chunks.chunks(x, targets, weight.shape[0])
        ]
        return torch.cat(found)

    def _differentiated(
        self, ctxs: Any, x: Tensor, weight: Any, bias: Any, targets: Any, numbers: Any
    ) -> Tensor:
        """The loss of each row; leaves the gradients, and the scale that they still need."""
        linear, *middle, last = ctxs
        dtype, as_sum = wide(x.dtype), numbers._replace(reduction="sum")
        lift = x.new_ones((), dtype=dtype)
        if x.dtype is torch.float16:
            lift = chunks.lift(numbers, lift)
        weights = row_weights(lift, targets, as_sum)
        losses, sums = self._gradients(ctxs, x, weight, bias, targets, weights, numbers)
        scale = mean_divisor(targets, numbers, dtype) if numbers.reduction == "mean" else 1.0
        linear.to_save = sums.dx, sums.dw
        for ctx in middle:
            ctx.to_save = (sums.db,)
        last.to_save = ((lift * scale).reciprocal(),)
        return losses

    def fuser_backward(
        self, basic_op_ctxs: Ctxs, grad_output: Tensor, **unused: Any
    ) -> tuple[Tensor | None, Any, Any]:
        """See :meth:`opfuse.FusibleOperation.fuser_backward`."""
        saved: Any = [ctx.saved_tensors for ctx in basic_op_ctxs]
        (dx, dw), *of_bias, (scale,) = saved
        scale = scale * grad_output.to(scale.dtype)
        return self._result(basic_op_ctxs, (dx, dw, *[db for (db,) in of_bias]), scale)

    def _gradients(self, ctxs: Any, *given: Any) -> tuple[Tensor, chunks.Sums]:
        """:func:`opfuse_loss.chunks.gradients`, of those that are needed."""
        needs = self._needs(ctxs)
        return chunks.gradients(*given, needs, onednn=self._onednn, softmax=self._softmax)

    @staticmethod
    def _needs(ctxs: Any) -> tuple[bool, bool, bool]:
        """Which gradients are needed: of the input, of the weight, of the bias."""
        linear, *middle, _ = ctxs
        return (
            linear.requires_grad and linear.input_requires_grad,
            linear.requires_grad and linear.param_requires_grad[0],
            any(ctx.param_requires_grad[0] for ctx in middle),
        )

    def _result(self, ctxs: Any, grads: Any, scale: Any) -> tuple[Tensor | None, Any, Any]:
        """The result of the backward: the gradients of input and parameters, scaled."""
        last = ctxs[-1]
        dx, *of_params = [
            chunks.scaled(grad, scale, dtype)
            for grad, dtype in zip(grads, last.dtypes, strict=True)
        ]
        of_extras = [*[()] * (len(ctxs) - 1), (None,) * self._parts[0].num_extra_inputs]
        dx = None if dx is None else dx.view(last.shape)
        left = iter(of_params)
        of_ops = [tuple(next(left) for _ in ctx.param_requires_grad) for ctx in ctxs]
        return dx, of_ops, of_extras


class LinearLossAgain(LinearLoss):
    """The same, with the logits computed again in the backward, chunk by chunk.

    For a loss per row, whose gradient must be known first. The input is kept.
    """

    def fuser_forward(
        self, basic_op_ctxs: Ctxs, input_: Tensor, *, basic_op_extra_inputs: Any, **unused: Any
    ) -> tuple[Tensor, Any]:
        """See :meth:`opfuse.FusibleOperation.fuser_forward`."""
        given = {"basic_op_extra_inputs": basic_op_extra_inputs}
        if is_of_bias_alone(basic_op_ctxs):
            return self.run_separately(basic_op_ctxs, input_, **given)
        return super().fuser_forward(basic_op_ctxs, input_, **given)

    def _differentiated(
        self, ctxs: Any, x: Tensor, weight: Any, bias: Any, targets: Any, numbers: Any
    ) -> Tensor:
        linear, *middle, last = ctxs
        kept = linear.to_save[1] if linear.to_save and linear.to_save[1] is not None else weight
        linear.to_save = x, kept
        for ctx in middle:
            ctx.to_save = (bias,)
        last.to_save, last.numbers = (targets,), numbers
        return self._losses(x, weight, bias, targets, numbers)

    def fuser_backward(
        self, basic_op_ctxs: Ctxs, grad_output: Tensor, **given: Any
    ) -> tuple[Tensor | None, Any, Any]:
        """See :meth:`opfuse.FusibleOperation.fuser_backward`."""
        if is_of_bias_alone(basic_op_ctxs):
            return self.run_separately_backward(basic_op_ctxs, grad_output, **given)
        saved: Any = [ctx.saved_tensors for ctx in basic_op_ctxs]
        (x, weight), *of_bias, (targets,) = saved
        (bias,) = of_bias[0] if of_bias else (None,)
        numbers = basic_op_ctxs[-1].numbers  # type: ignore[attr-defined]
        weights = row_weights(grad_output.to(wide(x.dtype)), targets, numbers)
        operands = x, weight.to(x.dtype), bias, targets, weights, numbers
        _, sums = self._gradients(basic_op_ctxs, *operands)
        grads = (sums.dx, sums.dw, sums.db)[: len(basic_op_ctxs)]
        return self._result(basic_op_ctxs, grads, None)


def is_of_bias_alone(ctxs: Any) -> bool:
    """Whether a gradient is asked of the bias alone, for which logits are less than operands."""
    linear, *_, last = ctxs
    return bool(last.requires_grad) and not linear.requires_grad


def in_forward(ops: Any, env: Environment) -> bool | str:
    """Whether the forward may compute the gradients; asked while planning."""
    if (pays := chunks_pay(ops, env)) is not True:
        return pays
    if env.requires_grad and ops[-1].reduction == "none":
        return "what the gradient of each row's loss is scaled by is known in the backward only"
    return gradients_in_forward(ops, env)


_PATTERN = BasicLinear, Optional(Bias), CrossEntropy

JOINT = [
    *by_chunks(_PATTERN, LinearLoss, in_forward, "linear+loss", needs=("rows",)),
    computed_again(_PATTERN, LinearLossAgain, chunks_pay, "linear+loss"),
]
