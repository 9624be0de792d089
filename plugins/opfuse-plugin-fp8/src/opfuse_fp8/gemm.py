"""PyTorch's scaled matrix product over the formats of :mod:`opfuse.core.quantization.formats`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from opfuse_quantized.formats import BlockScaledTensor, MXTensor, NVFP4Tensor
from opfuse_quantized.swizzle import ROWS, SCALES, swizzled, unswizzled
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn import functional as F
from torch.nn.functional import ScalingType, SwizzleType

from opfuse.core.quantization import QuantizedTensor, Usage
from opfuse.core.quantization.formats import ScaledTensor

from .together import as_one

DEPTH = 16
"""On a GPU, features, and the bytes of the codes that one number of a result is the sum of, must be
multiples of this; zeros fill up the latter."""

SMALL = {ScalingType.BlockWise1x32: 32, ScalingType.BlockWise1x16: 16}
"""The number of values that share a scale, where scales have one byte and are swizzled."""


class GemmOperand(NamedTuple):
    """A copy of a quantized tensor as a matrix whose last dimension is summed over.

    Attributes:
        data: The codes, ``(outer, inner)``; of FP4 two in a byte, ``(outer, inner / 2)``.
        scale: As its format has it; with one scale per row ``(outer, 1)``.
        kind: How it is scaled.
        swizzled: Whether scales of one byte are in the order of tensor cores.
        over_all: The second scale of NVFP4, for all values: float32, of one element.
        signs: Of the Hadamard transform that the values went through, see
            :class:`opfuse_quantized.formats.NVFP4Tensor`; or None.
    """

    data: Tensor
    scale: Tensor
    kind: ScalingType
    swizzled: bool = False
    over_all: Tensor | None = None
    signs: int | None = None

    @classmethod
    def of(cls, tensor: QuantizedTensor, usage: Usage) -> GemmOperand:
        """:meth:`each` of one tensor."""
        return cls.each((tensor,), usage)[0]

    @classmethod
    def each(cls, tensors: Iterable[QuantizedTensor], usage: Usage) -> list[GemmOperand]:
        """The copies that ``usage`` names; per-tensor codes that lack it are transposed here.

        Raises:
            TypeError: PyTorch does not multiply this format.
            ValueError: The copy is missing.
        """
        made, way = [], "rowwise" if usage.rowwise else "columnwise"
        for tensor in tensors:
            columns = tensor.shape[-1] if tensor.shape else 1
            sides = tensor.shape[:-1].numel(), columns
            sides = sides if usage.rowwise else sides[::-1]
            more: Any = {}
            if isinstance(tensor, ScaledTensor):
                data, other = tensor.rowwise_data, tensor.columnwise_data
                data, other = (data, other) if usage.rowwise else (other, data)
                if data is None and other is not None:
                    data = other.reshape(sides[::-1]).t().contiguous()
                scale, kind = tensor.scale_inv, ScalingType.TensorWise
            elif isinstance(tensor, (BlockScaledTensor, MXTensor, NVFP4Tensor)):
                data = getattr(tensor, f"{way}_data")
                scale, kind = getattr(tensor, f"{way}_scale_inv"), ScalingType.BlockWise1x32
                more["swizzled"] = getattr(tensor, "swizzled", False)
                if isinstance(tensor, BlockScaledTensor):
                    wide = tensor.block[0] > 1
                    kind = ScalingType.BlockWise128x128 if wide else ScalingType.BlockWise1x128
                elif isinstance(tensor, NVFP4Tensor):
                    kind, sides = ScalingType.BlockWise1x16, (sides[0], sides[1] // 2)
                    more["over_all"] = getattr(tensor, f"{way}_tensor_scale_inv")
                    more["signs"] = tensor.columnwise_signs if usage.columnwise else None
            else:
                raise TypeError(f"PyTorch has no product of {type(tensor).__name__}")
            if data is None or scale is None:
                raise ValueError(f"a product needs the {way} copy, got {tensor!r}")
            made.append(cls(data.reshape(sides), scale, kind, **more))
        return made

    @property
    def depth(self) -> int:
        """The number of values that are summed over."""
        return self.data.shape[1] * self._per_byte

    @property
    def _per_byte(self) -> int:
        return 2 if self.data.dtype is torch.float4_e2m1fn_x2 else 1

    @property
    def stands_alone(self) -> bool:
        """Whether a scale is for all of its values: then no other operand joins it."""
        return self.kind is ScalingType.TensorWise or self.over_all is not None

    def outer(self, start: int, stop: int) -> GemmOperand:
        """Some of the rows."""
        if (start, stop) == (0, self.data.shape[0]):
            return self
        scale = self.scale
        if self.kind is ScalingType.BlockWise1x128:
            # a single row counts as contiguous whatever its stride, which the product refuses
            scale = scale[:, start:stop].clone(memory_format=torch.contiguous_format)
        elif self.kind in SMALL:
            if self.swizzled and (start % ROWS or (stop % ROWS and stop < self.data.shape[0])):
                return self.plain().outer(start, stop)
            if self.swizzled:  # rows of tiles follow each other
                scale = self._tiles()[start // ROWS : -(-stop // ROWS)].reshape(-1)
            else:
                scale = scale[start:stop]
        return self._replace(data=self.data[start:stop], scale=scale)

    def _tiles(self) -> Tensor:
        """Swizzled scales, ``(tiles down, tiles across, scales of a tile)``."""
        across = -(-self.depth // (SCALES * SMALL[self.kind]))
        return self.scale.view(-(-self.data.shape[0] // ROWS), across, ROWS * SCALES)

    def plain(self) -> GemmOperand:
        """The same with scales of one byte as a matrix."""
        if not self.swizzled:
            return self
        size = len(self.data), self.depth // SMALL[self.kind]
        return self._replace(scale=unswizzled(self.scale, *size), swizzled=False)

    def inner(self, start: int, stop: int) -> GemmOperand:
        """A part of the summed dimension; all blocks except the last one must be whole.

        With one scale per tensor the codes stay where they are, if a product reads them there.
        """
        if self.kind is ScalingType.TensorWise:
            data = self.data[:, start:stop]
            return self._replace(data=data if is_read_in_place(data) else data.contiguous())
        if (start, stop) == (0, self.depth):
            return self
        scale, each = self.scale, self._per_byte
        if self.kind is ScalingType.BlockWise1x128:
            scale = scale[start // 128 : -(-stop // 128)]
        elif block := SMALL.get(self.kind):
            wide = SCALES * block
            if self.swizzled and (start % wide or (stop % wide and stop < self.depth)):
                return self.plain().inner(start, stop)
            if self.swizzled:  # tiles of a row, which are copied as the codes are
                scale = self._tiles()[:, start // wide : -(-stop // wide)].reshape(-1)
            else:
                scale = scale[:, start // block : stop // block]
        data = self.data[:, start // each : stop // each].contiguous()
        return self._replace(data=data, scale=scale)

    @classmethod
    def stacked(cls, parts: Sequence[GemmOperand]) -> GemmOperand:
        """The rows of several operands, one after the other; all blocks but the last are whole.

        Where each has one scale, every row has that of its part. None may have two levels of them.
        """
        kind, codes, rows = parts[0].kind, [], []
        for part in parts:
            codes.append(part.data)
            if kind is ScalingType.TensorWise:
                rows.append(part.scale.reshape(1, 1).expand(len(part.data), 1))
        data = as_one(codes)
        data = _joined(codes, 0) if data is None else data
        if rows:
            return cls(data, torch.cat(rows), ScalingType.RowWise)
        scales = [part.plain().scale for part in parts]
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

    def filled(self) -> GemmOperand:
        """With codes of zero up to a multiple of :data:`DEPTH`; blocks of scales cover them."""
        short = -self.data.shape[1] % DEPTH
        if not short:
            return self
        codes = F.pad(self.data.view(torch.uint8), (0, short))
        return self._replace(data=codes.view(self.data.dtype))

    def scaling(self) -> tuple[Any, Any, Any]:
        """The scale as ``scaled_mm`` takes it, its kind, and its order; lists of two with NVFP4."""
        if self.kind is ScalingType.TensorWise:
            return self.scale, self.kind, SwizzleType.NO_SWIZZLE
        if self.kind in SMALL:
            scale = self.scale if self.swizzled else swizzled(self.scale)
            found = scale, self.kind, SwizzleType.SWIZZLE_32_4_4
            if self.over_all is None:
                return found
            second = self.over_all, ScalingType.TensorWise, SwizzleType.NO_SWIZZLE
            return tuple(map(list, zip(found, second, strict=True)))  # type: ignore[return-value]
        return self.scale.t(), self.kind, SwizzleType.NO_SWIZZLE


def _joined(tensors: Sequence[Tensor], dim: int) -> Tensor:
    """Codes or scales side by side; those of one byte are copied as bytes."""
    dtype = tensors[0].dtype
    if dtype.itemsize > 1:
        return torch.cat(list(tensors), dim)
    return torch.cat([tensor.view(torch.uint8) for tensor in tensors], dim).view(dtype)


def is_read_in_place(codes: Tensor) -> bool:
    """Whether a product reads rows of codes that are further apart than they are long.

    cuBLASLt takes the distance of rows, each of which must begin at a multiple of 16 bytes. Traced
    code does not know where they begin.
    """
    if is_compiling():
        return codes.is_contiguous()
    (apart, each), size = codes.stride(), codes.element_size()
    aligned = apart * size % 16 == 0 and codes.data_ptr() % 16 == 0
    return aligned and each == 1 and apart >= codes.shape[1]


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

    Raises:
        ValueError: Both went through Hadamard transforms that differ, or only one of them did.
    """
    if left.signs != right.signs:
        raise ValueError(
            f"a product of transformed values needs the same signs in both operands, got "
            f"{left.signs} and {right.signs}"
        )
    if left.data.shape[1] % DEPTH:
        left, right = left.filled(), right.filled()
    kind, order, scale = right.kind, SwizzleType.NO_SWIZZLE, left.scale
    if left.kind is ScalingType.TensorWise is kind:
        one, other = (scale, kind, order), (right.scale, kind, order)
    elif kind is ScalingType.RowWise:  # so the one scale is of each row
        one = scale.reshape(1, 1).repeat(len(left.data), 1), kind, order
        other = right.scale.t(), kind, order
    else:
        one, other = left.scaling(), right.scaling()
    return F.scaled_mm(
        left.data,
        right.data.t(),
        *one[:2],
        *other[:2],
        *(one[2], other[2]),
        bias=None if bias is None else _as_product_reads(bias),
        output_dtype=dtype,
        use_fast_accum=fast,
    )
