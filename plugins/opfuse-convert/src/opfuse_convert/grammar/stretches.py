"""Reads stretches of statements of a function that is not entirely in the grammar."""

from __future__ import annotations

import ast
import itertools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import fx, nn

from . import statements, table
from .frame import Frame
from .reader import Reader
from .reads import MISSING, Place
from .source import Unreadable
from .statements import TEMP, Flattener, Loop
from .values import Callee, DeviceTest, Held, Thing

UNKNOWN: Any = type("Unknown", (), {"__repr__": lambda self: "some value"})()
"""Marks a local name whose value is unknown."""

MAYBE_SET: Any = type("MaybeSet", (), {"__repr__": lambda self: "some value, or none"})()
"""Marks a local name that may not have a value."""

NOT_NONE: Any = type("NotNone", (), {"__repr__": lambda self: "another value"})()
"""Marks one that is known not to be None."""


_Names = frozenset[str]


class Read(NamedTuple):
    """A step that was read.

    Attributes:
        node: The statement.
        nodes: What it computes.
        before: The local names before it.
        asked: Names that it compares with None.
        called: Dotted names of the modules that it calls.
        places: Where it looked things up.
        device_tests: The comparisons of devices that it depends on.
    """

    node: ast.stmt
    nodes: Sequence[fx.Node]
    before: Mapping[str, Any]
    asked: Sequence[str]
    called: Sequence[str]
    places: Sequence[Place]
    device_tests: Sequence[DeviceTest]


class Alone(NamedTuple):
    """A call of a part, just before a stretch, whose result a span takes and nothing else does.

    Attributes:
        part: The expression of the part, in the tree.
        item: Which item of the result it is; -1: the result itself.
        assumed: Names, and the values with which that is so.
        places: Where things were looked up.
    """

    part: ast.Attribute
    item: int
    assumed: Mapping[str, Any]
    places: Sequence[Place]


class Span(NamedTuple):
    """Statements that can be replaced.

    Attributes:
        block: The statements around.
        first: The first step of the span.
        last: The last one.
        entering: The names of the values that it takes.
        assumed: Names, and the values that they must have.
        same: Lists of names that must all have the same value.
        results: The names that it sets, and how to get their values: see :func:`result_of`.
        gone: Names that have a value before it, and none after it.
        called: Dotted names of the modules that are called in it.
        places: Where things were looked up.
        device_tests: Comparisons of the devices of values that it takes or computes.
        is_sure: Whether all names that it takes have values whenever it is reached.
        alone: Where the first value that it takes comes from, if nothing else takes that.
    """

    block: CodeBlock
    first: int
    last: int
    entering: Sequence[str]
    assumed: Mapping[str, Any]
    same: Sequence[Sequence[str]]
    results: Mapping[str, Any]
    gone: Sequence[str]
    called: Sequence[str]
    places: Sequence[Place]
    device_tests: Sequence[DeviceTest]
    is_sure: bool
    alone: Alone | None = None

    @property
    def line(self) -> int:
        """Where it begins in the source."""
        return self.block.body[self.numbers[0]].lineno

    @property
    def numbers(self) -> tuple[int, int]:
        """The numbers of the first and the last statement."""
        return self.block.parts[self.first][1], self.block.parts[self.last][1]

    def returned(self, tree: ast.FunctionDef) -> int | None:
        """Which item of the function's result its only result is, -1: all; None: that is unknown.

        Args:
            tree: The tree of the function.
        """
        parts, made = [step for step, _ in self.block.parts], [*self.results.items()]
        following, always = parts[self.last + 1 : self.last + 2], self.block.lives[-1]
        is_one = [how for _, how in made] == [("chain", None)] and made[0][0] not in always
        if self.block.body is not tree.body or not is_one:
            return None
        match following:
            case [ast.Return(ast.Name(name))] if name == made[0][0]:
                return -1
            case [ast.Return(ast.Tuple(items))]:
                names = [getattr(item, "id", "") for item in items]
                return names.index(made[0][0]) if names.count(made[0][0]) == 1 else None
        return None

    def statements(self) -> list[ast.AST]:
        """Its statements, and those in them."""
        begin, end = self.numbers
        found = itertools.chain.from_iterable(map(ast.walk, self.block.body[begin : end + 1]))
        return [node for node in found if isinstance(node, ast.stmt)]


