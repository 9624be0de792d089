"""Checks of the numbers, and of all else that one run of a case with its fusion shows.

A case runs once, watched for everything that a call must hold. Each check looks at its part of what
that has shown, so that all hold in all circumstances.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from ...core.introspection import standing_for
from ...core.options import options
from .. import reference
from ..cases import Built, Case, subjects
from ..failures import Declined, Failure, blamed, saying
from ..generate import Chains, fitted
from ..reference import compare_outputs, compare_results, describe, where_finite
from ..running import (
    Plans,
    RunResult,
    alone,
    backward,
    both,
    checked,
    forward,
    one_by_one,
    only,
    references,
    watched,
)
from ..scenarios import check, exact, has_state, numbered, plain, scenarios
from ..tensors import same_bits
from . import leavings
from .leavings import aliases, copies, unchanged, unchanged_settings

MOST_ROWS = 4096
"""Cases with more rows are called once."""


def observed(case: Case, *names: str) -> None:
    """Raise what a run of the case has shown for one of the checks.

    Raises:
        Declined: The fusion does not take it.
        Failure: It is wrong in this way, or does not run.
    """
    key, chains = (case, alone.get()), checked.get()
    known = {} if chains is None else chains.seen
    if key not in known:
        known[key] = _Run(case).found
    for name in (*names, ""):
        if name in known[key]:
            kind, text = known[key][name]
            raise kind(text)


def shown(
    cases: Callable[[Chains], Iterable[Case]], *names: str, **given: Any
) -> Callable[[Callable[[Case], None]], Callable[[Case], None]]:
    """Add a check of what a run has shown under its name, or under others, and of what it does."""

    def add(more: Callable[[Case], None]) -> Callable[[Case], None]:
        @functools.wraps(more)
        def run(case: Case) -> None:
            observed(case, *(names or (more.__name__,)))
            more(case)

        return check(cases, **given)(run)

    return add


class _Run:
    """Runs a case, and keeps what it shows by the names of checks, "" if there are no results."""

    def __init__(self, case: Case) -> None:
        self.case, self.saves = case, True
        self.kept: leavings.Kept | None = None
        # the texts alone: an error would keep frames, and with them tensors
        self.found: dict[str, tuple[type[Exception], str]] = {}
        few = math.prod(case.rows) <= MOST_ROWS
        with self._noting(""), blamed():
            self.expected, self.truth = references(case)
            by_ops = self._kept_by_ops() if few and case.subject.passes == "forward" else None
            watching = watched(self._forward, self._backward)
            with watching, only(case.subject), Plans() as plans:
                self._first(plans, by_ops)
                usual = case.rows in ((3,), (case.least,)) and case.width is None
                if (usual or case.varied) and few and not has_state(case):
                    self._again()

    @contextlib.contextmanager
    def _noting(self, name: str) -> Iterator[None]:
        try:
            yield
        except (Declined, Failure) as found:
            self.found.setdefault(name, (type(found), str(found)))

    def _note(self, name: str, look: Callable[..., None], *given: Any) -> None:
        with self._noting(name):
            look(*given)

    def _kept_by_ops(self) -> tuple[leavings.Kept, Built]:
        """What the ops leave in their contexts, one by one."""
        kept, case = leavings.Kept(), one_by_one(self.case)
        built = case.build() if has_state(case) else self.expected.built
        with watched(kept), only(case.subject), Plans() as plans:
            forward(case, built=built)
        plans.require(case)
        return kept, built

    def _first(self, plans: Plans, by_ops: Any) -> None:
        case, was, self.built = self.case, leavings.settings_now(), self.case.build()
        self.named = {describe(case, name): leaf for name, leaf in self.built.leaves.items()}
        before = copies(self.named)
        for leaf in self.named.values():
            torch.autograd.graph.increment_version(leaf)
        wanted = {name: leaf for name, leaf in self.named.items() if leaf.requires_grad}
        for leaf in wanted.values():
            leaf.grad = leaf.detach()  # the same memory, which must not change
        self.kept = leavings.Kept() if by_ops else None
        self.result = got = forward(case, built=self.built)
        kept, self.kept = self.kept, None
        plans.require(case)
        self._note("settings", unchanged_settings, was, "forward")
        self._note("unmodified_inputs", unchanged, before, "forward")
        if kept is not None:
            self._note("saved_state", leavings.same_contexts, case, (kept, self.built), by_ops)
        saved = self._saved()
        before = copies({**self.named, **saved, **_outputs(got)})
        self._note("versions", leavings.same_versions, saved, self.named)
        backward(case, got)
        self._note("settings", unchanged_settings, was, "backward")
        self._note("settings", leavings.unchanged_attributes, self.built, self.expected.built)
        with self._noting("unmodified_gradients"):
            weights = zip(got.weights, self.expected.weights, strict=True)
            given = {f"the incoming gradient of output {k}": two for k, two in enumerate(weights)}
            unchanged({**before, **given}, "backward")
            for name, leaf in wanted.items():
                if leaf.grad is None or leaf.grad.data_ptr() != leaf.data_ptr():
                    raise Failure(f"its backward modifies the .grad of {name}")
        finite = [*where_finite(case, got, self.expected, self.truth)]
        self._note("output", compare_outputs, case, *finite)
        self._note("gradients", reference.compare_grads, case, *finite)
        self._note("strides", reference.compare_strides, got, self.expected)
        self._note("generator", _same_states, got, self.expected)
        with self._noting("aliasing"):
            for what, name in sorted(_shared(got) - _shared(self.expected)):
                raise Failure(f"{name} shares memory with {what}, which the separate ops' does not")

    def _saved(self) -> dict[str, Tensor]:
        """The tensors that were saved for the backward, by name."""
        nodes = [] if self.case.checkpointed else {y.grad_fn for y in self.result.outputs}
        each = [getattr(node, "saved_tensors", ()) for node in nodes]
        kept = [tensor for tensors in each for tensor in tensors if tensor is not None]
        return {f"saved tensor {k}, of shape {(*t.shape,)}": t for k, t in enumerate(kept)}

    def _again(self) -> None:
        """More calls of the same chain: without gradients, and as the first."""
        case, before, kept = self.case, copies(self.named), copies(_made(self.result))
        chains = checked.get()
        once = bool(case.varied) or (chains is not None and case not in chains.all)
        for mode in (torch.no_grad, *(() if once else (torch.inference_mode,))):
            self.saves = False
            with mode():
                got = forward(case, built=self.built)
                two = got, got if once else forward(case, built=self.built)
            self.saves = True
            with self._noting("without_grad"), saying(f"under {mode.__name__}, "):
                for _, name in self._shared_by(*two):
                    raise Failure(f"a second call writes into {name} of the first")
            self._note("unmodified_inputs", unchanged, before, f"{mode.__name__} forward")
            with self._noting("output"), saying(f"under {mode.__name__}, "):
                three = [result.detached() for result in (got, self.expected, self.truth)]
                compare_outputs(case, *where_finite(case, *three))
        again = backward(case, forward(case, built=self.built))
        with self._noting("aliasing"):
            for what, name in self._shared_by(self.result, again):
                raise Failure(f"{what} shares memory with {name} of an earlier call")
            unchanged(kept, "second call")
        with self._noting("repeatable"):
            for what, tensor in _made(again).items():
                if what in kept and not same_bits(tensor, kept[what][1]):
                    with saying("in call 2, "):
                        finite = where_finite(case, again, self.expected, self.truth)
                        compare_results(case, *finite)
                    between = "between call 1 and call 2 of the same"
                    raise Failure(f"{what} differs in its last bits {between}")

    def _shared_by(self, first: RunResult, second: RunResult) -> Iterator[tuple[str, str]]:
        """What a second call made over the memory of the first, which is not of what both got."""
        for what, tensor in _made(second).items() if first is not second else ():
            if not aliases(tensor, self.built.leaves):
                yield from ((what, name) for name in aliases(tensor, _made(first)))

    def _forward(self, op: Any, ctxs: Any, x: Tensor, result: Any) -> None:
        if self.kept is not None:
            self.kept(op, ctxs, x, result)
        if not self.saves and any(t is not None for ctx in ctxs for t in ctx.to_save or ()):
            self.found["without_grad"] = Failure, "under no_grad, it saves tensors"

    def _backward(self, op: Any, ctxs: Any, dy: Tensor, result: Any) -> None:
        """Look at the gradients that a backward gave."""
        fresh = op.grad_input == "fresh" and not ctxs[-1].owns_grad_output
        known: dict[str, Any] = {"grad_output": dy} if fresh else {}
        for number, (basic, ctx) in enumerate(zip(op.basic_ops, ctxs, strict=True)):
            grads = [*(result[1][number] or ())]
            # the core insists on the number
            each = zip(ctx.param_requires_grad, basic.param_names, grads, strict=False)
            for needed, name, grad in each:
                what = f"{name} of {type(basic).__name__}"
                if grad is not None and not needed:
                    text = f"it computes the gradient of {what}, which needs none"
                    self.found["requires_grad"] = Failure, text
                as_read = basic.read_parameter(name, standing_for)
                if grad is not None and grad.shape != as_read.shape:
                    wrong = f"{tuple(grad.shape)} for {what}, which autograd must add up"
                    text = f"its backward returns a gradient of shape {wrong}"
                    self.found["gradients"] = Failure, text
            kinds = {"saved tensor": ctx.saved_tensors, "the parameter gradient": grads}
            kinds["the extra-input gradient"] = result[2][number]
            for kind, tensors in kinds.items():
                known |= {f"{kind} {k} of op {number}": t for k, t in enumerate(tensors or ())}
        for name in aliases(result[0], known) if op.grad_input != "shared" else ():
            text = f"declares grad_input={op.grad_input!r}, but returns {name}, or a view of it"
            self.found["grad_input"] = Failure, f"its backward {text}"


def _shared(result: RunResult) -> set[tuple[str, str]]:
    """Pairs of tensors that share memory, among those that go in and come out."""
    parts: dict[str, Any] = {"the input": result.given[0]}
    parts |= {f"extra input {k}": t for k, t in enumerate(result.given[1:])}
    parts |= {name: p for name, p in result.built.leaves.items() if "." in name}
    parts |= {f"incoming gradient {k}": t for k, t in enumerate(result.weights)}
    memory = {name: leavings.memory_of(t) for name, t in {**parts, **_made(result)}.items()}
    return {(a, b) for a, b in itertools.combinations(memory, 2) if memory[a] & memory[b]}


def _made(result: RunResult) -> dict[str, Tensor]:
    """The outputs and gradients by name."""
    grads = {f"the gradient of {name}": t for name, t in result.grads.items() if t is not None}
    return _outputs(result) | grads


def _outputs(result: RunResult) -> dict[str, Tensor]:
    return {f"output {k}": y for k, y in enumerate(result.outputs)}


def _same_states(got: RunResult, expected: RunResult) -> None:
    for when, mine, other in zip(("forward", "backward"), got.states, expected.states):  # noqa: B905  # without a gradient there is one
        if not torch.equal(mine, other):
            what = f"its {when} leaves torch's generator in another state than the ops do"
            raise Failure(f"{what}: draw what they draw, and never seed it")


# What a run shows


@shown(exact)
def output(case: Case) -> None:
    """All outputs, against the separate ops in fp64, at the tolerance of the dtype."""


@shown(exact)
def strides(case: Case) -> None:
    """Outputs lie in memory as the separate ops' do."""


