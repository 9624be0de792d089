"""Device functions: activations and their derivatives, of one fp32 value, for use in kernels.

Each takes ``x`` and then the numbers of its op. The formulas are those of :mod:`opfuse.ops`, so
that NaN, infinities and large values give what the ops give; ``libdevice`` is not used, which
Triton's interpreter does not have.
"""

import triton
import triton.language as tl


@triton.jit
def identity(x, n0=0, n1=0, n2=0, n3=0, n4=0, n5=0, n6=0, n7=0):
    """``x``: the linear half of most gated activations, whatever numbers their gate has."""
    return x


@triton.jit
def one(x, n0=0, n1=0, n2=0, n3=0, n4=0, n5=0, n6=0, n7=0):
    """1, the derivative of :func:`identity`."""
    return tl.zeros_like(x) + 1.0


@triton.jit
def sigmoid(x):
    """The gate of GLU."""
    return tl.sigmoid(x)


@triton.jit
def sigmoid_derivative(x):
    """``s (1 - s)``."""
    s = tl.sigmoid(x)
    return s * (1.0 - s)


@triton.jit
def silu(x):
    """``x sigmoid(x)``."""
    return x * tl.sigmoid(x)


@triton.jit
def silu_derivative(x):
    """``s (1 + x (1 - s))``."""
    s = tl.sigmoid(x)
    return s * (1.0 + x * (1.0 - s))


@triton.jit
def qgelu(x):
    """``x sigmoid(1.702 x)``."""
    return x * tl.sigmoid(1.702 * x)


@triton.jit
def qgelu_derivative(x):
    """``s + 1.702 x s (1 - s)`` with ``s = sigmoid(1.702 x)``."""
    s = tl.sigmoid(1.702 * x)
    return s + 1.702 * (x * s * (1.0 - s))


@triton.jit
def gelu_tanh(x):
    """``x (1 + tanh(u)) / 2`` with ``u = sqrt(2/pi) (x + 0.044715 x^3)``, as ``x sigmoid(2 u)``."""
    return x * tl.sigmoid(2.0 * x * (0.7978845608028654 + 0.035677408136300125 * x * x))


@triton.jit
def gelu_tanh_derivative(x):
    """``s + 2 x s (1 - s) u'`` with ``s = sigmoid(2 u)``."""
    s = tl.sigmoid(2.0 * x * (0.7978845608028654 + 0.035677408136300125 * x * x))
    slope = 0.7978845608028654 + 0.10703222440890037 * x * x
    return s + 2.0 * x * s * (1.0 - s) * slope


@triton.jit
def gelu_erf(x):
    """``x Phi(x)``."""
    return x * (0.5 * (1.0 + tl.erf(x * 0.7071067811865476)))


@triton.jit
def gelu_erf_derivative(x):
    """``Phi(x) + x phi(x)``."""
    density = tl.exp(-0.5 * x * x) * 0.3989422804014327
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
    y = relu(x)
    return y * y


@triton.jit
def srelu_derivative(x):
    """``max(2 x, 0)``."""
    return relu(2.0 * x)


@triton.jit
def tanh(x):
    """The hyperbolic tangent; by its Taylor series near 0, where the other form cancels."""
    e = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - e) / (1.0 + e)
    z = x * x
    terms = 0.13333333333333333 + z * (-0.05396825396825397 + z * 0.021869488536155203)
    near = x + x * z * (-0.3333333333333333 + z * terms)
    return tl.where(tl.abs(x) < 0.25, near, tl.where(x < 0.0, -far, far))


@triton.jit
def situ_gate(x, beta1, beta2):
    """``beta1 tanh(x / beta1) sigmoid(x)``."""
    return beta1 * tanh(x / beta1) * tl.sigmoid(x)


@triton.jit
def situ_gate_derivative(x, beta1, beta2):
    """``(1 - t^2) s + beta1 t s (1 - s)``."""
    t, s = tanh(x / beta1), tl.sigmoid(x)
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
    return a * tl.sigmoid(alpha * a)


@triton.jit
def clamped_gate_derivative(x, limit, alpha, offset):
    """``s + alpha a s (1 - s)``, and 0 where ``x > limit``."""
    a = tl.where(x > limit, limit, x)
    s = tl.sigmoid(alpha * a)
    return tl.where(x > limit, 0.0, s + alpha * (a * s * (1.0 - s)))


@triton.jit
def clamped_linear(x, limit, alpha, offset):
    """``clamp(x, -limit, limit) + offset``."""
    return tl.where(x > limit, limit, tl.where(x < -limit, -limit, x)) + offset


@triton.jit
def clamped_linear_derivative(x, limit, alpha, offset):
    """1 within the limits, ends included, else 0."""
    return tl.where(tl.abs(x) <= limit, 1.0, 0.0)
