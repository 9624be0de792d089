"""The fused ops, and their patterns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from opfuse import Environment, FusedOperation, Fusion, Optional
from opfuse.ops import (
    AllGather,
    AllReduce,
    BasicLinear,
    Bias,
    CopyToTensorParallelRegion,
    ReduceScatter,
)

from . import conditions, kernels, symm_mem
from .pieces import (
    DONE,
    Link,
    Multiply,
    empty,
    gather_multiply,
    multiply_reduce,
    multiply_scatter,
    wait,
)

PLAIN = Tensor, torch.nn.Parameter
"""A subclass of them has its own operations."""

Ctxs = Sequence[Any]


class _Overlapped(FusedOperation):
    """The base of all: a linear with a collective before or after it.

    It keeps what the linear would keep; of a gathered input, the part of this process.
    """

    grad_input = "fresh"
    adds_to_sum = True
    _count: int | None = None
    _by_symm_mem = False
    _changes_rows = False

    def __init__(self, basic_ops: Sequence[Any]) -> None:
        super().__init__(basic_ops)
        kinds = [type(op).__mro__ for op in basic_ops]
        # the places of the linear and of its bias
        self._linear = next(i for i, mro in enumerate(kinds) if BasicLinear in mro)
        self._bias = next((i for i, mro in enumerate(kinds) if Bias in mro), None)
        self._link = Link(conditions.collective_of(basic_ops))
        self._no_extras = ((),) * len(basic_ops)

    def planned(self, env: Environment) -> None:
        """See :meth:`opfuse.FusedOperation.planned`."""
        self._count = conditions.count_of(env)
        self._by_symm_mem = env.options.get("overlap.provider") == "symm_mem"

    def configurations(self, env: Environment) -> Sequence[Mapping[str, Any]]:
        """See :meth:`opfuse.FusedOperation.configurations`."""
        return conditions.configurations(list(self.basic_ops), env)

    def pieces(self, rows: int) -> int:
        """The number of pieces for so many rows of a process."""
        return self._count or conditions.pieces_for(rows)

    def fuser_forward(self, basic_op_ctxs: Ctxs, input_: Any, **given: Any) -> tuple[Tensor, Any]:
        """See :meth:`opfuse.FusibleOperation.fuser_forward`."""
        ctxs, linear = basic_op_ctxs, basic_op_ctxs[self._linear]
        linear.apart = type(input_) not in PLAIN or not self._fits(input_)
        if linear.apart:  # the ops say what is wrong
            return self.run_separately(ctxs, input_, **given)
        x, weight = BasicLinear.operands(linear, input_)
        bias = None if self._bias is None else ctxs[self._bias].params[0].to(x.dtype)
        y = self._forward(rows_of(x), weight, bias)
        return self._shaped(y, x.shape, forward=True), self._no_extras

    def fuser_backward(
        self, basic_op_ctxs: Ctxs, grad_output: Any, **given: Any
    ) -> tuple[Tensor | None, Any, Any]:
        """See :meth:`opfuse.FusibleOperation.fuser_backward`."""
        ctxs, linear = basic_op_ctxs, basic_op_ctxs[self._linear]
        if linear.apart:
            return self.run_separately_backward(ctxs, grad_output, **given)
        x, weight = BasicLinear.saved_operands(linear) if linear.requires_grad else (None, None)
        dy = grad_output if linear.dtype is None else grad_output.to(linear.dtype)
        grads: list[Any] = [()] * len(ctxs)
        dx = self._backward(ctxs, rows_of(dy), None if x is None else rows_of(x), weight, grads)
        if dx is not None:
            dx = self._shaped(dx, grad_output.shape, forward=False)
        return dx, grads, self._no_extras

    def _of_params(self, ctxs: Ctxs, dy: Tensor, x: Tensor | None, grads: list[Any]) -> None:
        """The gradients of weight and bias, from all rows."""
        linear = ctxs[self._linear]
        grads[self._linear] = (None if x is None else kernels.grad_of_weight(linear, dy, x),)
        if self._bias is not None:
            wanted = ctxs[self._bias].param_requires_grad[0]
            grads[self._bias] = (dy.sum(0) if wanted else None,)

    def _shaped(self, matrix: Tensor, given: torch.Size, *, forward: bool) -> Tensor:
        """A result in the shape that belongs to that of what was given."""
        if len(given) < 3:
            return matrix if len(given) == 2 else matrix.view(-1)
        first, size = given[0], self._link.size
        if self._changes_rows:
            first = first * size if forward == (self._linear > 0) else first // size
        return matrix.view(first, *given[1:-1], matrix.shape[1])

    def _fits(self, x: Tensor) -> bool:
        """Whether the collective takes the rows of an input."""
        return True

    def _forward(self, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The output, from the operands and the bias in one dtype, all matrices but the bias."""
        raise NotImplementedError

    def _backward(
        self, ctxs: Ctxs, dy: Tensor, x: Tensor | None, weight: Tensor | None, grads: list[Any]
    ) -> Tensor | None:
        """The gradient of the input as a matrix; fills in those of the parameters.

        Args:
            ctxs: The contexts of the basic ops.
            dy: The gradient of the output, a matrix.
            x: The input, likewise; None: the weight needs no gradient.
            weight: The weight; None: the input needs no gradient.
            grads: For each basic op, the gradients of its parameters.
        """
        raise NotImplementedError


