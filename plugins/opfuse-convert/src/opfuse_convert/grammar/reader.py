"""Reads what a function computes, as long as all it does is in the grammar.

The grammar is small. A chain can replace these, as long as everything that was looked up on the way
stays as it was:

- local names, even those that are deleted, tuples, and unpacking of tuples;
- calls of a module's children, and of those in a list of modules, by number or in a loop;
- the functions, methods and properties of :mod:`opfuse_convert.grammar.table`, with plain
  arguments, and arithmetic;
- attributes of modules and objects that are plain values, parameters, buffers or functions, found
  where attributes are kept: no property, no ``__getattr__``;
- plain values and functions in globals, in enclosing functions and in modules;
- conditions on such values, on whether they are in a literal tuple or list, on whether an argument
  is None, and on the type of the device of a value, as in ``x.device.type == "mps"``;
- functions, methods and ``functools.partial`` whose code is in the grammar, and ``**kwargs`` that
  are passed on, or asked for a key.

Branches that are not taken are not read.
"""

from __future__ import annotations

import functools
import operator
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, fx, nn

from . import table
from .frame import Frame, bound
from .reads import (
    MISSING,
    Attributes,
    Place,
    attribute_places,
    behind_places,
    class_places,
    function_places,
    key_place,
)
from .source import Unreadable, result_of_call, tree_of
from .values import Bound, Callee, DeviceTest, DeviceType, Held, Mode, Parts, Thing

_DEEPEST = 16
_MOST_WAYS = 64
_LISTS = nn.ModuleList, nn.Sequential


