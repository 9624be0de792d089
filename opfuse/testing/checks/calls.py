"""Checks of several calls, and of what changes between them.

The calls come one after the other, one inside the other, or in threads.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ...core.settings import current
from ..cases import Built, Case
from ..generate import Chains
from ..machine import is_interpreting
from ..reference import compare_grads, compare_results, describe
from ..running import (
    Declined,
    Failure,
    Plans,
    RunResult,
    backward,
    both,
    forward,
    fused,
    only,
    references,
    saying,
    separate,
)
from .registry import check, decline_state, evaluating, plain, surrounded

R = TypeVar("R")


@check(surrounded)
def repeatable(case: Case) -> None:
    """The same chain gives bitwise the same twice, and the right thing in every call."""
    decline_state(case)
    expected = references(case)
    with only(case.subject), Plans() as plans:
        built = case.build()
        first, *others = [backward(case, forward(case, built=built)) for _ in range(3)]
    plans.require(case)
    for call, got in enumerate((first, *others), 1):
        with saying(f"in call {call}, "):
            compare_results(case, got, *expected)
        pairs: list[Any] = [("the output", got.outputs[0], first.outputs[0])]
        pairs += [
            (f"the gradient of {describe(case, name)}", grad, first.grads[name])
            for name, grad in got.grads.items()
        ]
        for what, one, other in pairs:
            if one is not None and other is not None and not torch.equal(one, other):
                calls = f"between call 1 and call {call} of the same"
                raise Failure(f"{what} differs in its last bits {calls}")


def _calls(
    case: Case, times: Sequence[int], dtype: torch.dtype | None = None
) -> Iterator[tuple[Case, Built]]:
    """Calls of one chain: its rows that many times, and other values in each."""
    chain = case.build(dtype)
    for number, count in enumerate(times):
        one = case.with_(rows=tuple(count * size for size in case.rows[:1]) + case.rows[1:])
        fresh = {name: leaf for name, leaf in one.build(dtype).leaves.items() if "." not in name}
        for leaf in filter(Tensor.is_floating_point, fresh.values()):
            leaf.data.mul_((1.0, -2.5, 1.75)[number % 3])
        yield one, chain._replace(leaves={**chain.leaves, **fresh})


def _compare_calls(
    case: Case, times: Sequence[int], run: Callable[[list[tuple[Case, Built]]], list[RunResult]]
) -> None:
    """Compare the results of ``run`` for the calls with the separate ops.

    A failure says which call is wrong.
    """

    def step(dtype: torch.dtype | None = None) -> list[RunResult]:
        return run(list(_calls(case, times, dtype)))

    for one, _ in _calls(case, times):
        separate(one)
    with only():
        truth = step(case.exact)
    got, expected = both(case, step)
    for number, (one, _) in enumerate(_calls(case, times)):
        with saying(f"in number {number + 1}, "):
            compare_results(one, got[number], expected[number], truth[number])


@check(plain)
def interleaved(case: Case) -> None:
    """Forwards with other values and fewer rows, then their backwards: none affects another."""

    def run(calls: list[tuple[Case, Built]]) -> list[RunResult]:
        results = [forward(one, built=built) for one, built in calls]
        return [backward(one, result) for (one, _), result in zip(calls, results, strict=True)]

    with saying("with 3 forwards before their backwards, "):
        _compare_calls(case, (2, 2, 1), run)


@check(plain)
def growing(case: Case) -> None:
    """Calls of one chain, later ones with many more rows: no call depends on the first size."""
    times = (1, 43, 2) if is_interpreting() else (1, 43, 2, 171)

    def run(calls: list[tuple[Case, Built]]) -> list[RunResult]:
        return [backward(one, forward(one, built=built)) for one, built in calls]

    with saying(
        f"with {', '.join(map(str, times[:-1]))} and {times[-1]} times the rows one after the "
        "other, ",
        "; what depends on the number of rows belongs in the call",
    ):
        _compare_calls(case, times, run)


# What is changed between calls, or between forward and backward


def _with_constants(chains: Chains) -> Iterator[Case]:
    """One chain per structure, and one for every class of ops that has numbers."""
    yield from chains.plain
    seen: set[tuple[type, ...]] = set()
    for case in chains.all:
        ops = case.basic_ops()
        classes = tuple({type(op) for op in ops if _numbers(op)})
        if classes and (chains.thorough or classes not in seen or case.draws):
            seen.add(classes)
            yield case


def _numbers(chain: nn.Module) -> list[tuple[nn.Module, str, Any]]:
    """The numbers on the ops that decide what they compute, with others to put there."""
    found: list[tuple[nn.Module, str, Any]] = []
    for op in chain.modules():
        for name, value in vars(op).items():
            if isinstance(value, float):
                found.append((op, name, 0.5 if name == "eps" else value / 2 or 0.25))
            elif name == "zero_centered_gamma":
                found.append((op, name, not value))
    return found


def _renumber(chain: nn.Module) -> None:
    for op, name, value in _numbers(chain):
        setattr(op, name, value)


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
    """The backward uses its forward's numbers (scale, p, eps, ...), whatever is set since."""

    def step(change: bool = True) -> RunResult:
        result = forward(case)
        if change:
            _renumber(result.built.chain)
        return backward(case, result)

    with only():
        expected = step(change=False)
        try:
            compare_grads(case, step(), expected, expected)
        except Failure:
            raise Declined(
                "the separate ops' own backward uses numbers that were set after the forward"
            ) from None
    got, _ = both(case, step)
    with saying(
        "with numbers of its ops changed between forward and backward, ",
        "; leave numbers on the context in the forward, and read them there in the backward",
    ):
        compare_grads(case, got, expected, expected)


