"""``opfuse.convert``: chains for the modules of a model, in place."""

from __future__ import annotations

import contextlib
import fnmatch
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from opfuse.core.assign_names import assign_names
from opfuse.core.fusible import FusibleOperation
from opfuse.core.introspection import op_class
from opfuse.core.plugins import manager
from opfuse.core.replaced_forward import KEPT_AS, replaced_forward, replaced_forwards
from opfuse.core.sequential import Sequential
from opfuse.core.settings import current

from .building import ORDINARY, by_reading
from .converted_forward import ConvertedForward, alike, built, checked
from .converter import Conversion, Converter
from .layers import layer_in, layered, without_layer
from .probing import remembering
from .report import ConversionReport, Converted, Left, measured
from .sharded import gathered


def convert(
    model: nn.Module,
    *inputs: Any,
    only: str | Sequence[str] | None = None,
    skip: str | Sequence[str] = (),
    verify: bool | None = None,
) -> ConversionReport:
    """Replace the forwards of modules that opfuse can compute by chains, in place.

    Modules, Parameters, the state dict and ``isinstance`` results stay the same: only the class of
    a converted module changes, to a subclass of the same name whose ``forward`` runs the chain. At
    every call it checks that the module is unchanged: the same parts, without hooks, with
    parameters that the chain can read. Otherwise the module's own ``forward`` runs, and
    :func:`converted` says why. The own ``forward`` also runs under ``torch.export`` and
    ``torch.fx``, and under ``torch.compile``, unless ``opfuse.tune(..., compiled=True)`` found the
    chain to be faster.

    The computation of a module is read from the source of its ``forward``; its class need not be
    known. Only the statements that a chain covers are replaced; the rest is the author's own code.
    Activations and norms of unknown classes are recognised by their results for numbers of all
    magnitudes. Plugins add converters for code that cannot be read (hook ``opfuse_converters``).

    Args:
        model: The model, or any part of one.
        *inputs: Its inputs; a dict as the last one contains inputs by name. (If the model itself
            takes a dict last, add an empty one.) With inputs, the report says what is fused, and
            how many bytes the forward keeps for the backward, before and after.
        only: Convert only modules whose dotted names match one of these patterns, and those below.
        skip: Do not convert modules that match one of these patterns, nor those below.
        verify: Compare output and gradients of each chain with those of its module, on random
            numbers. Default: only if something was recognised by its values.

    Returns:
        The report: ``print`` it, or call ``to_dict()``.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: A pattern matches no module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"opfuse.convert expected a torch.nn.Module, got {type(model).__name__}")
    before = measured(model, inputs) if inputs else None
    found = Candidates(model, only, skip, verify)
    for module, conversion in found.made.items():
        cls: Any = type(module)
        if layer_in(cls) is None:
            module.__class__ = layered(cls)
        vars(module)[KEPT_AS] = ConvertedForward(*found.by[module], conversion)
    for module in found.made:
        vars(module)[KEPT_AS].seal(module)
    assign_names(model)
    after = measured(model, inputs) if inputs else None
    return ConversionReport(tuple(found.converted), tuple(found.left), before, after)


def count_convertible(model: nn.Module) -> int:
    """How many modules of a model :func:`convert` could convert; the model stays as it is."""
    return len(Candidates(model).made)


class Candidates:
    """The modules of a model that could be converted, and the others; the model is not changed.

    Args:
        model: The model.
        only: As for :func:`convert`.
        skip: As for :func:`convert`.
        verify: As for :func:`convert`.

    Attributes:
        made: The conversions by module.
        by: The converter of each, and the distribution and version of its plugin.
        converted: A row of the report for each.
        left: A row for each other module that is worth a note.
    """

    def __init__(
        self,
        model: nn.Module,
        only: str | Sequence[str] | None = None,
        skip: str | Sequence[str] = (),
        verify: bool | None = None,
    ) -> None:
        self.made: dict[nn.Module, Conversion] = {}
        self.by: dict[nn.Module, tuple[Converter, Any]] = {}
        self.converted: list[Converted] = []
        self.left: list[Left] = []
        self._verify = verify
        self._compared: set[Any] = set()
        names = [name for name, _ in model.named_modules()]
        wanted, unwanted = _matching(names, only, "only"), _matching(names, skip, "skip")
        self._unwanted = unwanted
        asked = converters()
        inside: set[str] = set()  # of what is opfuse's own
        with remembering(), contextlib.closing(gathered(model)) as found:
            for name, module in found:
                if any(name.startswith(f"{above}.") for above in inside):
                    continue
                if isinstance(module, (FusibleOperation, Sequential)):
                    inside.add(name)
                elif _is_wanted(name, only, wanted, unwanted):
                    standing: Any = replaced_forward(module)
                    if standing is None or standing.is_out_of_date:
                        self._look_at(name, module, asked)
        # what is inside a chain needs no row
        reads = {
            f"{row.path}.{read}".lstrip(".")
            for row, conversion in zip(self.converted, self.made.values(), strict=True)
            for read in conversion.reads
            if read
        }
        self.left = [row for row in self.left if row.path not in reads]

    def _skipped(self, name: str, made: Conversion) -> str:
        """A part that the chain of a module would stand for, and that is to be left alone."""
        parts = [f"{name}.{read}".lstrip(".") for read in made.reads if read]
        return next((part for part in parts if not _is_wanted(part, None, (), self._unwanted)), "")

    def _checked(self, module: nn.Module, made: Conversion) -> Conversion | str:
        """A conversion, if the chain computes what the module does."""
        kind = alike(module, made)
        verify = made.probed if self._verify is None else self._verify
        found = checked(module, made, verify and kind not in self._compared)
        if isinstance(found, Conversion) and verify:
            self._compared.add(kind)
        return found

    def _look_at(
        self, name: str, module: nn.Module, asked: Sequence[tuple[Converter, Any]]
    ) -> None:
        cls = op_class(module)
        reason = ""
        for converter, plugin in asked:
            if not converter.fits(module, cls):
                continue
            made = built(converter, module)
            if isinstance(made, Conversion) and (skipped := self._skipped(name, made)):
                made = f"{skipped} is to be left alone, and its chain would stand for it"
            if isinstance(made, Conversion):
                made = self._checked(module, made)
            if isinstance(made, Conversion):
                ops = tuple(op_class(op).__name__ for op in made.chain)
                row = Converted(name, cls.__name__, ops, converter.name, plugin and plugin[0])
                self.made[module], self.by[module] = made, (converter, plugin)
                self.converted.append(row)
                return
            reason = reason or made
        containers = nn.ModuleList, nn.ModuleDict
        has_children = next(module.children(), None) is not None
        if reason and has_children and not isinstance(module, containers):
            self.left.append(Left(name, cls.__name__, reason))


def converters() -> list[tuple[Converter, tuple[str, str] | None]]:
    """The converters in force, in the order in which they are asked, and whose each is."""
    found: list[tuple[Converter, tuple[str, str] | None]] = [
        (converter, (record.distribution, record.version))
        for record in manager.active(current.selection)
        for converter in manager.ask(record, "opfuse_converters", Converter, each=True) or ()
    ]
    found += [(converter, None) for converter in CORE]
    return sorted(found, key=lambda pair: -pair[0].priority)


def _matching(names: Iterable[str], patterns: Any, what: str) -> list[str]:
    """The patterns, each of which matches a name.

    Raises:
        ValueError: One does not.
        TypeError: One is not a string.
    """
    several = isinstance(patterns, (list, tuple, set, frozenset))
    given = [*patterns] if several else [patterns] if patterns is not None else []
    for pattern in given:
        if not isinstance(pattern, str):
            raise TypeError(f"opfuse.convert({what}=...) expected dotted names, got {pattern!r}")
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            raise ValueError(
                f"opfuse.convert({what}={pattern!r}) matches no module of the model: its names are "
                f"those of model.named_modules()"
            )
    return given


def _is_wanted(name: str, only: Any, wanted: Sequence[str], unwanted: Sequence[str]) -> bool:
    parts = name.split(".")
    names = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]

    def matches(pattern: str) -> bool:
        return any(fnmatch.fnmatchcase(each, pattern) for each in names)

    return (only is None or any(map(matches, wanted))) and not any(map(matches, unwanted))


def converted(model: nn.Module) -> dict[str, str]:
    """The converted modules of a model by dotted name.

    Args:
        model: The model.

    Returns:
        For each, a sentence that says why its own forward ran at its latest call; ``""`` if its
        chain ran, or it was not called. Empty: nothing is converted.
    """
    return {name: replaced.fallback for name, _, replaced in replaced_forwards(model)}


def revert(model: nn.Module) -> nn.Module:
    """Remove the chains from the modules of a model, in place.

    Only the layer that :func:`convert` put on their classes goes; one that torch put around it
    since, such as FSDP's, stays.

    Args:
        model: The model.

    Returns:
        The model.

    Raises:
        RuntimeError: Somebody derived a class from a converted module's that cannot be derived
            anew. Nothing is reverted then.
    """
    found = [module for module in model.modules() if layer_in(type(module)) is not None]
    classes = [without_layer(type(module)) for module in found]
    for module, cls in zip(found, classes, strict=True):
        module.__class__ = cls
        vars(module).pop(KEPT_AS, None)
    return model


CORE = [Converter(lambda module: True, lambda module, env: by_reading(module), ORDINARY, -100)]
