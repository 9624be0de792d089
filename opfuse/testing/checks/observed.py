"""One run of a case with its fusion, watched for everything that a call must hold.

Checks look at what it has shown, each at its part, so that all hold in all circumstances.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ...core.introspection import standing_for
from ..cases import Built, Case
from ..failures import Declined, Failure, blamed, saying
from ..reference import (
    compare_grads,
    compare_outputs,
    compare_results,
    compare_strides,
    describe,
    where_finite,
)
from ..running import (
    Plans,
    RunResult,
    alone,
    backward,
    checked,
    forward,
    one_by_one,
    only,
    references,
    watched,
)
from ..scenarios import has_state
from ..tensors import same_bits
from . import leavings
from .leavings import aliases, copies, unchanged

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
    found = known[key]
    for name in (*names, ""):
        if name in found:
            kind, text = found[name]
            raise kind(text)


class _Run:
    """Runs a case, and keeps what it shows by the names of checks, "" if there are no results."""

    def __init__(self, case: Case) -> None:
        self.case, self.saves = case, True
        self.kept: leavings.Kept | None = None
        # the texts alone: an error would keep frames, and with them tensors
        self.found: dict[str, tuple[type[Exception], str]] = {}
        few = math.prod(case.rows) <= MOST_ROWS
        try:
            with blamed():
                self.expected, self.truth = references(case)
                by_ops = self._kept_by_ops() if few and case.subject.passes == "forward" else None
                watching = watched(case, self._forward, self._backward)
                with only(watching.subject), Plans() as plans:
                    self._first(plans, by_ops)
                    usual = case.rows in ((3,), (case.least,)) and case.width is None
                    if (usual or case.varied) and few and not has_state(case):
                        self._again()
        except (Declined, Failure) as failure:
            self.found[""] = type(failure), str(failure)

    @contextlib.contextmanager
    def _noting(self, name: str) -> Iterator[None]:
        try:
            yield
        except (Declined, Failure) as found:
            self.found.setdefault(name, (type(found), str(found)))

    def _kept_by_ops(self) -> tuple[leavings.Kept, Built]:
        """What the ops leave in their contexts, one by one."""
        kept = leavings.Kept()
        case = watched(one_by_one(self.case), kept)
        built = case.build() if has_state(case) else self.expected.built
        with only(case.subject), Plans() as plans:
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
        with self._noting("settings"):
            leavings.unchanged_settings(was, "forward")
        with self._noting("unmodified_inputs"):
            unchanged(before, "forward")
        with self._noting("saved_state"):
            if kept is not None:
                left = [of.of(case, built) for of, built in ((kept, self.built), by_ops)]
                leavings.same_contexts(case, *left)
        saved = self._saved()
        before = copies({**self.named, **saved, **_outputs(got)})
        with self._noting("versions"):
            for what, tensor in saved.items():
                for name in aliases(tensor, self.named):
                    if tensor._version != self.named[name]._version:
                        text = f"its {what}, has the memory of {name}, and not its version"
                        raise Failure(f"{text}: save what the op got, never .data")
        backward(case, got)
        with self._noting("settings"):
            leavings.unchanged_settings(was, "backward")
            leavings.unchanged_attributes(self.built, self.expected.built)
        with self._noting("unmodified_gradients"):
            weights = zip(got.weights, self.expected.weights, strict=True)
            given = {f"the incoming gradient of output {k}": two for k, two in enumerate(weights)}
            unchanged({**before, **given}, "backward")
            for name, leaf in wanted.items():
                if leaf.grad is None or leaf.grad.data_ptr() != leaf.data_ptr():
                    raise Failure(f"its backward modifies the .grad of {name}")
        self._compare(got)

    def _compare(self, got: RunResult) -> None:
        case, finite = self.case, [*where_finite(self.case, got, self.expected, self.truth)]
        with self._noting("output"):
            compare_outputs(case, *finite)
        with self._noting("gradients"):
            compare_grads(case, *finite)
        with self._noting("strides"):
            compare_strides(got, self.expected)
        with self._noting("generator"):
            for when, mine, other in zip(("forward", "backward"), got.states, self.expected.states):  # noqa: B905  # without a gradient there is one
                if not torch.equal(mine, other):
                    what = f"its {when} leaves torch's generator in another state than the ops do"
                    raise Failure(f"{what}: draw what they draw, and never seed it")
        with self._noting("aliasing"):
            for what, name in sorted(_shared(got) - _shared(self.expected)):
                raise Failure(f"{name} shares memory with {what}, which the separate ops' does not")

    def _saved(self) -> dict[str, Tensor]:
        """The tensors that were saved for the backward, by name."""
        nodes: set[Any] = {y.grad_fn for y in self.result.outputs}
        nodes = {node for node in nodes if hasattr(node, "saved_tensors")}
        each = [] if self.case.checkpointed else [node.saved_tensors for node in nodes]
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
            with self._noting("unmodified_inputs"):
                unchanged(before, f"{mode.__name__} forward")
            with self._noting("output"), saying(f"under {mode.__name__}, "):
                three = (got, self.expected, self.truth)
                results = [RunResult(one.built, one.given, one.outputs) for one in three]
                compare_outputs(case, *where_finite(case, *results), graphs=False)
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
        saved = [t for ctx in ctxs for t in ctx.to_save or () if t is not None]
        if saved and not self.saves:
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
