"""Finds the part of a forward that a chain can replace: the longest chain of ops in its graph."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.nn import functional as F

from opfuse import ops
from opfuse.core.introspection import op_class
from opfuse.core.op import BasicOperation

from .grammar import Held, Reader
from .grammar.stretches import Span, Stretch
from .layers import is_patched, original_class
from .leaves import function_op, gate_last, gated
from .probing import Leaf

_ADDS = operator.add, torch.add
_MULTIPLIES = operator.mul, torch.mul
_SPLITS = torch.chunk, "chunk"
LINEARS = ops.BasicLinear, ops.ParallelLinear
"""The ops that keep their input for the backward."""
# for the backward PyTorch keeps the output of these, and the ops keep the input
_KEEP_INPUT = ops.ReLU, ops.SReLU


class Extra(NamedTuple):
    """A value that a chain takes besides its input.

    Attributes:
        node: Its node.
        views: The views of it that the statements take, which the chain gets computed.
    """

    node: fx.Node
    views: Sequence[fx.Node] = ()


@dataclasses.dataclass(frozen=True)
class RegionPart:
    """Part of a chain: the ops that apply to one value.

    Attributes:
        ops: In order.
        covers: The nodes that it replaces; the last is its value.
        extras: The extra inputs of its first op.
        reads: Dotted names of the modules that it replaces.
        constants: ``(name, attribute)`` pairs whose values it has copied.
        dropouts: Dropout ops, each with the name of the module that sets its mode, and whether
            that also sets its ``p``.
        weight: Number of modules and functions that it replaces.
        probed: Whether one was recognised by its values.
    """

    ops: Sequence[BasicOperation] = ()
    covers: Sequence[fx.Node] = ()
    extras: Sequence[Extra] = ()
    reads: Sequence[str] = ()
    constants: Sequence[tuple[str, str]] = ()
    dropouts: Sequence[tuple[Any, str, bool]] = ()
    weight: int = 1
    probed: bool = False

    def plus(self, other: RegionPart, **changes: Any) -> RegionPart:
        """This part and another one together, apart from what is given."""
        names = "reads", "constants", "dropouts"
        sums: Any = {name: [*getattr(self, name), *getattr(other, name)] for name in names}
        probed = self.probed or other.probed
        return dataclasses.replace(self, **sums, probed=probed, **changes)


@dataclasses.dataclass(frozen=True)
class Region:
    """A part of a graph that a chain replaces.

    Attributes:
        start: The node of the value that the chain takes.
        steps: In order.
    """

    start: fx.Node
    steps: Sequence[RegionPart]

    @property
    def end(self) -> fx.Node:
        """The node of the value that the chain computes."""
        return self.steps[-1].covers[-1]

    @property
    def weight(self) -> int:
        """The number of modules and functions that it replaces."""
        return sum(step.weight for step in self.steps)

    @property
    def covered(self) -> frozenset[fx.Node]:
        """The nodes that it replaces."""
        return frozenset([node for step in self.steps for node in step.covers])

    @property
    def is_worth_it(self) -> bool:
        """Whether it replaces several nodes, and more than dropouts, sums and modulations."""
        little = ops.AddExtraInput, ops.Dropout, ops.Modulate
        much = [op for step in self.steps for op in step.ops if not isinstance(op, little)]
        return len(self.covered) > 1 and bool(much)

    @property
    def is_stateless(self) -> bool:
        """Whether its chain has no quantizers, draws nothing, and needs no comparison."""
        every = [op for step in self.steps for op in step.ops]
        draws = any(isinstance(op, ops.Dropout) or op.num_quantizers("forward") for op in every)
        return not draws and not any(step.probed for step in self.steps)

    @property
    def keeps_more(self) -> bool:
        """Whether it keeps its input for the backward where the author's own code does not.

        Others may then write to that value in place, and the backward of a chain would raise.
        """
        first = (op for step in self.steps for op in step.ops if not isinstance(op, ops.Dropout))
        return isinstance(next(first, None), _KEEP_INPUT)

    @property
    def values(self) -> list[fx.Node]:
        """The nodes of the value that the chain takes and of the value after each step."""
        return [self.start, *[step.covers[-1] for step in self.steps]]

    @property
    def extras(self) -> list[Extra]:
        """The other values that the chain takes, in order."""
        own = self.values
        every = [extra for step in self.steps for extra in step.extras]
        return [extra for extra in every if extra.views or extra.node not in own]


_LeafOf = Callable[[nn.Module], Leaf | str]
"""See :func:`~opfuse_convert.leaves.leaf_of`."""
_Step = tuple[fx.Node, RegionPart]
"""A node, and the part of a chain that applies to its value."""


class Parser:
    """Finds chains in the graph of some statements.

    Args:
        module: The module whose children are called in it, by dotted names.
        stretch: The statements.
        leaf_of: See :func:`~opfuse_convert.leaves.leaf_of`.
    """

    def __init__(self, module: nn.Module, stretch: Stretch, leaf_of: _LeafOf) -> None:
        self._module, self._stretch, self._leaf_of = module, stretch, leaf_of
        self._lines: dict[fx.Node, Region] = {}

    def found(self) -> list[Found]:
        """The regions that chains can replace, at most one that ends at each node."""
        kept = [self._kept(self.line(node)) for node in self._stretch.graph.nodes]
        return [each for each in kept if each is not None]

    def line(self, node: fx.Node) -> Region:
        """The steps that lead to a node's value, from the first one that they can begin with."""
        if node not in self._lines:
            found = self._step(node)
            if found is None:
                self._lines[node] = Region(node, ())
            else:
                earlier = self.line(found[0])
                self._lines[node] = Region(earlier.start, [*earlier.steps, found[1]])
        return self._lines[node]

    def _kept(self, region: Region) -> Found | None:
        """The longest end of a region without inner values that others need.

        To autograd a chain is one function. An inner value that it returned would not be an input
        of what follows in the chain: hooks on it, and gradients with respect to it, would miss
        that. So a value that others need is the last one of a chain, or the first.
        """
        number = 0
        while number < len(region.steps):
            part = Region(region.values[number], region.steps[number:])
            if not part.is_worth_it:
                break
            inner = enumerate(part.values[1:-1], 1)
            needed = [i for i, value in inner if not part.covered.issuperset(value.users)]
            viewed = {extra.node for extra in part.extras if extra.views}
            if not needed and not part.keeps_more and viewed.isdisjoint(part.values):
                enters = [part.start, *[extra.node for extra in part.extras]]
                if (span := self._stretch.span(part.covered, enters, part.end)) is not None:
                    every = [op for step in part.steps for op in step.ops]
                    if isinstance(every[0], LINEARS):
                        alone = self._stretch.alone(span, part.covered, part.start)
                        span = span._replace(alone=alone)
                    return Found(part, span, self._stretch.modes)
            number += max(needed, default=1)
        return None

    # One node

    def _step(self, node: fx.Node) -> _Step | None:
        """The node that the value of another follows from, and the step between them."""
        if node.op == "call_module":
            return self._of_module(node)
        if node.op not in ("call_function", "call_method"):
            return None
        if _multiplies(node):
            return self._of_product(node)
        if node.target in _ADDS or node.target == "add":
            return self._of_modulation(node) or self._of_sum(node)
        if node.target is F.dropout:
            return self._of_dropout(node)
        if len(node.args) != 1 or not isinstance(node.args[0], fx.Node):
            return None
        op = function_op(_function(node), dict(node.kwargs))
        return None if op is None else (node.args[0], RegionPart([op], [node]))

    def _of_dropout(self, node: fx.Node) -> _Step | None:
        given = dropout_arguments(node)
        p = given.get("p", 0.5)
        # a dropout that drops in both modes does not follow the mode
        if node not in self._stretch.modes or not isinstance(p, float):
            return None
        drop = ops.Dropout(p)
        dropouts = [(drop, self._stretch.modes[node].path, False)]
        return given["input"], RegionPart([drop], [node], dropouts=dropouts)

    def _of_module(self, node: fx.Node) -> _Step | None:
        name = str(node.target)
        leaf = self._leaf_of(self._module.get_submodule(name))
        values = [*node.args, *node.kwargs.values()]
        if isinstance(leaf, str) or len(values) != 1 or not isinstance(values[0], fx.Node):
            return None
        return values[0], _part_of(name, leaf, node)

    def _of_sum(self, node: fx.Node) -> _Step | None:
        """A residual: the chain continues the operand with the longer line, and adds the other."""
        both = _operands(node)
        if both is None or both[0] is both[1]:
            return None
        one, other = sorted(both, key=self._weight)
        add = ops.AddExtraInput()
        add.input_first = other is both[0]
        return other, RegionPart([add], [node], [Extra(one)])

    def _weight(self, node: fx.Node) -> int:
        """That of the line to a node's value."""
        return self.line(node).weight

    def _of_modulation(self, node: fx.Node) -> _Step | None:
        """``x * (1 + scale) + shift``, with views of scale and shift that add dimensions.

        Unless the shift has the longer line: then the other summand is a residual.
        """
        for product, shift in _both_ways(node):
            if not _multiplies(product) or {*product.users} != {node}:
                continue
            for x, factor in _both_ways(product):
                plus_one, outer = _without_views(factor, x)
                scale = _less_one(plus_one)
                is_shift = self._weight(x) >= self._weight(shift)
                if scale is None or len(plus_one.users) > 1 or not is_shift:
                    continue
                (scale, inner), (shift, views) = (_without_views(n, x) for n in (scale, shift))
                covers = [*inner, plus_one, *outer, product, *views, node]
                extras = Extra(scale, [*inner, *outer]), Extra(shift, views)
                # of one value, views may differ
                if scale is not shift or not (extras[0].views or views):
                    return x, RegionPart([ops.Modulate()], covers, extras, weight=3)
        return None

    # Gates

    def _of_product(self, node: fx.Node) -> _Step | None:
        """``act(a) * b``, where both are linear layers, or halves of one, of the same value."""
        both = _operands(node)
        for one, other in (both, both[::-1]) if both is not None else ():
            found = self._step(one)
            if found is None or len(found[1].ops) != 1:
                continue
            inner, act = found
            gate = gated(act.ops[0])
            if gate is None or {*one.users, *other.users} != {node} or set(inner.users) != {one}:
                continue
            linears = self._two_linears(inner, other) or self._halves(inner, other)
            if linears is None and (linears := self._halves(other, inner)) is not None:
                gate = gate_last(gate)
            if linears is not None:
                x, step = linears
                covers = [*step.covers, inner, one, other, node]
                return x, step.plus(act, ops=[*step.ops, gate], covers=covers)
        return None

    def _two_linears(self, a: fx.Node, b: fx.Node) -> _Step | None:
        if not (a.op == b.op == "call_module" and a.target != b.target):
            return None
        if len(a.args) != 1 or a.args != b.args or a.kwargs or b.kwargs:
            return None
        names = [str(a.target), str(b.target)]
        modules: list[Any] = [self._module.get_submodule(name) for name in names]
        leaves = [leaf for leaf in map(self._leaf_of, modules) if isinstance(leaf, Leaf)]
        joins = {leaf.join or op_class(m) for leaf, m in zip(leaves, modules, strict=False)}
        if len(leaves) != 2 or joins not in ({nn.Linear}, {leaves[0].join}):
            return None
        how = leaves[0].split
        if how != leaves[1].split or modules[0].out_features != modules[1].out_features:
            return None
        if how is not None and how.mode != "column":
            return None
        named = {name.replace(".", "_"): m for name, m in zip(names, modules, strict=True)}
        join = leaves[0].join or (lambda linears, _: ops.ParallelLinear.reading(linears))
        both = join(named, leaves)
        if how is not None:
            from opfuse_distributed.parallel import split

            split(both, how)
        first, second = map(_part_of, names, leaves, (a, b))
        return a.args[0], first.plus(second, ops=[both], covers=(), weight=4)  # type: ignore[return-value]

    def _halves(self, a: fx.Node, b: fx.Node) -> _Step | None:
        """``a`` and ``b`` as the halves of one linear layer's output."""
        if not (_is_item(a, 0) and _is_item(b, 1) and a.args[0] is b.args[0]):
            return None
        split: Any = a.args[0]
        whole = split.args[0] if split.args else None
        is_halves = split.op in ("call_function", "call_method") and split.target in _SPLITS
        if not is_halves or not isinstance(whole, fx.Node) or whole.op != "call_module":
            return None
        numbers = (*split.args[1:], *split.kwargs.values())
        if numbers != (2, -1) or set(split.users) != {a, b} or set(whole.users) != {split}:
            return None
        found = self._of_module(whole)
        if found is None or not found[1].ops or not isinstance(found[1].ops[0], ops.BasicLinear):
            return None
        x, step = found
        return x, dataclasses.replace(step, covers=[whole, split], weight=4)


