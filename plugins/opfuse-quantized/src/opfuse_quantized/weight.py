"""Quantized weights: a tensor over one of the formats, which behaves like its values."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from opfuse.core.quantization import (
    ROWWISE,
    QuantizedParameter,
    QuantizedTensor,
    Quantizer,
    Recipe,
    Usage,
)
from opfuse.core.quantization.quantizer import with_own_state

from . import checkpoint, sharding
from .codes import alike, as_bytes, overwrite, settled, values_of
from .over_codes import TensorOverCodes, Values

_aten = torch.ops.aten
_WIDE = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class QuantizedWeight(TensorOverCodes, QuantizedParameter):
    """A tensor that is stored quantized, and read as its dequantized values.

    Any operation of torch sees the dequantized values. One that writes into it computes with them,
    and the result is quantized again, in the same memory. A scale computed from earlier maxima
    sees the new values first, so that none of them is clipped. Its gradient is a plain tensor.

    :meth:`detach`, ``view``, ``data`` and a slice of the first rows share its memory. Other views
    are copies of the values: writing there does not change this tensor, but ``p[i] = x`` does.

    Args:
        quantized: The codes and scales, made by a quantizer of ``recipe``.
        recipe: The recipe.
        shape: The shape to show; None: that of ``quantized``. A smaller shape shows the first
            values.
        requires_grad: Whether it gets a gradient.

    Attributes:
        quantized: The codes and scales. Their ``dtype`` is that of this tensor.
        recipe: The recipe.
        wanted: The copies that the whole parameter has, if this is a shard of it.
        note: How FSDP2 gathered it, or ``""``.
    """

    wanted: Usage
    note: str
    _init_val: Tensor | None

    @staticmethod
    def __new__(
        cls: type[QuantizedWeight],
        quantized: QuantizedTensor,
        recipe: Recipe,
        shape: Sequence[int] | None = None,
        requires_grad: bool = False,
    ) -> QuantizedWeight:
        """Create the tensor; see the class for the arguments."""
        device = next(part.device for part in quantized.tensors() if part is not None)
        made: QuantizedWeight = torch.Tensor._make_wrapper_subclass(
            cls,
            quantized.shape if shape is None else torch.Size(shape),
            dtype=quantized.dtype,
            device=device,
            requires_grad=requires_grad,
        )
        made.quantized, made.recipe = quantized, recipe
        made.wanted, made.note = quantized.copies, ""
        return made

    @property
    def quantizer(self) -> Quantizer:
        """The quantizer of new values: that of the op's weight, after the op has run."""
        made: Quantizer = self.quantized.quantizer
        return made

    def tensors(self) -> tuple[Tensor, ...]:
        """The plain tensors that store it."""
        return tuple([part for part in self.quantized.tensors() if part is not None])

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The values as a plain tensor, through which a gradient flows.

        Args:
            dtype: The dtype to which the exact values are rounded, once; None: its own.
        """
        if torch.is_grad_enabled():
            return Values.apply(self, lambda param: _values(param, dtype))  # type: ignore[no-any-return,no-untyped-call]
        return _values(self, dtype)

    def requantize_(self, values: Tensor) -> QuantizedWeight:
        """Store new values in the same memory; the quantizer records them before it casts them.

        Args:
            values: Of any dtype; broadcast to the shape of this tensor.
        """
        with torch.no_grad():
            overwrite(self.quantized, _cast_for(self, values))
        return self

    # In an op; see :class:`opfuse.core.quantization.QuantizedParameter`

    def for_call(self, recipe: Recipe | None, usage: Usage, who: str) -> QuantizedTensor:
        """The codes and scales, for a product under the recipe in force."""
        if recipe != self.recipe:
            raise RuntimeError(
                f"{who} is quantized by another recipe: it lives as {self.recipe}, and the recipe "
                f"in force is {recipe}; run it under the first, or without opfuse.autocast, where "
                f"it is dequantized"
            )
        if not self.quantized.usage.covers(usage):
            raise RuntimeError(
                f"{who} expected copies for {usage}, got {self.quantized!r}: build the model with "
                f"grad mode on, or run it under torch.no_grad"
            )
        return self.quantized

    def check_plan(self, op: Any, name: str, quantizes: bool, env: Any) -> None:
        """Refuse a plan of an op that cannot have this parameter."""
        if env.compiling:
            raise RuntimeError(
                f"{type(op).__name__} has parameters that live quantized (quantized_model_init), "
                f"which torch.compile does not look into: run this chain in eager mode"
            )
        if quantizes:
            title = f"{type(op).__name__} {op.name!r}" if op.name else type(op).__name__
            self.for_call(env.recipe, Usage(False, False), f"{name} of {title}")

    def described(self, name: str, quantizes: bool) -> str:
        """What reports say about it."""
        how = "" if quantizes else ", and is dequantized in every call"
        text = f"{name} lives quantized, by {type(self.recipe).__name__}{how}"
        return f"{text}; {self.note}" if self.note else text

    def save(self, param: Tensor, destination: dict[str, Any], name: str, where: str) -> None:
        """Write values, codes and scales into a state dict; of a shard, the values alone."""
        values = self.detach().dequantize()
        destination[name] = values if param is self else sharding.like(param, values)
        if param is self:
            entries = checkpoint.entries(self)
            destination.update({f"{where}{key}": entry for key, entry in entries.items()})

    @torch.no_grad()
    def load(self, state_dict: dict[str, Any], name: str, codes: dict[str, Any]) -> None:
        """Put a weight there of the exact codes, or of the values as this one casts them."""
        values = state_dict.get(name)
        if not isinstance(values, Tensor) or isinstance(values, QuantizedWeight):
            return
        if values.shape != self.shape:
            return  # torch raises
        device = values.device if self.is_meta else self.device
        made = checkpoint.read_codes(self, codes, values, device)
        if made is None:
            given = values.detach().to(device), self.quantized.copies
            made = settled(self.quantizer, self.recipe, *given)
        state_dict[name] = QuantizedWeight(made, self.recipe)

    # As a tensor

    def _get_data(self) -> Tensor:
        return self.detach()

    def _set_data(self, values: Tensor) -> None:
        if values.shape != self.shape:
            raise RuntimeError(
                f"the data of a quantized parameter expected shape {tuple(self.shape)}, got "
                f"{tuple(values.shape)}"
            )
        with torch.no_grad():
            self.copy_(values)

    data = property(_get_data, _set_data)

    def __setitem__(self, index: Any, value: Any) -> None:
        values = self.detach().dequantize()
        values[index] = value
        self.copy_(values)

    def __getattr__(self, name: str) -> Any:
        quantized = vars(self).get("quantized")
        if quantized is not None and name in quantized.tensor_names:
            return getattr(quantized, name)
        if name in _INIT_VAL and "_init_val" in vars(self):
            return lambda: _INIT_VAL[name](self)
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        what = f"{tuple(self.shape)} of {self.dtype}, by {self.recipe}"
        return f"<{type(self).__name__}: {what}; {self.quantized!r}>"

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedWeight:
        if id(self) not in memo:
            made = QuantizedWeight(copy.deepcopy(self.quantized, memo), self.recipe, self.shape)
            memo[id(self)] = _like_parameter(self, made, memo)
            if self.grad is not None:
                memo[id(self)].grad = copy.deepcopy(self.grad, memo)
        return memo[id(self)]  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        parts = self.quantized.tensors()
        shell = self.quantized.over((None,) * len(parts))
        # pickle supports few dtypes of one byte
        stored = [None if part is None else (as_bytes(part), part.dtype) for part in parts]
        extra = {k: v for k, v in vars(self).items() if k not in ("quantized", "recipe")}
        given = shell, stored, self.recipe, self.shape, self.requires_grad
        return _rebuild, (*given, isinstance(self, nn.Parameter), extra | {"note": ""})

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        names = zip(self.quantized.tensor_names, self.quantized.tensors(), strict=True)
        return [name for name, part in names if part is not None], (self.quantized, self.recipe)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], meta: Any, size: Any, stride: Any
    ) -> QuantizedWeight:
        shell, recipe = meta
        made = shell.over([inner.get(name) for name in shell.tensor_names])
        return QuantizedWeight(made, recipe, size)

    @classmethod
    def _run(cls, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        handler: Callable[[Any, Any, Any], Any] = _HANDLERS.get(func, _run_plain)
        found = handler(func, args, kwargs)
        return _run_plain(func, args, kwargs) if found is NotImplemented else found

    # FSDP2 asks each rank's shard for the tensors to gather, and makes a parameter of the result

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        """The tensors this rank sends; see :mod:`opfuse.core.quantization.sharding`."""
        return sharding.to_gather(self, mesh.size(), outer_size, mp_policy.param_dtype)

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: Any = None,
    ) -> Any:
        """The whole parameter; see :mod:`opfuse.core.quantization.sharding`."""
        if out is None:
            made, note = sharding.gathered(self, all_gather_outputs, metadata, param_dtype)
            whole = QuantizedWeight(made, self.recipe)
            whole.note = note
            return whole, sharding.freed(made, all_gather_outputs)
        sharding.gather_into(self, out.quantized, all_gather_outputs, metadata, param_dtype)
        return None


def _values(param: QuantizedWeight, dtype: torch.dtype | None = None) -> Tensor:
    quantized = param.quantized.of_dtype(dtype) if dtype in _WIDE else param.quantized
    values = values_of(quantized)
    values = values.view(-1)[: param.numel()].view(param.shape)
    return values if dtype is None else values.to(dtype)


def _cast_for(param: QuantizedWeight, values: Tensor) -> QuantizedTensor:
    """Cast new values of a parameter by its quantizer."""
    there = param.quantized
    values = values.detach().to(param.device).expand(param.shape)
    if not values.is_floating_point():
        values = values.to(param.dtype)
    if param.numel() == there.shape.numel():
        values = values.reshape(there.shape)
    else:  # it shows the first of them
        whole = _values(QuantizedWeight(there, param.recipe)).to(values.dtype)
        whole.view(-1)[: param.numel()] = values.reshape(-1)
        values = whole
    return settled(there.quantizer, param.recipe, values, there.copies)


def _like_parameter(
    param: QuantizedWeight, made: QuantizedWeight, memo: dict[int, Any]
) -> QuantizedWeight:
    """Make a copy a Parameter if the other one is, with the same attributes."""
    if isinstance(param, nn.Parameter):
        made = nn.Parameter(made, param.requires_grad)  # type: ignore[assignment]
    else:
        made.requires_grad_(param.requires_grad)
    for name, value in vars(param).items():
        if name not in vars(made) or name in ("note", "_is_param"):
            vars(made)[name] = copy.deepcopy(value, memo)
    return made


def _rebuild(
    shell: QuantizedTensor,
    stored: list[Any],
    recipe: Recipe,
    shape: torch.Size,
    requires_grad: bool,
    is_parameter: bool,
    extra: dict[str, Any],
) -> Any:
    """Undo a pickle."""
    parts = [None if part is None else part[0].view(part[1]) for part in stored]
    made: Any = QuantizedWeight(shell.over(parts), recipe, shape)
    made = nn.Parameter(made, requires_grad) if is_parameter else made.requires_grad_(requires_grad)
    vars(made).update(extra)
    return made


def _init_value(param: QuantizedWeight) -> Tensor | None:
    """The values before quantization, on the CPU; None after they were cleared."""
    return param._init_val


def _clear_init_value(param: QuantizedWeight) -> None:
    """Free the values that :func:`_init_value` returns."""
    param._init_val = None


_INIT_VAL: dict[str, Callable[[QuantizedWeight], Any]] = {
    "get_high_precision_init_val": _init_value,
    "clear_high_precision_init_val": _clear_init_value,
}
"""Transformer Engine's methods, present if the values were preserved."""


