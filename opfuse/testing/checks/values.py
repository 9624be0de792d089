"""Checks of the numbers: outputs, gradients, what is saved, NaN, and the same every time."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ...core.context_managers import options
from ..cases import Case, subjects
from ..failures import Declined, blamed, saying
from ..generate import Chains, fitted
from ..reference import compare_results
from ..running import RunResult, backward, both, forward, only, references
from ..scenarios import check, exact, numbered, plain, scenarios
from .leavings import other_settings, unchanged_settings
from .observed import observed


@check(exact)
def output(case: Case) -> None:
    """All outputs, against the separate ops in fp64, at the tolerance of the dtype."""
    observed(case, "output")


@check(exact)
def strides(case: Case) -> None:
    """Outputs lie in memory as the separate ops' do."""
    observed(case, "strides")


def _is_usual(case: Case) -> bool:
    return not case.varied and case.rows in ((3,), (case.least,))


@check(scenarios)
def settings(case: Case) -> None:
    """A call leaves torch's settings as they were, whatever those were, and its ops' attributes."""
    observed(case, "settings")
    if not _is_usual(case):
        return
    with other_settings() as was, only(case.subject):
        result = forward(case)
        unchanged_settings(was, "forward")
        backward(case, result)
        unchanged_settings(was, "backward")


@check(scenarios)
def unmodified_inputs(case: Case) -> None:
    """The forward leaves inputs and parameters as they are, unless the op says in-place.

    That holds where no gradient is needed, too.
    """
    observed(case, "unmodified_inputs")


@check(scenarios)
def unmodified_gradients(case: Case) -> None:
    """The backward changes no incoming gradient, saved tensor, output, input or parameter."""
    observed(case, "unmodified_gradients")
    if _is_usual(case):  # what is between two steps, too
        with only(case.subject), options(debug=True), blamed():
            backward(case, forward(case))


@check(scenarios)
def aliasing(case: Case) -> None:
    """Outputs and gradients share memory only as the separate ops' do, and never across calls."""
    observed(case, "aliasing")


@check(scenarios, passes=("backward", "joint"))
def grad_input(case: Case) -> None:
    """The gradient that the backward returns shares memory only as ``grad_input`` declares."""
    observed(case, "grad_input")


@check(scenarios)
def generator(case: Case) -> None:
    """Numbers drawn after its forward or backward are those drawn after the separate ops."""
    observed(case, "generator")


@check(scenarios)
def repeatable(case: Case) -> None:
    """The same chain gives bitwise the same twice, and the right thing in every call."""
    observed(case, "repeatable")


@check(lambda chains: [case for case in scenarios(chains) if case.autocast])
def autocast(case: Case) -> None:
    """Under autocast: the dtypes of the separate ops, and their values."""
    observed(case, "output", "gradients")


@check(lambda chains: [c for c in scenarios(chains) if c.scale != 1 and not c.autocast])
def magnitude(case: Case) -> None:
    """Large and small numbers: finite where the separate ops are, and as exact."""
    how = "in fp32" if case.compute_dtype.itemsize == 2 else "scaled, or in another order"
    hint = f"; compute {how} what leaves the range of {case.compute_dtype}"
    with saying(f"with inputs around {case.scale:g}, ", hint * (case.scale != 1)):
        observed(case, "output", "gradients")


@check(lambda chains: [*scenarios(chains), *chains.quantized], passes=("forward",))
def saved_state(case: Case) -> None:
    """A forward leaves in contexts what the ops would: names, order, values, dtypes, aliases."""
    observed(case, "saved_state")


@check(exact)
def gradients(case: Case) -> None:
    """The gradients of input, parameters and extra inputs, against the separate ops in fp64."""
    observed(case, "gradients")


@check(lambda chains: [case for case in exact(chains) if case.frozen])
def requires_grad(case: Case) -> None:
    """Whichever leaves need a gradient get the right one, and no other work is done."""
    observed(case, "requires_grad", "output", "gradients")


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
