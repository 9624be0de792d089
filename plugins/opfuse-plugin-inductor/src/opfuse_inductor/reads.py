"""What the arithmetic of an op depends on beside tensors.

A kernel is made once of what an op computes, so all that its methods read must be known. Numbers
are part of the kernel's key and read anew at every call: those of the op, and for an op of another
package those on its classes, in globals, and in closures. The functions it calls must stay the same
objects. What is neither is refused, in a sentence.
"""

from __future__ import annotations

import builtins
import dis
import functools
import random
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from opfuse import BasicOperation, computes_as, ops
from opfuse.authoring import op_class

_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device)

_TRUSTED = {
    "torch",
    "opfuse",
    "math",
    "numpy",
    "operator",
    "builtins",
    "functools",
    "itertools",
    "typing",
    "abc",
}
"""Packages whose functions are not looked into."""

_RANDOM = ("random.", "numpy.random", "torch.random")
"""Modules that draw, and not by an operation of torch's, which a graph would show."""

_UNSEEN = {
    "globals",
    "locals",
    "vars",
    "eval",
    "exec",
    "open",
    "input",
    "__import__",
    "setattr",
    "delattr",
    "id",
}
"""Built-in functions by which a function reads or writes what cannot be seen in its code."""

_ROOTS = (
    *(
        "value",
        "derivative",
        "linear_value",
        "linear_derivative",
        "forward_value",
        "backward_value",
    ),
    *("gate_gradient", "split", "join", "operand", "numbers_of", "with_numbers"),
)
"""The methods of an activation that are called."""

_COMMON = frozenset({**vars(ops.Identity()), **vars(ops.SiLU())}) - {"training"}
"""The attributes that every op has, and every activation beside its own numbers."""


class Unreadable(Exception):
    """The sentence that says what cannot be followed."""


class Place(NamedTuple):
    """Where something is that is looked up at every call; ``value`` is what was there at first."""

    where: Mapping[str, Any]
    name: str
    value: Any


class Attributes(dict[str, Any]):
    """The attributes of an object that has no dictionary, such as a closure's cell."""

    def __init__(self, of: Any) -> None:
        super().__init__()
        self._of = of

    def __missing__(self, name: str) -> Any:
        return getattr(self._of, name)


