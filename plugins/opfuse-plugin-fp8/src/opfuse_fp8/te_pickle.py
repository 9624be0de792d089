"""Reads the pickles of Transformer Engine's state without unpickling them.

The stream is taken apart into its instructions, and those that build plain values are followed.
A name in it, such as that of a function, is only a name: nothing is imported, and nothing that it
names is called. What a broken one costs grows with its length: a value may stand in others any
number of times, so nothing walks through values, and messages quote only their beginning.
"""

from __future__ import annotations

import dataclasses
import io
import math
import pickletools
import re
import reprlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_RECIPES = "transformer_engine.common.recipe"
_STORAGE = "torch.storage._load_from_bytes"
_MARK = object()
_SCALAR = (str, int, float, bytes, type(None))
_ADVICE = re.compile(r"\n|In PyTorch 2|Please |Re-running |Check the doc|To bypass |If you trust")
_short = reprlib.Repr()
_short.maxlevel, _short.maxother = 2, 60


def short(value: Any) -> str:
    """The beginning of the ``repr`` of a value, however large it is."""
    return _short.repr(value)


def why(error: BaseException) -> str:
    """What torch finds wrong with a file, without its advice to load it anyway."""
    text = str(error.__context__ or error).removeprefix("Weights only load failed. ")
    return _ADVICE.split(text)[0].strip()[:300] or type(error).__name__


class Refused(ValueError):
    """An extra state holds something that is not the state of a recipe."""


