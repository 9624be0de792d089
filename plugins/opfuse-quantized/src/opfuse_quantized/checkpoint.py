"""The entries of a state dict about a quantized weight.

They are the values, as in an unquantized model, and in addition the exact codes, the scales and the
state of the quantizer. All are copies, taken at the same time, so that codes and values still match
later.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from opfuse.core.quantization import QuantizedParameter, QuantizedTensor
from opfuse.core.recipe_lookup import recipe_name

from .codes import alike, values_of


def entries(weight: QuantizedParameter) -> dict[str, Tensor]:
    """The entries in addition to the values, without their prefix."""
    text = json.dumps(_description(weight), sort_keys=True).encode()
    parts = {name: part for name, part in _parts(weight).items() if part is not None}
    return {"format": torch.tensor(list(text), dtype=torch.uint8)} | {
        name: part.detach().clone() for name, part in parts.items()
    }


def read_codes(
    weight: QuantizedParameter, codes: dict[str, Any], values: Tensor, device: torch.device
) -> QuantizedTensor | None:
    """Read codes and scales in the layout of a weight; None: the values are to be quantized.

    Codes and scales are used as they are if recipe and layout match, and if they equal the values
    bit for bit, since the values may have been edited.

    Args:
        weight: The weight.
        codes: The entries of :func:`entries`.
        values: The values.
        device: The device of the result.

    Raises:
        RuntimeError: They claim this recipe and format, but one does not fit; the text begins with
            its name.
    """
    if not codes or _read(codes.pop("format", None)) != _description(weight):
        return None
    there, quantizer, expected = weight.quantized, weight.quantized.quantizer, _parts(weight)
    for name, given in codes.items():
        _check(name, given, expected)
    # only the copies that are here
    parts = [
        None if expected[name] is None or name not in codes else codes[name].detach().to(device)
        for name in there.tensor_names
    ]
    made = there.over(parts)
    if not alike(there, made) or not _equal_bits(made, values):
        return None
    for name in quantizer.state_names:
        if f"state.{name}" in codes:
            getattr(quantizer, name).copy_(codes[f"state.{name}"])
    return made


def _description(weight: QuantizedParameter) -> dict[str, Any]:
    recipe = weight.recipe.to_json(recipe_name(weight.recipe))
    return {"format": type(weight.quantized).__name__, "recipe": recipe}


def _parts(weight: QuantizedParameter) -> dict[str, Tensor | None]:
    """The tensors of a weight and of its quantizer's state, by the names of their entries."""
    quantized, quantizer = weight.quantized, weight.quantized.quantizer
    parts = dict(zip(quantized.tensor_names, quantized.tensors(), strict=True))
    return parts | {f"state.{name}": getattr(quantizer, name) for name in quantizer.state_names}


def _read(text: Any) -> Any:
    """Parse the text of :func:`_description` from a checkpoint."""
    try:
        return json.loads(bytes(text.tolist()))
    except (AttributeError, TypeError, ValueError):
        found = "nothing" if text is None else f"{text!r:.80}"
        raise RuntimeError(f"format: expected JSON as bytes, got {found}") from None


def _check(name: str, given: Any, expected: dict[str, Tensor | None]) -> None:
    """Refuse a checkpoint entry that does not match the weight's tensor of that name."""
    if name not in expected:
        raise RuntimeError(f"{name} is not known here: expected only {', '.join(expected)}")
    want = expected[name]
    if not isinstance(given, Tensor):
        raise RuntimeError(f"{name}: expected a tensor, got {type(given).__name__}")
    if want is not None and (given.shape, given.dtype) != (want.shape, want.dtype):
        raise RuntimeError(
            f"{name}: expected {want.dtype} of shape {tuple(want.shape)}, got {given.dtype} of "
            f"shape {tuple(given.shape)}; without the other entries the values are quantized"
        )


def _equal_bits(made: QuantizedTensor, values: Tensor) -> bool:
    """Return whether codes equal values bit for bit, in the dtype of the values."""
    if not values.is_floating_point() or values.is_meta:
        return False
    wide = values_of(made.of_dtype(values.dtype))
    pair = [t.contiguous().view(-1).view(torch.uint8) for t in (wide, values)]
    return torch.equal(pair[0], pair[1].to(pair[0].device))
