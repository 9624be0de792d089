"""Parameters that are stored quantized: their interface, and what the engine does with them.

The package opfuse-quantized makes them. The core runs ops that have some, and knows them only by
the class :class:`QuantizedParameter`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from .formats import QuantizedTensor, Usage
from .quantizer import Quantizer
from .recipe import Recipe

KEY = "quantized."
"""The prefix of a state dict's entries about quantized parameters, after that of the module."""


class QuantizedParameter(Tensor):
    """A tensor that is stored quantized, and that other operations read as its values.

    Attributes:
        quantized: The codes and scales. Their ``dtype`` is that of this tensor.
        recipe: The recipe whose quantizer made them.
        note: What reports add about it, or ``""``.
    """

    quantized: QuantizedTensor
    recipe: Recipe
    note: str

    @property
    def quantizer(self) -> Quantizer:
        """The quantizer of new values: that of the op's weight, after the op has run."""
        made: Quantizer = self.quantized.quantizer
        return made

    def dequantize(self, dtype: Any = None) -> Tensor:
        """The values as a plain tensor, through which a gradient flows.

        Args:
            dtype: The dtype to which the exact values are rounded, once; None: its own.
        """
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

    def loaded(self, values: Tensor, codes: dict[str, Any]) -> QuantizedParameter:
        """Make a tensor like this one from the entries of a state dict.

        Args:
            values: The values.
            codes: The other entries, without their prefix.

        Raises:
            RuntimeError: One does not fit; the text begins with its name.
        """
        raise NotImplementedError

    def for_call(self, recipe: Recipe | None, usage: Usage, who: str) -> QuantizedTensor:
        """The codes and scales, for a product under the recipe in force.

        Args:
            recipe: The recipe in force.
            usage: The copies that are needed.
            who: The name of the parameter in errors.

        Raises:
            RuntimeError: It is quantized by another recipe, or a copy is missing.
        """
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


def held_by(op: Any) -> dict[str, QuantizedParameter]:
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
    notes = []
    for op in ops:
        how = "" if op._quantizers.of(recipe) else ", and is dequantized in every call"
        for name, param in held_by(op).items():
            notes.append(f"{name} lives quantized, by {type(param.recipe).__name__}{how}")
            notes += filter(None, [param.note])
    return "; ".join(notes)


def dequantized(
    ops: Sequence[Any], ranges: Sequence[tuple[int, int]], quantizers: Sequence[Any], env: Any
) -> tuple[int, ...]:
    """The quantized parameters of a chain whose op quantizes nothing.

    Args:
        ops: The ops of the chain.
        ranges: The range of parameters of each.
        quantizers: The quantizers of each.
        env: The environment.

    Raises:
        RuntimeError: ``torch.compile`` traces, which cannot handle such a parameter; or one is
            quantized by another recipe than that in force.
    """
    found = []
    for op, (first, last), its in zip(ops, ranges, quantizers, strict=True):
        held = held_by(op)
        if held and env.compiling:
            raise RuntimeError(
                f"{type(op).__name__} has parameters that live quantized (quantized_model_init), "
                f"which torch.compile does not look into: run this chain in eager mode"
            )
        title = f"{type(op).__name__} {op.name!r}" if op.name else type(op).__name__
        for name, param in held.items() if its else ():
            param.for_call(env.recipe, Usage(False, False), f"{name} of {title}")
        if held and not its:
            places = zip(range(first, last), op.param_names or (), strict=True)
            found += [place for place, name in places if name in held]
    return tuple(found)


def plain(tensors: tuple[Any, ...], places: tuple[int, ...]) -> tuple[Any, ...]:
    """Dequantize the tensors at some places, for ops that do not support quantized ones."""
    found = list(tensors)
    for place in places:
        if isinstance(found[place], QuantizedParameter):
            found[place] = found[place].dequantize()
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
        values = state_dict.get(prefix + name)
        if not isinstance(param, QuantizedParameter) or not isinstance(values, Tensor):
            continue
        if isinstance(values, QuantizedParameter) or values.shape != param.shape:
            continue  # torch copies it, or raises
        try:
            state_dict[prefix + name] = param.loaded(values, codes)
        except RuntimeError as error:
            errors.append(f"{where}{error}")
