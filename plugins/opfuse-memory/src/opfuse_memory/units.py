"""The parts of a model about which something can be done, and what they are called with."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from opfuse.core.engine.checks import tensors_in
from opfuse.core.fusible import FusibleOperation
from opfuse.core.introspection import hook_kinds, op_class
from opfuse.core.sequential import Sequential
from opfuse.report.isolation import Traces, is_equal
from opfuse.report.replaced_forward import KEPT_AS, MEMORY, replaced_forward

from .actions import AsItIsError, put_on, take_off, take_tensors

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_OWN = (FusibleOperation, Sequential)
_NOT_HELD = {*vars(nn.Module()), KEPT_AS, MEMORY}
_PLACES = ("idx", "index", "layer_id", "number")  # in names of attributes that tell layers apart


@dataclasses.dataclass(frozen=True, eq=False)
class Place:
    """Something that a forward calls: a module, or the chain in its converted forward.

    Attributes:
        path: The dotted name of the module.
        module: The module.
        is_chain: Whether it is the chain.
    """

    path: str
    module: nn.Module
    is_chain: bool = False

    @property
    def name(self) -> str:
        """The class of the module, as its author wrote it."""
        return f"{'chain of ' if self.is_chain else ''}{op_class(self.module).__name__}"

    def run(self, args: Sequence[Any], kwargs: Any) -> Any:
        """Call it, as the module's :data:`MEMORY` says."""
        if not self.is_chain:
            return self.module(*args, **kwargs)
        memory, replaced = vars(self.module).get(MEMORY), replaced_forward(self.module)
        chain: Any = replaced.chain  # type: ignore[union-attr]
        return (
            chain(*args) if memory is None else memory.call_chain(self.module, chain, chain, args)
        )


@dataclasses.dataclass(eq=False)
class Unit:
    """A part of a model that is chosen for by itself, usually a layer.

    Attributes:
        place: Where it is.
        args: What it was called with, without history; empty if an earlier unit is of its kind.
        kwargs: The same by name.
        parts: What it calls, and can compute again by itself.
        kind: The same for units that are alike.
        once: Why it must not run again in a backward, as a sentence, or ``""``.
        shared: Tensors of its arguments that other units are called with, too.
    """

    place: Place
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    parts: tuple[Place, ...] = ()
    kind: str = ""
    once: str = ""
    shared: list[Tensor] = dataclasses.field(default_factory=list)

    def run(self) -> Any:
        """Call it with that."""
        return self.place.run(self.args, self.kwargs)


def units_of(model: nn.Module, run: Callable[[], Any]) -> list[Unit]:
    """Run a forward once, and find the units that it calls once, in the order of their calls.

    Args:
        model: The model.
        run: Its forward.
    """
    places = list(_places(model, ""))
    heard = _Heard()
    with heard.at([place for unit, parts in places for place in (unit, *parts)]):
        run()
    units = []
    for place, parts in {_key(place): (place, parts) for place, parts in places}.values():
        calls = heard.calls.get(_key(place), [])
        if len(calls) == 1:
            inner = tuple(part for part in parts if len(heard.calls.get(_key(part), ())) == 1)
            number, args, kwargs, once = calls[0]
            units.append((number, Unit(place, args, kwargs, inner, once=once)))
    found = [unit for _, unit in sorted(units, key=lambda pair: pair[0])]
    _share(found)
    known: dict[str, str] = {}
    for unit in found:
        unit.kind = _kind(unit)
        if unit.kind in known:  # only the first of a kind is run by itself
            unit.args, unit.kwargs, unit.shared = (), {}, []
        else:
            known[unit.kind] = unit.once or _why_other_numbers(unit)
        unit.once = unit.once or known[unit.kind]
    return found


def _why_other_numbers(unit: Unit) -> str:
    """Why a second run would not repeat the first one, as a sentence, or ``""``.

    Both begin with the same state of PyTorch's default generators, as a checkpoint does it.
    """
    results = []
    for _ in range(2):
        with torch.random.fork_rng(), contextlib.suppress(Exception):  # measuring tells it
            results.append([*tensors_in(unit.run())])
    same = len(results) == 2 and len(results[0]) == len(results[1])
    if same and not all(map(is_equal, *results)):
        return "its forward gives other numbers when it runs again"
    return ""


def _places(module: nn.Module, path: str) -> Iterator[tuple[Place, list[Place]]]:
    """The places of units below a module, each with those of its parts."""
    lists = [m for m in module.modules() if isinstance(m, _LISTS) and not isinstance(m, _OWN)]
    if isinstance(module, _OWN) or not lists:
        yield Place(path, module), _parts(module, path)
        return
    if replaced_forward(module) is not None:
        yield Place(path, module, is_chain=True), []
    for name, child in module.named_children():
        below = f"{path}.{name}".lstrip(".")
        if isinstance(module, _LISTS):
            yield Place(below, child), _parts(child, below)
        else:
            yield from _places(child, below)


