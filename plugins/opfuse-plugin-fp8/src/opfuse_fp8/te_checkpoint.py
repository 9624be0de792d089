"""The state of Transformer Engine's delayed scaling, as opfuse's checkpoints have it."""

from __future__ import annotations

import dataclasses
import io
import re
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .recipes import BY_NAME, DelayedScaling, Format

__all__ = ["from_te_extra_state"]

_KEY = "_extra_state"
_NAME = "fp8-delayed"
_MODES = ("forward", "backward", "input", "param", "grad_output")  # the last three: 1.13
_OP = "saved by an op"
_SCRIPT = (
    "write the checkpoint with plain values beside Transformer Engine, by examples/te_state.py of "
    "opfuse, or leave the key out"
)
_TORCHS_ADVICE = re.compile(
    r"\n|In PyTorch 2|Please |Re-running |Check the doc|To bypass |If you trust"
)
_FIELDS = (
    *("margin", "amax_history_len", "amax_compute_algo", "scaling_factor_compute_algo"),
    *("reduce_amax", "fp8_format"),
)
_KNOWN = {"recipe", "scale_fwd", "scale_bwd", "amax_history_fwd", "amax_history_bwd"}
_TENSORS = ("input", "weight", "grad_output")
_STATELESS = {cls.__name__ for cls in BY_NAME.values()} - {"DelayedScaling", "CustomRecipe"}
_short = reprlib.Repr()
_short.maxlevel, _short.maxother = 2, 60


class Refused(ValueError):
    """An extra state holds something that is not the state of a recipe."""


def short(value: Any) -> str:
    """The beginning of the ``repr`` of a value, however large it is."""
    return _short.repr(value)


class _Column(NamedTuple):
    """The state of one tensor."""

    scale: Tensor
    history: Tensor


_Product = Mapping[str, _Column | None]
"""The state of its tensors, by what a linear layer of opfuse calls them; None: it has none."""


def from_te_extra_state(
    state_dict: Mapping[str, Any],
    *,
    recipe: DelayedScaling | str | None = None,
    names: Mapping[str, str | Sequence[str]] | None = None,
) -> dict[str, Any]:
    """A checkpoint of Transformer Engine with its state of delayed scaling as opfuse reads it.

    Every ``..._extra_state`` is taken out. Where it has the scales of a linear layer, they come in
    again as plain tensors under ``...quantizers...``: load the result into the model, and run it
    under the same recipe to go on with the same scales. Parameters stay as they are.

    Nothing is unpickled. What ``torch.save`` wrote (before Transformer Engine 2.0) is read with
    ``weights_only=True``. A pickle (since 2.0) needs the classes of Transformer Engine: beside it,
    ``examples/te_state.py`` writes a checkpoint with plain values, which is read here.

    Args:
        state_dict: The checkpoint, of ``te.ops`` or of modules such as ``te.Linear``.
        recipe: To which recipe the state belongs, or ``"fp8-delayed"`` for its defaults; default:
            the one that the checkpoint names, or where it names none (before 2.0) a
            ``DelayedScaling`` with its length of history.
        names: Module of the checkpoint -> which op of your model gets the state of each of its
            products. Default: ``basic_ops.0`` of the layer of that name, as
            :class:`opfuse.ops.Linear` has it, for modules, and the op of that name for ``te.ops``.
            A module with two products, as ``LayerNormMLP``, needs it:
            ``{"mlp": ["mlp.1.basic_ops.0", "mlp.3.basic_ops.0"]}``.

    Returns:
        A new dictionary.

    Raises:
        TypeError: An ``_extra_state`` is neither a dictionary, bytes nor a tensor of them, or
            ``recipe`` is another recipe.
        ValueError: It cannot be read so, belongs to another recipe or op, or ``names`` has a
            module that the checkpoint does not have.
    """
    recipe = DelayedScaling() if recipe == _NAME else recipe
    if not isinstance(recipe, DelayedScaling | None):
        raise TypeError(
            f"from_te_extra_state: recipe expected a DelayedScaling or {_NAME!r}, got {recipe!r}"
        )
    names = dict(names or {})
    modules = {
        key: key.removesuffix(_KEY).removesuffix(".") for key in state_dict if _is_extra(key)
    }
    if unknown := sorted(names.keys() - set(modules.values())):
        known = ", ".join(map(repr, sorted(modules.values()))) or "none"
        raise ValueError(
            f"from_te_extra_state: names has {unknown[0]!r}, of which the checkpoint has no "
            f"{_KEY}; it has {known}"
        )
    found = {key: value for key, value in state_dict.items() if key not in modules}
    for key, module in modules.items():
        found |= _read(key, module, state_dict[key], recipe, names.get(module), found)
    return found


