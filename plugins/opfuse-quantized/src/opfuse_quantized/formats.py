"""The formats whose scales are for blocks of values; :mod:`opfuse.core.quantization.formats`.

Two rules hold for every format. A tensor counts as a matrix of ``rows`` by ``columns``: its last
dimension is the columns, all others together are the rows. And the columnwise copy of a matrix is
laid out like the rowwise copy of its transpose, so a GEMM reads both in the same way.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from opfuse.core.quantization import ROWWISE
from opfuse.core.quantization.formats import FP8, QuantizedTensor, Usage, matrix_of, transpose_back

from .hadamard import unmixed
from .swizzle import swizzled_size, unswizzled

_BLOCKS = ((1, 128), (128, 128))


@dataclasses.dataclass(eq=False, repr=False)
class _TwoCopies(QuantizedTensor):
    """A format whose copies are quantized separately, each with its own scales."""

    rowwise_data: Tensor | None = None
    rowwise_scale_inv: Tensor | None = None
    columnwise_data: Tensor | None = None
    columnwise_scale_inv: Tensor | None = None
    tensor_names: ClassVar[tuple[str, ...]] = (
        "rowwise_data",
        "rowwise_scale_inv",
        "columnwise_data",
        "columnwise_scale_inv",
    )
    data_names: ClassVar[tuple[str, ...]] = ("rowwise_data", "columnwise_data")
    data_dtypes: ClassVar[tuple[torch.dtype, ...]]
    scale_dtype: ClassVar[torch.dtype]
    per_byte: ClassVar[int] = 1  # values in an element of the data

    def __post_init__(self) -> None:
        """Refuse tensors that do not fit the shape."""
        rows, columns = self.check_original()
        for way, outer, inner in (("rowwise", rows, columns), ("columnwise", columns, rows)):
            data, scale = f"{way}_data", f"{way}_scale_inv"
            if getattr(self, data) is None and getattr(self, scale) is None:
                continue
            scales = self._scale_shape(way, outer, inner)  # refuses a size that it cannot divide
            self.check_tensor(scale, scales, (self.scale_dtype,))
            values = tuple(self.shape) if way == "rowwise" else (outer, inner)
            if self.per_byte > 1:
                values = (*values[:-1], inner // self.per_byte)
            self.check_tensor(data, values, self.data_dtypes)
            self.check_scale(data, scale)

    @property
    def usage(self) -> Usage:
        """The copies that are here."""
        return Usage(self.rowwise_data is not None, self.columnwise_data is not None)

    def dequantize(self, usage: Usage = ROWWISE) -> Tensor:
        """The values in ``dtype``, computed in float32 from the copy that ``usage`` names."""
        copy = self.copy_to_read(usage)
        rows, columns = matrix_of(self.shape)
        size = (rows, columns) if usage.rowwise else (columns, rows)
        values = self._unpacked(getattr(self, f"{copy}_data")).reshape(size)
        values = self._scaled(copy, values).to(self.dtype)
        return values.reshape(self.shape) if usage.rowwise else transpose_back(values, self.shape)

    @abstractmethod
    def _scale_shape(self, copy: str, outer: int, inner: int) -> tuple[int, ...]:
        """The shape of the scales of a matrix whose blocks lie along ``inner``."""

    def _unpacked(self, data: Tensor) -> Tensor:
        """The values of ``data`` in float32, without their scales."""
        return data.float()

    @abstractmethod
    def _scaled(self, copy: str, values: Tensor) -> Tensor:
        """Multiply a matrix, whose blocks lie along its last dimension, by a copy's scales."""