@check(plain, passes=("forward", "joint"))
def versions(case: Case) -> None:
    """A tensor changed in place before the backward is an error, or changes no gradient."""
    expected, truth = references(case)
    fused(case, grads=False)
    names = [name for name in expected.built.leaves if name not in expected.built.writable]

    def step(name: str) -> RunResult | None:
        """The gradients, or None if autograd refuses."""
        built = case.build()
        given = {name: tensor * 1 for name, tensor in built.named_inputs().items()}
        outputs = built(*given.values())
        result = RunResult(built, list(given.values()), outputs)
        try:
            with torch.no_grad():
                given.get(name, built.leaves[name]).add_(1)
            return backward(case, result)
        except RuntimeError:
            return None

    for name in names:
        for subject in (None, case.subject):
            with only(subject):
                got = step(name)
            try:
                if got is not None:
                    compare_grads(case, got, expected, truth)
            except Failure as failure:
                if subject is None:
                    break  # nor do the separate ops notice
                what = (
                    f"where {describe(case, name)} is changed in place "
                    f"between forward and backward, {failure}"
                )
                raise Failure(
                    f"{what}; save what the op got, not a copy of it over the same memory"
                ) from failure


def _drawing(chains: Chains) -> Iterator[Case]:
    every = chains.thorough
    yield from (case for case in chains.all if every or case in chains.plain or case.draws)
    yield from evaluating(chains)


@check(_drawing)
def generator(case: Case) -> None:
    """Numbers drawn after its forward or backward are those drawn after the separate ops."""
    on_gpu = case.device != "cpu"
    states: list[Tensor] = []

    def noting(call: Callable[..., R]) -> Callable[..., R]:
        def noted(*given: Any) -> R:
            result = call(*given)
            states.append(torch.cuda.get_rng_state() if on_gpu else torch.get_rng_state())
            return result

        return noted

    def step() -> list[Tensor]:
        states.clear()
        result = forward(case, chain=noting)
        with torch.random.fork_rng([torch.cuda.current_device()] if on_gpu else []):
            torch.manual_seed(1)
            noting(backward)(case, result)
        return [*states]

    got, expected = both(case, step)
    for when, mine, other in zip(("forward", "backward"), got, expected, strict=True):
        if not torch.equal(mine, other):
            raise Failure(
                f"its {when} leaves torch's generator in another state than the separate ops do: "
                "draw what they draw, nothing where they draw nothing, and never seed it"
            )


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
    with only():
        pairs = list(_calls(case, (1, 1)))
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
        bodies = [
            threading.Thread(target=turns.run, args=(me, functools.partial(call, me)))
            for me in (0, 1)
        ]
        for body in bodies:
            body.start()
        for body in bodies:
            body.join()
    for me, got in enumerate(results):
        hint = "keep nothing of a call on the fused op"
        if isinstance(got, Exception):
            raise Failure(
                f"called from two threads it raises {type(got).__name__}: {got}; {hint}"
            ) from got
        with saying("called from two threads, ", f"; {hint}"):
            compare_results(case, got, expected[me], expected[me])
