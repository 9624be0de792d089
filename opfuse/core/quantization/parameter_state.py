"""Quantized parameters of ops: their creation, and their checkpoints."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..settings import current
from .formats import QuantizedTensor, Usage
from .parameter import QuantizedParameter, alike, held_by
from .quantizer import BOTH, ROWWISE, Quantizer, settled
from .recipe import Recipe
from .state import quantizer_names, roles

_KEY = "quantized."


class ModelInit(NamedTuple):
    """The request of :class:`opfuse.quantized_model_init`.

    Attributes:
        recipe: The recipe.
        preserve: Whether to keep the original values on the CPU.
    """

    recipe: Recipe
    preserve: bool


def quantize_parameters(op: Any) -> None:
    """Quantize the weights of a new op if a block asks for it.

    These are the parameters with the name of one of its quantizers, or numbered if there is only
    one. On the meta device nothing is quantized.
    """
    asked: ModelInit | None = current.model_init
    if asked is None or not op.num_quantizers("forward"):
        return
    for name, role in zip(quantizer_names(op, "forward"), roles(op, "forward"), strict=True):
        name = name if name in op._parameters else f"{name}0"
        param = op._parameters.get(name)
        if param is None or param.is_meta or isinstance(param, QuantizedParameter):
            continue
        role = role._replace(name=role.name or current.building)  # the outer op has not named it
        quantizer = op.engine.new_quantizer(asked.recipe, role, None)
        made = new_parameter(param, asked, quantizer)
        op.register_parameter(name, made)


def new_parameter(param: Tensor, asked: ModelInit, quantizer: Quantizer) -> QuantizedParameter:
    """Make a quantized Parameter.

    A scale computed from earlier maxima fits the values at once; the scale of the quantizer starts
    as usual, and follows at the next update.

    Args:
        param: The Parameter that it replaces.
        asked: The recipe, and whether to keep the values on the CPU.
        quantizer: The recipe's quantizer for this tensor.

    Raises:
        ValueError: The recipe cannot quantize its shape.
    """
    usage = BOTH if torch.is_grad_enabled() else ROWWISE
    with torch.no_grad():
        try:
            quantized = settled(quantizer, asked.recipe, param.detach(), usage)
        except ValueError as error:
            raise ValueError(
                f"quantized_model_init: {error}; while an op is built, autocast(skip=[...]) does "
                f"not help: build it outside of the block, or in one with enabled=False"
            ) from error
        made = QuantizedParameter(quantized, asked.recipe)
    new: Any = nn.Parameter(made, param.requires_grad)
    if asked.preserve:
        new._init_val = param.detach().cpu().clone()
    return new  # type: ignore[no-any-return]


def note_of(ops: Iterable[Any], recipe: Recipe | None) -> str:
    """The report text about the quantized parameters of some ops; ``""`` if there are none."""
    notes = []
    for op in ops:
        how = "" if op._quantizers.of(recipe) else ", and is dequantized in every call"
        for name, param in held_by(op).items():
            notes.append(f"{name} lives quantized, by {type(param.recipe).__name__}{how}")
            notes += filter(None, [param.gathered])
    return "; ".join(notes)


def dequantized(chain: Any, quantizers: Sequence[Any], env: Any) -> tuple[int, ...]:
    """The quantized parameters of a chain whose op quantizes nothing.

    Args:
        chain: The chain.
        quantizers: The quantizers of each op.
        env: The environment.

    Raises:
        RuntimeError: ``torch.compile`` traces, which cannot handle such a parameter; or one is
            quantized by another recipe than that in force.
    """
    found = []
    for op, (first, last), its in zip(chain.ops, chain.param_ranges, quantizers, strict=True):
        held = held_by(op)
        if held and env.compiling:
            raise RuntimeError(
                f"{type(op).__name__} has parameters that live quantized (quantized_model_init), "
                f"which torch.compile does not look into: run this chain in eager mode"
            )
        for name, param in held.items() if its else ():
            param.for_call(env.recipe, Usage(False, False), f"{name} of {_called(op)}")
        if held and not its:
            places = zip(range(first, last), op.param_names or (), strict=True)
            found += [place for place, name in places if name in held]
    return tuple(found)


def _called(op: Any) -> str:
    return f"{type(op).__name__} {op.name!r}" if op.name else type(op).__name__


def plain(tensors: tuple[Any, ...], places: tuple[int, ...]) -> tuple[Any, ...]:
    """Dequantize the tensors at some places, for ops that do not support quantized ones."""
    found = list(tensors)
    for place in places:
        if isinstance(found[place], QuantizedParameter):
            found[place] = found[place].dequantize()
    return tuple(found)


# Checkpoints: the values, as in an unquantized model, and in addition the exact codes


def save(module: nn.Module, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
    """Write the values of a module's quantized parameters as plain tensors; and codes and scales.

    All are copies, taken at the same time, so that codes and values still match later. With
    ``keep_vars`` the Parameters themselves stay there.
    """
    for name, param in module._parameters.items():
        local: Any = getattr(param, "_local_tensor", param)
        if keep_vars or not isinstance(local, QuantizedParameter):
            continue
        if local is not param:  # a shard: gathering needs plain tensors
            destination[prefix + name] = _sharded(param, local)
            continue
        destination[prefix + name] = local.detach().dequantize()
        where = f"{prefix}{_KEY}{name}"
        text = json.dumps(_description(module, local), sort_keys=True).encode()
        destination[f"{where}.format"] = torch.tensor(list(text), dtype=torch.uint8)
        quantized, quantizer = local.quantized, local.quantizer
        parts = dict(zip(quantized.tensor_names, quantized.tensors(), strict=True))
        parts |= {f"state.{key}": getattr(quantizer, key) for key in quantizer.state_names}
        for part, tensor in parts.items():
            if tensor is not None:
                destination[f"{where}.{part}"] = tensor.detach().clone()


def load(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, errors: list[str] | None = None
) -> None:
    """Load the entries of :func:`save`: the exact codes, or the values as the parameter casts them.

    Codes and scales are used as they are if recipe and layout match, and if they equal the values
    bit for bit, since the values may have been edited. Otherwise the values are quantized again. A
    parameter that is not quantized gets the values.

    Args:
        module: The module.
        state_dict: The checkpoint, from which the additional entries are removed.
        prefix: The prefix of the module's parameter names.
        errors: List that receives a sentence for each entry that does not fit.
    """
    for name, param in module._parameters.items():
        where = f"{prefix}{_KEY}{name}."
        codes, values = _taken(state_dict, where), state_dict.get(prefix + name)
        if not isinstance(param, QuantizedParameter) or not isinstance(values, Tensor):
            continue
        if isinstance(values, QuantizedParameter) or values.shape != param.shape:
            continue  # torch copies it, or raises
        device = values.device if param.is_meta else param.device
        try:
            with torch.no_grad():
                made = _from_codes(module, param, codes, values, device)
                if made is None:
                    given = values.detach().to(device), param.quantized.copies
                    made = settled(param.quantizer, param.recipe, *given)
        except _Misfit as error:
            if errors is None:
                raise
            errors.append(f"{where}{error}")
            continue
        state_dict[prefix + name] = QuantizedParameter(made, param.recipe)


class _Misfit(RuntimeError):
    """An entry of a checkpoint that does not fit; the text begins with its name."""


def _description(op: Any, param: QuantizedParameter) -> dict[str, Any]:
    recipe = param.recipe.to_json(op.engine.recipe_name(param.recipe))
    return {"format": type(param.quantized).__name__, "recipe": recipe}


def _taken(state_dict: dict[str, Any], prefix: str) -> dict[str, Any]:
    keys = [key for key in state_dict if key.startswith(prefix)]
    return {key[len(prefix) :]: state_dict.pop(key) for key in keys}


def _from_codes(
    op: Any, param: QuantizedParameter, codes: dict[str, Any], values: Tensor, device: torch.device
) -> Any:
    """Read codes and scales in the layout of the parameter; None: another layout, or incomplete.

    Raises:
        _Misfit: They claim this recipe and format, but one does not match.
    """
    if not codes or _read(codes.pop("format", None)) != _description(op, param):
        return None
    there, quantizer = param.quantized, param.quantizer
    state = {f"state.{name}": getattr(quantizer, name) for name in quantizer.state_names}
    expected = dict(zip(there.tensor_names, there.tensors(), strict=True)) | state
    for name, given in codes.items():
        _check(name, given, expected)
    # only the copies that are here
    parts = [
        None if expected[name] is None or name not in codes else codes[name].detach().to(device)
        for name in there.tensor_names
    ]
    made = there._over(parts)
    if not alike(there, made) or not _stands_for(made, values):
        return None
    for name in quantizer.state_names:
        if f"state.{name}" in codes:
            getattr(quantizer, name).copy_(codes[f"state.{name}"])
    return made


def _read(text: Any) -> Any:
    """Parse the text of :func:`_description` from a checkpoint."""
    try:
        return json.loads(bytes(text.tolist()))
    except (AttributeError, TypeError, ValueError):
        found = "nothing" if text is None else f"{text!r:.80}"
        raise _Misfit(f"format: expected JSON as bytes, got {found}") from None


def _check(name: str, given: Any, expected: dict[str, Tensor | None]) -> None:
    """Refuse a checkpoint entry that does not match the parameter's tensor of that name."""
    if name not in expected:
        raise _Misfit(f"{name} is not known here: expected only {', '.join(expected)}")
    want = expected[name]
    if not isinstance(given, Tensor):
        raise _Misfit(f"{name}: expected a tensor, got {type(given).__name__}")
    if want is not None and (given.shape, given.dtype) != (want.shape, want.dtype):
        raise _Misfit(
            f"{name}: expected {want.dtype} of shape {tuple(want.shape)}, got {given.dtype} of "
            f"shape {tuple(given.shape)}; without the entries beside it the values are quantized"
        )


def _stands_for(made: QuantizedTensor, values: Tensor) -> bool:
    """Return whether codes equal values bit for bit, in the dtype of the values."""
    if not values.is_floating_point() or values.is_meta:
        return False
    usage = ROWWISE if made.usage.rowwise else Usage(False, True)
    wide = made.of_dtype(values.dtype).dequantize(usage)
    pair = [t.contiguous().view(-1).view(torch.uint8) for t in (wide, values)]
    return torch.equal(pair[0], pair[1].to(pair[0].device))


def _sharded(param: Any, local: QuantizedParameter) -> Any:
    """Make a DTensor of plain values like one of quantized values."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local.detach().dequantize(),
        param.device_mesh,
        param.placements,
        run_check=False,
        shape=param.shape,
        stride=param.stride(),
    )
