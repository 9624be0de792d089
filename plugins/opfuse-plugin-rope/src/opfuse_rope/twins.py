"""The kernels' arithmetic, in PyTorch's operations, for tests."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from opfuse.ops.rope import Rotation, rotated

from .layouts import Angles, Heads


def forward(
    given: Sequence[Heads], angles: Angles, back: bool = False, config: object = None
) -> list[tuple[Tensor, Tensor | None]]:
    """Queries, or queries and keys: normalized if there is a norm, and rotated.

    Args:
        given: One or two tensors, with their norms.
        angles: The angles, which both have in common.
        back: Rotate back; without norms.
        config: Without effect here.

    Returns:
        For each the result, in its dtype, and what its rows were multiplied by,
        ``(..., heads, 1)``, in fp32; None: that is not wanted.
    """
    found = []
    for one in given:
        y, rstd = one.x.to(_wide(one.x)), None
        if one.norm is not None:
            square = y.square()
            square = square.mean(-1, True) if one.norm == "rms" else square.sum(-1, True)
            rstd = torch.rsqrt(square + one.eps)
            y = y * rstd
            if one.weight is not None:
                y = y * _scale(one)
            y = y.to(one.dtype)
        found.append((_turned(y, angles, back).to(one.dtype), rstd if one.saves else None))
    return found


def norm_backward(
    given: Sequence[Heads], grads: Sequence[Tensor], angles: Angles, config: object = None
) -> list[tuple[Tensor | None, Tensor | None]]:
    """The gradients before the norms, and of their weights.

    With ``g`` the gradient rotated back and ``n`` the normalized input: ``dw = sum(g n)`` over
    tokens and heads; with ``g`` times the weight, ``dx = rstd (g - n mean(g n))`` for ``"rms"``,
    and the sum instead of the mean for ``"l2"``.

    Args:
        given: As for :func:`forward`, with what it saved.
        grads: The gradients of its results.
        angles: As there.
        config: Without effect here.

    Returns:
        For each the gradient of ``x`` in its dtype, and that of the weight in its dtype; None for
        what is not wanted.
    """
    found: list[tuple[Tensor | None, Tensor | None]] = []
    for one, dy in zip(given, grads, strict=True):
        g, dx, dw = _turned(dy, angles, True).to(dy.dtype).to(_wide(one.x)), None, None
        if one.norm is None:
            found.append((g.to(one.x.dtype), None))
            continue
        assert one.rstd is not None
        n = one.x.to(g.dtype) * one.rstd
        if one.needs[1]:
            dtype = g.dtype if one.weight is None else one.weight.dtype
            dw = (g * n).flatten(0, -2).sum(0).to(dtype)
        if one.needs[0]:
            g = g if one.weight is None else g * _scale(one)
            product = (g * n).mean(-1, True) if one.norm == "rms" else (g * n).sum(-1, True)
            dx = ((g - n * product) * one.rstd).to(one.x.dtype)
        found.append((dx, dw))
    return found


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype is torch.float64 else torch.float32


def _scale(one: Heads) -> Tensor:
    assert one.weight is not None
    weight = one.weight.to(_wide(one.x))
    return weight + 1 if one.zero_centered else weight


def _turned(x: Tensor, angles: Angles, back: bool) -> Tensor:
    """``x`` rotated, in fp32 or wider."""
    lead, count = x.shape[:-2], 2 * angles.half
    rows = torch.arange(lead.numel(), device=x.device) // angles.inner % angles.period
    dtype = _wide(x)
    if angles.frequencies is None:
        cos, sin = angles.cos[rows].to(dtype), angles.sin[rows].to(dtype)
    else:
        angle = angles.cos[rows].to(dtype).unsqueeze(-1) * angles.frequencies.to(dtype)
        cos, sin = angle.cos(), angle.sin()
    cos, sin = (table.view(*lead, table.shape[-1]) for table in (cos, sin))
    rotation = Rotation(0.0, angles.interleaved, count)
    return rotated(x.to(dtype), cos, sin, rotation, back=back)
