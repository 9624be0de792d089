"""Ops that pass a tensor on as it is, and those that mark where the engine quantizes it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .op import BasicOperation
from .op_context import Grads, OperationContext, Unread
from .quantization import QuantizedTensor, Quantizer, QuantizerRole, Usage


class PassThrough(BasicOperation):
    """An op that returns its input as it is, and its gradient too."""

    saved_names = ()
    feature_ratio = 1
    keeps_rows = True
    batch_invariant = ("rows", "exact")
    grad_input = "same"
    differentiable = True

    def op_forward(self, ctx: Any, input_: Tensor, prev_op_grad_output_quantizer: Unread = None,
                   next_op_input_quantizer: Unread = None) -> Tensor:  # fmt: skip
        """Return the input, which the engine has cast if the op asks for it; save nothing."""
        return input_

    def op_backward(
        self, ctx: OperationContext, grad_output: Tensor
    ) -> tuple[Tensor | None, Grads]:
        """``dx = dy``, which the engine has cast if the op asks for it."""
        return grad_output, ()


class Identity(PassThrough):
    """``y = x``, for any shape."""


class Cast(PassThrough):
    """Quantizes a tensor on an edge. The engine inserts it; patterns name it like any op.

    Under a recipe the engine asks each op for the quantizers of its input and of the gradient of
    its output. If an op wants one, that pass of the chain has a ``Cast`` there: ``(GELU, Cast)`` is
    a pattern of the forward, ``(Cast, Bias, GELU)`` one of the backward, in the order of the
    forward. A cast that no fusion takes calls its quantizer. Do not put one into a chain; use
    ``Quantize`` for that.

    The context of a cast has its ``quantizer`` and its ``usage`` in addition to the usual
    attributes. A fused op returns no extra tensors and no parameter gradients for it.

    Attributes:
        quantizer: The quantizer. It may have state: read that in the passes only.
        usage: The copies that the reader needs.
    """

    saved_names = ()
    context_names = ("quantizer", "usage")
    keeps_rows = True
    grad_input = "same"

    def __init__(self, quantizer: Quantizer, usage: Usage) -> None:
        super().__init__()
        self.quantizer, self.usage = quantizer, usage

    def op_forward(self, ctx: Any, input_: Any, prev_op_grad_output_quantizer: Unread = None,
                   next_op_input_quantizer: Unread = None) -> Any:  # fmt: skip
        """Quantize the input, unless this quantizer already did."""
        return self.quantizer(input_, self.usage)

    def op_backward(
        self, ctx: OperationContext, grad_output: Tensor | QuantizedTensor
    ) -> tuple[Any, Grads]:
        """The gradient, quantized."""
        return self.quantizer(grad_output, self.usage), ()

    def extra_repr(self) -> str:
        """The quantizer, and the copies it makes."""
        return f"{type(self.quantizer).__name__}, {self.usage}"


class Quantize(PassThrough):
    """Quantizes a tensor under a recipe; without one it is the identity.

    Any shape is accepted and kept. The op only declares its quantizers. The cast is on its edge,
    where fusions can take it, or is a step of its own. Next to an op that quantizes, it leaves the
    cast to that op.

    A chain that ends with it returns an ``opfuse.QuantizedActivation``; one that begins with it and
    quantizes in backward returns such a gradient. A chain whose first op quantizes its input takes
    the codes as they are, if it would make the same itself. ``torch.compile`` gets their values.

    Args:
        forward: Quantize the tensor in forward.
        backward: Quantize the gradient in backward.
    """

    def __init__(self, forward: bool = True, backward: bool = False) -> None:
        super().__init__()
        self._enabled = {"forward": bool(forward), "backward": bool(backward)}

    def extra_repr(self) -> str:
        """The passes in which it quantizes."""
        return ", ".join(f"{mode}={enabled}" for mode, enabled in self._enabled.items())

    def num_quantizers(self, mode: str) -> int:
        """One for each pass in which it quantizes."""
        return int(self._enabled.get(mode, False))

    def get_quantizer_roles(self, mode: str) -> list[QuantizerRole]:
        """The role of an input, or of the gradient of an output."""
        tensor = "input" if mode == "forward" else "grad_output"
        return [QuantizerRole("quantize", tensor, self.name)] * self.num_quantizers(mode)