class _Frame(Frame):
    """The local names in the middle of a function; values that come in may be tested for None."""

    def __init__(self, reader: Any, function: Any, local: frozenset[str]) -> None:
        self.reader, self.function, self.names = reader, function, {}
        self._local = local
        self.not_none: dict[fx.Node, str] = {}
        self.maybe_set: set[fx.Node] = set()
        self.asked: list[str] = []

    def _is_none(self, a: Any, b: Any) -> bool:
        if b is None and isinstance(a, fx.Node) and a in self.not_none:
            self.asked.append(self.not_none[a])
            return False
        return super()._is_none(a, b)


class Stretch:
    """Consecutive statements that are read from given local names on.

    Args:
        survey: The survey of the function.
        block: The statements.
        names: The local names that have a value.
        first: The number of the first step.

    Attributes:
        graph: The computation of the statements.
        names: The local names now.
        modes: Nodes that follow the mode of a module.
    """

    def __init__(
        self, survey: Survey, block: CodeBlock, names: Mapping[str, Any], first: int
    ) -> None:
        self.graph, self._block, self._first = fx.Graph(), block, first
        self._reader, self._own = survey.reader(self.graph), survey.own
        self._frame = _Frame(self._reader, survey.function, survey.local)
        for name, value in names.items():
            if any(value is mark for mark in (UNKNOWN, NOT_NONE, MAYBE_SET)):
                node = self.graph.placeholder(name)
                if value is NOT_NONE:
                    self._frame.not_none[node] = name
                elif value is MAYBE_SET:
                    self._frame.maybe_set.add(node)
                value = node
            self._frame.names[name] = value
        self.names, self.modes = self._frame.names, self._reader.modes
        self._reads: list[Read] = []

    def read(self, node: ast.stmt) -> bool:
        """Read a step if it is in the grammar, and return whether it is."""
        reader, frame = self._reader, self._frame
        before, count = dict(frame.names), len(self.graph.nodes)
        reader.places, reader.called, reader.device_tests, frame.asked = [], [], [], []
        try:
            fits = frame.statement(node) is MISSING
        except (Unreadable, RecursionError):
            fits = False
        nodes = [*self.graph.nodes][count:]
        if fits:
            kept = frame.asked, reader.called, reader.places, reader.device_tests
            self._reads.append(Read(node, nodes, before, *kept))
            return True
        self._erase(nodes)
        frame.names.clear()
        frame.names.update(before)
        return False

    def _erase(self, nodes: Sequence[fx.Node]) -> None:
        for made in reversed(nodes):
            self._reader.modes.pop(made, None)
            self.graph.erase_node(made)

    def taken(self, node: ast.If) -> Sequence[ast.stmt] | None:
        """The branch that a condition takes now; None: it is not known."""
        count = len(self.graph.nodes)
        try:
            taken = self._reader.decided(self._frame.expression(node.test))
            return node.body if taken else node.orelse
        except (Unreadable, RecursionError):
            return None
        finally:
            self._erase([*self.graph.nodes][count:])

    def left(self, node: ast.stmt | None) -> dict[str, Any]:
        """The known local names after a statement that could not be read; None: before it."""
        found = {name: self._carried(value) for name, value in self.names.items()}
        if node is None:
            return found
        sure = statements.surely([node]) or frozenset()
        for name in statements.stores(node):
            is_set = name in sure or found.get(name, MAYBE_SET) is not MAYBE_SET
            found[name] = UNKNOWN if is_set else MAYBE_SET
        for name in statements.deletes(node):
            found.pop(name, None)
        return found

    def _carried(self, value: Any) -> Any:
        if isinstance(value, fx.Node):
            if value in self._frame.maybe_set:
                return MAYBE_SET
            return NOT_NONE if value in self._frame.not_none else UNKNOWN
        return UNKNOWN if object_of(value) is MISSING else value

    def close(self) -> bool:
        """End the graph with the values that are read later; return whether it computes any."""
        live = self._block.lives[self._first + len(self._reads)]
        kept = [value for name, value in self.names.items() if name in live]
        self.graph.output(tuple(_nodes_in(kept)))
        return any(read.nodes for read in self._reads)

    def span(
        self, covered: frozenset[fx.Node], enters: Sequence[fx.Node], end: fx.Node
    ) -> Span | None:
        """The statements that compute some nodes; None: a chain cannot replace them.

        Args:
            covered: The nodes.
            enters: The values that the chain takes.
            end: The value that the chain computes.
        """
        inside = [not covered.isdisjoint(read.nodes) for read in self._reads]
        first, last = inside.index(True), len(inside) - inside[::-1].index(True) - 1
        span = self._reads[first : last + 1]
        if any(not covered.issuperset(read.nodes) for read in span):
            return None
        while first and _is_for(self._reads[first - 1], span):
            first -= 1
            span = self._reads[first : last + 1]
        before = span[0].before
        after = self._reads[last + 1].before if last + 1 < len(self._reads) else self.names
        assumed, known = self._taken(span, before)
        unknown = any(object_of(value) is MISSING for value in assumed.values())
        tests = [test for read in span for test in read.device_tests]
        here = covered | {*enters}
        if unknown or not known.keys() >= {*enters} or not all(test.of in here for test in tests):
            return None
        entering = [known[node][0] for node in enters]
        live = self._block.lives[self._first + last + 1]
        results = self._results(span, end, known, after, live, entering)
        if not results:
            return None
        return Span(
            self._block,
            self._first + first,
            self._first + last,
            entering,
            assumed,
            [names for names in known.values() if len(names) > 1],
            results,
            sorted(before.keys() - after.keys()),
            [name for read in span for name in read.called],
            [place for read in span for place in read.places],
            tests,
            self._frame.maybe_set.isdisjoint(known),
        )

    def alone(self, span: Span, covered: frozenset[fx.Node], start: fx.Node) -> Alone | None:
        """Where a value that a span takes comes from, if nothing else takes it; or None.

        Args:
            span: The span.
            covered: Its nodes.
            start: The value.
        """
        ahead = [step for step, _ in self._block.parts[: self._first]]
        part, item, of = _call_of(str(start.target), ahead)
        count = span.last + 1 - self._first
        inside, later = self._reads[:count], self._reads[count:]
        asks = any(read.asked or read.device_tests for read in inside)
        is_alone = start.op == "placeholder" and covered.issuperset(start.users)
        if part is None or asks or not is_alone:
            return None
        names, live = later[0].before if later else self.names, self._block.lives[span.last + 1]
        if not all([_is_other(value, start) for name, value in names.items() if name in live]):
            return None
        assumed = self._taken(inside, inside[0].before)[0]
        unknown = any([object_of(value) is MISSING for value in assumed.values()])
        if unknown or any([name in of or name.startswith(TEMP) for name in assumed]):
            return None
        return Alone(part, item, assumed, [place for read in inside for place in read.places])

    def _taken(
        self, span: Sequence[Read], before: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[fx.Node, list[str]]]:
        """The values that a span gets by names that it has not set.

        Returns:
            Names and the objects that they must have; the values of the graph, each with its names.
        """
        assumed: dict[str, Any] = {}
        known: dict[fx.Node, list[str]] = {}
        bound: set[str] = {self._own}
        for read in span:
            for name in sorted(statements.loads(read.node) & before.keys() - bound):
                value = before[name]
                if not isinstance(value, fx.Node):
                    assumed[name] = value
                elif name not in known.get(value, ()):
                    known.setdefault(value, []).append(name)
            assumed |= {name: NOT_NONE for name in read.asked if name not in bound}
            bound |= statements.stores(read.node)
        return assumed, known

    def _results(
        self, span: Any, end: Any, known: Any, after: Any, live: Any, entering: list[str]
    ) -> dict[str, Any] | None:
        """The names that are read later, and how to get their values; None: one is unavailable."""
        results: dict[str, Any] = {}
        for name in sorted({n for read in span for n in statements.stores(read.node)}):
            if name in live:
                made = result_of(after.get(name, UNKNOWN), end, known, entering)
                if made is None:
                    return None
                results[name] = made
            elif statements.to_delete(name) in live and name in after:
                results[name] = "is", None
        return results