class GatherLinear(_Overlapped):
    """All-gather + linear [+ bias].

    Forward: own rows are multiplied while the others' arrive. Backward: the input is gathered
    again beside the product for its gradient, and that is scattered beside the product for the
    weight's.
    """

    _changes_rows = True

    def _fits(self, x: Tensor) -> bool:
        return x.ndim > 1

    def _forward(self, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        link = self._link
        if self._by_symm_mem:
            out, _ = symm_mem.gather_multiply(link, rows, weight.t())
            out = out if bias is None else out.add_(bias)
        else:
            out = empty(rows, link.size * rows.shape[0], weight.shape[0])
            count = self.pieces(rows.shape[0])
            gather_multiply(link, rows, count, by_weight(weight, bias), out)
        return out

    def _backward(
        self, ctxs: Ctxs, dy: Tensor, x: Tensor | None, weight: Tensor | None, grads: list[Any]
    ) -> Tensor | None:
        link, dx, pending = self._link, None, []
        whole, gathering = (None, DONE) if x is None else link.gather(x)
        if weight is not None and self._by_symm_mem:
            dx = symm_mem.multiply_scatter(link, dy, weight)
        elif weight is not None:
            rows = dy.shape[0] // link.size
            dx = empty(dy, rows, weight.shape[1])
            pending = multiply_scatter(link, dy, self.pieces(rows), by_gradient(weight), dx)
        gathering.wait()
        self._of_params(ctxs, dy, whole, grads)
        wait(pending)
        return dx


class CopyLinear(_Overlapped):
    """Copy to the tensor-parallel region + linear [+ bias].

    Forward: nothing is sent. Backward: the gradient of the input is added up beside the product for
    the weight's.
    """

    def _forward(self, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        out = empty(rows, rows.shape[0], weight.shape[0])
        by_weight(weight, bias)(rows, out)
        return out

    def _backward(
        self, ctxs: Ctxs, dy: Tensor, x: Tensor | None, weight: Tensor | None, grads: list[Any]
    ) -> Tensor | None:
        dx, pending = None, []
        if weight is not None:
            dx = empty(dy, dy.shape[0], weight.shape[1])
            count = self.pieces(dy.shape[0])
            pending = multiply_reduce(self._link, dy, count, by_gradient(weight), dx)
        self._of_params(ctxs, dy, x, grads)
        wait(pending)
        return dx


class LinearReduce(_Overlapped):
    """Linear [+ bias] + all-reduce.

    Forward: each piece is added up while the next one is multiplied. Backward: nothing is sent.
    """

    def _forward(self, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        out = empty(rows, rows.shape[0], weight.shape[0])
        count = self.pieces(rows.shape[0])
        wait(multiply_reduce(self._link, rows, count, by_weight(weight, bias), out))
        return out

    def _backward(
        self, ctxs: Ctxs, dy: Tensor, x: Tensor | None, weight: Tensor | None, grads: list[Any]
    ) -> Tensor | None:
        dx = None
        if weight is not None:
            dx = empty(dy, dy.shape[0], weight.shape[1])
            by_gradient(weight)(dy, dx)
        self._of_params(ctxs, dy, x, grads)
        return dx


class LinearScatter(_Overlapped):
    """Linear [+ bias] + reduce-scatter.

    Forward: each piece is scattered while the next one is multiplied. Backward: own rows of the
    gradient are multiplied while the others' arrive.
    """

    _changes_rows = True

    def _fits(self, x: Tensor) -> bool:
        return x.ndim > 1 and not x.shape[0] % self._link.size

    def _forward(self, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        link = self._link
        if self._by_symm_mem:
            total, adding = None, DONE
            if bias is not None:  # the sum of those of all processes
                total = bias.clone()
                adding = link.reduce(total)
            out = symm_mem.multiply_scatter(link, rows, weight.t())
            adding.wait()
            out = out if total is None else out.add_(total)
        else:
            out = empty(rows, rows.shape[0] // link.size, weight.shape[0])
            count = self.pieces(out.shape[0])
            wait(multiply_scatter(link, rows, count, by_weight(weight, bias), out))
        return out

    def _backward(
        self, ctxs: Ctxs, dy: Tensor, x: Tensor | None, weight: Tensor | None, grads: list[Any]
    ) -> Tensor | None:
        link, dx = self._link, None
        biased = self._bias is not None and ctxs[self._bias].param_requires_grad[0]
        keep = biased or x is not None
        whole: Any = None
        if weight is None:
            whole, gathering = link.gather(dy)
            gathering.wait()
        elif self._by_symm_mem:
            dx, whole = symm_mem.gather_multiply(link, dy, weight, keep)
        else:
            dx = empty(dy, link.size * dy.shape[0], weight.shape[1])
            count = self.pieces(dy.shape[0])
            whole = gather_multiply(link, dy, count, by_gradient(weight), dx, keep)
        self._of_params(ctxs, whole, x, grads)
        return dx


def rows_of(x: Tensor) -> Tensor:
    """All dimensions but the last together are the rows."""
    return x if x.ndim == 2 else x.reshape(x.shape[:-1].numel(), x.shape[-1])


def by_weight(weight: Tensor, bias: Tensor | None) -> Multiply:
    """The product of the forward."""
    return lambda rows, out: kernels.product(rows, weight, bias, out)


def by_gradient(weight: Tensor) -> Multiply:
    """The product of the backward for the gradient of the input."""
    return lambda dy, out: kernels.grad_of_input(dy, weight, out)


def _fusion(name: str, pattern: Any, cls: Any) -> Fusion:
    return Fusion(pattern, cls, conditions.runs, conditions.benefit, name=name, needs_rows=True)


_LINEAR = BasicLinear, Optional(Bias)

JOINT = [
    _fusion("gather+linear", (AllGather, *_LINEAR), GatherLinear),
    _fusion("copy+linear", (CopyToTensorParallelRegion, *_LINEAR), CopyLinear),
    _fusion("linear+scatter", (*_LINEAR, ReduceScatter), LinearScatter),
    _fusion("linear+reduce", (*_LINEAR, AllReduce), LinearReduce),
]
