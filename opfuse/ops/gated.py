"""Gated linear units: the base class, and GLU, GEGLU, QGEGLU, ReGLU, SReGLU, SwiGLU, SiTUGLU, ClampedSwiGLU."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor

from ._common import cast, check_size, shows, widen
from .activation import GELU, QGELU, Activation, ReLU, SiLU, SReLU


class GatedActivation(Activation):
    """``value(a) * linear_value(b)`` over the two halves ``a, b`` of the features (Shazeer 2020).

    Takes ``(..., 2 n)`` and gives ``(..., n)``. The **first** half is the gate, which is activated; in
    ``torch.nn.functional.glu`` it is the second. With ``glu_interleave_size=k`` the features alternate instead:
    ``k`` of the gate, ``k`` of the linear half, and so on.

    A subclass gives :meth:`value` and :meth:`derivative` of the gate, and may give :meth:`linear_value` and
    :meth:`linear_derivative` of the other half.

    Args:
        cache_quantized_input: False; True comes with a later release.
        glu_interleave_size: How many features of each half alternate; None: the halves are contiguous.

    Raises:
        ValueError: ``glu_interleave_size`` is less than 1; in a call, features that do not split evenly.
        NotImplementedError: ``cache_quantized_input=True``.
    """

    gated: ClassVar[bool] = True
    feature_ratio = 2

    def __init__(self, *, cache_quantized_input: bool = False, glu_interleave_size: int | None = None) -> None:
        super().__init__(cache_quantized_input=cache_quantized_input)
        if glu_interleave_size is not None and check_size(self, "glu_interleave_size", glu_interleave_size) < 1:
            raise ValueError(f"{type(self).__name__} expected a glu_interleave_size of at least 1, got 0")
        self.glu_interleave_size = glu_interleave_size

    def linear_value(self, b: Tensor) -> Tensor:
        """What the gate multiplies; ``b`` is fp32 or fp64."""
        return b

    def linear_derivative(self, b: Tensor) -> Tensor | None:
        """Derivative of :meth:`linear_value`; None means 1."""
        return None

    extra_repr = shows("glu_interleave_size")

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The gate and the linear half of ``(..., 2 n)``, each ``(..., n)``.

        Raises:
            ValueError: The last dimension does not split evenly.
        """
        size = self.glu_interleave_size
        width = x.shape[-1] if x.ndim else 1
        if width % (parts := 2 * (size or 1)):
            expected = f"{type(self).__name__} expected a multiple of {parts} features in the last dimension"
            raise ValueError(f"{expected}, got shape {tuple(x.shape)}")
        if size is None:
            a, b = x.chunk(2, -1)
            return a, b
        a, b = x.reshape(*x.shape[:-1], width // (2 * size), 2, size).unbind(-2)
        return a.flatten(-2), b.flatten(-2)

    def join(self, a: Tensor, b: Tensor) -> Tensor:
        """The inverse of :meth:`split`, as a new tensor."""
        size = self.glu_interleave_size
        if size is None:
            return torch.cat((a, b), -1)
        blocks = (*a.shape[:-1], a.shape[-1] // size, size)
        return torch.stack((a.reshape(blocks), b.reshape(blocks)), -2).flatten(-3)

    def forward_value(self, x: Tensor) -> Tensor:
        """The op's output ``(..., n)`` for the input ``(..., 2 n)``, in the dtype of ``x``."""
        a, b = self.split(widen(x))
        return cast(self.value(a) * self.linear_value(b), x.dtype)

    def backward_value(self, grad_output: Tensor, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        """The gradient ``(..., 2 n)`` of the input: ``act'(a) lin(b) dy`` and ``act(a) lin'(b) dy``."""
        wide_x, dy = widen(x), widen(grad_output)
        a, b = self.split(wide_x)
        slope = self.linear_derivative(b)
        grad_gate = dy * self.linear_value(b)
        grad_linear = dy if slope is None else dy * slope
        if self.glu_interleave_size is None and wide_x is x and not torch.compiler.is_compiling():
            dx = torch.empty_like(x) if out is None else out  # written in place: no copy to join the halves
            da, db = dx.chunk(2, -1)
            self.gate_gradient(grad_gate, a, out=da)
            torch.mul(self.value(a), grad_linear, out=db)
            return dx
        da, db = self.gate_gradient(grad_gate, a), self.value(a) * grad_linear
        dx = self.join(cast(da, x.dtype), cast(db, x.dtype))
        return dx if out is None else out.copy_(dx)

    gate_gradient = Activation.backward_value
    """``grad_output * derivative(x)``, into ``out`` if given; for a kernel that does both at once."""


class _InHalves(GatedActivation):
    """A gated activation whose halves are contiguous."""

    def __init__(self, *, cache_quantized_input: bool = False) -> None:
        super().__init__(cache_quantized_input=cache_quantized_input)


class GLU(_InHalves):
    """``sigmoid(a) b`` (Dauphin et al. 2016)."""

    def value(self, x: Tensor) -> Tensor:
        """``sigmoid(x)``."""
        return torch.sigmoid(x)

    def derivative(self, x: Tensor) -> Tensor:
        """``s (1 - s)`` with ``s = sigmoid(x)``."""
        s = torch.sigmoid(x)
        return s * (1 - s)


class GEGLU(_InHalves):
    """``gelu(a) b`` with the tanh form of GELU (Shazeer 2020)."""

    value = GELU.value
    derivative = GELU.derivative
    gate_gradient = GELU.backward_value


class QGEGLU(_InHalves):
    """``a sigmoid(1.702 a) b``."""

    value = QGELU.value
    derivative = QGELU.derivative


class ReGLU(_InHalves):
    """``max(a, 0) b`` (Shazeer 2020)."""

    value = ReLU.value
    derivative = ReLU.derivative
    gate_gradient = ReLU.backward_value


class SReGLU(_InHalves):
    """``max(a, 0)^2 b``."""

    value = SReLU.value
    derivative = SReLU.derivative


class SwiGLU(GatedActivation):
    """``silu(a) b`` (Shazeer 2020)."""

    value = SiLU.value
    derivative = SiLU.derivative
    gate_gradient = SiLU.backward_value


class SiTUGLU(GatedActivation):
    """``beta1 tanh(a / beta1) sigmoid(a) * beta2 tanh(b / beta2)``: SwiGLU with both factors bounded smoothly.

    Args:
        beta1: Bound of the gate.
        beta2: Bound of the linear half.
        cache_quantized_input: As for :class:`GatedActivation`.
        glu_interleave_size: As for :class:`GatedActivation`.

    Raises:
        ValueError: A bound is not finite, or not greater than 0.
    """

    def __init__(
        self,
        *,
        beta1: float = 4.0,
        beta2: float = 25.0,
        cache_quantized_input: bool = False,
        glu_interleave_size: int | None = None,
    ) -> None:
        super().__init__(cache_quantized_input=cache_quantized_input, glu_interleave_size=glu_interleave_size)
        for name, beta in (("beta1", beta1), ("beta2", beta2)):
            if not (math.isfinite(beta) and beta > 0):
                raise ValueError(f"{type(self).__name__} expected a finite {name} greater than 0, got {beta!r}")
        self.beta1 = float(beta1)
        self.beta2 = float(beta2)

    def value(self, x: Tensor) -> Tensor:
        """``beta1 tanh(x / beta1) sigmoid(x)``."""
        return self.beta1 * torch.tanh(x / self.beta1) * torch.sigmoid(x)

    def derivative(self, x: Tensor) -> Tensor:
        """``(1 - t^2) s + beta1 t s (1 - s)`` with ``t = tanh(x / beta1)``, ``s = sigmoid(x)``."""
        t, s = torch.tanh(x / self.beta1), torch.sigmoid(x)
        return (1 - t * t) * s + self.beta1 * t * s * (1 - s)

    def linear_value(self, b: Tensor) -> Tensor:
        """``beta2 tanh(b / beta2)``."""
        return self.beta2 * torch.tanh(b / self.beta2)

    def linear_derivative(self, b: Tensor) -> Tensor:
        """``1 - tanh(b / beta2)^2``."""
        t = torch.tanh(b / self.beta2)
        return 1 - t * t

    extra_repr = shows("beta1", "beta2", "glu_interleave_size")


class ClampedSwiGLU(GatedActivation):
    """``a' sigmoid(alpha a') (b' + offset)``, ``a' = min(a, limit)``, ``b' = clamp(b, -limit, limit)``.

    The activation of gpt-oss (OpenAI 2025). A value equal to a limit passes its gradient; one beyond it does not.

    Args:
        limit: Largest gate, and largest magnitude of the linear half.
        alpha: Slope of the sigmoid.
        glu_linear_offset: Added to the linear half after clamping.
        cache_quantized_input: As for :class:`GatedActivation`.
        glu_interleave_size: As for :class:`GatedActivation`.

    Raises:
        ValueError: ``limit`` is negative or not a number.
    """

    def __init__(
        self,
        *,
        limit: float = 7.0,
        alpha: float = 1.702,
        glu_linear_offset: float = 1.0,
        cache_quantized_input: bool = False,
        glu_interleave_size: int | None = None,
    ) -> None:
        super().__init__(cache_quantized_input=cache_quantized_input, glu_interleave_size=glu_interleave_size)
        if not limit >= 0:
            raise ValueError(f"{type(self).__name__} expected a limit of at least 0, got {limit!r}")
        self.limit = float(limit)
        self.alpha = float(alpha)
        self.glu_linear_offset = float(glu_linear_offset)

    def value(self, x: Tensor) -> Tensor:
        """``a sigmoid(alpha a)`` with ``a = min(x, limit)``."""
        a = x.clamp(max=self.limit)
        return a * torch.sigmoid(self.alpha * a)

    def derivative(self, x: Tensor) -> Tensor:
        """``s + alpha a s (1 - s)`` with ``s = sigmoid(alpha a)``; 0 where ``x > limit``."""
        s = torch.sigmoid(self.alpha * x)
        return torch.where(x > self.limit, 0.0, s + self.alpha * x * s * (1 - s))

    def linear_value(self, b: Tensor) -> Tensor:
        """``clamp(b, -limit, limit) + offset``."""
        return b.clamp(-self.limit, self.limit) + self.glu_linear_offset

    def linear_derivative(self, b: Tensor) -> Tensor:
        """1 within the limits, ends included, else 0."""
        return (b.abs() <= self.limit).to(b.dtype)

    extra_repr = shows("limit", "alpha", "glu_linear_offset", "glu_interleave_size")
