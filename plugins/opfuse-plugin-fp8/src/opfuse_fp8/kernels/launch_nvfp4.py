"""Launches the kernels of NVFP4, and makes a quantized tensor of their results."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
import triton.language as tl
from opfuse_triton import Config, Kernel, Target
from torch import Tensor

from opfuse.core.quantization import QuantizedTensor

from ..nvfp4 import BLOCK, NVFP4Quantizer
from ..twins import Into, refuse_other_device
from . import nvfp4
from .launch import TL, is_unaligned, room_for_scales
from .tiles import grid


def _configs(target: Target, facts: Mapping[str, Any]) -> list[Config]:
    """Wide tiles; for a columnwise copy with two blocks of rows, 16 bytes of its codes."""
    tall = facts.get("column_ptr", facts["SIGNS"]) is not None
    rows, columns = (32, 128) if tall else (16, 256)
    if tall and facts["DTYPE"] == tl.float32 and not facts.get("SQUARE", True):
        rows, columns = 64, 64  # the wide one spills registers
    tile = {"BLOCK_ROWS": rows, "BLOCK_COLUMNS": columns}
    return [Config(tile, 2 if target.backend == "hip" else 4)]


AMAX = Kernel(nvfp4.nvfp4_amax, _configs, grid)
CAST = Kernel(nvfp4.nvfp4_cast, _configs)


def cast(x: Tensor, into: Into) -> QuantizedTensor:
    """Cast a tensor, in two passes over it: its largest magnitude comes first.

    One that begins at no multiple of 16 bytes is copied before: addresses of single values, besides
    the tile, would spill registers.

    Args:
        x: Contiguous and not empty, with whole blocks in the copies that are needed.
        into: What it is cast into, by an :class:`opfuse_fp8.NVFP4Quantizer` that has the largest
            magnitude of each block at 6.
    """
    refuse_other_device(into, x.device)
    quantizer, usage, _ = into
    x = x.clone() if is_unaligned(x) else x
    columns = x.shape[-1]
    rows = x.numel() // columns
    signs = quantizer.signs if usage.columnwise else None
    swizzles = quantizer.swizzles
    row = _room(x, rows, columns, swizzles) if usage.rowwise else (None,) * 3
    column = _room(x, columns, rows, swizzles) if usage.columnwise else (None,) * 3
    how: Any = {"SIGNS": signs, "MOST": torch.finfo(x.dtype).max, "DTYPE": TL[x.dtype]}
    plain = usage.rowwise or signs is None
    # of the values, and of those that are mixed
    amax = torch.zeros(plain + (signs is not None), dtype=torch.float32, device=x.device)
    AMAX.launch(None, x, amax, rows, columns, ROW=plain, **how)
    state: Any = [getattr(quantizer, name, None) for name in ("seed", "step", "arrived")]
    CAST.launch(
        functools.partial(grid, rows, columns),
        *(x, *row, *column, amax, *state, rows, columns, columns // 2, rows // 2),
        SQUARE=quantizer.square,
        SWIZZLED=swizzles,
        **how,
    )
    return _made(quantizer, x, row, column)


def _room(x: Tensor, outer: int, inner: int, swizzles: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Room for the codes of a copy with blocks along ``inner``, their scales, and the copy's."""
    codes = torch.empty((outer, inner // 2), dtype=torch.uint8, device=x.device)
    make, shape, dtype = room_for_scales(outer, inner // BLOCK, swizzles)
    scales = make(shape, dtype=dtype, device=x.device)
    return codes, scales, torch.empty(1, dtype=torch.float32, device=x.device)


def _made(quantizer: NVFP4Quantizer, x: Tensor, row: Any, column: Any) -> QuantizedTensor:
    """The quantized tensor over both copies, of which one may be None."""
    dtypes = torch.float4_e2m1fn_x2, torch.float8_e4m3fn
    parts = [
        None if part is None else part.view(dtype)
        for copy in (row, column)
        for part, dtype in zip(copy, dtypes, strict=False)
    ]
    return quantizer.over(x.shape, x.dtype, (*parts, row[2], column[2]))
