"""Reads stretches of statements of a function that is not entirely in the grammar."""

from __future__ import annotations

import ast
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
from .values import Callee, Held, Thing

UNKNOWN: Any = type("Unknown", (), {"__repr__": lambda self: "some value"})()
"""Marks a local name whose value is unknown."""

NOT_NONE: Any = type("NotNone", (), {"__repr__": lambda self: "another value"})()
"""Marks one that is known not to be None."""


class Read(NamedTuple):
    """A step that was read.

    Attributes:
        node: The statement.
        nodes: What it computes.
        before: The local names before it.
        asked: Names of which it was asked whether they are None.
        called: Dotted names of the modules that it calls.
        places: Where it looked things up.
    """

    node: ast.stmt
    nodes: Sequence[fx.Node]
    before: Mapping[str, Any]
    asked: Sequence[str]
    called: Sequence[str]
    places: Sequence[Place]


class Span(NamedTuple):
    """Statements that can be replaced.

    Attributes:
        body: The list of statements that these are in.
        parts: All of these statements as steps, each with the number of its statement.
        first: The first step of the span.
        last: The last one.
        entering: The names of the values that it takes.
        assumed: Names, and what they have to be.
        same: Lists of names that have to have one value.
        results: Names that it sets, and what to: see :func:`result_of`.
        gone: Names that have a value before it, and none behind it.
        called: Dotted names of the modules that are called in it.
        places: Where things were looked up.
    """

    body: list[ast.stmt]
    parts: Sequence[tuple[ast.stmt, int]]
    first: int
    last: int
    entering: Sequence[str]
    assumed: Mapping[str, Any]
    same: Sequence[Sequence[str]]
    results: Mapping[str, Any]
    gone: Sequence[str]
    called: Sequence[str]
    places: Sequence[Place]


class _Frame(Frame):
    """Local names in the middle of a function, and tests for None of what came in."""

    def __init__(self, reader: Any, function: Any, names: Any, local: frozenset[str]) -> None:
        self.reader, self.function, self.names = reader, function, names
        self._local = local
        self.not_none: dict[fx.Node, str] = {}
        self.asked: list[str] = []

    def _is_none(self, a: Any, b: Any) -> bool:
        if b is None and isinstance(a, fx.Node) and a in self.not_none:
            self.asked.append(self.not_none[a])
            return False
        return super()._is_none(a, b)


