"""Formats of quantized tensors: how values and scales are laid out, and nothing else.

A format is a contract between packages: a kernel in one package writes what a GEMM in another
reads. It holds plain tensors, and no recipe. The page "Formats" of the documentation has a
table for each. Those with a scale for each block are in another package.

Two rules hold for every format. A tensor counts as a matrix of ``rows`` by ``columns``: its last
dimension is the columns, all others together are the rows. And the columnwise copy of a matrix is
laid out like the rowwise copy of its transpose, so a GEMM reads both in the same way.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from typing_extensions import Self

_WIDE = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


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
BOTH = Usage(True, True)
"""What covers any usage."""


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

    @classmethod
    def known(
        cls, shape: torch.Size, dtype: torch.dtype, quantizer: Any, tensors: Any, **more: Any
    ) -> Self:
        """As the constructor, but without checks, for tensors that are known to fit.

        Args:
            shape: As for the constructor, as the next two.
            dtype: See ``shape``.
            quantizer: See ``shape``.
            tensors: The tensors, in the order of :meth:`tensors`.
            **more: The other fields.
        """
        made = object.__new__(cls)
        fields = zip(cls.tensor_names, tensors, strict=True)
        vars(made).update(fields, shape=shape, dtype=dtype, quantizer=quantizer, **more)
        return made

    def checked(self) -> Self:
        """This, after the checks of the constructor."""
        return dataclasses.replace(self)

    @property
    @abstractmethod
    def usage(self) -> Usage:
        """The copies that are here: those that :meth:`dequantize` can read."""

    def tensors(self) -> tuple[Tensor | None, ...]:
        """The tensor fields, in the order of ``tensor_names``; None where a copy is missing."""
        return tuple(map(functools.partial(getattr, self), self.tensor_names))

    def rebuild(self, tensors: Sequence[Tensor | None]) -> Self:
        """A quantized tensor like this one over other tensors.

        Args:
            tensors: The tensors, in the order of :meth:`tensors`.

        Raises:
            ValueError: Their number differs from ``tensor_names``, or one does not fit.
        """
        if len(tensors) != len(self.tensor_names):
            wanted = f"{len(self.tensor_names)} tensors ({', '.join(self.tensor_names)})"
            self.refuse(wanted, len(tensors), ".rebuild")
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
        (kept,) = each_only((self,), usage)
        return kept

    def without_padding(self, name: str) -> Tensor | None:
        """One of its tensors, without the elements that represent no value."""
        return getattr(self, name)  # type: ignore[no-any-return]

    def over(self, tensors: Sequence[Tensor | None]) -> Self:
        """As :meth:`rebuild`, but without checks, for tensors that are known to fit."""
        made = object.__new__(type(self))  # copy.copy takes four times as long
        vars(made).update(vars(self))
        vars(made).update(zip(self.tensor_names, tensors, strict=True))
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
        made = self.over(self.tensors())
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

    # Checks for the constructors of formats. Metadata only: no check reads a tensor's values.

    def refuse(self, expected: str, got: Any, where: str = "") -> NoReturn:
        """Refuse what does not fit.

        Args:
            expected: What would.
            got: What came.
            where: What of the format it is about, after its name; by default all.
        """
        raise ValueError(f"{type(self).__name__}{where}: expected {expected}, got {got}")

    def check_original(self) -> tuple[int, int]:
        """Check shape, dtype and devices of the original tensor; return its rows and columns."""
        if not isinstance(self.shape, torch.Size):
            self.shape = torch.Size(self.shape)
        if self.dtype not in _WIDE:
            self.refuse(f"the dtype of the original tensor, one of {_listed(_WIDE)}", self.dtype)
        devices = dict.fromkeys(t.device for t in self.tensors() if isinstance(t, Tensor))
        if len(devices) > 1:
            self.refuse("its tensors on one device", " and ".join(map(str, devices)))
        return matrix_of(self.shape)

    def check_tensor(
        self, name: str, shape: Sequence[int], dtypes: tuple[torch.dtype, ...]
    ) -> None:
        """Check the type, dtype, shape and strides of a field, unless it is None."""
        if (tensor := getattr(self, name)) is None:
            return
        if not isinstance(tensor, Tensor):
            what = f"expected a tensor or None, got {type(tensor).__name__}"
            raise TypeError(f"{type(self).__name__}.{name}: {what}")
        where = f".{name} for a tensor of shape {tuple(self.shape)}"
        if tensor.dtype not in dtypes:
            hint = "; view bytes as their dtype first" if tensor.dtype == torch.uint8 else ""
            self.refuse(f"one of {_listed(dtypes)}", f"{tensor.dtype}{hint}", where)
        if tensor.shape != shape:
            self.refuse(f"shape {tuple(shape)}", tuple(tensor.shape), where)
        if not tensor.is_contiguous():
            self.refuse("a contiguous tensor", f"strides {tensor.stride()}", where)

    def check_scalar(self, name: str) -> None:
        """Check that a field is float32, of one element, unless it is None."""
        tensor = getattr(self, name)
        zero_dim = isinstance(tensor, Tensor) and tensor.dim() == 0
        self.check_tensor(name, () if zero_dim else (1,), (torch.float32,))

    def check_scale(self, data: str, scale: str) -> None:
        """Check that the scale is there if the data are."""
        if getattr(self, data) is not None and getattr(self, scale) is None:
            self.refuse(f"{scale} along with {data}", None)

    def copy_to_read(self, usage: Usage) -> str:
        """The name of the copy that :meth:`dequantize` is to read; errors as there."""
        if usage.rowwise == usage.columnwise:
            self.refuse("a usage with exactly one copy", usage, ".dequantize")
        copy = "rowwise" if usage.rowwise else "columnwise"
        if not getattr(self.usage, copy):
            here = _listed([n for n in self.tensor_names if getattr(self, n) is not None])
            what = f"the {copy} copy is asked for, but it has only {here or 'no tensors'}"
            raise ValueError(f"{type(self).__name__}.dequantize: {what}")
        return copy


T = TypeVar("T", bound=QuantizedTensor)


def each_only(tensors: Iterable[T], usage: Usage) -> list[T]:
    """:meth:`QuantizedTensor.only` of several."""
    needless = tuple(itertools.compress(Usage._fields, map(operator.not_, usage)))
    found = []
    for tensor in tensors:
        kept, lacks = object.__new__(type(tensor)), False
        fields = vars(kept)
        fields.update(vars(tensor))
        for name in tensor.tensor_names:
            if name.startswith(needless):
                fields[name] = None
            elif fields[name] is None and name in tensor.data_names:
                lacks = True  # the other copy may serve as this one
        found.append(tensor if lacks and not kept.usage.covers(usage) else kept)
    return found


# Quantized tensors among others that autograd keeps: their parts as plain tensors


def unpack(saved: list[Any]) -> list[tuple[int, Any, dict[str, Any], int, int]]:
    """Move the tensors of quantized tensors to the end, so that all other places stay.

    Returns:
        For each: its place, its class, its other fields, and the range of its tensors.
    """
    found = []
    for place, entry in enumerate(tuple(saved)):
        if isinstance(entry, QuantizedTensor):
            fields, start = dict(vars(entry)), len(saved)
            for name in entry.tensor_names:
                saved.append(fields.pop(name))
            saved[place] = None
            found.append((place, type(entry), fields, start, len(saved)))
    return found


def rebuild(
    saved: tuple[Any, ...], quantized: Sequence[tuple[int, Any, dict[str, Any], int, int]]
) -> tuple[Any, ...]:
    """Undo :func:`unpack`."""
    entries = list(saved)
    for place, kind, others, start, stop in quantized:
        entries[place] = made = object.__new__(kind)
        fields = vars(made)
        fields.update(others)
        fields.update(zip(kind.tensor_names, saved[start:stop], strict=True))
    return tuple(entries)


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
    data_dtypes: ClassVar[tuple[torch.dtype, ...]] = (*FP8, torch.int8, torch.int16, *_WIDE)

    def __post_init__(self) -> None:
        """Refuse tensors that do not fit the shape."""
        rows, columns = self.check_original()
        self.check_tensor("rowwise_data", self.shape, self.data_dtypes)
        self.check_tensor("columnwise_data", (columns, rows), self.data_dtypes)
        self.check_scalar("scale_inv")
        for name in self.data_names:
            self.check_scale(name, "scale_inv")
        one, other = self.rowwise_data, self.columnwise_data
        if one is not None and other is not None and one.dtype != other.dtype:
            got = f"{one.dtype} and {other.dtype}"
            self.refuse("both copies to hold the same values in one dtype", got)

    @property
    def usage(self) -> Usage:
        """Both, if there is any copy: their values are the same."""
        here = self.rowwise_data is not None or self.columnwise_data is not None
        return Usage(here, here)

    def dequantize(self, usage: Usage = _ROWWISE) -> Tensor:
        """The values in ``dtype``, computed in float32, or in float64 if the data are that."""
        self.copy_to_read(usage)
        data = self.columnwise_data if self.rowwise_data is None else self.rowwise_data
        assert data is not None and self.scale_inv is not None  # checked
        compute = torch.float64 if data.dtype == torch.float64 else torch.float32
        values = (data.to(compute) * self.scale_inv.reshape(())).to(self.dtype)
        return values if self.rowwise_data is not None else transpose_back(values, self.shape)


def matrix_of(shape: Sequence[int]) -> tuple[int, int]:
    """Rows and columns of a tensor; one column if there is no dimension."""
    return math.prod(shape[:-1]), shape[-1] if shape else 1


def transpose_back(values: Tensor, shape: torch.Size) -> Tensor:
    """The values of a columnwise copy in the logical shape."""
    return values.t().reshape(shape).contiguous()


def _listed(things: Any) -> str:
    return ", ".join(str(thing) for thing in things)