@shown(scenarios)
def settings(case: Case) -> None:
    """A call leaves torch's settings as they were, whatever those were, and its ops' attributes."""
    if _is_usual(case):
        with leavings.other_settings() as was, only(case.subject):
            result = forward(case)
            unchanged_settings(was, "forward")
            backward(case, result)
            unchanged_settings(was, "backward")


def _is_usual(case: Case) -> bool:
    return not case.varied and case.rows in ((3,), (case.least,))


@shown(scenarios)
def unmodified_inputs(case: Case) -> None:
    """The forward leaves inputs and parameters as they are, unless the op says in-place.

    That holds where no gradient is needed, too.
    """


@shown(scenarios)
def unmodified_gradients(case: Case) -> None:
    """The backward changes no incoming gradient, saved tensor, output, input or parameter."""
    if _is_usual(case):  # what is between two steps, too
        with only(case.subject), options(debug=True), blamed():
            backward(case, forward(case))


@shown(scenarios)
def aliasing(case: Case) -> None:
    """Outputs and gradients share memory only as the separate ops' do, and never across calls."""


@shown(scenarios, passes=("backward", "joint"))
def grad_input(case: Case) -> None:
    """The gradient that the backward returns shares memory only as ``grad_input`` declares."""


@shown(scenarios)
def generator(case: Case) -> None:
    """Numbers drawn after its forward or backward are those drawn after the separate ops."""