class Reader:
    """Reads functions into one graph.

    Args:
        graph: Gets the nodes.
        is_leaf: Whether a call of a module stays a call; the code of other modules is read.
        known: Functions that have their own readers: each gets the reader and the values given.
        class_of: The class of a module as its author wrote it.
        device: The type of the device on which values are taken to be; None: it is unknown.

    Attributes:
        places: Where everything was looked up.
        called: Dotted names of the modules that are called.
        modes: Nodes whose argument ``training`` is the mode of a module.
        device_tests: Comparisons that were decided by ``device``.
        is_rough: Whether a value may replace its parts in a tuple and among arguments.
    """

    is_rough = False

    def __init__(
        self,
        graph: fx.Graph,
        is_leaf: Callable[[nn.Module], bool],
        known: Mapping[Any, Callable[..., Any]] = types.MappingProxyType({}),
        class_of: Callable[[type], type] = lambda cls: cls,
        device: str | None = None,
    ) -> None:
        self.graph, self.is_leaf, self.known, self.class_of = graph, is_leaf, known, class_of
        self.places: list[Place] = []
        self.called: list[str] = []
        self.modes: dict[fx.Node, Held] = {}
        self.device_tests: list[DeviceTest] = []
        self._device = device
        self._depth = 0

    # Functions

    def call(self, callee: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Read a call and return its result.

        Raises:
            Unreadable: It does something beyond the grammar.
        """
        if isinstance(callee, Held):
            return self._call_module(callee, args, kwargs)
        if isinstance(callee, Bound):
            return self.call(callee.function, [*callee.args, *args], {**callee.kwargs, **kwargs})
        if not isinstance(callee, Callee):
            raise Unreadable("it calls an unknown function")
        function, own = callee
        if isinstance(own, fx.Node):
            return self.node("call_method", function, [own, *args], kwargs)
        if isinstance(own, dict):
            if kwargs or len(args) not in (1, 2) or type(args[0]) is not str:
                raise Unreadable("it asks for an unknown key")
            return own.get(*args)
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
        """Read the code of a function and return its result."""
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
        return self.run(self.forward_of(held), [held, *args], kwargs)

    def forward_of(self, held: Held) -> Any:
        """The function that a call of a module runs.

        Raises:
            Unreadable: The call does more.
        """
        what = held.path or "it"
        if "forward" in vars(held.module):
            raise Unreadable(f"the forward of {what} was replaced")
        for name in ("__call__", "_call_impl", "_wrapped_call_impl"):
            if self._of_held(held, name, f"{name} of {what}") is not vars(nn.Module)[name]:
                raise Unreadable(f"{what} has a {name} of its own")
        return self._of_held(held, "forward", f"the forward of {what}")

    def _of_held(self, held: Held, name: str, what: str) -> Any:
        return self._found(held.module, name, what, self.class_of(type(held.module)))

    def _found(self, owner: Any, name: str, what: str, cls: type | None = None) -> Any:
        """The attribute of an object; its places are noted."""
        found, places = attribute_places(owner, name, what, cls)
        self.places += places
        return found

    def _number(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if function is len and len(args) == 1 and isinstance(args[0], Held):
            return len(self.members(args[0]))
        if kwargs or not all(map(table.is_plain, args)):
            raise Unreadable(f"it calls {function.__name__}() of what is not a number")
        return result_of_call(f"{function.__name__}()", function, *args)

    def members(self, held: Held) -> list[Held]:
        """The children of a list of modules, in order.

        Raises:
            Unreadable: It is not a list of modules, or has its own way to iterate over them.
        """
        module, cls = held.module, self.class_of(type(held.module))
        kind = next((kind for kind in _LISTS if isinstance(module, kind)), None)
        if kind is None or any(
            getattr(cls, name) is not getattr(kind, name)
            for name in ("__iter__", "__len__", "__getitem__")
        ):
            raise Unreadable(f"{held.path or 'it'} is not a list of modules")
        found, what = module._modules, f"the order of what is in {held.path or 'it'}"
        self.places += [Place(vars(module), "_modules", found, what), key_place(found, what)]
        children = [held.child(name) for name in found]
        self.places += [
            Place(found, name, child.module, child.path)
            for name, child in zip(found, children, strict=True)
        ]
        return children

    # Values

    def value(self, found: Any, what: str, own: Any = MISSING) -> Any:
        """The representation of an object that was looked up."""
        if table.is_plain(found) or isinstance(found, types.ModuleType):
            return found
        if isinstance(found, staticmethod):
            return self.value(found.__func__, what)
        if isinstance(found, types.FunctionType) and own is not MISSING:
            return Callee(found, own)
        if type(found) is functools.partial and not vars(found):
            return self._partial(found, what)
        is_listed = isinstance(found, _BUILT_IN) and found in _LISTED
        if isinstance(found, types.FunctionType) or is_listed or self._is_known(found):
            return Callee(found)
        return Thing(found, what)

    def _partial(self, found: Any, what: str) -> Bound:
        """A function with some of its arguments; those by name may be set later."""
        values = [*found.args, *found.keywords.values()]
        if not all(map(table.is_plain, values)):
            raise Unreadable(f"{what} has arguments that are not plain values")
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
            Unreadable: It is unknown what reading it does.
        """
        if isinstance(value, fx.Node):
            if name in table.PROPERTIES:
                return self.node("call_function", getattr, [value, name], {})
            if name in table.METHODS:
                return Callee(name, value)
            raise Unreadable(f"it asks a value for .{name}")
        if isinstance(value, Held):
            return self._of_module(value, name)
        if type(value) is dict and name == "get":
            return Callee(name, value)
        if not isinstance(value, (types.ModuleType, Thing)):
            raise Unreadable(f"it asks for an unknown attribute .{name}")
        owner, of = value if isinstance(value, Thing) else (value, value.__name__)
        what = f"{of}.{name}"
        found = self._found(owner, name, what)
        if isinstance(found, types.FunctionType) and found is not vars(owner).get(name):
            raise Unreadable(f"it calls {what}()")
        return self.value(found, what)

    def device_type(self, value: fx.Node) -> DeviceType:
        """The type of the device of a value.

        Raises:
            Unreadable: It is unknown.
        """
        if self._device is None:
            raise Unreadable("it asks on which device a value is")
        return DeviceType(value)

    def _compared_device(self, function: Any, *values: Any) -> bool:
        """The result of a comparison of the type of a device, which is noted."""
        a, b = values if len(values) == 2 else (None, None)
        pair: tuple[Any, Any] = (b, a) if isinstance(b, DeviceType) else (a, b)
        device, other = pair
        is_in = function is operator.contains and device is b and type(other) is tuple
        if not table.is_plain(other) or not (is_in or function in (operator.eq, operator.ne)):
            raise Unreadable("it does more with the type of a device than compare it")
        names = other if is_in else (other,)
        self.device_tests.append(DeviceTest(device.of, names, self._device in names))
        return (self._device in names) is not (function is operator.ne)

    def _of_module(self, held: Held, name: str) -> Any:
        what, module = f"{held.path}.{name}".lstrip("."), held.module
        found = self._of_held(held, name, what)
        if name == "training":
            self.places.pop()  # its value may change
            return Mode(held)
        if isinstance(found, nn.Module) and module._modules.get(name) is found:
            return held.child(name)
        if isinstance(found, Tensor):
            if all(found is not own.get(name) for own in (module._parameters, module._buffers)):
                raise Unreadable(f"{what} is a tensor that it does not own")
            self.places.pop()  # another tensor is read like this one
            return self.node("get_attr", what, [], {})
        if type(found) is types.MethodType and found.__self__ is module:
            return self.value(found.__func__, what, held)
        return self.value(found, what, MISSING if name in vars(module) else held)

    def decided(self, value: Any) -> bool:
        """The way that a condition goes.

        Raises:
            Unreadable: It depends on a value that is known only in a call.
        """
        if isinstance(value, Mode):
            module: Any = vars(value.of.module)
            self.places.append(Place(module, "training", module["training"], "training"))
            return bool(module["training"])
        if isinstance(value, Held) and isinstance(value.module, _LISTS):
            return bool(self.members(value))
        if isinstance(value, (Held, Thing)):
            return self._is_true(value)
        if table.is_plain(value) or type(value) in (tuple, dict, Bound, Callee):
            return bool(value)
        raise Unreadable("it branches on a value")

    def _is_true(self, value: Held | Thing) -> bool:
        """Whether an object counts as true: it does if its class does not say otherwise."""
        owner: Any = value.module if isinstance(value, Held) else value.value
        what = value.path or "it" if isinstance(value, Held) else value.what
        cls = self.class_of(type(owner)) if isinstance(value, Held) else type(owner)
        if isinstance(value, Thing):
            self.places.append(Place(Attributes(owner), "__class__", cls, what))
        for name in ("__bool__", "__len__"):
            found, places = class_places(cls, name, what)
            self.places += places
            if found is not MISSING:
                raise Unreadable(f"it branches on {what}, which may be empty")
        return True

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

    def computed(self, function: Any, *values: Any) -> Any:
        """The result of an operator, or its node."""
        if any(isinstance(value, DeviceType) for value in values):
            return self._compared_device(function, *values)
        if any(isinstance(value, fx.Node) for value in values):
            return self.node("call_function", function, values, {})
        if not all(map(table.is_plain, values)):
            raise Unreadable("it computes with something other than numbers")
        return result_of_call("its arithmetic", function, *values)


class EveryWay(Reader):
    """Reads a function once for each combination of its branches, each time from the start."""

    is_rough = True

    _decisions: list[bool]
    _at = 0

    def each_way(self, read: Callable[[], Any]) -> None:
        """Call a function that reads once for each combination of branches.

        Raises:
            Unreadable: A way does something beyond the grammar, or there are too many.
        """
        self._decisions = []
        for _ in range(_MOST_WAYS):
            self._at = 0
            read()
            self.places = [*{place.key: place for place in self.places}.values()]
            while self._decisions and self._decisions[-1]:
                self._decisions.pop()
            if not self._decisions:
                return
            self._decisions[-1] = True
        raise Unreadable("it has too many branches")

    def decided(self, value: Any) -> bool:
        """The way that a condition goes this time."""
        if not isinstance(value, fx.Node):
            return super().decided(value)
        if self._at == len(self._decisions):
            self._decisions.append(False)
        self._at += 1
        return self._decisions[self._at - 1]


_BUILT_IN = types.BuiltinFunctionType, type
_LISTED = {*table.FUNCTIONS, *table.RANDOM, *table.NUMBERS, range, enumerate, zip, reversed}


def _argument(value: Any) -> Any:
    """A value as the argument of a node.

    Raises:
        Unreadable: A node cannot have such an argument.
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
    raise Unreadable("it passes a function something other than a plain value")