def result_of(value: Any, end: fx.Node, known: Mapping[Any, Any], entering: list[str]) -> Any:
    """How to get a value after a chain, as a pair.

    ``"chain", None`` is the output of the chain; ``"in", number`` is a value that came in;
    ``"is", value`` is an object; ``"tuple", parts`` is a tuple of such pairs. None: it cannot be
    had.
    """
    if value is end:
        return "chain", None
    if isinstance(value, fx.Node):
        if value not in known:
            return None
        name = known[value][0]
        if name not in entering:
            entering.append(name)
        return "in", entering.index(name)
    if type(value) is tuple and not table.is_plain(value):
        inner = [result_of(each, end, known, entering) for each in value]
        return None if None in inner else ("tuple", inner)
    found = object_of(value)
    return None if found is MISSING else ("is", found)


def _call_of(name: str, steps: Sequence[ast.stmt]) -> tuple[Any, int, _Names]:
    """The part whose call gives a name its value in the last of some steps, or None.

    Returns:
        The part, which item of its result the value is, and all names that the call sets.
    """
    match steps:
        case [*_, ast.Assign([ast.Name(n)], ast.Call(ast.Attribute() as part)) as got] if n == name:
            return part, -1, statements.stores(got)
        case [
            *_,
            ast.Assign([ast.Name(whole)], ast.Call(ast.Attribute() as part)),
            ast.Assign([ast.Tuple(items)], ast.Name(apart)) as taken,
        ] if whole == apart and whole.startswith(TEMP):
            names = [item.id if isinstance(item, ast.Name) else "" for item in items]
            if names.count(name) == 1 and "" not in names:
                return part, names.index(name), statements.stores(taken)
    return None, -1, frozenset()


