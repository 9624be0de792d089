"""Checks of several calls, and of what changes between them.

The calls come one after the other, one inside the other, or in threads.
"""

from __future__ import annotations

import operator
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ...core.settings import current
from ..cases import Built, Case, params_of
from ..failures import Declined, Failure, blamed, saying
from ..generate import Chains, refusal
from ..machine import is_interpreting
from ..reference import compare_grads, compare_results
from ..running import (
    Plans,
    RunResult,
    alone,
    backward,
    both,
    forward,
    fused,
    only,
    references_only,
    with_truth,
)
from ..scenarios import check, decline_state, followed, plain
from .leavings import plain_attributes

Calls = list[tuple[Case, RunResult]]
Kind = tuple[int, dict[str, Any]]
"""How often a call has the rows of the case, and what else is changed in it."""


def _calls(
    case: Case, kinds: Iterable[Kind], dtype: torch.dtype | None = None
) -> Iterator[tuple[Case, Built]]:
    """Calls of one chain, or lone ones, one of each kind, and with other values in each."""
    chain = case.build(dtype)
    for number, (times, changes) in enumerate(kinds):
        chain = case.build(dtype) if alone.get() == "lone" else chain
        one = case.with_(**changes)
        one = one.with_(rows=tuple(times * size for size in one.rows[:1]) + one.rows[1:])
        fresh = one.build(dtype)
        given = {name: leaf for name, leaf in fresh.leaves.items() if "." not in name}
        for leaf in filter(Tensor.is_floating_point, given.values()):
            leaf.data.mul_((1.0, -2.5, 1.75)[number % 3])
        chain.chain.train(one.training)
        yield one, fresh._replace(chain=chain.chain, leaves={**chain.leaves, **given})


def _compare_calls(case: Case, step: Callable[[torch.dtype | None], Calls], who: Any) -> None:
    """Compare the results of calls, each of which ``who(number)`` tells in a message."""
    for number, calls in enumerate(zip(*with_truth(case, step), strict=True)):
        with saying(who(number)):
            compare_results(calls[0][0], *(result for _, result in calls))


@check(plain)
def interleaved(case: Case) -> None:
    """Forwards with other values and fewer rows, then their backwards: none affects another."""

    def step(dtype: torch.dtype | None) -> Calls:
        calls = _calls(case, [(2, {}), (2, {}), (1, {})], dtype)
        results = [(one, forward(one, built=built)) for one, built in calls]
        return [(one, backward(one, result)) for one, result in results]

    before = "with 3 forwards before their backwards, in number"
    _compare_calls(case, step, lambda number: f"{before} {number + 1}, ")


_KINDS: tuple[tuple[dict[str, Any], Any], ...] = (
    ({}, torch.enable_grad),
    ({"training": False}, torch.enable_grad),
    ({"training": False}, torch.no_grad),
    ({"autocast": torch.bfloat16}, torch.enable_grad),
    ({"training": False, "autocast": torch.float16}, torch.inference_mode),
    ({"frozen": ("input",)}, torch.enable_grad),
)
"""How a call may differ from the one before."""


@check(plain)
def orders(case: Case) -> None:
    """One chain called in each kind of call after each other kind, in 2 and 3 dimensions."""
    decline_state(case)
    kinds = [kind for kind in _KINDS if refusal(case.with_(**kind[0])) is None]
    order = [one for i, kind in enumerate(kinds) for other in kinds[i:] for one in (kind, other)]
    times = 1, 2, 43 if is_interpreting() else 171
    dims = [rows for rows in ((2, *case.rows), case.rows) if refusal(case.with_(rows=rows)) is None]
    changes = [
        (times[n % 3], {"rows": dims[n % len(dims)], **kind[0]}) for n, kind in enumerate(order)
    ]

    def step(dtype: torch.dtype | None) -> Calls:
        results = []
        for (one, built), (_, mode) in zip(_calls(case, changes, dtype), order, strict=True):
            with mode():
                result = forward(one, built=built)
                result = backward(one, result) if mode is torch.enable_grad else result
            results.append((one, result))
        return results

    def who(number: int) -> str:
        before = f"after {order[number - 1]}, " if number else ""
        return f"in call {number + 1} of one chain, {before}"

    _compare_calls(case, step, who)


# What is changed between calls, or between forward and backward


def _with_constants(chains: Chains) -> Iterable[Case]:
    """One chain per structure, and one for every class of ops that has numbers."""
    kinds = {}
    for case in reversed(chains.all):  # the plainest of each kind stays
        classes = frozenset(type(op) for op in case.basic_ops() if _numbers(op))
        kinds[case if chains.thorough else (classes, case.draws)] = case
    return dict.fromkeys((*chains.plain, *reversed(kinds.values())))


def _others(chain: nn.Module) -> list[tuple[nn.Module, str, Any]]:
    """Every number, flag and text on an op, and its mode, with another value.

    How many extra tensors an op has is no number: no call takes another one.
    """
    other: dict[type, Any] = {float: lambda v: v / 2 or 0.25, int: lambda v: v + 1}
    other |= {bool: operator.not_, str: "not {}".format}
    named = [(op, *pair) for op in chain.modules() for pair in plain_attributes(op).items()]
    known = [o for o in named if type(o[2]) in other and not o[1].startswith("num_extra_")]
    return [(op, n, 0.5 if n == "eps" else other[type(v)](v)) for op, n, v in known]


