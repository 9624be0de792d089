"""Checks against the rest of torch.

They cover modes without gradients, autocast, compile, checkpoint, copies and errors.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.gradcheck import GradcheckError
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from ...core.context_managers import checkpoint_contexts, options
from ...ops import BasicLinear, GroupedLinear
from ..cases import Built, Case
from ..generate import Chains
from ..reference import compare_grads, compare_outputs, compare_results, describe
from ..running import (
    Declined,
    Failure,
    RunResult,
    backward,
    both,
    forward,
    fused,
    only,
    references,
    saying,
    separate,
    watched,
)
from .registry import check, decline_state, first, joined, keeping_weights, plain, surrounded


@check(plain, passes=("forward", "joint"))
def without_grad(case: Case) -> None:
    """Under ``no_grad`` and ``inference_mode``: the same output, no graph, and nothing is saved.

    A second call leaves the output of the first as it was.
    """
    saved: list[Any] = []

    def keep(op: Any, ctxs: Any, x: Tensor, result: Any) -> None:
        saved.extend(tensor for ctx in ctxs for tensor in ctx.to_save or () if tensor is not None)

    def step() -> RunResult:
        first = forward(case)
        copies, leaves = [y.clone() for y in first.outputs], first.built.leaves
        given = [name for name in leaves if "." not in name and leaves[name].is_floating_point()]
        others = {name: -2.5 * leaves[name] for name in given}
        forward(case, built=first.built._replace(leaves={**leaves, **others}))
        for number, (y, copy_) in enumerate(zip(first.outputs, copies, strict=True)):
            if not torch.equal(y, copy_):
                raise Failure(f"a second call writes into output {number} of the first")
        return first

    for mode in (torch.no_grad, torch.inference_mode):
        with saying(f"under {mode.__name__}, "):
            with mode():
                got, expected = both(watched(case, keep), step)
            if saved:
                raise Failure("it saves tensors for a backward that never comes")
            compare_outputs(case, got, expected, separate(case, torch.float64))


def _autocasts(chains: Chains) -> Iterator[Case]:
    for case in surrounded(chains):
        yield case.with_(autocast=torch.bfloat16)
    for case in chains.plain:
        yield case.with_(autocast=torch.float16)
        yield case.with_(autocast=torch.float16, rows=(2, 5))
        yield case.with_(autocast=torch.bfloat16, wide=True)
        yield joined(case).with_(autocast=torch.bfloat16, wide=True)
        yield case.with_(autocast=torch.bfloat16, frozen=("input",))
        yield from keeping_weights(case)
        yield from keeping_weights(joined(case))


@check(_autocasts)
def autocast(case: Case) -> None:
    """Under autocast: the dtypes of the separate ops, and their values."""
    compare_results(case, fused(case), *references(case))


@check(plain, passes=("forward", "joint"))
def batch_invariance(case: Case) -> None:
    """Where it promises the bits of a row, it is used, and the engine finds no other bits."""

    def step() -> RunResult:
        with torch.no_grad(), options(invariant="batch"):
            return forward(case)

    if not getattr(case.subject.fusion, "batch_invariant", False):
        raise Declined("it does not promise batch_invariant")
    try:
        with only():
            step()
    except RuntimeError as error:
        raise Declined(f"the separate ops raise {error}") from error
    got, expected = both(case, step)
    compare_outputs(case, got, expected, separate(case, torch.float64))


@check(plain)
def gradcheck(case: Case) -> None:
    """Numerical and analytical gradients agree, in fp64."""
    if case.recipe is not None:
        raise Declined("what is quantized has no derivative")
    case = case.with_(dtype=torch.float64, rows=(2,))
    fused(case, grads=False)
    with only(case.subject):
        built = case.build()
        count = len(built.inputs())  # the parameters are the leaves after them

        def call(*tensors: Tensor) -> Any:
            return built(*[t * 1 if built.writable else t for t in tensors[:count]])

        leaves = tuple(built.leaves.values())
        try:
            torch.autograd.gradcheck(call, leaves, nondet_tol=0.0, fast_mode=True)
        except GradcheckError as error:
            what = str(error).strip().splitlines()[0]
            raise Failure(f"{what}: compare its backward with its forward") from error


class Watching(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Calls ``seen`` with every operation and its arguments, before the operation runs."""

    keeps_no_tensors = True

    def __init__(self, seen: Callable[[Any, Any, Any], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


class Injected(RuntimeError):
    """Raised inside a kernel, on purpose."""


@check(plain)
def errors(case: Case) -> None:
    """An error inside a kernel reaches the caller, and what the separate ops refuse is refused."""
    warm = fused(case, grads=False).built
    with only(case.subject):
        if case.recipe is not None:
            forward(case, built=warm)
        for at in range(40):
            # where a quantizer cannot be made, its plugin is off from then on
            if not _raises(case, case.build() if case.recipe is None else warm, at):
                break
    _refuse_extras(case)


def _raises(case: Case, built: Built, at: int) -> bool:
    """Raise an error inside one operation, counted from 0; False: there are not that many.

    Raises:
        Failure: The error does not reach the caller.
    """
    counter = itertools.count()

    def inject(func: Any, args: Any, kwargs: Any) -> None:
        if next(counter) == at:
            raise Injected(str(func))

    try:
        with Watching(inject):
            backward(case, forward(case, built=built))
    except Injected:
        return True
    except Exception as error:  # another exception, made from it
        if isinstance(error.__context__, Injected):
            return True
        raise
    if next(counter) > at:
        what = f"an error raised inside its operation {at}"
        raise Failure(f"{what} does not reach the caller: never catch it")
    return False


def _refuse_extras(case: Case) -> None:
    built = case.build()
    given = built.inputs()
    for k in range(1, len(given)):
        if given[k].ndim < 1 or not given[k].shape[0]:
            continue
        wrong = [*given[:k], given[k][:1].detach(), *given[k + 1 :]]
        refused: list[type[Exception] | None] = []
        for subject in (None, case.subject):
            with only(subject):
                try:
                    built(*wrong)
                    refused.append(None)
                except (ValueError, RuntimeError, TypeError) as error:
                    refused.append(type(error))
        if refused[0] is not None and refused[1] is None:
            raise Failure(
                f"extra input {k - 1} with one row is accepted, "
                f"the separate ops raise {refused[0].__name__}"
            )


# Custom operators, compiling, checkpointing, copying

_TORCHS_OWN = frozenset(
    """aten prims prim mkldnn onednn quantized inductor c10d _c10d_functional profiler
higher_order _quantized torchvision debugprims rngprims""".split()
)
_HOST_READS = ("_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique2")
"""Operations whose result the host waits for: they read values, or sizes follow them."""


@check(plain)
def host_reads(case: Case) -> None:
    """It reads no tensor value on the host, so a CUDA graph can hold it."""

    def reads() -> list[str]:
        built, found = case.build(), list[str]()

        def note(func: Any, args: Any, kwargs: Any) -> None:
            if func.overloadpacket.__name__ in _HOST_READS:
                found.append(str(func))

        backward(case, forward(case, built=built))  # the first call plans, and may measure
        with Watching(note):
            backward(case, forward(case, built=built))
        return found

    fused(case, grads=False)
    found, by_separate_ops = both(case, reads)
    if found and not by_separate_ops:
        raise Failure(
            f"it calls {found[0]}: the host waits for the value of a tensor, which takes the time "
            "of all that a GPU has still to do, and which no CUDA graph can hold"
        )


@check(plain, slow=True)
def opcheck(case: Case) -> None:
    """``torch.library.opcheck`` of every custom operator that it calls."""
    fused(case, grads=False)
    calls: dict[Any, tuple[Any, Any]] = {}  # the first of each operator that is not torch's own

    def keep(func: Any, args: Any, kwargs: Any) -> None:
        if func.namespace not in _TORCHS_OWN and func not in calls:
            detached = [arg.detach().clone() if isinstance(arg, Tensor) else arg for arg in args]
            calls[func] = tuple(detached), dict(kwargs)

    with only(case.subject), Watching(keep):
        backward(case, forward(case))
    for op, (args, kwargs) in calls.items():
        try:
            torch.library.opcheck(op, args, kwargs)
        except Exception as error:
            raise Failure(f"opcheck of {op}: {str(error).strip().splitlines()[0]}") from error


def _compiled(chains: Chains) -> Iterator[Case]:
    """Rows enough for code that takes any number, and one row.

    For one row, the compiled code takes no other number.
    """
    plain, thorough = chains.plain, chains.thorough
    yield from (case.with_(rows=(4,)) for case in (plain if thorough else plain[:1]))
    yield from (case.with_(rows=(1,)) for case in (plain if thorough else plain[1:][-1:]))


@check(_compiled, slow=True)
def compile(case: Case) -> None:
    """``torch.compile(fullgraph=True)`` gives the same, for one row count and for any."""
    decline_state(case)
    fused(case, grads=False)
    torch._dynamo.reset()

    how: dict[str, Any] = dict(fullgraph=True, dynamic=case.rows != (1,), backend="aot_eager")
    with only(case.subject):
        got = backward(case, forward(case, chain=lambda chain: torch.compile(chain, **how)))
    compare_results(case, got, *references(case))


@check(first)
def checkpoint(case: Case) -> None:
    """``torch.utils.checkpoint`` gives the same gradients."""
    how: dict[str, Any] = dict(use_reentrant=False, context_fn=checkpoint_contexts)
    got = fused(case, chain=lambda chain: functools.partial(torch_checkpoint, chain, **how))
    compare_results(case, got, *references(case))


@check(plain)
def deepcopy(case: Case) -> None:
    """A copy of the chain is fused too, and is independent of the original."""

    def step() -> RunResult:
        original = forward(case).built
        twin = copy.deepcopy(original.chain)
        for param in original.params().values():
            param.data.add_(1)
        built = original._replace(chain=twin)
        built = built._replace(leaves={**original.leaves, **built.params()})
        return backward(case, forward(case, built=built))

    got, expected = both(case, step)
    compare_results(case, got, expected, expected)


# Gradients that autograd does not get


def _accumulating(chains: Chains) -> Iterator[Case]:
    for case in chains.plain:
        own = [op for op in case.ops if op.cls in (BasicLinear, GroupedLinear) and not op.via]
        ops = tuple(o.with_(accumulate_into_main_grad=True) if o in own else o for o in case.ops)
        if own:
            yield case.with_(ops=ops)
            yield case.with_(ops=ops, rows=(2, 5), frozen=("input",))


@check(_accumulating)
def main_grad(case: Case) -> None:
    """With ``accumulate_into_main_grad`` it leaves the gradient of a weight to the op."""

    def step(dtype: torch.dtype | None = None) -> RunResult:
        result = forward(case, dtype)
        leaves: dict[str, Any] = result.built.leaves
        basic = enumerate(result.built.chain)
        stored = [f"{i}.weight" for i, op in basic if getattr(op, "accumulates_grads", False)]
        names = [name for name in leaves if name.startswith((*stored,))]
        for name in names:
            leaves[name].main_grad = torch.ones_like(leaves[name])
        pairs = zip(result.outputs, case.weights(result.outputs), strict=True)
        chosen = [pair for pair in pairs if pair[0].requires_grad]
        torch.autograd.backward([y for y, _ in chosen], [weight for _, weight in chosen])
        result.grads = {name: leaf.grad for name, leaf in leaves.items()}
        for name in names:
            if leaves[name].grad is not None:
                raise Failure(f"{describe(case, name)} gets a .grad besides its main_grad")
            result.grads[name] = leaves[name].main_grad
        return result

    with only():
        truth = step(case.exact)
    got, expected = both(case, step)
    hint = "; the op adds to main_grad what the backward returns"
    with saying("with accumulate_into_main_grad=True, ", hint):
        compare_grads(case, got, expected, truth)
