"""``opfuse.convert``: chains for the modules of a model, in place."""

from __future__ import annotations

import contextlib
import fnmatch
from collections.abc import Callable, Generator, Sequence
from typing import Any

from torch import nn

from opfuse.core.fusible import FusibleOperation
from opfuse.core.introspection import op_class
from opfuse.core.overwriting import without_modes
from opfuse.core.plugins import manager
from opfuse.core.sequential import Sequential
from opfuse.core.settings import current
from opfuse.report.assign_names import assign_names
from opfuse.report.isolation import sharded_classes
from opfuse.report.replaced_forward import KEPT_AS, MEMORY, replaced_forward, replaced_forwards

from .building import ORDINARY, by_reading
from .converted_forward import ConvertedForward
from .converter import Conversion, Converter
from .guard import calm
from .holder import Held, as_module
from .layers import layer_in, layered, put_before, set_class, take_away, warn_lost, without_layer
from .making import alike, built, checked
from .parallel import with_own
from .probing import remembering
from .report import ConversionReport, Converted, Left, measured


@without_modes()
def convert(
    model: nn.Module | Any,
    *inputs: Any,
    only: str | Sequence[str] | None = None,
    skip: str | Sequence[str] = (),
    verify: bool | None = None,
) -> ConversionReport:
    """Replace the forwards of modules that opfuse can compute by chains, in place.

    Modules, Parameters, the state dict and ``isinstance`` results stay the same: only the class of
    a converted module changes, to a subclass of the same name whose ``forward`` runs the chain, and
    what is set on that is set on the original. At every call it checks that the module is
    unchanged: the same parts, without hooks, with parameters that the chain can read. Otherwise the
    module's own ``forward`` runs, and :func:`converted` says why. The own ``forward`` also runs
    under ``torch.export`` and ``torch.fx``, and under ``torch.compile``, unless
    ``opfuse.tune(..., compiled=True)`` found the chain to be faster.

    The computation of a module is read from the source of its ``forward``; its class may be
    unknown. A chain replaces only the statements that it covers; the rest is the author's own code.
    Activations and norms of unknown classes are recognised by their results for numbers of all
    magnitudes. Plugins add converters for code that cannot be read (hook ``opfuse_converters``).

    Args:
        model: The model, or any part of one; or an object such as a trainer, for all modules that
            it has as attributes: their names begin with those of the attributes.
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
        TypeError: ``model`` is not a module and has none, or has some and there are inputs.
        ValueError: A pattern matches no module.
    """
    model = as_module(model, "opfuse.convert")
    if inputs and isinstance(model, Held):
        raise TypeError(f"opfuse.convert({type(model).__name__}) takes no inputs: convert a module")
    before = measured(model, inputs) if inputs else None
    found = Candidates(model, only, skip, verify)
    for module, replaced in found.made.items():
        cls: Any = type(module)
        if layer_in(cls) is None:
            set_class(module, layered(cls))
        vars(module)[KEPT_AS] = replaced
        if replaced.is_inside:
            with_own(module, type(module))
        if replaced.function is not None:
            put_before(module, replaced.function)
    for module, replaced in found.made.items():
        replaced.seal(module)
    assign_names(model)
    for replaced in found.made.values():
        replaced.share()
    after = measured(model, inputs) if inputs else None
    return ConversionReport(tuple(found.converted), tuple(found.left), before, after)


def count_convertible(model: nn.Module) -> int:
    """Count the modules of a model that :func:`convert` could convert; nothing is changed."""
    return len(Candidates(model).made)