def _part_of(name: str, leaf: Leaf, node: fx.Node) -> RegionPart:
    """The part of a chain for a module of some name, and its node."""
    dropouts = [(op, name, True) for op in leaf.ops if isinstance(op, ops.Dropout)]
    followed = ["p"] if dropouts else []
    constants = [(name, attribute) for attribute in leaf.constants if attribute not in followed]
    dropouts += [(op, f"{name}.{below}", False) for op, below in leaf.dropouts]
    reads = [name, *[f"{name}.{below}" for below in leaf.reads]]
    return RegionPart(leaf.ops, [node], (), reads, constants, dropouts, 1, leaf.probed)


class Found(NamedTuple):
    """A region, and the statements that a chain can replace.

    Attributes:
        region: The region.
        span: The statements.
        modes: Nodes that follow the mode of a module.
    """

    region: Region
    span: Span
    modes: Mapping[fx.Node, Held]

    def is_apart(self, other: Found) -> bool:
        """Whether the two share neither statements nor modules."""
        own, others = ({*map(id, each.span.statements())} for each in (self, other))
        return own.isdisjoint(others) and {*self.span.called}.isdisjoint(other.span.called)


class StretchReader(Reader):
    """Records which modules are not ops, and the places that the others look up.

    Args:
        leaf_of: The ops of a module.
        reasons: Gets the reasons why modules without children are not ops, by dotted name.
        known: See :class:`opfuse_convert.grammar.Reader`.
        device: See there.
        graph: Gets the nodes.
    """

    def __init__(
        self,
        leaf_of: _LeafOf,
        reasons: dict[str, str],
        known: Mapping[Any, Any],
        device: str | None,
        graph: fx.Graph,
    ) -> None:
        is_leaf = lambda of: isinstance(leaf_of(of), Leaf)  # noqa: E731
        super().__init__(graph, is_leaf, known, original_class, device)
        self._leaf_of, self._reasons = leaf_of, reasons

    def _call_module(self, held: Held, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        leaf = self._leaf_of(held.module)
        cls, parts = op_class(held.module), held.module.children()
        of_torch = cls.__module__.startswith("torch.nn.") and not is_patched(cls)
        of_torch = of_torch and cls is not nn.Linear  # it may be split among processes
        if isinstance(leaf, str) and next(parts, None) is None and not of_torch:
            self._reasons.setdefault(held.path, leaf)
        if isinstance(leaf, Leaf):
            self.places += leaf.places
        return super()._call_module(held, args, kwargs)


def chosen(found: Iterable[Found]) -> list[Found]:
    """The region that replaces most, and then others apart from it that have no state."""
    kept: list[Found] = []
    for each in sorted(found, key=lambda each: (-each.region.weight, each.span.line)):
        if not kept or (each.region.is_stateless and all(map(each.is_apart, kept))):
            kept.append(each)
    return kept


def dropout_arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of a call of ``torch.nn.functional.dropout`` by name."""
    names = "input", "p", "training", "inplace"
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def _function(node: fx.Node) -> Any:
    """The function that a node calls; a method of tensors is that of its name."""
    if node.op == "call_method":
        return getattr(torch, str(node.target), None) or getattr(F, str(node.target), None)
    return node.target


def _operands(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    if len(node.args) != 2 or node.kwargs:
        return None
    a, b = node.args
    return (a, b) if isinstance(a, fx.Node) and isinstance(b, fx.Node) else None


def _both_ways(node: fx.Node) -> Sequence[tuple[fx.Node, fx.Node]]:
    """The two operands of a node, in both orders; none: it has others."""
    both = _operands(node)
    return () if both is None else (both, both[::-1])


def _multiplies(node: fx.Node) -> bool:
    return node.target in _MULTIPLIES or node.target == "mul"


def _less_one(node: fx.Node) -> fx.Node | None:
    """What a node adds 1 to, or None."""
    adds = node.target in _ADDS or node.target == "add"
    if not adds or len(node.args) != 2 or node.kwargs:
        return None
    a, b = node.args
    value, number = (a, b) if isinstance(a, fx.Node) else (b, a)
    is_one = type(number) in (int, float) and number == 1
    return value if is_one and isinstance(value, fx.Node) else None


def _without_views(value: fx.Node, after: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    """The value of which another one is a view, and the views between, which nothing else reads.

    Args:
        value: The other one.
        after: Only views that are computed after this one count.
    """
    views: list[fx.Node] = []
    while value > after and len(value.users) == 1 and _adds_dimensions(value):
        views.insert(0, value)
        value = value.args[0]  # type: ignore[assignment]
    return value, views


def _adds_dimensions(node: fx.Node) -> bool:
    """Whether a node is ``value[:, None]``, ``value.unsqueeze(1)`` or the like."""
    if node.target in (torch.unsqueeze, "unsqueeze"):
        return isinstance(node.args[0], fx.Node)
    if node.op != "call_function" or node.target is not operator.getitem:
        return False
    key = node.args[1] if type(node.args[1]) is tuple else (node.args[1],)
    return all([part in (None, Ellipsis, slice(None)) for part in key])


def _is_item(node: fx.Node, number: int) -> bool:
    is_item = node.op == "call_function" and node.target is operator.getitem
    return is_item and bool(node.args[1] == number)