# Operations of torch


def _alias(param: QuantizedWeight, shape: Sequence[int] | None = None) -> QuantizedWeight:
    """Alias the same memory, possibly in another shape."""
    shape = param.shape if shape is None else shape
    made = QuantizedWeight(param.quantized, param.recipe, shape)
    made.wanted, made.note = param.wanted, param.note
    return made


def _view(func: Any, args: Any, kwargs: Any) -> Any:
    """Alias the same memory if the view has the first values in the same order."""
    with torch.device("meta"):
        seen = func(torch.empty(args[0].shape), *args[1:], **kwargs)
    inside = seen.storage_offset() == 0 and seen.is_contiguous()
    return _alias(args[0], seen.shape) if inside else NotImplemented


def _clone(func: Any, args: Any, kwargs: Any) -> Any:
    """Copy memory and quantizer: writes to the copy advance no scale of the original."""
    parts = [None if part is None else part.clone() for part in args[0].quantized.tensors()]
    return _copyover(args[0], parts)


def _copyover(
    param: QuantizedWeight, parts: Sequence[Tensor | None], dtype: torch.dtype | None = None
) -> QuantizedWeight:
    made = param.quantized.over(parts)
    made.dtype = dtype or param.dtype
    made.quantizer = with_own_state(made.quantizer)
    return QuantizedWeight(made, param.recipe, param.shape)


