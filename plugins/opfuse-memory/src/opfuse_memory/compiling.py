"""Forwards that ``torch.compile`` compiles, within a share of the bytes that they would keep.

Imports the compiler, which takes seconds: imported only where something is compiled.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._dynamo import config as dynamo
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch._functorch import config as partitioner
from torch._inductor import config as inductor
from torch._inductor.compile_fx import compile_fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.utils.checkpoint import CheckpointPolicy

FAILURES = TorchDynamoException, FailOnRecompileLimitHit
"""What a forward raises that cannot be compiled, before anything of it has run."""

_LOGS = ("debug", "info", "warn", "error", "exception", "critical", "log")
"""Beginnings of methods of a logger that a graph leaves out, such as transformers' warning_once."""

_LEAST = 1e-9
"""The budget 0 where there are random numbers: at 0 itself, nothing can be kept."""


def _draws(node: fx.Node) -> bool:
    """Whether a node of a graph draws random numbers; attention does only if it drops out."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    arguments = node.target._schema.arguments  # type: ignore[union-attr]
    given = {each.name: each.default_value for each in arguments}
    given |= dict(zip(given, node.args, strict=False)) | node.kwargs
    return given.get("dropout_p") != 0


class _KeepRandom(CustomGraphPass):
    """Lets the partitioner keep what draws random numbers, whatever the budget.

    A backward that drew it again would draw other numbers.
    """

    def __call__(self, graph: fx.Graph) -> None:
        for node in graph.nodes:
            if _draws(node):
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
                least = max(partitioner.activation_memory_budget, _LEAST)
                partitioner.activation_memory_budget = least  # until the end of the compilation

    def uuid(self) -> Any:
        """A hash of this file: what another version of it compiled is not loaded from a cache."""
        return get_hash_for_files((__file__,))


@functools.lru_cache(maxsize=256)
def compiled(of: type, budget: float) -> Callable[..., Any]:
    """A compiled function that calls ``forward(*args, **kwargs)`` for all that it is given.

    A recompilation, for another shape or dtype, has the same budget. Random numbers are those that
    the forward would draw if it were not compiled.

    Args:
        of: The class of the module. Its modules share what is compiled; others do not count for
            the number of recompilations that Dynamo allows.
        budget: The share of ``activation_memory_budget``, from 0 to 1.
    """

    def within(graph: Any, inputs: Any) -> Any:
        theirs: Any = inductor.joint_custom_post_pass or []
        passes = [*(theirs if isinstance(theirs, (list, tuple)) else [theirs]), _KeepRandom()]
        last = passes if theirs else passes[0]  # torch 2.12 takes no list
        how = {"fallback_random": True, "joint_custom_post_pass": last}
        with partitioner.patch(activation_memory_budget=budget), inductor.patch(how):
            return compile_fx(graph, inputs)

    def call(forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    # code of its own, since Dynamo counts and keeps what it compiled for each code
    call.__code__ = call.__code__.replace(co_name=f"{of.__name__}_within_{budget}")
    logs = {method for name, method in vars(logging.Logger).items() if name.startswith(_LOGS)}
    function: Callable[..., Any] = torch.compile(call, backend=within, fullgraph=True)
    return dynamo.patch(ignore_logging_functions=logs)(function)  # type: ignore[no-any-return]
