"""The operands of a linear's products: plain tensors, or codes under a recipe.

What a collective gathers are lines: a matrix with a line for each row, of values or of bytes. The
products under a recipe are those of the dequantized values, in fp32, as the op's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from opfuse.core.quantization import COLUMNWISE, ROWWISE, QuantizedTensor, Usage, dequantize
from opfuse.ops import BasicLinear, ParallelLinear

from . import codes, kernels
from .pieces import DONE, Link, Multiply


def rows_of(x: Tensor) -> Tensor:
    """All dimensions but the last together are the rows."""
    return x if x.ndim == 2 else x.reshape(x.shape[:-1].numel(), x.shape[-1])


class Rows(NamedTuple):
    """The input of a product of the forward.

    Attributes:
        lines: A line for each row.
        multiply: The product of lines.
        weight: The weight, plain or dequantized; those of several linears as a list.
        dtype: Of the result.
        height: Of how many rows a piece is a multiple.
    """

    lines: Tensor
    multiply: Multiply
    weight: Any
    dtype: torch.dtype
    height: int = 1

    def empty(self, rows: int) -> Tensor:
        """A place for the result of so many rows."""
        weights = self.weight if isinstance(self.weight, list) else [self.weight]
        size = rows, sum(weight.shape[0] for weight in weights)
        return torch.empty(size, dtype=self.dtype, device=self.lines.device)


def local(ctx: Any, x: Any, bias: Tensor | None) -> Rows:
    """The operands of a forward whose input is not gathered, or gathered as it is.

    Leaves on the context what the backward needs.

    Args:
        ctx: The context of the linear.
        x: The input.
        bias: The bias, or None.
    """
    if ctx.quantizers:
        rows, wide = [each.widened() for each in BasicLinear.quantized_operands(ctx, x)]
        rows = rows_of(rows)
        return Rows(rows, _by_values(wide, bias), wide, ctx.dtype or x.dtype)
    x, weight = BasicLinear.operands(ctx, x)
    added = None if bias is None else bias.to(x.dtype)

    def multiply(rows: Tensor, out: Tensor) -> None:
        kernels.product(rows, weight, added, out)

    return Rows(rows_of(x), multiply, weight, x.dtype)


def side_by_side(op: ParallelLinear, ctx: Any, x: Tensor) -> Rows:
    """The same of several linears of one input, without a recipe."""
    x, weights, biases = op.operands(ctx, x)

    def multiply(rows: Tensor, out: Tensor) -> None:
        for weight, bias, place in zip(weights, biases, op.split(out), strict=True):
            kernels.product(rows, weight, bias, place)

    return Rows(rows_of(x), multiply, list(weights), x.dtype)


def to_gather(link: Link, ctx: Any, x: Tensor, bias: Tensor | None) -> tuple[Rows | None, str]:
    """The operands of a forward whose input has more rows on other processes.

    Args:
        link: The collectives.
        ctx: The context of the linear.
        x: This process's rows.
        bias: The bias, or None.

    Returns:
        They; or None, and a sentence that says why rows are quantized only once they are gathered.
    """
    if not ctx.quantizers or link.size == 1:
        return local(ctx, x, bias), ""
    wanted = ctx.requires_grad and ctx.backward_override is None and ctx.param_requires_grad[0]
    part, why = codes.quantized(link, ctx.quantizers["input"], x, Usage(True, wanted))
    if part is None:
        return None, why
    _, weight = BasicLinear.quantized_operands(ctx, part)
    dtype = ctx.dtype or x.dtype
    if ctx.backward_override == "high_precision" and ctx.requires_grad:
        kept, *others = ctx.to_save
        ctx.to_save = (None if kept is None else x.to(dtype), *others)
    wide = weight.widened()
    by_values = _by_values(wide, bias)

    def multiply(lines: Tensor, out: Tensor) -> None:
        by_values(codes.from_lines(lines, part).widened(), out)

    return Rows(codes.lines_of(part), multiply, wide, dtype, codes.height(part)), ""


def _by_values(weight: Tensor, bias: Tensor | None) -> Multiply:
    """The product of dequantized values; a bias is added to what is rounded, as by the ops."""

    def multiply(rows: Tensor, out: Tensor) -> None:
        wide = torch.empty_like(out, dtype=rows.dtype)
        kernels.product(rows, weight, None, wide)
        y = wide.to(out.dtype)
        out.copy_(y if bias is None else y + bias)

    return multiply


class Gradients:
    """The operands of a backward, plain ones.

    Attributes:
        lines: A line for each row of the gradient of the output.
        dtype: Of the results.
        weight: The weight; None: the gradient of the input is not needed.
        wgrad: Whether that of the weight is.
        is_whole: Whether the lines are of all rows.
        keeps_lines: Whether the gradients of the parameters are those of the lines of all rows.
        height: Of how many rows a piece is a multiple.

    Args:
        link: The collectives.
        ctx: The context of the linear.
        dy: The gradient of the output.
        is_whole: Whether it has all rows.
        sums: Whether its sums over all rows are wanted.
    """

    lines: Any
    height = 1

    def __init__(self, link: Link, ctx: Any, dy: Any, is_whole: bool, sums: bool = False) -> None:
        self._link, self._ctx, self.is_whole = link, ctx, is_whole
        self.dtype = ctx.dtype or dy.dtype
        self._x: Any = None
        self.weight: Any = None
        if ctx.requires_grad:
            self._x, self.weight = self._saved()
        self.wgrad, self._sums = self._x is not None, sums
        self.keeps_lines = self.wgrad or sums
        self._pending: Any = DONE
        self._take(dy)

    def _saved(self) -> tuple[Any, Any]:
        ctx = self._ctx
        if ctx.quantizers:  # the recipe has an override
            kept = [None if t is None else dequantize(t).to(self.dtype) for t in ctx.saved_tensors]
            x, weight = kept
        else:
            x, weight = BasicLinear.saved_operands(ctx)
        return None if x is None else rows_of(x), weight

    def _take(self, dy: Any) -> None:
        self._given = dy.dtype
        self.lines = rows_of(dy.to(self.dtype))

    def sums(self) -> Tensor:
        """The sums of the gradient over all rows."""
        total: Tensor = self.lines.sum(0)
        return total.to(self._given)

    @property
    def count(self) -> int:
        """The number of lines."""
        return int(self.lines.shape[0])

    def empty(self, rows: int) -> Tensor:
        """A place for the gradient of so many rows of the input."""
        size = rows, self._in_features
        return torch.empty(size, dtype=self.dtype, device=self.lines.device)

    @property
    def _in_features(self) -> int:
        return int(self.weight.shape[1])

    def multiply(self, lines: Tensor, out: Tensor) -> None:
        """The gradient of the input, for some lines."""
        kernels.grad_of_input(lines, self.weight, out)

    def gather_input(self) -> None:
        """Start to gather the input again."""
        if self.wgrad:
            self._x, self._pending = self._link.gather(self._x)

    def gather_columns(self) -> None:
        """Start to gather what the product for the weight reads in place of the lines."""

    def arrived(self, lines: Tensor) -> None:
        """Take the lines of all rows."""
        self.lines = lines

    def of_params(self) -> Sequence[Tensor | None]:
        """The gradients of the parameters."""
        self._pending.wait()
        if not self.wgrad:
            return (None,)
        return (kernels.grad_of_weight(self._ctx, self.lines, self._x),)


class CodedGradients(Gradients):
    """The same under a recipe that quantizes the backward."""

    _columns: Any = None
    _totals: Tensor | None = None
    _given: torch.dtype

    def _saved(self) -> tuple[Any, Any]:
        x, weight = self._ctx.saved_tensors
        return x, None if weight is None else weight.widened(COLUMNWISE)

    def _take(self, dy: Any) -> None:
        quantizer, link = self._ctx.quantizers["grad_output"], self._link
        usage = Usage(self.weight is not None, self.wgrad)
        part, self.keeps_lines = None, False
        self._plain = dy
        self.is_whole = self.is_whole or link.size == 1
        if not self.is_whole and any(usage):
            part, why = codes.quantized(link, quantizer, dy, usage)
            if why:
                dy, pending = link.gather(rows_of(dy))
                pending.wait()
                self.is_whole, self._plain = True, dy
        if self._sums and not self.is_whole:
            self._begin_sums()
        if part is not None:
            self._dy, self.height = part, codes.height(part)
            self.keeps_lines = all(usage) and codes.has_one_scale(part)
            self.lines = codes.lines_of(part) if usage.rowwise else None
        elif any(usage):
            self._dy = quantizer(dy, usage)
            self.lines = rows_of(self._dy.widened(ROWWISE)) if usage.rowwise else None

    def _begin_sums(self) -> None:
        """Add up the values here: other processes get codes of them."""
        plain = rows_of(self._plain)
        wide = torch.promote_types(plain.dtype, torch.float32)
        self._totals, self._given = plain.sum(0, dtype=wide), plain.dtype
        self._summed = self._link.reduce(self._totals)

    def sums(self) -> Tensor:
        """See :meth:`Gradients.sums`."""
        if self._totals is None:
            return rows_of(self._plain).sum(0)
        self._summed.wait()
        return self._totals.to(self._given)

    def multiply(self, lines: Tensor, out: Tensor) -> None:
        """See :meth:`Gradients.multiply`."""
        values = lines if self.is_whole else codes.from_lines(lines, self._dy).widened()
        wide = torch.empty_like(out, dtype=values.dtype)
        kernels.grad_of_input(values, self.weight, wide)
        out.copy_(wide)

    def gather_input(self) -> None:
        """See :meth:`Gradients.gather_input`."""
        if self.wgrad and self._link.size > 1:
            self._x = self._gathered(self._x)

    def gather_columns(self) -> None:
        """See :meth:`Gradients.gather_columns`."""
        if self.wgrad and not (self.is_whole or self.keeps_lines):
            self._columns = self._gathered(self._dy)

    def _gathered(self, part: QuantizedTensor) -> Any:
        """Start to gather what products over the rows read; a function waits for it."""
        columns = None if codes.has_one_scale(part) else codes.columns_of(part)
        lines, pending = self._link.gather(codes.lines_of(part) if columns is None else columns)

        def arrived() -> QuantizedTensor:
            pending.wait()
            if columns is None:
                return codes.from_lines(lines, part)
            return codes.from_columns(lines, part, self._link.size)

        return arrived

    def arrived(self, lines: Tensor) -> None:
        """See :meth:`Gradients.arrived`."""
        self._dy = codes.from_lines(lines, self._dy)

    def of_params(self) -> Sequence[Tensor | None]:
        """See :meth:`Gradients.of_params`."""
        if not self.wgrad:
            return (None,)
        dy, x = [
            each() if callable(each) else each for each in (self._columns or self._dy, self._x)
        ]
        dy, x = (rows_of(each.widened(COLUMNWISE)) for each in (dy, x))
        return (kernels.grad_of_weight(None, dy, x).to(self.dtype),)


class GradientsSideBySide(Gradients):
    """The same of several linears of one input.

    Attributes:
        op: The op.
    """

    op: ParallelLinear

    def _saved(self) -> tuple[Any, Any]:
        x, weights = ParallelLinear.saved_operands(self._ctx)
        return None if x is None else rows_of(x), None if weights[0] is None else weights

    @property
    def _in_features(self) -> int:
        return int(self.weight[0].shape[1])

    def multiply(self, lines: Tensor, out: Tensor) -> None:
        """See :meth:`Gradients.multiply`."""
        first, *more = zip(self.op.split(lines), self.weight, strict=True)
        kernels.grad_of_input(*first, out)
        for dy, weight in more:
            kernels.add_grad_of_input(dy, weight, out)

    def of_params(self) -> Sequence[Tensor | None]:
        """See :meth:`Gradients.of_params`."""
        self._pending.wait()
        parts = self.op.split(self.lines)

        def of_weight(dy: Tensor) -> Tensor:
            return kernels.grad_of_weight(None, dy, self._x)

        return tuple(self.op.param_grads(self._ctx, parts, of_weight) or ())


def gradients(link: Link, ctx: Any, dy: Any, is_whole: bool, sums: bool) -> Gradients:
    """The operands of a backward; arguments as for :class:`Gradients`."""
    coded = ctx.quantizers and ctx.backward_override is None
    return (CodedGradients if coded else Gradients)(link, ctx, dy, is_whole, sums)
