"""Device functions: activations and their derivatives, of one fp32 value, for use in kernels.

Each takes ``x`` and then the numbers of its op. The formulas are those of :mod:`opfuse.ops`, so
that NaN, infinities and large values give what the ops give; ``libdevice`` is not used, which
Triton's interpreter does not have.

:func:`exp` and :func:`reciprocal` are one or two instructions on a GPU of NVIDIA. What they give is
within 2 units in the last place (ulp), and 1, of what the rounded argument has; a subnormal result
is 0. Elsewhere, and in the interpreter, they are Triton's own.
"""

from typing import Any

import triton
import triton.language as tl


def ptx_capability(_semantic: Any = None) -> Any:
    """The capability that a kernel is compiled for, such as 90; 0: not for a GPU of NVIDIA.

    Kernels ask. It is a constant there, and 0 in the interpreter.

    Args:
        _semantic: Given by Triton while it compiles.
    """
    arch = "" if _semantic is None else _semantic.builder.options.arch
    return tl.constexpr(int(arch.removeprefix("sm")) if arch.startswith("sm") else 0)


ptx_capability.__triton_builtin__ = True  # type: ignore[attr-defined]


@triton.jit
def _ptx(NAME: tl.constexpr, x):
    asm: tl.constexpr = NAME + ".approx.ftz.f32 $0, $1;"
    return tl.inline_asm_elementwise(asm, "=f,f", [x], tl.float32, True, 1)


@triton.jit
def exp(x, RATE: tl.constexpr = 1.0):
    """``e^(RATE x)``, of fp32.

    PTX gives 2 ulp as the error of ``ex2.approx``. It raises 2 to a rounded product of ``x``, which
    is up to ``RATE x / 2^24`` of the result; Triton's own function does that too.
    """
    return _ptx("ex2", x * (RATE * 1.4426950408889634)) if ptx_capability() else tl.exp(RATE * x)


@triton.jit
def reciprocal(x):
    """``1 / x``, of fp32, where ``x`` is not subnormal. PTX gives 1 ulp as the error of ``rcp``."""
    return _ptx("rcp", x) if ptx_capability() else 1.0 / x


@triton.jit
def identity(x, n0=0, n1=0, n2=0, n3=0, n4=0, n5=0, n6=0, n7=0):
    """``x``: the linear half of most gated activations, whatever numbers their gate has."""
    return x


@triton.jit
def one(x, n0=0, n1=0, n2=0, n3=0, n4=0, n5=0, n6=0, n7=0):
    """1, the derivative of :func:`identity`."""
    return tl.zeros_like(x) + 1.0


@triton.jit
def sigmoid(x, RATE: tl.constexpr = 1.0):
    """``1 / (1 + e^(-RATE x))``, the gate of GLU."""
    return reciprocal(1.0 + exp(x, -RATE))


@triton.jit
def sigmoid_derivative(x):
    """``s (1 - s)``."""
    s = sigmoid(x)
    return s * (1.0 - s)


@triton.jit
def silu(x):
    """``x sigmoid(x)``."""
    return x * sigmoid(x)


@triton.jit
def silu_derivative(x):
    """``s (1 + x (1 - s))``."""
    s = sigmoid(x)
    return s * (1.0 + x * (1.0 - s))


@triton.jit
def qgelu(x):
    """``x sigmoid(1.702 x)``."""
    return x * sigmoid(x, 1.702)


@triton.jit
def qgelu_derivative(x):
    """``s + 1.702 x s (1 - s)`` with ``s = sigmoid(1.702 x)``."""
    s = sigmoid(x, 1.702)
    return s + 1.702 * (x * s * (1.0 - s))


@triton.jit
def gelu_tanh(x):
    """``x (1 + tanh(u)) / 2`` with ``u = sqrt(2/pi) (x + 0.044715 x^3)``, as ``x sigmoid(2 u)``."""
    return x * sigmoid(x * (0.7978845608028654 + 0.035677408136300125 * x * x), 2.0)


