"""PyTorch's scaled matrix product over the formats of :mod:`opfuse.core.quantization.formats`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from opfuse_quantized.formats import BlockScaledTensor, MXTensor
from opfuse_quantized.swizzle import ROWS, swizzled, unswizzled
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn import functional as F
from torch.nn.functional import ScalingType, SwizzleType

from opfuse.core.quantization import QuantizedTensor, Usage
from opfuse.core.quantization.formats import ScaledTensor

from .together import as_one

DEPTH = 16
"""On a GPU, the size that a product sums over must be a multiple of this; zeros fill it up."""


class GemmOperand(NamedTuple):
    """A copy of a quantized tensor as a matrix whose last dimension is summed over.

    Attributes:
        data: The codes, ``(outer, inner)``.
        scale: As its format has it; with one scale per row ``(outer, 1)``.
        kind: How it is scaled.
        swizzled: Whether scales of MX blocks are in the order of tensor cores.
    """

    data: Tensor
    scale: Tensor
    kind: ScalingType
    swizzled: bool = False

    @classmethod
    def of(cls, tensor: QuantizedTensor, usage: Usage) -> GemmOperand:
        """The copy that ``usage`` names; per-tensor codes that lack it are transposed here.

        Raises:
            TypeError: PyTorch does not multiply this format.
            ValueError: The copy is missing.
        """
        way = "rowwise" if usage.rowwise else "columnwise"
        data = getattr(tensor, f"{way}_data", None)
        columns = tensor.shape[-1] if tensor.shape else 1
        sides = tensor.shape[:-1].numel(), columns
        sides = sides if usage.rowwise else sides[::-1]
        if isinstance(tensor, ScaledTensor):
            if data is None:
                other: Any = tensor.columnwise_data if usage.rowwise else tensor.rowwise_data
                data = None if other is None else other.reshape(sides[::-1]).t().contiguous()
            scale, kind = tensor.scale_inv, ScalingType.TensorWise
        elif isinstance(tensor, (BlockScaledTensor, MXTensor)):
            scale, kind = getattr(tensor, f"{way}_scale_inv"), ScalingType.BlockWise1x32
            if isinstance(tensor, BlockScaledTensor):
                wide = tensor.block[0] > 1
                kind = ScalingType.BlockWise128x128 if wide else ScalingType.BlockWise1x128
        else:
            raise TypeError(f"PyTorch has no product of {type(tensor).__name__}")
        if data is None or scale is None:
            raise ValueError(f"a product needs the {way} copy, got {tensor!r}")
        return cls(data.reshape(sides), scale, kind, getattr(tensor, "swizzled", False))

    def outer(self, start: int, stop: int) -> GemmOperand:
        """Some of the rows."""
        if (start, stop) == (0, self.data.shape[0]):
            return self
        scale = self.scale
        if self.kind is ScalingType.BlockWise1x128:
            # a single row counts as contiguous whatever its stride, which the product refuses
            scale = scale[:, start:stop].clone(memory_format=torch.contiguous_format)
        elif self.kind is ScalingType.BlockWise1x32:
            if self.swizzled and (start % ROWS or (stop % ROWS and stop < self.data.shape[0])):
                return self.plain().outer(start, stop)
            if self.swizzled:  # rows of tiles follow each other
                scale = scale.view(-(-self.data.shape[0] // ROWS), -1)
                start_tile, stop_tile = start // ROWS, -(-stop // ROWS)
                scale = scale[start_tile:stop_tile].reshape(-1)
            else:
                scale = scale[start:stop]
        return self._replace(data=self.data[start:stop], scale=scale)

    def plain(self) -> GemmOperand:
        """The same with scales of MX blocks as a matrix."""
        if not self.swizzled:
            return self
        rows, columns = self.data.shape
        return self._replace(scale=unswizzled(self.scale, rows, columns // 32), swizzled=False)

    def inner(self, start: int, stop: int) -> GemmOperand:
        """A part of the summed dimension; all blocks except the last one must be whole."""
        if (start, stop) == (0, self.data.shape[1]):
            return self
        scale = self.scale
        if self.kind is ScalingType.BlockWise1x128:
            scale = scale[start // 128 : -(-stop // 128)]
        elif self.kind is ScalingType.BlockWise1x32:
            if self.swizzled and (start % 128 or (stop % 128 and stop < self.data.shape[1])):
                return self.plain().inner(start, stop)
            if self.swizzled:  # tiles of a row, which are copied as the codes are
                across = -(-self.data.shape[1] // 128)
                tiles = scale.view(-(-self.data.shape[0] // ROWS), across, -1)
                scale = tiles[:, start // 128 : -(-stop // 128)].reshape(-1)
            else:
                scale = scale[:, start // 32 : stop // 32]
        return self._replace(data=self.data[:, start:stop].contiguous(), scale=scale)

    @classmethod
    def stacked(cls, parts: Sequence[GemmOperand]) -> GemmOperand:
        """The rows of several operands, one after the other; all blocks but the last are whole.

        Where each has one scale, every row has that of its part.
        """
        parts = [part.plain() for part in parts]
        kind, scales = parts[0].kind, [part.scale for part in parts]
        codes = [part.data for part in parts]
        data = as_one(codes)
        data = _joined(codes, 0) if data is None else data
        if kind is ScalingType.TensorWise:
            rows = [part.scale.reshape(1).expand(len(part.data)) for part in parts]
            return cls(data, torch.cat(rows)[:, None], ScalingType.RowWise)
        return cls(data, _joined(scales, 1 if kind is ScalingType.BlockWise1x128 else 0), kind)

    @classmethod
    def chained(cls, parts: Sequence[GemmOperand]) -> GemmOperand:
        """The sums of several operands as one, longer; all blocks but the last are whole.

        Each must be scaled in blocks along what is summed over.
        """
        parts = [part.plain() for part in parts]
        kind, scales = parts[0].kind, [part.scale for part in parts]
        data = _joined([part.data for part in parts], 1)
        if kind is ScalingType.BlockWise128x128:  # a row of blocks is filled up to four
            known = [
                scale[:, : -(-part.data.shape[1] // 128)]
                for scale, part in zip(scales, parts, strict=True)
            ]
            scale = torch.cat(known, 1)
            return cls(data, F.pad(scale, (0, -scale.shape[1] % 4)), kind)
        return cls(data, _joined(scales, 0 if kind is ScalingType.BlockWise1x128 else 1), kind)

    def by_row(self) -> GemmOperand:
        """One scale as one for each row."""
        scale = self.scale.reshape(1, 1).repeat(len(self.data), 1)
        return self._replace(scale=scale, kind=ScalingType.RowWise)

    def filled(self) -> GemmOperand:
        """With codes of zero up to a multiple of :data:`DEPTH`; blocks of scales cover them."""
        short = -self.data.shape[1] % DEPTH
        if not short:
            return self
        codes = F.pad(self.data.view(torch.uint8), (0, short))
        return self._replace(data=codes.view(self.data.dtype))

    def scaling(self, *, right: bool = False) -> tuple[Tensor, ScalingType]:
        """The scale as ``scaled_mm`` takes it, and its kind.

        Args:
            right: Whether it is the right operand, which is transposed.
        """
        if self.kind is ScalingType.BlockWise1x32:
            return self.scale if self.swizzled else swizzled(self.scale), self.kind
        as_it_is = self.kind is ScalingType.TensorWise
        as_it_is = as_it_is or (self.kind is ScalingType.RowWise and not right)
        return self.scale if as_it_is else self.scale.t(), self.kind


def _joined(tensors: Sequence[Tensor], dim: int) -> Tensor:
    """Codes or scales side by side; those of one byte are copied as bytes."""
    dtype = tensors[0].dtype
    if dtype.itemsize > 1:
        return torch.cat(list(tensors), dim)
    return torch.cat([tensor.view(torch.uint8) for tensor in tensors], dim).view(dtype)


def _as_product_reads(bias: Tensor) -> Tensor:
    """A bias whose numbers follow each other from a multiple of 16 bytes on.

    PyTorch checks neither, and cuBLAS reads it as if it were so.
    """
    if bias.is_contiguous() and (is_compiling() or bias.data_ptr() % 16 == 0):
        return bias  # Inductor copies what is not aligned
    return bias.clone(memory_format=torch.contiguous_format)


def multiply(
    left: GemmOperand,
    right: GemmOperand,
    dtype: torch.dtype,
    *,
    bias: Tensor | None = None,
    fast: bool = False,
) -> Tensor:
    """``left @ right.T``, summed in fp32 and rounded once.

    Args:
        left: ``(m, k)``.
        right: ``(n, k)``.
        dtype: Of the result.
        bias: ``(n,)``, of that dtype.
        fast: Whether a Hopper GPU may sum with fewer bits.

    Returns:
        ``(m, n)``.
    """
    if right.kind is ScalingType.RowWise:
        left = left.by_row()
    left, right = left.filled(), right.filled()
    mx = left.kind is ScalingType.BlockWise1x32
    swizzle = SwizzleType.SWIZZLE_32_4_4 if mx else SwizzleType.NO_SWIZZLE
    return F.scaled_mm(
        left.data,
        right.data.t(),
        *left.scaling(),
        *right.scaling(right=True),
        *(swizzle, swizzle),
        bias=None if bias is None else _as_product_reads(bias),
        output_dtype=dtype,
        use_fast_accum=fast,
    )