def _is_other(value: Any, node: fx.Node) -> bool:
    """Whether a value is known to be another one than that of a node, and not to contain it."""
    if type(value) in (tuple, list):
        return all([_is_other(each, node) for each in value])
    is_node = isinstance(value, fx.Node)
    return value is not node if is_node else object_of(value) is not MISSING


def object_of(value: Any) -> Any:
    """The object that a value represents; :data:`MISSING`: it may differ each time."""
    if table.is_plain(value) or isinstance(value, types.ModuleType) or value is NOT_NONE:
        return value
    if isinstance(value, Held):
        return value.module
    if isinstance(value, Thing):
        return value.value
    if isinstance(value, Callee) and value.own is MISSING:
        return value.function
    return MISSING


def _is_for(read: Read, span: Sequence[Read]) -> bool:
    """Whether a step only looks something up for other steps."""
    made = statements.stores(read.node)
    used = frozenset().union(*[statements.loads(each.node) for each in span])
    return not read.nodes and all(n.startswith(TEMP) for n in made) and made <= used


def _nodes_in(value: Any) -> Iterator[fx.Node]:
    if isinstance(value, fx.Node):
        yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _nodes_in(each)


class CodeBlock(NamedTuple):
    """Statements as steps.

    Attributes:
        body: The statements.
        parts: The steps, each with the number of its statement.
        lives: The names that may still be read, before each step and after the last one.
    """

    body: list[ast.stmt]
    parts: Sequence[tuple[ast.stmt, int]]
    lives: Sequence[frozenset[str]]


