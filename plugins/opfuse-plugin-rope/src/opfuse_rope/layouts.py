"""What the kernels take: heads with their norm, and angles. Importing this imports no Triton."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from opfuse.ops import ApplyRoPE

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that the kernels read and write. They compute in fp32."""

MOST_FEATURES = 1024
"""The largest head that the kernels take."""

_PLAIN = (Tensor, torch.nn.Parameter)  # a subclass may do something else


class Heads(NamedTuple):
    """Queries or keys, and the norm before their rotation.

    Attributes:
        x: ``(..., heads, head_dim)``; in a backward without a norm, the gradient.
        dtype: The dtype of the result.
        norm: ``"rms"``, ``"l2"``, or None.
        weight: The weight of the norm, ``(head_dim,)``, or None.
        zero_centered: The factor is ``1 + weight``.
        eps: Added under the root.
        saves: Whether a forward returns what a row is multiplied by.
        rstd: That, in a backward.
        into: Where the result is written; None: a new tensor.
        needs: Whether the gradients of ``x`` and of the weight are wanted.
    """

    x: Tensor
    dtype: torch.dtype
    norm: str | None = None
    weight: Tensor | None = None
    zero_centered: bool = False
    eps: float = 0.0
    saves: bool = False
    rstd: Tensor | None = None
    into: Tensor | None = None
    needs: tuple[bool, bool] = (True, False)


class Angles(NamedTuple):
    """The angles of a token's pairs: a row of tables, or a position times frequencies.

    The row of token ``t`` is ``t // inner % period``.

    Attributes:
        cos: ``(rows, features)``; or positions, ``(rows,)``.
        sin: Likewise; positions once more.
        frequencies: The angle of each pair at position 1, in fp32; None: there are tables.
        inner: Tokens in a row that have the same row.
        period: Rows after which they begin again.
        half: Pairs of a head.
        interleaved: As for :class:`opfuse.ops.RoPE`.
        whole: Whether tables have a number for each feature, and not for each pair.
    """

    cos: Tensor
    sin: Tensor
    frequencies: Tensor | None
    inner: int
    period: int
    half: int
    interleaved: bool
    whole: bool


class Layout(NamedTuple):
    """Where the heads of tokens are.

    Attributes:
        tokens: The number of tokens.
        heads: The number of heads of a token.
        by_token: Elements from one token to the next.
        by_head: Elements from one head to the next.
    """

    tokens: int
    heads: int
    by_token: int
    by_head: int


@functools.lru_cache(1024)
def layout_of(shape: torch.Size, strides: tuple[int, ...]) -> Layout | None:
    """The layout of ``(..., heads, head_dim)``; None: the kernels do not take it.

    Args:
        shape: The shape.
        strides: The strides of all dimensions.
    """
    if len(shape) < 2 or not shape.numel() or strides[-1] != 1:
        return None
    by_token, expected = 0, None
    for size, stride in zip(reversed(shape[:-2]), reversed(strides[:-2]), strict=True):
        if size == 1:
            continue
        if expected is None:
            by_token = stride
        elif stride != expected:
            return None
        expected = stride * size
    return Layout(shape[:-2].numel(), shape[-2], by_token, strides[-2])


def takes(x: Tensor, *others: Tensor | None) -> bool:
    """Return whether the kernels take a tensor with heads, and contiguous ones with it."""
    if layout_of(x.shape, x.stride()) is None:
        return False
    for tensor in (x, *others):
        if tensor is not None and not (
            type(tensor) in _PLAIN
            and tensor.dtype in DTYPES
            and tensor.device == x.device
            and (tensor is x or tensor.is_contiguous())
        ):
            return False
    return True


def angles_of(
    op: Any, rotation: Any, given: Sequence[Tensor], lead: torch.Size, frequencies: Any
) -> Angles | None:
    """The angles of a RoPE or an ApplyRoPE; None: the op has to say what is wrong, or computes.

    Args:
        op: The op.
        rotation: How it rotates, :attr:`opfuse.ops.RoPE.rotation`.
        given: Its extra inputs, ``(positions,)`` or ``(cos, sin)``.
        lead: The dimensions before the heads.
        frequencies: Called with the rotation and the device, for the frequencies.
    """
    half, one, other = rotation.rotary_dim // 2, given[0], given[-1]
    tables = isinstance(op, ApplyRoPE)
    for table in given if tables else ():
        if type(table) not in _PLAIN or table.dtype not in DTYPES or table.shape != one.shape:
            return None
    features = one.shape[-1:] if tables else one.shape[:0]
    if tables and features not in ((half,), (2 * half,)):
        return None
    rows = _rows_of(one.shape[:-1] if tables else one.shape, lead)
    if rows is None or not half:
        return None
    expands, inner, period = rows
    if expands:
        one, other = one.expand(*lead, *features), other.expand(*lead, *features)
    if not tables:
        one = one.reshape(-1).contiguous()
        found = frequencies(rotation, one.device)
        return Angles(one, one, found, inner, period, half, rotation.interleaved, False)
    one, other = one.detach().reshape(-1, *features), other.detach().reshape(-1, *features)
    if one.stride() != other.stride() or one.stride(1) != 1:
        one, other = one.contiguous(), other.contiguous()
    whole = features == (2 * half,)
    return Angles(one, other, None, inner, period, half, rotation.interleaved, whole)


@functools.lru_cache(1024)
def _rows_of(shape: torch.Size, lead: torch.Size) -> tuple[bool, int, int] | None:
    """How angles are broadcast to tokens; None: they are not.

    Returns:
        Whether they are expanded first, and ``inner`` and ``period`` of :class:`Angles`.
    """
    if len(shape) > len(lead):
        return None
    padded = (*(1,) * (len(lead) - len(shape)), *shape)
    own = [i for i, size in enumerate(padded) if size != 1]
    if any(padded[i] != lead[i] for i in own):
        return None
    first, last = (own[0], own[-1] + 1) if own else (len(lead), len(lead))
    expands = any(padded[i] != lead[i] for i in range(first, last))  # ones between others
    if expands:
        first, last = 0, len(lead)
    return expands, lead[last:].numel(), lead[first:last].numel()


def frequencies_of(rotation: Any, device: torch.device) -> Tensor:
    """The angle of each pair at position 1, as :class:`opfuse.ops.RoPE` computes it."""
    exponents = torch.arange(0, rotation.rotary_dim, 2, device=device, dtype=torch.float32)
    return torch.as_tensor(rotation.base ** (-exponents / max(1, rotation.rotary_dim)))