class Reads:
    """What the ops of a run depend on.

    Args:
        run: The ops.

    Attributes:
        refusal: Why it cannot all be followed, or None.
        numbers: Where the numbers are.
        fixed: Where the functions and modules are, which must stay.
        stock: Whether nothing was written elsewhere, so that nothing but the numbers of the ops can
            change.
    """

    def __init__(self, run: Sequence[Any]) -> None:
        self.numbers: list[Place] = []
        self.fixed: list[Place] = []
        self._sizes: list[tuple[Any, int]] = []
        self._seen: set[int] = set()
        self._part: Any = None
        self._foreign: list[type] = []
        self.refusal: str | None = None
        self.stock = True
        try:
            for op in run:
                self._read(op)
        except Unreadable as error:
            self.refusal = str(error)
        self.names = tuple([place.name for place in self.numbers])

    def current(self) -> tuple[Any, ...] | None:
        """The numbers now; None: there are others, or other functions, than there were."""
        try:
            if not self.stock:
                if any([place.where[place.name] is not place.value for place in self.fixed]):
                    return None
                if any([len(where) != size for where, size in self._sizes]):
                    return None
            numbers = tuple([place.where[place.name] for place in self.numbers])
            return (
                numbers
                if self.stock
                else (*numbers, *map(type, numbers), torch.get_default_dtype())
            )
        except (KeyError, AttributeError, ValueError):  # deleted, or an empty cell
            return None

    @property
    def functions(self) -> tuple[Any, ...]:
        """What runs, beside what is built in."""
        return tuple([place.value for place in self.fixed])

    # One op

    def _read(self, op: Any) -> None:
        if is_stock(op):
            ignored = (
                {"param_names"} if isinstance(op, ops.Dropout) else {"param_names", "training"}
            )
            ignored |= {"scale"} if isinstance(op, ops.ConstantScale) else set()
            names = sorted(set(vars(op)) - _COMMON - ignored)
            self.numbers += [
                Place(vars(op), n, vars(op)[n]) for n in names if is_plain(vars(op)[n])
            ]
            for child in op.children():
                self._read(child)
            return
        self.stock, name = False, op_class(op).__name__
        if not isinstance(op, BasicOperation):
            raise Unreadable(
                f"{type(self._part).__name__} has a {name} in it, which is no op of opfuse"
            )
        if (
            next(op.parameters(False), None) is not None
            or next(op.buffers(False), None) is not None
        ):
            raise Unreadable(
                f"{name} has tensors of its own, which a compiled function would take for constants"
            )
        self._part, self._foreign = op, [cls for cls in type(op).__mro__ if not is_trusted(cls)]
        self._sizes += [(d, len(d)) for d in (vars(op), op._parameters, op._buffers, op._modules)]
        for attribute in sorted(set(vars(op)) - _COMMON - {"param_names"}):
            self._attribute(vars(op), attribute, name)
        for cls in self._foreign:
            self._sizes.append((vars(cls), len(vars(cls))))
            for attribute in vars(cls):
                if attribute in ("__getattr__", "__getattribute__"):
                    raise Unreadable(f"{cls.__name__}.{attribute} may give anything")
                value = vars(cls)[attribute]
                special = attribute.startswith(("__", "_abc_"))
                if not (special or callable(value) or hasattr(value, "__get__")):
                    self._attribute(vars(cls), attribute, cls.__name__)
        for root in _ROOTS:
            self._method(root)
        for child in op.children():
            self._read(child)

    def _attribute(self, where: Any, name: str, owner: str) -> None:
        if not is_plain(where[name]):
            what = f"{owner}.{name} is no plain number"
            raise Unreadable(f"{what}, which a compiled function would take for a constant")
        self.numbers.append(Place(where, name, where[name]))

    def _method(self, name: str) -> None:
        for cls in self._foreign:
            if name in vars(cls) and not is_plain(vars(cls)[name]):
                self._follow(Place(vars(cls), name, vars(cls)[name]), f"{cls.__name__}.{name}")

    # One function

    def _follow(self, place: Place, who: str) -> None:
        """Go through what is called."""
        self.fixed.append(place)
        value = place.value
        if id(value) in self._seen:  # which the place keeps alive
            return
        self._seen.add(id(value))
        if isinstance(value, (staticmethod, classmethod)):
            value = value.__func__
        elif isinstance(value, property):
            value = value.fget
        if isinstance(value, functools.partial):
            if not is_plain((*value.args, *value.keywords.values())):
                raise Unreadable(f"{who} is called with what is no plain number")
            value = value.func
        inner = getattr(value, "__wrapped__", None)
        if inner is not None:  # of a decorator such as torch.no_grad
            self._follow(Place(Attributes(value), "__wrapped__", inner), who)
        if is_trusted(value):
            return
        if not isinstance(value, types.FunctionType):
            raise Unreadable(f"{who} is no function whose code can be read")
        self._function(value, who)

    def _function(self, function: types.FunctionType, who: str) -> None:
        code, of_function = function.__code__, Attributes(function)
        self.fixed.append(Place(of_function, "__code__", code))
        for defaults in ("__defaults__", "__kwdefaults__"):
            given = getattr(function, defaults) or ()
            if not is_plain(tuple(given.values() if isinstance(given, dict) else given)):
                raise Unreadable(f"{who} has a default that is no plain number")
        found = scan(code)
        if found.writes:
            raise Unreadable(
                f"{who} writes {found.writes}, which a compiled function would do once"
            )
        for name in found.attributes:
            self._method(name)
        for name, attributes in found.globals:
            where = function.__globals__
            if name in where:
                self._object(
                    Place(where, name, where[name]), attributes, f"{who} reads the global {name}"
                )
            elif name in _UNSEEN or not hasattr(builtins, name):
                raise Unreadable(f"{who} calls {name}, and nothing tells what it reads")
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            of_cell = Attributes(cell)
            try:
                place = Place(of_cell, "cell_contents", cell.cell_contents)
            except ValueError:
                raise Unreadable(
                    f"{who} reads the variable {name}, which has no value yet"
                ) from None
            self._object(place, ("",), f"{who} reads the variable {name}")

    def _object(self, place: Place, attributes: Sequence[str], what: str) -> None:
        """Go through attributes of something that a function reads.

        ``""`` among ``attributes`` stands for the object itself, with all of them.
        """
        value = place.value
        if is_plain(value):
            self.numbers.append(place)
        elif isinstance(value, types.ModuleType):
            self.fixed.append(place)
            for name in attributes:
                if f"{value.__name__}.{name}".startswith(_RANDOM):
                    raise Unreadable(f"{what}, which draws random numbers")
                if is_trusted(value):
                    continue
                inner = vars(value).get(name)
                if inner is None or isinstance(inner, types.ModuleType):
                    raise Unreadable(f"{what}, and nothing tells what of this module")
                self._object(Place(vars(value), name, inner), ("",), f"{what}.{name}")
        elif is_trusted(value) or any(value is cls for cls in self._foreign):
            self.fixed.append(place)
        elif isinstance(value, (types.FunctionType, functools.partial)):
            self._follow(place, getattr(value, "__qualname__", what))
        else:
            raise Unreadable(
                f"{what}, which is no plain number, "
                "and a compiled function would take it for a constant"
            )


