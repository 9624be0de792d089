"""The kernels' arithmetic in PyTorch's operations: where no kernel can run, and to compare.

The cast is :meth:`opfuse_fp8.quantizers.BaseQuantizer.reference`: codes and scales are exact.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from opfuse.core.quantization import QuantizedTensor, Usage


class Into(NamedTuple):
    """What a result is cast into.

    Attributes:
        quantizer: The quantizer; it records what it saw.
        usage: Which copies are needed.
        again: What ``quantizer`` made of the same values before, with or without the data: they are
            cast again with these scales, and nothing is recorded.
    """

    quantizer: Any
    usage: Usage
    again: Any = None


def refuse_other_device(into: Into, device: torch.device) -> None:
    """Refuse state that kernels would read on another device than that of the values.

    Raises:
        RuntimeError: The state of the quantizer, or the scale of an earlier cast, is elsewhere.
    """
    quantizer, _, again = into
    for name in quantizer.state_names:
        if (there := getattr(quantizer, name).device) != device:
            break
    else:
        scale = getattr(again, "scale", None)
        if scale is None or scale.device == device:
            return
        name, there = "scale of the earlier cast", scale.device
    raise RuntimeError(
        f"{type(quantizer).__name__} expected values on {there}, where its {name} is, got some on "
        f"{device}: move the model to its inputs by model.to()"
    )


def cast(x: Tensor, into: Into) -> QuantizedTensor:
    """``x``, quantized."""
    quantizer, usage, again = into
    return quantizer.reference(x, usage, again)  # type: ignore[no-any-return]


def activation(
    op: Any, x: Tensor, bias: Tensor | None, dtype: Any, keep: bool, into: Into
) -> tuple[QuantizedTensor, Tensor | None]:
    """``act(x + bias)``, quantized.

    Args:
        op: The activation.
        x: The input ``(..., features)``; twice the features of the output if the op is gated.
        bias: ``(features,)`` as ``x``, or None. The sum is rounded to the dtype of ``x``.
        dtype: What to compute in, which is the dtype of the output before it is cast.
        keep: Whether to give what the activation is applied to.
        into: What the output is cast into.

    Returns:
        The quantized output; what the activation is applied to in ``dtype``, or None.
    """
    hidden = (x if bias is None else (x + bias).to(x.dtype)).to(dtype)
    return cast(op.forward_value(hidden), into), hidden if keep else None


def gradient(
    op: Any, numbers: Any, dy: Tensor, x: Tensor | None, needs_sums: bool, into: Into
) -> tuple[QuantizedTensor, Tensor | None]:
    """The gradient of an activation, quantized, and its sum over all rows.

    Args:
        op: The activation, or None.
        numbers: The op's numbers in the forward.
        dy: The gradient of the output.
        x: What the activation was applied to; None: there is no activation, and the gradient is
            ``dy``.
        needs_sums: Whether to give the sums.
        into: What the gradient is cast into.

    Returns:
        The quantized gradient of ``x``; the sums ``(features,)`` in the dtype of the gradient, or
        None.
    """
    dx = dy if x is None else op.with_numbers(numbers).backward_value(dy.to(x.dtype), x)
    sums = dx.unsqueeze(0).flatten(0, -2).sum(0) if needs_sums else None
    return cast(dx, into), sums


class Normalized(NamedTuple):
    """A norm that ends with a cast, by a kernel or by compiled code; the twin is the ops.

    Attributes:
        output: The output, quantized.
        total: What was normalized, where that is a sum and wanted; or None.
        mean: The mean of each row, ``(..., 1)`` in fp32, of a LayerNorm; or None.
        rstd: What each row is multiplied by, likewise; or None.
        values: The output before it was cast, where a kernel writes it; or None.
    """

    output: QuantizedTensor
    total: Tensor | None
    mean: Tensor | None
    rstd: Tensor | None
    values: Tensor | None = None
