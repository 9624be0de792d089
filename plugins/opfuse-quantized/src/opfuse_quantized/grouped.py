"""MX blocks of groups of rows, as one quantized tensor; :mod:`opfuse.ops.row_groups`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from opfuse.core.quantization.formats import Usage, matrix_of
from opfuse.ops.row_groups import RowGroups, cut_columns, room

from .formats import MXTensor

_BLOCK = 32


@dataclasses.dataclass(eq=False, repr=False)
class GroupedMXTensor(RowGroups):
    """OCP microscaling of groups of rows: no block along the rows has rows of two groups.

    Groups are filled up with zeros to a multiple of 32 rows in the columnwise copy. Scales are not
    swizzled.

    Args:
        shape: The logical shape; its columns are a multiple of 32.
        dtype: The dtype of the original tensor.
        quantizer: The quantizer of the first group, or None.
        rowwise_data: e4m3fn or e5m2 values in the logical shape.
        rowwise_scale_inv: float8_e8m0fnu, ``(rows, columns / 32)``.
        columnwise_data: The transposed values of each group, see
            :class:`opfuse.ops.row_groups.RowGroups`.
        columnwise_scale_inv: float8_e8m0fnu, ``(columns, height / 32)`` of each group likewise.
        ends: The row at which each group ends: int32, ``(groups,)``.
    """

    rowwise_data: Tensor | None = None
    rowwise_scale_inv: Tensor | None = None
    columnwise_data: Tensor | None = None
    columnwise_scale_inv: Tensor | None = None
    ends: Tensor | None = None
    filled = _BLOCK
    tensor_names = (*MXTensor.tensor_names, "ends")
    data_names = ("rowwise_data", "columnwise_data")

    def __post_init__(self) -> None:
        """Refuse tensors that do not fit the shape."""
        rows, columns = self.check_original()
        groups = () if self.ends is None else tuple(self.ends.shape)[:1]
        size = room(rows, columns, groups[0] if groups else 1, _BLOCK)
        if columns % _BLOCK:
            raise ValueError(f"GroupedMXTensor: expected whole blocks of 32, got {columns} columns")
        self.check_tensor("rowwise_data", self.shape, MXTensor.data_dtypes)
        self.check_tensor("columnwise_data", (size,), MXTensor.data_dtypes)
        scale = (MXTensor.scale_dtype,)
        self.check_tensor("rowwise_scale_inv", (rows, columns // _BLOCK), scale)
        self.check_tensor("columnwise_scale_inv", (size // _BLOCK,), scale)
        self.check_tensor("ends", groups, (torch.int32,))
        for way in Usage._fields:
            self.check_scale(f"{way}_data", f"{way}_scale_inv")
            self.check_scale(f"{way}_data", "ends")

    usage = MXTensor.usage

    def cut(self, counts: Sequence[int], quantizers: Sequence[Any]) -> Sequence[MXTensor]:
        """See :meth:`RowGroups.cut`; groups are filled up if there is a columnwise copy."""
        rows, columns = matrix_of(self.shape)
        filled = counts
        parts: list[list[Any]] = [[None] * len(counts) for _ in range(4)]
        if self.columnwise_data is not None and self.columnwise_scale_inv is not None:
            filled = [count + -count % _BLOCK for count in counts]
            given = columns, counts, _BLOCK
            parts[2] = cut_columns(self.columnwise_data, *given)
            parts[3] = cut_columns(self.columnwise_scale_inv, *given, per=_BLOCK)
        for i, tensor in enumerate((self.rowwise_data, self.rowwise_scale_inv)):
            if tensor is not None:
                each = torch.split(tensor.reshape(rows, -1), list(counts))
                pairs = zip(each, filled, strict=True)
                parts[i] = [_with_zeros(part, count) for part, count in pairs]
        shapes = [torch.Size((count, columns)) for count in filled]
        each_group = zip(shapes, quantizers, *parts, strict=True)
        return [MXTensor(shape, self.dtype, *made) for shape, *made in each_group]


def _with_zeros(part: Tensor, rows: int) -> Tensor:
    """A part with as many rows: those that are added are zeros."""
    short = rows - len(part)
    if not short:
        return part
    return F.pad(part.view(torch.uint8), (0, 0, 0, short)).view(part.dtype)
