"""Launches the kernels, and makes quantized tensors of their results."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import triton.language as tl
from opfuse_quantized.swizzle import ROWS, SCALES, swizzled_size
from opfuse_triton import Kernel, cdiv, current_target
from opfuse_triton.elementwise.formulas import IDENTITY, Formula
from opfuse_triton.sums import sum_strips
from torch import Tensor

from opfuse.core.quantization import COLUMNWISE, ROWWISE, QuantizedTensor, Usage

from ..quantizers import BlockQuantizer, CurrentQuantizer, MXQuantizer
from ..together import waiting
from ..twins import Into, refuse_other_device
from . import elementwise, tiles

MANTISSA = {torch.float8_e4m3fn: 3, torch.float8_e5m2: 2}
TL = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}

FORWARD = Kernel(elementwise.cast_forward, tiles.configs, tiles.grid)
BACKWARD = Kernel(elementwise.cast_backward, tiles.configs, tiles.grid)

_OF_TENSORS = "none", "tensor"
"""The formats with one scale."""


def format_of(quantizer: Any) -> str:
    """The kernels' name for the format of a quantizer; ``"none"``: its scale is not known yet."""
    return _format(type(quantizer), quantizer.block, quantizer.swizzles)


@functools.lru_cache(1024)
def _format(kind: type, block: tuple[int, int], swizzles: bool) -> str:
    if issubclass(kind, BlockQuantizer):
        return "block" if block[0] == 1 else "square"
    if issubclass(kind, MXQuantizer):
        return "swizzled mx" if swizzles else "mx"
    return "none" if issubclass(kind, CurrentQuantizer) else "tensor"


@functools.lru_cache(1024)
def _layout(
    of: tuple[Any, ...], codes: torch.dtype, power_of_2: bool, dtype: torch.dtype, shape: torch.Size
) -> tuple[int, int, Mapping[str, Any], Sequence[tuple[Any, Any, torch.dtype]]]:
    """Rows, columns, the kernel's constants, and room for the scales of each copy.

    Args:
        of: The arguments of :func:`_format`.
        codes: The dtype of the codes.
        power_of_2: Whether scales are powers of two.
        dtype: That of the values.
        shape: Likewise.
    """
    form, columns = _format(*of), shape[-1]
    rows = shape.numel() // columns
    constants = {
        "DTYPE": TL[dtype],
        "FORMAT": form,
        "MANTISSA": MANTISSA[codes],
        "POWER_OF_2": bool(power_of_2),
        "IF_INFINITE": torch.finfo(dtype).max,
    }
    sides = (rows, columns), (columns, rows)
    return rows, columns, constants, [_room(form, outer, inner) for outer, inner in sides]


