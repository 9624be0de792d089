"""The registry of checks: each is a function of one case, with the cases to run it on."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch

from ...core.fusion import PASSES
from ...core.quantization import Recipe
from ...ops import AddExtraInput, ConstantScale, MakeExtraOutput
from ...tuning.tolerance import MORE_ROWS, ROWS
from ..cases import Case, Op
from ..generate import Chains, neighbours
from ..running import Declined
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

TINY = ((torch.float32, 2.0**-122), (torch.bfloat16, 2.0**-122), (torch.float16, 2.0**-8))
"""Scales whose reciprocal leaves the range of the dtype."""

OTHER_DTYPES = (torch.float64, torch.bfloat16, torch.float16)

MANY_ROWS = (2048,)
"""Enough for a kernel that only takes large tensors."""


def first(chains: Chains) -> Iterable[Case]:
    """The plainest chain alone."""
    return chains.plain[:1]


def plain(chains: Chains) -> Iterable[Case]:
    """One chain per structure of the pattern."""
    return chains.plain


def every(chains: Chains) -> Iterable[Case]:
    """Every chain."""
    return chains.all


def long_sums(case: Case) -> Iterator[Case]:
    """Cases that show errors of a sum over rows: many of one sign, and some that cancel."""
    width = case.first_width()
    for rows in [rows for rows, most in MORE_THAN_MANY if width <= most][:1]:
        yield case.with_(rows=(rows,), positive=True)
        yield case.with_(rows=(rows,), positive=True, dtype=torch.bfloat16)
    yield case.with_(rows=(64,), cancelling=True, dtype=torch.float64)


def evaluating(chains: Chains) -> Iterator[Case]:
    """In evaluation mode: chains whose ops look at it, and one per structure.

    There is one per structure because the fusion may look at the mode.
    """
    plain = set(chains.all if chains.thorough else chains.plain)
    return (case.with_(training=False) for case in chains.all if case in plain or case.has_modes)


def surrounded(chains: Chains) -> Iterator[Case]:
    """One chain per structure, alone, after another op, before another op, and between two."""
    for case in chains.plain:
        before, after = neighbours(case)
        yield case
        if before:
            before, after = (*before, *case.before), (*case.after, *after)
            yield from (case.with_(after=after), case.with_(before=before))
            yield case.with_(before=before, after=after)


def numeric(chains: Chains) -> Iterator[Case]:
    """Every chain; one per structure in every dtype, shape, layout and place in a chain."""
    yield from chains.all
    for case in surrounded(chains):
        yield from (case.with_(dtype=dtype) for dtype in OTHER_DTYPES)
        if case.before or case.after:
            yield case
    for case in chains.plain:
        yield case.with_(mean=100.0)
        for dtype, scale in TINY:
            yield case.with_(dtype=dtype, scale=scale, gradient=scale, mixed=True)
        yield from (case.with_(rows=rows) for rows in ROWS + (MORE_ROWS if chains.thorough else ()))
        yield from (case.with_(rows=r, layout=of) for r in ((5,), (2, 5)) for of in LAYOUTS)
        yield from (case.with_(params=layout) for layout in ("strided", "transposed", "sliced"))
        yield from (case.with_(rows=rows, dtype=torch.bfloat16) for rows in ((127,), MANY_ROWS))
        yield from (case.with_(rows=MANY_ROWS), case.with_(wide=True, dtype=torch.bfloat16))
        if case.recipe is None:
            yield case.with_(parametrized=True)
    yield from (*chains.tiles, *chains.models, *map(crossed, chains.residual or chains.plain))
    yield from (*switched(chains), *(case.with_(dtype=torch.bfloat16) for case in chains.all))
    if chains.thorough:
        for case in chains.all:
            yield from (case.with_(rows=(2, 5), layout=layout) for layout in LAYOUTS)
        yield from (case.with_(dtype=torch.float16) for case in (*chains.all, *chains.models))
    yield from (*evaluating(chains), *chains.residual)


def switched(chains: Chains) -> Iterator[Case]:
    """With one op in evaluation inside a chain that trains, and the other way round."""
    for case in chains.all:
        if case in chains.plain or case.has_modes:
            before, after = neighbours(case)
            case = case.with_(before=(*before, *case.before), after=(*case.after, *after))
            for number, op in enumerate(case.chain_ops):
                if op in case.ops:
                    yield from (case.with_(training=t, switched=(number,)) for t in (True, False))


def numbered(chains: Chains) -> Iterator[Case]:
    """Chains with an op that has a number which is 0 or 1."""
    for case in chains.all:
        given = [(*op.args, *dict(op.kwargs).values()) for op in case.ops]
        if any(isinstance(value, float) and value in (0, 1) for value in sum(given, ())):
            yield case


def crossed(case: Case) -> Case:
    """The case inside two channels; the channel that begins first also ends first."""
    rest = (op for op in case.before if op.cls is not MakeExtraOutput)
    before = (Op(MakeExtraOutput), Op(ConstantScale, -2.0), Op(MakeExtraOutput), *rest)
    after = (*case.after, *(Op(AddExtraInput),) * 2)
    return case.with_(before=before, after=after, residual=False, crossing=True)


def decline_state(case: Case) -> None:
    """Decline recipes whose results change from call to call.

    Raises:
        Declined: The scales of its recipe follow from earlier calls.
    """
    if case.recipe is not None and type(case.recipe).update is not Recipe.update:
        raise Declined(f"the scales of {type(case.recipe).__name__} change from call to call")


def frozen(chains: Chains, every_rank: bool = True) -> Iterator[Case]:
    """One chain per structure and number of dimensions, with some leaves frozen.

    The frozen ones are each leaf, all but one, and all before the last.
    """
    ranks = ((), (2, 3), (2, 1, 3)) if chains.thorough else ((), (2, 3)) if every_rank else ()
    dimensions = [case.with_(rows=rows) for case in chains.plain for rows in ranks]
    for case in dimensions:  # one parameter alone, as where biases are tuned
        names = case.leaf_names()
        kept = (name for name in names if "." in name and len(case.rows) > 1)
        half = case.with_(dtype=torch.bfloat16)
        yield from (half.with_(frozen=tuple(n for n in names if n != k)) for k in kept)
    for case in itertools.chain(surrounded(chains), dimensions):
        names = case.leaf_names()
        sets: list[tuple[str, ...]] = [(), *((name,) for name in names)]
        sets += [tuple(n for n in names if n != kept) for kept in names]
        sets += [tuple(names[:-1])]
        for count in range(len(names)) if chains.thorough else ():
            sets += itertools.combinations(names, count)
        yield from (case.with_(frozen=names) for names in dict.fromkeys(sets))


def keeping_weights(case: Case) -> Iterator[Case]:
    """A case with a linear under autocast, which saves the weight itself and not a cast of it."""
    if case.gemm:
        yield case.with_(autocast=torch.bfloat16, prefer="memory")


def joined(case: Case) -> Case:
    """The case before an op that passes its gradient to two ops."""
    return case.with_(after=(*case.after, Op(AddExtraInput)))
