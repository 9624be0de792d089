"""Activations and gradients that leave a chain quantized: a tensor over codes and scales."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from .formats import QuantizedTensor, Usage
from .parameter import QuantizedParameter
from .quantizer import COLUMNWISE, ROWWISE, Quantizer, makes_the_same
from .recipe import Recipe

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
        return self.codes.dequantize(ROWWISE if self.codes.usage.rowwise else COLUMNWISE)

    def copied(self) -> Tensor:
        """The values, in new memory."""
        return self.read().clone() if self.values is not None else self.read()

    def write(self) -> Tensor:
        """The values, in lasting memory; this drops the codes, which others may still hold."""
        self.values = self.read()
        return self.values


class QuantizedActivation(Tensor):
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

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls: type[QuantizedActivation], quantized: QuantizedTensor, recipe: Recipe | None = None
    ) -> QuantizedActivation:
        """Create the tensor; see the class for the arguments."""
        return cls._over(_Content(quantized), recipe)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

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
        plain = _Values.apply(self) if torch.is_grad_enabled() else self._content.copied()  # type: ignore[no-untyped-call]
        return plain if dtype is None else plain.to(dtype)

    def codes_for(self, quantizer: Quantizer, usage: Usage) -> QuantizedTensor | None:
        """The codes, if a quantizer would make the same; None: it has to cast the values.

        Args:
            quantizer: The quantizer that would cast.
            usage: The copies that are needed.
        """
        codes = self.quantized
        if codes is None or not (quantizer.quantizes and codes.usage.covers(usage)):
            return None
        if not makes_the_same(codes.quantizer, quantizer):
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

    def untyped_storage(self) -> torch.UntypedStorage:
        """An empty storage."""
        return torch.UntypedStorage(0, device=self.device)  # type: ignore[no-untyped-call]

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
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if func.is_view and torch.is_inference_mode_enabled() and not args[0].is_inference():
            # an inference tensor has no version counter, and a view has that of its base
            with torch.inference_mode(False), torch.no_grad():
                return cls.__torch_dispatch__(func, types, args, given)
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

        found = func(*tree_map(plain, args), **tree_map(plain, given))
        return tree_map(lambda value: originals.get(id(value), value), found) if lasts else found


def _lasts(func: Any) -> bool:
    """Whether what an operation gives, or writes, is of the tensor that it gets."""
    return bool(func.is_view or func._schema.is_mutable)


_lasts._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch 2.14 traces its caller


class _Values(torch.autograd.Function):
    """The values; the gradient is theirs."""

    @staticmethod
    def forward(ctx: Any, activation: Any) -> Any:
        return activation._content.copied()

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad


def plain(tensor: Any) -> Any:
    """Return the values of a tensor that holds codes, and any other tensor as it is."""
    known = isinstance(tensor, (QuantizedActivation, QuantizedParameter))
    return tensor.dequantize() if known else tensor


def brings_codes(x: Any, cast: Any) -> bool:
    """Return whether the first cast of a pass takes the codes of a tensor as they are."""
    known = cast is not None and isinstance(x, QuantizedActivation)
    return known and x.codes_for(cast.quantizer, cast.usage) is not None


def entering(cast: Any, x: Any) -> Any:
    """The initial tensor of a pass: codes if its first cast would make the same, or a plain tensor.

    Args:
        cast: The first cast, with its ``quantizer`` and ``usage``; None: there is none.
        x: The incoming tensor.
    """
    known = cast is not None and isinstance(x, QuantizedActivation)
    codes = x.codes_for(cast.quantizer, cast.usage) if known else None
    return plain(x) if codes is None else codes


def leaving(recipe: Recipe | None, x: Any) -> Any:
    """The output of a chain under a recipe: quantized if its last op, or its first, asks for it.

    Args:
        recipe: The recipe; None: a plain tensor is wanted, as while ``torch.compile`` traces.
        x: The computed tensor, plain or quantized.
    """
    if not isinstance(x, QuantizedTensor):
        return x
    if recipe is None or not getattr(x.quantizer, "quantizes", False):
        return x.dequantize()
    return QuantizedActivation(x, recipe)
