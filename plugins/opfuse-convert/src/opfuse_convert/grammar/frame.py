"""The statements and expressions of one function."""

from __future__ import annotations

import ast
import inspect
import itertools
import operator
import types
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from . import table
from .reads import MISSING, name_places
from .source import Unreadable, result_of_call
from .values import Callee, Held, Parts

_MOST = 256


def bound(function: types.FunctionType, args: Sequence[Any], kwargs: Any) -> dict[str, Any]:
    """The local names of a call.

    Raises:
        Unreadable: The call does not fit, or has a default that is not a plain value.
    """
    signature = inspect.signature(function, follow_wrapped=False)
    try:
        found = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise Unreadable(f"{function.__name__} {error}") from error
    given = {*found.arguments}
    found.apply_defaults()
    for name, value in found.arguments.items():
        default = signature.parameters[name].default
        if name not in given and value is default and not table.is_plain(default):
            raise Unreadable(f"the default of {name} is not a plain value")
    return found.arguments


class Frame:
    """The local names of one function while it is read.

    Args:
        reader: The :class:`~opfuse_convert.grammar.Reader`.
        function: The function.
        names: Its local names.
    """

    def __init__(self, reader: Any, function: types.FunctionType, names: dict[str, Any]) -> None:
        self.reader, self.function, self.names = reader, function, names
        code = function.__code__
        self._local: Collection[str] = {*code.co_varnames, *code.co_cellvars}
        if code.co_cellvars:
            raise Unreadable("it has functions of its own")

    # Statements

    def block(self, body: Sequence[ast.stmt]) -> Any:
        """Read statements; return their result, or :data:`MISSING`."""
        for statement in body:
            result = self.statement(statement)
            if result is not MISSING:
                return result
        return MISSING

    def statement(self, node: ast.stmt) -> Any:
        """Read one statement; return its result, or :data:`MISSING`."""
        if isinstance(node, ast.Return):
            return None if node.value is None else self.expression(node.value)
        if isinstance(node, ast.Assign):
            value = self.expression(node.value)
            for target in node.targets:
                self._assign(target, value)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            self._assign(node.target, self.expression(node.value))
        elif isinstance(node, ast.AugAssign):
            self._augment(node)
        elif isinstance(node, ast.If):
            taken = self.reader.decided(self.expression(node.test))
            return self.block(node.body if taken else node.orelse)
        elif isinstance(node, ast.For):
            return self._loop(node)
        elif isinstance(node, ast.Expr):
            self.expression(node.value)
        elif isinstance(node, ast.Delete):
            for target in node.targets:
                if not isinstance(target, ast.Name) or target.id not in self.names:
                    raise Unreadable("it deletes something other than a local name with a value")
                del self.names[target.id]
        elif not isinstance(node, ast.Pass):
            raise Unreadable(f"it has a statement beyond the grammar ({_kind(node)})")
        return MISSING

    def _assign(self, target: ast.expr, value: Any) -> None:
        if isinstance(target, ast.Name) and target.id in self._local:
            self.names[target.id] = value
        elif isinstance(target, (ast.Tuple, ast.List)):
            parts = self._parts(value, len(target.elts))
            for each, part in zip(target.elts, parts, strict=True):
                self._assign(each, part)
        else:
            raise Unreadable("it sets something other than a local name")

    def _parts(self, value: Any, count: int) -> Sequence[Any]:
        """Unpack a value into a number of parts."""
        if type(value) is tuple and len(value) == count:
            return value
        if isinstance(value, fx.Node) and value.target in (torch.chunk, "chunk"):
            chunks = value.args[1] if len(value.args) > 1 else None
            if type(chunks) is int and chunks == count:
                return [self.reader.computed(operator.getitem, value, i) for i in range(count)]
        raise Unreadable("it unpacks a value of unknown size")

    def _augment(self, node: ast.AugAssign) -> None:
        if not isinstance(node.target, ast.Name):
            raise Unreadable("it sets something other than a local name")
        before = self.expression(ast.Name(node.target.id, ast.Load()))
        value = self.expression(node.value)
        if isinstance(before, fx.Node) or not table.is_plain(before):
            raise Unreadable("it may write into a tensor")
        self._assign(node.target, self.reader.computed(_operator(node.op), before, value))

    def _loop(self, node: ast.For) -> Any:
        if node.orelse:
            raise Unreadable("its loop has an else")
        items = self.items(self.expression(node.iter))
        if len(items) > _MOST:
            raise Unreadable("its loop is long")
        for item in items:
            self._assign(node.target, item)
            result = self.block(node.body)
            if result is not MISSING:
                return result
        return MISSING

    def items(self, value: Any) -> Sequence[Any]:
        """The items of a loop."""
        found: Any = self.reader.members(value) if isinstance(value, Held) else value
        if not isinstance(found, (tuple, list)):
            raise Unreadable("it loops over something other than a list of modules")
        return found

    # Expressions

    def expression(self, node: ast.expr) -> Any:
        """Return the value of an expression."""
        read = getattr(self, f"_of_{type(node).__name__.lower()}", None)
        if read is None:
            raise Unreadable(f"it has an expression beyond the grammar ({_kind(node)})")
        return read(node)

    def _of_constant(self, node: ast.Constant) -> Any:
        if not table.is_plain(node.value):
            raise Unreadable("it has a constant that is not a plain value")
        return node.value

    def _of_name(self, node: ast.Name) -> Any:
        name = node.id
        is_local = name in self._local
        if is_local:
            found = self.names.get(name, MISSING)
        else:
            found, places = name_places(self.function, name)
            self.reader.places += places
        if found is MISSING:
            raise Unreadable(f"{name} has no value yet")
        return found if is_local else self.reader.value(found, name)

    def _of_attribute(self, node: ast.Attribute) -> Any:
        name = node.attr
        if name.startswith("__") and not name.endswith("__"):
            raise Unreadable(f"it has a private name ({name})")
        of = node.value
        if name == "type" and isinstance(of, ast.Attribute) and of.attr == "device":
            owner = self.expression(of.value)
            if isinstance(owner, fx.Node):
                return self.reader.device_type(owner)
            return self.reader.attribute(self.reader.attribute(owner, of.attr), name)
        return self.reader.attribute(self.expression(of), name)

    def _of_tuple(self, node: ast.Tuple) -> Any:
        found = self._of_list(node)
        return tuple(found) if type(found) is list else found

    def _of_list(self, node: ast.List | ast.Tuple) -> Any:
        found = self._arguments(node.elts)
        if any(isinstance(each, Parts) for each in found):
            return self.reader.node("call_function", tuple, found, {})
        return found

    def _of_binop(self, node: ast.BinOp) -> Any:
        a, b = self.expression(node.left), self.expression(node.right)
        return self.reader.computed(_operator(node.op), a, b)

    def _of_unaryop(self, node: ast.UnaryOp) -> Any:
        value = self.expression(node.operand)
        if isinstance(node.op, ast.Not):
            return not self.reader.decided(value)
        return self.reader.computed(_operator(node.op), value)

    def _of_boolop(self, node: ast.BoolOp) -> Any:
        stops = isinstance(node.op, ast.Or)
        value: Any = None
        for each in node.values:
            value = self.expression(each)
            if self.reader.decided(value) is stops:
                return value
        return value

    def _of_ifexp(self, node: ast.IfExp) -> Any:
        taken = self.reader.decided(self.expression(node.test))
        return self.expression(node.body if taken else node.orelse)

    def _of_compare(self, node: ast.Compare) -> Any:
        if len(node.ops) != 1:
            raise Unreadable("it compares more than two values at once")
        a, b = self.expression(node.left), self.expression(node.comparators[0])
        (kind,) = map(_kind, node.ops)
        if kind in ("Is", "IsNot"):
            return self._is_none(a, b) is (kind == "Is")
        if kind in ("In", "NotIn"):
            b = tuple(b) if type(b) in (list, dict) else b
            found = self.reader.computed(operator.contains, b, a)
            return found if kind == "In" else not self.reader.decided(found)
        return self.reader.computed(_operator(node.ops[0]), a, b)

    def _is_none(self, a: Any, b: Any) -> bool:
        if b is not None:
            raise Unreadable("it tests the identity of a value (is, is not)")
        if isinstance(a, fx.Node):
            raise Unreadable("it asks whether a value is None")
        return a is None

    def _of_subscript(self, node: ast.Subscript) -> Any:
        value, key = self.expression(node.value), self.expression(node.slice)
        if isinstance(value, fx.Node):
            return self.reader.node("call_function", operator.getitem, [value, key], {})
        parts = self.reader.members(value) if isinstance(value, Held) else value
        is_number = type(parts) in (tuple, list) and type(key) is int
        if is_number and -len(parts) <= key < len(parts):
            return parts[key]
        raise Unreadable("it indexes a value whose parts are unknown")

    def _of_slice(self, node: ast.Slice) -> Any:
        parts = node.lower, node.upper, node.step
        return slice(*[part and self.expression(part) for part in parts])

    def _of_call(self, node: ast.Call) -> Any:
        callee = self.expression(node.func)
        args = self._arguments(node.args)
        of_value = isinstance(callee, Callee) and isinstance(callee.own, fx.Node)
        if not of_value and any(isinstance(each, Parts) for each in args):
            raise Unreadable("it passes on parts of a value")
        kwargs: dict[str, Any] = {}
        for keyword in node.keywords:
            value = self.expression(keyword.value)
            more = {keyword.arg: value} if keyword.arg is not None else value
            if not isinstance(more, dict) or more.keys() & kwargs.keys():
                raise Unreadable("it passes on unknown keywords")
            kwargs |= more
        if isinstance(callee, Callee) and callee.function in (range, enumerate, zip, reversed):
            return self._listed(callee.function, args, kwargs)
        return self.reader.call(callee, args, kwargs)

    def _arguments(self, nodes: Sequence[ast.expr]) -> list[Any]:
        values: list[Any] = []
        for each in nodes:
            if not isinstance(each, ast.Starred):
                values.append(self.expression(each))
                continue
            value = self.expression(each.value)
            is_one = self.reader.is_rough and isinstance(value, fx.Node)
            values += [Parts(value)] if is_one else self.items(value)
        return values

    def _listed(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        numbers = [*(args if function is range else ()), *kwargs.values()]
        if not all(map(table.is_plain, numbers)):
            raise Unreadable(f"it calls {function.__name__}() with a value that is not plain")
        items = args if function is range else [self.items(each) for each in args]
        listed: list[Any] = result_of_call(
            f"{function.__name__}()",
            lambda: list(itertools.islice(function(*items, **kwargs), _MOST + 1)),
        )
        return listed


def _operator(node: ast.operator | ast.unaryop | ast.cmpop) -> Any:
    function = table.OPERATORS.get(_kind(node))
    if function is None:
        raise Unreadable(f"it has an operator beyond the grammar ({_kind(node)})")
    return function


def _kind(node: ast.AST) -> str:
    return type(node).__name__
