"""``Cast``: marks where the engine quantizes a tensor between two ops."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .identity import PassThrough
from .op_context import Grads, OperationContext, Unread
from .quantization import QuantizedTensor, Quantizer, Usage


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

    def fuser_backward(self, basic_op_ctxs: Any, grad_output: Any, **unused: Any) -> Any:
        """The gradient, quantized; a cast that no fusion took gets no context."""
        nothing = [()] * len(basic_op_ctxs)
        return self.quantizer(grad_output, self.usage), nothing, nothing

    def extra_repr(self) -> str:
        """The quantizer, and the copies it makes."""
        return f"{type(self.quantizer).__name__}, {self.usage}"
