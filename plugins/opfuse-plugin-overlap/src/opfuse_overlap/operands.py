"""The operands of a linear's products: plain tensors, or codes under a recipe.

What a collective gathers are lines: a matrix with a line for each row, of values or of bytes. The
products under a recipe are those of the dequantized values, in fp32, as the op's own.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from opfuse.core.quantization import COLUMNWISE, ROWWISE, QuantizedTensor, Usage, dequantize
from opfuse.ops import BasicLinear

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
        weight: The weight, plain or dequantized.
        dtype: Of the result.
        height: Of how many rows a piece is a multiple.
    """

    lines: Tensor
    multiply: Multiply
    weight: Tensor
    dtype: torch.dtype
    height: int = 1

    def empty(self, rows: int) -> Tensor:
        """A place for the result of so many rows."""
        size = rows, self.weight.shape[0]
        return torch.empty(size, dtype=self.dtype, device=self.weight.device)


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
        keeps_lines: Whether the product for the weight reads the lines of all rows.
        height: Of how many rows a piece is a multiple.

    Args:
        link: The collectives.
        ctx: The context of the linear.
        dy: The gradient of the output.
        is_whole: Whether it has all rows.
    """

    lines: Any
    height = 1

    def __init__(self, link: Link, ctx: Any, dy: Any, is_whole: bool) -> None:
        self._link, self._ctx, self.is_whole = link, ctx, is_whole
        self.dtype = ctx.dtype or dy.dtype
        self._x: Any = None
        self.weight: Any = None
        if ctx.requires_grad:
            self._x, self.weight = self._saved()
        self.wgrad = self.keeps_lines = self._x is not None
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
        self.lines = rows_of(dy.to(self.dtype))

    @property
    def count(self) -> int:
        """The number of lines."""
        return int(self.lines.shape[0])

    def empty(self, rows: int) -> Tensor:
        """A place for the gradient of so many rows of the input."""
        size = rows, self.weight.shape[1]
        return torch.empty(size, dtype=self.dtype, device=self.weight.device)

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

    def grad_of_weight(self) -> Tensor | None:
        """The gradient of the weight."""
        self._pending.wait()
        return kernels.grad_of_weight(self._ctx, self.lines, self._x) if self.wgrad else None


class CodedGradients(Gradients):
    """The same under a recipe that quantizes the backward."""

    _columns: Any = None

    def _saved(self) -> tuple[Any, Any]:
        x, weight = self._ctx.saved_tensors
        return x, None if weight is None else weight.widened(COLUMNWISE)

    def _take(self, dy: Any) -> None:
        quantizer, link = self._ctx.quantizers["grad_output"], self._link
        usage = Usage(self.weight is not None, self.wgrad)
        part, self.keeps_lines = None, False
        self.is_whole = self.is_whole or link.size == 1
        if not self.is_whole and any(usage):
            part, why = codes.quantized(link, quantizer, dy, usage)
            if why:
                dy, pending = link.gather(rows_of(dy))
                pending.wait()
                self.is_whole = True
        if part is not None:
            self._dy, self.height = part, codes.height(part)
            self.keeps_lines = all(usage) and codes.has_one_scale(part)
            self.lines = codes.lines_of(part) if usage.rowwise else None
        elif any(usage):
            self._dy = quantizer(dy, usage)
            self.lines = rows_of(self._dy.widened(ROWWISE)) if usage.rowwise else None

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

    def grad_of_weight(self) -> Tensor | None:
        """See :meth:`Gradients.grad_of_weight`."""
        if not self.wgrad:
            return None
        dy, x = [
            each() if callable(each) else each for each in (self._columns or self._dy, self._x)
        ]
        dy, x = (rows_of(each.widened(COLUMNWISE)) for each in (dy, x))
        return kernels.grad_of_weight(None, dy, x).to(self.dtype)


def gradients(link: Link, ctx: Any, dy: Any, is_whole: bool) -> Gradients:
    """The operands of a backward; arguments as for :class:`Gradients`."""
    coded = ctx.quantizers and ctx.backward_override is None
    return (CodedGradients if coded else Gradients)(link, ctx, dy, is_whole)
