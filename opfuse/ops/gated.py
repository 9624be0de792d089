"""Gated linear units: the base class, and the ops that derive from it.

They are GLU, GEGLU, QGEGLU, ReGLU, SReGLU, SwiGLU, SiTUGLU and ClampedSwiGLU.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.compiler import is_compiling, is_dynamo_compiling

from ..core.overwriting import may_write, tracing
from ._blocks import blocks, in_blocks
from ._common import check_size, expected, require, shows
from ._samples import BOUNDED, CLAMPED, INTERLEAVED, samples
from .activation import GELU, QGELU, Activation, ReLU, SiLU, SReLU, form_of_gelu, sigmoid
from .arithmetic import cast, filled, reusable, wide


class GatedActivation(Activation, built_in=True):
    """``value(a) * linear_value(b)`` over the two halves ``a, b`` of the features (Shazeer 2020).

    Maps ``(..., 2 n)`` to ``(..., n)``. The **first** half is the gate, which is activated; in
    ``torch.nn.functional.glu`` it is the second. With ``glu_interleave_size=k`` the features
    alternate instead: ``k`` of the gate, ``k`` of the linear half, and so on.

    Half precision is computed in fp32. But if torch has kernels for the gate (GEGLU, ReGLU,
    SReGLU, SwiGLU), bfloat16 is rounded after each factor, as in those kernels.

    A subclass implements :meth:`value` and :meth:`derivative` of the gate, and optionally
    :meth:`linear_value` and :meth:`linear_derivative` of the other half.

    Args:
        cache_quantized_input: As for :class:`Activation`.
        glu_interleave_size: Number of features of each half that alternate; None: the halves are
            contiguous. Fixed.

    Raises:
        ValueError: ``glu_interleave_size`` is less than 1; in a call, features that do not split
            evenly.
    """

    gated: ClassVar[bool] = True
    feature_ratio = 2
    sample_inputs = samples({}, INTERLEAVED)
    _fixed: ClassVar[tuple[str, ...]] = ("glu_interleave_size",)
    _has_kernels: ClassVar[bool] = False  # gate_value and gate_gradient are kernels
    _rounds: ClassVar[bool] = False  # they compute all there is
    _splits: ClassVar[bool] = True  # the halves are where this class has them

    def __init__(
        self, *, cache_quantized_input: bool = False, glu_interleave_size: int | None = None
    ) -> None:
        super().__init__(cache_quantized_input=cache_quantized_input)
        size = glu_interleave_size
        size = size if size is None else check_size(self, "glu_interleave_size", size)
        require(self, size != 0, "a glu_interleave_size of at least 1", size)
        self.glu_interleave_size = size

    def linear_value(self, b: Tensor) -> Tensor:
        """The factor of the gate; ``b`` is fp32 or fp64."""
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
            what = f"a multiple of {parts} features in the last dimension"
            raise ValueError(expected(self, what, f"shape {tuple(x.shape)}"))
        a, b = self._halves(x)
        return (a, b) if size is None else (a.flatten(-2), b.flatten(-2))

    def join(self, a: Tensor, b: Tensor) -> Tensor:
        """The inverse of :meth:`split`, as a new tensor."""
        size = self.glu_interleave_size
        if size is None:
            return torch.cat((a, b), -1)
        blocks = (*a.shape[:-1], a.shape[-1] // size, size)
        return torch.stack((a.reshape(blocks), b.reshape(blocks)), -2).flatten(-3)

    def linear_value_and_derivative(self, b: Tensor) -> tuple[Tensor, Tensor | None]:
        """Both, for a class that computes them from the same parts; ``b`` is fp32 or fp64."""
        return self.linear_value(b), self.linear_derivative(b)

    gate_value = Activation.forward_value
    """``value(a)`` in the dtype of ``a``; for a kernel that takes half precision."""

    gate_gradient = Activation.backward_value
    """``grad_output * derivative(a)``, into ``out`` if given.

    For a kernel that does both at once.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        base = GatedActivation
        own_value = base.gate_value is not cls.gate_value
        has_kernels = own_value and base.gate_gradient is not cls.gate_gradient
        linear = cls.linear_value, cls.linear_derivative
        rounds = has_kernels and linear == (base.linear_value, base.linear_derivative)
        splits = (cls.split, cls.join) == (base.split, base.join)
        facts = {"_has_kernels": has_kernels, "_rounds": rounds, "_splits": splits}
        for name, value in facts.items():
            type.__setattr__(cls, name, value)  # no plan has a class that is being made

    def forward_value(self, x: Tensor) -> Tensor:
        """The op's output ``(..., n)`` for the input ``(..., 2 n)``, in the dtype of ``x``."""
        dtype = self._computed_in(x)
        if (self._has_kernels and dtype is x.dtype) or not (self._in_parts and in_blocks(x)):
            a, b = self.split(cast(x, dtype))
            gate, linear = self.gate_value(a), self.linear_value(b)
            into = reusable(gate, linear) if self._in_parts else None
            return cast(torch.mul(gate, linear, out=into), x.dtype)
        self.split(x[:0])  # refuses what does not split
        y = x.new_empty((*x.shape[:-1], x.shape[-1] // 2))
        for of_x, rows in blocks(x, y):
            a, b = self._halves(of_x.to(dtype))
            torch.mul(self.gate_value(a), self.linear_value(b), out=self._like(rows))
        return y

    def backward_value(
        self, grad_output: Tensor, x: Tensor, *, out: Tensor | None = None
    ) -> Tensor:
        """The gradient ``(..., 2 n)`` of the input.

        Its halves are ``act'(a) lin(b) dy`` and ``act(a) lin'(b) dy``.
        """
        dtype = self._computed_in(x)
        if not self._splits or is_compiling() or not may_write(x, grad_output):
            a, b = self.split(cast(x, dtype))
            dy, slope = cast(grad_output, dtype), self.linear_derivative(b)
            da = self.gate_gradient(dy * self.linear_value(b), a)
            db = self.gate_value(a) * (dy if slope is None else dy * slope)
            dx = self.join(cast(da, x.dtype), cast(db, x.dtype))
            return dx if out is None else out.copy_(dx)
        # written in place: no copy to join the halves
        dx = torch.empty_like(x) if out is None else out
        if (self._has_kernels and dtype is x.dtype) or not (self._in_parts and in_blocks(x, dx)):
            dy, x = cast(grad_output, dtype), cast(x, dtype)
            self._write_gradients(self._like(dy), *self._halves(x), *self._halves(dx))
        else:
            for of_x, rows, dy in blocks(x, dx, grad_output.contiguous()):
                halves = *self._halves(of_x.to(dtype)), *self._halves(rows)
                self._write_gradients(self._like(dy.to(dtype)), *halves)
        return dx

    def _write_gradients(self, dy: Tensor, a: Tensor, b: Tensor, da: Tensor, db: Tensor) -> None:
        """Write the gradients of the halves, in the dtype of the halves or in half precision."""
        if self._has_kernels and a.dtype is da.dtype:
            slope = self.linear_derivative(b)
            self.gate_gradient(dy * self.linear_value(b), a, out=da)
            torch.mul(self.gate_value(a), dy if slope is None else dy * slope, out=db)
            return
        value, derivative = self.value_and_derivative(a)
        linear, slope = self.linear_value_and_derivative(b)
        torch.mul(derivative, dy * linear, out=da)
        torch.mul(value, dy if slope is None else dy * slope, out=db)

    def _computed_in(self, x: Tensor) -> torch.dtype:
        """The dtype to compute in: fp32 for half precision.

        But bfloat16 stays if torch's kernels and products compute everything.
        """
        dtype = x.dtype
        if self._rounds and dtype is torch.bfloat16 and (is_dynamo_compiling() or not tracing()):
            return dtype
        return wide(dtype)

    def _halves(self, x: Tensor) -> tuple[Tensor, ...]:
        """Views of the gate and of the linear half; interleaved, they have a dimension more."""
        size = self.glu_interleave_size
        if size is None:
            return x.chunk(2, -1)
        return x.view(*x.shape[:-1], x.shape[-1] // (2 * size), 2, size).unbind(-2)

    def _like(self, y: Tensor) -> Tensor:
        """A view of a tensor ``(..., n)`` in the shape of the halves."""
        size = self.glu_interleave_size
        return y if size is None else y.view(*y.shape[:-1], y.shape[-1] // size, size)


class _InHalves(GatedActivation, built_in=True):
    """A gated activation whose halves are contiguous."""

    def __init__(self, *, cache_quantized_input: bool = False) -> None:
        super().__init__(cache_quantized_input=cache_quantized_input)


class GLU(_InHalves, built_in=True):
    """``sigmoid(a) b`` (Dauphin et al. 2016)."""

    def value(self, x: Tensor) -> Tensor:
        """``sigmoid(x)``."""
        return torch.sigmoid(x)

    def derivative(self, x: Tensor) -> Tensor:
        """``s (1 - s)`` with ``s = sigmoid(x)``."""
        return GLU.value_and_derivative(self, x)[1]

    def value_and_derivative(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Both from ``s``."""
        s = torch.sigmoid(x)
        return s, s * (1 - s)

    def _write_gradients(self, dy: Tensor, a: Tensor, b: Tensor, da: Tensor, db: Tensor) -> None:
        s = torch.sigmoid(a)
        torch.mul(s, dy, out=db)
        da.copy_(torch.ops.aten.sigmoid_backward.default(dy * b, s))


class GEGLU(_InHalves, built_in=True):
    """``gelu(a) b`` (Shazeer 2020).

    Args:
        approximate: The form of GELU, as for :class:`GELU`. Fixed.
        cache_quantized_input: As for :class:`GatedActivation`.

    Raises:
        ValueError: ``approximate`` is neither ``"tanh"`` nor ``"none"``.
    """

    _fixed = (*_InHalves._fixed, "approximate")
    sample_inputs = samples({}, {"approximate": "none"})
    extra_repr = GELU.extra_repr
    value = GELU.value
    derivative = GELU.derivative
    gate_value = GELU.forward_value
    gate_gradient = GELU.backward_value

    def __init__(self, *, approximate: str = "tanh", cache_quantized_input: bool = False) -> None:
        super().__init__(cache_quantized_input=cache_quantized_input)
        self.approximate = form_of_gelu(self, approximate)


class QGEGLU(_InHalves, built_in=True):
    """``a sigmoid(1.702 a) b``."""

    value = QGELU.value
    derivative = QGELU.derivative
    value_and_derivative = QGELU.value_and_derivative


class ReGLU(_InHalves, built_in=True):
    """``max(a, 0) b`` (Shazeer 2020)."""

    value = ReLU.value
    derivative = ReLU.derivative
    gate_value = ReLU.forward_value
    gate_gradient = ReLU.backward_value


class SReGLU(_InHalves, built_in=True):
    """``max(a, 0)^2 b``."""

    value = SReLU.value
    derivative = SReLU.derivative
    gate_value = SReLU.forward_value
    gate_gradient = SReLU.backward_value


class SwiGLU(GatedActivation, built_in=True):
    """``silu(a) b`` (Shazeer 2020)."""

    value = SiLU.value
    derivative = SiLU.derivative
    gate_value = SiLU.forward_value
    gate_gradient = SiLU.backward_value


class SiTUGLU(GatedActivation, built_in=True):
    """``beta1 tanh(a / beta1) sigmoid(a) * beta2 tanh(b / beta2)``.

    It is SwiGLU with both factors bounded smoothly.

    Args:
        beta1: Bound of the gate.
        beta2: Bound of the linear half.
        cache_quantized_input: As for :class:`GatedActivation`.
        glu_interleave_size: As for :class:`GatedActivation`.

    Raises:
        ValueError: A bound is not finite, or not greater than 0.
    """

    number_names = real_numbers = ("beta1", "beta2")
    sample_inputs = samples({}, INTERLEAVED, BOUNDED)

    def __init__(
        self,
        *,
        beta1: float = 4.0,
        beta2: float = 25.0,
        cache_quantized_input: bool = False,
        glu_interleave_size: int | None = None,
    ) -> None:
        super().__init__(
            cache_quantized_input=cache_quantized_input, glu_interleave_size=glu_interleave_size
        )
        for name, beta in (("beta1", beta1), ("beta2", beta2)):
            require(self, 0 < beta < math.inf, f"a finite {name} greater than 0", beta)
        self.beta1 = float(beta1)
        self.beta2 = float(beta2)

    def value(self, x: Tensor) -> Tensor:
        """``beta1 tanh(x / beta1) sigmoid(x)``."""
        return self.beta1 * torch.tanh(x / self.beta1) * torch.sigmoid(x)

    def derivative(self, x: Tensor) -> Tensor:
        """``(1 - t^2) s + beta1 t s (1 - s)`` with ``t = tanh(x / beta1)``, ``s = sigmoid(x)``."""
        return SiTUGLU.value_and_derivative(self, x)[1]

    def value_and_derivative(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Both from ``t`` and ``s``."""
        t, s = torch.tanh(x / self.beta1), torch.sigmoid(x)
        y = self.beta1 * t * s
        return y, torch.addcmul((1 - t * t) * s, y, 1 - s)

    def linear_value(self, b: Tensor) -> Tensor:
        """``beta2 tanh(b / beta2)``."""
        return self.beta2 * torch.tanh(b / self.beta2)

    def linear_derivative(self, b: Tensor) -> Tensor:
        """``1 - tanh(b / beta2)^2``."""
        return SiTUGLU.linear_value_and_derivative(self, b)[1]

    def linear_value_and_derivative(self, b: Tensor) -> tuple[Tensor, Tensor]:
        """Both from the tanh."""
        t = torch.tanh(b / self.beta2)
        return self.beta2 * t, 1 - t * t

    extra_repr = shows("beta1", "beta2", "glu_interleave_size")


class ClampedSwiGLU(GatedActivation, built_in=True):
    """``a' sigmoid(alpha a') (b' + offset)``, with both halves clamped.

    Here ``a' = min(a, limit)`` and ``b' = clamp(b, -limit, limit)``. It is the activation of
    gpt-oss (OpenAI 2025). A value equal to a limit passes its gradient; one beyond it does not.

    Args:
        limit: Largest gate, and largest magnitude of the linear half.
        alpha: Slope of the sigmoid.
        glu_linear_offset: Added to the linear half after clamping.
        cache_quantized_input: As for :class:`GatedActivation`.
        glu_interleave_size: As for :class:`GatedActivation`.

    Raises:
        ValueError: ``limit`` is negative or not a number.
    """

    number_names = real_numbers = ("limit", "alpha", "glu_linear_offset")
    sample_inputs = samples({}, INTERLEAVED, CLAMPED)

    def __init__(
        self,
        *,
        limit: float = 7.0,
        alpha: float = 1.702,
        glu_linear_offset: float = 1.0,
        cache_quantized_input: bool = False,
        glu_interleave_size: int | None = None,
    ) -> None:
        super().__init__(
            cache_quantized_input=cache_quantized_input, glu_interleave_size=glu_interleave_size
        )
        require(self, limit >= 0, "a limit of at least 0", limit)
        self.limit = float(limit)
        self.alpha = float(alpha)
        self.glu_linear_offset = float(glu_linear_offset)

    def value(self, x: Tensor) -> Tensor:
        """``a sigmoid(alpha a)`` with ``a = min(x, limit)``."""
        a = x.clamp(max=self.limit)
        return a * sigmoid(self.alpha * a)

    def derivative(self, x: Tensor) -> Tensor:
        """``s + alpha a s (1 - s)`` with ``s = sigmoid(alpha a)``; 0 where ``x > limit``."""
        return ClampedSwiGLU.value_and_derivative(self, x)[1]

    def value_and_derivative(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Both from ``s``."""
        a = x.clamp(max=self.limit)
        s = sigmoid(self.alpha * a)
        y = a * s
        return y, filled(torch.addcmul(s, y, 1 - s, value=self.alpha), x > self.limit, 0.0)

    def linear_value(self, b: Tensor) -> Tensor:
        """``clamp(b, -limit, limit) + offset``."""
        return b.clamp(-self.limit, self.limit) + self.glu_linear_offset

    def linear_derivative(self, b: Tensor) -> Tensor:
        """1 within the limits, ends included, else 0."""
        return (b.abs() <= self.limit).to(b.dtype)

    extra_repr = shows("limit", "alpha", "glu_linear_offset", "glu_interleave_size")
