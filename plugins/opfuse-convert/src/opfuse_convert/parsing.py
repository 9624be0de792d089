"""Finds the longest chain of ops in the graph of a forward."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F

from opfuse import ops
from opfuse.core.op import BasicOperation

from .grammar import Held
from .leaves import function_op, gated, is_plain_linear
from .probing import Leaf

_ADDS = operator.add, torch.add
_MULTIPLIES = operator.mul, torch.mul
_SPLITS = torch.chunk, "chunk"
# PyTorch keeps what these give for their backward, the ops keep what they got
_KEEP_INPUT = ops.ReLU, ops.SReLU


@dataclasses.dataclass(frozen=True)
class RegionPart:
    """Part of a chain: the ops that apply to one value.

    Attributes:
        ops: In order.
        covers: The nodes that it stands for; the last is its value.
        extra: The node of what is added in its first op; None: nothing is.
        reads: Dotted names of the modules it stands for.
        constants: ``(name, attribute)`` pairs that it has taken over.
        dropouts: Dropout ops, each with the name of the module whose mode it has, and whether that
            has its ``p`` too.
        weight: Number of modules and functions that it replaces.
        probed: Whether one was recognised by its values.
    """

    ops: Sequence[BasicOperation] = ()
    covers: Sequence[fx.Node] = ()
    extra: fx.Node | None = None
    reads: Sequence[str] = ()
    constants: Sequence[tuple[str, str]] = ()
    dropouts: Sequence[tuple[Any, str, bool]] = ()
    weight: int = 1
    probed: bool = False


@dataclasses.dataclass(frozen=True)
class Region:
    """A part of a graph that a chain replaces.

    Attributes:
        start: The node whose value enters.
        steps: In order.
    """

    start: fx.Node
    steps: Sequence[RegionPart]

    @property
    def end(self) -> fx.Node:
        """The node whose value it gives."""
        return self.steps[-1].covers[-1]

    @property
    def weight(self) -> int:
        """How many modules and functions it stands for."""
        return sum(step.weight for step in self.steps)

    @property
    def is_worth_it(self) -> bool:
        """Whether it stands for more than one child does, and not for a dropout or a sum alone."""
        covered = [node for step in self.steps for node in step.covers]
        little = ops.AddExtraInput, ops.Dropout
        much = [op for step in self.steps for op in step.ops if not isinstance(op, little)]
        return len(covered) > 1 and bool(much)

    @property
    def keeps_more(self) -> bool:
        """Whether it keeps the value that enters where the author's own code keeps none.

        Others may write to that value in place, then, which a chain would not survive.
        """
        first = (op for step in self.steps for op in step.ops if not isinstance(op, ops.Dropout))
        return isinstance(next(first, None), _KEEP_INPUT)

    @property
    def reads(self) -> list[str]:
        """Dotted names of the modules it stands for, and of those around them."""
        names = [name for step in self.steps for name in step.reads]
        around = [n.rsplit(".", i)[0] for n in names for i in range(n.count("."), 0, -1)]
        return sorted({*names, *around})

    @property
    def values(self) -> list[fx.Node]:
        """The nodes of the value that enters and of those behind each step."""
        return [self.start, *[step.covers[-1] for step in self.steps]]

    @property
    def extras(self) -> list[fx.Node]:
        """The nodes of the other values that enter, in order."""
        own = self.values
        return [s.extra for s in self.steps if s.extra is not None and s.extra not in own]


class Parser:
    """Finds chains in a graph.

    Args:
        module: The module whose children are called in it, by dotted names.
        graph: The graph.
        leaf_of: What is known of a module, see :func:`~opfuse_convert.leaves.leaf_of`.
        modes: Nodes whose argument ``training`` is the mode of a module.
    """

    def __init__(
        self,
        module: nn.Module,
        graph: fx.Graph,
        leaf_of: Callable[[nn.Module], Leaf | str],
        modes: Mapping[fx.Node, Held],
    ) -> None:
        self._module, self._graph = module, graph
        self._leaf_of, self._modes = leaf_of, modes
        self._lines: dict[fx.Node, Region] = {}

    def best(self, stands: Callable[[Region], bool]) -> Region | None:
        """The region that stands for most, or None.

        Args:
            stands: Whether a chain can stand for a region.
        """
        found = [self._kept(self.line(node), stands) for node in self._graph.nodes]
        there = [region for region in found if region.is_worth_it]
        return max(there, key=lambda region: region.weight, default=None)

    def line(self, node: fx.Node) -> Region:
        """The steps that lead to a node's value, from the first one that they can begin with."""
        if node not in self._lines:
            found = self._steps(node)
            if found is None:
                self._lines[node] = Region(node, ())
            else:
                earlier = self.line(found[0])
                self._lines[node] = Region(earlier.start, [*earlier.steps, *found[1]])
        return self._lines[node]

    def _kept(self, region: Region, stands: Callable[[Region], bool]) -> Region:
        """The longest end of a region none of whose inner values is needed elsewhere.

        To autograd a chain is one function. An inner value that it gave away would be no input of
        what follows in the chain: hooks on it, and gradients with respect to it, would miss that.
        So a value that others need is the last one of a chain, or the first.
        """
        number = 0
        while number < len(region.steps):
            part = Region(region.values[number], region.steps[number:])
            if not part.is_worth_it:
                break
            covered = {node for step in part.steps for node in step.covers}
            inner = enumerate(part.values[1:-1], 1)
            needed = [i for i, value in inner if not covered.issuperset(value.users)]
            if not needed and not part.keeps_more and stands(part):
                return part
            number += max(needed, default=1)
        return Region(region.start, ())

    # One node

    def _steps(self, node: fx.Node) -> tuple[fx.Node, list[RegionPart]] | None:
        """From which node the value of another follows, and by which steps."""
        if node.op == "call_module":
            return self._of_module(node)
        if node.op not in ("call_function", "call_method"):
            return None
        if node.target in _MULTIPLIES or node.target == "mul":
            return self._of_product(node)
        if node.target in _ADDS or node.target == "add":
            return self._of_sum(node)
        if node.target is F.dropout:
            return self._of_dropout(node)
        args = [node.args[0]] if node.args else []
        if len(node.args) != 1 or not isinstance(args[0], fx.Node):
            return None
        op = function_op(_function(node), dict(node.kwargs))
        return None if op is None else (args[0], [RegionPart([op], [node])])

    def _of_dropout(self, node: fx.Node) -> tuple[fx.Node, list[RegionPart]] | None:
        names = "input", "p", "training", "inplace"
        given: Any = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
        # one that drops whatever the mode is does not follow it
        if node not in self._modes or not isinstance(given.get("p", 0.5), float):
            return None
        drop = ops.Dropout(given.get("p", 0.5))
        return given["input"], [
            RegionPart([drop], [node], dropouts=[(drop, self._modes[node].path, False)])
        ]

    def _of_module(self, node: fx.Node) -> tuple[fx.Node, list[RegionPart]] | None:
        name = str(node.target)
        leaf = self._leaf_of(self._module.get_submodule(name))
        values = [*node.args, *node.kwargs.values()]
        if isinstance(leaf, str) or len(values) != 1 or not isinstance(values[0], fx.Node):
            return None
        return values[0], [self._leaf_step(leaf, name, node)]

    def _leaf_step(self, leaf: Leaf, full: str, node: fx.Node) -> RegionPart:
        constants = [(full, attribute) for attribute in leaf.constants if attribute != "p"]
        dropouts = [(op, full, True) for op in leaf.ops if isinstance(op, ops.Dropout)]
        return RegionPart(leaf.ops, [node], None, [full], constants, dropouts, 1, leaf.probed)

    def _of_sum(self, node: fx.Node) -> tuple[fx.Node, list[RegionPart]] | None:
        """A residual: what has the longer line goes on, the other one is added to it."""
        both = _operands(node)
        if both is None or both[0] is both[1]:
            return None
        one, other = sorted(both, key=lambda n: sum(s.weight for s in self.line(n).steps))
        step = RegionPart([ops.AddExtraInput()], [node], one)
        return other, [step]

    # Gates

    def _of_product(self, node: fx.Node) -> tuple[fx.Node, list[RegionPart]] | None:
        """``act(a) * b``, where both are linear layers, or halves of one, of the same value."""
        both = _operands(node)
        for one, other in (both, both[::-1]) if both is not None else ():
            found = self._activation(one)
            if found is None:
                continue
            act, inner, reads, constants, probed = found
            gate = gated(act)
            if gate is None or {*one.users, *other.users} != {node} or set(inner.users) != {one}:
                continue
            if (layers := self._two_linears(inner, other)) is not None:
                x, step = layers
                covers = [inner, one, other, node]
            elif (layers := self._halves(inner, other)) is not None:
                x, step = layers
                covers = [*step.covers, inner, one, other, node]
            else:
                continue
            return x, [
                dataclasses.replace(
                    step,
                    ops=[*step.ops, gate],
                    covers=covers,
                    reads=[*step.reads, *reads],
                    constants=[*step.constants, *constants],
                    probed=probed or step.probed,
                )
            ]
        return None

    def _activation(self, node: fx.Node) -> tuple[Any, fx.Node, list[str], list[Any], bool] | None:
        """The activation that a node applies, to what, and what it stands for."""
        found = self._steps(node) if node.op == "call_module" or _function(node) else None
        if found is None or len(found[1]) != 1 or len(found[1][0].ops) != 1:
            return None
        (step,) = found[1]
        if not isinstance(step.ops[0], ops.Activation):
            return None
        return step.ops[0], found[0], list(step.reads), list(step.constants), step.probed

    def _two_linears(self, a: fx.Node, b: fx.Node) -> tuple[fx.Node, RegionPart] | None:
        if not (a.op == b.op == "call_module" and a.target != b.target):
            return None
        if len(a.args) != 1 or a.args != b.args or a.kwargs or b.kwargs:
            return None
        names = [str(a.target), str(b.target)]
        modules = [self._module.get_submodule(name) for name in names]
        if not all(is_plain_linear(module) for module in modules):
            return None
        if modules[0].out_features != modules[1].out_features:
            return None
        if any("forward" in vars(module) for module in modules):
            return None
        (x,) = a.args
        op = ops.ParallelLinear.reading(
            {name.replace(".", "_"): m for name, m in zip(names, modules, strict=True)}
        )
        return x, RegionPart([op], reads=names, weight=4)  # type: ignore[return-value]

    def _halves(self, a: fx.Node, b: fx.Node) -> tuple[fx.Node, RegionPart] | None:
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
        name = str(whole.target)
        module = self._module.get_submodule(name)
        leaf = self._leaf_of(module)
        is_linear = isinstance(leaf, Leaf) and leaf.ops and isinstance(leaf.ops[0], ops.BasicLinear)
        if len(whole.args) != 1 or not isinstance(leaf, Leaf) or not is_linear:
            return None
        constants = [(name, attribute) for attribute in leaf.constants]
        x: Any = whole.args[0]
        covers = [whole, split]
        return x, RegionPart(leaf.ops, covers, None, [name], constants, (), 4, leaf.probed)


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


def _is_item(node: fx.Node, number: int) -> bool:
    is_item = node.op == "call_function" and node.target is operator.getitem
    return is_item and bool(node.args[1] == number)