@triton.jit
def gelu_tanh_derivative(x):
    """``s + 2 x s (1 - s) u'`` with ``s = sigmoid(2 u)``."""
    t = 0.035677408136300125 * x * x
    s = sigmoid(x * (0.7978845608028654 + t), 2.0)
    return s + 2.0 * x * s * (1.0 - s) * (0.7978845608028654 + 3.0 * t)


@triton.jit
def gelu_erf(x):
    """``x Phi(x)``."""
    return x * (0.5 * (1.0 + tl.erf(x * 0.7071067811865476)))


@triton.jit
def gelu_erf_derivative(x):
    """``Phi(x) + x phi(x)``."""
    density = exp(x * x, -0.5) * 0.3989422804014327
    return 0.5 * (1.0 + tl.erf(x * 0.7071067811865476)) + x * density


@triton.jit
def relu(x):
    """``max(x, 0)``; NaN stays."""
    return tl.where(x <= 0.0, 0.0, x)


@triton.jit
def relu_derivative(x):
    """0 where ``x <= 0``, else 1, at NaN too."""
    return tl.where(x <= 0.0, 0.0, 1.0)


@triton.jit
def srelu(x):
    """``max(x, 0)^2``."""
    return relu(x) * relu(x)


@triton.jit
def srelu_derivative(x):
    """``max(2 x, 0)``."""
    return relu(2.0 * x)


@triton.jit
def tanh(x):
    """The hyperbolic tangent; by its Taylor series near 0, where the other form cancels."""
    e = exp(tl.abs(x), -2.0)
    far = (1.0 - e) * reciprocal(1.0 + e)
    z = x * x
    terms = 0.13333333333333333 + z * (-0.05396825396825397 + z * 0.021869488536155203)
    near = x + x * z * (-0.3333333333333333 + z * terms)
    return tl.where(tl.abs(x) < 0.25, near, tl.where(x < 0.0, -far, far))


@triton.jit
def situ_gate(x, beta1, beta2):
    """``beta1 tanh(x / beta1) sigmoid(x)``."""
    return beta1 * tanh(x / beta1) * sigmoid(x)


@triton.jit
def situ_gate_derivative(x, beta1, beta2):
    """``(1 - t^2) s + beta1 t s (1 - s)``."""
    t, s = tanh(x / beta1), sigmoid(x)
    return (1.0 - t * t) * s + beta1 * t * s * (1.0 - s)


@triton.jit
def situ_linear(x, beta1, beta2):
    """``beta2 tanh(x / beta2)``."""
    return beta2 * tanh(x / beta2)


@triton.jit
def situ_linear_derivative(x, beta1, beta2):
    """``1 - tanh(x / beta2)^2``."""
    t = tanh(x / beta2)
    return 1.0 - t * t


@triton.jit
def clamped_gate(x, limit, alpha, offset):
    """``a sigmoid(alpha a)`` with ``a = min(x, limit)``."""
    a = tl.where(x > limit, limit, x)
    return a * sigmoid(alpha * a)


@triton.jit
def clamped_gate_derivative(x, limit, alpha, offset):
    """``s + alpha a s (1 - s)``, and 0 where ``x > limit``."""
    a = tl.where(x > limit, limit, x)
    s = sigmoid(alpha * a)
    return tl.where(x > limit, 0.0, s + alpha * (a * s * (1.0 - s)))


@triton.jit
def clamped_linear(x, limit, alpha, offset):
    """``clamp(x, -limit, limit) + offset``."""
    return tl.where(x > limit, limit, tl.where(x < -limit, -limit, x)) + offset


@triton.jit
def clamped_linear_derivative(x, limit, alpha, offset):
    """1 within the limits, ends included, else 0."""
    return tl.where(tl.abs(x) <= limit, 1.0, 0.0)
