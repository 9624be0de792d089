"""Recipes: which tensors are quantized, and how, as frozen values."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.compiler import is_compiling

if TYPE_CHECKING:
    from .quantizer import Quantizer

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
            try:
                hash(self)
            except TypeError as error:
                raise TypeError(
                    f"{type(self).__name__} expected fields that can be hashed, since a recipe is "
                    f"part of a plan's key: {error}; declare it with @dataclass(frozen=True), and "
                    f"give a tuple instead of a list"
                ) from None

    def update(self, quantizers: Sequence[Quantizer], group: Any) -> None:
        """Advance the state of quantizers by one step: fold in what they recorded, and forget that.

        Called at the exit of the outermost :class:`opfuse.autocast` block of a forward: never
        inside a backward, never after an exception, never with grad mode off. It folds the maxima
        that the forward of this block recorded, and those of the gradients that arrived since the
        last update. A forward quantizer advances at every update, with 0 where nothing was
        recorded; that of a gradient only where one arrived on any rank. Nothing is recorded for a
        weight whose cast is used again (``weights="cached"``): take 0 for "not known", and keep the
        scale, unless an earlier maximum says otherwise.

        Also called for the quantizer of a parameter that lives quantized, alone and without a
        group, whenever values are written there: what it recorded of them is to fit.

        Args:
            quantizers: Those of the ops that ran in the block; in a model that was prepared
                (:func:`opfuse.assign_names`) those of all its ops, in its order. Forward quantizers
                and quantizers of gradients alike.
            group: The process group over which to take the maxima, in one collective; or None.

        Raises:
            NotImplementedError: The recipe's quantizers have state, and it does not say how.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has quantizers with pending state, and no update"
        )

    @classmethod
    def support(cls, device: torch.device) -> tuple[str, str]:
        """How the recipe runs on a device, for ``opfuse doctor``.

        Args:
            device: The device.

        Returns:
            ``"native"``, ``"emulated"`` (products of what the quantized values stand for, in high
            precision) or ``"cannot run"``; and why, in a few words.
        """
        return "emulated", "it brings no products of its own"

    def to_json(self, name: str = "") -> str:
        """The recipe as JSON text, by which a checkpoint knows its quantizer state.

        Args:
            name: What the recipe is registered as.

        Raises:
            TypeError: A field is not JSON-able; told when the recipe is made.
        """
        fields = dataclasses.asdict(self)
        for field, value in fields.items():
            try:
                json.dumps(value)
            except (TypeError, ValueError):
                raise TypeError(
                    f"{type(self).__name__}.{field} must be JSON-able, got {value!r}"
                ) from None
        return json.dumps(_plain({"recipe": name or type(self).__name__, **fields}), sort_keys=True)


def _plain(value: Any) -> Any:
    """A JSON-able value, in which equal numbers read the same: 1 and 1.0."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