def is_stock(op: Any) -> bool:
    """Whether an op is one of opfuse's own, as it was written."""
    cls = op_class(op)
    return getattr(ops, cls.__name__, None) is cls and computes_as(op, cls)


def is_plain(value: Any) -> bool:
    """Whether it is a number, or something else that cannot change."""
    return isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(map(is_plain, value)))


def is_trusted(value: Any) -> bool:
    """Whether a function, class or module is of a package that is not looked into."""
    if isinstance(value, types.ModuleType):
        home = value.__name__
    elif isinstance(value, types.BuiltinFunctionType) and isinstance(
        value.__self__, types.ModuleType
    ):
        home = value.__self__.__name__
    elif isinstance(value, types.BuiltinFunctionType) and value.__self__ is not None:
        home = (
            value.__self__.__module__
            if isinstance(value.__self__, type)
            else type(value.__self__).__module__
        )
    elif isinstance(value, types.FunctionType):
        home = value.__globals__.get("__name__") or ""  # its module is what its author says
    elif isinstance(value, type):
        home = value.__module__ if _is_there(value) else ""
    elif isinstance(value, (types.BuiltinFunctionType, types.MethodDescriptorType)):
        home = getattr(value, "__module__", None) or "builtins"
    else:  # an operation such as torch.ops.aten.relu
        home = type(value).__module__ if type(value).__module__ == "torch._ops" else ""
    return home.partition(".")[0] in _TRUSTED and not home.startswith(_RANDOM)


def _is_there(cls: type) -> bool:
    """Whether a class is found where it says.

    One that a call of ``type`` makes says the module of its metaclass.
    """
    found: Any = sys.modules.get(cls.__module__)
    for name in cls.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is cls


# The code of a function


class Scanned(NamedTuple):
    """What a function's code reads.

    Attributes:
        globals: Names of globals, and which attributes of each; ``""`` stands for the object
            itself.
        attributes: Names of attributes, of whatever.
        writes: What it writes beside its own variables, or ``""``.
    """

    globals: tuple[tuple[str, tuple[str, ...]], ...]
    attributes: tuple[str, ...]
    writes: str


_FILLING = {"CACHE", "EXTENDED_ARG", "NOP", "PUSH_NULL"}


@functools.lru_cache(maxsize=1024)
def scan(code: types.CodeType) -> Scanned:
    """Read the instructions of a function and of those in it."""
    found: dict[str, dict[str, None]] = {}
    attributes: dict[str, None] = {}
    writes = ""
    for part in _codes(code):
        instructions = [i for i in dis.get_instructions(part) if i.opname not in _FILLING]
        for i, instruction in enumerate(instructions):
            name, what = instruction.opname, instruction.argval
            following = instructions[i + 1] if i + 1 < len(instructions) else instruction
            if name in ("LOAD_GLOBAL", "LOAD_NAME"):
                is_attribute = following.opname in ("LOAD_ATTR", "LOAD_METHOD")
                found.setdefault(what, {})[following.argval if is_attribute else ""] = None
            elif name in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"):
                attributes[what] = None
            elif name == "IMPORT_NAME":
                found.setdefault("__import__", {})[""] = None
            elif name in ("STORE_GLOBAL", "DELETE_GLOBAL"):
                writes = f"the global {what}"
            elif name in ("STORE_ATTR", "DELETE_ATTR"):
                writes = f"the attribute {what}"
            elif name in ("STORE_DEREF", "DELETE_DEREF") and what in code.co_freevars:
                writes = f"the variable {what}"
    return Scanned(
        tuple((name, tuple(of)) for name, of in found.items()), tuple(attributes), writes
    )


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


# While a function is traced


def undisturbed(make: Callable[[], Any]) -> Any:
    """What a function gives that calls those of others, if these draw no random numbers.

    That is about random numbers of Python or numpy.

    Raises:
        Unreadable: They do.
    """
    before = _generators()
    result = make()
    if _generators() != before:
        raise Unreadable("random numbers are drawn, and a compiled function would draw them once")
    return result


def _generators() -> Any:
    numpy: Any = sys.modules.get("numpy.random")
    state = numpy.get_state() if numpy else ("", b"")
    return random.getstate(), bytes(state[1]), *state[2:]


def drawing(graph: torch.fx.GraphModule) -> str | None:
    """The operation of a graph that draws random numbers, if there is one."""
    for node in graph.graph.nodes:
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            return str(node.target)
    return None
