"""Activations and gradients that leave a chain quantized: a tensor over codes and scales."""

from __future__ import annotations

import copy
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from opfuse.core.quantization import QuantizedTensor, Quantizer, Recipe, Usage
from opfuse.core.quantization.quantizer import original

from .codes import values_of
from .over_codes import TensorOverCodes, Values

_aten = torch.ops.aten
_SAME = _aten.detach.default, _aten.alias.default


class _Content:
    """The content of a tensor and its aliases: codes, or values once it may be written into."""

    def __init__(self, codes: QuantizedTensor) -> None:
        self.codes, self.values = codes, None  # type: tuple[QuantizedTensor, Tensor | None]

    def read(self) -> Tensor:
        """The values, for reading."""
        if self.values is not None:
            return self.values
        return values_of(self.codes)

    def copied(self) -> Tensor:
        """The values, in new memory."""
        return self.read().clone() if self.values is not None else self.read()

    def write(self) -> Tensor:
        """The values, in lasting memory; this drops the codes, which others may still hold."""
        self.values = self.read()
        return self.values


class QuantizedActivation(TensorOverCodes):
    """The output of a chain that ends with ``Quantize``; the next chain takes it without a cast.

    Any operation of torch sees its values, as a plain tensor of its dtype, and returns a plain
    tensor; its gradient is that of the values. ``detach`` and ``clone`` keep the codes. The first
    operation that writes into it, or views it, replaces the codes by values for good: written
    values are not quantized. Pickling or deep-copying makes it a plain tensor.

    Args:
        quantized: The codes and scales.
        recipe: The recipe whose quantizer made them.
    """

    recipe: Recipe | None
    _content: _Content

    @staticmethod
    def __new__(
        cls: type[QuantizedActivation], quantized: QuantizedTensor, recipe: Recipe | None = None
    ) -> QuantizedActivation:
        """Create the tensor; see the class for the arguments."""
        return cls._over(_Content(quantized), recipe)

    @classmethod
    def _over(cls, content: _Content, recipe: Recipe | None) -> QuantizedActivation:
        codes = content.codes
        device = next(part.device for part in codes.tensors() if part is not None)
        made: Any = torch.Tensor._make_wrapper_subclass(
            cls, codes.shape, dtype=codes.dtype, device=device
        )
        made._content, made.recipe = content, recipe
        return made  # type: ignore[no-any-return]

    @property
    def quantized(self) -> QuantizedTensor | None:
        """The codes and scales; None after it was written into or viewed."""
        return self._content.codes if self._content.values is None else None

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The values as a plain tensor, through which a gradient flows.

        Args:
            dtype: The dtype to round them to, as ``to`` does; None: its own.
        """
        plain = Values.apply(self, _copied) if torch.is_grad_enabled() else _copied(self)  # type: ignore[no-untyped-call]
        return plain if dtype is None else plain.to(dtype)

    def codes_for(self, quantizer: Quantizer, usage: Usage) -> QuantizedTensor | None:
        """See :meth:`opfuse.core.quantization.CodedTensor.codes_for`."""
        codes = self.quantized
        if codes is None or not (quantizer.quantizes and codes.usage.covers(usage)):
            return None
        if not _makes_the_same(codes.quantizer, quantizer):
            return None
        made = copy.copy(codes)
        made.quantizer = quantizer
        return made

    # As a tensor

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        if self.quantized is None:
            return f"<{type(self).__name__}, written: {self._content.read()!r}>"
        what = f"{tuple(self.shape)} of {self.dtype}, by {self.recipe}"
        return f"<{type(self).__name__}: {what}; {self.quantized!r}>"

    def numpy(self, *, force: bool = False) -> Any:
        """The values, as :meth:`torch.Tensor.numpy` returns them."""
        return self.dequantize().numpy(force=force)

    def tolist(self) -> Any:
        """The values, as numbers in lists."""
        return self._content.read().tolist()

    def _plain(self) -> Tensor:
        """A plain tensor, a leaf if this is one."""
        if not self.is_leaf:
            return self.dequantize()
        return self._content.copied().requires_grad_(self.requires_grad)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copied: Tensor = memo.setdefault(id(self), copy.deepcopy(self._plain(), memo))
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    @classmethod
    def _run(cls, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if func in _SAME:
            return cls._over(args[0]._content, args[0].recipe)
        if func is _aten.clone.default and args[0].quantized is not None:
            return cls._over(_Content(args[0].quantized), args[0].recipe)
        lasts = _lasts(func)
        originals: dict[int, Tensor] = {}

        def plain(value: Any) -> Any:
            if not isinstance(value, cls):
                return value
            values = value._content.write() if lasts else value._content.read()
            originals[id(values)] = value
            return values

        found = func(*tree_map(plain, args), **tree_map(plain, kwargs))
        return tree_map(lambda value: originals.get(id(value), value), found) if lasts else found


def _lasts(func: Any) -> bool:
    """Whether what an operation gives, or writes, is of the tensor that it gets."""
    return bool(func.is_view or func._schema.is_mutable)


_lasts._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch 2.14 traces its caller


def _copied(activation: QuantizedActivation) -> Tensor:
    return activation._content.copied()


def _makes_the_same(one: Quantizer | None, other: Quantizer | None) -> bool:
    """Return whether two quantizers make the same codes, apart from state and tensor names."""
    if one is None or other is None or type(one := original(one)) is not type(original(other)):
        return False
    other = original(other)
    state = {*one.state_names, "_recording", "_shared"}
    fields = [
        {k: v for k, v in vars(each).items() if k not in state and not isinstance(v, str)}
        for each in (one, other)
    ]
    same = one.describe() == other.describe() and fields[0].keys() == fields[1].keys()
    return same and all(_equal(value, fields[1][name]) for name, value in fields[0].items())


def _equal(one: Any, other: Any) -> bool:
    """Return whether a field of two quantizers is equal; of a role, only the tensor type."""
    one, other = (getattr(value, "tensor_type", value) for value in (one, other))
    known = isinstance(one, Hashable) and not isinstance(one, Tensor)
    return one is other or (known and type(one) is type(other) and bool(one == other))
