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
    """Whether a module is in training mode, whichever it is."""

    of: Held


class Parts(NamedTuple):
    """The content of a value whose length does not matter."""

    of: fx.Node


class Thing(NamedTuple):
    """An object that is none of the others; its attributes may be read."""

    value: Any
    what: str


class Bound(NamedTuple):
    """A function with some of its arguments, as ``functools.partial`` has it."""

    function: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]


class Callee(NamedTuple):
    """What can be called: a function, or a method of what is read.

    Attributes:
        function: The function; of a tensor the name of its method.
        own: What the method belongs to; :data:`MISSING`: it is a function.
    """

    function: Any
    own: Any = MISSING
