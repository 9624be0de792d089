"""Single ops as you would write them by hand: autograd functions by the formulas of opfuse's ops.

Each saves what the op saves, and computes in fp32 where the op does, on whole tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

aten = torch.ops.aten
Formulas = tuple[Callable[..., Tensor], Callable[..., Tensor]]


def in_fp32(value: Callable[..., Tensor], gradient: Callable[..., Tensor]) -> Formulas:
    """The same in fp32, with operands and results in half precision."""
    return (
        lambda x: value(x.float()).to(x.dtype),
        lambda dy, x: gradient(dy.float(), x.float()).to(x.dtype),
    )


def gated(value: Callable[..., Tensor], gradient: Callable[..., Tensor]) -> Formulas:
    """``value(a) b``, where a kernel gives ``dy value'(a)``."""

    def forward(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return value(a) * b

    def backward(dy: Tensor, x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat((gradient(dy * b, a), value(a) * dy), -1)

    return forward, backward


def product(gate: Callable[..., Any], linear: Callable[..., Any] = lambda b: (b, None)) -> Formulas:
    """``gate(a) linear(b)`` in fp32, each with its derivative, which is None for 1."""

    def forward(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return gate(a)[0] * linear(b)[0]

    def backward(dy: Tensor, x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        (value, slope), (factor, its_slope) = gate(a), linear(b)
        return torch.cat(
            (dy * factor * slope, dy * value * (1 if its_slope is None else its_slope)), -1
        )

    return in_fp32(forward, backward)


def sigmoid(a: Tensor) -> tuple[Tensor, Tensor]:
    """The sigmoid, and the derivative."""
    s = torch.sigmoid(a)
    return s, s * (1 - s)


def qgelu(a: Tensor) -> tuple[Tensor, Tensor]:
    """``a sigmoid(1.702 a)``, and the derivative."""
    s = torch.sigmoid(1.702 * a)
    y = a * s
    return y, s + 1.702 * y * (1 - s)


def situ(a: Tensor) -> tuple[Tensor, Tensor]:
    """The gate of SiTUGLU, and the derivative."""
    t, s = torch.tanh(a / 4), torch.sigmoid(a)
    y = 4 * t * s
    return y, (1 - t * t) * s + y * (1 - s)


def bounded(b: Tensor) -> tuple[Tensor, Tensor]:
    """Its linear half, and the derivative."""
    t = torch.tanh(b / 25)
    return 25 * t, 1 - t * t


def clamped(a: Tensor) -> tuple[Tensor, Tensor]:
    """The gate of ClampedSwiGLU, and the derivative."""
    y, slope = qgelu(a.clamp(max=7.0))
    return y, slope.masked_fill(a > 7, 0)


def clipped(b: Tensor) -> tuple[Tensor, Tensor]:
    """Its linear half, and the derivative."""
    return b.clamp(-7, 7) + 1, (b.abs() <= 7).to(b.dtype)


KERNELS: dict[str, Formulas] = {
    "gelu": (
        lambda x: F.gelu(x, approximate="tanh"),
        lambda dy, x: aten.gelu_backward(dy, x, approximate="tanh"),
    ),
    "relu": (torch.relu, lambda dy, x: aten.threshold_backward(dy, x, 0)),
    "silu": (F.silu, lambda dy, x: aten.silu_backward(dy, x)),
    "srelu": (lambda x: torch.relu(x).square(), lambda dy, x: dy * torch.relu(2 * x)),
}
GATED = ("geglu", "reglu", "swiglu", "sreglu")
FORMULAS = KERNELS | {
    "qgelu": in_fp32(lambda x: qgelu(x)[0], lambda dy, x: aten.silu_backward(dy, 1.702 * x)),
    "glu": product(sigmoid),
    "qgeglu": product(qgelu),
    "situglu": product(situ, bounded),
    "clampedswiglu": product(clamped, clipped),
    **{name: gated(*KERNELS[gate]) for name, gate in zip(GATED, KERNELS, strict=True)},
}


class Pointwise(torch.autograd.Function):
    """A function of the input alone, which it saves."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, formulas: Formulas) -> Tensor:
        ctx.save_for_backward(x)
        ctx.backward_by = formulas[1]
        return formulas[0](x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return ctx.backward_by(dy, *ctx.saved_tensors), None


class LayerNorm(torch.autograd.Function):
    """torch's kernels, with the backward in fp32.

    Half precision needs that for an exact gradient of the weight.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        y, mean, rstd = torch.native_layer_norm(x, weight.shape, weight.float(), bias.float(), 1e-5)
        ctx.save_for_backward(x, weight, mean, rstd)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, ...]:
        x, weight, mean, rstd = ctx.saved_tensors
        w, wants = weight.float(), [True] * 3
        grads = aten.native_layer_norm_backward(
            dy.float(), x.float(), weight.shape, mean, rstd, w, w, wants
        )
        return tuple(grad.to(x.dtype) for grad in grads)


class RMSNorm(torch.autograd.Function):
    """In fp32; without a weight it divides by the norm instead of the root of the mean square."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        wide, over = x.float(), torch.sum if weight is None else torch.mean
        rstd = torch.rsqrt(over(wide.square(), -1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, rstd)
        return (wide * rstd if weight is None else wide * rstd * weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, weight, rstd = ctx.saved_tensors
        normalized, dy, over = (
            x.float() * rstd,
            dy.float(),
            torch.sum if weight is None else torch.mean,
        )
        g = dy if weight is None else dy * weight
        dx = rstd * (g - normalized * over(g * normalized, -1, keepdim=True))
        dw = None if weight is None else (dy * normalized).sum(0).to(weight.dtype)
        return dx.to(x.dtype), dw, None


def alone(name: str) -> Callable[..., Tensor] | None:
    """The op of that name as a function of the input and its parameters."""
    if name in FORMULAS:
        return lambda x: Pointwise.apply(x, FORMULAS[name])
    norms = {
        "layernorm": LayerNorm.apply,
        "rmsnorm": lambda x, weight: RMSNorm.apply(x, weight, 1e-5),
        "l2norm": lambda x: RMSNorm.apply(x, None, 1e-6),
    }
    return norms.get(name)
