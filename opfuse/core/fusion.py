"""Fusions: declarations that a fused op may replace a pattern of ops, and their matcher.

A pattern is a sequence of elements, each matching basic ops:

- a class: exactly that class (classes torch derives for parametrization or FSDP count as the
  original),
- ``Subclasses(C)``: ``C`` and everything derived from it that still computes what ``C`` does,
- ``OneOf(a, b)``: any of the elements,
- ``Optional(e)``: the element or nothing,
- ``OneOrMore(e)``: the element once or more.

An op that overrides the arithmetic of the element is not matched, see
:func:`opfuse.has_same_math`. For ``Subclasses(C)`` these are the passes (``op_forward``,
``op_backward``, ``fuser_forward``, ``fuser_backward``) that ``C`` does not leave abstract; for an
exact class, any method on the instance.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence, Set
from typing import Any, TypeAlias

from .cast import Cast
from .environment import Environment
from .fused_op import FusedOperation
from .introspection import PASS_METHODS, op_class, overridden
from .op import BasicOperation

Ops: TypeAlias = tuple[BasicOperation, ...]
PASSES = ("joint", "forward", "backward")


@dataclasses.dataclass(frozen=True)
class Subclasses:
    """Matches one op whose class is ``cls``, or derived from it without overriding its passes.

    Abstract methods of ``cls`` may be implemented: ``Subclasses(Activation)`` matches every
    activation that implements ``value`` and ``derivative``, and none that has its own
    ``op_forward``.
    """

    cls: type


@dataclasses.dataclass(frozen=True, init=False)
class OneOf:
    """Matches any of the elements."""

    elements: tuple[Any, ...]

    def __init__(self, *elements: Any) -> None:
        object.__setattr__(self, "elements", elements)


@dataclasses.dataclass(frozen=True)
class Optional:
    """Matches the element, or nothing."""

    element: Any


@dataclasses.dataclass(frozen=True)
class OneOrMore:
    """Matches the element once or more."""

    element: Any


_KNOWN = {
    "needs": ("row_alignment", "rows", "recipe"),
    "declares": ("trades_time", "casts", "batch_invariant"),
}


@dataclasses.dataclass(frozen=True)
class Fusion:
    """The declaration that a run of basic ops may be replaced by one fused op.

    Args:
        pattern: Elements to match, in order; see :mod:`opfuse.core.fusion`.
        build: Called with the tuple of matched basic ops when the fusion is chosen; returns the
            fused op. A :class:`FusedOperation` subclass is its own ``build``.
        when: ``when(ops, env)`` returns True, or a sentence that says why not. Called while
            planning, with metadata only. None: always.
        benefit: Number of full-size tensor reads and writes that the fusion saves, or a function
            ``benefit(ops, env)``. Default: ``2 * (len(ops) - 1)``. Of overlapping fusions, the set
            with the largest sum is taken.
        priority: Fusions of higher priority choose first; default 0.
        name: The name in reports; default: the name of ``build``.
        needs: What it looks at, or needs. ``"row_alignment"``: make a plan for each row alignment,
            and pass ``env.row_alignment``. ``"rows"``: if ``when`` would fuse many rows, make a
            plan for each power of two of rows and ask it again with ``env.rows``. ``"recipe"``: it
            is useful only under a quantization recipe; without one it is not considered, and no
            report names it.
        declares: What holds for it. ``"trades_time"``: it saves memory at the cost of time, and is
            used under the option ``prefer="memory"``, or if ``opfuse tune`` found it not to be
            slower. ``"casts"``: the fused op itself performs the casts that a recipe wants between
            its ops, and the pattern lists the ops alone; without it, a pattern matches only if it
            names the casts, and a joint fusion, whose pattern lists the ops alone, is not used
            across casts. ``"batch_invariant"``: the fused forward computes each row of a block in
            the same steps, from that row alone, so that ``options(invariant="batch")`` may use it.

    Raises:
        ValueError: The pattern is empty, or can match nothing; an unknown need or declaration.
        TypeError: An element or argument of the wrong type.
    """

    pattern: Sequence[Any]
    build: Callable[[Ops], FusedOperation]
    when: Callable[[Ops, Environment], bool | str] | None = None
    benefit: float | Callable[[Ops, Environment], float] | None = None
    priority: int = 0
    name: str = ""
    needs: Collection[str] = ()
    declares: Collection[str] = ()

    def __post_init__(self) -> None:
        if isinstance(self.pattern, (str, bytes)) or not isinstance(self.pattern, Sequence):
            raise TypeError(f"a fusion's pattern is a sequence of elements, got {self.pattern!r}")
        object.__setattr__(self, "pattern", tuple(self.pattern))
        if not callable(self.build):
            raise TypeError(
                f"a fusion's build is a FusedOperation subclass or a function, got {self.build!r}"
            )
        if not self.name:
            object.__setattr__(self, "name", fusion_name(self.build))
        who = f"fusion {self.name}"
        for element in self.pattern:
            _check_element(element, who)
        if all(isinstance(element, Optional) for element in self.pattern):
            raise ValueError(f"{who}: the pattern {self.pattern!r} is empty or matches nothing")
        if self.when is not None and not callable(self.when):
            raise TypeError(f"{who}: when is a function of (ops, env), got {self.when!r}")
        number = isinstance(self.benefit, (int, float, type(None)))
        if not (number or callable(self.benefit)):
            raise TypeError(f"{who}: benefit is a number or a function, got {self.benefit!r}")
        if not isinstance(self.priority, int):
            raise TypeError(f"{who}: priority is an int, got {self.priority!r}")
        for name, known in _KNOWN.items():
            given = getattr(self, name)
            what = f"{who}: {name} is a collection of {', '.join(map(repr, known))}, got {given!r}"
            if isinstance(given, str) or not isinstance(given, (tuple, list, Set)):
                raise TypeError(what)
            if not all(each in known for each in given):
                raise ValueError(what)
            object.__setattr__(self, name, frozenset(given))
        if "casts" in self.declares and self.names_casts:
            raise ValueError(
                f"{who}: where it declares casts, its pattern is of the ops alone, and "
                f"{self.pattern!r} names Cast"
            )

    @property
    def names_casts(self) -> bool:
        """Whether the pattern names :class:`opfuse.ops.Cast`."""
        return Cast in classes_in(self.pattern)

    def may_match(self, classes: Set[type]) -> bool:
        """Return whether ops of these classes have all that the pattern must find."""
        return all(_occurs(each, classes) for each in self.pattern)

    def match(self, ops: Sequence[BasicOperation], start: int) -> list[int]:
        """Return the ends (exclusive) of matches that start at ``start``, in ascending order."""
        return sorted(_ends(self.pattern, ops, start) - {start})

    def near_matches(self, ops: Sequence[BasicOperation], start: int) -> dict[int, str]:
        """Return the matches from ``start`` that fail only because an op overrides something.

        Returns:
            For each end (exclusive), a sentence that says which op overrides what.
        """
        reasons = {}
        if loose := _ends(self.pattern, ops, start, strict=False) - {start}:
            loose -= _ends(self.pattern, ops, start)
        for end in loose:
            elements = classes_in(self.pattern)
            found = [_override(element, op) for op in ops[start:end] for element in elements]
            if why := next(filter(None, found), ""):
                reasons[end] = why
        return reasons

    def benefit_of(self, ops: Ops, env: Environment) -> float:
        """The benefit of fusing ``ops``."""
        if self.benefit is None:
            return 2 * (len(ops) - 1)
        return self.benefit(ops, env) if callable(self.benefit) else self.benefit


FusionLike: TypeAlias = Fusion | Callable[..., Sequence[Any]]


def fusion_name(fusion: FusionLike | Callable[..., FusedOperation]) -> str:
    """Return the name of a fusion or fusion function in reports."""
    if isinstance(fusion, Fusion):
        return fusion.name
    return str(getattr(fusion, "__name__", type(fusion).__name__))


def _check_element(element: Any, who: str) -> None:
    if isinstance(element, type):
        if not issubclass(element, BasicOperation):
            raise TypeError(f"{who}: patterns are made of basic ops, {element.__name__} is none")
    elif isinstance(element, Subclasses):
        if not isinstance(element.cls, type):
            raise TypeError(f"{who}: Subclasses takes a class, got {element.cls!r}")
    elif isinstance(element, OneOf):
        if not element.elements:
            raise ValueError(f"{who}: OneOf() is empty")
        for inner in element.elements:
            if isinstance(inner, (Optional, OneOrMore)):
                raise TypeError(f"{who}: OneOf takes classes, Subclasses and OneOf, got {inner!r}")
            _check_element(inner, who)
    elif isinstance(element, (Optional, OneOrMore)):
        if isinstance(inner := element.element, (Optional, OneOrMore)):
            what = "Optional and OneOrMore take a class, Subclasses or OneOf"
            raise TypeError(f"{who}: {what}, got {inner!r}")
        _check_element(inner, who)
    else:
        raise TypeError(
            f"{who}: {element!r} is not a class, Subclasses, OneOf, Optional or OneOrMore"
        )


def classes_in(elements: Sequence[Any]) -> list[Any]:
    """The classes and ``Subclasses`` elements of a pattern."""
    found = []
    for element in elements:
        if isinstance(element, OneOf):
            found += classes_in(element.elements)
        elif isinstance(element, (Optional, OneOrMore)):
            found += classes_in([element.element])
        else:
            found.append(element)
    return found


def _occurs(element: Any, classes: Set[type]) -> bool:
    if isinstance(element, OneOf):
        return any(_occurs(inner, classes) for inner in element.elements)
    if isinstance(element, OneOrMore):
        return _occurs(element.element, classes)
    if isinstance(element, Subclasses):
        return any(issubclass(cls, element.cls) for cls in classes)
    return isinstance(element, Optional) or element in classes


def _matches(element: Any, op: BasicOperation, strict: bool) -> bool:
    if isinstance(element, OneOf):
        return any(_matches(inner, op, strict) for inner in element.elements)
    if isinstance(element, Subclasses):  # a cast is no op of the user's: only its name matches it
        of_class = isinstance(op, element.cls) and not isinstance(op, Cast)
    else:
        of_class = type(op) is element or op_class(op) is element
    return of_class and not (strict and _override(element, op))


def _override(element: Any, op: BasicOperation) -> str:
    """Return what an op of the element's class overrides, as a sentence; ``""`` if nothing."""
    if isinstance(element, Subclasses):
        name = overridden(op, element.cls, *PASS_METHODS) if isinstance(op, element.cls) else None
    else:
        name = overridden(op, element) if op_class(op) is element else None
    if name is None:
        return ""
    own = op_class(op).__name__
    return f"this {own} has its own {name}" if name in vars(op) else f"{own} overrides {name}"


def _ends(
    pattern: Sequence[Any], ops: Sequence[BasicOperation], start: int, *, strict: bool = True
) -> set[int]:
    """Return where the pattern can end; ``strict``: without ops that override its arithmetic."""
    ends = {start}
    for element in pattern:
        inner = element.element if isinstance(element, (Optional, OneOrMore)) else element
        fresh = ends if isinstance(element, Optional) else set()
        after = _ends_of_one(inner, ops, ends, strict)
        while isinstance(element, OneOrMore) and not after <= fresh:
            fresh = fresh | after
            after = _ends_of_one(inner, ops, after, strict)
        ends = fresh | after
    return ends


def _ends_of_one(
    element: Any, ops: Sequence[BasicOperation], starts: Set[int], strict: bool
) -> set[int]:
    """Return the ends of matches of one element, of one op each."""
    return {i + 1 for i in starts if i < len(ops) and _matches(element, ops[i], strict)}