class Survey:
    """Looks for stretches in all blocks of a function.

    Args:
        module: The module that the function is a method of.
        function: The function.
        tree: Its tree, which belongs to the caller.
        names: The known values of its parameters.
        reader: Makes a reader for a graph.

    Attributes:
        stretches: Those that compute something.

    Raises:
        Unreadable: The function cannot be rewritten.
    """

    def __init__(
        self,
        module: nn.Module,
        function: types.FunctionType,
        tree: ast.FunctionDef,
        names: Mapping[str, Any],
        reader: Callable[[fx.Graph], Reader],
    ) -> None:
        self.function, self.reader, self.own = function, reader, next(iter(names))
        self.stretches: list[Stretch] = []
        self.local = _Local([*function.__code__.co_varnames, *function.__code__.co_cellvars])
        _check(tree, self.own)
        self._flat = Flattener(self.local)
        start = {**names, self.own: Held(module, "")}
        always = frozenset().union(*map(statements.read_later, tree.body))
        self._block(tree.body, start, frozenset(), Loop(), always)

    def _block(
        self, body: list[ast.stmt], names: dict[str, Any], after: _Names, loop: Loop, always: _Names
    ) -> None:
        parts = [(s, n) for n, node in enumerate(body) for s in self._flat.steps(node)]
        steps = [step for step, _ in parts]
        lives = [live | always for live in statements.live_before(steps, after, loop)]
        block = CodeBlock(body, parts, lives)
        stretch = Stretch(self, block, names, 0)
        for number, step in enumerate(steps):
            before = stretch.left(None)
            for inner in statements.blocks(step):
                if isinstance(step, ast.If) and stretch.taken(step) not in (None, inner):
                    continue  # another chain covers it
                self._inside(step, inner, before, lives[number + 1], loop, always)
            if isinstance(step, (ast.Return, ast.Raise, ast.Continue, ast.Break)):
                break
            if not stretch.read(step):
                self.stretches += [stretch] if stretch.close() else []
                stretch = Stretch(self, block, stretch.left(step), number + 1)
        self.stretches += [stretch] if stretch.close() else []

    def _inside(
        self, step: Any, body: Any, names: dict[str, Any], after: _Names, loop: Loop, always: _Names
    ) -> None:
        """Look into a block of a statement."""
        if isinstance(step, (ast.For, ast.While)):
            again = statements.stores(step)
            loose = {k for k, v in names.items() if k in again and v is not MAYBE_SET}
            rest = dict.fromkeys(again, MAYBE_SET)  # set in an earlier round, if there was one
            names = {**rest, **names, **dict.fromkeys(loose, UNKNOWN)}
            if body is step.body:
                loop = statements.live_at_loop(step, after, loop)
                if isinstance(step, ast.For):
                    names |= dict.fromkeys(statements.stores(step.target), UNKNOWN)
                after = loop.again
            for name in statements.deletes(step):
                names.pop(name, None)
        elif isinstance(step, ast.With):
            always |= after  # it may end at any time
            for item in step.items:
                if item.optional_vars is not None:
                    names |= dict.fromkeys(statements.stores(item.optional_vars), UNKNOWN)
        self._block(body, names, after, loop, always)


class _Local(frozenset[str]):
    """Local names, and the temporary names of steps."""

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or str(name).startswith(TEMP)


_BEYOND = (ast.AsyncFunctionDef, ast.Global, ast.Nonlocal, ast.Yield, ast.YieldFrom, ast.Await)


def _check(tree: ast.FunctionDef, own: str) -> None:
    for node in (each for part in tree.body for each in ast.walk(part)):
        if isinstance(node, _BEYOND):
            raise Unreadable(f"it has a {type(node).__name__} in it")
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            name = node.func.id
            if name in ("locals", "eval", "exec") or (name in ("vars", "dir") and not node.args):
                raise Unreadable(f"it calls {name}(), which sees its local names")
    if any(own in statements.stores(part) for part in tree.body):
        raise Unreadable(f"it sets {own}")
