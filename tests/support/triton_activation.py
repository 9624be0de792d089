"""Kernels that apply any activation, forward and backward, and an activation that brings its own functions."""

import torch
import triton
import triton.language as tl
from opfuse_triton import Config, Kernel, functions_of

from opfuse.ops import Activation, GatedActivation


@triton.jit
def forward_kernel(
    x, out, rows, columns, numbers,
    VALUE: tl.constexpr, LINEAR_VALUE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < rows * columns
    if LINEAR_VALUE is None:
        y = VALUE(tl.load(x + at, inside, 0).to(tl.float32), *numbers)
    else:
        first = at // columns * columns * 2 + at % columns
        a = tl.load(x + first, inside, 0).to(tl.float32)
        b = tl.load(x + first + columns, inside, 0).to(tl.float32)
        y = VALUE(a, *numbers) * LINEAR_VALUE(b, *numbers)
    tl.store(out + at, y.to(out.dtype.element_ty), inside)


@triton.jit
def backward_kernel(
    dy, x, dx, rows, columns, numbers,
    VALUE: tl.constexpr, DERIVATIVE: tl.constexpr, LINEAR_VALUE: tl.constexpr, LINEAR_DERIVATIVE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < rows * columns
    g = tl.load(dy + at, inside, 0).to(tl.float32)
    if LINEAR_VALUE is None:
        d = g * DERIVATIVE(tl.load(x + at, inside, 0).to(tl.float32), *numbers)
        tl.store(dx + at, d.to(dx.dtype.element_ty), inside)
    else:
        first = at // columns * columns * 2 + at % columns
        a = tl.load(x + first, inside, 0).to(tl.float32)
        b = tl.load(x + first + columns, inside, 0).to(tl.float32)
        da = DERIVATIVE(a, *numbers) * (g * LINEAR_VALUE(b, *numbers))
        db = VALUE(a, *numbers) * (g * LINEAR_DERIVATIVE(b, *numbers))
        tl.store(dx + first, da.to(dx.dtype.element_ty), inside)
        tl.store(dx + first + columns, db.to(dx.dtype.element_ty), inside)


CONFIGS = (Config({"BLOCK": 256}), Config({"BLOCK": 1024}, num_warps=8))
FORWARD, BACKWARD = Kernel(forward_kernel, CONFIGS), Kernel(backward_kernel, CONFIGS)


def forward(op, x):
    of = functions_of(op)
    out = x.new_empty(*x.shape[:-1], x.shape[-1] // op.feature_ratio)
    numbers = of.numbers(op.numbers_of())
    FORWARD.launch(
        lambda config: (triton.cdiv(out.numel(), config["BLOCK"]),),
        x, out, out.shape[0], out.shape[1], numbers, VALUE=of.value, LINEAR_VALUE=of.linear_value,
    )  # fmt: skip
    return out


def backward(op, dy, x):
    of = functions_of(op)
    dx, numbers = torch.empty_like(x), of.numbers(op.numbers_of())
    BACKWARD.launch(
        lambda config: (triton.cdiv(dy.numel(), config["BLOCK"]),),
        dy, x, dx, dy.shape[0], dy.shape[1], numbers, VALUE=of.value, DERIVATIVE=of.derivative,
        LINEAR_VALUE=of.linear_value, LINEAR_DERIVATIVE=of.linear_derivative,
    )  # fmt: skip
    return dx


@triton.jit
def leaky(x, slope):
    return tl.where(x > 0, x, x * slope)


@triton.jit
def leaky_derivative(x, slope):
    return tl.where(x > 0, 1.0, slope)


class LeakyReLU(Activation):
    slope = 0.01
    number_names = ("slope",)

    def value(self, x):
        return torch.where(x > 0, x, x * self.slope)

    def derivative(self, x):
        return torch.where(x > 0, 1.0, self.slope).to(x.dtype)

    def device_functions(self):
        return leaky, leaky_derivative


class LeakyGLU(GatedActivation):
    """Its linear half is ``leaky`` too."""

    slope = 0.25
    number_names = ("slope",)
    value, derivative = LeakyReLU.value, LeakyReLU.derivative
    linear_value, linear_derivative = LeakyReLU.value, LeakyReLU.derivative

    def device_functions(self):
        return leaky, leaky_derivative, leaky, leaky_derivative


class LeakyGate(GatedActivation):
    """Its gate has a number, and its linear half is the usual one."""

    slope = 0.25
    number_names = ("slope",)
    value, derivative = LeakyReLU.value, LeakyReLU.derivative

    def device_functions(self):
        return leaky, leaky_derivative