class Stretch:
    """Statements that follow each other, read from the local names at their begin.

    Args:
        survey: What is known of the function.
        block: The statements.
        names: The local names that have a value.
        first: The number of the first step.

    Attributes:
        graph: What the statements compute.
    """

    def __init__(self, survey: Survey, block: Block, names: Mapping[str, Any], first: int) -> None:
        self.graph, self._block, self._first = fx.Graph(), block, first
        self._reader, self._own = survey.reader(self.graph), survey.own
        self._frame = _Frame(self._reader, survey.function, {}, survey.local)
        for name, value in names.items():
            if value is UNKNOWN or value is NOT_NONE:
                node = self.graph.placeholder(name)
                if value is NOT_NONE:
                    self._frame.not_none[node] = name
                value = node
            self._frame.names[name] = value
        self._reads: list[Read] = []

    @property
    def names(self) -> dict[str, Any]:
        """The local names now."""
        return self._frame.names

    @property
    def modes(self) -> Mapping[fx.Node, Held]:
        """Nodes that follow the mode of a module."""
        return self._reader.modes

    def read(self, node: ast.stmt) -> bool:
        """Read a step; whether that could be done. Otherwise nothing of it is left."""
        reader, frame = self._reader, self._frame
        before, count = dict(frame.names), len(self.graph.nodes)
        reader.places, reader.called, frame.asked = [], [], []
        try:
            fits = frame.statement(node) is MISSING
        except (Unreadable, RecursionError):
            fits = False
        nodes = [*self.graph.nodes][count:]
        if fits:
            kept = tuple(frame.asked), tuple(reader.called), tuple(reader.places)
            self._reads.append(Read(node, nodes, before, *kept))
            return True
        for made in reversed(nodes):
            reader.modes.pop(made, None)
            self.graph.erase_node(made)
        frame.names.clear()
        frame.names.update(before)
        return False

    def taken(self, node: ast.If) -> Sequence[ast.stmt] | None:
        """Which way a condition goes now; None: it is not known."""
        count = len(self.graph.nodes)
        try:
            return node.body if self._decided(node.test) else node.orelse
        except (Unreadable, RecursionError):
            return None
        finally:
            for made in [*self.graph.nodes][count:][::-1]:
                self.graph.erase_node(made)

    def _decided(self, test: ast.expr) -> bool:
        decided: bool = self._reader.decided(self._frame.expression(test))
        return decided

    def left(self, node: ast.stmt | None) -> dict[str, Any]:
        """What is known of the local names behind a statement that could not be read."""
        found = {name: self._carried(value) for name, value in self.names.items()}
        if node is None:
            return found
        sure = statements.surely([node]) or frozenset()
        for name in statements.stores(node):
            if name in found or name in sure:
                found[name] = UNKNOWN
        for name in statements.deletes(node):
            found.pop(name, None)
        return found

    def _carried(self, value: Any) -> Any:
        if isinstance(value, fx.Node):
            return NOT_NONE if value in self._frame.not_none else UNKNOWN
        return UNKNOWN if object_of(value) is MISSING else value

    def close(self) -> bool:
        """Say in the graph what is read later; whether anything is computed."""
        live = self._block.lives[self._first + len(self._reads)]
        kept = [value for name, value in self.names.items() if name in live]
        self.graph.output(tuple(_nodes_in(kept)))
        return any(read.nodes for read in self._reads)

    def span(
        self, covered: frozenset[fx.Node], enters: Sequence[fx.Node], leaves: Sequence[fx.Node]
    ) -> Span | None:
        """The statements that compute some nodes, if all they do can be done otherwise.

        Args:
            covered: The nodes.
            enters: The values that are needed for it.
            leaves: The values that are computed.
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
        if (assumed := self._assumed(span, before)) is None:
            return None
        known = _loaded(span, before)
        if any(node not in known for node in enters):
            return None
        entering = [known[node][0] for node in enters]
        live = self._block.lives[self._first + last + 1]
        given = {node: number for number, node in enumerate(leaves)}
        results = self._results(span, given, known, after, live, entering)
        if not results:
            return None
        same = [names for names in known.values() if len(names) > 1]
        gone = sorted(before.keys() - after.keys())
        called = [name for read in span for name in read.called]
        places = [place for read in span for place in read.places]
        at = self._first + first, self._first + last
        rest: Any = entering, assumed, same, results, gone, called, places
        return Span(self._block.body, self._block.parts, *at, *rest)

    def _assumed(self, span: Sequence[Read], before: Mapping[str, Any]) -> dict[str, Any] | None:
        """What names have to be that are not values of the graph; None: that cannot be asked."""
        found: dict[str, Any] = {}
        bound: set[str] = set()
        for read in span:
            for name in sorted(statements.loads(read.node) & before.keys() - bound):
                value = before[name]
                if name != self._own and not isinstance(value, fx.Node):
                    if object_of(value) is MISSING:
                        return None
                    found[name] = value
            found |= {name: NOT_NONE for name in read.asked if name not in bound}
            bound |= statements.stores(read.node)
        return found

    def _results(
        self, span: Any, given: Any, known: Any, after: Any, live: Any, entering: list[str]
    ) -> dict[str, Any] | None:
        """The names that are read later, and what each is set to; None: one cannot be."""
        results: dict[str, Any] = {}
        for name in sorted({n for read in span for n in statements.stores(read.node)}):
            if name not in live:
                if statements.to_delete(name) in live and name in after:
                    results[name] = "is", None
                continue
            if name not in after:
                return None
            results[name] = result_of(after[name], given, known, entering)
            if results[name] is None:
                return None
        return results


def result_of(value: Any, given: Any, known: Mapping[Any, Any], entering: list[str]) -> Any:
    """How to get a value after a chain: a pair of its kind and its number, or its value.

    ``"chain"``: an output of the chain; ``"in"``: a value that came in; ``"is"``: an object;
    ``"tuple"``: these. None: it cannot be had.
    """
    if isinstance(value, fx.Node):
        if value in given:
            return "chain", given[value]
        if value not in known:
            return None
        name = known[value][0]
        if name not in entering:
            entering.append(name)
        return "in", entering.index(name)
    if type(value) is tuple and not table.is_plain(value):
        inner = [result_of(each, given, known, entering) for each in value]
        return None if None in inner else ("tuple", inner)
    found = object_of(value)
    return None if found is MISSING else ("is", found)


def object_of(value: Any) -> Any:
    """The object that a value represents; :data:`MISSING`: it may differ each time."""
    if table.is_plain(value) or isinstance(value, types.ModuleType):
        return value
    if isinstance(value, Held):
        return value.module
    if isinstance(value, Thing):
        return value.value
    if isinstance(value, Callee) and value.own is MISSING:
        return value.function
    return MISSING


def _is_for(read: Read, span: Sequence[Read]) -> bool:
    """Whether all that a step does is to look something up that is used in others."""
    made = statements.stores(read.node)
    used = frozenset().union(*[statements.loads(each.node) for each in span])
    return not read.nodes and all(n.startswith(TEMP) for n in made) and made <= used


def _loaded(span: Sequence[Read], before: Mapping[str, Any]) -> dict[fx.Node, list[str]]:
    """The values that come into a span, and the names by which it reads each."""
    found: dict[fx.Node, list[str]] = {}
    bound: set[str] = set()
    for read in span:
        for name in sorted(statements.loads(read.node) & before.keys() - bound):
            if isinstance(before[name], fx.Node) and name not in found.get(before[name], ()):
                found.setdefault(before[name], []).append(name)
        bound |= statements.stores(read.node)
    return found


def _nodes_in(value: Any) -> Iterator[fx.Node]:
    if isinstance(value, fx.Node):
        yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _nodes_in(each)


class Block(NamedTuple):
    """Statements, taken apart.

    Attributes:
        body: The statements.
        parts: The steps, each with the number of its statement.
        lives: The names that may be read before each step and behind them.
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
        names: What is known of its parameters.
        reader: Makes a reader for a graph.

    Attributes:
        stretches: Those that compute something.

    Raises:
        Unreadable: The function is of a kind that is not rewritten.
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
        self,
        body: list[ast.stmt],
        names: Mapping[str, Any],
        after: frozenset[str],
        loop: Loop,
        always: frozenset[str],
    ) -> None:
        parts = [(s, n) for n, node in enumerate(body) for s in self._flat.steps(node)]
        steps = [step for step, _ in parts]
        lives = [live | always for live in statements.live_before(steps, after, loop)]
        block = Block(body, parts, lives)
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
        self, step: Any, body: Any, names: dict[str, Any], after: Any, loop: Loop, always: Any
    ) -> None:
        """Look into a block of a statement."""
        if isinstance(step, (ast.For, ast.While)):
            again = statements.stores(step)
            names = {k: UNKNOWN if k in again else v for k, v in names.items()}
            if body is step.body:
                loop = statements.live_at_loop(step, after)
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
    """Local names; those of steps are, too."""

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
