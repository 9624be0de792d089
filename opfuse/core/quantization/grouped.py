"""Groups of rows, each quantized with one scale of its own, as one tensor."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .formats import (
    FP8,
    QuantizedTensor,
    ScaledTensor,
    Usage,
    check_original,
    check_scale,
    check_tensor,
    copy_to_read,
    matrix_of,
)

_ROWWISE = Usage()
FILLED = 16
"""A columnwise copy fills up the rows of each group to a multiple of this, with zeros."""


@dataclasses.dataclass(eq=False, repr=False)
class GroupedTensor(QuantizedTensor):
    """One scale for each group of rows: a value is ``data * scale_inv[group]``.

    The groups follow one another in the rows of the matrix, and may be empty. Where they end is a
    tensor, so a cast or a product need not read it on the host. Both copies hold the same values,
    so either of them serves both usages.

    Args:
        shape: The logical shape.
        dtype: The dtype of the original tensor.
        quantizer: The quantizer of the first group, or None.
        rowwise_data: The values in the logical shape.
        columnwise_data: The values of each group transposed, ``(columns, rows of the group)``, with
            zeros up to a multiple of 16 rows: one group after the other, ``(n,)``. What follows
            the last one is undefined.
        scale_inv: The factor of the values of each group: float32, ``(groups,)``.
        ends: The row at which each group ends: int32, ``(groups,)``.
    """

    rowwise_data: Tensor | None = None
    columnwise_data: Tensor | None = None
    scale_inv: Tensor | None = None
    ends: Tensor | None = None
    tensor_names = ("rowwise_data", "columnwise_data", "scale_inv", "ends")
    data_names = ("rowwise_data", "columnwise_data")

    def __post_init__(self) -> None:
        """Refuse tensors that do not fit the shape."""
        rows, columns = check_original(self)
        groups = () if self.ends is None else tuple(self.ends.shape)[:1]
        check_tensor(self, "rowwise_data", self.shape, FP8)
        check_tensor(self, "columnwise_data", (room(rows, columns, *groups),), FP8)
        check_tensor(self, "ends", groups, (torch.int32,))
        check_tensor(self, "scale_inv", groups, (torch.float32,))
        for name in self.data_names:
            check_scale(self, name, "scale_inv")
            check_scale(self, name, "ends")

    @property
    def usage(self) -> Usage:
        """Both, if there is any copy: their values are the same."""
        here = self.rowwise_data is not None or self.columnwise_data is not None
        return Usage(here, here)

    def dequantize(self, usage: Usage = _ROWWISE) -> Tensor:
        """The values in ``dtype``, computed in float32; the host reads where groups end."""
        copy_to_read(self, usage)
        assert self.ends is not None
        counts = counts_of(self.ends)
        parts = [part.dequantize() for part in self.cut(counts, [None] * len(counts))]
        return torch.cat(parts).reshape(self.shape)

    def cut(self, counts: Sequence[int], quantizers: Sequence[Any]) -> list[ScaledTensor]:
        """Each group as a tensor of its own, over the same memory where it can be.

        Args:
            counts: The rows of each group.
            quantizers: The quantizer of each.
        """
        assert self.scale_inv is not None
        rows, columns = matrix_of(self.shape)
        nothing: list[Any] = [None] * len(counts)
        row, column = self.rowwise_data, self.columnwise_data
        of_rows = nothing if row is None else torch.split(row.reshape(rows, columns), list(counts))
        of_columns, start = [*nothing], 0
        for i, count in enumerate(counts):
            if column is not None and (row is None or count % FILLED == 0):
                high = _filled(count)
                block = column[start * columns : (start + high) * columns].view(columns, high)
                of_columns[i], start = block[:, :count].contiguous(), start + high
        scales = torch.split(self.scale_inv, 1)
        each = zip(counts, quantizers, of_rows, of_columns, scales, strict=True)
        return [
            ScaledTensor(torch.Size((count, columns)), self.dtype, *made) for count, *made in each
        ]


def room(rows: int, columns: int, groups: int = 1) -> int:
    """The size of a columnwise copy, whatever the sizes of the groups are."""
    return _filled(rows + (FILLED - 1) * groups) * columns


def counts_of(ends: Tensor) -> list[int]:
    """The rows of each group, which the host reads."""
    counts: list[int] = ends.diff(prepend=ends.new_zeros(1)).tolist()
    return counts


def _filled(count: int) -> int:
    return count + -count % FILLED


def cast_each(
    tensor: Tensor, ends: Tensor, usage: Usage, quantizers: Sequence[Any]
) -> GroupedTensor:
    """Groups of rows that are cast one after the other; the host reads where they end.

    Args:
        tensor: The values.
        ends: The row at which each group ends.
        usage: The copies that are needed.
        quantizers: That of each group, which give a :class:`ScaledTensor`.
    """
    rows, columns = matrix_of(tensor.shape)
    parts = torch.split(tensor.detach().reshape(rows, columns), counts_of(ends))
    pairs = zip(parts, quantizers, strict=True)
    made = [quantizer.quantize(part, _ROWWISE) for part, quantizer in pairs]
    codes = [part.rowwise_data.view(torch.uint8) for part in made]
    dtype, row, column = made[0].rowwise_data.dtype, None, None
    if usage.rowwise:
        row = torch.cat(codes).view(dtype).view(tensor.shape)
    if usage.columnwise:
        column = codes[0].new_zeros(room(rows, columns, len(codes)))
        start = 0
        for part in codes:
            high = _filled(len(part))
            block = column[start * columns : (start + high) * columns].view(columns, high)
            block[:, : len(part)], start = part.t(), start + high
        column = column.view(dtype)
    inverse = torch.cat([part.scale_inv.reshape(1) for part in made])
    return GroupedTensor(tensor.shape, tensor.dtype, quantizers[0], row, column, inverse, ends)