@dataclasses.dataclass(eq=False, repr=False)
class BlockScaledTensor(_TwoCopies):
    """A float32 scale for each block of 1 x 128 or 128 x 128 values.

    The last block of a row or column is shorter if its length is not a multiple of 128. The
    transpose of the scales, a view, is what :func:`torch.nn.functional.scaled_mm` takes.

    Args:
        shape: The logical shape.
        dtype: The dtype of the original tensor.
        quantizer: The quantizer that made it, or None.
        rowwise_data: fp8 values in the logical shape.
        rowwise_scale_inv: float32. Blocks of 1 x 128: ``(ceil(columns / 128), rows)``. Blocks of
            128 x 128: ``(ceil(rows / 128), ceil(columns / 128))``, with the last dimension rounded
            up to a multiple of 4. The surplus columns are never used.
        columnwise_data: The copy for GEMMs that reduce over the rows: ``(columns, rows)``.
        columnwise_scale_inv: As ``rowwise_scale_inv``, with rows and columns exchanged.
        block: ``(1, 128)`` or ``(128, 128)``.
    """

    block: tuple[int, int] = dataclasses.field(kw_only=True)
    data_dtypes = FP8
    scale_dtype = torch.float32

    def __post_init__(self) -> None:
        """Refuse another block, and tensors that do not fit the shape."""
        if self.block not in _BLOCKS:
            self.refuse("a block of (1, 128) or (128, 128)", self.block)
        super().__post_init__()

    def without_padding(self, name: str) -> Tensor | None:
        """One of its tensors; of square blocks' scales, without the surplus columns."""
        part = super().without_padding(name)
        if part is None or name in self.data_names or self.block[0] == 1:
            return part
        rows, columns = matrix_of(self.shape)
        return part[:, : _ceil(columns if name.startswith("rowwise") else rows, 128)]

    def _scale_shape(self, copy: str, outer: int, inner: int) -> tuple[int, int]:
        along = _ceil(inner, 128)
        return (along, outer) if self.block[0] == 1 else (_ceil(outer, 128), 4 * _ceil(along, 4))

    def _scaled(self, copy: str, values: Tensor) -> Tensor:
        scale: Tensor = getattr(self, f"{copy}_scale_inv")
        if self.block[0] == 1:
            return _times(values, scale.t(), 128)
        return _times(values, scale.repeat_interleave(128, 0)[: values.shape[0]], 128)