def _room(form: str, outer: int, inner: int) -> tuple[Any, Any, torch.dtype]:
    """What makes the scales of a copy whose blocks lie along ``inner``, their shape and dtype."""
    if form in _OF_TENSORS:
        return torch.empty, 1, torch.float32
    if form == "block":
        return torch.empty, (cdiv(inner, 128), outer), torch.float32
    if form == "square":
        down, across = cdiv(outer, 128), cdiv(inner, 128)
        make = torch.zeros if across % 4 else torch.empty  # what fills it up is not written
        return make, (down, 4 * cdiv(across, 4)), torch.float32
    return room_for_scales(outer, inner // 32, form == "swizzled mx")


def room_for_scales(outer: int, blocks: int, swizzles: bool) -> tuple[Any, Any, torch.dtype]:
    """What makes scales of one byte, their shape and dtype; what fills up swizzled tiles is zero.

    Args:
        outer: How many rows a copy has.
        blocks: How many scales a row has.
        swizzles: Whether the kernel swizzles them.
    """
    if not swizzles:
        return torch.empty, (outer, blocks), torch.uint8
    make = torch.zeros if outer % ROWS or blocks % SCALES else torch.empty
    return make, swizzled_size(outer, blocks), torch.uint8


class Casting:
    """A cast by kernels: where codes and scales go, and the tensor that they make.

    With :class:`CurrentQuantizer` the kernel writes the values, and :meth:`made` casts them when
    their largest magnitude is known. With the others it writes the codes.

    Args:
        into: The target of the cast, with a quantizer that the kernels know.
        shape: That of the values.
        dtype: What the values are rounded to.
        device: Where they are.
        values: The values, where they are there already.

    Attributes:
        rows: How many rows there are.
        columns: How many columns.
        usage: The copies that are wanted.
        values: The values, where a kernel reads or writes them in addition to their codes.
        constants: The constants of the kernel for this cast.
        pointers: The tensors that a kernel writes or reads: the values, the rowwise codes and their
            scales, the columnwise ones and theirs, the scale, and the largest magnitude so far.
        result: The quantized tensor, over memory that the kernels write.
    """

    def __init__(
        self,
        into: Into,
        shape: torch.Size,
        dtype: torch.dtype,
        device: torch.device,
        values: Tensor | None = None,
    ) -> None:
        quantizer, self.usage, again = into
        here = again is None
        for name in quantizer.state_names:
            here = here and getattr(quantizer, name).device == device
        if not here:
            refuse_other_device(into, device)
        of = type(quantizer), quantizer.block, quantizer.swizzles
        layout = _layout(of, quantizer.dtype, quantizer.power_of_2, dtype, shape)
        self.rows, self.columns, self.constants, rooms = layout
        self.values, form, codes = values, self.constants["FORMAT"], quantizer.dtype
        wide = row = column = scale = amax = data = columnwise = None
        if self.usage.rowwise:
            if (side := waiting.get()) is not None:
                row = side.take(quantizer, shape, device)
            row = torch.empty(shape, dtype=torch.uint8, device=device) if row is None else row
            data = row.view(codes)
        if self.usage.columnwise:
            size = self.columns, self.rows
            column = torch.empty(size, dtype=torch.uint8, device=device)
            columnwise = column.view(codes)
        scales: list[Any] = []
        # one scale is of both copies; and beside it is the scale to cast again
        wanted = (True, form == "tensor") if form in _OF_TENSORS else self.usage
        for wants, (make, size, kind) in zip(wanted, rooms, strict=True):
            scales.append(make(size, dtype=kind, device=device) if wants else None)
        if form not in _OF_TENSORS:
            parts = data, scales[0], columnwise, scales[1]
            self.result: QuantizedTensor = quantizer.over(shape, dtype, parts)
        else:  # as `known` makes it, which would be called for each
            self.result = object.__new__(quantizer.format)
            fields = zip(self.result.tensor_names, (data, columnwise, *scales), strict=False)
            vars(self.result).update(fields, shape=shape, dtype=dtype, quantizer=quantizer)
        if form == "none":
            amax = torch.zeros(1, dtype=torch.float32, device=device)
            if values is None:
                self.values = wide = torch.empty(shape, dtype=dtype, device=device)
        elif form == "tensor" and again is None:
            if quantizer._fixed[0] is not quantizer.scale:
                quantizer.is_fixed()
            scale, amax = quantizer.scale, quantizer.amax
        elif form == "tensor":
            scale = again.scale
        self._codes = row, scales[0], column, scales[1]
        self.pointers = wide, *(self._codes if form != "none" else (None,) * 4), scale, amax

    def passes(self, x: Tensor, apart: bool = False) -> list[Usage]:
        """The copies that each launch writes.

        A block of the one copy and a block of the other meet in 128 x 128 values. A program holds
        no second tile besides, nor the address of each value where rows are not aligned.

        Args:
            x: What is read.
            apart: Whether a program has two tiles, of halves that lie side by side.
        """
        form = self.constants["FORMAT"]
        many = (apart and form == "square") or (form == "block" and (apart or is_unaligned(x)))
        return [ROWWISE, COLUMNWISE] if many and all(self.usage) else [self.usage]

    def facts(self, usage: Usage) -> dict[str, Any]:
        """The facts that the tiles of a launch depend on that writes these copies."""
        column = usage.columnwise and self.constants["FORMAT"] != "none"
        return {**self.constants, "column_ptr": torch.uint8 if column else None, "rows": self.rows}

    def pointers_of(self, usage: Usage) -> tuple[Tensor | None, ...]:
        """The :attr:`pointers` of a launch that writes these copies."""
        if usage == self.usage:
            return self.pointers
        wide, *copies, scale, amax = self.pointers
        copies[slice(2, 4) if usage.rowwise else slice(2)] = None, None
        return wide, *copies, scale, amax

    def made(self) -> QuantizedTensor:
        """The quantized tensor, once the kernel is launched."""
        if self.constants["FORMAT"] == "none":  # the largest magnitude is known now
            row, inverse, column, _ = self._codes
            count = self.result.quantizer.counter(inverse.device)
            self._cast_values((None, row, inverse, column, None, self.pointers[-1], count))
        return self.result

    def _cast_values(self, pointers: tuple[Tensor | None, ...]) -> None:
        FORWARD.launch(
            None,
            *(self.values, None, None, *pointers, self.rows, self.columns, ()),
            **{**self.constants, "FORMAT": "amax"},
            **IDENTITY.forward,
        )


class PartsCasting(Casting):
    """A cast of matrices as the rows of one, each read where it is.

    Each launch writes the codes of a part to their place, and covers the tiles of that part alone.

    Args:
        into: The target of the cast, with one scale for all values.
        parts: The matrices: of whole tiles, so that no launch has to know where its part ends.
    """

    def __init__(self, into: Into, parts: Sequence[Tensor]) -> None:
        shape = torch.Size((sum(map(len, parts)), parts[0].shape[1]))
        super().__init__(into, shape, parts[0].dtype, parts[0].device, values=parts[0])
        self._parts = parts
        self._launch(self.pointers, self.constants)

    def _cast_values(self, pointers: tuple[Tensor | None, ...]) -> None:
        self._launch(pointers, {**self.constants, "FORMAT": "amax"})

    def _launch(self, pointers: tuple[Tensor | None, ...], constants: Mapping[str, Any]) -> None:
        wide, row, row_scale, column, *others = pointers
        start = 0
        for part in self._parts:
            here = None if row is None else row[start:], row_scale
            there = None if column is None else column[:, start:]
            FORWARD.launch(
                functools.partial(tiles.grid, len(part), self.columns),
                *(part, None, None, wide, *here, there, *others),
                *(self.rows, self.columns, ()),
                **constants,
                **IDENTITY.forward,
            )
            start += len(part)
            if constants["FORMAT"] == "amax":  # it is counted once
                others[-1] = None


def is_unaligned(x: Tensor) -> bool:
    """Return whether a row may begin at no multiple of 16 bytes."""
    return bool(x.shape[-1] % 16 or x.storage_offset() * x.itemsize % 16)


# The launches. The tensors are contiguous, and not empty


def forward(
    formula: Formula,
    numbers: tuple[float, ...],
    x: Tensor,
    bias: Tensor | None,
    kept: Tensor | None,
    casting: Casting,
) -> None:
    """Launch ``act(x + bias)`` into a cast, and what the activation is applied to into ``kept``."""
    rows, features, config = casting.rows, casting.columns, None
    for usage in casting.passes(x):
        if x.storage_offset() * x.itemsize % 16:  # which no argument of the kernel shows
            facts = {**casting.facts(usage), **formula.forward, "features": features}
            config = FORWARD.pick(current_target(x.device), {**facts, "unaligned": True})
        FORWARD.launch(
            None,
            *(x, bias, kept, *casting.pointers_of(usage), rows, features, numbers),
            config=config,
            **casting.constants,
            **formula.forward,
        )
        kept = None  # it is written once


def backward(
    formula: Formula,
    numbers: tuple[float, ...],
    dy: Tensor,
    x: Tensor | None,
    needs_sums: bool,
    casting: Casting,
) -> Tensor | None:
    """Launch ``act'(x) dy`` into a cast; gives the sums over rows, if they are needed."""
    rows, width, features = casting.rows, casting.columns, dy.shape[-1]
    out = sums = dy.new_empty(width) if needs_sums else None
    strips, config = 1, None
    apart = formula.gated and not formula.size
    for number, usage in enumerate(casting.passes(dy, apart)):
        if needs_sums:
            facts = {**casting.facts(usage), **formula.backward, "features": features}
            facts["sums_ptr"] = None if number else torch.float32
            config = BACKWARD.pick(current_target(dy.device), facts)
        if config is not None and not number:  # the one tile of few rows writes the result itself
            strips = cdiv(rows, config["BLOCK_ROWS"])
            if strips > 1:
                sums = dy.new_empty((strips, width), dtype=torch.float32)
        BACKWARD.launch(
            None,
            *(dy, x, None if number else sums, *casting.pointers_of(usage)),
            *(rows, features, numbers),
            config=config,
            **casting.constants,
            **formula.backward,
        )
    if strips > 1:
        sum_strips(sums, out)
    return out
