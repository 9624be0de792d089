"""Codes and scales as bytes to send: lines, which follow each other as rows do.

A line has the codes of a row of the rowwise copy, and then the scales of its blocks. Where the
columnwise copy is another cast, it has lines of its own, one for each column.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from opfuse_quantized.formats import BlockScaledTensor, MXTensor
from opfuse_quantized.swizzle import swizzled
from torch import Tensor
from torch.nn import functional as F

from opfuse.core.quantization import QuantizedTensor, Usage
from opfuse.core.quantization.formats import ScaledTensor

from .pieces import Link

_BLOCKS = BlockScaledTensor, MXTensor


def quantized(
    link: Link, quantizer: Any, rows: Tensor, usage: Usage
) -> tuple[QuantizedTensor | None, str]:
    """This process's rows with the codes and scales that they have in the whole.

    Args:
        link: The collectives.
        quantizer: The quantizer.
        rows: The rows.
        usage: Which copies are needed.

    Returns:
        They, or None and a sentence that says why the rows are sent as they are.
    """
    if why := quantizer.why_whole(rows.shape, usage):
        return None, why
    made = quantizer.quantize_rows(rows, usage, link.largest)
    if isinstance(made, (ScaledTensor, *_BLOCKS)):
        return made, ""
    return None, f"this plugin does not know how a {type(made).__name__} is laid out"


def has_one_scale(tensor: QuantizedTensor) -> bool:
    """Whether the codes of a row are those of the columnwise copy, too."""
    return isinstance(tensor, ScaledTensor)


def height(tensor: QuantizedTensor) -> int:
    """Of how many rows a piece is a multiple: those that have scales in common."""
    return tensor.block[0] if isinstance(tensor, BlockScaledTensor) else 1


def lines_of(tensor: QuantizedTensor) -> Tensor:
    """The rowwise copy as bytes, ``(rows, bytes of a line)``."""
    rows, columns = _sides(tensor)
    if isinstance(tensor, ScaledTensor):
        codes = tensor.rowwise_data
        if codes is None:
            codes = tensor.columnwise_data.t().contiguous()  # type: ignore[union-attr]
        return _bytes(codes.reshape(rows, columns))
    return _joined(tensor, "rowwise", rows, columns)


def columns_of(tensor: QuantizedTensor) -> Tensor:
    """The columnwise copy of a tensor in blocks as bytes, ``(columns, bytes of a line)``."""
    rows, columns = _sides(tensor)
    return _joined(tensor, "columnwise", columns, rows)


def from_lines(lines: Tensor, like: QuantizedTensor) -> QuantizedTensor:
    """The rows that some lines are of, with only a rowwise copy.

    Args:
        lines: As :func:`lines_of` gives them, of rows that hold whole blocks.
        like: A tensor of these scales or blocks.
    """
    rows, columns = lines.shape[0], _sides(like)[1]
    shape = torch.Size((rows, columns))
    if isinstance(like, ScaledTensor):
        dtype = _some(like.rowwise_data, like.columnwise_data).dtype
        data = lines.view(dtype)
        return dataclasses.replace(like, shape=shape, rowwise_data=data, columnwise_data=None)
    assert isinstance(like, _BLOCKS)
    codes, scales = _parted(lines[None], like, columns)
    given: Any = {"rowwise_data": codes, "rowwise_scale_inv": _laid_out(scales, like, columns)}
    return dataclasses.replace(
        like, shape=shape, **given, columnwise_data=None, columnwise_scale_inv=None
    )


def from_columns(lines: Tensor, like: QuantizedTensor, parts: int) -> QuantizedTensor:
    """The whole with only a columnwise copy, from what :func:`columns_of` gave for each part.

    Args:
        lines: Those of all parts, one below the other.
        like: One of the parts.
        parts: Their number.
    """
    assert isinstance(like, _BLOCKS)
    rows, columns = _sides(like)
    codes, scales = _parted(lines.view(parts, columns, -1), like, rows)
    shape = torch.Size((parts * rows, columns))
    given: Any = {
        "columnwise_data": codes,
        "columnwise_scale_inv": _laid_out(scales, like, parts * rows),
    }
    return dataclasses.replace(
        like, shape=shape, **given, rowwise_data=None, rowwise_scale_inv=None
    )


def _sides(tensor: QuantizedTensor) -> tuple[int, int]:
    return tensor.shape[:-1].numel(), tensor.shape[-1]


def _some(one: Tensor | None, other: Tensor | None) -> Tensor:
    found = other if one is None else one
    assert found is not None
    return found


def _bytes(matrix: Tensor) -> Tensor:
    return matrix.contiguous().view(torch.uint8)


def _joined(tensor: QuantizedTensor, way: str, outer: int, inner: int) -> Tensor:
    """A copy with the scales of each line behind its codes."""
    codes = getattr(tensor, f"{way}_data").reshape(outer, inner)
    scales = tensor.without_padding(f"{way}_scale_inv")
    assert scales is not None
    if isinstance(tensor, BlockScaledTensor):
        if tensor.block[0] == 1:
            scales = scales.t()
        else:  # each line has those of its blocks
            scales = scales.repeat_interleave(128, 0)[:outer]
    return torch.cat([_bytes(codes), _bytes(scales)], 1)


def _parted(lines: Tensor, like: BlockScaledTensor | MXTensor, inner: int) -> tuple[Tensor, Tensor]:
    """Codes and scales of lines ``(parts, outer, bytes)``; the parts follow in each line."""
    outer = lines.shape[1]
    # clones, since a view as wider numbers needs a fitting address
    codes, scales = (
        part.transpose(0, 1).clone(memory_format=torch.contiguous_format).view(outer, -1)
        for part in (lines[:, :, :inner], lines[:, :, inner:])
    )
    data = _some(like.rowwise_data, like.columnwise_data)
    return codes.view(data.dtype), scales.view(like.scale_dtype)


def _laid_out(scales: Tensor, like: BlockScaledTensor | MXTensor, inner: int) -> Tensor:
    """The scales of lines as the format has them."""
    if isinstance(like, MXTensor):
        return swizzled(scales) if like.swizzled else scales
    if like.block[0] == 1:
        return scales.t().contiguous()
    across = -(-inner // 128)
    return F.pad(scales[::128], (0, -across % 4))