def _numbers(chain: nn.Module) -> list[tuple[nn.Module, str, Any]]:
    """The numbers on the ops that decide what they compute, with others to put there."""
    others = _others(chain)
    return [one for one in others if isinstance(one[2], float) or one[1] == "zero_centered_gamma"]


def _values_followed(chains: Chains) -> Iterator[Case]:
    yield from _with_constants(chains)
    for case in chains.plain:
        yield case.with_(autocast=torch.bfloat16)
        yield case.with_(training=False)
        if any(op.cls.num_extra_inputs for op in case.ops):
            yield case.with_(rows=(2, 3))


@check(_values_followed)
def follows_values(case: Case) -> None:
    """Tensors, and numbers on the ops, are read at every call: a change of any one is seen."""

    def step() -> list[RunResult]:
        built, results = case.build(), list[RunResult]()

        def call() -> None:
            for mode in (torch.no_grad, torch.enable_grad):
                with mode():
                    result = forward(case, built=built)
                    results.append(result if mode is torch.no_grad else backward(case, result))
                    # an output may be the input, which changes
                    result.outputs = tuple(y.clone() for y in result.outputs)

        call()
        changes: tuple[Callable[[Tensor], Tensor], ...]
        changes = (lambda data: data.mul_(-1.5), lambda data: data * 0.75)
        # as fused optimizers do, where no version moves; then to another address
        for change in changes:
            for leaf in {**built.leaves, **params_of(built.chain)}.values():
                if leaf.is_floating_point():
                    leaf.data = change(leaf.data)
                else:
                    leaf.copy_(leaf.flip(tuple(range(leaf.ndim))))
            call()
        for op in built.chain.modules():
            for name, buffer in op.named_buffers(recurse=False):
                setattr(op, name, buffer * 0.75 if buffer.is_floating_point() else buffer.flip(0))
                call()
        for op, name, value in _numbers(built.chain):
            setattr(op, name, value)
            call()
        return results

    got, expected = both(case, step)
    for number, (one, other) in enumerate(zip(got, expected, strict=True)):
        where = "after its tensors or numbers were changed, "
        with saying(where if number % 2 else f"{where}under no_grad, "):
            compare_results(case, one, other, other)


@check(lambda chains: [*_with_constants(chains), *map(followed, chains.plain)])
def keeps_numbers(case: Case) -> None:
    """The backward uses its forward's numbers, flags and mode, whatever is set since."""

    def step(change: int | None = None) -> RunResult:
        result = forward(case)
        if change is not None:
            op, name, value = _others(result.built.chain)[change]
            setattr(op, name, value)
        return backward(case, result)

    with references_only(case):
        expected = step()
    names = [f"{name} of {type(op).__name__}" for op, name, _ in _others(case.build().chain)]
    for number, name in enumerate(names):
        with references_only(case):
            try:
                compare_grads(case, step(number), expected, expected)
            except Exception:  # the separate ops' own backward reads it, too
                continue
        with saying(
            f"with {name} changed between forward and backward, ",
            "; leave numbers on the context in the forward, and read them there in the backward",
        ):
            with only(case.subject), Plans() as plans, blamed():
                got = step(number)
            plans.require(case)
            compare_grads(case, got, expected, expected)


# Threads

MOST_LINES = 200
_OURS = {"torch", "opfuse"} | sys.stdlib_module_names
"""Modules whose lines no other thread comes between: torch's, opfuse's, Python's own."""


@check(plain, slow=True)  # Triton's interpreter serves one thread at a time
def threads(case: Case) -> None:
    """Two threads that call one chain, each with its own values, each get their own results."""
    if case.draws:
        raise Declined("threads share torch's generator")
    decline_state(case)
    fused(case)
    pairs = list(_calls(case, [(1, {}), (1, {})]))
    with references_only(case):
        expected = [backward(one, forward(one, built=built)) for one, built in pairs]
    results: list[Any] = [None, None]
    with only(case.subject):
        settings, bodies = current.values, list[threading.Thread]()

        def call(me: int) -> None:
            current.values = settings  # those of this thread
            one, built = pairs[me]
            try:
                results[me] = backward(one, forward(one, built=built))
            except Exception as error:
                results[me] = error

        def trace(frame: Any, event: str, argument: Any) -> Any:
            """Let the other thread make its whole call before a line that is of the plugin."""
            if frame.f_globals.get("__name__", "").partition(".")[0] in _OURS:
                return None
            if event == "line" and len(bodies) < MOST_LINES:
                bodies.append(threading.Thread(target=call, args=(1,)))
                bodies[-1].start()
                bodies[-1].join(0.1)  # it may wait for a lock that this one has
            return trace

        call(0)  # what is planned is planned
        call(1)
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            call(0)
        finally:
            sys.settrace(before)
        for body in bodies:
            body.join()
    with saying("called from two threads, ", "; keep nothing of a call on the fused op"):
        for got, other in zip(results, expected, strict=True):
            if isinstance(got, Exception):
                raise Failure(f"it raises {type(got).__name__}: {got}") from got
            compare_results(case, got, other, other)