@shown(scenarios)
def repeatable(case: Case) -> None:
    """The same chain gives bitwise the same twice, and the right thing in every call."""


@shown(lambda chains: [c for c in scenarios(chains) if c.autocast], "output", "gradients")
def autocast(case: Case) -> None:
    """Under autocast: the dtypes of the separate ops, and their values."""


@shown(lambda chains: [*scenarios(chains), *chains.quantized], passes=("forward",))
def saved_state(case: Case) -> None:
    """A forward leaves in contexts what the ops would: names, order, values, dtypes, aliases."""


@shown(exact)
def gradients(case: Case) -> None:
    """The gradients of input, parameters and extra inputs, against the separate ops in fp64."""


_OF_LEAVES = "requires_grad", "output", "gradients"


@shown(lambda chains: [case for case in exact(chains) if case.frozen], *_OF_LEAVES)
def requires_grad(case: Case) -> None:
    """Whichever leaves need a gradient get the right one, and no other work is done."""


@shown(scenarios, passes=("forward", "joint"))
def without_grad(case: Case) -> None:
    """Under ``no_grad`` and ``inference_mode``: nothing is saved, and no output is used again."""


@shown(scenarios, passes=("forward", "joint"))
def versions(case: Case) -> None:
    """A tensor that is saved is known as the same, so that a later change in place is an error."""


