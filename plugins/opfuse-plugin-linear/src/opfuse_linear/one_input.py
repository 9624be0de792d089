"""The backward of three linears of one input, such as the query, key and value of attention.

In a chain, an extra output keeps the input, and a swap behind the linear brings it back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from opfuse import Fusion, Optional
from opfuse.core.authoring import added
from opfuse.ops import BasicLinear, Bias, MakeExtraOutput, SwapExtraInput

from . import conditions, kernels
from .fused import Ctxs, Extras, Products


class _Part(NamedTuple):
    """One of the linears, by the places of its ops; None: it has none.

    Attributes:
        linear: The linear.
        bias: Its bias.
        fork: The extra output before it.
        swap: The swap behind it.
    """

    linear: int
    bias: int | None
    fork: int | None
    swap: int | None


def _parts(ops: Sequence[Any]) -> Iterator[_Part]:
    """Each linear, the last first."""
    last = len(ops) - 1
    for i in reversed([i for i, op in enumerate(ops) if isinstance(op, BasicLinear)]):
        bias = i + 1 if isinstance(ops[min(i + 1, last)], Bias) else None
        end = bias or i
        yield _Part(i, bias, *((i - 1, end + 1) if end < last else (None, None)))


class BackwardLinearsOfOneInput(Products):
    """The gradients of the input are added up by the products, in place.

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
        self._wiring = tuple(_parts(basic_ops)), sources

    def fuser_backward(
        self, basic_op_ctxs: Ctxs, grad_output: Tensor, *, basic_op_grad_extra_outputs: Extras
    ) -> tuple[Tensor | None, Any, Any]:
        """See :meth:`opfuse.FusibleOperation.fuser_backward`."""
        parts, sources = self._wiring
        of_params: list[Any] = [()] * len(basic_op_ctxs)
        of_extras: list[Any] = list(of_params)
        dy: Tensor = grad_output
        dx: Tensor | None = None
        own: dict[int, Tensor] = {}  # gradients of extra outputs that the run itself has made

        def of_output(i: int) -> Tensor | None:
            grad, mine = basic_op_grad_extra_outputs[i][0], own.get(i)
            return grad if mine is None else mine if grad is None else added(mine, grad)

        for linear, bias, fork, swap in parts:
            addend = None
            if fork is not None and swap is not None:
                source = sources.get(swap)
                of_extras[swap] = (dx if source is None else None,)
                if source is not None and dx is not None:
                    own[source] = added(own[source], dx) if source in own else dx
                dy = _or_zeros(of_output(swap), basic_op_ctxs[swap])
                addend = of_output(fork)
            if bias is not None:
                wants = basic_op_ctxs[bias].param_requires_grad[0]
                of_params[bias] = (kernels.bias_grad(dy) if wants else None,)
            x, weight = BasicLinear.saved_operands(basic_op_ctxs[linear])
            flat = [None if t is None else kernels._rows(t) for t in (x, addend)]
            given: dict[str, Any] = dict(
                addend=flat[1], owned=fork in own, ctx=basic_op_ctxs[linear]
            )
            rows, of_weight = kernels.linear_grads(
                kernels._rows(dy), flat[0], weight, onednn=self._onednn, **given
            )
            dx = None if rows is None else rows.view(*dy.shape[:-1], rows.shape[1])
            of_params[linear] = (of_weight,)
        return dx, of_params, of_extras


def _or_zeros(grad: Tensor | None, swapped: Any) -> Tensor:
    if grad is not None:
        return grad
    shape, dtype, device = swapped.like
    return torch.zeros(shape, dtype=dtype, device=device)


_LINEAR = (BasicLinear, Optional(Bias))
_KEPT = (MakeExtraOutput, *_LINEAR, SwapExtraInput)

BACKWARD = [
    Fusion(
        (*_KEPT, *_KEPT, *_LINEAR),
        BackwardLinearsOfOneInput,
        conditions.plain_linear,
        name="linears of one input",
    )
]
