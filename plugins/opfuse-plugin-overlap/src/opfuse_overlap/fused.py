"""The fused ops, and their patterns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from opfuse import Environment, FusedOperation, Fusion, Optional
from opfuse.core.quantization import QuantizedTensor, Usage
from opfuse.core.settings import current
from opfuse.ops import (
    AllGather,
    AllReduce,
    BasicLinear,
    Bias,
    CopyToTensorParallelRegion,
    ParallelLinear,
    ReduceScatter,
)
from opfuse.ops.authoring import added, may_write

from . import conditions, operands, symm_mem
from .operands import Gradients, Rows
from .pieces import DONE, Link, gather_multiply, multiply_reduce, multiply_scatter, wait

PLAIN = Tensor, torch.nn.Parameter
"""A subclass of them has its own operations."""

Ctxs = Sequence[Any]


class _Overlapped(FusedOperation):
    """The base of all: a linear [+ bias] with a collective before or after it.

    It keeps what the linear would keep; of a gathered input, the part of this process.
    """

    grad_input = "fresh"
    adds_to_sum = overlaps = True
    _count: int | None = None
    _by_symm_mem = False
    _splits_input = _splits_output = False  # whether a process has its part of the rows

    def __init__(self, basic_ops: Sequence[Any]) -> None:
        super().__init__(basic_ops)
        classes = [type(op).__mro__ for op in basic_ops]  # torch derives some
        kinds = {BasicLinear, ParallelLinear}
        self._linear = next(i for i, mro in enumerate(classes) if kinds.intersection(mro))
        self._bias = next((i for i, mro in enumerate(classes) if Bias in mro), None)
        self._in_features: int = basic_ops[self._linear].in_features
        self._link = Link(conditions.collective_of(basic_ops))
        self._no_extras = ((),) * len(basic_ops)

    def planned(self, env: Environment) -> None:
        """See :meth:`opfuse.FusedOperation.planned`."""
        self._count = conditions.count_of(env)
        self._by_symm_mem = env.options.get("overlap.provider") == "symm_mem"

    def configurations(self, env: Environment) -> Sequence[Mapping[str, Any]]:
        """See :meth:`opfuse.FusedOperation.configurations`."""
        return conditions.configurations(env)

    def pieces(self, rows: int) -> int:
        """The number of pieces for so many rows of a process."""
        return self._count or conditions.pieces_for(rows)

    def fuser_forward(self, basic_op_ctxs: Ctxs, input_: Any, **given: Any) -> tuple[Tensor, Any]:
        """See :meth:`opfuse.FusibleOperation.fuser_forward`."""
        ctxs, linear = basic_op_ctxs, basic_op_ctxs[self._linear]
        bias = None if self._bias is None else ctxs[self._bias].params[0]
        rows: Rows | None = None
        known = type(input_) in PLAIN or isinstance(input_, QuantizedTensor)
        if known and self._fits(input_.shape) and may_write():  # into the parts of results
            rows, why = self._operands(linear, input_, bias)
            self.notes = f"its input is gathered unquantized: {why}" if why else ""
        linear.apart = rows is None
        if rows is None:  # the ops say what is wrong, or quantize what is gathered
            return self.run_separately(ctxs, input_, **given)
        y = self._forward(rows, bias)
        if current.recorders:
            self._report(ctxs, rows, y)
        return self._shaped(y, input_.shape, forward=True), self._no_extras

    def fuser_backward(
        self, basic_op_ctxs: Ctxs, grad_output: Any, **given: Any
    ) -> tuple[Tensor | None, Any, Any]:
        """See :meth:`opfuse.FusibleOperation.fuser_backward`."""
        ctxs, linear = basic_op_ctxs, basic_op_ctxs[self._linear]
        if linear.apart:
            return self.run_separately_backward(ctxs, grad_output, **given)
        grads: list[Any] = [()] * len(ctxs)
        sums = self._bias is not None and ctxs[self._bias].param_requires_grad[0]
        of = self._gradients(linear, grad_output, sums)

        def of_params() -> None:
            grads[self._linear] = of.of_params()
            if self._bias is not None:
                grads[self._bias] = (of.sums() if sums else None,)

        dx = self._backward(of, of_params)
        if dx is not None:
            dx = self._shaped(dx, grad_output.shape, forward=False)
        return dx, grads, self._no_extras

    def _shaped(self, matrix: Tensor, given: torch.Size, *, forward: bool) -> Tensor:
        """A result in the shape that belongs to that of what was given."""
        if len(given) < 3:
            return matrix if len(given) == 2 else matrix.view(-1)
        rows, first, others = matrix.shape[0], given[0], given[1:-1]
        if self._splits_input or self._splits_output:
            grows = self._splits_input if forward else self._splits_output
            first = first * self._link.size if grows else first // self._link.size
        assert rows == first * others.numel()
        return matrix.view(first, *others, matrix.shape[1])

    def _report(self, ctxs: Ctxs, rows: Rows, y: Tensor) -> None:
        """Tell reports what a process sends.

        Of codes in the backward, one copy counts, and no scales.
        """
        linear, place = ctxs[self._linear], 0 if self._linear else len(ctxs) - 1
        others = (self._link.size - 1) / self._link.size
        forward, backward = self._sends(linear, rows, y, 1 if _is_coded(linear) else y.itemsize)
        if self._splits_output and self._bias is not None and _is_coded(linear):
            wanted = ctxs[self._bias].param_requires_grad[0]
            backward += wanted * 2 * y.shape[1] * max(y.itemsize, 4)
        if self._splits_output and _is_coded(linear) and linear.requires_grad:
            usage = Usage(linear.input_requires_grad, linear.param_requires_grad[0])
            if why := linear.quantizers["grad_output"].why_whole(y.shape, usage):
                self.notes = f"the gradient of its output is gathered unquantized: {why}"
        op: Any = self.basic_ops[place]
        op.report(ctxs[place], others * forward, others * backward)

    def _sends(self, ctx: Any, rows: Rows, y: Tensor, size: int) -> tuple[int, int]:
        """The bytes of all rows that are sent in each pass; a sum goes there and back.

        Args:
            ctx: The context of the linear.
            rows: The operands.
            y: The output, a matrix.
            size: The bytes of a number of its gradient.
        """
        raise NotImplementedError

    def _fits(self, shape: torch.Size) -> bool:
        """Whether the collective takes an input of this shape."""
        return True

    def _operands(self, ctx: Any, x: Any, bias: Tensor | None) -> tuple[Rows | None, str]:
        """The operands of the forward, or why the ops run one after the other."""
        return operands.local(ctx, x, bias), ""

    def _gradients(self, ctx: Any, dy: Any, sums: bool) -> Gradients:
        """The operands of the backward."""
        return operands.gradients(self._link, ctx, dy, not self._splits_output, sums)

    def _forward(self, rows: Rows, bias: Tensor | None) -> Tensor:
        """The output, a matrix."""
        raise NotImplementedError

    def _backward(self, of: Gradients, of_params: Callable[[], None]) -> Tensor | None:
        """The gradient of the input, a matrix; None: it is not needed.

        Args:
            of: The operands.
            of_params: To be called for the gradients of the parameters.
        """
        raise NotImplementedError


class GatherLinear(_Overlapped):
    """All-gather + linear [+ bias].

    Forward: own rows are multiplied while the others' arrive. Backward: the input is gathered
    again beside the product for its gradient, and that is scattered beside the product for the
    weight's.
    """

    _splits_input = True

    def _fits(self, shape: torch.Size) -> bool:
        return len(shape) > 1

    def _operands(self, ctx: Any, x: Any, bias: Tensor | None) -> tuple[Rows | None, str]:
        return operands.to_gather(self._link, ctx, x, bias)

    def _sends(self, ctx: Any, rows: Rows, y: Tensor, size: int) -> tuple[int, int]:
        lines = self._link.size * rows.lines.nbytes
        dx = y.shape[0] * self._in_features * y.itemsize
        return lines, any(ctx.param_requires_grad) * lines + ctx.input_requires_grad * dx

    def _forward(self, rows: Rows, bias: Tensor | None) -> Tensor:
        link, here = self._link, rows.lines.shape[0]
        if self._by_symm_mem:
            out, _ = symm_mem.gather_multiply(link, rows.lines, rows.weight.t())
            return out if bias is None else added(out, bias)
        out, count = rows.empty(link.size * here), self.pieces(here)
        gather_multiply(link, rows.lines, count, rows.multiply, out, height=rows.height)
        return out

    def _backward(self, of: Gradients, of_params: Callable[[], None]) -> Tensor | None:
        link, dx, pending = self._link, None, []
        of.gather_input()
        if of.weight is not None and self._by_symm_mem:
            dx = symm_mem.multiply_scatter(link, of.lines, of.weight)
        elif of.weight is not None:
            here = of.count // link.size
            dx = of.empty(here)
            pending = multiply_scatter(link, of.lines, self.pieces(here), of.multiply, dx)
        of_params()
        wait(pending)
        return dx


class CopyLinear(_Overlapped):
    """Copy to the tensor-parallel region + linear [+ bias].

    Forward: nothing is sent. Backward: the gradient of the input is added up beside the product for
    the weight's.
    """

    def _sends(self, ctx: Any, rows: Rows, y: Tensor, size: int) -> tuple[int, int]:
        dx = y.shape[0] * self._in_features * y.itemsize
        return 0, 2 * dx * ctx.input_requires_grad

    def _forward(self, rows: Rows, bias: Tensor | None) -> Tensor:
        out = rows.empty(rows.lines.shape[0])
        rows.multiply(rows.lines, out)
        return out

    def _backward(self, of: Gradients, of_params: Callable[[], None]) -> Tensor | None:
        dx, pending = None, []
        if of.weight is not None:
            here = of.count
            dx = of.empty(here)
            pending = multiply_reduce(self._link, of.lines, self.pieces(here), of.multiply, dx)
        of_params()
        wait(pending)
        return dx


class LinearReduce(_Overlapped):
    """Linear [+ bias] + all-reduce.

    Forward: each piece is added up while the next one is multiplied. Backward: nothing is sent.
    """

    def _sends(self, ctx: Any, rows: Rows, y: Tensor, size: int) -> tuple[int, int]:
        return 2 * y.nbytes, 0

    def _forward(self, rows: Rows, bias: Tensor | None) -> Tensor:
        here = rows.lines.shape[0]
        out = rows.empty(here)
        wait(multiply_reduce(self._link, rows.lines, self.pieces(here), rows.multiply, out))
        return out

    def _backward(self, of: Gradients, of_params: Callable[[], None]) -> Tensor | None:
        dx = None
        if of.weight is not None:
            dx = of.empty(of.count)
            of.multiply(of.lines, dx)
        of_params()
        return dx


class LinearScatter(_Overlapped):
    """Linear [+ bias] + reduce-scatter.

    Forward: each piece is scattered while the next one is multiplied. Backward: own rows of the
    gradient are multiplied while the others' arrive.
    """

    _splits_output = True

    def _fits(self, shape: torch.Size) -> bool:
        return len(shape) > 1 and not shape[0] % self._link.size

    def _sends(self, ctx: Any, rows: Rows, y: Tensor, size: int) -> tuple[int, int]:
        return self._link.size * y.nbytes, self._link.size * y.numel() * size

    def _forward(self, rows: Rows, bias: Tensor | None) -> Tensor:
        link, here = self._link, rows.lines.shape[0] // self._link.size
        if not self._by_symm_mem:
            out, count = rows.empty(here), self.pieces(here)
            wait(multiply_scatter(link, rows.lines, count, rows.multiply, out))
            return out
        total = None if bias is None else bias.clone()
        adding = DONE if total is None else link.reduce(total)
        out = symm_mem.multiply_scatter(link, rows.lines, rows.weight.t())
        adding.wait()
        return out if total is None else added(out, total)

    def _backward(self, of: Gradients, of_params: Callable[[], None]) -> Tensor | None:
        link, lines = self._link, None
        if of.weight is None:
            dx = None
            lines, pending = link.gather(of.lines) if of.keeps_lines else (None, DONE)
            of.gather_columns()
            pending.wait()
        elif of.is_whole:
            dx = of.empty(of.count)
            of.multiply(of.lines, dx)
        elif self._by_symm_mem:
            dx, lines = symm_mem.gather_multiply(link, of.lines, of.weight, of.keeps_lines)
        else:
            dx = of.empty(link.size * of.count)
            given = link, of.lines, self.pieces(of.count), of.multiply, dx
            how: Any = {"keep": of.keeps_lines, "height": of.height}
            lines = gather_multiply(*given, **how, meanwhile=of.gather_columns)
        if lines is not None:
            of.arrived(lines)
        of_params()
        return dx


class _SideBySide(_Overlapped):
    """The same with several linears of one input, such as gate and up."""

    def _operands(self, ctx: Any, x: Any, bias: Tensor | None) -> tuple[Rows | None, str]:
        op: Any = self.basic_ops[1]
        return operands.side_by_side(op, ctx, x), ""

    def _gradients(self, ctx: Any, dy: Any, sums: bool) -> Gradients:
        found = operands.GradientsSideBySide(self._link, ctx, dy, True)
        found.op = self.basic_ops[1]  # type: ignore[assignment]
        return found


class GatherParallelLinear(_SideBySide, GatherLinear):
    """All-gather + linears side by side; see :class:`GatherLinear`."""


class CopyParallelLinear(_SideBySide, CopyLinear):
    """Copy to the tensor-parallel region + linears side by side; see :class:`CopyLinear`."""


def _is_coded(ctx: Any) -> bool:
    return bool(ctx.quantizers) and ctx.backward_override is None


def _fusion(name: str, pattern: Any, cls: Any) -> Fusion:
    given: Any = {"name": name, "needs": ("rows",), "declares": ("casts",)}
    return Fusion(pattern, cls, conditions.runs, conditions.benefit, **given)


_LINEAR = BasicLinear, Optional(Bias)

JOINT = [
    _fusion("gather+linear", (AllGather, *_LINEAR), GatherLinear),
    _fusion("copy+linear", (CopyToTensorParallelRegion, *_LINEAR), CopyLinear),
    _fusion("gather+parallel linear", (AllGather, ParallelLinear), GatherParallelLinear),
    _fusion(
        "copy+parallel linear", (CopyToTensorParallelRegion, ParallelLinear), CopyParallelLinear
    ),
    _fusion("linear+scatter", (*_LINEAR, ReduceScatter), LinearScatter),
    _fusion("linear+reduce", (*_LINEAR, AllReduce), LinearReduce),
]
