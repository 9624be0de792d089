"""Operations on codes and scales as a whole: casting, comparing, overwriting."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from opfuse.core.quantization import COLUMNWISE, ROWWISE, QuantizedTensor, Quantizer, Usage
from opfuse.core.quantization.quantizer import with_own_state


def place_state(quantizer: Quantizer, device: torch.device) -> None:
    """Move the state of a quantizer to the device of the tensors it quantizes."""
    for name in quantizer.state_names:
        if getattr(quantizer, name).device != device:
            setattr(quantizer, name, getattr(quantizer, name).to(device))


def values_of(quantized: QuantizedTensor) -> Tensor:
    """The values of codes, from one of their copies."""
    return quantized.dequantize(ROWWISE if quantized.usage.rowwise else COLUMNWISE)


def settled(quantizer: Quantizer, recipe: Any, values: Tensor, usage: Usage) -> QuantizedTensor:
    """Cast values exactly if the quantizer can; otherwise as if it had already seen them.

    So a scale computed from earlier maxima clips none. The quantizer itself records these values
    in place of earlier records, and its scale stays until the next update.

    Args:
        quantizer: The quantizer.
        recipe: The recipe, which advances the state of a copy of it.
        values: The values.
        usage: The copies that are needed.
    """
    place_state(quantizer, values.device)
    if not quantizer.pending_names:
        return quantizer.quantize(values, usage)
    quantizer.discard()
    made = quantizer.quantize(values, usage)
    exact = (values_of(made) == values).all()
    fitted = with_own_state(quantizer)
    recipe.update([fitted], None)
    for name in quantizer.state_names:  # nothing is read by the host
        now, after = getattr(quantizer, name), getattr(fitted, name)
        after.copy_(torch.where(exact, now, after))
    made = fitted.quantize(values, usage)
    made.quantizer = quantizer
    return made


def alike(one: QuantizedTensor, other: QuantizedTensor) -> bool:
    """Return whether codes and scales of the second fit into the tensors of the first."""
    if type(one) is not type(other) or one.shape != other.shape:
        return False
    if getattr(one, "block", None) != getattr(other, "block", None):
        return False
    pairs = zip(one.tensors(), other.tensors(), strict=True)
    return all(
        a is None or (b is not None and (a.shape, a.dtype) == (b.shape, b.dtype)) for a, b in pairs
    )


def overwrite(there: QuantizedTensor, made: QuantizedTensor) -> None:
    """Copy codes and scales into the tensors of another quantized tensor."""
    for name, into, new in zip(there.tensor_names, there.tensors(), made.tensors(), strict=True):
        if into is None:
            continue
        if new is None:
            raise RuntimeError(f"expected {name} of a quantized parameter, got {made!r}")
        if new is not into:
            as_bytes(into).copy_(as_bytes(new))
            if not into.is_inference():  # inside a dispatch torch does not count this itself
                torch.autograd.graph.increment_version(into)


def as_bytes(part: Tensor) -> Tensor:
    """View a tensor of a one-byte dtype as bytes: torch copies few of these dtypes itself."""
    one = part.element_size() == 1 and part.dtype != torch.uint8
    return part.view(torch.uint8) if one else part
