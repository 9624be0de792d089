"""Products of groups of rows under a recipe, for ``GroupedLinear``: a quantized linear per group.

Each group has its own quantizers of input, weight and gradient, as if it were a ``BasicLinear``.
The products are emulated, group by group, unless the groups of a fusion multiply the codes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn import functional as F

from ..core.op_context import OperationContext
from ..core.quantization import COLUMNWISE, QuantizedTensor, Quantizer, Usage
from ..core.quantization.state import quantizer_names
from ..core.settings import current
from ._common import rows_of
from ._products import quantized_backward, quantized_operands, tiled
from .grouped import Groups
from .row_groups import RowGroups

_NAMES = "input", "weight", "grad_output"


class QuantizedGroups:
    """The groups of a call under a recipe.

    All rows are cast at once where the quantizers can (:meth:`opfuse.Quantizer.quantize_groups`),
    and are one quantized tensor then. Otherwise each group is cast by itself.

    Args:
        op: The op, with quantizers for input, weight and gradient of each group.
        ctx: Its context.
        groups: The sizes of the groups.
        stacked: Whether the weights are one parameter.
    """

    def __init__(self, op: Any, ctx: OperationContext, groups: Groups, *, stacked: bool) -> None:
        forward, self._grads = [quantizer_names(op, mode) for mode in ("forward", "backward")]
        self._inputs, self._weights = forward[::2], forward[1::2]
        names = enumerate(zip(self._inputs, self._weights, self._grads, strict=True))
        self._each = [_Group(ctx, of, *((0, i) if stacked else (i, None))) for i, of in names]
        self._ctx, self._groups, self._stacked, self._who = ctx, groups, stacked, type(op).__name__

    def products(
        self, x: Tensor, biases: Sequence[Tensor], dtype: torch.dtype
    ) -> tuple[Tensor, list[Any], list[Any]]:
        """``x_i @ weight_i.T + bias_i`` for each group, of the dequantized tensors.

        Args:
            x: The input.
            biases: One for each group, or none.
            dtype: The dtype to which the sums are rounded.

        Returns:
            The products; and the inputs and weights that the backward needs. Rows that were cast
            at once take the place of the first input, and the others are None.
        """
        saved: list[Any] = [(None, None)] * len(self._each)
        ctx = self._ctx
        wgrad, dgrad = any(ctx.param_requires_grad[: self._count]), ctx.input_requires_grad
        of_x = self._at_once(self._inputs, x, Usage(True, ctx.requires_grad and wgrad))
        if of_x is None:
            y = self._joined(x, self._one_by_one(x, saved), biases, dtype)
        else:
            weights = self._weights_at_once(Usage(True, ctx.requires_grad and dgrad))
            coded = self._groups.coded_products(of_x, weights, biases, dtype)
            if coded is None:
                pairs = zip(self._cut(of_x, self._inputs), weights, strict=True)
                coded = self._joined(x, pairs, biases, dtype)
            y = coded
            if ctx.requires_grad:
                saved = [(None, w.only(COLUMNWISE) if dgrad else None) for w in weights]
                saved[0] = of_x.only(COLUMNWISE) if wgrad else None, saved[0][1]
        xs, kept = map(list, zip(*saved, strict=True))
        return y.view(*x.shape[:-1], y.shape[1]), xs, kept

    def _at_once(self, names: Sequence[str], x: Tensor, usage: Usage) -> RowGroups | None:
        """All rows, quantized; None: each group has to be cast by itself."""
        quantizers = [self._ctx.quantizers[name] for name in names]
        if self._ctx.backward_override is not None or not quantizers[0].casts_groups:
            return None
        if len({quantizer.row_multiple for quantizer in self._ctx.quantizers.values()}) > 1:
            return None  # rows of zeros that one of two operands has not
        ends = self._groups.ends
        if ends is None:
            inner = math.prod(x.shape[1:-1])
            ends = torch.tensor(self._counts, dtype=torch.int64).cumsum(0) * inner
        ends = ends.to(x.device, torch.int32)
        made: RowGroups | None = quantizers[0].quantize_groups(x, ends, usage, quantizers)
        return made

    def _weights_at_once(self, usage: Usage) -> Sequence[QuantizedTensor]:
        """The weights of all groups, quantized: at once, if it can be."""
        ctx, names = self._ctx, self._weights
        cache = ctx.weights
        assert cache is not None
        quantizers = [ctx.quantizers[name] for name in names]
        known = current.weights == "cached" and not cache.entries().keys().isdisjoint(names)
        params = ctx.params[: self._count]
        made = None if known else _cast_at_once(params, quantizers, usage)
        if made is None:
            return [group.quantized_weight(usage) for group in self._each]
        for i, name in enumerate(names):
            cache.remember(name, params[0 if self._stacked else i], quantizers[i], made[i])
        return made

    def _one_by_one(self, x: Tensor, saved: list[Any]) -> Iterator[tuple[Any, Any]]:
        """Input and weight of each group, cast by itself; saves what the backward needs."""
        for i, (group, rows) in enumerate(zip(self._each, self._split(x), strict=True)):
            of_x, (weight,) = quantized_operands(group, group.padded(rows), ("weight",))
            saved[i] = group.to_save or (None, None)
            yield of_x, weight

    def _joined(
        self, x: Tensor, operands: Iterable[Any], biases: Sequence[Tensor], dtype: torch.dtype
    ) -> Tensor:
        """The products of all groups, of dequantized values in fp32, without rows of padding."""
        parts = []
        each: Sequence[Tensor | None] = biases or [None] * len(self._each)
        inner = math.prod(x.shape[1:-1])
        for (of_x, weight), bias, rows in zip(operands, each, self._counts, strict=True):
            wide, matrix = tiled(of_x.widened(), weight.widened())
            bias = bias if bias is None else bias.to(wide.dtype)
            parts.append(F.linear(wide, matrix, bias)[: rows * inner].to(dtype))
        return torch.cat(parts)

    def grads(
        self, grad_output: Tensor, xs: Sequence[Any], weights: Sequence[Any]
    ) -> tuple[Tensor | None, list[Tensor | None]]:
        """The gradients of the input and of the weights, from the result of :meth:`products`."""
        ctx, x = self._ctx, xs[0]
        wants = [any(group.param_requires_grad) for group in self._each]
        dgrad, wgrad = weights[0] is not None, any(wants)
        of_dy: RowGroups | None = None
        known = isinstance(x, RowGroups) or not wgrad
        if known and (dgrad or all(wants)):  # the gradient of a frozen group is not cast
            of_dy = self._at_once(self._grads, grad_output, Usage(dgrad, wgrad))
        dx: Tensor | None = None
        grads: list[Tensor | None] | None = None if wgrad else [None] * self._count
        if of_dy is not None:
            dtype = ctx.dtype or grad_output.dtype
            dx = self._groups.coded_input_grads(of_dy, weights, dtype) if dgrad else None
            if wgrad and (dx is not None or not dgrad):
                grads = self._coded_weight_grads(of_dy, x, dtype, wants)
        if (dx is None and dgrad) or grads is None:
            dx, grads = self._grads_of_values(grad_output, of_dy, xs, weights)
        return None if dx is None else dx.view(*grad_output.shape[:-1], dx.shape[1]), grads

    def _coded_weight_grads(
        self, dy: RowGroups, x: Any, dtype: torch.dtype, wants: Sequence[bool]
    ) -> list[Tensor | None] | None:
        """The gradients of the weights by products of codes; None: there are no such products."""
        if self._ctx.grad_sum is not None:
            add = functools.partial(self._groups.add_coded_weight_grads, dy, x)
            if (sums := self._ctx.grad_sum.add(add)) is not None:
                return sums  # type: ignore[no-any-return]
        whole = self._groups.coded_weight_grads(dy, x, dtype)
        if whole is None:
            return None
        if self._stacked:
            return [whole]
        return [whole[i] if wanted else None for i, wanted in enumerate(wants)]

    def _grads_of_values(
        self,
        grad_output: Tensor,
        of_dy: RowGroups | None,
        xs: Sequence[Any],
        weights: Sequence[Any],
    ) -> tuple[Tensor | None, list[Tensor | None]]:
        """The gradients, by products of dequantized values in fp32, group by group."""
        width = grad_output.shape[-1]
        dxs: list[Any] = []
        grads: list[Any] = []
        if isinstance(xs[0], RowGroups):
            xs = self._cut(xs[0], self._inputs)
        dys: Any = self._split(grad_output) if of_dy is None else self._cut(of_dy, self._grads)
        inner = math.prod(grad_output.shape[1:-1])
        each = zip(self._each, dys, xs, weights, self._counts, strict=True)
        for group, dy, x, weight, count in each:
            dx = grad = None
            saved = x if any(group.param_requires_grad) else None, weight
            if any(tensor is not None for tensor in saved):
                group.saved_tensors = saved
                padded = group.padded(dy) if of_dy is None else dy
                dx, (grad,) = quantized_backward(group, padded, (width,))
            dxs.append(None if dx is None else dx[: count * inner])
            grads.append(grad)
        if self._stacked:
            grads = [None if grads[0] is None else torch.stack(grads)]
        return None if dxs[0] is None else torch.cat(dxs), grads

    _count: Any = property(lambda self: 1 if self._stacked else len(self._each))
    """How many parameters have the weights."""

    @functools.cached_property
    def _counts(self) -> list[int]:
        """The numbers of rows, which the host reads here if it has not done so."""
        known, sizes = self._groups.counts, self._groups.sizes
        if known is None:
            if sizes.is_meta or type(sizes) is not Tensor:
                who = f"{self._who} under a recipe expected split_sizes that have values"
                raise RuntimeError(f"{who}, got a {type(sizes).__name__} on a fake or meta device")
            known = sizes.tolist()
        return known

    def _split(self, tensor: Tensor) -> Sequence[Tensor]:
        """The rows of each group, with one row dimension."""
        inner = math.prod(tensor.shape[1:-1])
        return torch.split(rows_of(tensor), [count * inner for count in self._counts])

    def _cut(self, tensor: RowGroups, names: Sequence[str]) -> Sequence[QuantizedTensor]:
        """The rows of each group that were cast at once, by the quantizers of these names."""
        inner = math.prod(tensor.shape[1:-1])
        quantizers = [self._ctx.quantizers[name] for name in names]
        return tensor.cut([count * inner for count in self._counts], quantizers)


def _cast_at_once(
    weights: Sequence[Tensor], quantizers: Sequence[Quantizer], usage: Usage
) -> Sequence[QuantizedTensor] | None:
    """Matrices that are cast at once; None: each has to be cast by itself.

    Args:
        weights: One for each group, of one shape; or one parameter with all matrices.
        quantizers: That of each matrix.
        usage: The copies that are needed.
    """
    if is_compiling() or not quantizers[0].casts_groups:
        return None
    kinds = {(type(w) in (Tensor, nn.Parameter), w.shape, w.dtype, w.device) for w in weights}
    if len(kinds) > 1 or not next(iter(kinds))[0]:
        return None
    whole = weights[0] if weights[0].ndim == 3 else torch.cat([w.detach() for w in weights])
    count, rows = len(quantizers), whole.shape[:-1].numel() // len(quantizers)
    ends = torch.arange(1, count + 1, dtype=torch.int32, device=whole.device) * rows
    made = quantizers[0].quantize_groups(whole.detach().flatten(0, -2), ends, usage, quantizers)
    parts = None if made is None else made.cut([rows] * count, quantizers)
    # a format may fill up what a weight must have
    return None if parts is None or parts[0].shape[0] != rows else parts


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

    @property
    def weights(self) -> _Group:
        """Where the weight is cast, in the place of the op's cache."""
        return self

    def quantized(
        self, name: str, weight: Tensor, quantizer: Quantizer, usage: Usage
    ) -> QuantizedTensor:
        """As :meth:`WeightCache.quantized`; the op's cache knows the weight by another name."""
        return self.quantized_weight(usage)

    def quantized_weight(self, usage: Usage) -> QuantizedTensor:
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
