"""Activations: the base class, and GELU, QGELU, ReLU, SReLU, SiLU."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.nn import functional as F

from ..op import BasicOperation, OperationContext
from ._common import Grads, refuse, wide


class Activation(BasicOperation):
    """An elementwise function. A subclass gives :meth:`value` and :meth:`derivative`; that is all.

    Takes and gives a tensor of any shape, in the compute dtype. Half precision is computed in fp32.

    Attributes:
        gated: Whether the op splits its features; see :class:`opfuse.ops.GatedActivation`.

    Args:
        cache_quantized_input: False; True comes with a later release.

    Raises:
        NotImplementedError: ``cache_quantized_input=True``.
    """

    gated: ClassVar[bool] = False
    saved_names = ("input",)
    feature_ratio = 1
    grad_input = "fresh"
    differentiable = True

    def __init__(self, *, cache_quantized_input: bool = False) -> None:
        super().__init__()
        refuse(self, "caching a quantized input", cache_quantized_input=cache_quantized_input)

    @abstractmethod
    def value(self, x: Tensor) -> Tensor:
        """The function, elementwise, made of differentiable torch operations; ``x`` is fp32 or fp64."""

    @abstractmethod
    def derivative(self, x: Tensor) -> Tensor:
        """Its derivative at ``x``, elementwise; ``x`` is fp32 or fp64."""

    def device_functions(self) -> tuple[Any, Any] | None:
        """A pair of Triton device functions, value and derivative of one fp32 scalar; None: there are none.

        A kernel that takes any activation in its epilogue asks for them, and declines where there are none.
        """
        return None

    def forward_value(self, x: Tensor) -> Tensor:
        """The op's output for the input ``x``, in the dtype of ``x``."""
        dtype = x.dtype
        math = wide(dtype)
        return self.value(x) if math is dtype else self.value(x.to(math)).to(dtype)

    def backward_value(self, grad_output: Tensor, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        """The gradient of the input ``x``.

        Args:
            grad_output: Gradient of the output, in the dtype of ``x``.
            x: The input.
            out: Of the shape and dtype of ``x``: where the result may be written. It may be ``grad_output``
                itself if that has this shape.

        Returns:
            A new tensor, or ``out``.
        """
        dtype = x.dtype
        math = wide(dtype)
        if math is dtype:
            return torch.mul(grad_output, self.derivative(x), out=out)
        dx = grad_output.to(math) * self.derivative(x.to(math))
        return dx.to(dtype) if out is None else out.copy_(dx)

    def op_forward(  # type: ignore[override]
        self, ctx: OperationContext, input_: Tensor, *, prev_op_grad_output_quantizer: Any, next_op_input_quantizer: Any
    ) -> Tensor:
        """The output, in ``ctx.dtype``; saves ``(input,)`` in that dtype."""
        return self.forward_value(self.operand(ctx, input_))

    @staticmethod
    def operand(ctx: Any, input_: Tensor) -> Tensor:
        """The input in ``ctx.dtype``, after leaving on ``ctx`` what the backward needs (for fusions too)."""
        x = input_ if ctx.dtype is input_.dtype or ctx.dtype is None else input_.to(ctx.dtype)
        if ctx.requires_grad:
            ctx.to_save = (x if ctx.input_requires_grad else None,)
        return x

    def op_backward(self, ctx: OperationContext, grad_output: Tensor) -> tuple[Tensor | None, Grads]:
        """The gradient of the input; overwrites ``grad_output`` where it may."""
        (x,) = ctx.saved_tensors  # type: ignore[misc]
        if x is None:
            return None, ()
        if grad_output.dtype is not x.dtype:
            grad_output = grad_output.to(x.dtype)
        out = grad_output if ctx.owns_grad_output and not self.gated else None
        return self.backward_value(grad_output, x, out=out), ()


def _backward_kernel(kernel: Any, *constants: Any, **options: Any) -> Callable[..., Tensor]:
    """A ``backward_value`` made of one kernel of torch's, which computes half precision in fp32 itself."""
    traced = kernel.default, kernel.grad_input
    eager = kernel.default._op, kernel.grad_input._op  # what those call after half a microsecond

    def backward_value(self: Activation, grad_output: Tensor, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        """See :meth:`Activation.backward_value`."""
        allocating, writing = traced if is_dynamo_compiling() else eager
        if out is None:
            return allocating(grad_output, x, *constants, **options)  # type: ignore[no-any-return]
        return writing(grad_output, x, *constants, **options, grad_input=out)  # type: ignore[no-any-return]

    return backward_value


class GELU(Activation):
    """GELU in its tanh form: ``x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) / 2`` (Hendrycks and Gimpel 2016).

    It is ``torch.nn.functional.gelu(x, approximate="tanh")``.
    """

    def value(self, x: Tensor) -> Tensor:
        """The tanh form of GELU."""
        return F.gelu(x, approximate="tanh")

    def derivative(self, x: Tensor) -> Tensor:
        """By the product rule: ``(1 + t) / 2 + x (1 - t^2) u' / 2`` with ``t = tanh(u)``."""
        t = torch.tanh(x * (0.7978845608028654 + 0.035677408136300125 * x * x))
        return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * (0.7978845608028654 + 0.10703222440890037 * x * x)

    forward_value = staticmethod(functools.partial(F.gelu, approximate="tanh"))  # in half precision by fp32 itself
    backward_value = _backward_kernel(torch.ops.aten.gelu_backward, approximate="tanh")


class QGELU(Activation):
    """GELU by a sigmoid: ``x sigmoid(1.702 x)`` (Hendrycks and Gimpel 2016, equation 2's approximation)."""

    def value(self, x: Tensor) -> Tensor:
        """``x sigmoid(1.702 x)``."""
        return x * torch.sigmoid(1.702 * x)

    def derivative(self, x: Tensor) -> Tensor:
        """``1.702 x s (1 - s) + s`` with ``s = sigmoid(1.702 x)``."""
        s = torch.sigmoid(1.702 * x)
        return 1.702 * x * s * (1 - s) + s


class ReLU(Activation):
    """``max(x, 0)``."""

    def value(self, x: Tensor) -> Tensor:
        """``max(x, 0)``."""
        return torch.relu(x)

    def derivative(self, x: Tensor) -> Tensor:
        """1 where ``x > 0``, else 0."""
        return (x > 0).to(x.dtype)

    forward_value = value  # exact in half precision
    backward_value = _backward_kernel(torch.ops.aten.threshold_backward, 0)


class SReLU(Activation):
    """Squared ReLU: ``max(x, 0)^2`` (So et al. 2021)."""

    def value(self, x: Tensor) -> Tensor:
        """``max(x, 0)^2``."""
        return torch.relu(x).square()

    def derivative(self, x: Tensor) -> Tensor:
        """``max(2 x, 0)``."""
        return torch.relu(2 * x)


class SiLU(Activation):
    """``x sigmoid(x)`` (Elfwing et al. 2017), also called Swish."""

    def value(self, x: Tensor) -> Tensor:
        """``x sigmoid(x)``."""
        return F.silu(x)

    def derivative(self, x: Tensor) -> Tensor:
        """``x s (1 - s) + s`` with ``s = sigmoid(x)``."""
        s = torch.sigmoid(x)
        return x * s * (1 - s) + s

    forward_value = value  # torch computes half precision in fp32 itself
    backward_value = _backward_kernel(torch.ops.aten.silu_backward)
