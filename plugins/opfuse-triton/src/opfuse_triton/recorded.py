"""The cases of the installed plugins, and their launches at a shape."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

import torch

from .cases import KernelCase, Operand
from .launches import Launch, recording
from .targets import Target

GROUP = "opfuse_triton.cases"
"""The entry-point group in which plugins name their cases."""


@dataclass(frozen=True)
class CaseRun:
    """The launches of a case at one shape, for one target.

    Attributes:
        case: The case.
        shape: One of its shapes.
        launches: Its launches, in order.
        operands: Its operands by the storage of their tensors, each with its name.
        dtype: The dtype in place of bfloat16.
        offset: The index in its memory at which each input begins.
    """

    case: KernelCase
    shape: Mapping[str, int]
    launches: Sequence[Launch]
    operands: Mapping[int, tuple[str, Operand]]
    dtype: torch.dtype = torch.bfloat16
    offset: int = 0

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        of = [dtype] * (self.dtype is not torch.bfloat16) + ["unaligned"] * bool(self.offset)
        return ", ".join([describe(self.shape), *of])


def storage_of(tensor: torch.Tensor) -> int:
    """A number that identifies a tensor's memory, on the meta device too."""
    return int(tensor.untyped_storage()._cdata)


def tensors_of(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The tensors among the arguments of a kernel, including those of descriptors."""
    for value in values:
        base = getattr(value, "base", value)
        if isinstance(base, torch.Tensor):
            yield base


def find_operands(
    case: KernelCase,
    shape: Mapping[str, int],
    inputs: Mapping[str, torch.Tensor],
    given: Any,
    dtype: torch.dtype = torch.bfloat16,
) -> dict[int, tuple[str, Operand]]:
    """The operands of a case by the storage of their tensors.

    Args:
        case: The case.
        shape: The shape of the inputs.
        inputs: The arguments of ``case.run``.
        given: Its result.
        dtype: The dtype in place of bfloat16.

    Raises:
        ValueError: It gave another number of tensors than the case declares, or one of another
            shape or dtype.
    """
    if given is None:
        raise ValueError(f"{case.name}: run gives nothing; is a return missing?")
    operands = case.tensors(**shape)
    outputs = [name for name, operand in operands.items() if operand.output]
    results = given if isinstance(given, tuple | list) else (given,)
    if len(results) != len(outputs):
        raise ValueError(
            f"{case.name}: run gives {len(results)} tensors, and the case has {len(outputs)} "
            f"outputs: {', '.join(outputs)}"
        )
    found = {}
    for name, tensor in [*inputs.items(), *zip(outputs, results, strict=True)]:
        operand = operands[name]
        own = dtype if operand.dtype is torch.bfloat16 else operand.dtype
        if (tuple(tensor.shape), tensor.dtype) != (operand.shape, own):
            is_ = f"{name} is {tuple(tensor.shape)} {tensor.dtype}"
            says = f"{operand.shape} {own}"
            raise ValueError(f"{case.name}: {is_}, and the case says {says}")
        found[storage_of(tensor)] = (name, operand)
    return found


def record(
    case: KernelCase,
    shape: Mapping[str, int],
    target: Target | int | str,
    inputs: Mapping[str, torch.Tensor] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    offset: int = 0,
) -> CaseRun:
    """Run a case on meta tensors, and keep what it would launch.

    Args:
        case: The case.
        shape: One of its shapes.
        target: The target, or its key in :data:`opfuse_triton.TARGETS`.
        inputs: ``case.inputs(shape)``, if they are there.
        dtype: The dtype in place of bfloat16.
        offset: The index in its memory at which each input begins.

    Raises:
        ValueError: The case launches nothing, or does not give what it declares.
    """
    inputs = case.inputs(shape, "meta", dtype, offset) if inputs is None else inputs
    with recording(target) as launches:
        given = case.run(**inputs)
    if not launches:
        raise ValueError(f"{case.name} launches no kernel at {describe(shape)}")
    names = sorted({launch.kernel.name for launch in launches})
    if case.gemms and not {*case.gemms} & {*names}:
        launched = f"and it launches {', '.join(names)}"
        raise ValueError(f"{case.name}: gemms names {', '.join(case.gemms)}, {launched}")
    operands = find_operands(case, shape, inputs, given, dtype)
    return CaseRun(case, shape, launches, operands, dtype, offset)


def describe(shape: Mapping[str, int]) -> str:
    """A shape as text: ``rows=8192 features=4096``."""
    return " ".join(f"{name}={size}" for name, size in shape.items())


def case_lists(plugin: str | None) -> dict[str, str]:
    """The places of the cases, ``module:object`` by the name of the plugin.

    Args:
        plugin: One plugin, or a ``module:object`` itself; None: all that are installed.

    Raises:
        ValueError: No installed plugin of this name has cases.
    """
    if plugin is not None and ":" in plugin:
        return {plugin: plugin}
    found = {entry.name: entry.value for entry in entry_points(group=GROUP)}
    if plugin is None:
        return dict(sorted(found.items()))
    if plugin not in found:
        known = ", ".join(sorted(found)) or "there is none"
        raise ValueError(f"no installed plugin {plugin!r} has kernel cases; those with: {known}")
    return {plugin: found[plugin]}


def load_cases(where: str) -> Sequence[KernelCase]:
    """Import a list of cases.

    Args:
        where: ``module:object``.

    Raises:
        ValueError: It is something else, or has no case, or two of one name.
    """
    module, _, name = where.partition(":")
    cases: Any = getattr(importlib.import_module(module), name)
    if not isinstance(cases, list | tuple) or not all(isinstance(c, KernelCase) for c in cases):
        raise ValueError(f"{where} is {cases!r}, and a list of KernelCase is expected")
    names = [case.name for case in cases]
    if not names or len(names) != len(set(names)):
        expected = "expected at least one, and each name once"
        raise ValueError(f"{where} has the cases {names}: {expected}")
    return cases
