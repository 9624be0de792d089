"""Checks of several calls, and of what changes between them.

The calls come one after the other, one inside the other, or in threads.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import math
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ...core.settings import current
from ..cases import Built, Case
from ..failures import Declined, Failure, blamed, saying
from ..generate import Chains, fitted, refusal
from ..machine import is_interpreting
from ..reference import compare_grads, compare_results, describe
from ..running import (
    Plans,
    RunResult,
    alone,
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
from ..scenarios import check, decline_state, plain
from .leavings import plain_attributes

R = TypeVar("R")


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
    shapes = [{"rows": rows} for rows in ((2, *case.rows), case.rows)]
    shapes = [shape for shape in shapes if refusal(case.with_(**shape)) is None]
    changes = [
        (times[number % 3], {**shapes[number % len(shapes)], **kind[0]})
        for number, kind in enumerate(order)
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
    """Every number, flag and text that an op takes by name, and its mode, with another value."""
    found: list[tuple[nn.Module, str, Any]] = []
    for op in chain.modules():
        taken = inspect.signature(type(op)).parameters
        for name, value in plain_attributes(op).items():
            optional = name in taken and taken[name].default is not inspect.Parameter.empty
            if isinstance(value, float):
                found.append((op, name, 0.5 if name == "eps" else value / 2 or 0.25))
            elif isinstance(value, bool):
                found.append((op, name, not value))
            elif isinstance(value, int):
                found.append((op, name, value + 1))
            elif optional:
                found.append((op, name, f"not {value}"))
    return found


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
            for leaf in {**built.leaves, **built.params()}.values():
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


@check(_with_constants)
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


@check(plain, passes=("forward", "joint"))
def versions(case: Case) -> None:
    """A tensor changed in place before the backward is an error, or changes no gradient."""
    expected, truth = references(case)
    fused(case, grads=False)

    def change(name: str) -> None:
        """Compare the gradients, if autograd does not refuse."""
        built = case.build()
        given = {name: tensor * 1 for name, tensor in built.named_inputs().items()}
        result = RunResult(built, list(given.values()), built(*given.values()))
        with contextlib.suppress(RuntimeError):
            with torch.no_grad():
                given.get(name, built.leaves[name]).add_(1)
            compare_grads(case, backward(case, result), expected, truth)

    for name in expected.built.leaves.keys() - expected.built.writable:
        try:
            with only(None):
                change(name)
        except Failure:  # nor do the separate ops notice
            continue
        what = f"where {describe(case, name)} is changed in place between forward and backward, "
        hint = "; save what the op got, not a copy of it over the same memory"
        with only(case.subject), saying(what, hint):
            change(name)


# Many rows

DISTINCT = 63
"""So many rows come again and again."""

MANY = 1 << 21
"""So many numbers of the input, and a few more: of half of them there are more than 2**20."""


def _many_rows(chains: Chains) -> Iterator[Case]:
    for case in chains.plain[:1]:
        case = fitted(case.with_(rows=(DISTINCT, *case.rows[1:])))
        times = MANY // (math.prod(case.rows) * case.first_width()) + 1 | 1
        yield case.with_(rows=(times * case.rows[0], *case.rows[1:]))


@check(_many_rows)
def many_rows(case: Case) -> None:
    """Rows that come again, more than a million numbers in all, give what they give once."""
    decline_state(case)
    if case.draws:
        raise Declined("it draws other numbers for each row")
    times = max(1, case.rows[0] // DISTINCT) if case.rows else 1
    once = case.with_(rows=(*(n // times for n in case.rows[:1]), *case.rows[1:]))

    def again(tensor: Tensor, times: int) -> Tensor:
        inside = tensor.shape[:1] == once.rows[:1]
        return tensor.repeat(times, *[1] * (tensor.ndim - 1)) if inside else tensor

    def step(times: int) -> RunResult:
        built = once.build()
        for name, leaf in built.leaves.items():
            if "." not in name:
                more = again(leaf.detach(), times)
                built.leaves[name] = more.requires_grad_(leaf.requires_grad)
        outputs = separate(once).outputs
        weights = [again(weight, times) for weight in once.weights(outputs)]
        return backward(once, forward(once, built=built), weights=weights)

    def expected(times: int) -> RunResult:
        result = separate(once)
        grads = {
            name: grad if grad is None or "." not in name else times * grad
            for name, grad in result.grads.items()
        }
        grads = {n: g if g is None or "." in n else again(g, times) for n, g in grads.items()}
        outputs = tuple(again(y, times) for y in result.outputs)
        return dataclasses.replace(result, outputs=outputs, grads=grads)

    with references_only(case):
        try:
            compare_results(case, step(2), *[expected(2)] * 2)
        except Failure as failure:
            raise Declined("its rows depend on each other") from failure
    with only(case.subject), Plans() as plans, blamed():
        got = step(times)
    plans.require(case)
    compare_results(case, got, *[expected(times)] * 2)


# Threads


class _Turns:
    """Lets two threads take turns, line by line.

    They do so in code that is neither torch's, nor opfuse's, nor Python's own.
    """

    _OURS = {"torch", "opfuse"} | sys.stdlib_module_names

    def __init__(self) -> None:
        self.condition, self.turn, self.running = threading.Condition(), 0, 2

    def hand_over(self, me: int) -> None:
        """Let the other thread continue, and wait for it, but not for long.

        It may wait for a lock that this one has.
        """
        with self.condition:
            self.turn = 1 - me
            self.condition.notify_all()
            self.condition.wait_for(lambda: self.turn == me or self.running < 2, 0.1)

    def run(self, me: int, call: Callable[[], None]) -> None:
        """A thread's body."""

        def trace(frame: Any, event: str, argument: Any) -> Any:
            if frame.f_globals.get("__name__", "").partition(".")[0] in self._OURS:
                return None
            if event == "line":
                self.hand_over(me)
            return trace

        sys.settrace(trace)
        try:
            call()
        finally:
            sys.settrace(None)
            with self.condition:
                self.running -= 1
                self.condition.notify_all()


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
        settings, turns = current.values, _Turns()

        def call(me: int) -> None:
            current.values = settings  # those of this thread
            one, built = pairs[me]
            try:
                for _ in range(2):
                    results[me] = backward(one, forward(one, built=built))
            except Exception as error:
                results[me] = error

        call(0)  # what is planned is planned
        own = [(me, functools.partial(call, me)) for me in (0, 1)]
        bodies = [threading.Thread(target=turns.run, args=args) for args in own]
        for body in bodies:
            body.start()
        for body in bodies:
            body.join()
    with saying("called from two threads, ", "; keep nothing of a call on the fused op"):
        for got, other in zip(results, expected, strict=True):
            if isinstance(got, Exception):
                raise Failure(f"it raises {type(got).__name__}: {got}") from got
            compare_results(case, got, other, other)
