"""``opfuse.convert``: chains for the modules of a model, in place."""

from __future__ import annotations

import contextlib
import fnmatch
import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling

from ..converter import Conversion, Converter
from ..environment import Environment
from ..fusible import FusibleOperation
from ..overrides import BESIDE, op_class
from ..plugins import manager
from ..prepare import prepare
from ..sequential import Sequential
from ..settings import current
from . import building, encoder
from .choosing import Choice, GaveWay, Kind, fits, is_faster_in_graph, is_known_in_graphs, title_of
from .guard import Guard, still, unreadable
from .layers import layer_in, layered, original_class, without_layer
from .report import ConversionReport, Converted, Left, measured
from .sharded import gathered
from .tracing import kind_of
from .verifying import compare


class Standing:
    """What stands for one module's forward, and whether it may.

    Attributes:
        chain: The chain; None in a copy until its first call.
        fallback: Why the module's own forward ran at the latest call; ``""``: the chain did.
        off: Whether the module's own forward runs, whatever else.
        choice: Which of them it is where both can run.
    """

    off = False
    _title = ""

    def __init__(self, converter: Converter, plugin: Any, conversion: Conversion | None) -> None:
        self._converter, self._plugin, self._conversion = converter, plugin, conversion
        self._guard: Guard | None = None
        self.choice, self._gave_way = Choice(converter.name, plugin), GaveWay()
        self.fallback = ""

    @property
    def chain(self) -> nn.Sequential | None:
        """The chain."""
        return None if self._conversion is None else self._conversion.chain

    @property
    def is_out_of_date(self) -> bool:
        """Whether the module has changed since, so that its own forward runs."""
        return self._guard is not None and bool(self._guard.why_not())

    def again(self) -> Standing:
        """The same for a copy of the module, made when it is called first."""
        return Standing(self._converter, self._plugin, None)

    def seal(self, module: nn.Module) -> None:
        """From now on, what the module is like must not change."""
        assert self._conversion is not None
        self._guard = Guard(module, self._conversion.reads, self._conversion.constants)
        self._title = title_of(self._converter.name, module)

    def call(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """The module's forward by way of the chain, or NotImplemented."""
        if self.off or (self._guard is None and not self._made(module)):
            return NotImplemented
        assert self._guard is not None and self._conversion is not None
        if self._guard.module is not module:  # a replica of it, with other parameters
            return NotImplemented
        call = module, self._guard, (*args, *kwargs.values())
        if not is_dynamo_compiling() and (why := self._gave_way.why(*call)):
            self.fallback = why
            return NotImplemented
        if why := self._guard.why_not():
            self._say(why)
            return NotImplemented
        self._say("")
        said: list[str] = []  # by this thread
        run = functools.partial(self._run, module, said)
        result = self._conversion.call(module, run, *args, **kwargs)
        if result is NotImplemented:
            if not is_dynamo_compiling() and self._found_another(module):
                return self.call(module, args, kwargs)
            why = getattr(self._conversion.call, "why", "")
            self._say(why or "it was called in a way that the chain does not take")
        elif any(said) and getattr(self._conversion.call, "as_written", False):
            self._gave_way.note(said[-1], *call)
        return result

    def _say(self, why: str) -> None:
        """Note why the module's own forward runs; traces are to have no side effects."""
        if not is_dynamo_compiling():
            self.fallback = why

    def _found_another(self, module: nn.Module) -> bool:
        """Whether there is a chain for the way in which the module was called, from now on."""
        otherwise = getattr(self._conversion and self._conversion.call, "otherwise", None)
        made = otherwise(module) if otherwise is not None else ""
        made = made if isinstance(made, str) else checked(module, made, made.probed)
        if isinstance(made, str):
            return False
        self._conversion, self.choice = made, Choice(self._converter.name, self._plugin)
        self.seal(module)
        return True

    def _run(self, module: nn.Module, said: list[str], x: Any, *extras: Any) -> Any:
        """The chain, or the module's own operations in its place; says why these."""
        made: Any = self._conversion
        if made.separate is not None:
            assert self._guard is not None
            if is_dynamo_compiling():
                why = self.why_not_in_graph(module, x, *extras)
            else:
                why = self.choice.refusal(module, self._guard, made.chain, x, *extras)
                said.append(why)
            self._say(why)
            if (recorder := current.recorder) is not None:
                recorder.stands(self, module, (x, *extras))
            if why:
                return made.separate(module, x, *extras)
        return made.chain(x, *extras)

    def in_graphs(self) -> bool:
        """Whether graphs of ``torch.compile`` may have the chain: it is asked for, or measured."""
        if _chains_in_graphs(current.values):
            return True
        # under a recipe nothing was measured, and what is exported runs elsewhere
        plain = current.values[2] is None and not torch.compiler.is_exporting()
        plain = plain and not torch._C._are_functorch_transforms_active()
        return plain and is_known_in_graphs(self._title, manager.generation)

    def why_not_in_graph(self, module: nn.Module, x: Any, *extras: Any) -> str:
        """Why graphs of ``torch.compile`` do not have the chain for an input, or ``""``."""
        made: Any = self._conversion
        why = fits(self._guard.dtype, made.chain, x, *extras)  # type: ignore[union-attr]
        if why or _chains_in_graphs(current.values):
            return why
        given = self.choice, module, made.chain, manager.generation, *Kind.of(x, True)
        return "" if is_faster_in_graph(*given) else "no chain was measured to be faster"

    def both(self) -> tuple[Any, Any]:
        """The chain, and ``separate(module, x, *extras)``: to be compared."""
        made: Any = self._conversion
        return made.chain, made.separate

    def parameters(self, module: nn.Module) -> list[nn.Parameter]:
        """Those of the module that the chain can read."""
        assert self._conversion is not None
        parts = [module.get_submodule(name) for name in self._conversion.reads if name]
        own = module.parameters(recurse=False) if "" in self._conversion.reads else ()
        return [*dict.fromkeys([*own, *[p for part in parts for p in part.parameters()]])]

    def _made(self, module: nn.Module) -> bool:
        """Make the chain of a copy; whether that is possible."""
        if self._conversion is None:
            with torch.inference_mode(False):
                made = _built(self._converter, module)
            if isinstance(made, str):
                self.fallback = made
                return False
            self._conversion = made
        self.seal(module)
        return True


def convert(
    model: nn.Module,
    *inputs: Any,
    only: str | Sequence[str] | None = None,
    skip: str | Sequence[str] = (),
    verify: bool | None = None,
) -> ConversionReport:
    """Let chains stand for the modules of a model that opfuse knows how to compute, in place.

    Modules, Parameters, state dict and classes by ``isinstance`` stay what they are: only the class
    of a converted module changes, to a subclass of the same name whose ``forward`` runs the chain.
    It looks at every call whether the module is still as it was: the same parts, without hooks,
    with parameters that the chain can read. Else the module's own ``forward`` runs, and
    :func:`converted` says why. So it does under ``torch.export`` and ``torch.fx``, and under
    ``torch.compile``, unless ``opfuse.tune(..., compiled=True)`` found the chain to be faster.

    What a module computes is read out of its ``forward`` by ``torch.fx``; its class need not be
    known. Activations and norms of unknown classes are recognised by what they give for numbers of
    all magnitudes. Plugins bring converters for what tracing does not reach (hook
    ``opfuse_converters``).

    Args:
        model: The model, or any part of one.
        *inputs: Its inputs; a dict as the last one has those by name. (For a model that takes a
            dict itself give an empty one behind it.) If there are some, the report says what is
            fused, and how many bytes the forward keeps for the backward, before and after.
        only: Convert modules whose dotted names match one of these patterns, and what is below
            them.
        skip: Leave those alone, likewise.
        verify: Compare each chain with the module it is for, output and gradients, on random
            numbers. Default: where something was recognised by its values.

    Returns:
        The report: ``print`` it, or call ``to_dict()``.

    Raises:
        TypeError: ``model`` is no module.
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
        vars(module)[BESIDE] = Standing(*found.by[module], conversion)
    for module in found.made:
        vars(module)[BESIDE].seal(module)
    prepare(model)
    after = measured(model, inputs) if inputs else None
    return ConversionReport(tuple(found.converted), tuple(found.left), before, after)


class Candidates:
    """What could be converted in a model, and what not; nothing of it is changed.

    Args:
        model: As for :func:`convert`, and all that follow.
        only: See ``model``.
        skip: See ``model``.
        verify: See ``model``.

    Attributes:
        made: The conversions by module.
        by: The converter of each, and the distribution and version of its plugin.
        converted: A row of the report for each.
        left: A row for each of the others that somebody may wonder about.
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
        with contextlib.closing(gathered(model)) as found:
            for name, module in found:
                if any(name.startswith(f"{above}.") for above in inside):
                    continue
                if isinstance(module, (FusibleOperation, Sequential)):
                    inside.add(name)
                elif _is_wanted(name, only, wanted, unwanted):
                    standing = standing_in(module)
                    if standing is None or standing.is_out_of_date:
                        self._look_at(name, module, asked)
        # what is inside of a chain needs no row
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
        alike = _alike(module, made)
        verify = made.probed if self._verify is None else self._verify
        found = checked(module, made, verify and alike not in self._compared)
        if isinstance(found, Conversion) and verify:
            self._compared.add(alike)
        return found

    def _look_at(
        self, name: str, module: nn.Module, asked: Sequence[tuple[Converter, Any]]
    ) -> None:
        cls = op_class(module)
        reason = ""
        for converter, plugin in asked:
            if not converter.fits(module, cls):
                continue
            made = _built(converter, module)
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


def checked(module: nn.Module, made: Conversion, verify: bool) -> Conversion | str:
    """A conversion, or a sentence that says why its chain cannot stand for a module.

    Args:
        module: The module.
        made: The conversion.
        verify: Whether to compare values and gradients.
    """
    if why := unreadable(module, made.reads):
        return why
    try:
        why = _compared(module, made) if verify else ""
    except Exception as error:
        text = " ".join(str(error).split())[:160]
        why = f"comparing raised {type(error).__name__}: {text}"
    return f"the chain differs from the module: {why}" if why else made


def _alike(module: nn.Module, made: Conversion) -> Any:
    """What two conversions have in common of which one need be compared."""
    everyone = [module, *[module.get_submodule(name) for name in made.reads if name]]
    values = [sorted(_numbers_of(each).items()) for each in everyone]
    shapes = tuple((name, p.shape, p.dtype, p.device) for name, p in module.named_parameters())
    ops = tuple(op_class(op) for op in made.chain)
    return op_class(module), ops, tuple(made.reads), repr(values), shapes


def _numbers_of(module: nn.Module) -> dict[str, str]:
    """The plain attributes of a module, private ones too, as text."""
    return {k: repr(v) for k, v in vars(module).items() if isinstance(kind_of(v), tuple)}


def _compared(module: nn.Module, made: Conversion) -> str:
    """How a chain differs from the module; see :func:`compare`."""
    if made.separate is None:
        forward = original_class(type(module)).forward
        own = functools.partial(forward, module)
        return compare(module, made.chain, own, functools.partial(made.call, module, made.chain))
    own = functools.partial(made.separate, module)
    ops: Any = made.chain
    kinds = [
        op.extra_input_dtypes[k] if op.extra_input_dtypes else ""
        for op in ops
        for k, channel in enumerate(op.extra_input_channels)
        if channel is None
    ]
    return compare(module, made.chain, own, made.chain, kinds)


def _built(converter: Converter, module: nn.Module) -> Conversion | str:
    """What a converter makes of a module."""
    if why := _unfit(type(module)):
        return why
    param = next(module.parameters(), None)
    device, dtype = (
        (torch.device("cpu"), torch.get_default_dtype())
        if param is None
        else (param.device, param.dtype)
    )
    env = Environment(device, None, dtype, training=module.training, options=dict(current.options))
    try:
        with still(module):
            made = converter.build(module, env)
    except Exception as error:
        text = " ".join(str(error).split())[:160]
        return f"{converter.name} raised {type(error).__name__}: {text}"
    return made


def _unfit(cls: type) -> str:
    """Why no subclass of a class may be made, or ``""``."""
    if issubclass(cls, torch.jit.ScriptModule):
        return "it is compiled by torch.jit"
    if issubclass(cls, nn.modules.lazy.LazyModuleMixin):
        return "its parameters are made at the first call"
    for base in cls.__mro__:
        known = base.__module__.partition(".")[0] in ("torch", "transformers", "builtins", "typing")
        if "__init_subclass__" in vars(base) and not known:
            return f"{base.__name__}.__init_subclass__ would see the class that a conversion makes"
    return ""


def converters() -> list[tuple[Converter, tuple[str, str] | None]]:
    """The converters in force, in the order in which they are asked, and whose each is."""
    found: list[tuple[Converter, tuple[str, str] | None]] = [
        (converter, (record.distribution, record.version))
        for record in manager.active(current.selection)
        for converter in record.converters
    ]
    found += [(converter, None) for converter in CORE]
    return sorted(found, key=lambda pair: -pair[0].priority)


def _matching(names: Iterable[str], patterns: Any, what: str) -> list[str]:
    """The patterns, each of which matches a name.

    Raises:
        ValueError: One does not.
        TypeError: One is no string.
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


def standing_in(module: nn.Module) -> Standing | None:
    """What stands for a module's forward, or None."""
    return vars(module).get(BESIDE)


def converted(model: nn.Module) -> dict[str, str]:
    """The converted modules of a model by dotted name.

    Args:
        model: The model.

    Returns:
        For each why its own forward ran at its latest call, as a sentence; ``""`` if its chain ran,
        or it was not called. Empty: nothing is converted.
    """
    return {
        name: vars(module)[BESIDE].fallback
        for name, module in model.named_modules()
        if BESIDE in vars(module)
    }


def revert(model: nn.Module) -> nn.Module:
    """Take the chains off the modules of a model again, in place.

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
        vars(module).pop(BESIDE, None)
    return model


def _by_tracing(module: nn.Module, env: Environment) -> Conversion | str:
    if next(module.children(), None) is None:
        return building.as_leaf(module)
    return building.by_tracing(module)


CORE = [
    Converter(nn.TransformerEncoderLayer, encoder.build, "transformer encoder layer", -90),
    Converter(lambda module: True, _by_tracing, "what its forward computes", -100),
]


def _chains_in_graphs(values: Any) -> bool:
    """Whether the user wants chains in graphs of ``torch.compile``."""
    return ("chains_under_compile", True) in values[0]
