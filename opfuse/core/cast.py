"""``Cast``: where the engine quantizes a tensor on its way between two ops."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .identity import PassThrough
from .op_context import Grads, OperationContext
from .quantization import QuantizedTensor, Quantizer, Usage


class Cast(PassThrough):
    """Quantizes what passes. The engine puts it on an edge; a pattern names it like any op.

    Under a recipe the engine asks each op what its input, and the gradient of its output, are to be
    quantized with. Where an op wants that, the view of that pass of the chain has a ``Cast``:
    ``(GELU, Cast)`` is a pattern of the forward, ``(Cast, Bias, GELU)`` one of the backward, in
    the order of the forward. One that no fusion takes calls its quantizer. You do not put one
    into a chain; ``Quantize`` is for that.

    A fused op finds in the context of a cast, beside what every context has, its ``quantizer`` and
    its ``usage``. It gives no extra tensors and no gradients of parameters for it.

    Attributes:
        quantizer: What the tensor is quantized with. It may have state: read that in the passes
            only.
        usage: Which copies the reader needs.
    """

    context_names = ("quantizer", "usage")

    def __init__(self, quantizer: Quantizer, usage: Usage) -> None:
        super().__init__()
        self.quantizer, self.usage = quantizer, usage

    def op_forward(self, ctx: Any, input_: Any, prev_op_grad_output_quantizer: Any = None,
                   next_op_input_quantizer: Any = None) -> Any:  # fmt: skip
        """The input, quantized; as it is where this quantizer did so already."""
        return self.quantizer(input_, self.usage)

    def op_backward(
        self, ctx: OperationContext, grad_output: Tensor | QuantizedTensor
    ) -> tuple[Any, Grads]:
        """The gradient, quantized."""
        return self.quantizer(grad_output, self.usage), ()

    def extra_repr(self) -> str:
        """What it quantizes with, and for which uses."""
        return f"{type(self.quantizer).__name__}, {self.usage}"
