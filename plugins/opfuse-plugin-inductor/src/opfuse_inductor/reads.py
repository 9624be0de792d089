"""What the arithmetic of an op depends on besides tensors.

A kernel is compiled once from an op's code, so all that its methods read must be known. Numbers
are part of the kernel's key. Those of an op of opfuse are its attributes. The methods of any other
op are read by :mod:`opfuse_convert.grammar`: what they look up must be unchanged, or they are read
again. Code that the grammar does not know is refused, with a sentence.
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from opfuse_convert.grammar import (
    MISSING,
    Callee,
    EveryWay,
    Held,
    Place,
    Thing,
    Unreadable,
    key_place,
    parameters_of,
    table,
)
from torch import fx

from opfuse import BasicOperation, has_same_math, ops
from opfuse.ops.authoring import op_class

_ROOTS = """value derivative linear_value linear_derivative forward_value backward_value
gate_gradient split join operand numbers_of with_numbers""".split()
"""The methods of an activation that are called."""

_COMMON = frozenset({**vars(ops.Identity()), **vars(ops.SiLU())}) - {"training"}
"""The attributes that every op has, and those that every activation has besides its own numbers."""

_UNUSED = {"param_names", "_name", "_path"}
"""Attributes that no arithmetic of an op reads; what a method of another package looks up is read
there."""

_HOMES = "torch", "opfuse"
"""Packages whose functions of tensors are not looked into: a trace shows what they do."""


_READ = {**table.FUNCTIONS, **table.RANDOM}


class Reads:
    """What the ops of a run depend on.

    Args:
        run: The ops.

    Attributes:
        refusal: Why it cannot all be followed, or None.
        numbers: Where the numbers are.
        names: What they are called.
        functions: What runs, besides what is built in.
    """

    def __init__(self, run: Sequence[Any]) -> None:
        self.numbers: list[Place] = []
        self._fixed: list[Place] = []
        self.refusal: str | None = None
        try:
            for op in run:
                self._read(op)
        except Unreadable as error:
            self.refusal = str(error)
        self.names = tuple([place.name for place in self.numbers])
        kinds = types.FunctionType, types.BuiltinFunctionType, types.CodeType
        self.functions = tuple([p.value for p in self._fixed if isinstance(p.value, kinds)])

    def current(self) -> tuple[Any, ...] | None:
        """The numbers now; None: something has changed, so the ops must be read again."""
        numbers = tuple([place.where.get(place.name, None) for place in self.numbers])
        if not self._fixed:
            return numbers
        if not all([place.is_same for place in (*self._fixed, *self.numbers)]):
            return None
        return (*numbers, *map(type, numbers), torch.get_default_dtype())

    def _read(self, op: Any) -> None:
        name, own = op_class(op).__name__, sorted(set(vars(op)) - _COMMON - _UNUSED)
        if is_stock(op):
            ignored = {ops.Dropout: set[str](), ops.ConstantScale: {"training", "scale"}}
            without = next((v for k, v in ignored.items() if isinstance(op, k)), {"training"})
            found = [n for n in own if n not in without and table.is_plain(vars(op)[n])]
            self.numbers += [Place(vars(op), n, vars(op)[n], f"{name}.{n}") for n in found]
        elif not isinstance(op, BasicOperation):
            raise Unreadable(f"it has a {name} in it, which is not an op of opfuse")
        elif any(True for _ in (*op.parameters(False), *op.buffers(False))):
            what = f"{name} has tensors of its own"
            raise Unreadable(f"{what}, which a compiled function would take for constants")
        else:
            self._foreign(op, own)
        for child in op.children():
            self._read(child)

    def _foreign(self, op: Any, own: Sequence[str]) -> None:
        """Read the methods of an op of another package, and all numbers that it has."""
        written = [cls for cls in type(op).__mro__ if not _is_ours(cls)]
        wheres: list[Any] = [vars(op), op._parameters, op._buffers, op._modules]
        self._fixed += [key_place(where, f"what {type(op).__name__} has") for where in wheres]
        self._numbers(vars(op), own, type(op).__name__)
        for cls in written:
            if "__getattr__" in vars(cls) or "__getattribute__" in vars(cls):
                raise Unreadable(f"{cls.__name__} computes its attributes")
            self._fixed.append(key_place(vars(cls), f"what {cls.__name__} has"))
            values = [n for n, v in vars(cls).items() if not (callable(v) or hasattr(v, "__get__"))]
            special = "__", "_abc_"
            self._numbers(vars(cls), [n for n in values if not n.startswith(special)], cls.__name__)
        reader = _Reader(fx.Graph(), lambda module: False)
        try:
            for name in _ROOTS:
                if any(name in vars(cls) for cls in written):
                    _run(reader, op, name)
        finally:  # a refused value may be replaced later
            for place in reader.places:
                (self.numbers if table.is_plain(place.value) else self._fixed).append(place)

    def _numbers(self, where: Mapping[str, Any], names: Sequence[str], owner: str) -> None:
        for name in names:
            if not table.is_plain(where[name]):
                what = f"{owner}.{name} is not a plain number"
                raise Unreadable(f"{what}, which a compiled function would take for a constant")
            self.numbers.append(Place(where, name, where[name], f"{owner}.{name}"))


class _Reader(EveryWay):
    """Lets a trace find out what functions of tensors do."""

    def value(self, found: Any, what: str, own: Any = MISSING) -> Any:
        """What represents an object that was looked up."""
        builtin = isinstance(found, types.BuiltinFunctionType) and _home(found) in _HOMES
        return Callee(found) if builtin else super().value(found, what, own)

    def attribute(self, value: Any, name: str) -> Any:
        """An attribute of a value."""
        if isinstance(value, fx.Node) and name not in table.PROPERTIES:
            return Callee(name, value)
        if isinstance(value, Thing) and isinstance(value.value, type) and _is_ours(value.value):
            return Callee(getattr(value.value, name))
        return super().attribute(value, name)

    def call(self, callee: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The result of a call."""
        function = callee.function if isinstance(callee, Callee) else None
        known = function is not None and callee.own is MISSING and function not in _READ
        if known and any(isinstance(each, fx.Node) for each in (*args, *kwargs.values())):
            if function in table.NUMBERS or _home(function) in _HOMES:
                others = [each for each in args if not isinstance(each, Held)]
                return self.node("call_function", function, others, kwargs)
        if function is torch.tensor:  # of a number
            return self.node("call_function", function, args, kwargs)
        return super().call(callee, args, kwargs)


def _run(reader: EveryWay, op: Any, name: str) -> None:
    """Read a method of an op, for some values."""
    several = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    needed = [p for p in parameters_of(getattr(op, name)) if p.default is p.empty]
    names = [p.name for p in needed if p.kind not in several]
    nodes = {name: reader.graph.placeholder(name) for name in names}
    reader.each_way(lambda: reader.call(reader.attribute(Held(op, ""), name), [], nodes))


def _home(value: Any) -> str:
    """The package of a function or a class."""
    own = getattr(value, "__globals__", {}).get("__name__") or getattr(value, "__module__", None)
    of = own or getattr(getattr(value, "__self__", None), "__module__", None)
    return str(of or "").partition(".")[0]


def _is_ours(cls: type) -> bool:
    """Whether a class belongs to opfuse, torch or Python, and is found under its own name."""
    there = getattr(sys.modules.get(cls.__module__), cls.__name__, None) is cls
    return there and _home(cls) in (*_HOMES, "builtins", "abc")


def is_stock(op: Any) -> bool:
    """Whether an op is one of opfuse's own, unchanged."""
    cls = op_class(op)
    return getattr(ops, cls.__name__, None) is cls and has_same_math(op, cls)
