"""Reads the pickles of Transformer Engine's state without unpickling them.

The stream is taken apart into its instructions, and those that build plain values are followed.
A name in it, such as that of a function, is only a name: nothing is imported, and nothing that it
names is called.
"""

from __future__ import annotations

import dataclasses
import io
import math
import pickletools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_RECIPES = "transformer_engine.common.recipe"
_MARK = object()


class NotReadable(ValueError):
    """A pickle holds what the state of a recipe does not consist of."""


@dataclasses.dataclass(frozen=True)
class Name:
    """A module and a name in it, as a pickle gives them."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclasses.dataclass
class Value:
    """What a pickle makes of a class of ``transformer_engine.common.recipe``.

    Attributes:
        name: The class.
        given: What it is made from.
        fields: Its attributes.
    """

    name: Name
    given: tuple[Any, ...]
    fields: dict[str, Any]


def read(pickled: bytes) -> Any:
    """What a pickle of Transformer Engine holds: plain values, tensors, and :class:`Value`.

    Args:
        pickled: What ``pickle.dumps`` gave.

    Raises:
        NotReadable: It holds something else, or is no pickle.
    """
    reader = _Reader()
    try:
        for opcode, argument, _ in pickletools.genops(pickled):
            reader.follow(opcode.name, argument)
    except NotReadable:
        raise
    except Exception as error:  # cut off, or out of order
        raise NotReadable(f"it is no whole pickle: {error}") from error
    if len(reader.stack) != 1:
        raise NotReadable("it is no whole pickle: it ends early")
    return reader.stack[0]


class _Reader:
    """A stack on which instructions build values."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def follow(self, name: str, argument: Any) -> None:
        """Follow one instruction."""
        if name in _ABOUT_THE_STREAM:
            return
        if name in _LITERALS:
            self.stack.append(argument)
        elif name in _CONSTANTS:
            self.stack.append(_CONSTANTS[name]())
        elif name in _TUPLES:
            self.stack.append(tuple(self._pop(_TUPLES[name])))
        elif name == "MEMOIZE":
            self.memo[len(self.memo)] = self.stack[-1]
        elif name in ("BINPUT", "LONG_BINPUT", "PUT"):
            self.memo[int(argument)] = self.stack[-1]
        elif name in ("BINGET", "LONG_BINGET", "GET"):
            self.stack.append(self.memo[int(argument)])
        elif (step := _STEPS.get(name)) is not None:
            step(self, argument)
        else:
            raise NotReadable(f"it has the instruction {name}, which no state needs")

    def _pop(self, count: int) -> list[Any]:
        if len(self.stack) < count:
            raise NotReadable("it is no whole pickle: a value is missing")
        found = self.stack[len(self.stack) - count :]
        del self.stack[len(self.stack) - count :]
        return found

    def _pop_to_mark(self) -> list[Any]:
        at = max(i for i, value in enumerate(self.stack) if value is _MARK)
        found = self.stack[at + 1 :]
        del self.stack[at:]
        return found

    def _set_items(self, _: Any, items: list[Any] | None = None) -> None:
        items = self._pop(2) if items is None else items
        target = self._target(dict)
        target.update(zip(items[::2], items[1::2], strict=True))

    def _append(self, _: Any, items: list[Any] | None = None) -> None:
        items = self._pop(1) if items is None else items
        self._target(list).extend(items)

    def _target(self, kind: type) -> Any:
        if not isinstance(self.stack[-1], kind):
            raise NotReadable(f"it adds to a {type(self.stack[-1]).__name__}")
        return self.stack[-1]

    def _name(self, argument: Any) -> None:
        parts = self._pop(2) if argument is None else argument.split(" ")
        self.stack.append(Name(*map(str, parts)))

    def _call(self, _: Any) -> None:
        function, given = self._pop(2)
        self.stack.append(_called(function, given))

    def _build(self, _: Any) -> None:
        (state,) = self._pop(1)
        target = self._target(Value)
        if not isinstance(state, dict):
            raise NotReadable(f"it sets the attributes of {target.name} to {state!r}")
        target.fields.update(state)


_ABOUT_THE_STREAM = ("PROTO", "FRAME", "STOP")
_LITERALS = (
    *("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
    *("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"),
)
_CONSTANTS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_DICT": dict,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
    "MARK": lambda: _MARK,
}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_STEPS: dict[str, Callable[[_Reader, Any], None]] = {
    "TUPLE": lambda self, _: self.stack.append(tuple(self._pop_to_mark())),
    "SETITEM": _Reader._set_items,
    "SETITEMS": lambda self, _: self._set_items(None, self._pop_to_mark()),
    "APPEND": _Reader._append,
    "APPENDS": lambda self, _: self._append(None, self._pop_to_mark()),
    "GLOBAL": _Reader._name,
    "STACK_GLOBAL": _Reader._name,
    "REDUCE": _Reader._call,
    "NEWOBJ": _Reader._call,
    "BUILD": _Reader._build,
}


def _called(function: Any, given: Any) -> Any:
    """What stands in for the call that a pickle asks for."""
    if not isinstance(function, Name) or not isinstance(given, tuple):
        raise NotReadable(f"it calls {function!r}")
    if function.module == _RECIPES:
        return Value(function, given, {})
    known = _KNOWN.get(str(function))
    if known is None:
        raise NotReadable(f"it calls {function}, which is no part of the state of a recipe")
    return known(*given)


def _member(of: Any, name: Any) -> Value:
    """A member of an enumeration, as Python 3.11 and 3.12 write it at times."""
    if not isinstance(of, Name) or of.module != _RECIPES:
        raise NotReadable(f"it takes {name!r} of {of}")
    return Value(of, (str(name),), {})


def _storage(saved: bytes) -> Any:
    """A storage, which torch has saved by itself."""
    return torch.load(io.BytesIO(saved), map_location="cpu", weights_only=True)


def _tensor(storage: Any, offset: int, size: Any, stride: Any, *_: Any) -> Tensor:
    """A tensor over a storage; torch refuses one that reaches beyond it."""
    whole = torch.empty(0, dtype=storage.dtype).set_(storage)
    if math.prod(size) > whole.numel():
        raise NotReadable(f"a tensor of shape {size} is larger than its storage")
    return whole.as_strided(size, stride, offset).clone()


_KNOWN: dict[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch.storage._load_from_bytes": _storage,
    "collections.OrderedDict": dict,
    "builtins.getattr": _member,
}
