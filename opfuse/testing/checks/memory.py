"""Checks of memory: what is kept for the backward, for how long, and what is written into."""

from __future__ import annotations

import functools
import gc
import random
import time
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint as recompute
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from ...core.op import BasicOperation
from ...report.calls import saved_bytes as count_saved_bytes
from ..cases import Built, Case
from ..failures import Failure, blamed, saying
from ..generate import Chains
from ..reference import compare_grads
from ..running import Watching, backward, checked, forward, fused, only
from ..scenarios import check, covered, decline_state, plain
from ..tensors import same_bits
from .leavings import memory_of


def saved_bytes_of(case: Case, fused_op: bool) -> int:
    """Bytes that are kept for the backward.

    Parameters do not count, nor what a fused op keeps of the inputs: they exist anyway. Inputs that
    the separate ops keep do count: where an op returns its input as it is (Dropout of 0), a fused
    op may return a copy.
    """
    with only(case.subject if fused_op else None):
        built = case.build()
        given = built.inputs()
        params = [leaf for name, leaf in built.leaves.items() if "." in name]
        there = (*given, *built.leaves.values()) if fused_op else params
        return count_saved_bytes(lambda: built(*given), there)


def _saving(chains: Chains) -> list[Case]:
    """What follows may keep what it gives, and the separate ops too: then it counts for neither.

    Parameters exist anyway, but not what is computed at each read of one. Without rows the separate
    ops keep nothing, and a seed of 8 bytes would be too much.
    """
    some = [c for case in chains.plain for c in (case, *covered(case)) if all(c.rows)]
    return [c for c in some if not (c.checkpointed or c.after or c.parametrized)] or [*chains.plain]


@check(_saving)
def saved_bytes(case: Case) -> None:
    """No more memory is kept for the backward than the separate ops keep."""
    fused(case, grads=False)
    mine, other = (saved_bytes_of(case, flag) for flag in (True, False))
    if mine > other:
        raise Failure(f"it keeps {mine} bytes for the backward, the separate ops keep {other}")


class Births(Watching):  # type: ignore[no-untyped-call]
    """Weak references to every tensor that comes out of an operation, with its shape."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[tuple[weakref.ref[Tensor], str]] = []

    def after(self, func: Any, given: Any, result: Any) -> None:
        """Note what is created, and not only written into."""
        known = {id(tensor) for tensor in tree_leaves(given)}
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and id(tensor) not in known:
                what = f"a tensor of shape {tuple(tensor.shape)} made by {func}"
                self.tensors.append((weakref.ref(tensor), what))

    def still_there(self, known: set[int]) -> Iterator[str]:
        """The tensors that are still referenced, and by what; known memory does not count."""
        for reference, what in self.tensors:
            if (tensor := reference()) is not None and tensor.untyped_storage()._cdata not in known:
                holders = {type(holder).__name__ for holder in gc.get_referrers(tensor)}
                names = ", ".join(sorted(holders - {"frame", "list"})) or "a list"
                yield f"{what} is still referenced, by {names},"


@check(plain)
def released(case: Case) -> None:
    """Saved-tensor hooks see what is kept; it is dropped with the results, as is the input."""
    fused(case, grads=False)
    gc.freeze()  # skip what existed before
    try:
        _released(case)
    finally:
        gc.unfreeze()


def _released(case: Case) -> None:
    with only(case.subject):
        built = case.build()
        weights = backward(case, forward(case, built=built)).weights  # what is made once may stay
        _all_is_seen(built)
        births = Births()
        for _ in range(2):
            with births:
                outputs = built(*built.inputs())
                wanted = [leaf for leaf in built.leaves.values() if leaf.requires_grad]
                grads = torch.autograd.grad(outputs, wanted, weights, allow_unused=True)
            del outputs, wanted, grads
        _forget_casts(built)
        for what in _left(births, _memory(built.leaves.values())):
            raise Failure(f"{what} after the backward")
        births.tensors.append((weakref.ref(built.leaves["input"]), "the input"))
        del built, weights
    for what in _left(births, set()):
        raise Failure(f"{what} after the chain is gone")


def _left(births: Births, known: set[int]) -> list[str]:
    """What is still referenced, also a second later.

    On a GPU the backward runs in a thread of its own, which lets go of its last tensors after its
    results are there.
    """
    for _ in range(100):
        gc.collect()
        if not (left := list(births.still_there(known))):
            break
        time.sleep(0.01)
    return left


def _forget_casts(built: Built) -> None:
    """Forget the casts of weights, which ops keep for later calls."""
    for op in built.chain.modules():
        if isinstance(op, BasicOperation):
            op._weights.clear()


def _all_is_seen(built: Built) -> None:
    """Raise if the forward keeps a tensor that no saved-tensor hook sees."""
    births, seen, given = Births(), set[int](), built.inputs()

    def keep(tensor: Tensor) -> Tensor:
        seen.update(_memory([tensor]))
        return tensor.detach()  # an output that keeps itself would stay for ever

    with births, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        outputs = built(*given)
    _forget_casts(built)
    for what in births.still_there(seen | _memory([*given, *outputs, *built.leaves.values()])):
        hint = "give it to save_for_backward, or neither offloading nor version checks see it"
        raise Failure(f"{what} after the forward, and no saved-tensor hook has seen it: {hint}")


def _memory(tensors: Iterable[Tensor]) -> set[int]:
    return set[int]().union(*map(memory_of, tensors))


class Holding(Watching):  # type: ignore[no-untyped-call]
    """Holds every new result, as selective checkpointing may, with a copy and its operation."""

    keeps_no_tensors = False

    def __init__(self) -> None:
        super().__init__()
        self.held: list[tuple[str, Tensor, Tensor]] = []
        self.operations: dict[Any, None] = {}

    def after(self, func: Any, given: Any, result: Any) -> None:
        """Hold what is new."""
        # memory without values, and views of what others may write into, are no results
        if not any(each.alias_info for each in func._schema.returns) and "empty" not in str(func):
            found = [each for each in tree_leaves(result) if type(each) is Tensor]
            self.held += [(str(func), each, each.clone()) for each in found]
            self.operations |= dict.fromkeys([func] if found else [])

    def changed(self) -> list[str]:
        """The operations whose results were written into."""
        return [who for who, tensor, copy in self.held if not same_bits(tensor, copy)]


def _of_matrices(chains: Chains) -> Iterator[Case]:
    every = chains.thorough
    for case in (*chains.plain, *chains.residual) if every else chains.plain[:1]:
        yield from (case.with_(rows=rows) for rows in ((2, 3), (6,))[: 1 + every])
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
        raise Failure(f"it writes into a result of {who}: ask opfuse.ops.authoring.may_write")
    decline_state(case)

    def call(*given: Tensor) -> Any:
        with built.settings():  # which are in force again when it computes again
            return built.chain(*given)

    chains = checked.get()
    count = len(operations) if chains and chains.thorough else min(1, len(operations))
    for func in random.Random(str(case)).sample(operations, count):
        contexts = functools.partial(create_selective_checkpoint_contexts, [func])
        how: Any = {"use_reentrant": False, "context_fn": contexts}
        with only(case.subject), blamed(), saying(hint=f", where checkpointing saves {func}"):
            run = functools.partial(recompute, call, **how)
            result = forward(case, built=built, chain=lambda _, run=run: run)
            compare_grads(case, backward(case, result), expected, expected)
