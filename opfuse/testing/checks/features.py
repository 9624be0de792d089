"""Checks against the rest of torch.

They cover modes without gradients, autocast, compile and errors.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ...core.options import options
from ...ops import BasicLinear, GroupedLinear
from ..cases import Built, Case
from ..failures import Declined, Failure, saying
from ..generate import Chains, refusal
from ..reference import compare_grads, compare_outputs, compare_results, describe, where_finite
from ..running import (
    RunResult,
    Watching,
    backward,
    both,
    forward,
    fused,
    only,
    references,
    references_only,
    separate,
    with_truth,
)
from ..scenarios import check, covered, decline_state, has_state, plain
from .leavings import settings_now, unchanged_attributes, unchanged_settings


@check(plain, passes=("forward", "joint"))
def batch_invariance(case: Case) -> None:
    """Where it promises the bits of a row, it is used, and the engine finds no other bits."""

    def step() -> RunResult:
        with torch.no_grad(), options(invariant="batch"):
            return forward(case)

    if "batch_invariant" not in getattr(case.subject.fusion, "declares", ()):
        raise Declined("it does not promise batch_invariant")
    got, expected = both(case, step)
    compare_outputs(case, got, expected, separate(case, torch.float64))


class Injected(RuntimeError):
    """Raised inside a kernel, on purpose."""


@check(plain)
def errors(case: Case) -> None:
    """An error inside a kernel reaches the caller and leaves no trace; refusals are the ops'."""
    expected = references(case)
    warm, was = fused(case, grads=False).built, settings_now()
    with only(case.subject):
        forward(case, built=warm)  # makes quantizers: where one fails, its plugin is off
        for at in range(40):
            if not _raises(case, warm, at):
                break
            unchanged_settings(was, f"error in operation {at}")
            unchanged_attributes(warm, expected[0].built)
        if not has_state(case):
            with saying("after errors inside its kernels, "):
                compare_results(case, backward(case, forward(case, built=warm)), *expected)
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
    except Exception as error:
        if Injected not in (type(error), type(error.__context__)):  # it may be made from that
            raise
        return True
    if next(counter) > at:
        what = f"an error raised inside its operation {at}"
        raise Failure(f"{what} does not reach the caller: never catch it")
    return False


def _refuse_extras(case: Case) -> None:
    built = case.build()
    given = built.inputs()
    for k in range(1, len(given)):
        wrong = [*given[:k], given[k][:1].detach(), *given[k + 1 :]] if given[k].ndim else given
        try:
            with references_only(case):
                built(*wrong)
        except Declined as refused:
            with only(case.subject), contextlib.suppress(ValueError, RuntimeError, TypeError):
                built(*wrong)
                raise Failure(f"extra input {k - 1} with one row is accepted, where {refused}")  # noqa: B904


# Custom operators, compiling

_TORCHS_OWN = frozenset(
    """aten prims prim mkldnn onednn quantized inductor c10d _c10d_functional profiler
higher_order _quantized torchvision debugprims rngprims""".split()
)
_HOST_READS = ("_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique2")
"""Operations whose result the host waits for: they read values, or sizes follow them."""


@check(plain)
def host_reads(case: Case) -> None:
    """It reads no tensor value on the host, so a CUDA graph can hold it."""
    gpu: Any = {"device": torch.device("cuda", 0), "capability": (9, 0)}
    if (reason := refusal(case, **gpu)) is not None:
        raise Declined(f"it is in no CUDA graph: {reason}")

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
        what = "the host waits for the value of a tensor, and no CUDA graph can hold it"
        raise Failure(f"it calls {found[0]}: {what}")


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
    """One row, for which compiled code takes no other number, and code that takes any number."""
    every, cases = chains.thorough, chains.all if chains.thorough else chains.all[-1:]
    yield from (case.with_(rows=(n,)) for n in (1, 4)[: 1 + every] for case in cases)
    for case in chains.plain[:1]:
        left = [one for one in covered(case) if one.scale == 1 and len(one.rows) > 1]
        left = [one for one in left if not (one.checkpointed or one.parametrized or 0 in one.rows)]
        # what has most comes first
        ranked = [o for o in sorted(left, key=lambda o: -len(o.varied)) if refusal(o) is None]
        yield from ranked[: None if every else 1] or [case.with_(rows=(2, 3))]


@check(_compiled, slow=True)
def compile(case: Case) -> None:
    """``torch.compile(fullgraph=True)`` gives the same, for one row count and for any."""
    decline_state(case)
    if (reason := refusal(case, compiling=True)) is not None:
        raise Declined(reason)
    fused(case, grads=False)
    how: dict[str, Any] = dict(fullgraph=True, dynamic=case.rows != (1,), backend="aot_eager")

    def step() -> RunResult:
        torch._dynamo.reset()
        return backward(case, forward(case, chain=lambda chain: torch.compile(chain, **how)))

    with only(case.subject):
        try:
            got = step()
        except Exception:
            with references_only(case):  # it is not the fusion's fault where they do not either
                step()
            raise
    compare_results(case, *where_finite(case, got, *references(case)))


# Gradients that autograd does not get


def _accumulating(chains: Chains) -> Iterator[Case]:
    for case in chains.plain:
        own = [op for op in case.ops if op.cls in (BasicLinear, GroupedLinear) and not op.via]
        ops = tuple(o.with_(accumulate_into_main_grad=True) if o in own else o for o in case.ops)
        for one in [case.with_(ops=ops)] if own else []:
            yield one
            yield one.with_(rows=(2, 5), frozen=("input",))
            yield one.with_(dtype=torch.bfloat16, rows=(5,))


@check(_accumulating)
def main_grad(case: Case) -> None:
    """A weight's gradient goes to its ``main_grad``: added to it, or in its place."""
    for replaced in (False, True):
        _accumulate(case, replaced)


def _accumulate(case: Case, replaced: bool) -> None:
    """``replaced``: what is in the sum has the factor 0."""

    def step(dtype: torch.dtype | None) -> RunResult:
        result = forward(case, dtype)
        leaves: dict[str, Any] = result.built.leaves
        basic = enumerate(result.built.chain)
        stored = [f"{i}.weight" for i, op in basic if getattr(op, "accumulates_grads", False)]
        names = [name for name in leaves if name.startswith((*stored,))]
        for name in names:
            leaves[name].main_grad = torch.ones_like(leaves[name])
            leaves[name].overwrite_main_grad = replaced
        pairs = zip(result.outputs, case.weights(result.outputs), strict=True)
        chosen = [pair for pair in pairs if pair[0].requires_grad]
        torch.autograd.backward([y for y, _ in chosen], [weight for _, weight in chosen])
        result.grads = {name: leaf.grad for name, leaf in leaves.items()}
        for name in names:
            if leaves[name].grad is not None:
                raise Failure(f"{describe(case, name)} gets a .grad besides its main_grad")
            result.grads[name] = leaves[name].main_grad
        return result

    got, expected, truth = with_truth(case, step)
    hint = "; the op adds to main_grad what the backward returns"
    how = "accumulate_into_main_grad=True" + ", overwrite_main_grad=True" * replaced
    with saying(f"with {how}, ", hint):
        compare_grads(case, got, expected, truth)
