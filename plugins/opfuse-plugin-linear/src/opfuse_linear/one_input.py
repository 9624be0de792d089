"""The backward of a linear whose input others read, too, and of three linears of one input.

Such are the query, key and value of attention. In a chain, an extra output keeps the input, and a
swap behind the linear brings it back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from opfuse import Fusion, Optional
from opfuse.ops import BasicLinear, Bias, MakeExtraOutput, SwapExtraInput
from opfuse.ops.authoring import added

from . import conditions, kernels
from .fused import Ctxs, Extras, Products


class BackwardSharedInput(Products):
    """The gradients of the input are added up by the products, in place if the run has made both.

    In half precision the sum is rounded once for each product. The separate ops round each product
    and each sum.
    """

    grad_input = "fresh"

    def __init__(self, basic_ops: Sequence[Any]) -> None:
        super().__init__(basic_ops)
        forks = [(i, op) for i, op in enumerate(basic_ops) if op.num_extra_outputs]
        made = {op.extra_output_channels[0]: i for i, op in forks}
        read = {i: op.extra_input_channels[0] for i, op in forks if op.num_extra_inputs}
        sources = {i: made[name] for i, name in read.items() if name is not None and name in made}
        self._wiring = tuple(basic_ops), sources

    def fuser_backward(
        self, basic_op_ctxs: Ctxs, grad_output: Tensor, *, basic_op_grad_extra_outputs: Extras
    ) -> tuple[Tensor | None, Any, Any]:
        """See :meth:`opfuse.FusibleOperation.fuser_backward`."""
        ops, sources = self._wiring
        of_params: list[Any] = [()] * len(ops)
        of_extras: list[Any] = [()] * len(ops)
        grad: Any = grad_output
        own: dict[int, Tensor] = {}  # gradients of extra outputs that the run itself has made

        def of_output(i: int) -> Tensor | None:
            given, mine = basic_op_grad_extra_outputs[i][0], own.get(i)
            return given if mine is None else mine if given is None else added(mine, given)

        for i in reversed(range(len(ops))):
            op, ctx = ops[i], basic_op_ctxs[i]
            if isinstance(op, SwapExtraInput):
                source = sources.get(i)
                of_extras[i] = (grad if source is None else None,)
                if source is not None and grad is not None:
                    own[source] = added(own[source], grad) if source in own else grad
                grad = of_output(i)
                if grad is None:
                    shape, dtype, device = ctx.like  # type: ignore[attr-defined]
                    grad = torch.zeros(shape, dtype=dtype, device=device)
            elif isinstance(op, Bias):
                wants = ctx.param_requires_grad[0]
                of_params[i] = (kernels.bias_grad(grad) if wants else None,)
            elif isinstance(op, BasicLinear):
                kept = i > 0 and isinstance(ops[i - 1], MakeExtraOutput)
                addend = of_output(i - 1) if kept else None
                grad, of_weight = self._grads(ctx, grad, addend, kept and i - 1 in own)
                of_params[i] = (of_weight,)
        return grad, of_params, of_extras

    def _grads(self, ctx: Any, dy: Tensor, addend: Tensor | None, owned: bool) -> tuple[Any, Any]:
        """The gradients of a linear's input, plus an addend of any origin, and of its weight."""
        x, weight = BasicLinear.saved_operands(ctx)
        rows = [None if t is None else kernels._rows(t) for t in (x, addend)]
        given: Any = dict(addend=rows[1], owned=owned, onednn=self._onednn, ctx=ctx)
        dx, of_weight = kernels.linear_grads(kernels._rows(dy), rows[0], weight, **given)
        return None if dx is None else dx.view(*dy.shape[:-1], dx.shape[1]), of_weight


_LINEAR = (BasicLinear, Optional(Bias))
_KEPT = (MakeExtraOutput, *_LINEAR, SwapExtraInput)

_THREE = (*_KEPT, *_KEPT, *_LINEAR)
_ONE = (MakeExtraOutput, BasicLinear)

BACKWARD = [
    Fusion(_ONE, BackwardSharedInput, conditions.plain_linear, name="linear+add"),
    Fusion(_THREE, BackwardSharedInput, conditions.plain_linear, name="linears of one input"),
]
