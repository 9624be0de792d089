"""Recipes: which tensors are quantized, and how, as frozen values."""

from __future__ import annotations

import dataclasses
import json
from typing import NamedTuple

from torch.compiler import is_compiling

_OVERRIDES = (None, "high_precision", "dequantized")


class QuantizerRole(NamedTuple):
    """What a quantized tensor is, so that a recipe can decide how to quantize it.

    Attributes:
        module_type: The kind of op, such as ``"linear"``.
        tensor_type: ``"input"``, ``"weight"``, ``"output"`` or ``"grad_output"``.
        name: A name the model's author gave, or an empty string.
    """

    module_type: str = ""
    tensor_type: str = ""
    name: str = ""


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A quantization recipe: a frozen, hashable value that is part of a plan's key.

    Subclass it as a frozen dataclass; unknown keywords are errors, and everything derived is
    computed from the fields. Two equal recipes share their quantizers and their plans.

    Attributes:
        backward_override: None: the backward is quantized too. ``"high_precision"``: it uses the
            original input and weight. ``"dequantized"``: it uses what the forward's quantized
            copies stand for.
    """

    backward_override: str | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if self.backward_override not in _OVERRIDES:
            raise ValueError(
                f"backward_override must be one of {_OVERRIDES}, got {self.backward_override!r}"
            )
        if not is_compiling():
            self.to_json()

    def to_json(self) -> str:
        """The recipe as JSON text, by which a checkpoint knows its quantizer state.

        Raises:
            TypeError: A field is not JSON-able; told when the recipe is made.
        """
        fields = dataclasses.asdict(self)
        for name, value in fields.items():
            try:
                json.dumps(value)
            except (TypeError, ValueError):
                raise TypeError(
                    f"{type(self).__name__}.{name} must be JSON-able, got {value!r}"
                ) from None
        return json.dumps({"recipe": type(self).__name__, **fields}, sort_keys=True)