@dataclasses.dataclass(eq=False, repr=False)
class _Swizzlable(_TwoCopies):
    """A format with a scale of one byte for so many neighbours, which may be swizzled."""

    swizzled: bool = dataclasses.field(default=False, kw_only=True)
    per_scale: ClassVar[int]  # values

    def without_padding(self, name: str) -> Tensor | None:
        """One of its tensors; of swizzled scales, those that there are, as a matrix."""
        part = super().without_padding(name)
        if part is None or not name.endswith("wise_scale_inv") or not self.swizzled:
            return part
        rows, columns = matrix_of(self.shape)
        outer, inner = (rows, columns) if name.startswith("rowwise") else (columns, rows)
        return unswizzled(part, outer, inner // self.per_scale)

    def _scale_shape(self, copy: str, outer: int, inner: int) -> tuple[int, ...]:
        blocks = _whole_blocks(self, copy, inner, self.per_scale)
        return (swizzled_size(outer, blocks),) if self.swizzled else (outer, blocks)

    def _scaled(self, copy: str, values: Tensor) -> Tensor:
        scale = self.without_padding(f"{copy}_scale_inv")
        assert scale is not None  # it is there along with the data
        return _times(values, scale.float(), self.per_scale)


@dataclasses.dataclass(eq=False, repr=False)
class MXTensor(_Swizzlable):
    """OCP microscaling: a power of two, in E8M0, for each block of 1 x 32 fp8 values.

    A copy's blocks are whole: the rowwise copy needs a multiple of 32 columns, the columnwise copy
    a multiple of 32 rows, as MX GEMMs do.

    ``swizzled`` says how the scales are laid out. False: as a matrix, not padded. True: flat, as
    tensor cores of NVIDIA's read them (:mod:`opfuse_quantized.swizzle`). The shapes differ, so no
    tensor passes for the other.

    Args:
        shape: The logical shape.
        dtype: The dtype of the original tensor.
        quantizer: The quantizer that made it, or None.
        rowwise_data: e4m3fn or e5m2 values in the logical shape.
        rowwise_scale_inv: float8_e8m0fnu, ``(rows, columns / 32)``.
        columnwise_data: The copy for GEMMs that reduce over the rows: ``(columns, rows)``.
        columnwise_scale_inv: float8_e8m0fnu, ``(columns, rows / 32)``.
        swizzled: Whether the scales of both copies are swizzled. Then they have one dimension, of
            512 for each 128 rows of the copy and 128 values of these, rounded up.
    """

    data_dtypes = (torch.float8_e4m3fn, torch.float8_e5m2)
    scale_dtype = torch.float8_e8m0fnu
    per_scale = 32


@dataclasses.dataclass(eq=False, repr=False)
class NVFP4Tensor(_Swizzlable):
    """NVFP4: E2M1 values, an e4m3 scale for each block of 1 x 16, and a float32 scale over all.

    A value is ``data * scale_inv * tensor_scale_inv``. A byte holds two values; the first is in
    the low nibble (bits 0 to 3). A copy's blocks are whole: the rowwise copy needs a multiple of 16
    columns, the columnwise copy a multiple of 16 rows, as NVFP4 GEMMs do. The scales of blocks are
    laid out as those of :class:`MXTensor`.

    The columnwise copy may hold transformed values: each 16 neighbours times ``diag(signs) @ H /
    4``, where ``H`` is Sylvester's Hadamard matrix. :meth:`dequantize` undoes that. A GEMM may read
    two such copies as they are if both have the same signs, since the transform is orthogonal; it
    refuses a pair whose signs differ, or a pair with only one transformed copy.

    Args:
        shape: The logical shape.
        dtype: The dtype of the original tensor.
        quantizer: The quantizer that made it, or None.
        rowwise_data: float4_e2m1fn_x2, the logical shape with half the columns.
        rowwise_scale_inv: float8_e4m3fn, ``(rows, columns / 16)``.
        columnwise_data: The copy for GEMMs that reduce over the rows: ``(columns, rows / 2)``.
        columnwise_scale_inv: float8_e4m3fn, ``(columns, rows / 16)``.
        rowwise_tensor_scale_inv: The rowwise copy's second scale: float32, of one element.
        columnwise_tensor_scale_inv: The same for the columnwise copy.
        columnwise_signs: None: the columnwise copy holds the values as they are. Otherwise they are
            transformed, and bit ``i`` says whether the ``i``-th of 16 neighbours was negated first.
        swizzled: Whether the scales of blocks are swizzled, of both copies. Then they have one
            dimension, of 512 for each 128 rows of the copy and 64 values of these, rounded up.
    """

    rowwise_tensor_scale_inv: Tensor | None = None
    columnwise_tensor_scale_inv: Tensor | None = None
    columnwise_signs: int | None = None
    tensor_names = (
        *_Swizzlable.tensor_names,
        "rowwise_tensor_scale_inv",
        "columnwise_tensor_scale_inv",
    )
    data_dtypes = (torch.float4_e2m1fn_x2,)
    scale_dtype = torch.float8_e4m3fn
    per_byte = 2
    per_scale = 16

    def __post_init__(self) -> None:
        """Refuse invalid signs, and tensors that do not fit the shape."""
        signs = self.columnwise_signs
        if signs is not None and not (type(signs) is int and 0 <= signs < 1 << 16):
            self.refuse("columnwise_signs of None or 16 bits", repr(signs))
        super().__post_init__()
        for way in ("rowwise", "columnwise"):
            self.check_scalar(f"{way}_tensor_scale_inv")
            self.check_scale(f"{way}_data", f"{way}_tensor_scale_inv")

    def _scaled(self, copy: str, values: Tensor) -> Tensor:
        if copy == "columnwise" and self.columnwise_signs is not None:
            values = unmixed(values, self.columnwise_signs)  # exact: sums of 16 small numbers
        values = super()._scaled(copy, values)
        over_all: Tensor = getattr(self, f"{copy}_tensor_scale_inv")
        return values * over_all.reshape(())  # the first product is exact

    def _unpacked(self, data: Tensor) -> Tensor:
        """Unpack by arithmetic rather than a table, which would have to be copied to the device."""
        packed = data.view(torch.uint8)
        code = torch.stack([packed & 15, packed >> 4], -1).flatten(-2)
        exponent, mantissa = code >> 1 & 3, code & 1
        normal = (exponent > 0).to(torch.uint8)
        twice = (2 * normal + mantissa) << (exponent - normal)
        magnitude = twice.float() / 2
        return torch.where(code > 7, -magnitude, magnitude)


def _ceil(size: int, block: int) -> int:
    return -(-size // block)


def _times(values: Tensor, scales: Tensor, block: int) -> Tensor:
    """Multiply each run of ``block`` values by its scale; scales beyond the last are padding."""
    return values * scales.repeat_interleave(block, 1)[:, : values.shape[1]]


def _whole_blocks(made: QuantizedTensor, copy: str, size: int, block: int) -> int:
    """The number of blocks in ``size`` values.

    Raises:
        ValueError: The last block is not whole.
    """
    if size % block:
        sides = "columns" if copy == "rowwise" else "rows"
        where = f" of shape {tuple(made.shape)}"
        made.refuse(f"a multiple of {block} {sides} for a {copy} copy", size, where)
    return size // block