class Candidates:
    """The modules of a model that could be converted, and the others; the model is not changed.

    Args:
        model: The model.
        only: As for :func:`convert`.
        skip: As for :func:`convert`.
        verify: As for :func:`convert`.

    Attributes:
        made: The new forwards by module.
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
        self.made: dict[nn.Module, ConvertedForward] = {}
        self.converted: list[Converted] = []
        self.left: list[Left] = []
        self._verify = verify
        self._compared: set[Any] = set()
        names = [name for name, _ in model.named_modules()]
        is_wanted = _matcher(names, only, "only")
        self._is_unwanted = _matcher(names, skip, "skip")
        asked = converters()
        own: set[str] = set()  # opfuse's own modules
        self._read: set[str] = set()  # the modules that chains replace
        with calm(model), remembering(), contextlib.closing(gathered(model)) as found:
            for name, module in found:
                if any(name.startswith(f"{above}.") for above in own):
                    continue
                if isinstance(module, (FusibleOperation, Sequential)):
                    own.add(name)
                elif only is None or is_wanted(name):
                    self._look_at(name, module, asked)
        self.left = [row for row in self.left if row.path not in self._read]

    def _look_at(
        self, name: str, module: nn.Module, asked: Sequence[tuple[Converter, Any]]
    ) -> None:
        replaced: Any = replaced_forward(module)
        is_done = replaced is not None and not replaced.is_out_of_date
        if is_done or module in self.made or self._is_unwanted(name):
            return
        cls = op_class(module)
        reason, by_plugin = "", False
        for converter, plugin in asked:
            if not converter.fits(module, cls):
                continue
            made = self._built(name, module, converter)
            if isinstance(made, Conversion):
                ops = tuple(
                    op_class(op).__name__ for each in (made.chain, *made.also) for op in each
                )
                row = Converted(name, cls.__name__, ops, converter.name, plugin and plugin[0])
                self.converted.append(row)
                self.made[module] = ConvertedForward(converter, plugin, made)
                self._read.update(_parts(name, made))
                for part, other in made.parts.items():
                    path = f"{name}.{part}".lstrip(".")
                    self._look_at(path, module.get_submodule(part), [(other, plugin)])
                return
            reason, by_plugin = reason or made, by_plugin or converter.name != ORDINARY
        containers = nn.ModuleList, nn.ModuleDict
        has_children = next(module.children(), None) is not None
        if by_plugin or (reason and has_children and not isinstance(module, containers)):
            self.left.append(Left(name, cls.__name__, reason))

    def _built(self, name: str, module: nn.Module, converter: Converter) -> Conversion | str:
        """The conversion of a module by a converter, or a sentence that says why there is none."""
        made = built(converter, module)
        if isinstance(made, str):
            return made
        for part in filter(self._is_unwanted, _parts(name, made)):
            return f"{part} is to be left alone, and its chain would replace it"
        kind = alike(module, made)
        verify = made.probed if self._verify is None else self._verify
        found = checked(module, made, verify and kind not in self._compared)
        if isinstance(found, Conversion) and verify:
            self._compared.add(kind)
        return found


def _parts(name: str, made: Conversion) -> list[str]:
    """The dotted names of the modules that the chain of a module replaces."""
    return [f"{name}.{read}".lstrip(".") for read in made.reads if read]


def converters() -> list[tuple[Converter, tuple[str, str] | None]]:
    """The converters in the order in which they are asked, each with its plugin and version."""
    found: list[tuple[Converter, tuple[str, str] | None]] = [
        (converter, (record.distribution, record.version))
        for record in manager.active(current.selection)
        for converter in manager.ask(record, "opfuse_converters", Converter, each=True) or ()
    ]
    found.append((CORE, None))
    return sorted(found, key=lambda pair: -pair[0].priority)


def _matcher(names: Sequence[str], patterns: Any, what: str) -> Callable[[str], bool]:
    """A function that says whether a name, or one above it, matches one of some patterns.

    Raises:
        ValueError: A pattern matches none of the names.
        TypeError: A pattern is not a string.
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

    def matches(name: str) -> bool:
        parts = name.split(".")
        each = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
        return any(fnmatch.fnmatchcase(one, pattern) for one in each for pattern in given)

    return matches


def converted(model: nn.Module | Any) -> dict[str, str]:
    """The converted modules of a model by dotted name.

    Args:
        model: The model, or what else :func:`convert` takes.

    Returns:
        For each, a sentence that says why its own forward, or a part of it, ran at its latest call;
        ``""`` if its chains ran, or it was not called. Empty: nothing is converted.
    """
    model = as_module(model, "opfuse_convert.converted")
    return {name: replaced.reason for name, _, replaced in replaced_forwards(model)}


def revert(model: nn.Module | Any) -> Any:
    """Remove the chains from the modules of a model, in place.

    Only the layer that :func:`convert` put on their classes goes; one that torch put around it
    since, such as FSDP's, stays, and so does what :func:`opfuse.plan_memory` attached.

    Args:
        model: The model, or what else :func:`convert` takes.

    Returns:
        The model.

    Raises:
        RuntimeError: A class derived from that of a converted module cannot be derived again.
            Nothing is reverted then.
    """
    of = as_module(model, "opfuse_convert.revert")
    found = [module for module in of.modules() if layer_in(type(module)) is not None]
    classes = [
        type(module) if MEMORY in vars(module) else without_layer(type(module)) for module in found
    ]
    warn_lost(found, "opfuse.revert")
    for module, cls in zip(found, classes, strict=True):
        replaced: Any = vars(module).pop(KEPT_AS, None)
        if replaced is not None and replaced.is_inside and "forward" in vars(module):
            with_own(module, cls)
        if replaced is not None and replaced.function is not None:
            take_away(module, replaced.function)
        set_class(module, cls)
    return model


CORE = Converter(lambda module: True, lambda module, env: by_reading(module), ORDINARY, -100)


def gathered(model: nn.Module) -> Generator[tuple[str, nn.Module]]:
    """``model.named_modules()``, each module while the parameters around it are whole.

    The parameters of a module that ``fully_shard`` was applied to are gathered before it, and
    sharded again after all modules below it. So at most one module per level is whole at a time.
    This is a collective: all ranks must convert alike.
    """
    around: list[tuple[str, Any]] = []
    try:
        for name, module in model.named_modules():
            while around and not name.startswith(around[-1][0]):
                around.pop()[1].reshard()
            if isinstance(module, sharded_classes()):
                module.unshard()
                around.append((f"{name}." if name else "", module))
            yield name, module
    finally:
        for _, module in reversed(around):
            module.reshard()
