"""The quantized copies of an op's weights, for calls that use them again."""

from __future__ import annotations

import operator
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from ..settings import current
from .coded_tensor import QuantizedParameter
from .formats import QuantizedTensor, Usage
from .quantizer import Quantizer, same_quantizer

_facts = operator.attrgetter("_version", "dtype", "device")


class _Entry(NamedTuple):
    """A cast: the Parameter as it was, and whether a graph was captured; quantizer and result."""

    param: weakref.ref[Tensor]
    state: tuple[Any, ...]
    quantizer: Quantizer
    tensor: QuantizedTensor

    def fits(self, param: Tensor, quantizer: Quantizer) -> bool:
        """Whether it is of the parameter as it is now, by this quantizer."""
        same = self.param() is param and self.state == (*_facts(param), current.is_capturing)
        return same and same_quantizer(self.quantizer, quantizer)


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
        cached = current.weights == "cached"
        if cached and (found := self.reusable(name, weight, quantizer)) is not None:
            if found.usage.covers(usage):
                return found
            usage = Usage(*map(max, usage, found.usage))  # so that all are of one scale
        made = quantizer(weight if part is None else weight[part], usage)
        self.remember(name, weight, quantizer, made)
        return made

    def reusable(self, name: str, weight: Tensor, quantizer: Quantizer) -> QuantizedTensor | None:
        """An earlier cast of a weight, if the user allows its use and it is still right; or None.

        Args:
            name: The name of the weight.
            weight: Its value in this call.
            quantizer: The quantizer that would cast it.
        """
        if current.weights != "cached" or not may_remember(weight, quantizer):
            return None
        entry = self._entries.get(name)
        return entry.tensor if entry is not None and entry.fits(weight, quantizer) else None

    def remember(
        self, name: str, weight: Tensor, quantizer: Quantizer, made: QuantizedTensor
    ) -> None:
        """Keep a cast for :meth:`reusable`, if it can be known again what it is of.

        Args:
            name: The name of the weight.
            weight: Its value in this call.
            quantizer: The quantizer that cast it.
            made: The cast.
        """
        if may_remember(weight, quantizer):
            # a CUDA graph reads no cast that its replays would not repeat
            state = *_facts(weight), current.is_capturing
            self._entries[name] = _Entry(weakref.ref(weight), state, quantizer, made)


def may_remember(weight: Tensor, quantizer: Quantizer) -> bool:
    """Return whether a cast of a weight can be known again, and is of use then.

    A weight has to be a plain Parameter: no subclass, not computed, no inference tensor; and
    calibration casts nothing reusable.
    """
    return (
        not is_compiling()
        and quantizer.quantizes
        and type(weight) is nn.Parameter
        and weight.is_leaf
        and not weight.is_inference()
        and not torch.is_inference_mode_enabled()  # what it gives is of no use for a backward
    )
