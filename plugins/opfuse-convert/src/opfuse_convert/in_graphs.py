"""Guards for graphs of ``torch.compile`` with a chain, in addition to those of the trace."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from .guard import Guard

UNGUARDED = "this version of PyTorch cannot ask at each call whether a graph still holds"


class Watch:
    """Asks a module's guard while Dynamo traces, and at each call of the graph.

    Dynamo guards what a trace reads. A trace with a chain does not read what the chain depends on:
    the statements that it replaces, the code and defaults of functions, attributes of classes and
    variables of closures. So the answer of the eager guard becomes a guard of the graph. If that is
    impossible, the module's own forward is traced, which is always right.

    Args:
        guard: The guard of the module.
        change: ``change()`` describes what has changed, as a sentence; ``""``: nothing.
    """

    def __init__(self, guard: Guard, change: Callable[[], str]) -> None:
        self._guard, self._change = guard, change
        self._ask = functools.partial(_ask, change)  # one object: a graph asks once

    def refusal(self) -> str:
        """Return why the graph that Dynamo traces must not have the chain, or ``""``."""
        if why := self._change():
            return why
        try:
            from torch._dynamo.guards import install_guard
            from torch._dynamo.source import GlobalStateSource

            if self._is_set_in_trace():
                return "its forward sets what the chain depends on"
            install_guard(GlobalStateSource().make_guard(self._ask))
        except (ImportError, AttributeError, AssertionError):
            return UNGUARDED
        return ""

    def _is_set_in_trace(self) -> bool:
        """Whether the trace sets an attribute that the chain depends on."""
        from torch._dynamo.symbolic_convert import InstructionTranslator

        tracing: Any = InstructionTranslator.current_tx()
        return any(
            self._guard.depends_on(getattr(of, "value", None), name)
            for of, names in tracing.output.side_effects.store_attr_mutations.items()
            for name in names
        )


def _ask(change: Callable[[], str], builder: Any, guard: Any) -> None:
    """Let the graph hold as long as nothing has changed."""
    given: Any = lambda unused: not change(), ["opfuse: the modules are as they were"]
    builder.guard_manager.root.add_lambda_guard(*given, None)
