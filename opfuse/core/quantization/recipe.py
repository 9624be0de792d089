"""Recipes: frozen values that describe which tensors are quantized, and how."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch.compiler import is_compiling

if TYPE_CHECKING:
    from .quantizer import Quantizer

_OVERRIDES = (None, "high_precision", "dequantized")


class QuantizerRole(NamedTuple):
    """The role of a quantized tensor, by which a recipe decides how to quantize it.

    Attributes:
        module_type: The kind of op, such as ``"linear"``.
        tensor_type: ``"input"``, ``"weight"``, ``"output"`` or ``"grad_output"``.
        name: The name of the op, or an empty string.
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
            original input and weight. ``"dequantized"``: it uses the dequantized copies of the
            forward.
        batch_invariant: Whether the forward casts each row of an input by that row alone, as
            ``options(invariant="batch")`` needs it.
        reduce_amax: Whether :meth:`update` takes maxima over the process group that it gets.
    """

    batch_invariant: ClassVar[bool] = False
    reduce_amax = True  # without annotation: a field of a subclass keeps its place
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
        """Advance the state of quantizers by one step: fold in their records, and clear those.

        Called at the exit of the outermost :class:`opfuse.autocast` block of a forward, with the
        quantizers of the forward: never inside a backward, never after an exception, never with
        grad mode off. And at the end of a backward, with those of gradients. It folds the maxima
        that were recorded. A forward quantizer advances at every update, with 0 if nothing was
        recorded; a gradient's quantizer only if one arrived on any rank. Nothing is recorded for a
        weight whose cast is used again (``weights="cached"``): treat 0 as "unknown", and keep the
        scale, unless an earlier maximum requires otherwise.

        Also called for the quantizer of a quantized parameter, alone and without a group, whenever
        values are written there: the new scale must fit the values it recorded.

        Args:
            quantizers: Those of the ops that ran; in a prepared model
                (:func:`opfuse.assign_names`) those of all its ops, in its order.
            group: The process group over which to take the maxima, in one collective, which
                :func:`opfuse_distributed.ranks.start_collective` starts; or None.

        Raises:
            NotImplementedError: The quantizers have state, and the recipe does not override this.
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
            ``"native"``, ``"emulated"`` (products of the dequantized values, in high precision) or
            ``"cannot run"``; and the reason, in a few words.
        """
        return "emulated", "it brings no products of its own"

    def to_json(self, name: str = "") -> str:
        """The recipe as JSON text, which identifies its quantizer state in a checkpoint.

        Args:
            name: The name under which the recipe is registered.

        Raises:
            TypeError: A field is not JSON-able; raised when the recipe is created.
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
