"""Checks of the caller's tensors that an op writes into."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn


def check_buffer(
    op: object,
    name: str,
    buffer: Any,
    shape: Sequence[int],
    like: Tensor,
    read: Sequence[Tensor] = (),
) -> None:
    """Refuse a buffer that does not fit the result.

    Args:
        op: The op.
        name: The name of the buffer.
        buffer: The tensor, or None, which always fits.
        shape: The shape of the result.
        like: A tensor with the dtype and device of the result.
        read: Tensors that are read before, and may be read again.

    Raises:
        TypeError: It is not a tensor.
        ValueError: It has another shape, dtype or device, is not contiguous, requires grad, or
            shares memory with a tensor that is read.
    """
    if buffer is None:
        return
    who = f"{type(op).__name__} expected a tensor as {name}"
    if not isinstance(buffer, Tensor):
        raise TypeError(f"{who}, got {type(buffer).__name__}")
    got = f"{buffer.dtype} of shape {tuple(buffer.shape)} on {buffer.device}"
    wanted = f"{like.dtype} of shape {tuple(shape)} on {like.device}"
    if got != wanted:
        raise ValueError(f"{who}, {wanted}, got {got}")
    if not buffer.is_contiguous():
        raise ValueError(f"{who} that is contiguous, got strides {buffer.stride()}")
    if buffer.requires_grad:
        raise ValueError(f"{who} that does not require grad: pass {name}.detach()")
    if any(_share_memory(buffer, tensor) for tensor in read):
        raise ValueError(f"{who} that shares no memory with what the op reads")


def _share_memory(one: Tensor, other: Tensor) -> bool:
    """Return whether the memory ranges of two plain tensors overlap."""
    spans = [_span(tensor) for tensor in (one, other) if type(tensor) in (Tensor, nn.Parameter)]
    if len(spans) < 2 or one.device != other.device:
        return False
    (first, end), (other_first, other_end) = spans
    return first < other_end and other_first < end


def _span(tensor: Tensor) -> tuple[int, int]:
    """The address of its first byte, and that after its last byte."""
    if not tensor.numel() or tensor.is_meta:
        return 0, 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in steps)
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()