def _read(
    key: str,
    module: str,
    value: Any,
    recipe: DelayedScaling | None,
    names: str | Sequence[str] | None,
    found: Mapping[str, Any],
) -> dict[str, Any]:
    """The entries of the checkpoint for one extra state; every error says which."""
    if not isinstance(value, dict | io.BytesIO | bytes | bytearray | None) and not (
        isinstance(value, Tensor) and (value.dtype == torch.uint8 or not value.numel())
    ):
        raise TypeError(
            f"{key}: expected what Transformer Engine saves, a uint8 tensor or io.BytesIO, or a "
            f"dictionary of it, got {type(value).__name__}"
        )
    try:
        state = _merged(_content(value))
        if not state or _is_stateless(state):
            return {}
        return _entries(module, state, recipe, _targets(module, state, names), found)
    except Refused as error:
        raise ValueError(f"{key}: {error}") from error.__cause__
    except Exception as error:
        raise ValueError(
            f"{key}: it is not what Transformer Engine saves: {type(error).__name__}: "
            f"{str(error)[:300]}"
        ) from error


def _is_extra(key: str) -> bool:
    return key == _KEY or key.endswith(f".{_KEY}")


def _content(value: Any) -> Any:
    """The content of an extra state; None if it is empty. No code in it runs."""
    if isinstance(value, dict):
        return value
    if isinstance(value, io.BytesIO):
        try:
            return torch.load(io.BytesIO(value.getvalue()), map_location="cpu", weights_only=True)
        except Exception as error:
            text = str(error.__context__ or error).removeprefix("Weights only load failed. ")
            why = _TORCHS_ADVICE.split(text)[0].strip()[:300] or type(error).__name__
            raise Refused(f"torch.load(weights_only=True) refuses it: {why}; {_SCRIPT}") from None
    if value.numel() if isinstance(value, Tensor) else value:
        raise Refused(f"it is pickled with classes of Transformer Engine: {_SCRIPT}")
    return None


def _merged(content: Any) -> dict[str, Any]:
    """The scales of an extra state in one dictionary; ``te.ops`` has one for each pass."""
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise Refused(f"expected a dictionary, got {type(content).__name__}")
    parts = [(mode, content[mode]) for mode in _MODES if content.get(mode) is not None]
    found: dict[str, Any] = {_OP: True} if any(mode in content for mode in _MODES) else {}
    for mode, part in parts if found else [("", content)]:
        if not isinstance(part, dict):
            raise Refused(f"expected a dictionary in {mode!r}, got {type(part).__name__}")
        if part and not _KNOWN & part.keys():
            raise Refused(
                f"expected one of {', '.join(sorted(_KNOWN))}, got {short([*part])}; leave "
                f"the key out if it is not the state of a recipe"
            )
        for name, value in part.items():
            both = isinstance(value, Tensor) and isinstance(found.get(name), Tensor)
            found[name] = torch.cat([found[name], value], -1) if both else value
    return found


def _is_stateless(state: dict[str, Any]) -> bool:
    """Whether it is that of a recipe whose scales follow from the tensors alone."""
    saved = state.get("recipe")
    return isinstance(saved, dict) and saved.get("class") in _STATELESS


def _targets(module: str, state: dict[str, Any], given: str | Sequence[str] | None) -> list[str]:
    """The ops that get the state of a module, in the order of its products."""
    if given is None:
        return [module if _OP in state else f"{module}.basic_ops.0".removeprefix(".")]
    return [given] if isinstance(given, str) else list(given)


def _entries(
    module: str,
    state: dict[str, Any],
    recipe: DelayedScaling | None,
    targets: list[str],
    found: Mapping[str, Any],
) -> dict[str, Any]:
    """What goes into the checkpoint for one extra state."""
    products, saved = _products(state), state.get("recipe")
    if not products:
        if isinstance(saved, dict | None):
            return {}
        raise Refused(f"expected a recipe, got {short(saved)}")
    rows = next(len(column.history) for column in products[0].values() if column)
    recipe = _recipe(saved, rows) if recipe is None else recipe
    if recipe.amax_history_len != rows:
        raise Refused(
            f"expected a history of {recipe.amax_history_len} steps, the amax_history_len of the "
            f"recipe, got {rows}"
        )
    if len(targets) != len(products):
        raise Refused(
            f"it has the scales of {len(products)} products, and the number of ops for "
            f"them is {len(targets)}: pass names={{{module!r}: [the op of each]}}, or leave the "
            f"key out if it is not a linear layer"
        )
    made: dict[str, Any] = {}
    for target, tensors in zip(targets, products, strict=True):
        made |= _saved(f"{target}." if target else "", tensors, recipe, found)
    return made