def _to_copy(func: Any, args: Any, kwargs: Any) -> Any:
    """Convert device or dtype; the codes stay."""
    param = args[0]
    device, dtype = kwargs.get("device") or param.device, kwargs.get("dtype") or param.dtype
    if dtype not in _WIDE:
        return NotImplemented
    how = {"device": device, "non_blocking": kwargs.get("non_blocking", False), "copy": True}
    parts = [part if part is None else part.to(**how) for part in param.quantized.tensors()]
    return _copyover(param, parts, dtype)


def _copy(func: Any, args: Any, kwargs: Any) -> Any:
    """Copy codes and scales as they are if they are of the same kind, and values otherwise."""
    into, source = args[:2]
    if not isinstance(into, QuantizedWeight):
        return func(into, _values(source), *args[2:], **kwargs)
    if not isinstance(source, QuantizedWeight):
        return into.requantize_(source)
    whole = into.shape == into.quantized.shape and source.shape == source.quantized.shape
    if whole and into.recipe == source.recipe and alike(into.quantized, source.quantized):
        overwrite(into.quantized, source.quantized)
        return into
    return into.requantize_(_values(source))


def _new_zeros(func: Any, args: Any, kwargs: Any) -> Any:
    """Make a quantized shard, as FSDP2 does, if only the rows differ; otherwise a plain tensor."""
    param, size = args
    if kwargs.get("dtype", param.dtype) != param.dtype or tuple(size)[1:] != param.shape[1:]:
        return NotImplemented
    zeros = torch.zeros(size, dtype=param.dtype, device=kwargs.get("device") or param.device)
    silent, copies = param.quantizer.unrecorded(), param.quantized.copies
    try:
        made = silent.quantize(zeros, copies)
    except ValueError:  # the rows of a shard are too few for the blocks of the other copy
        made = silent.quantize(zeros, ROWWISE)
    made.quantizer = param.quantizer
    shard = QuantizedWeight(made, param.recipe)
    shard.wanted = copies
    return shard


