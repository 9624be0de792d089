"""What the kernels take: heads with their norm, and angles. Importing this imports no Triton."""

from __future__ import annotations

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

    @property
    def heads(self) -> int:
        """The number of heads of a token."""
        return self.x.shape[-2]

    @property
    def tokens(self) -> int:
        """The number of tokens."""
        return self.x.shape[:-2].numel()

    @property
    def strides(self) -> tuple[int, int]:
        """Elements from one token to the next, and from one head to the next."""
        by_token = flat_stride(self.x)
        assert by_token is not None  # takes has looked
        return by_token, self.x.stride(-2)


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

    def arguments(self, tokens: int) -> tuple[Any, ...]:
        """The arguments of the kernels."""
        stride = self.cos.stride(0) if self.frequencies is None else 1
        return self.cos, self.sin, self.frequencies, tokens, self.inner, self.period, stride


def flat_stride(x: Tensor) -> int | None:
    """Elements from one token to the next in ``(..., heads, head_dim)``; None: they differ."""
    found, expected = 0, None
    for size, stride in zip(reversed(x.shape[:-2]), reversed(x.stride()[:-2]), strict=True):
        if size == 1:
            continue
        if expected is None:
            found = stride
        elif stride != expected:
            return None
        expected = stride * size
    return found


def takes(x: Tensor, *others: Tensor | None) -> bool:
    """Return whether the kernels take a tensor with heads, and contiguous ones with it."""
    if x.ndim < 2 or not x.numel() or x.stride(-1) != 1 or flat_stride(x) is None:
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
    tables, half = isinstance(op, ApplyRoPE), rotation.rotary_dim // 2
    whole = False
    if tables:
        if not all(type(t) in _PLAIN and t.dtype in DTYPES for t in given):
            return None
        cos, sin = given
        if cos.shape != sin.shape or cos.shape[-1:] not in ((half,), (2 * half,)):
            return None
        whole = cos.shape[-1] == 2 * half
    shape = given[0].shape[:-1] if tables else given[0].shape
    if len(shape) > len(lead) or not half:
        return None
    padded = (*(1,) * (len(lead) - len(shape)), *shape)
    own = [i for i, size in enumerate(padded) if size != 1]
    if any(padded[i] != lead[i] for i in own):
        return None
    first, last = (own[0], own[-1] + 1) if own else (len(lead), len(lead))
    if any(padded[i] != lead[i] for i in range(first, last)):  # ones between others
        every = (*lead, *given[0].shape[-1:]) if tables else lead
        given, first, last = [t.expand(every) for t in given], 0, len(lead)
    inner, period = lead[last:].numel(), lead[first:last].numel()
    if tables:
        given = [t.detach().reshape(-1, t.shape[-1]) for t in given]
        if given[0].stride() != given[1].stride() or given[0].stride(1) != 1:
            given = [t.contiguous() for t in given]
        return Angles(given[0], given[1], None, inner, period, half, rotation.interleaved, whole)
    positions = given[0].reshape(-1).contiguous()
    found = frequencies(rotation, positions.device)
    return Angles(positions, positions, found, inner, period, half, rotation.interleaved, False)


def frequencies_of(rotation: Any, device: torch.device) -> Tensor:
    """The angle of each pair at position 1, as :class:`opfuse.ops.RoPE` computes it."""
    exponents = torch.arange(0, rotation.rotary_dim, 2, device=device, dtype=torch.float32)
    return torch.as_tensor(rotation.base ** (-exponents / max(1, rotation.rotary_dim)))