def _products(state: dict[str, Any]) -> list[_Product]:
    """The state of the tensors of each product, by what a linear layer of opfuse calls them."""
    forward, backward = _columns(state, "fwd"), _columns(state, "bwd")
    if not forward and not backward:
        return []
    lengths = [len(column.history) for column in (*forward, *backward)]
    if min(lengths) != max(lengths):
        raise Refused(
            f"expected histories of one length, got {len(forward[0].history)} steps forward "
            f"and {len(backward[0].history)} backward"
        )
    if _OP not in state:
        count = len(forward) // 3
        if not count or (len(forward), len(backward)) != (3 * count, 2 * count):
            raise Refused(
                f"expected 3 forward and 2 backward scales for each product of a module, "
                f"got {len(forward)} and {len(backward)}"
            )
        columns = [(*forward[3 * i : 3 * i + 2], backward[2 * i]) for i in range(count)]
        return [dict(zip(_TENSORS, of_one, strict=True)) for of_one in columns]
    groups = len(forward) // 2
    if not groups or len(forward) != 2 * groups or len(backward) not in (0, groups):
        raise Refused(
            f"expected the 2 forward scales and 1 backward scale of a linear op, or as many "
            f"for each group of one, got {len(forward)} and {len(backward)}: leave the key out if "
            f"the op has no weight"
        )
    numbers = range(groups) if groups > 1 else [""]
    in_order = [f"{name}{i}" for i in numbers for name in _TENSORS[:2]]
    in_order += [f"{_TENSORS[2]}{i}" for i in numbers]
    return [dict(zip(in_order, [*forward, *(backward or [None] * groups)], strict=True))]


def _columns(state: dict[str, Any], way: str) -> list[_Column]:
    scale, history = state.get(f"scale_{way}"), state.get(f"amax_history_{way}")
    if scale is None and history is None:
        return []
    good = _is_numbers(scale) and _is_numbers(history)
    if not good or scale.ndim != 1 or history.ndim != 2 or len(scale) != history.shape[1]:
        raise Refused(
            f"expected floating-point numbers in scale_{way} of shape (n,) and "
            f"amax_history_{way} of shape (steps, n), got {_shape(scale)} and {_shape(history)}"
        )
    whole = history.isinf()  # of fp64, before it becomes so in fp32
    scale, history = scale.float(), history.float()
    # the reciprocal, by which a product is multiplied, is to be a number too
    usable = scale.isfinite() & (scale > 0) & scale.reciprocal().isfinite()
    if not usable.all() or not (history >= 0).all() or not (history.isinf() == whole).all():
        raise Refused(
            f"expected positive scales and maxima that float32 holds, got others in {way}"
        )
    return [_Column(scale[i : i + 1], history[:, i]) for i in range(len(scale))]


def _is_numbers(value: Any) -> bool:
    dense = isinstance(value, Tensor) and value.layout is torch.strided
    return dense and value.dtype.is_floating_point and value.dtype.itemsize > 1


def _shape(value: Any) -> str:
    if not isinstance(value, Tensor):
        return short(value)
    shape = str(tuple(value.shape))
    return shape if _is_numbers(value) else f"{shape} of {value.dtype}"


def _recipe(saved: Any, rows: int) -> DelayedScaling:
    """The recipe that an extra state names; before 2.0 it names none.

    Raises:
        ValueError: It is no recipe that opfuse has.
    """
    if saved is None:
        return DelayedScaling(amax_history_len=rows)
    if not isinstance(saved, dict) or saved.get("class") != "DelayedScaling":
        what = short(saved.get("class") if isinstance(saved, dict) else saved)
        raise Refused(f"expected the state of DelayedScaling, got that of {what}")
    fields = {**dataclasses.asdict(DelayedScaling()), **saved}
    overridden = fields.get("override_linear_precision")
    if isinstance(overridden, list) and any(value is not False for value in overridden):
        raise Refused(
            "its recipe has override_linear_precision, which opfuse has not; pass recipe=..."
        )
    plain = str | int | float | None
    odd = [name for name in _FIELDS if not isinstance(fields[name], plain)]
    if odd:
        raise Refused(f"its recipe has {short(fields[odd[0]])} as its {odd[0]}")
    try:
        given = {name: fields[name] for name in _FIELDS}
        given |= {name: int(given[name]) for name in ("margin", "amax_history_len")}
        return DelayedScaling(**given | {"fp8_format": Format(given["fp8_format"])})
    except (TypeError, ValueError) as error:
        raise Refused(f"its recipe is none of opfuse: {error}; pass recipe=...") from error


def _saved(
    prefix: str, tensors: _Product, recipe: DelayedScaling, found: Mapping[str, Any]
) -> dict[str, Any]:
    """The entries of one op, under a number that is free."""
    number = 0
    while any(key.startswith(f"{prefix}quantizers.{number}.") for key in found):
        number += 1
    root = f"{prefix}quantizers.{number}."
    text = recipe.to_json(_NAME).encode()
    made = {f"{root}recipe": torch.tensor(list(text), dtype=torch.uint8)}
    device = next(column.scale.device for column in tensors.values() if column)
    history = torch.zeros(recipe.amax_history_len, dtype=torch.float32)
    nothing = _Column(torch.ones(1, dtype=torch.float32), history)
    for name, column in tensors.items():
        scale, history = column or nothing
        pending = history[:1].clone()  # row 0 is the step that has not ended
        done = torch.cat([torch.zeros_like(pending), history[1:]])
        made[f"{root}{name}.scale"] = scale.clone().to(device)
        made[f"{root}{name}.amax"] = torch.where(pending > 0, pending, -1.0).to(device)
        made[f"{root}{name}.amax_history"] = done.to(device)
    return made