def _run_plain(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation on the values; quantize its writes again."""
    pairs: dict[int, tuple[QuantizedWeight, Tensor]] = {}
    shape_only = func._schema.name.endswith("_like")

    def plain(value: Any) -> Any:
        if not isinstance(value, QuantizedWeight):
            return value
        if id(value) not in pairs:
            pairs[id(value)] = value, _empty_like(value) if shape_only else _values(value)
        return pairs[id(value)][1]

    found = func(*tree_map(plain, args), **tree_map(plain, kwargs))
    if not func._schema.is_mutable:
        return found
    for value in _written(func, args, kwargs):
        if isinstance(value, QuantizedWeight):
            value.requantize_(pairs[id(value)][1])
    originals = {id(values): param for param, values in pairs.values()}
    return tree_map(lambda value: originals.get(id(value), value), found)


def _empty_on(func: Any, args: Any, kwargs: Any) -> Any:
    """Make a quantized tensor on a named device, as ``to_empty`` does; otherwise a plain one.

    Raises:
        RuntimeError: The state of the quantizer was left on the meta device.
    """
    param, device = args[0], kwargs.get("device")
    if device is None or kwargs.get("dtype", param.dtype) not in (None, param.dtype):
        return NotImplemented
    states = [getattr(param.quantizer, name) for name in param.quantizer.state_names]
    if torch.device(device).type != "meta" and any(state.is_meta for state in states):
        raise RuntimeError(
            "a parameter that lives quantized cannot leave the meta device by to_empty: its "
            "quantizer has lost the scale that follows from earlier maxima; build the model on "
            "the device, in a block of quantized_model_init, and load the checkpoint there"
        )
    parts = [
        part if part is None else torch.empty_like(part, device=device)
        for part in param.quantized.tensors()
    ]
    return _copyover(param, parts)


def _empty_like(param: QuantizedWeight) -> Tensor:
    return torch.empty(param.shape, dtype=param.dtype, device=param.device)


def _written(func: Any, args: Any, kwargs: dict[str, Any]) -> list[Any]:
    """The tensors that an operation writes into."""
    found: list[Any] = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            found += value if isinstance(value, (list, tuple)) else [value]
    return found


_HANDLERS: dict[Any, Callable[[Any, Any, Any], Any]] = {
    _aten._to_copy.default: _to_copy,
    _aten.clone.default: _clone,
    _aten.empty_like.default: _empty_on,
    _aten.detach.default: lambda func, args, kwargs: _alias(args[0]),
    _aten.copy_.default: _copy,
    _aten.new_zeros.default: _new_zeros,
    **dict.fromkeys(
        (
            _aten.alias.default,
            _aten.as_strided.default,
            _aten.expand.default,
            _aten.slice.Tensor,
            _aten.view.default,
            _aten._unsafe_view.default,
        ),
        _view,
    ),
}
