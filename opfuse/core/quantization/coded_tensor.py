"""Tensors over codes: what the engine asks of them where they enter a chain, or belong to an op.

Operations of torch read such a tensor as its values. The core has none, and imports no package that
does: it knows them by two classes, which theirs derive from.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from .formats import QuantizedTensor, Usage
from .quantizer import Quantizer, Recipe

KEY = "quantized."
"""The prefix of a state dict's entries about quantized parameters, after that of the module."""


class CodedTensor(Tensor):
    """A tensor over codes; ``dequantize()`` returns its values, through which a gradient flows."""

    def codes_for(self, quantizer: Quantizer, usage: Usage) -> QuantizedTensor | None:
        """The codes, if a quantizer would make the same; None: it has to cast the values.

        Args:
            quantizer: The quantizer that would cast.
            usage: The copies that are needed.
        """
        return None


class QuantizedParameter(CodedTensor):
    """A parameter that is stored quantized.

    Attributes:
        quantized: The codes and scales. Their ``dtype`` is that of this tensor. Their quantizer is
            that of the op's weight, after the op has run.
        recipe: The recipe whose quantizer made them.
    """

    quantized: QuantizedTensor
    recipe: Recipe

    def for_call(self, recipe: Recipe | None, usage: Usage, who: str) -> QuantizedTensor:
        """The codes and scales, for a product under the recipe in force.

        Args:
            recipe: The recipe in force.
            usage: The copies that are needed.
            who: The name of the parameter in errors.

        Raises:
            RuntimeError: It is quantized by another recipe, or a copy is missing.
        """
        raise NotImplementedError

    def check_plan(self, op: Any, name: str, quantizes: bool, env: Any) -> None:
        """Refuse a plan of an op that cannot have this parameter.

        Args:
            op: The op.
            name: The name of the parameter.
            quantizes: Whether the op quantizes anything; if not, it reads the values.
            env: The environment.

        Raises:
            RuntimeError: ``torch.compile`` traces; or the recipe in force is another one.
        """
        raise NotImplementedError

    def described(self, name: str, quantizes: bool) -> str:
        """What reports say about it; arguments as for :meth:`check_plan`."""
        raise NotImplementedError

    def save(self, param: Tensor, destination: dict[str, Any], name: str, where: str) -> None:
        """Write the entries of a state dict.

        Args:
            param: The Parameter: this tensor, or a DTensor of which it is the local shard.
            destination: The state dict.
            name: The key of the values.
            where: The prefix of the keys of everything else.
        """
        raise NotImplementedError

    def load(self, state_dict: dict[str, Any], name: str, codes: dict[str, Any]) -> None:
        """Replace the values in a state dict by a tensor that torch can load into this one.

        Args:
            state_dict: The state dict.
            name: The key of the values.
            codes: The other entries, without their prefix.

        Raises:
            RuntimeError: One does not fit; the text begins with its name.
        """
        raise NotImplementedError


def _codes_of(x: Any, cast: Any) -> QuantizedTensor | None:
    known = cast is not None and isinstance(x, CodedTensor)
    return x.codes_for(cast.quantizer, cast.usage) if known else None


def brings_codes(x: Any, cast: Any) -> bool:
    """Return whether the first cast of a pass takes the codes of a tensor as they are."""
    return _codes_of(x, cast) is not None


def plain(tensor: Any) -> Any:
    """Return the values of a tensor over codes, and any other tensor as it is."""
    return tensor.dequantize() if isinstance(tensor, CodedTensor) else tensor


def first_tensor(cast: Any, x: Any) -> Any:
    """The initial tensor of a pass: codes if its first cast would make the same, or a plain tensor.

    Args:
        cast: The first cast, with its ``quantizer`` and ``usage``; None: there is none.
        x: The incoming tensor.
    """
    codes = _codes_of(x, cast)
    return plain(x) if codes is None else codes


def quantized_parameters(op: Any) -> dict[str, QuantizedParameter]:
    """The quantized parameters of an op, by name."""
    found = {}
    for name in op.param_names or ():
        module, leaf = op.param_source(name)
        param = module._parameters.get(leaf)
        if isinstance(param, QuantizedParameter):
            found[name] = param
    return found


def note_of(ops: Iterable[Any], recipe: Recipe | None) -> str:
    """The report text about the quantized parameters of some ops; ``""`` if there are none."""
    return "; ".join(
        param.described(name, bool(op._quantizers.of(recipe)))
        for op in ops
        for name, param in quantized_parameters(op).items()
    )


def params_to_dequantize(
    ops: Sequence[Any], ranges: Sequence[tuple[int, int]], quantizers: Sequence[Any], env: Any
) -> tuple[int, ...]:
    """The quantized parameters of a chain whose op quantizes nothing.

    Args:
        ops: The ops of the chain.
        ranges: The range of parameters of each.
        quantizers: The quantizers of each.
        env: The environment.
    """
    found = []
    for op, (first, _), its in zip(ops, ranges, quantizers, strict=True):
        for name, param in quantized_parameters(op).items():
            param.check_plan(op, name, bool(its), env)
            found += [] if its else [first + op.param_names.index(name)]
    return tuple(found)


def save(module: nn.Module, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
    """Write the values of a module's quantized parameters as plain tensors; and codes and scales.

    With ``keep_vars`` the Parameters themselves stay there.
    """
    for name, param in module._parameters.items():
        local = getattr(param, "_local_tensor", param)
        if isinstance(local, QuantizedParameter) and param is not None and not keep_vars:
            local.save(param, destination, prefix + name, f"{prefix}{KEY}{name}.")


def load(module: nn.Module, state_dict: dict[str, Any], prefix: str, errors: list[str]) -> None:
    """Replace the entries of :func:`save` by one that torch can load for each parameter.

    A parameter that is not quantized gets the values.

    Args:
        module: The module.
        state_dict: The checkpoint, from which the entries about codes are removed.
        prefix: The prefix of the module's parameter names.
        errors: List that receives a sentence for each entry that does not fit.
    """
    for name, param in module._parameters.items():
        where = f"{prefix}{KEY}{name}."
        keys = [key for key in state_dict if key.startswith(where)]
        codes = {key[len(where) :]: state_dict.pop(key) for key in keys}
        if isinstance(param, QuantizedParameter):
            try:
                param.load(state_dict, prefix + name, codes)
            except RuntimeError as error:
                errors.append(f"{where}{error}")
