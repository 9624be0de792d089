"""Groups of rows, each quantized by itself, as one tensor."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..core.quantization.formats import FP8, QuantizedTensor, ScaledTensor, Usage, matrix_of

_ROWWISE = Usage()


class RowGroups(QuantizedTensor):
    """The base of formats for groups of rows, each of which was quantized by itself.

    The groups follow one another in the rows of the matrix, and may be empty. Where they end is a
    tensor, so a cast or a product need not read it on the host. A columnwise copy has a matrix
    ``(columns, height)`` for each group, one after the other, where the height is the number of its
    rows, filled up with zeros to a multiple of ``filled``. It is ``(n,)``; what follows the last
    group is undefined.

    Attributes:
        ends: The row at which each group ends: int32, ``(groups,)``.
        filled: What divides the heights of a columnwise copy.
    """

    filled = 16
    ends: Any

    @abstractmethod
    def cut(self, counts: Sequence[int], quantizers: Sequence[Any]) -> Sequence[QuantizedTensor]:
        """Each group as a tensor of its own, over the same memory where it can be.

        It may have rows of zeros at its end.

        Args:
            counts: The rows of each group.
            quantizers: The quantizer of each.
        """

    def dequantize(self, usage: Usage = _ROWWISE) -> Tensor:
        """The values in ``dtype``, computed in float32; the host reads where groups end."""
        self.copy_to_read(usage)
        counts = counts_of(self.ends)
        each = zip(self.cut(counts, [None] * len(counts)), counts, strict=True)
        parts = [part.dequantize(usage)[:count] for part, count in each]
        return torch.cat(parts).reshape(self.shape)


@dataclasses.dataclass(eq=False, repr=False)
class GroupedTensor(RowGroups):
    """One scale for each group of rows: a value is ``data * scale_inv[group]``.

    Both copies hold the same values, so either of them serves both usages.

    Args:
        shape: The logical shape.
        dtype: The dtype of the original tensor.
        quantizer: The quantizer of the first group, or None.
        rowwise_data: The values in the logical shape.
        columnwise_data: The values of each group transposed, see :class:`RowGroups`.
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
        rows, columns = self.check_original()
        groups = () if self.ends is None else tuple(self.ends.shape)[:1]
        self.check_tensor("rowwise_data", self.shape, FP8)
        size = room(rows, columns, groups[0] if groups else 1)
        self.check_tensor("columnwise_data", (size,), FP8)
        self.check_tensor("ends", groups, (torch.int32,))
        self.check_tensor("scale_inv", groups, (torch.float32,))
        for name in self.data_names:
            self.check_scale(name, "scale_inv")
            self.check_scale(name, "ends")

    usage = ScaledTensor.usage

    def cut(self, counts: Sequence[int], quantizers: Sequence[Any]) -> Sequence[ScaledTensor]:
        """See :meth:`RowGroups.cut`; there are no rows of zeros."""
        assert self.scale_inv is not None
        rows, columns = matrix_of(self.shape)
        row, column = self.rowwise_data, self.columnwise_data
        whole = [column is not None and (row is None or n % self.filled == 0) for n in counts]
        blocks = iter([] if column is None else cut_columns(column, columns, counts, self.filled))
        of_columns: list[Any] = [None] * len(counts)
        for i, (block, count) in enumerate(zip(blocks, counts, strict=False)):
            of_columns[i] = block[:, :count].contiguous() if whole[i] else None
        of_rows: Any = [None] * len(counts)
        if row is not None:
            of_rows = torch.split(row.reshape(rows, columns), list(counts))
        scales = torch.split(self.scale_inv, 1)
        each = zip(counts, quantizers, of_rows, of_columns, scales, strict=True)
        return [
            ScaledTensor(torch.Size((count, columns)), self.dtype, *made) for count, *made in each
        ]


def room(rows: int, columns: int, groups: int = 1, filled: int = RowGroups.filled) -> int:
    """The size of a columnwise copy, whatever the sizes of the groups are."""
    return _up(rows + (filled - 1) * groups, filled) * columns


def counts_of(ends: Tensor) -> list[int]:
    """The rows of each group, which the host reads."""
    counts: list[int] = ends.diff(prepend=ends.new_zeros(1)).tolist()
    return counts


def cut_columns(
    column: Tensor, columns: int, counts: Sequence[int], filled: int, per: int = 1
) -> list[Tensor]:
    """The matrices of the groups in a columnwise copy.

    Args:
        column: The copy, or its scales.
        columns: The columns of the values, which are the rows here.
        counts: The rows of each group.
        filled: What divides the heights.
        per: How many rows share an element.
    """
    found, start = [], 0
    for count in counts:
        high = _up(count, filled) // per
        found.append(column[start : start + high * columns].view(columns, high))
        start += high * columns
    return found


def _up(count: int, multiple: int) -> int:
    return count + -count % multiple


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
        blocks = [F.pad(part.t(), (0, -len(part) % GroupedTensor.filled)) for part in codes]
        column = torch.cat([block.flatten() for block in blocks])
        size = room(rows, columns, len(codes))
        column = F.pad(column, (0, size - column.numel())).view(dtype)
    inverse = torch.cat([part.scale_inv.reshape(1) for part in made])
    return GroupedTensor(tensor.shape, tensor.dtype, quantizers[0], row, column, inverse, ends)
