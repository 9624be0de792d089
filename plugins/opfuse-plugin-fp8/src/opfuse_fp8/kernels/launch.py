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

from ..quantizers import BlockQuantizer, CurrentQuantizer, DelayedQuantizer, MXQuantizer
from ..together import room_for, waiting
from ..twins import Into, refuse_other_device
from . import elementwise, tiles

MANTISSA = {torch.float8_e4m3fn: 3, torch.float8_e5m2: 2}
TL = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}

FORWARD = Kernel(elementwise.cast_forward, tiles.configs)
BACKWARD = Kernel(elementwise.cast_backward, tiles.configs)


def format_of(quantizer: Any) -> str:
    """The kernels' name for the format of a quantizer; ``"none"``: its scale is not known yet."""
    if isinstance(quantizer, BlockQuantizer):
        return "block" if quantizer.block[0] == 1 else "square"
    if isinstance(quantizer, MXQuantizer):
        return "swizzled mx" if quantizer.swizzles else "mx"
    return "none" if isinstance(quantizer, CurrentQuantizer) else "tensor"


@functools.lru_cache(1024)
def _constants(
    form: str, codes: torch.dtype, power_of_2: bool, dtype: torch.dtype
) -> Mapping[str, Any]:
    return {
        "DTYPE": TL[dtype],
        "FORMAT": form,
        "MANTISSA": MANTISSA[codes],
        "POWER_OF_2": bool(power_of_2),
        "IF_INFINITE": torch.finfo(dtype).max,
    }


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
        has_tiles: Whether blocks of both copies meet, so that :meth:`passes` may be several.
    """

    def __init__(
        self,
        into: Into,
        shape: torch.Size,
        dtype: torch.dtype,
        device: torch.device,
        values: Tensor | None = None,
    ) -> None:
        quantizer, self.usage, self._again = into
        self._quantizer = quantizer
        here = self._again is None
        for name in quantizer.state_names:
            here = here and getattr(quantizer, name).device == device
        if not here:
            refuse_other_device(into, device)
        self._shape, self._dtype, self._device = shape, dtype, device
        self.columns, self.values = shape[-1], values
        self.rows = shape.numel() // self.columns
        self._codes: tuple[Any, Any] | None = None
        self._amax: Tensor | None = None
        form = "tensor" if type(quantizer) is DelayedQuantizer else format_of(quantizer)
        self.constants = _constants(form, quantizer.dtype, quantizer.power_of_2, dtype)
        self.has_tiles = form in ("block", "square")

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

    def pointers(self, usage: Usage) -> tuple[Tensor | None, ...]:
        """The tensors that a kernel writes or reads for these copies.

        They are the values, the rowwise codes and their scales, the columnwise ones and theirs, the
        scale, and the largest magnitude so far.
        """
        quantizer, form, device = self._quantizer, self.constants["FORMAT"], self._device
        wide = scale = amax = row = column = row_scale = column_scale = None
        if form == "none":
            self._amax = amax = torch.zeros(1, dtype=torch.float32, device=device)
            if self.values is None:
                wide = torch.empty(self._shape, dtype=self._dtype, device=device)
                self.values = wide
            return wide, None, None, None, None, None, amax
        if self._codes is not None:
            (row, column), (row_scale, column_scale) = self._codes, self._scales
        else:
            if self.usage.rowwise:
                row = room_for(quantizer, self._shape, device) if waiting.get() else None
                if row is None:
                    row = torch.empty(self._shape, dtype=torch.uint8, device=device)
            if self.usage.columnwise:
                shape = self.columns, self.rows
                column = torch.empty(shape, dtype=torch.uint8, device=device)
            if form in ("tensor", "amax"):  # the inverse, and the scale to cast again
                row_scale = torch.empty(1, dtype=torch.float32, device=device)
                column_scale = torch.empty_like(row_scale) if form == "tensor" else None
            else:
                row_scale = self._room(self.rows, self.columns) if row is not None else None
                column_scale = self._room(self.columns, self.rows) if column is not None else None
            self._codes, self._scales = (row, column), (row_scale, column_scale)
        if form == "tensor" and self._again is None:
            quantizer.note_capture()
            scale, amax = quantizer.scale, quantizer.amax
        elif form == "tensor":
            scale = self._again.scale
        if usage != self.usage and usage.rowwise:
            column = column_scale = None
        elif usage != self.usage:
            row = row_scale = None
        return wide, row, row_scale, column, column_scale, scale, amax

    def made(self) -> QuantizedTensor:
        """The quantized tensor, once the kernel is launched."""
        if self.constants["FORMAT"] == "none":
            self._cast_values()
        assert self._codes is not None
        quantizer, (one, other), (row, column) = self._quantizer, self._scales, self._codes
        row = None if row is None else row.view(quantizer.dtype)
        column = None if column is None else column.view(quantizer.dtype)
        given = self._shape, self._dtype
        if self.constants["FORMAT"] in ("tensor", "amax"):  # the codes have this shape already
            tensors = row, column, one, *([] if other is None else [other])
            return quantizer.format.known(*given, quantizer, tensors)  # type: ignore[no-any-return]
        return quantizer.over(*given, (row, one, column, other))  # type: ignore[no-any-return]

    def _cast_values(self) -> None:
        """Cast values whose largest magnitude is known."""
        assert self._amax is not None and self.values is not None
        self.constants = {**self.constants, "FORMAT": "amax"}
        _, row, inverse, column, *_ = self.pointers(self.usage)
        FORWARD.launch(
            functools.partial(tiles.grid, self.rows, self.columns),
            *(self.values, None, None, None, row, inverse, column, None),
            *(self._amax, self._quantizer.counter(self._device)),
            *(self.rows, self.columns, ()),
            **self.constants,
            **IDENTITY.forward,
        )

    def _room(self, outer: int, inner: int) -> Tensor:
        """Room for the scales of a copy whose blocks lie along ``inner``."""
        form = self.constants["FORMAT"]
        if form == "block":
            shape = cdiv(inner, 128), outer
            return torch.empty(shape, dtype=torch.float32, device=self._device)
        if form == "square":
            down, across = cdiv(outer, 128), cdiv(inner, 128)
            make = torch.zeros if across % 4 else torch.empty  # what fills it up is not written
            shape = down, 4 * cdiv(across, 4)
            return make(shape, dtype=torch.float32, device=self._device)
        return room_for_scales(outer, inner // 32, form == "swizzled mx", self._device)


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
        self._launch(self.pointers(self.usage))

    def _cast_values(self) -> None:
        self.constants = {**self.constants, "FORMAT": "amax"}
        _, row, inverse, column, *_ = self.pointers(self.usage)
        count = self._quantizer.counter(self._device)
        self._launch((None, row, inverse, column, None, self._amax, count))

    def _launch(self, pointers: tuple[Tensor | None, ...]) -> None:
        wide, row, row_scale, column, *others = pointers
        start = 0
        for part in self._parts:
            here = None if row is None else row[start:], row_scale
            there = None if column is None else column[:, start:]
            FORWARD.launch(
                functools.partial(tiles.grid, len(part), self.columns),
                *(part, None, None, wide, *here, there, *others),
                *(self.rows, self.columns, ()),
                **self.constants,
                **IDENTITY.forward,
            )
            start += len(part)
            if self.constants["FORMAT"] == "amax":  # it is counted once
                others[-1] = None


def room_for_scales(outer: int, blocks: int, swizzles: bool, device: torch.device) -> Tensor:
    """Room for scales of one byte; of swizzled ones, what fills up tiles is zero.

    Args:
        outer: How many rows a copy has.
        blocks: How many scales a row has.
        swizzles: Whether the kernel swizzles them.
        device: Where they go.
    """
    if not swizzles:
        return torch.empty((outer, blocks), dtype=torch.uint8, device=device)
    make = torch.zeros if outer % ROWS or blocks % SCALES else torch.empty
    return make(swizzled_size(outer, blocks), dtype=torch.uint8, device=device)


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
    for usage in casting.passes(x) if casting.has_tiles else (casting.usage,):
        if x.storage_offset() * x.itemsize % 16:  # which no argument of the kernel shows
            facts = {**casting.facts(usage), **formula.forward, "features": features}
            config = FORWARD.pick(current_target(x.device), {**facts, "unaligned": True})
        FORWARD.launch(
            functools.partial(tiles.grid, rows, features),
            *(x, bias, kept, *casting.pointers(usage), rows, features, numbers),
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
            functools.partial(tiles.grid, rows, features),
            *(dy, x, None if number else sums, *casting.pointers(usage)),
            *(rows, features, numbers),
            config=config,
            **casting.constants,
            **formula.backward,
        )
    if strips > 1:
        sum_strips(sums, out)
    return out
