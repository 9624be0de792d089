"""Formats of quantized tensors: how values and scales are laid out, and nothing else.

A format is a contract between packages: a kernel in one package writes what a GEMM in another
reads. It holds plain tensors, and knows no recipe. The page "Formats" of the documentation has a
table for each.

Two rules hold for every format. A tensor counts as a matrix of ``rows`` by ``columns``: its last
dimension is the columns, all others together are the rows. And the columnwise copy of a matrix is
laid out like the rowwise copy of its transpose, so a GEMM reads both in the same way.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from typing_extensions import Self

_WIDE = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
_BLOCKS = ((1, 128), (128, 128))


class Usage(NamedTuple):
    """The copies of a quantized tensor that are needed, which depend on the GEMMs that read it.

    Attributes:
        rowwise: The copy quantized along the last dimension.
        columnwise: The copy quantized along the rows.
    """

    rowwise: bool = True
    columnwise: bool = False

    def covers(self, other: Usage) -> bool:
        """Return whether every copy that ``other`` needs is here."""
        return self.rowwise >= other.rowwise and self.columnwise >= other.columnwise


_ROWWISE = Usage()


@dataclasses.dataclass(eq=False, repr=False)
class QuantizedTensor(ABC):
    """The result of a quantizer: plain tensors in a documented layout, not a tensor subclass.

    Args:
        shape: The logical shape, that of the original tensor, whatever the layout.
        dtype: The dtype of the original tensor, which :meth:`dequantize` returns.
        quantizer: The quantizer that made it, or None.

    Attributes:
        tensor_names: Names of the tensor fields, in the order of :meth:`tensors`.
        data_names: The fields that hold values. The others hold scales.
    """

    shape: torch.Size
    dtype: torch.dtype
    quantizer: Any
    tensor_names: ClassVar[tuple[str, ...]] = ()
    data_names: ClassVar[tuple[str, ...]] = ()

    @property
    @abstractmethod
    def usage(self) -> Usage:
        """The copies that are here: those that :meth:`dequantize` can read."""

    def tensors(self) -> tuple[Tensor | None, ...]:
        """The tensor fields, in the order of ``tensor_names``; None where a copy is missing."""
        return tuple([getattr(self, name) for name in self.tensor_names])

    def rebuild(self, tensors: Sequence[Tensor | None]) -> Self:
        """A quantized tensor like this one over other tensors.

        Args:
            tensors: The tensors, in the order of :meth:`tensors`.

        Raises:
            ValueError: Their number differs from ``tensor_names``, or one does not fit.
        """
        if len(tensors) != len(self.tensor_names):
            raise ValueError(
                f"{type(self).__name__}.rebuild: expected {len(self.tensor_names)} tensors "
                f"({', '.join(self.tensor_names)}), got {len(tensors)}"
            )
        fields: dict[str, Any] = dict(zip(self.tensor_names, tensors, strict=True))
        return dataclasses.replace(self, **fields)

    def without_data(self) -> Self:
        """The scales alone: a copy of this whose values are None."""
        return self.over(
            [None if name in self.data_names else getattr(self, name) for name in self.tensor_names]
        )

    @property
    def copies(self) -> Usage:
        """The copies that are stored; one may also serve as the other, see :attr:`usage`."""
        here = [name for name in self.data_names if getattr(self, name) is not None]
        return Usage(*[any(name.startswith(way) for name in here) for way in Usage._fields])

    def only(self, usage: Usage) -> Self:
        """A view of this with only the copies that ``usage`` needs, to keep for a backward."""
        needless = tuple([name for name, used in usage._asdict().items() if not used])
        fields = zip(self.tensor_names, self.tensors(), strict=True)
        kept = self.over([None if name.startswith(needless) else t for name, t in fields])
        return kept if kept.usage.covers(usage) else self

    def over(self, tensors: Sequence[Tensor | None]) -> Self:
        """As :meth:`rebuild`, but without checks, for tensors that are known to fit."""
        made = copy.copy(self)
        for name, tensor in zip(self.tensor_names, tensors, strict=True):
            setattr(made, name, tensor)
        return made

    @abstractmethod
    def dequantize(self, usage: Usage = _ROWWISE) -> Tensor:
        """The values as a plain, contiguous tensor of ``dtype`` and ``shape``.

        Args:
            usage: The copy to read; exactly one flag is set.

        Raises:
            ValueError: ``usage`` does not name exactly one copy, or that copy is missing.
        """

    def widened(self, usage: Usage = _ROWWISE) -> Tensor:
        """The values before they are rounded to ``dtype``: in float32, or float64 if it is that.

        Emulated products use them. Arguments and errors are as for :meth:`dequantize`.
        """
        return self.of_dtype(torch.promote_types(self.dtype, torch.float32)).dequantize(usage)

    def of_dtype(self, dtype: torch.dtype) -> Self:
        """The same codes with values rounded to another dtype."""
        made = copy.copy(self)
        made.dtype = dtype
        return made

    def __repr__(self) -> str:
        here = [
            f"{name} {str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
            for name, tensor in zip(self.tensor_names, self.tensors(), strict=True)
            if tensor is not None
        ]
        what = f"{type(self).__name__}: {tuple(self.shape)} of {self.dtype}"
        return f"<{what}; {', '.join(here) or 'no tensors'}>"


@dataclasses.dataclass(eq=False, repr=False)
class ScaledTensor(QuantizedTensor):
    """One scale for the whole tensor: a value is ``data * scale_inv``.

    Both copies hold the same values, so either of them serves both usages. A GEMM that takes a
    transposed operand only looks at the fields.

    Args:
        shape: The logical shape.
        dtype: The dtype of the original tensor.
        quantizer: The quantizer that made it, or None.
        rowwise_data: The values in the logical shape.
        columnwise_data: The values transposed, ``(columns, rows)``.
        scale_inv: The factor of every value: float32, of one element.
    """

    rowwise_data: Tensor | None = None
    columnwise_data: Tensor | None = None
    scale_inv: Tensor | None = None
    tensor_names = ("rowwise_data", "columnwise_data", "scale_inv")
    data_names = ("rowwise_data", "columnwise_data")
    data_dtypes: ClassVar[tuple[torch.dtype, ...]] = (*_FP8, torch.int8, torch.int16, *_WIDE)

    def __post_init__(self) -> None:
        """Refuse tensors that do not fit the shape."""
        rows, columns = _check_original(self)
        _check(self, "rowwise_data", self.shape, self.data_dtypes)
        _check(self, "columnwise_data", (columns, rows), self.data_dtypes)
        _check_scalar(self, "scale_inv")
        for name in self.data_names:
            _check_scale(self, name, "scale_inv")
        one, other = self.rowwise_data, self.columnwise_data
        if one is not None and other is not None and one.dtype != other.dtype:
            raise ValueError(
                "ScaledTensor: expected both copies to hold the same values in one dtype, "
                f"got {one.dtype} and {other.dtype}"
            )

    @property
    def usage(self) -> Usage:
        """Both, if there is any copy: their values are the same."""
        here = self.rowwise_data is not None or self.columnwise_data is not None
        return Usage(here, here)

    def dequantize(self, usage: Usage = _ROWWISE) -> Tensor:
        """The values in ``dtype``, computed in float32, or in float64 if the data are that."""
        _one_copy(self, usage)
        data = self.columnwise_data if self.rowwise_data is None else self.rowwise_data
        assert data is not None and self.scale_inv is not None  # _one_copy has checked
        compute = torch.float64 if data.dtype == torch.float64 else torch.float32
        values = (data.to(compute) * self.scale_inv.reshape(())).to(self.dtype)
        return values if self.rowwise_data is not None else _untransposed(values, self.shape)


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
        rows, columns = _check_original(self)
        for way, outer, inner in (("rowwise", rows, columns), ("columnwise", columns, rows)):
            data, scale = f"{way}_data", f"{way}_scale_inv"
            if getattr(self, data) is None and getattr(self, scale) is None:
                continue
            scales = self._scale_shape(way, outer, inner)  # refuses a size that it cannot divide
            _check(self, scale, scales, (self.scale_dtype,))
            values = tuple(self.shape) if way == "rowwise" else (outer, inner)
            if self.per_byte > 1:
                values = (*values[:-1], inner // self.per_byte)
            _check(self, data, values, self.data_dtypes)
            _check_scale(self, data, scale)

    @property
    def usage(self) -> Usage:
        """The copies that are here."""
        return Usage(self.rowwise_data is not None, self.columnwise_data is not None)

    def dequantize(self, usage: Usage = _ROWWISE) -> Tensor:
        """The values in ``dtype``, computed in float32 from the copy that ``usage`` names."""
        copy = _one_copy(self, usage)
        rows, columns = _matrix(self.shape)
        size = (rows, columns) if usage.rowwise else (columns, rows)
        values = self._unpacked(getattr(self, f"{copy}_data")).reshape(size)
        values = self._scaled(copy, values).to(self.dtype)
        return values.reshape(self.shape) if usage.rowwise else _untransposed(values, self.shape)

    @abstractmethod
    def _scale_shape(self, copy: str, outer: int, inner: int) -> tuple[int, int]:
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
    data_dtypes = _FP8
    scale_dtype = torch.float32

    def __post_init__(self) -> None:
        """Refuse another block, and tensors that do not fit the shape."""
        if self.block not in _BLOCKS:
            raise ValueError(
                f"BlockScaledTensor: expected a block of (1, 128) or (128, 128), got {self.block}"
            )
        super().__post_init__()

    def _scale_shape(self, copy: str, outer: int, inner: int) -> tuple[int, int]:
        along = _ceil(inner, 128)
        return (along, outer) if self.block[0] == 1 else (_ceil(outer, 128), 4 * _ceil(along, 4))

    def _scaled(self, copy: str, values: Tensor) -> Tensor:
        scale: Tensor = getattr(self, f"{copy}_scale_inv")
        if self.block[0] == 1:
            return _times(values, scale.t(), 128)
        return _times(values, scale.repeat_interleave(128, 0)[: values.shape[0]], 128)


class MXTensor(_TwoCopies):
    """OCP microscaling: a power of two, in E8M0, for each block of 1 x 32 fp8 values.

    The scales are neither swizzled nor padded. A copy's blocks are whole: the rowwise copy needs
    a multiple of 32 columns, the columnwise copy a multiple of 32 rows, as MX GEMMs do.

    Args:
        shape: The logical shape.
        dtype: The dtype of the original tensor.
        quantizer: The quantizer that made it, or None.
        rowwise_data: e4m3fn or e5m2 values in the logical shape.
        rowwise_scale_inv: float8_e8m0fnu, ``(rows, columns / 32)``.
        columnwise_data: The copy for GEMMs that reduce over the rows: ``(columns, rows)``.
        columnwise_scale_inv: float8_e8m0fnu, ``(columns, rows / 32)``.
    """

    data_dtypes = (torch.float8_e4m3fn, torch.float8_e5m2)
    scale_dtype = torch.float8_e8m0fnu

    def _scale_shape(self, copy: str, outer: int, inner: int) -> tuple[int, int]:
        return outer, _whole_blocks(self, copy, inner, 32)

    def _scaled(self, copy: str, values: Tensor) -> Tensor:
        return _times(values, getattr(self, f"{copy}_scale_inv").float(), 32)


@dataclasses.dataclass(eq=False, repr=False)
class NVFP4Tensor(_TwoCopies):
    """NVFP4: E2M1 values, an e4m3 scale for each block of 1 x 16, and a float32 scale over all.

    A value is ``data * scale_inv * tensor_scale_inv``. A byte holds two values; the first is in
    the low nibble (bits 0 to 3). The scales are neither swizzled nor padded. A copy's blocks are
    whole: the rowwise copy needs a multiple of 16 columns, the columnwise copy a multiple of 16
    rows, as NVFP4 GEMMs do.

    The columnwise copy may hold transformed values: each 16 neighbours times ``diag(signs) @ H /
    4``, where ``H`` is Sylvester's Hadamard matrix. :meth:`dequantize` undoes that. A GEMM may read
    two such copies as they are if both have the same signs, since the transform is orthogonal; it
    refuses a pair of which the signs differ, or of which only one is transformed.

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
    """

    rowwise_tensor_scale_inv: Tensor | None = None
    columnwise_tensor_scale_inv: Tensor | None = None
    columnwise_signs: int | None = None
    tensor_names = (
        *_TwoCopies.tensor_names,
        "rowwise_tensor_scale_inv",
        "columnwise_tensor_scale_inv",
    )
    data_dtypes = (torch.float4_e2m1fn_x2,)
    scale_dtype = torch.float8_e4m3fn
    per_byte = 2

    def __post_init__(self) -> None:
        """Refuse invalid signs, and tensors that do not fit the shape."""
        signs = self.columnwise_signs
        if signs is not None and not (type(signs) is int and 0 <= signs < 1 << 16):
            raise ValueError(
                f"NVFP4Tensor: expected columnwise_signs of None or 16 bits, got {signs!r}"
            )
        super().__post_init__()
        for way in ("rowwise", "columnwise"):
            _check_scalar(self, f"{way}_tensor_scale_inv")
            _check_scale(self, f"{way}_data", f"{way}_tensor_scale_inv")

    def _scale_shape(self, copy: str, outer: int, inner: int) -> tuple[int, int]:
        return outer, _whole_blocks(self, copy, inner, 16)

    def _scaled(self, copy: str, values: Tensor) -> Tensor:
        if copy == "columnwise" and self.columnwise_signs is not None:
            from .hadamard import unmixed

            values = unmixed(values, self.columnwise_signs)  # exact: sums of 16 small numbers
        values = _times(values, getattr(self, f"{copy}_scale_inv").float(), 16)
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


def _matrix(shape: Sequence[int]) -> tuple[int, int]:
    """Rows and columns of a tensor; one column if there is no dimension."""
    return math.prod(shape[:-1]), shape[-1] if shape else 1


def _untransposed(values: Tensor, shape: torch.Size) -> Tensor:
    return values.t().reshape(shape).contiguous()


def _times(values: Tensor, scales: Tensor, block: int) -> Tensor:
    """Multiply each run of ``block`` values by its scale; scales beyond the last are padding."""
    return values * scales.repeat_interleave(block, 1)[:, : values.shape[1]]


# Checks of the constructors. Metadata only: no check reads a tensor's values.


def _check_original(made: QuantizedTensor) -> tuple[int, int]:
    """Check shape, dtype and devices of the original tensor; return its rows and columns."""
    if not isinstance(made.shape, torch.Size):
        made.shape = torch.Size(made.shape)
    if made.dtype not in _WIDE:
        raise ValueError(
            f"{type(made).__name__}: expected the dtype of the original tensor, one of "
            f"{_listed(_WIDE)}, got {made.dtype}"
        )
    devices = [tensor.device for tensor in made.tensors() if isinstance(tensor, Tensor)]
    for device in devices:
        if device != devices[0]:
            raise ValueError(
                f"{type(made).__name__}: expected its tensors on one device, "
                f"got {devices[0]} and {device}"
            )
    return _matrix(made.shape)


def _check(
    made: QuantizedTensor, name: str, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]
) -> None:
    tensor = getattr(made, name)
    if tensor is None:
        return
    if not isinstance(tensor, Tensor):
        raise TypeError(
            f"{type(made).__name__}.{name}: expected a tensor or None, got {type(tensor).__name__}"
        )
    if tensor.dtype not in dtypes:
        hint = "; view bytes as their dtype first" if tensor.dtype == torch.uint8 else ""
        expected, got = f"one of {_listed(dtypes)}", f"{tensor.dtype}{hint}"
    elif tensor.shape != shape:
        expected, got = f"shape {tuple(shape)}", f"{tuple(tensor.shape)}"
    elif not tensor.is_contiguous():
        expected, got = "a contiguous tensor", f"strides {tensor.stride()}"
    else:
        return
    raise ValueError(
        f"{type(made).__name__}.{name} for a tensor of shape {tuple(made.shape)}: "
        f"expected {expected}, got {got}"
    )


def _check_scalar(made: QuantizedTensor, name: str) -> None:
    tensor = getattr(made, name)
    zero_dim = isinstance(tensor, Tensor) and tensor.dim() == 0
    _check(made, name, () if zero_dim else (1,), (torch.float32,))


def _check_scale(made: QuantizedTensor, data: str, scale: str) -> None:
    if getattr(made, data) is not None and getattr(made, scale) is None:
        raise ValueError(f"{type(made).__name__}: expected {scale} along with {data}, got None")


def _whole_blocks(made: QuantizedTensor, copy: str, size: int, block: int) -> int:
    """The number of blocks in ``size`` values.

    Raises:
        ValueError: The last block is not whole.
    """
    if size % block:
        sides = "columns" if copy == "rowwise" else "rows"
        raise ValueError(
            f"{type(made).__name__} of shape {tuple(made.shape)}: expected a multiple of {block} "
            f"{sides} for a {copy} copy, got {size}"
        )
    return size // block


def _one_copy(made: QuantizedTensor, usage: Usage) -> str:
    """The name of the copy to read.

    Raises:
        ValueError: ``usage`` does not name exactly one copy, or that copy is missing.
    """
    if usage.rowwise == usage.columnwise:
        raise ValueError(
            f"{type(made).__name__}.dequantize: expected a usage with exactly one copy, got {usage}"
        )
    copy = "rowwise" if usage.rowwise else "columnwise"
    if not getattr(made.usage, copy):
        names = zip(made.tensor_names, made.tensors(), strict=True)
        here = _listed([name for name, tensor in names if tensor is not None])
        raise ValueError(
            f"{type(made).__name__}.dequantize: the {copy} copy is asked for, but it has only "
            f"{here or 'no tensors'}"
        )
    return copy


def _listed(things: Any) -> str:
    return ", ".join(str(thing) for thing in things)
