"""Checks of memory: who may write where, who shares what, what is kept, and for how long."""

from __future__ import annotations

import gc
import itertools
import time
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ...core.authoring import saved_bytes as count_saved_bytes
from ...core.context_managers import _CORE_OPTIONS, options
from ...core.op import BasicOperation
from ..cases import Built, Case
from ..generate import Chains
from ..reference import describe
from ..running import Failure, RunResult, backward, blamed, forward, fused, only, watched
from .registry import check, numbered, plain, surrounded
from .values import aliases, memory_of


def _copies(named: dict[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    return {name: (tensor, tensor.detach().clone()) for name, tensor in named.items()}


def _unchanged(copies: dict[str, tuple[Tensor, Tensor]], who: str) -> None:
    for name, (tensor, copy) in copies.items():
        if not torch.equal(tensor.detach(), copy):
            raise Failure(f"its {who} modifies {name}")


def _with_residuals(chains: Chains) -> Iterator[Case]:
    yield from surrounded(chains)
    yield from chains.residual


@check(_with_residuals)
def unmodified_inputs(case: Case) -> None:
    """The forward leaves inputs and parameters as they are, unless the op says in-place.

    That holds where no gradient is needed, too.
    """
    fused(case, grads=False)
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with only(case.subject):
            built = case.build()
            before = _copies({describe(case, name): leaf for name, leaf in built.leaves.items()})
            with mode():
                forward(case, built=built)
        _unchanged(before, "forward" if mode is torch.enable_grad else f"{mode.__name__} forward")


@check(_with_residuals)
def unmodified_gradients(case: Case) -> None:
    """The backward changes no incoming gradient, saved tensor, output, input or parameter."""
    fused(case, grads=False)
    saved: dict[str, tuple[Tensor, Tensor]] = {}

    def keep(tensor: Tensor) -> Tensor:
        name = f"saved tensor {len(saved)}, of shape {tuple(tensor.shape)}"
        saved.update(_copies({name: tensor}))
        return tensor

    with only(case.subject):
        built = case.build()
        given = built.inputs()
        named = {describe(case, name): leaf for name, leaf in built.leaves.items()}
        before = _copies(named)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            outputs = built(*given)
        weights = case.weights(outputs)
        named = {f"output {k}": y for k, y in enumerate(outputs)}
        named |= {f"the incoming gradient of output {k}": w for k, w in enumerate(weights)}
        before |= _copies(named)
        wanted = [leaf for leaf in built.leaves.values() if leaf.requires_grad]
        torch.autograd.grad(outputs, wanted, weights, allow_unused=True)
    _unchanged({**before, **saved}, "backward")
    if "debug" in _CORE_OPTIONS:  # the core looks at what is between two steps too
        with only(case.subject), options(debug=True), blamed():
            backward(case, forward(case))


def _shared(result: RunResult) -> set[tuple[str, str]]:
    """Pairs of tensors that share memory, among those that go in and come out."""
    parts: dict[str, Any] = {"the input": result.given[0]}
    parts |= {f"extra input {k}": t for k, t in enumerate(result.given[1:])}
    parts |= {name: p for name, p in result.built.leaves.items() if "." in name}
    parts |= {f"incoming gradient {k}": t for k, t in enumerate(result.weights)}
    memory = {name: memory_of(tensor) for name, tensor in {**parts, **_made(result)}.items()}
    return {(a, b) for a, b in itertools.combinations(memory, 2) if memory[a] & memory[b]}


def _made(result: RunResult) -> dict[str, Tensor]:
    """The outputs and gradients by name."""
    outputs = {f"output {k}": y for k, y in enumerate(result.outputs)}
    grads = {f"the gradient of {name}": t for name, t in result.grads.items() if t is not None}
    return outputs | grads


def _few_rows(chains: Chains) -> Iterator[Case]:
    yield from surrounded(chains)
    yield from (case.with_(rows=rows) for case in chains.plain for rows in ((), (1,), (1, 1)))
    yield from chains.residual
    yield from numbered(chains)


@check(_few_rows)
def aliasing(case: Case) -> None:
    """Outputs and gradients share memory only as the separate ops' do, and never across calls."""
    result = fused(case)
    with only():
        expected = _shared(backward(case, forward(case)))
    for one, other in sorted(_shared(result) - expected):
        raise Failure(f"{other} shares memory with {one}, which the separate ops' does not")
    mine = _made(result)
    kept, again = _copies(mine), fused(case)
    for what, tensor in _made(again).items():
        for name in aliases(tensor, mine):
            raise Failure(f"{what} shares memory with {name} of an earlier call")
    _unchanged(kept, "second call")


@check(surrounded, passes=("backward", "joint"))
def grad_input(case: Case) -> None:
    """The gradient that the backward returns shares memory only as ``grad_input`` declares."""
    found: list[str] = []

    def look(op: Any, ctxs: Any, dy: Tensor, result: Any) -> None:
        fresh = op.grad_input == "fresh" and not ctxs[-1].owns_grad_output
        known = {"grad_output": dy} if fresh else {}
        groups = {
            "saved tensor": [ctx.saved_tensors for ctx in ctxs],
            "the parameter gradient": result[1],
            "the extra-input gradient": result[2],
        }
        for kind, of_ops in groups.items():
            for n, tensors in enumerate(of_ops):
                each = enumerate(tensors or ())
                known |= {f"{kind} {k} of op {n}": t for k, t in each if isinstance(t, Tensor)}
        declares = f"declares grad_input={op.grad_input!r}, but returns "
        if op.grad_input != "shared":
            found.extend(declares + name for name in aliases(result[0], known))

    fused(watched(case, None, look))
    if found:
        raise Failure(f"its backward {found[0]}, or a view of it")


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


@check(surrounded)
def saved_bytes(case: Case) -> None:
    """No more memory is kept for the backward than the separate ops keep."""
    fused(case, grads=False)
    for frozen in ((), ("input",)):
        mine, other = (saved_bytes_of(case.with_(frozen=frozen), flag) for flag in (True, False))
        if mine > other:
            raise Failure(f"it keeps {mine} bytes for the backward, the separate ops keep {other}")


class Births(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Weak references to every tensor that comes out of an operation, with its shape."""

    keeps_no_tensors = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tensors: list[tuple[weakref.ref[Tensor], str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # a tensor that is only written into is not created here
        given = {id(tensor) for tensor in tree_leaves((args, kwargs))}
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and id(tensor) not in given:
                what = f"a tensor of shape {tuple(tensor.shape)} made by {func}"
                self.tensors.append((weakref.ref(tensor), what))
        return result

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
        return tensor

    with births, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        outputs = built(*given)
    _forget_casts(built)
    for what in births.still_there(seen | _memory([*given, *outputs, *built.leaves.values()])):
        hint = "give it to save_for_backward, or neither offloading nor version checks see it"
        raise Failure(f"{what} after the forward, and no saved-tensor hook has seen it: {hint}")


def _memory(tensors: Iterable[Tensor]) -> set[int]:
    return {tensor.untyped_storage()._cdata for tensor in tensors}
