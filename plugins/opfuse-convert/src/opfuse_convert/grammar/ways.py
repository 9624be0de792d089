"""Reads all branches of a function whose conditions depend on values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from .reader import Reader
from .source import Unreadable

_MOST = 64


class EveryWay(Reader):
    """Reads a function once for each combination of its branches, each time from the start."""

    is_rough = True

    _decisions: list[bool]
    _at = 0

    def each_way(self, read: Callable[[], Any]) -> None:
        """Call a function that reads, once for each way that there is.

        Raises:
            Unreadable: A way does something beyond the grammar, or there are too many.
        """
        self._decisions = []
        for _ in range(_MOST):
            self._at = 0
            read()
            self.places = [*{place.key: place for place in self.places}.values()]
            while self._decisions and self._decisions[-1]:
                self._decisions.pop()
            if not self._decisions:
                return
            self._decisions[-1] = True
        raise Unreadable("it has too many branches")

    def decided(self, value: Any) -> bool:
        """Which way a condition goes this time."""
        if not isinstance(value, fx.Node):
            return super().decided(value)
        if self._at == len(self._decisions):
            self._decisions.append(False)
        self._at += 1
        return self._decisions[self._at - 1]
