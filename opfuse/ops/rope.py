"""Rotary position embedding: RoPE."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.op_context import AllGrads, Outputs
from ._common import (
    ExtraTensorOperation,
    RowwiseOperation,
    check_bool,
    check_size,
    expected,
    require,
    shows,
)
from .arithmetic import wide
from .modulate import broadcasts

Turns = tuple[Tensor, Tensor]
"""Cosine and sine of each pair, ``(..., rotary_dim / 2)``, or of each feature."""


class Rotation(NamedTuple):
    """How a :class:`RoPE` rotates; the backward uses that of its forward."""

    base: float
    interleaved: bool
    rotary_dim: int


class _Rotary(RowwiseOperation, ExtraTensorOperation):
    """The base of both ops: they rotate pairs of features, and the backward rotates them back."""

    context_names = ("rotation",)
    base: float
    _turns: Callable[..., Turns]  # from the extra inputs, the rotation, and the dtype of its input

    def __init__(
        self, head_dim: int, *, interleaved: bool = False, rotary_dim: int | None = None
    ) -> None:
        super().__init__()
        self.head_dim = check_size(self, "head_dim", head_dim)
        self.in_features = self.out_features = self.head_dim
        rotary_dim = self.head_dim if rotary_dim is None else rotary_dim
        self.rotary_dim = check_size(self, "rotary_dim", rotary_dim)
        is_even = self.rotary_dim % 2 == 0
        what = f"an even rotary_dim of at most {self.head_dim}, the head_dim"
        require(self, is_even and self.rotary_dim <= self.head_dim, what, self.rotary_dim)
        check_bool(self, "interleaved", interleaved)
        self.interleaved = interleaved

    extra_repr = shows("head_dim", "interleaved", "rotary_dim")

    @classmethod
    def sample_inputs(cls, op: Any, features: int, out_features: int | None) -> list[Any]:
        """How tests make the op."""
        given: Any = {}, {"interleaved": True}, {"rotary_dim": features // 2}
        return [op(cls, features, **some) for some in given]

    @property
    def rotation(self) -> Rotation:
        """The rotation, as a forward leaves it for the backward."""
        return Rotation(self.base, self.interleaved, self.rotary_dim)

    def fuser_backward(self, basic_op_ctxs: Any, grad_output: Tensor, **_: Any) -> AllGrads:
        """The gradient, rotated back."""
        (ctx,) = basic_op_ctxs
        given, of_extras = ctx.saved_tensors, [(None,) * self.num_extra_inputs]
        if given[0] is None:
            return None, [()], of_extras
        cos, sin = self._turns(given, ctx.rotation, grad_output.dtype)
        return rotated(grad_output, cos, sin, ctx.rotation, back=True), [()], of_extras


class RoPE(_Rotary):
    """Rotary position embedding (Su et al. 2021): rotates pairs of features by an angle.

    Takes ``(..., heads, head_dim)`` and one extra input, integer positions that fit the dimensions
    before the heads: ``(...)``, or fewer, which are broadcast as in ``(sequence,)``. Gives the same
    shape and dtype. Pair ``i`` at position ``p`` turns by ``p base^(-2 i / rotary_dim)``; angles
    and products are in fp32 for half precision, and rounded once.

    Args:
        head_dim: Size of the last dimension.
        base: Base of the wavelengths.
        interleaved: Pairs are neighbours ``(2 i, 2 i + 1)``, as in GPT-J; if False, they are
            ``(i, i + rotary_dim / 2)``, as in Llama and GPT-NeoX.
        rotary_dim: Number of leading features that are rotated; None: all.

    Raises:
        TypeError: An argument of the wrong type; in a call, positions that are not integers.
        ValueError: An argument out of range; in a call, positions of another shape.
    """

    num_extra_inputs = 1
    extra_input_dtypes = ("integer",)
    saved_names = ("positions",)
    real_numbers = ("base",)

    def __init__(
        self,
        head_dim: int,
        *,
        base: float = 10000.0,
        interleaved: bool = False,
        rotary_dim: int | None = None,
    ) -> None:
        super().__init__(head_dim, interleaved=interleaved, rotary_dim=rotary_dim)
        self.base = base
        require(self, self.base > 0, "a base above 0", base)

    extra_repr = shows("head_dim", "base", "interleaved", "rotary_dim")

    def sample_extra_inputs(self, shape: tuple[int, ...], generator: Any) -> list[Any]:
        """Positions, for all heads."""
        return [torch.randint(0, 4096, shape[:-2], generator=generator)]

    def fuser_forward(
        self, basic_op_ctxs: Any, input_: Tensor, *, basic_op_extra_inputs: Any, **_: Any
    ) -> Outputs:
        """The rotated input; saves ``(positions,)``, leaves how it rotates."""
        (ctx,), ((positions,),) = basic_op_ctxs, basic_op_extra_inputs
        _check_fits(self, "positions", positions.shape, input_)
        rotation = self.rotation
        if ctx.requires_grad:
            ctx.rotation = rotation
            ctx.save_for_backward(positions if ctx.input_requires_grad else None)
        cos, sin = self._turns((positions,), rotation, input_.dtype)
        return rotated(input_, cos, sin, rotation), [()]

    @staticmethod
    def _turns(given: Sequence[Tensor], rotation: Rotation, dtype: torch.dtype) -> Turns:
        (positions,), dtype = given, wide(dtype)
        exponents = torch.arange(0, rotation.rotary_dim, 2, device=positions.device, dtype=dtype)
        frequencies = rotation.base ** (-exponents / max(1, rotation.rotary_dim))
        angles = positions.to(dtype).unsqueeze(-1) * frequencies
        return angles.cos(), angles.sin()


class ApplyRoPE(_Rotary):
    """:class:`RoPE` with the cosines and sines given, as ``transformers`` passes them to layers.

    Takes ``(..., heads, head_dim)`` and two extra inputs, ``cos`` and ``sin``, whose last dimension
    is ``rotary_dim`` (one for each feature, as ``transformers`` lays them out) or half of it (one
    for each pair), and whose others fit the dimensions before the heads, or are broadcast to them.
    A pair ``(a, b)`` becomes ``(a cos_a - b sin_a, b cos_b + a sin_b)``.
    Computes in the widest dtype of the three, in fp32 for half precision, and gives the dtype of
    the input. ``cos`` and ``sin`` get no gradient. ``transformers`` rounds each product in half
    precision; this op rounds once.

    Args:
        head_dim: As for :class:`RoPE`.
        interleaved: As for :class:`RoPE`; pairs of ``cos`` and ``sin`` are then neighbours too.
        rotary_dim: As for :class:`RoPE`.

    Raises:
        TypeError: An argument of the wrong type.
        ValueError: An argument out of range; in a call, ``cos`` or ``sin`` of another shape.
        RuntimeError: In a call, ``cos`` or ``sin`` that requires grad.
    """

    base = 0.0  # it has no wavelengths of its own
    num_extra_inputs = 2
    saved_names = ("cos", "sin")
    batch_invariant = ("exact",)

    def sample_extra_inputs(self, shape: tuple[int, ...], generator: Any) -> list[Any]:
        """Cosines and sines, for all heads; they get no gradient."""
        angles = torch.randn(*shape[:-2], self.rotary_dim, generator=generator, dtype=torch.float64)
        return [angles.cos(), angles.sin()]

    def fuser_forward(
        self, basic_op_ctxs: Any, input_: Tensor, *, basic_op_extra_inputs: Any, **_: Any
    ) -> Outputs:
        """The rotated input; saves ``(cos, sin)`` as they came, leaves how it rotates."""
        (ctx,), ((cos, sin),) = basic_op_ctxs, basic_op_extra_inputs
        for name, table in (("cos", cos), ("sin", sin)):
            if table.shape[-1:] not in ((self.rotary_dim,), (self.rotary_dim // 2,)):
                what = f"{self.rotary_dim} or {self.rotary_dim // 2} features in {name}"
                raise ValueError(expected(self, what, f"shape {tuple(table.shape)}"))
            _check_fits(self, name, table.shape[:-1], input_)
            if ctx.requires_grad and table.requires_grad and not torch.compiler.is_compiling():
                who = f"{type(self).__name__} gives no gradient of {name}, and it requires grad"
                raise RuntimeError(f"{who}: detach it")
        rotation = self.rotation
        if ctx.requires_grad:
            ctx.rotation = rotation
            ctx.to_save = (cos, sin) if ctx.input_requires_grad else (None, None)
        cos, sin = self._turns((cos.detach(), sin.detach()), rotation, input_.dtype)
        return rotated(input_, cos, sin, rotation), [()]

    @staticmethod
    def _turns(given: Sequence[Tensor], rotation: Rotation, dtype: torch.dtype) -> Turns:
        cos, sin = [table.to(wide(table.dtype)) for table in given]
        return cos, sin


def _check_fits(op: object, name: str, shape: torch.Size, input_: Tensor) -> None:
    """Refuse shapes that do not broadcast to the dimensions before the heads."""
    wanted = input_.shape[:-2]
    if input_.ndim < 2 or not broadcasts(shape, wanted):
        where = f"before the heads of an input of shape {tuple(input_.shape)}"
        what = f"{name} that fit the dimensions {tuple(wanted)} {where}"
        raise ValueError(expected(op, what, tuple(shape)))


def rotated(
    x: Tensor, cos: Tensor, sin: Tensor, rotation: Rotation, *, back: bool = False
) -> Tensor:
    """Each pair ``(a, b)`` as ``(a cos_a - b sin_a, b cos_b + a sin_b)``, in the dtype of ``x``.

    Args:
        x: ``(..., heads, head_dim)``.
        cos: ``(..., rotary_dim / 2)``, one for a pair, or ``(..., rotary_dim)``, one for a feature,
            without the heads, in fp32 or wider.
        sin: As ``cos``.
        rotation: The pairing of features.
        back: Multiply by the transposed matrix, as the gradient is.
    """
    count, dtype = rotation.rotary_dim, torch.promote_types(wide(x.dtype), cos.dtype)
    a, b = _pairs(x[..., :count].to(dtype), rotation)
    tables = cos.unsqueeze(-2), sin.unsqueeze(-2)
    (cos_a, cos_b), (sin_a, sin_b) = [
        _pairs(table, rotation) if table.shape[-1] == count else (table, table) for table in tables
    ]
    if back:
        sin_a, sin_b = -sin_b, -sin_a
    pairs = a * cos_a - b * sin_a, b * cos_b + a * sin_b
    y = torch.stack(pairs, -1).flatten(-2) if rotation.interleaved else torch.cat(pairs, -1)
    y = y.to(x.dtype)
    return y if count == x.shape[-1] else torch.cat((y, x[..., count:]), -1)


def _pairs(x: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
    """The first and the second numbers of the pairs of features."""
    half = rotation.rotary_dim // 2
    return (x[..., ::2], x[..., 1::2]) if rotation.interleaved else (x[..., :half], x[..., half:])
