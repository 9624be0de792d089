"""Contexts, one per basic op and pass, and the pool in which they wait for the next call.

The pool is worth its lines: making the contexts of Linear + GELU + Linear anew takes 5 to 7 of the
35 us of a forward, and 20 to 40 of the 150 us of both passes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..op_context import OperationContext


class PooledContext:
    """The context of an op that declares what it leaves: takes nothing else, and serves again."""

    __slots__ = tuple(vars(OperationContext()))
    save_for_backward = OperationContext.save_for_backward
    quantized_weight = OperationContext.quantized_weight

    def __init__(self) -> None:
        for name, value in vars(OperationContext()).items():
            setattr(self, name, value)


# as an AttributeError calls it
PooledContext.__name__ = "OperationContext of an op whose context_names declare nothing"


@functools.cache
def pooled_context(names: tuple[str, ...]) -> type[PooledContext]:
    """The class of such a context, which takes the op's ``context_names`` too.

    The fewer classes there are, the faster an interpreter reads their attributes.
    """
    title = f"OperationContext of an op whose context_names declare {', '.join(names)}"
    return type(title, (PooledContext,), {"__slots__": names}) if names else PooledContext


class ContextPool:
    """Makes contexts, and keeps those that hold nothing for other passes.

    Args:
        classes: Of the context of each basic op.
        values: Per basic op, what the engine writes on its context; see :class:`OperationContext`.
        open_ops: The ops that may leave anything on theirs, which therefore serve once.

    Attributes:
        idle: Those that wait.
        give_back: Lets the contexts of a pass that is over serve another one.
    """

    def __init__(
        self, classes: Sequence[Any], values: Sequence[dict[str, Any]], open_ops: Iterable[int]
    ) -> None:
        self.idle: list[list[Any]] = []
        self._classes, self._values, self._open = tuple(classes), tuple(values), tuple(open_ops)
        self.give_back: Callable[[list[Any]], None] = self.idle.append
        if self._open:
            self.give_back = self._renew

    def new(self) -> list[Any]:
        """One context per basic op, for one pass."""
        return [self._new(i) for i in range(len(self._values))]

    def _renew(self, contexts: list[Any]) -> None:
        """Make the contexts anew that may hold anything, so that all can serve another pass."""
        for i in self._open:
            contexts[i] = self._new(i)
        self.idle.append(contexts)

    def _new(self, index: int) -> Any:
        ctx: Any = self._classes[index]()
        for name, value in self._values[index].items():
            setattr(ctx, name, value)
        return ctx
