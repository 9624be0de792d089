"""A function's statements as small steps, in the order in which Python runs them."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

TEMP = "_opfuse_"
"""The prefix of local names that only a rewritten function has."""

_ENDS = ast.Return, ast.Raise, ast.Continue, ast.Break
_WITH_VALUE = ast.Return, ast.Expr, ast.Assign, ast.AnnAssign, ast.AugAssign


class Loop(NamedTuple):
    """The names that are read after ``continue``, and after ``break``."""

    again: frozenset[str] = frozenset()
    after: frozenset[str] = frozenset()


NO_LOOP = Loop()


def _names(node: ast.AST, *contexts: type[ast.expr_context]) -> frozenset[str]:
    names = [each for each in ast.walk(node) if isinstance(each, ast.Name)]
    return frozenset(name.id for name in names if isinstance(name.ctx, contexts))


def loads(node: ast.AST) -> frozenset[str]:
    """The names that are read somewhere in a statement."""
    written = [n.target for n in ast.walk(node) if isinstance(n, ast.AugAssign)]
    return _names(node, ast.Load) | {n.id for n in written if isinstance(n, ast.Name)}


def stores(node: ast.AST) -> frozenset[str]:
    """The names that may be set, or deleted, somewhere in a statement."""
    found = set()
    for each in ast.walk(node):
        if isinstance(each, ast.alias):
            found.add((each.asname or each.name).partition(".")[0])
        elif isinstance(each, (ast.FunctionDef, ast.ClassDef, ast.ExceptHandler)) and each.name:
            found.add(each.name)
    return _names(node, ast.Store, ast.Del) | found


def read_later(node: ast.AST) -> frozenset[str]:
    """The names that functions inside a statement read whenever they are called."""
    kinds = ast.FunctionDef, ast.ClassDef, ast.Lambda, ast.GeneratorExp
    return frozenset().union(*[loads(n) for n in ast.walk(node) if isinstance(n, kinds)])


def deletes(node: ast.AST) -> frozenset[str]:
    """The names that are deleted somewhere in a statement, or may be gone after it."""
    handlers = [n for n in ast.walk(node) if isinstance(n, ast.ExceptHandler)]
    return _names(node, ast.Del) | {n.name for n in handlers if n.name}


def to_delete(name: str) -> str:
    """The entry among live names for a name that may be deleted, so it must have a value."""
    return f"del {name}"


def _needs(node: ast.AST) -> frozenset[str]:
    return loads(node) | {to_delete(name) for name in _names(node, ast.Del)}


def _targets(node: ast.stmt) -> frozenset[str]:
    """The names that an assignment or a deletion is for.

    Others that a statement has in it may stay as they are: that of a comprehension is a variable of
    its own, ``:=`` may stand where it is not reached, and an annotation alone sets nothing.
    """
    waiting: list[Any] = [*getattr(node, "targets", ())]
    if isinstance(node, ast.AugAssign) or (isinstance(node, ast.AnnAssign) and node.value):
        waiting.append(node.target)
    found = set()
    while waiting:
        each = waiting.pop()
        if isinstance(each, ast.Name):
            found.add(each.id)
        waiting += [each.value] if isinstance(each, ast.Starred) else getattr(each, "elts", ())
    return frozenset(found)


def surely(body: Sequence[ast.stmt]) -> frozenset[str] | None:
    """The names that statements set in any case; None: the statements after them never run."""
    found: frozenset[str] = frozenset()
    for node in body:
        if isinstance(node, _ENDS):
            return None
        if isinstance(node, ast.If):
            both = [of for of in (surely(node.body), surely(node.orelse)) if of is not None]
            if not both:
                return None
            found |= frozenset.intersection(*both)
        elif isinstance(node, ast.With):
            found |= surely(node.body) or frozenset()
        elif not isinstance(node, ast.Delete):
            found |= _targets(node)
    return found


def live_before(
    body: Sequence[ast.stmt], after: frozenset[str], loop: Loop = NO_LOOP
) -> list[frozenset[str]]:
    """The names that may still be read, before each statement and after the last one.

    A name that may be deleted is in it as :func:`to_delete` writes it.
    """
    found = [after]
    for node in reversed(body):
        found.append(_live(node, found[-1], loop))
    return found[::-1]


def _live(node: ast.stmt, after: frozenset[str], loop: Loop) -> frozenset[str]:
    if isinstance(node, (ast.Return, ast.Raise)):
        return loads(node)
    if isinstance(node, ast.Continue):
        return loop.again
    if isinstance(node, ast.Break):
        return loop.after
    if isinstance(node, ast.If):
        either = [live_before(body, after, loop)[0] for body in (node.body, node.orelse)]
        return loads(node.test) | either[0] | either[1]
    if isinstance(node, (ast.For, ast.While)):
        return live_at_loop(node, after, loop).again | after | loads(_head(node))
    gone = _targets(node)
    if any(isinstance(each, (ast.Continue, ast.Break)) for each in ast.walk(node)):
        after |= loop.again  # from inside of with, try or match
    return (after - gone - {to_delete(name) for name in gone}) | _needs(node)


def _head(node: ast.For | ast.While) -> ast.expr:
    return node.iter if isinstance(node, ast.For) else node.test


def live_at_loop(node: ast.For | ast.While, after: frozenset[str], around: Loop) -> Loop:
    """The names that may be read when a loop goes on, and after it; its ``else`` is of another."""
    behind = after | live_before(node.orelse, after, around)[0]
    head = behind | loads(_head(node))
    for _ in range(2):
        head |= live_before(node.body, head, Loop(head, after))[0]
    return Loop(head, after)


class _Whole(Exception):
    """An expression is better left as it is."""


class Flattener:
    """Takes expressions apart, so that each call and each sum is a statement of its own.

    The statements compute the same as before, in the same order. Each part gets a temporary name,
    which is read once.

    Args:
        local: The local names of the function, and all temporary names.
    """

    def __init__(self, local: frozenset[str]) -> None:
        self._local, self._count = local, 0
        self._out: list[ast.stmt] = []

    def steps(self, node: ast.stmt) -> list[ast.stmt]:
        """A statement as steps; one that is not taken apart is the only one."""
        if any(isinstance(each, ast.NamedExpr) for each in ast.walk(node)):
            return [node]
        made: Any = copy.copy(node)
        if not isinstance(made, _WITH_VALUE) or made.value is None:
            return [node]
        targets = made.targets if isinstance(made, ast.Assign) else [getattr(made, "target", None)]
        is_named = len(targets) == 1 and isinstance(targets[0], ast.Name)
        if isinstance(made, (ast.AnnAssign, ast.AugAssign)) and not is_named:
            return [node]
        stays = isinstance(made, ast.Expr) or (is_named and not isinstance(made, ast.AugAssign))
        self._out = []
        try:
            made.value = (self._operation if stays else self._inert)(made.value)
        except _Whole:
            return [node]
        return [*(ast.copy_location(step, node) for step in self._out), made]

    def _temp(self, node: ast.expr) -> ast.expr:
        value = self._operation(node)
        name = f"{TEMP}{self._count}"
        self._count += 1
        target = ast.copy_location(ast.Name(name, ast.Store()), node)
        self._out.append(ast.copy_location(ast.Assign([target], value), node))
        return ast.copy_location(ast.Name(name, ast.Load()), node)

    def _inert(self, node: ast.expr) -> ast.expr:
        """An expression that computes nothing; the original's computation becomes a step before."""
        if _is_inert(node):
            return node
        if isinstance(node, (ast.Attribute, ast.Tuple, ast.List)):
            return self._operation(node)
        return self._temp(node)

    def _in_order(self, nodes: Sequence[ast.expr]) -> list[ast.expr]:
        """Expressions that compute nothing; the originals' computations become steps, in order."""
        last = max((i for i, node in enumerate(nodes) if not _is_inert(node)), default=-1)
        found = []
        for number, node in enumerate(nodes):
            if number == last or (number < last and not self._is_fixed(node)):
                if isinstance(node, (ast.Starred, ast.Slice)):
                    raise _Whole
                node = self._inert(node) if number == last else self._temp(node)
            found.append(node)
        return found

    def _is_fixed(self, node: ast.expr) -> bool:
        """Whether calls that run before cannot change the value of an expression."""
        is_local = isinstance(node, ast.Name) and node.id in self._local
        return is_local or isinstance(node, ast.Constant)

    def _operation(self, node: ast.expr) -> ast.expr:
        """An expression as one operation on values that are already computed."""
        made: Any = copy.copy(node)
        if isinstance(made, ast.Attribute):
            made.value = self._inert(made.value)
        elif isinstance(made, (ast.Tuple, ast.List)):
            made.elts = self._in_order(made.elts)
        elif isinstance(made, ast.BinOp):
            made.left, made.right = self._in_order([made.left, made.right])
        elif isinstance(made, ast.UnaryOp):
            made.operand = self._inert(made.operand)
        elif isinstance(made, ast.Compare) and len(made.ops) == 1:
            made.left, *made.comparators = self._in_order([made.left, *made.comparators])
        elif isinstance(made, ast.Subscript):
            made.value, made.slice = self._in_order([made.value, made.slice])
        elif isinstance(made, ast.Call):
            self._of_call(made)
        return made  # type: ignore[no-any-return]

    def _of_call(self, made: ast.Call) -> None:
        if any(k.arg is None and not self._is_fixed(k.value) for k in made.keywords):
            raise _Whole
        func = made.func
        if isinstance(func, ast.Attribute) and not _is_inert(func):
            func = self._operation(func)
        values = self._in_order([func, *made.args, *[k.value for k in made.keywords]])
        count = 1 + len(made.args)
        made.func, made.args = values[0], values[1:count]
        pairs = zip(made.keywords, values[count:], strict=True)
        made.keywords = [ast.keyword(k.arg, value) for k, value in pairs]


def _is_inert(node: ast.expr) -> bool:
    """Whether an expression only looks values up."""
    if isinstance(node, (ast.Constant, ast.Name)):
        return True
    if isinstance(node, (ast.Attribute, ast.Starred)):
        return _is_inert(node.value)
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.operand, ast.Constant)
    if isinstance(node, (ast.Tuple, ast.List)):
        return all(map(_is_inert, node.elts))
    if isinstance(node, ast.Slice):
        return all(map(_is_inert, filter(None, (node.lower, node.upper, node.step))))
    return False


def blocks(node: ast.stmt) -> Iterator[list[ast.stmt]]:
    """The bodies of a statement in which a chain may replace statements."""
    if isinstance(node, (ast.If, ast.For, ast.While)):
        yield node.body
        yield node.orelse
    elif isinstance(node, ast.With):
        yield node.body
