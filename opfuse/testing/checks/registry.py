"""The registry of checks: each is a function of one case, with the cases to run it on."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch

from ...core.fusion import PASSES
from ...core.quantization import Recipe
from ...ops import AddExtraInput
from ...tuning.tolerance import MORE_ROWS, ROWS
from ..cases import Case, Op
from ..failures import Declined
from ..generate import Chains, neighbours
from ..scenarios import MANY_ROWS, covered, crossed, frozen_sets, in_halves, variants
from ..tensors import LAYOUTS


class Check(NamedTuple):
    """One requirement that every fusion is tested for.

    Attributes:
        name: Its name in reports and limits.
        run: Raises :class:`Failure` on a fault, :class:`Declined` where the fusion is not for the
            case.
        cases: The cases to run it on, plainest first.
        passes: For fusions of which passes.
        slow: It compiles, or calls from several threads, so it does not run where kernels are
            interpreted.
    """

    name: str
    run: Callable[[Case], None]
    cases: Callable[[Chains], Iterable[Case]]
    passes: tuple[str, ...] = PASSES
    slow: bool = False


FOUND: dict[str, Check] = {}
"""The checks, as their modules add them."""


def check(
    cases: Callable[[Chains], Iterable[Case]], **options: Any
) -> Callable[[Callable[[Case], None]], Callable[[Case], None]]:
    """Add a function to the checks, under its name, with the other attributes of :class:`Check`."""

    def add(run: Callable[[Case], None]) -> Callable[[Case], None]:
        FOUND[run.__name__] = Check(run.__name__, run, cases, **options)
        return run

    return add


# Which cases

MORE_THAN_MANY = ((20001, 64), (8192, 4096))
"""Enough rows to show errors of sums, for inputs with at most some number of features."""

OTHER_DTYPES = (torch.float64, torch.bfloat16, torch.float16)


def plain(chains: Chains) -> Iterable[Case]:
    """One chain per structure of the pattern."""
    return chains.plain


def every(chains: Chains) -> Iterable[Case]:
    """Every chain."""
    return chains.all


def scenarios(chains: Chains) -> list[Case]:
    """Every chain; one per structure in every circumstance, shape and place in a chain."""
    thorough = chains.thorough
    found = [*chains.all, *chains.tiles, *chains.models, *chains.residual, *numbered(chains)]
    for case in chains.plain:
        found += [case.with_(rows=rows) for rows in ROWS + (MORE_ROWS if thorough else ())]
        half = case.with_(dtype=torch.bfloat16)
        found += [one.with_(rows=MANY_ROWS) for one in (case, half)]
        found += [one.with_(gradient=1e6) for one in (case, half)]
        found += [case.with_(mean=100.0), *_long_sums(case), *_frozen(case, thorough)]
        joined = case.with_(after=(*case.after, Op(AddExtraInput)))
        for one in (case, joined):
            found += [one.with_(autocast=dtype) for dtype in (torch.bfloat16, torch.float16)]
            if case.gemm:  # which saves the weight itself and not a cast of it
                found += [one.with_(autocast=torch.bfloat16, prefer="memory")]
        for scale, dtype in itertools.product((500.0, 2.0**-9), (torch.float16, torch.bfloat16)):
            found += [case.with_(dtype=dtype, scale=scale)]
    found += [*map(crossed, chains.residual or chains.plain), *_in_modes(chains)]
    for case in chains.all:
        found += in_halves(case)
        found += [case.with_(rows=(2, 5), layout=of) for of in LAYOUTS] if thorough else []
    found += [case.with_(dtype=torch.float16) for case in chains.models] if thorough else []
    return [
        *dict.fromkeys((*found, *itertools.chain(*(covered(c, thorough) for c in chains.plain))))
    ]


def exact(chains: Chains) -> Iterator[Case]:
    """Scenarios without autocast, and with numbers around 1."""
    return (case for case in scenarios(chains) if not case.autocast and case.scale == 1)


def _long_sums(case: Case) -> Iterator[Case]:
    """Cases that show errors of a sum over rows: many of one sign, and some that cancel."""
    width = case.first_width()
    for rows in [rows for rows, most in MORE_THAN_MANY if width <= most][:1]:
        yield case.with_(rows=(rows,), positive=True)
        yield case.with_(rows=(rows,), positive=True, dtype=torch.bfloat16)
    yield case.with_(rows=(64,), cancelling=True, dtype=torch.float64)


def _in_modes(chains: Chains) -> Iterator[Case]:
    """In evaluation, as a whole or one op of it: chains whose ops look at it, and the plain."""
    for case in chains.all:
        if case in chains.plain or case.has_modes:
            yield case.with_(training=False)
            before, after = neighbours(case)
            case = case.with_(before=(*before, *case.before), after=(*case.after, *after))
            for number, op in enumerate(case.chain_ops):
                if op in case.ops:
                    yield from (case.with_(training=t, switched=(number,)) for t in (True, False))


def _frozen(case: Case, thorough: bool) -> Iterator[Case]:
    """The case in each number of dimensions, with each leaf frozen, all but one, and others."""
    names = case.leaf_names()
    sets = frozen_sets(names)
    for count in range(len(names)) if thorough else ():
        sets += itertools.combinations(names, count)
    for rows in dict.fromkeys((case.rows, (), (2, 3), *(((2, 1, 3),) if thorough else ()))):
        # one parameter alone, as where biases are tuned
        dtype = torch.bfloat16 if len(rows) > 1 else case.dtype
        yield from (case.with_(rows=rows, frozen=each) for each in dict.fromkeys(sets))
        yield from (case.with_(rows=rows, frozen=each, dtype=dtype) for each in sets)


def numbered(chains: Chains) -> Iterator[Case]:
    """Chains with other numbers and flags of their ops."""
    yield from (other for case in chains.plain for other in variants(case))


def has_state(case: Case) -> bool:
    """Return whether the results of its recipe change from call to call."""
    return case.recipe is not None and type(case.recipe).update is not Recipe.update


def decline_state(case: Case) -> None:
    """Decline recipes whose results change from call to call.

    Raises:
        Declined: The scales of its recipe follow from earlier calls.
    """
    if has_state(case):
        raise Declined(f"the scales of {type(case.recipe).__name__} change from call to call")
