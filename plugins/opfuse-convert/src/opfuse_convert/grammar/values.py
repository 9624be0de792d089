"""Representations of values while a function is read, other than nodes and plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import fx, nn

from .reads import MISSING


class Held(NamedTuple):
    """A module, and its dotted name below the one whose function is read."""

    module: nn.Module
    path: str

    def child(self, name: str) -> Held:
        """One of its children."""
        return Held(self.module._modules[name], f"{self.path}.{name}".lstrip("."))  # type: ignore[arg-type]


class Mode(NamedTuple):
    """The mode of a module, training or evaluation, whichever it is."""

    of: Held


class DeviceType(NamedTuple):
    """The type of the device of a value, such as ``"cuda"``; it may only be compared."""

    of: fx.Node


class DeviceTest(NamedTuple):
    """A comparison of the type of the device of a value.

    Attributes:
        of: The value.
        names: The types that it is compared with.
        is_one: Whether it is one of them.
    """

    of: fx.Node
    names: tuple[Any, ...]
    is_one: bool


class Parts(NamedTuple):
    """The items of a value, however many there are."""

    of: fx.Node


class Thing(NamedTuple):
    """Any other object; its attributes may be read."""

    value: Any
    what: str


class Bound(NamedTuple):
    """A ``functools.partial``."""

    function: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]


class Callee(NamedTuple):
    """A function, or a method of a value.

    Attributes:
        function: The function; of a tensor the name of its method.
        own: The owner of the method; :data:`MISSING`: it is a function.
    """

    function: Any
    own: Any = MISSING
