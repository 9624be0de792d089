"""Checks that results which somebody else holds stay as they are, under dispatch modes."""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint as recompute
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from ..cases import Case
from ..failures import Failure, blamed, saying
from ..generate import Chains
from ..reference import compare_grads
from ..running import backward, forward, fused, only
from .registry import check, decline_state

_EVERY = os.environ.get("OPFUSE_THOROUGH", "") not in ("", "0")


class Holding(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Holds every new result, as selective checkpointing may, with a copy and its operation."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.held: list[tuple[str, Tensor, Tensor]] = []
        self.operations: dict[Any, None] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # memory without values, and views of what others may write into, are no results
        if not any(each.alias_info for each in func._schema.returns) and "empty" not in str(func):
            found = [each for each in tree_leaves(result) if type(each) is Tensor]
            self.held += [(str(func), each, each.clone()) for each in found]
            self.operations |= dict.fromkeys([func] if found else [])
        return result

    def changed(self) -> list[str]:
        """The operations whose results were written into."""
        pairs = [(who, [t.contiguous().view(-1) for t in both]) for who, *both in self.held]
        return [who for who, both in pairs if not torch.equal(*[t.view(torch.uint8) for t in both])]


def _of_matrices(chains: Chains) -> Iterator[Case]:
    for case in (*chains.plain, *chains.residual) if _EVERY else chains.plain[:1]:
        yield from (case.with_(rows=rows) for rows in ((2, 3), (6,))[: 1 + _EVERY])
        yield case.with_(rows=(2, 3), dtype=torch.bfloat16)


@check(_of_matrices)
def held_results(case: Case) -> None:
    """No result is written into that a dispatch mode, such as selective checkpointing's, may hold.

    Gradients are the same where it saves the results of one operation of the forward.
    """
    expected = fused(case)
    built = expected.built
    with only(case.subject), blamed(), Holding() as mode:
        result = forward(case, built=built)
        operations = [*mode.operations]
        backward(case, result)
    for who in mode.changed():
        raise Failure(f"it writes into a result of {who}: ask opfuse.core.authoring.may_write")
    decline_state(case)

    def call(*given: Tensor) -> Any:
        with built.settings():  # which are in force again when it computes again
            return built.chain(*given)

    count = len(operations) if _EVERY else min(1, len(operations))
    for func in random.Random(str(case)).sample(operations, count):
        contexts = functools.partial(create_selective_checkpoint_contexts, [func])
        how: Any = {"use_reentrant": False, "context_fn": contexts}
        with only(case.subject), blamed(), saying(hint=f", where checkpointing saves {func}"):
            run = functools.partial(recompute, call, **how)
            result = forward(case, built=built, chain=lambda _, run=run: run)
            compare_grads(case, backward(case, result), expected, expected)