@dataclasses.dataclass(frozen=True)
class Name:
    """A module and a name in it, as a pickle gives them."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"[:200]


@dataclasses.dataclass(repr=False, eq=False)
class Value:
    """The value that a pickle builds of a class of ``transformer_engine.common.recipe``.

    Attributes:
        name: The class.
        given: What it is made from.
        fields: Its attributes.
    """

    name: Name
    given: tuple[Any, ...]
    fields: dict[str, Any]

    def __repr__(self) -> str:
        return f"{self.name}(...)"


def read(pickled: bytes) -> Any:
    """The content of a Transformer Engine pickle: plain values, tensors, and :class:`Value`.

    Args:
        pickled: What ``pickle.dumps`` gave.

    Raises:
        Refused: It holds something else, or is no pickle.
    """
    reader = _Reader(len(pickled))
    try:
        for opcode, argument, _ in pickletools.genops(pickled):
            step = _STEPS.get(opcode.name)
            if step is None:
                raise Refused(f"it has the instruction {opcode.name}, which no state needs")
            step(reader, argument)
    except Refused:
        raise
    except Exception as error:  # cut off, or out of order
        raise Refused(f"it is not a whole pickle: {str(error)[:300]}") from error
    if len(reader.stack) != 1:
        raise Refused("it is not a whole pickle: it ends early")
    return reader.stack[0]


class _Reader:
    """A stack on which instructions build values.

    Args:
        room: How many bytes the storages may have together.
    """

    def __init__(self, room: int) -> None:
        self.room = room
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def _pop(self, count: int) -> list[Any]:
        if len(self.stack) < count:
            raise Refused("it is not a whole pickle: a value is missing")
        found = self.stack[len(self.stack) - count :]
        del self.stack[len(self.stack) - count :]
        return found

    def _pop_to_mark(self) -> list[Any]:
        places = reversed(range(len(self.stack)))
        at = next((i for i in places if self.stack[i] is _MARK), None)
        if at is None:
            raise Refused("it is not a whole pickle: a mark is missing")
        found = self.stack[at + 1 :]
        del self.stack[at:]
        return found

    def _memoize(self, place: int) -> None:
        self.memo[place] = self.stack[-1]

    def _set_items(self, items: list[Any]) -> None:
        target = self._target(dict)
        for key in items[::2]:
            if not isinstance(key, _SCALAR):
                raise Refused(f"it has {short(key)} as the key of a dictionary")
        target.update(zip(items[::2], items[1::2], strict=True))

    def _append(self, items: list[Any]) -> None:
        self._target(list).extend(items)

    def _target(self, kind: type) -> Any:
        if not isinstance(self.stack[-1], kind):
            raise Refused(f"it adds to a {type(self.stack[-1]).__name__}")
        return self.stack[-1]

    def _name(self, argument: Any) -> None:
        parts = self._pop(2) if argument is None else argument.split(" ")
        if not all(isinstance(part, str) for part in parts):
            raise Refused(f"it names {short(parts)}")
        self.stack.append(Name(*parts))

    def _call(self, _: Any) -> None:
        function, given = self._pop(2)
        if isinstance(function, Name) and isinstance(given, tuple) and str(function) == _STORAGE:
            self.room -= sum(len(saved) for saved in given if isinstance(saved, bytes))
            if self.room < 0:
                raise Refused("it has one storage many times")
        self.stack.append(_called(function, given))

    def _build(self, _: Any) -> None:
        (state,) = self._pop(1)
        target = self._target(Value)
        if not isinstance(state, dict):
            raise Refused(f"it sets the attributes of {target.name} to {short(state)}")
        target.fields.update(state)


def _push(make: Callable[[Any], Any]) -> Callable[[_Reader, Any], None]:
    """An instruction that puts a value on the stack, made from its argument."""
    return lambda self, argument: self.stack.append(make(argument))


_LITERALS = (
    *("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
    *("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"),
)
_STEPS: dict[str, Callable[[_Reader, Any], None]] = {
    **dict.fromkeys(("PROTO", "FRAME", "STOP"), lambda self, _: None),  # about the stream
    **dict.fromkeys(_LITERALS, _push(lambda argument: argument)),
    "NONE": _push(lambda _: None),
    "NEWTRUE": _push(lambda _: True),
    "NEWFALSE": _push(lambda _: False),
    "EMPTY_DICT": _push(lambda _: {}),
    "EMPTY_LIST": _push(lambda _: []),
    "EMPTY_TUPLE": _push(lambda _: ()),
    "MARK": _push(lambda _: _MARK),
    "TUPLE": lambda self, _: self.stack.append(tuple(self._pop_to_mark())),
    "TUPLE1": lambda self, _: self.stack.append(tuple(self._pop(1))),
    "TUPLE2": lambda self, _: self.stack.append(tuple(self._pop(2))),
    "TUPLE3": lambda self, _: self.stack.append(tuple(self._pop(3))),
    "MEMOIZE": lambda self, _: self._memoize(len(self.memo)),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT", "PUT"), lambda self, at: self._memoize(int(at))),
    **dict.fromkeys(
        ("BINGET", "LONG_BINGET", "GET"), lambda self, at: self.stack.append(self.memo[int(at)])
    ),
    "SETITEM": lambda self, _: self._set_items(self._pop(2)),
    "SETITEMS": lambda self, _: self._set_items(self._pop_to_mark()),
    "APPEND": lambda self, _: self._append(self._pop(1)),
    "APPENDS": lambda self, _: self._append(self._pop_to_mark()),
    "GLOBAL": _Reader._name,
    "STACK_GLOBAL": _Reader._name,
    "REDUCE": _Reader._call,
    "NEWOBJ": _Reader._call,
    "BUILD": _Reader._build,
}


def _called(function: Any, given: Any) -> Any:
    """What stands in for the call that a pickle asks for."""
    if not isinstance(function, Name) or not isinstance(given, tuple):
        raise Refused(f"it calls {short(function)}")
    if function.module == _RECIPES:
        return Value(function, given, {})
    known = _KNOWN.get(str(function))
    if known is None:
        raise Refused(f"it calls {function}, which is not part of the state of a recipe")
    return known(*given)


def _member(of: Any, name: Any) -> Value:
    """A member of an enumeration, as Python 3.11 and 3.12 write it at times."""
    if not isinstance(of, Name) or of.module != _RECIPES or not isinstance(name, str):
        raise Refused(f"it takes {short(name)} of {short(of)}")
    return Value(of, (name,), {})


def _storage(saved: bytes) -> Any:
    """A storage, which torch has saved by itself."""
    if not isinstance(saved, bytes) or saved.startswith(b"PK"):
        raise Refused("it has a storage that is not as pickle.dumps writes it")
    try:
        return torch.load(io.BytesIO(saved), map_location="cpu", weights_only=True)
    except Exception as error:
        raise Refused(f"torch.load(weights_only=True) refuses a storage: {why(error)}") from None


def _tensor(storage: Any, offset: int, size: Any, stride: Any, *_: Any) -> Tensor:
    """A tensor over a storage; torch refuses one that reaches beyond it."""
    if not isinstance(storage, torch.storage.TypedStorage):
        raise Refused(f"it makes a tensor of {short(storage)}")
    if not isinstance(size, tuple) or not all(isinstance(n, int) and n >= 0 for n in size):
        raise Refused(f"it has a tensor of shape {short(size)}")
    whole = torch.empty(0, dtype=storage.dtype).set_(storage)
    if math.prod(size) > whole.numel():
        raise Refused(f"a tensor of shape {short(size)} is larger than its storage")
    return whole.as_strided(size, stride, offset)


_KNOWN: dict[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor_v2": _tensor,
    _STORAGE: _storage,
    "collections.OrderedDict": lambda: {},
    "builtins.getattr": _member,
}
