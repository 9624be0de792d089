"""Reads what a function computes, as long as all it does is in the grammar.

The grammar is small. A graph can replace what is in it, as long as everything that was looked up
on the way stays as it was:

- local names, also those that are deleted, tuples, and taking tuples apart;
- calls of a module's children, those in a list of modules by number or in a loop;
- the functions, methods and properties of :mod:`opfuse_convert.grammar.table`, with plain
  arguments, and arithmetic;
- attributes of modules and objects that are plain values, parameters, buffers or functions, found
  where attributes are kept: no property, no ``__getattr__``;
- globals, variables of functions around, and names in modules that are plain values or functions;
- conditions on such values, on whether they are in a tuple or a list that is written there, and
  on whether an argument is None;
- functions and methods that are in the grammar, bound ones and ``functools.partial`` too, and
  ``**kwargs`` that are passed on.

Branches that are not taken are not read.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from . import table
from .frame import Frame, bound
from .reads import MISSING, Place, attribute_places, behind_places, function_places, key_place
from .source import Unreadable, tree_of
from .values import Bound, Callee, Held, Mode, Parts, Thing

_DEEPEST = 16
_LISTS = nn.ModuleList, nn.Sequential


class Reader:
    """Reads functions into one graph.

    Args:
        graph: Gets the nodes.
        is_leaf: Whether a call of a module stays one; what is none is read.
        known: Functions that somebody else reads: each gets the reader and the values given.
        class_of: The class of a module as its author wrote it.

    Attributes:
        places: Where everything was looked up.
        called: Dotted names of the modules that are called.
        modes: Nodes whose argument ``training`` is the mode of a module.
        is_rough: Whether a value may stand for its parts in a tuple and among arguments.
    """

    is_rough = False

    def __init__(
        self,
        graph: fx.Graph,
        is_leaf: Callable[[nn.Module], bool],
        known: Mapping[Any, Callable[..., Any]] = types.MappingProxyType({}),
        class_of: Callable[[type], type] = lambda cls: cls,
    ) -> None:
        self.graph, self.is_leaf, self.known, self.class_of = graph, is_leaf, known, class_of
        self.places: list[Place] = []
        self.called: list[str] = []
        self.modes: dict[fx.Node, Held] = {}
        self._depth = 0

    # Functions

    def call(self, callee: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What a call gives.

        Raises:
            Unreadable: It does something beyond the grammar.
        """
        if isinstance(callee, Held):
            return self._call_module(callee, args, kwargs)
        if isinstance(callee, Bound):
            return self.call(callee.function, [*callee.args, *args], {**callee.kwargs, **kwargs})
        if not isinstance(callee, Callee):
            raise Unreadable("it calls what is no known function")
        function, own = callee
        if isinstance(own, fx.Node):
            return self.node("call_method", function, [own, *args], kwargs)
        if own is not MISSING:
            args = [own, *args]
        if function in self.known:
            return self.known[function](self, *args, **kwargs)
        if function in table.FUNCTIONS or function in table.RANDOM:
            if isinstance(function, types.FunctionType):
                self.places += behind_places(function)
            return self.node("call_function", function, args, kwargs)
        if function in table.NUMBERS:
            return self._number(function, args, kwargs)
        if not isinstance(function, types.FunctionType):
            raise Unreadable(f"it calls {getattr(function, '__name__', function)!s}")
        return self.run(function, args, kwargs)

    def run(self, function: types.FunctionType, args: Sequence[Any], kwargs: Any) -> Any:
        """What a function gives, whose code is read."""
        if self._depth >= _DEEPEST:
            raise Unreadable("it calls itself, or goes too deep")
        tree = tree_of(function)
        self.places += function_places(function)
        frame = Frame(self, function, bound(function, args, kwargs))
        self._depth += 1
        try:
            result = frame.block(tree.body)
        finally:
            self._depth -= 1
        return None if result is MISSING else result

    def _call_module(self, held: Held, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        self.called.append(held.path)
        if self.is_leaf(held.module):
            return self.node("call_module", held.path, args, kwargs)
        function = self.forward_of(held)
        return self.run(function, [held, *args], kwargs)

    def forward_of(self, held: Held) -> Any:
        """The function that a call of a module runs.

        Raises:
            Unreadable: The call does more.
        """
        module = held.module
        if "forward" in vars(module):
            raise Unreadable(f"the forward of {held.path or 'it'} was replaced")
        for name in ("__call__", "_call_impl", "_wrapped_call_impl"):
            found, places = self._looked_up(module, name, f"{name} of {held.path or 'it'}")
            self.places += places
            if found is not vars(nn.Module)[name]:
                raise Unreadable(f"{held.path or 'it'} has a {name} of its own")
        found, places = self._looked_up(module, "forward", f"the forward of {held.path or 'it'}")
        self.places += places
        return found

    def _looked_up(self, module: nn.Module, name: str, what: str) -> tuple[Any, list[Place]]:
        return attribute_places(module, name, what, self.class_of(type(module)))

    def _number(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if function is len and len(args) == 1 and isinstance(args[0], Held):
            return len(self.members(args[0]))
        if kwargs or not all(map(table.is_plain, args)):
            raise Unreadable(f"it calls {function.__name__}() of what is no number")
        try:
            return function(*args)
        except Exception as error:
            raise Unreadable(f"{function.__name__}() raises {type(error).__name__}") from error

    def members(self, held: Held) -> list[Held]:
        """The children of a list of modules, in order.

        Raises:
            Unreadable: It is none, or goes through them in a way of its own.
        """
        module, cls = held.module, self.class_of(type(held.module))
        kind = next((kind for kind in _LISTS if isinstance(module, kind)), None)
        if kind is None or any(
            getattr(cls, name) is not getattr(kind, name)
            for name in ("__iter__", "__len__", "__getitem__")
        ):
            raise Unreadable(f"{held.path or 'it'} is no list of modules")
        names = tuple(module._modules)
        found: Any = module._modules
        self.places.append(
            Place(vars(module), "_modules", found, f"the order of what is in {held.path or 'it'}")
        )
        self.places.append(key_place(found, f"the order of what is in {held.path or 'it'}"))
        self.places += [Place(found, n, found[n], f"{held.path}.{n}".lstrip(".")) for n in names]
        return [held.child(name) for name in names]

    # Values

    def value(self, found: Any, what: str, own: Any = MISSING) -> Any:
        """What stands for an object that was looked up."""
        if table.is_plain(found) or isinstance(found, types.ModuleType):
            return found
        if isinstance(found, staticmethod):
            return self.value(found.__func__, what)
        if isinstance(found, types.FunctionType) and own is not MISSING:
            return Callee(found, own)
        if type(found) is functools.partial and not vars(found):
            return self._partial(found, what)
        if _is_function(found) or _is_listed(found) or self._is_known(found):
            return Callee(found)
        return Thing(found, what)

    def _partial(self, found: Any, what: str) -> Bound:
        """A function with some of its arguments; those by name may be set later."""
        values = [*found.args, *found.keywords.values()]
        if not all(map(table.is_plain, values)):
            raise Unreadable(f"{what} has arguments that are no plain values")
        keywords = found.keywords
        self.places.append(key_place(keywords, f"arguments of {what}"))
        self.places += [Place(keywords, n, v, f"{n} of {what}") for n, v in keywords.items()]
        return Bound(self.value(found.func, what), found.args, dict(keywords))

    def _is_known(self, found: Any) -> bool:
        try:
            return found in self.known
        except TypeError:  # it cannot be hashed
            return False

    def attribute(self, value: Any, name: str) -> Any:
        """An attribute of a value.

        Raises:
            Unreadable: Nobody knows what reading it does.
        """
        if isinstance(value, fx.Node):
            if name in table.PROPERTIES:
                return self.node("call_function", getattr, [value, name], {})
            if name in table.METHODS:
                return Callee(name, value)
            raise Unreadable(f"it asks a value for .{name}")
        if isinstance(value, Held):
            return self._of_module(value, name)
        if isinstance(value, types.ModuleType):
            found, places = attribute_places(value, name, f"{value.__name__}.{name}")
            self.places += places
            return self.value(found, f"{value.__name__}.{name}")
        if isinstance(value, Thing):
            what = f"{value.what}.{name}"
            found, places = attribute_places(value.value, name, what)
            self.places += places
            if isinstance(found, types.FunctionType) and found is not vars(value.value).get(name):
                raise Unreadable(f"it calls {what}()")
            return self.value(found, what)
        raise Unreadable(f"it asks for .{name} of what has none that is known")

    def _of_module(self, held: Held, name: str) -> Any:
        what = f"{held.path}.{name}".lstrip(".")
        found, places = self._looked_up(held.module, name, what)
        if name == "training":
            self.places += places[:-1]  # its value may change
            return Mode(held)
        self.places += places
        if isinstance(found, nn.Module) and held.module._modules.get(name) is found:
            return held.child(name)
        if isinstance(found, Tensor):
            if found is held.module._parameters.get(name) or found is held.module._buffers.get(
                name
            ):
                self.places.pop()  # another tensor is read like this one
                return self.node("get_attr", what, [], {})
            raise Unreadable(f"{what} is a tensor that it does not own")
        on_class = name not in vars(held.module)
        if type(found) is types.MethodType and found.__self__ is held.module:
            return self.value(found.__func__, what, held)
        return self.value(found, what, held if on_class else MISSING)

    def decided(self, value: Any) -> bool:
        """Which way a condition goes.

        Raises:
            Unreadable: It is on what cannot be known before.
        """
        if isinstance(value, Mode):
            module: Any = vars(value.of.module)
            self.places.append(Place(module, "training", module["training"], "training"))
            return bool(module["training"])
        if table.is_plain(value) or isinstance(value, tuple):
            return bool(value)
        raise Unreadable("it branches on a value")

    def node(self, kind: str, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """A node of the graph."""
        told = [args[place] for place in table.writing_places(target) if place < len(args)]
        told += [value for name, value in kwargs.items() if name in table.TOLD_TO_WRITE]
        if any(value is not None and value is not False for value in told):
            raise Unreadable("it writes into tensors")
        made = self.graph.create_node(
            kind,
            target,
            tuple(map(_argument, args)),
            {key: _argument(value) for key, value in kwargs.items()},
        )
        for value in (*args, *kwargs.values()):
            if isinstance(value, Mode):
                self.modes[made] = value.of
        return made

    def binary(self, function: Any, a: Any, b: Any) -> Any:
        """What an operator gives."""
        if isinstance(a, fx.Node) or isinstance(b, fx.Node):
            return self.node("call_function", function, [a, b], {})
        if not (table.is_plain(a) and table.is_plain(b)):
            raise Unreadable("it computes with what is no number")
        try:
            return function(a, b)
        except Exception as error:
            raise Unreadable(f"its arithmetic raises {type(error).__name__}") from error


def _is_function(found: Any) -> bool:
    return isinstance(found, types.FunctionType)


def _is_listed(found: Any) -> bool:
    kinds = types.BuiltinFunctionType, types.FunctionType, type, type(torch.nn.functional.relu)
    if not isinstance(found, kinds):
        return False
    return any(found in known for known in (table.FUNCTIONS, table.RANDOM, table.NUMBERS)) or (
        found in (range, enumerate, zip, reversed)
    )


def _argument(value: Any) -> Any:
    """A value as the argument of a node.

    Raises:
        Unreadable: It cannot be one.
    """
    if isinstance(value, Mode):
        return value.of.module.training
    if isinstance(value, Parts):
        return value.of
    if isinstance(value, fx.Node) or table.is_plain(value):
        return value
    if type(value) in (tuple, list):
        return type(value)(map(_argument, value))
    if isinstance(value, slice):
        return slice(*map(_argument, (value.start, value.stop, value.step)))
    raise Unreadable("it gives a function what is no plain value")