def _parts(module: nn.Module, path: str) -> list[Place]:
    """What a unit calls: its children, those in lists too, and its own chain."""
    if isinstance(module, _OWN):
        return []
    found = [] if replaced_forward(module) is None else [Place(path, module, is_chain=True)]
    for name, child in module.named_children():
        below = f"{path}.{name}".lstrip(".")
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            found += [part for part in _parts(child, below) if not part.is_chain]
        else:
            found.append(Place(below, child))
    return found


def _key(place: Place) -> tuple[nn.Module, bool]:
    return place.module, place.is_chain


class _Heard:
    """The calls of places; a module has it in place of a :class:`ModuleMemory` meanwhile."""

    def __init__(self) -> None:
        self.calls: dict[Any, list[tuple[int, Any, Any, str]]] = {}
        self._number = 0

    @contextlib.contextmanager
    def at(self, places: Sequence[Place]) -> Iterator[None]:
        """A block in which it hears the modules of places."""
        modules = dict.fromkeys(place.module for place in places)
        modules = {m: None for m in modules if not isinstance(m, torch.jit.ScriptModule)}
        try:
            for module in modules:
                put_on(module, self)
            yield
        finally:
            for module in modules:
                take_off(module)

    def call(self, module: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        """The module's forward."""
        run = functools.partial(forward, module, *args, **kwargs)
        return self._hear((module, False), args, kwargs, run, module)

    def call_chain(self, module: nn.Module, chain: Any, run: Any, given: Any) -> Any:
        """The chain of the module's forward."""
        return self._hear((module, True), given, {}, functools.partial(run, *given), chain)

    def _hear(self, key: Any, args: Any, kwargs: Any, run: Callable[[], Any], of: Any) -> Any:
        """Keep a call and make it."""
        module, number = key[0], self._number
        self._number += 1
        given = _cut(args), _cut(kwargs)
        change = Traces(module).begin()
        result = run()
        changed = change()
        once = f"its forward changes {changed}" if changed else why_once(of, args, kwargs)
        self.calls.setdefault(key, []).append((number, *given, once))
        return result


def why_once(module: nn.Module, args: Any, kwargs: Any) -> str:
    """Why a forward must run only once, as a sentence, or ``""``."""
    for part in module.modules():
        if isinstance(part, _NormBase) and part.track_running_stats:
            return f"its {type(part).__name__} tracks statistics"
    try:
        take_tensors([], (args, kwargs))
    except AsItIsError as error:
        return str(error)
    return ""


def _cut(value: Any) -> Any:
    """Arguments without the history of their tensors."""
    if isinstance(value, Tensor):
        return value.detach().requires_grad_(value.requires_grad)
    if type(value) in (tuple, list):
        return type(value)([_cut(each) for each in value])
    return {k: _cut(each) for k, each in value.items()} if type(value) is dict else value


def _share(units: Sequence[Unit]) -> None:
    """Find the tensors that several units are called with: none of them keeps them alone."""
    by: dict[int, set[int]] = {}
    for number, unit in enumerate(units):
        for tensor in tensors_in((unit.args, unit.kwargs)):
            by.setdefault(tensor.untyped_storage()._cdata, set()).add(number)
    for unit in units:
        for tensor in tensors_in((unit.args, unit.kwargs)):
            if len(by[tensor.untyped_storage()._cdata]) > 1:
                unit.shared.append(tensor)


def _kind(unit: Unit) -> str:
    """A hash of what the costs of a unit depend on."""
    lines = [str(unit.place.is_chain), _of_value((unit.args, unit.kwargs)), unit.once]
    lines += [_of_value(unit.shared), *[f"{p.name}{p.is_chain}" for p in unit.parts]]
    for name, module in unit.place.module.named_modules():
        is_own = isinstance(module, _OWN)
        held = {
            key: value
            for key, value in vars(module).items()
            if not (key in _NOT_HELD or key.endswith(_PLACES) or (is_own and key[0] == "_"))
        }
        replaced = replaced_forward(module)
        how = hook_kinds(module), replaced and (replaced.off, replaced.fallback)
        lines.append(f"{name} {op_class(module)} {_of_value(held)} {module.extra_repr()} {how}")
        tensors = (*module._parameters.items(), *module._buffers.items())
        lines += [f"{key} {_of_value(tensor)}" for key, tensor in tensors]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _of_value(value: Any, depth: int = 4) -> str:
    """What a value is, in words: the same for two that are alike; if that is not known, its own."""
    if isinstance(value, Tensor):
        where = value.device.type, value.dtype, value.requires_grad
        return f"{tuple(value.shape)} {value.is_contiguous() or value.stride()} {where}"
    if isinstance(value, (dict, set, frozenset)):
        value = [*value.items()] if isinstance(value, dict) else sorted(map(str, value))
    if isinstance(value, (tuple, list)):
        return f"({', '.join(_of_value(each, depth) for each in value)})"
    name = getattr(value, "__qualname__", "<" if callable(value) else type(value).__qualname__)
    if "<" not in name and depth and (callable(value) or hasattr(value, "__dict__")):
        held = {} if callable(value) else vars(value)
        inside = {k: v for k, v in held.items() if not k.endswith("_hash")}  # of this process
        return f"{getattr(value, '__module__', '')} {name} {_of_value(inside, depth - 1)}"
    return repr(value)  # what a module has inside; which one a lambda or a partial is
