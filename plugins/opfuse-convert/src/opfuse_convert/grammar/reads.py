"""The places where a reading found its values, so that they can be checked again."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from .source import Unreadable
from .table import is_plain, is_same

MISSING: Any = type("Missing", (), {"__repr__": lambda self: "nothing"})()
"""Marks a missing value."""

_GETTERS = [cls.__getattribute__ for cls in (object, types.ModuleType, types.SimpleNamespace)]


class Place(NamedTuple):
    """A place where a value was looked up.

    Attributes:
        where: A dictionary, or an object with ``get``.
        name: The name in it.
        value: The value found; :data:`MISSING`: nothing.
        what: Its name in messages.
    """

    where: Any
    name: str
    value: Any
    what: str

    def __repr__(self) -> str:
        return f"Place({self.what})"

    @property
    def key(self) -> tuple[type, int, str]:
        """The key that equal places share."""
        of = self.where.of if isinstance(self.where, (Attributes, Keys)) else self.where
        return type(self.where), id(of), self.name

    @property
    def is_same(self) -> bool:
        """Return whether the same value is there now."""
        return is_same(self.where.get(self.name, MISSING), self.value)

    def change(self) -> str:
        """Describe a changed value, as a sentence; ``""``: it is the same."""
        now = self.where.get(self.name, MISSING)
        if is_same(now, self.value):
            return ""
        if is_plain(self.value) and is_plain(now):
            return f"{self.what} was {self.value!r} and is {now!r}"
        return f"{self.what} was replaced by {_shown(now)}"


def _shown(value: Any) -> str:
    """A value as messages show it."""
    if is_plain(value) or value is MISSING:
        return repr(value)
    cls, package = type(value), type(value).__module__.partition(".")[0]
    ours = package in ("torch", "builtins", "__main__")
    return cls.__name__ if ours else f"{cls.__name__} of {package}"


class Attributes:
    """The attributes of an object that has no dictionary, such as a function or a closure's cell.

    Attributes:
        get: ``get(name, default)`` is an attribute, or ``default``.
    """

    get: Callable[[str, Any], Any]

    def __init__(self, of: Any) -> None:
        self.of = of
        is_cell = isinstance(of, types.CellType)
        self.get = functools.partial(_content if is_cell else getattr, of)


def _content(cell: types.CellType, name: str, default: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return default


class Keys:
    """The order of a dictionary's keys, looked up like a value."""

    def __init__(self, of: Mapping[str, Any]) -> None:
        self.of = of

    def get(self, name: str, default: Any) -> tuple[str, ...]:
        """The keys in order, whatever the name."""
        return tuple(self.of)


def key_place(of: Mapping[str, Any], what: str) -> Place:
    """The place of the keys of a dictionary."""
    return Place(Keys(of), "keys", tuple(of), what)


@functools.lru_cache(maxsize=4096)
def _written(cls: type) -> Mapping[str, Any]:
    """The attributes of a class, always as the same object, so that equal places share a key."""
    return vars(cls)


def function_places(function: types.FunctionType) -> list[Place]:
    """The places of a function's code and defaults."""
    of, name = Attributes(function), function.__qualname__
    parts = {"__code__": "code", "__defaults__": "defaults", "__kwdefaults__": "defaults"}
    places = [
        Place(of, key, getattr(function, key), f"the {of_} of {name}") for key, of_ in parts.items()
    ]
    kwdefaults: Mapping[str, Any] = function.__kwdefaults__ or {}
    return places + [Place(kwdefaults, k, v, f"the default of {k}") for k, v in kwdefaults.items()]


def name_places(function: types.FunctionType, name: str) -> tuple[Any, list[Place]]:
    """The value of a name that is not local to a function, and where it was found.

    Returns:
        The value is :data:`MISSING` for a variable of an enclosing function that is not set yet.

    Raises:
        Unreadable: There is no such name.
    """
    free = function.__code__.co_freevars
    if name in free:
        of = Attributes((function.__closure__ or ())[free.index(name)])
        found = of.get("cell_contents", MISSING)
        return found, [Place(of, "cell_contents", found, name)]
    own: Any = function.__globals__
    if name in own:
        return own[name], [Place(own, name, own[name], name)]
    built_in: Any = own.get("__builtins__", {})
    built_in = vars(built_in) if isinstance(built_in, types.ModuleType) else built_in
    if name not in built_in:
        raise Unreadable(f"there is no {name}")
    found = built_in[name]
    return found, [Place(own, name, MISSING, name), Place(built_in, name, found, name)]


@functools.cache
def behind_places(function: types.FunctionType) -> list[Place]:
    """The places that a Python function of PyTorch depends on: its code and names of torch."""
    names = [name for name in function.__code__.co_names if name in vars(torch)]
    own = [Place(vars(torch), name, getattr(torch, name), f"torch.{name}") for name in names]
    return [*function_places(function), *own]


def class_places(cls: type, name: str, what: str) -> tuple[Any, list[Place]]:
    """The raw attribute of a class or its bases, or :data:`MISSING`, and where it was found."""
    places = []
    for base in cls.__mro__:
        found = vars(base).get(name, MISSING)
        places.append(Place(_written(base), name, found, what))
        if found is not MISSING:
            return found, places
    return MISSING, places


def is_property(value: Any) -> bool:
    """Whether an attribute of a class is a descriptor that computes a value."""
    plain = types.FunctionType, staticmethod, classmethod
    return value is not MISSING and not isinstance(value, plain) and hasattr(type(value), "__get__")


def attribute_places(
    owner: Any, name: str, what: str, cls: type | None = None
) -> tuple[Any, list[Place]]:
    """The attribute of an object, found without running any code, and its place.

    What a module has as parameter, buffer or child is found like an attribute.

    Args:
        owner: The object.
        name: The name of the attribute.
        what: Its name in messages.
        cls: The class of the object as its author wrote it; None: its type.

    Raises:
        Unreadable: It is missing, or reading it would run code.
    """
    cls = cls or type(owner)
    on_class, places = class_places(cls, name, what)
    if is_property(on_class):
        raise Unreadable(f"{what} is a property")
    getter, of_getter = class_places(cls, "__getattribute__", what)
    if getter not in _GETTERS:
        raise Unreadable(f"{cls.__name__} has a __getattribute__ of its own")
    own: Any = getattr(owner, "__dict__", {})
    there = own if hasattr(owner, "__dict__") else MISSING
    places += [*of_getter, Place(Attributes(owner), "__dict__", there, what)]
    if not isinstance(owner, nn.Module):
        places.append(Place(Attributes(owner), "__class__", cls, what))
    places.append(Place(own, name, own.get(name, MISSING), what))
    if name in own:
        return own[name], places
    if on_class is not MISSING:
        return on_class, places
    if isinstance(owner, nn.Module):
        fallback, of_fallback = class_places(cls, "__getattr__", what)
        if fallback is not nn.Module.__getattr__:
            raise Unreadable(f"{cls.__name__} has a __getattr__ of its own")
        places += of_fallback
        for kind in ("_parameters", "_buffers", "_modules"):
            held = own.get(kind, {})
            places.append(Place(own, kind, held, what))
            places.append(Place(held, name, held.get(name, MISSING), what))
            if name in held:
                return held[name], places
    raise Unreadable(f"{what} is not found where attributes are kept")


def parameters_of(function: Any) -> list[inspect.Parameter]:
    """The parameters of a function."""
    return list(inspect.signature(function, follow_wrapped=False).parameters.values())
