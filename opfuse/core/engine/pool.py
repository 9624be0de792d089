"""Contexts, one per basic op and pass, and the pool that keeps them for the next call.

The pool is worth its code: creating the contexts of Linear + GELU + Linear takes 5 to 7 of the
35 us of a forward, and 20 to 40 of the 150 us of both passes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..op_context import OperationContext


class PooledContext:
    """The reusable context of an op that declares what it leaves; accepts nothing else."""

    __slots__ = tuple(vars(OperationContext()))
    save_for_backward = OperationContext.save_for_backward
    quantized_weight = OperationContext.quantized_weight

    def __init__(self) -> None:
        for name, value in vars(OperationContext()).items():
            setattr(self, name, value)


# its name in an AttributeError
PooledContext.__name__ = "OperationContext of an op whose context_names declare nothing"


@functools.cache
def pooled_context(names: tuple[str, ...]) -> type[PooledContext]:
    """Return the class of contexts that also accept these ``context_names``.

    The fewer classes there are, the faster an interpreter reads their attributes.
    """
    title = f"OperationContext of an op whose context_names declare {', '.join(names)}"
    return type(title, (PooledContext,), {"__slots__": names}) if names else PooledContext


class ContextPool:
    """Creates contexts, and keeps those that hold nothing for other passes.

    Args:
        classes: The class of each basic op's context.
        values: Per basic op, the attributes that the engine sets; see :class:`OperationContext`.
        open_ops: The ops that may leave anything on their contexts, which are thus used once.

    Attributes:
        idle: The contexts that are free.
        give_back: Makes the contexts of a finished pass available again.
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
        """Replace the contexts that may hold anything, so that all can be used again."""
        for i in self._open:
            contexts[i] = self._new(i)
        self.idle.append(contexts)

    def _new(self, index: int) -> Any:
        ctx: Any = self._classes[index]()
        for name, value in self._values[index].items():
            setattr(ctx, name, value)
        return ctx
