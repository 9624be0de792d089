"""The quantized copies of an op's weights, for calls that use them again."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from ..settings import current
from .formats import QuantizedTensor, Usage
from .parameter import QuantizedParameter
from .quantizer import Quantizer, same_quantizer


class _Entry(NamedTuple):
    """A cast: the Parameter with its :func:`_state`, the quantizer, and the result."""

    param: weakref.ref[Tensor]
    state: tuple[Any, ...]
    quantizer: Quantizer
    tensor: QuantizedTensor

    def fits(self, param: Tensor, state: tuple[Any, ...], quantizer: Quantizer) -> bool:
        """Whether it is of the parameter as it is now, by this quantizer."""
        same = self.param() is param and self.state == state
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
        matrix = weight if part is None else weight[part]
        # computed weights are not recognized again, and calibration casts nothing reusable
        if is_compiling() or not _can_be_known_again(weight) or not quantizer.quantizes:
            return quantizer(matrix, usage)
        state = _state(weight)
        found = self._entries.get(name) if current.weights == "cached" else None
        if found is not None and found.fits(weight, state, quantizer):
            if found.tensor.usage.covers(usage):
                return found.tensor
            usage = Usage(*map(max, usage, found.tensor.usage))  # so that all are of one scale
        made = quantizer(matrix, usage)
        self._entries[name] = _Entry(weakref.ref(weight), state, quantizer, made)
        return made

    def quantized_parts(
        self, names: Sequence[str], weights: Sequence[Tensor], quantizer: Quantizer, usage: Usage
    ) -> QuantizedTensor:
        """Cast weights as the rows of one matrix; used again as :meth:`quantized` says, if all are.

        Args:
            names: The name of each.
            weights: Their values in this call.
            quantizer: The quantizer that casts them.
            usage: The copies that are needed.
        """
        known = not is_compiling() and all(map(_can_be_known_again, weights))
        if not known or not quantizer.quantizes:
            return quantizer.quantize_parts(weights, usage)
        state = tuple(map(_state, weights))
        found = [self._entries.get(name) for name in names if current.weights == "cached"]
        pairs = zip(found, weights, strict=False)
        if found and all(each is not None and each.fits(w, state, quantizer) for each, w in pairs):
            made: QuantizedTensor = found[0].tensor  # type: ignore[union-attr]
            if made.usage.covers(usage):
                return made
            usage = Usage(*map(max, usage, made.usage))
        made = quantizer.quantize_parts(weights, usage)
        for name, weight in zip(names, weights, strict=True):
            self._entries[name] = _Entry(weakref.ref(weight), state, quantizer, made)
        return made

    def quantized_groups(
        self,
        names: Sequence[str],
        weights: Sequence[Tensor],
        quantizers: Sequence[Quantizer],
        usage: Usage,
    ) -> Sequence[QuantizedTensor]:
        """Cast the matrices of groups as :meth:`quantized` does: at once, if it can be.

        Args:
            names: The name of each.
            weights: One of each group, of one shape; or one parameter with all matrices.
            quantizers: That of each.
            usage: The copies that are needed.
        """
        stacked = len(weights) < len(names)
        known = current.weights == "cached" and any(name in self._entries for name in names)
        made = None if known else _at_once(weights, quantizers, usage)
        if made is None:
            places = [(weights[0], i) if stacked else (weights[i], None) for i in range(len(names))]
            each = zip(names, places, quantizers, strict=True)
            return [self.quantized(name, w, by, usage, part) for name, (w, part), by in each]
        for i, name in enumerate(names):
            weight = weights[0 if stacked else i]
            if _can_be_known_again(weight):
                entry = _Entry(weakref.ref(weight), _state(weight), quantizers[i], made[i])
                self._entries[name] = entry
        return made


def _at_once(
    weights: Sequence[Tensor], quantizers: Sequence[Quantizer], usage: Usage
) -> Sequence[QuantizedTensor] | None:
    """Matrices that are cast at once; None: each has to be cast by itself."""
    if is_compiling() or not quantizers[0].casts_groups:
        return None
    kinds = {(type(w) in (Tensor, nn.Parameter), w.shape, w.dtype, w.device) for w in weights}
    if len(kinds) > 1 or not next(iter(kinds))[0]:
        return None
    whole = weights[0] if weights[0].ndim == 3 else torch.cat([w.detach() for w in weights])
    count, rows = len(quantizers), whole.shape[:-1].numel() // len(quantizers)
    ends = torch.arange(1, count + 1, dtype=torch.int32, device=whole.device) * rows
    made = quantizers[0].quantize_groups(whole.detach().flatten(0, -2), ends, usage, quantizers)
    parts = None if made is None else made.cut([rows] * count, quantizers)
    # a format may fill up what a weight must have
    return None if parts is None or parts[0].shape[0] != rows else parts


def _state(weight: Tensor) -> tuple[Any, ...]:
    """What a cast is good for. A CUDA graph reads no cast that its replays would not repeat."""
    return weight._version, weight.dtype, weight.device, current.captured


def _can_be_known_again(weight: Tensor) -> bool:
    """Return whether it is a plain Parameter: no subclass, not computed, no inference tensor."""
    return (
        type(weight) is nn.Parameter
        and weight.is_leaf
        and not weight.is_inference()
        and not torch.is_inference_mode_enabled()  # what it gives is of no use for a backward
    )
