"""Running checks over cases, and reporting the smallest failing one as code."""

from __future__ import annotations

import dataclasses
import math
import random
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence

import pytest
import torch

from .cases import Case, is_foreign, where
from .checks import CHECKS, Check
from .checks.leavings import restored_settings
from .failures import UNUSED, Declined, Failure, blamed
from .generate import Chains, fitted
from .machine import is_interpreting
from .running import checked, holding, separate


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of a check.

    Attributes:
        ran: How many cases ran.
        declined: The reasons why others did not.
        failure: The fault, or None.
        case: The smallest failing case.
        check: The check's name.
    """

    check: str
    ran: int
    declined: tuple[str, ...] = ()
    failure: str | None = None
    case: Case | None = None

    def __str__(self) -> str:
        if self.case is None:
            return self.failure or f"{self.check}: {self.ran} cases passed"
        subject = self.case.subject
        who = f"{subject.passes} fusion {subject.name!r} of plugin {subject.plugin!r}"
        code = snippet(self.check, self.case)
        return f"{who} fails the check {self.check!r}: {self.failure}\n\n{code}"


def judge(
    limits: Mapping[str, str], names: Sequence[str], problem: str | None, passed: bool = True
) -> None:
    """Fail a test, or let a declared limit pass; a limit that works is a failure."""
    declared = next((name for name in names if name in limits), None)
    if declared is None:
        if problem is not None:
            pytest.fail(problem, pytrace=False)
    elif problem is not None:
        pytest.skip(f"declared limit: {limits[declared]}")
    elif passed:
        what = f"limits declares {declared!r} ({limits[declared]}), but it works"
        pytest.fail(what, pytrace=False)


def run(check: str, case: Case) -> None:
    """Run one check on one case.

    Raises:
        Failure: It found a fault.
        Declined: The fusion does not take the case.
    """
    with warnings.catch_warnings():
        # Dynamo's own
        warnings.filterwarnings("ignore", ".*should not be instantiated", DeprecationWarning)
        warnings.filterwarnings("ignore", ".*torch.jit.script", DeprecationWarning)
        if is_interpreting():
            # numpy's, of an overflow inside a kernel
            warnings.simplefilter("ignore", RuntimeWarning)
        with blamed(), restored_settings():
            CHECKS[check].run(case)


def run_all(check: Check, chains: Chains) -> Outcome:
    """Run a check on its cases up to the first failure, and look for a smaller failing case."""
    ran, declined = 0, dict.fromkeys(chains.declined.values())
    with holding(checked, chains):
        for case in _some(dict.fromkeys(check.cases(chains)), chains):
            try:
                run(check.name, case)
            except Declined as reason:
                declined[str(reason)] = None
            except Failure as failure:
                case, failure = _shrink(check, case, failure, chains.plain)
                return Outcome(check.name, ran, tuple(declined), str(failure), case)
            else:
                ran += 1
    return Outcome(check.name, ran, tuple(declined))


def _some(cases: Iterable[Case], chains: Chains) -> list[Case]:
    """The cases that are within the limits; of too many, the same ones each time."""
    most = chains.most_rows or math.inf
    few = [case for case in map(fitted, cases) if math.prod(case.rows) <= most]
    most = chains.most_cases or len(few)
    return few if len(few) <= most else random.Random(0).sample(few, most)


def _shrink(
    check: Check, case: Case, failure: Failure, others: Sequence[Case]
) -> tuple[Case, Failure]:
    """The smallest case that still fails the check."""
    for _ in range(20):
        for smaller in _smaller(case, others):
            try:
                separate(smaller)
                run(check.name, smaller)
            except Failure as found:
                if str(found) != UNUSED:  # that is another fault: it does not match what is left
                    case, failure = smaller, found
                    break
            except Declined:
                continue
        else:
            break
    return case, failure


def _smaller(case: Case, others: Sequence[Case]) -> Iterator[Case]:
    defaults = {field.name: field.default for field in dataclasses.fields(case)}
    yield from (case.with_(**{name: defaults[name]}) for name in case.varied)
    if case.dtype is not torch.float32:
        yield case.with_(dtype=torch.float32)
    for rows in ((1,), (3,), (2, 3), (127,), (1024,)):
        if len(rows) < len(case.rows) or torch.Size(rows).numel() < torch.Size(case.rows).numel():
            yield case.with_(rows=rows)
    for other in others:
        if len(other.ops) < len(case.ops):
            yield case.with_(ops=other.ops, frozen=())


def snippet(check: str, case: Case) -> str:
    """Code that runs a check on a case."""
    named = [where(op.cls) for op in case.chain_ops]
    named += [where(type(case.recipe))] if case.recipe else []
    modules = {name.rpartition(".")[0] for name in named if is_foreign(name)}
    lines = ["import torch", *(f"import {module}" for module in sorted(modules))]
    lines += ["from opfuse import ops, testing", "", f"case = {case!r}"]
    lines += ["chain, leaves, *_ = case.build()  # to look at by hand"]
    return "\n".join([*lines, f"testing.run({check!r}, case)"])
