"""The part of a function that a chain can replace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import fx, nn

from opfuse.core.introspection import op_class

from .grammar import Held, Reader
from .grammar.stretches import Span, Stretch
from .layers import is_patched, original_class
from .leaves import leaf_of
from .parsing import Parser, Region
from .probing import Leaf


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


class Leaves:
    """The leaves among the modules that a function calls.

    Attributes:
        reasons: Why modules without children are no ops, by dotted name.
    """

    def __init__(self) -> None:
        self._found: dict[nn.Module, Leaf | str] = {}
        self.reasons: dict[str, str] = {}

    def of(self, module: nn.Module) -> Leaf | str:
        """The ops that compute a module, or why there are none."""
        if module not in self._found:
            self._found[module] = leaf_of(module)
        return self._found[module]

    def is_leaf(self, module: nn.Module) -> bool:
        """Whether ops compute a module."""
        return isinstance(self.of(module), Leaf)


class StretchReader(Reader):
    """Notes which modules are no ops, and the places that the others look up."""

    def __init__(self, leaves: Leaves, known: Mapping[Any, Any], graph: fx.Graph) -> None:
        super().__init__(graph, leaves.is_leaf, known, original_class)
        self._leaves = leaves

    def _call_module(self, held: Held, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        leaf = self._leaves.of(held.module)
        cls, parts = op_class(held.module), held.module.children()
        of_torch = cls.__module__.startswith("torch.nn.") and not is_patched(cls)
        if isinstance(leaf, str) and next(parts, None) is None and not of_torch:
            self._leaves.reasons.setdefault(held.path, leaf)
        if isinstance(leaf, Leaf):
            self.places += leaf.places
        return super()._call_module(held, args, kwargs)


def largest(module: nn.Module, stretches: Sequence[Stretch], leaves: Leaves) -> Found | None:
    """The region of a module's forward that replaces most."""
    found = [each for each in (_in_one(module, one, leaves) for one in stretches) if each]
    return max(found, key=lambda each: each.region.weight, default=None)


def _in_one(module: nn.Module, stretch: Stretch, leaves: Leaves) -> Found | None:
    def span_of(region: Region) -> Span | None:
        return stretch.span(region.covered, [region.start, *region.extras], region.end)

    best = Parser(module, stretch.graph, leaves.of, stretch.modes).best(span_of)
    return None if best is None else Found(*best, stretch.modes)
