"""The quantized copies of an op's weights, for calls that use them again."""

from __future__ import annotations

import weakref
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from ..settings import current
from .formats import QuantizedTensor, Usage
from .parameter import QuantizedParameter
from .quantizer import Quantizer, same_quantizer


class _Entry(NamedTuple):
    """A cast: the Parameter with its version, dtype and device, the quantizer, and the result."""

    param: weakref.ref[Tensor]
    state: tuple[int, torch.dtype, torch.device]
    quantizer: Quantizer
    tensor: QuantizedTensor


class WeightCache:
    """The latest cast of each weight of one op; dropped, never copied, with the op.

    Only the user knows whether a weight is still the same: fused optimizer steps, ``.data`` and
    FSDP2 change it without raising its version. So a cast is used again only inside
    ``autocast(..., weights="cached")``.
    """

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}

    def __reduce__(self) -> tuple[type[WeightCache], tuple[()]]:
        return WeightCache, ()

    def clear(self) -> None:
        """Discard every cast."""
        self._entries.clear()

    def entries(self) -> dict[str, _Entry]:
        """The current casts."""
        return dict(self._entries)

    def put_back(self, entries: dict[str, _Entry]) -> None:
        """Restore the casts that :meth:`entries` returned, as a recomputation does."""
        self._entries = dict(entries)

    def quantized(
        self, name: str, weight: Tensor, quantizer: Quantizer, usage: Usage, part: int | None = None
    ) -> QuantizedTensor:
        """Cast a weight, or reuse an earlier cast if the user allows that.

        Args:
            name: The name of the weight.
            weight: Its value in this call.
            quantizer: The quantizer that casts it.
            usage: The copies that are needed.
            part: Index of the matrix in the parameter; None: it is one matrix.
        """
        if isinstance(weight, QuantizedParameter) and part is None:
            return weight.for_call(current.recipe, usage, f"the parameter {name}")
        matrix = weight if part is None else weight[part]
        # computed weights are not recognized again, and calibration casts nothing reusable
        if is_compiling() or not _can_be_known_again(weight) or not quantizer.quantizes:
            return quantizer(matrix, usage)
        state = weight._version, weight.dtype, weight.device
        found = self._entries.get(name) if current.weights == "cached" else None
        if found is not None and found.param() is weight and found.state == state:
            if same_quantizer(found.quantizer, quantizer):
                if found.tensor.usage.covers(usage):
                    return found.tensor
                usage = Usage(*map(max, usage, found.tensor.usage))  # so that all are of one scale
        made = quantizer(matrix, usage)
        self._entries[name] = _Entry(weakref.ref(weight), state, quantizer, made)
        return made


def _can_be_known_again(weight: Tensor) -> bool:
    """Return whether it is a plain Parameter: no subclass, not computed, no inference tensor."""
    return (
        type(weight) is nn.Parameter
        and weight.is_leaf
        and not weight.is_inference()
        and not torch.is_inference_mode_enabled()  # what it gives is of no use for a backward
    )
