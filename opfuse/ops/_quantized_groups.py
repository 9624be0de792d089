"""Products of groups of rows under a recipe, for ``GroupedLinear``: a quantized linear per group.

Each group has its own quantizers of input, weight and gradient, as if it were a ``BasicLinear``.
The products are emulated, group by group.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..core.op_context import OperationContext
from ..core.quantization import QuantizedTensor, Usage
from ..core.quantization.state import quantizer_names
from ._common import rows_of
from ._products import quantized_backward, quantized_operands
from .grouped import Groups

_NAMES = "input", "weight", "grad_output"


class QuantizedGroups:
    """The groups of a call under a recipe.

    Args:
        op: The op, with quantizers for input, weight and gradient of each group.
        ctx: Its context.
        groups: The sizes of the groups.
        stacked: Whether the weights are one parameter.

    Raises:
        RuntimeError: The numbers of rows have no values, as while tracing.
    """

    def __init__(self, op: Any, ctx: OperationContext, groups: Groups, *, stacked: bool) -> None:
        if groups.counts is None:
            who = f"{type(op).__name__} under a recipe expected split_sizes that have values"
            got = f"a {type(groups.sizes).__name__} on a fake or meta device"
            raise RuntimeError(f"{who}, got {got}")
        forward, backward = [quantizer_names(op, mode) for mode in ("forward", "backward")]
        names = enumerate(zip(forward[::2], forward[1::2], backward, strict=True))
        self._groups = [_Group(ctx, of, *((0, i) if stacked else (i, None))) for i, of in names]
        self._counts, self._stacked = groups.counts, stacked

    def products(
        self, x: Tensor, biases: Sequence[Tensor], dtype: torch.dtype
    ) -> tuple[Tensor, list[Any], list[Any]]:
        """``x_i @ weight_i.T + bias_i`` for each group, of the dequantized tensors.

        Args:
            x: The input.
            biases: One for each group, or none.
            dtype: The dtype to which the sums are rounded.

        Returns:
            The products; and the inputs and weights that the backward needs.
        """
        parts, saved = [], []
        each: Sequence[Tensor | None] = biases or [None] * len(self._groups)
        for group, rows, bias in zip(self._groups, self._split(x), each, strict=True):
            of_x, (weight,) = quantized_operands(group, group.padded(rows), ("weight",))
            wide = of_x.widened()
            bias = bias if bias is None else bias.to(wide.dtype)
            parts.append(F.linear(wide, weight.widened(), bias)[: len(rows)].to(dtype))
            saved.append(group.to_save or (None, None))
        y = torch.cat(parts)
        xs, weights = map(list, zip(*saved, strict=True))
        return y.view(*x.shape[:-1], y.shape[1]), xs, weights

    def grads(
        self, grad_output: Tensor, xs: Sequence[Any], weights: Sequence[Any]
    ) -> tuple[Tensor | None, list[Tensor | None]]:
        """The gradients of the input and of the weights, from the result of :meth:`products`."""
        width = grad_output.shape[-1]
        dxs: list[Any] = []
        grads: list[Any] = []
        parts = zip(self._groups, self._split(grad_output), xs, weights, strict=True)
        for group, rows, *saved in parts:
            dx = grad = None
            if any(tensor is not None for tensor in saved):
                group.saved_tensors = saved
                dy = group.padded(rows)
                dx, (grad,) = quantized_backward(group, dy, (width,))
            dxs.append(None if dx is None else dx[: len(rows)])
            grads.append(grad)
        if self._stacked:
            grads = [None if grads[0] is None else torch.stack(grads)]
        if dxs[0] is None:
            return None, grads
        dx = torch.cat(dxs)
        return dx.view(*grad_output.shape[:-1], dx.shape[1]), grads

    def _split(self, tensor: Tensor) -> Sequence[Tensor]:
        """The rows of each group, with one row dimension."""
        inner = math.prod(tensor.shape[1:-1])
        return torch.split(rows_of(tensor), [count * inner for count in self._counts])


class _Group:
    """The context of one group, as a linear reads it.

    Args:
        ctx: The context of the op.
        names: The names of the group's quantizers.
        index: Index of the parameter with its weight.
        part: Index of the matrix in that parameter; None: it is one matrix.
    """

    to_save: tuple[Any, ...] | None = None
    saved_tensors: Sequence[Any] = ()

    def __init__(
        self, ctx: OperationContext, names: Sequence[str], index: int, part: int | None
    ) -> None:
        here = slice(index, index + 1)
        self._ctx, self._names, self._where = ctx, names, (index, part)
        self.dtype, self.backward_override = ctx.dtype, ctx.backward_override
        self.requires_grad, self.input_requires_grad = ctx.requires_grad, ctx.input_requires_grad
        self.param_requires_grad = ctx.param_requires_grad[here]
        self.params = [param if part is None else param[part] for param in ctx.params[here]]
        quantizers = [ctx.quantizers[name] for name in names]
        self.quantizers = dict(zip(_NAMES, quantizers, strict=True))

    def quantized_weight(self, usage: Usage, *, name: str, index: int) -> QuantizedTensor:
        """As :meth:`OperationContext.quantized_weight`, for this group."""
        index, part = self._where
        return self._ctx.quantized_weight(usage, name=self._names[1], index=index, part=part)

    def padded(self, rows: Tensor) -> Tensor:
        """The rows, padded with as many zero rows as the columnwise copies need."""
        if not (self.requires_grad and any(self.param_requires_grad)) or self.backward_override:
            return rows
        both = self.quantizers["input"], self.quantizers["grad_output"]
        short = -len(rows) % math.lcm(*[quantizer.row_multiple for quantizer in both])
        return F.pad(rows, (0, 0, 0, short)) if short else rows