@check(lambda chains: [c for c in scenarios(chains) if c.scale != 1 and not c.autocast])
def magnitude(case: Case) -> None:
    """Large and small numbers: finite where the separate ops are, and as exact."""
    how = "in fp32" if case.compute_dtype.itemsize == 2 else "scaled, or in another order"
    hint = f"; compute {how} what leaves the range of {case.compute_dtype}"
    with saying(f"with inputs around {case.scale:g}, ", hint * (case.scale != 1)):
        observed(case, "output", "gradients")


@check(plain)
def together(case: Case) -> None:
    """With every fusion of its plugin at once, the numbers are right too."""
    offered = subjects(case.subject.plugin)
    every = [subject for subject in offered if subject.fusion is not case.subject.fusion]
    if not every:
        raise Declined("its plugin offers no other fusion")
    for dtype in (case.dtype, torch.bfloat16) if case.recipe is None else (torch.float64,):
        case = case.with_(dtype=dtype)
        expected = references(case)
        with only(case.subject, *every):
            compare_results(case, backward(case, forward(case)), *expected)


def _partly_reached(chains: Chains) -> Iterator[Case]:
    yield from (*chains.plain, *numbered(chains))
    forks = [case for case in chains.plain if any(op.cls.num_extra_outputs for op in case.ops)]
    yield from (case.with_(reached=which) for case in forks for which in ("first", "extra"))


@check(_partly_reached)
def nan_and_inf(case: Case) -> None:
    """NaN and infinity appear where the separate ops give them."""
    case = fitted(case.with_(rows=(4,)))

    def step() -> RunResult:
        built = case.build()
        for row, column, value in ((0, 0, torch.nan), (1, 0, torch.inf), (2, -1, -torch.inf)):
            built.leaves["input"].data[row, column] = value
        return backward(case, forward(case, built=built))

    got, expected = both(case, step)
    compare_results(case, got, expected, expected)
