"""What is checked, and where: each pair of values of two axes, in as few cases as that takes."""

from __future__ import annotations

import functools
import inspect
import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..core.fusion import PASSES
from ..core.quantization import Recipe
from ..ops import AddExtraInput, BasicLinear, ConstantScale, MakeExtraOutput
from ..tuning.tolerance import MORE_ROWS, ROWS
from .cases import Case, Op, is_cast, makes
from .failures import Declined
from .generate import DTYPES, Chains, fitted, neighbours, refusal, width_behind
from .tensors import LAYOUTS

MANY_ROWS = (2048,)
"""Enough for a kernel that only takes large tensors."""

TINY = {torch.float32: 2.0**-122, torch.bfloat16: 2.0**-122, torch.float16: 2.0**-8}
"""Scales whose reciprocal leaves the range of the dtype."""

NUMBERS = (0.0, 1.0, -1.0, 2.0, 0.5)
"""Numbers of ops for which an author may have written another way."""

_ROWS = ((3,), (), (1,), (2, 3), (5, 51), (2, 1, 3), (127,), (64,), (0,))
_HALVES = torch.bfloat16, torch.float16
_HARMLESS = "layout", "params", "training", "prefer"
"""Axes that the separate ops take in any case."""


@functools.lru_cache(maxsize=256)
def covering(sizes: tuple[int, ...], seed: int = 0) -> tuple[tuple[int, ...], ...]:
    """Rows of numbers below ``sizes``, in which any two numbers of two places are together once."""
    rng, rows = random.Random(seed), []
    places = range(len(sizes))
    left = {
        ((a, i), (b, j))
        for a, b in itertools.combinations(places, 2)
        for i, j in itertools.product(range(sizes[a]), range(sizes[b]))
    }
    while left:
        chosen = dict(rng.choice(sorted(left)))
        for place in rng.sample(places, len(places)):
            if place not in chosen:
                numbers = rng.sample(range(sizes[place]), sizes[place])
                tried = [(place, number) for number in numbers]
                new = [[tuple(sorted((other, one))) for other in chosen.items()] for one in tried]
                gains = [sum(pair in left for pair in pairs) for pairs in new]
                chosen |= [tried[gains.index(max(gains))]]
        left.difference_update(itertools.combinations(sorted(chosen.items()), 2))
        rows.append(tuple(chosen[place] for place in places))
    return tuple(rows)


def combined(axes: Mapping[str, Sequence[Any]], seed: int = 0) -> Iterator[dict[str, Any]]:
    """Values of axes by name: all pairs of values of two axes."""
    for row in covering(tuple(map(len, axes.values())), seed):
        pairs = zip(axes.items(), row, strict=True)
        yield {name: values[number] for (name, values), number in pairs}


# Axes


def _axes(case: Case) -> dict[str, list[Any]]:
    """The axes along which a case can vary, with the values that the fusion takes."""
    own = [name for name, leaf in case.build().leaves.items() if leaf.is_floating_point()]
    before, after = neighbours(case)
    around: list[Any] = [((), ()), (before, ()), ((), after), (before, after)]
    around += [((), (Op(AddExtraInput),))]
    around += [((), followed(case).after)] if not case.after else []
    extras = any(name.startswith("extra") for name in own)
    forks = any(op.cls.num_extra_outputs for op in case.ops)
    axes: dict[str, Sequence[Any]] = {
        "dtype": (torch.float32, *(dtype for dtype in DTYPES if dtype is not torch.float32)),
        "autocast": (None, None, *_HALVES),
        "param_dtype": (None, torch.float32),
        "extra_dtype": (None, torch.float32, *_HALVES) if extras else (None,),
        "rows": (*dict.fromkeys(fitted(case.with_(rows=rows)).rows for rows in _ROWS),),
        "layout": LAYOUTS,
        "params": ("contiguous", "strided", "transposed", "sliced"),
        "training": (True, False),
        "parametrized": (False, True),
        "prefer": (*dict.fromkeys((case.prefer, "memory")),),
        "checkpointed": (False, False, True),
        "channels": ("", "hidden") if forks else ("",),
        "reached": ("all", "first", "extra") if forks else ("all",),
    }
    taken: dict[str, list[Any]] = {
        name: [v for v in values if refusal(case.with_(**{name: v}), name in _HARMLESS) is None]
        for name, values in axes.items()
    }
    sets = [sets for sets in frozen_sets(own) if refusal(case.with_(frozen=sets), True) is None]
    taken |= {"around": around, "frozen": [*dict.fromkeys((case.frozen, *sets))]}
    taken |= {"switched": [(), *((k,) for k, _ in enumerate(case.chain_ops))]}
    taken |= {"size": ["", "", "odd", "least", "most"]}
    return {name: values for name, values in taken.items() if len(values) > 1}


def followed(case: Case) -> Case:
    """The case before a linear, which may do without its input where that is computed again."""
    width = width_behind(case.chain_ops, case.first_width())
    return case if case.after else case.with_(after=(Op(BasicLinear, width, 3),))


def frozen_sets(names: Sequence[str]) -> list[tuple[str, ...]]:
    """Leaves to freeze: none, each, all but each, and all before the last."""
    but_one = (tuple(name for name in names if name != kept) for kept in names)
    return [(), *((name,) for name in names), *but_one, tuple(names[:-1])]


def _varied(case: Case, axes: Mapping[str, Sequence[Any]], row: Mapping[str, Any]) -> Case:
    """The case with one value of each axis."""
    row = dict(row)
    (before, after), size = row.pop("around"), row.pop("size")
    moved = {"frozen": row.pop("frozen", ()), "switched": row.pop("switched", ())}
    moved["frozen"] = tuple(_moved(name, len(before)) for name in moved["frozen"])
    moved["switched"] = tuple(number + len(before) for number in moved["switched"])
    around = {"before": (*before, *case.before), "after": (*case.after, *after)}
    return _sized(case.with_(**row, **moved, **around), size)


def _moved(leaf: str, places: int) -> str:
    number, dot, name = leaf.partition(".")
    return f"{int(number) + places}.{name}" if dot else leaf


def _sized(case: Case, size: str) -> Case:
    """Numbers and gradients as large or as small as the dtype has them, or just not around 1."""
    dtype = case.compute_dtype
    if size == "odd":
        gradient = 1e3 if dtype is torch.float16 else 1e6
        return case.with_(scale=500.0, gradient=gradient)
    if size == "least" and dtype in TINY:
        return case.with_(scale=TINY[dtype], gradient=TINY[dtype], mixed=True)
    if size == "most" and dtype is not torch.float64 and case.recipe is None:
        most = torch.finfo(dtype).max / 4  # where the largest of many is around 4
        return case.with_(scale=most, gradient=most)
    return case


@functools.lru_cache(maxsize=1024)
def variants(case: Case) -> tuple[Case, ...]:
    """The case with other numbers and flags of its ops, in pairs."""
    own = {n: _by_name(op) for n, op in enumerate(case.ops) if not is_cast(op) and not op.via}

    def taken(n: int, name: str, value: Any) -> bool:
        ops = (*case.ops[:n], own[n].with_(**{name: value}), *case.ops[n + 1 :])
        return refusal(case.with_(ops=ops)) is None

    every = ((n, *choice) for n, op in own.items() for choice in choices(op))
    kept = ((n, name, [v for v in values if taken(n, name, v)]) for n, name, values in every)
    options = {(n, name): values for n, name, values in kept if len(values) > 1}
    named = {str(number): values for number, values in enumerate(options.values())}
    rows, found = [*combined(named), *combined(named, 1)], []
    for row in rows if len(named) > 1 else ({"0": v} for v in named.get("0", ())):
        ops, given = [own.get(n, op) for n, op in enumerate(case.ops)], zip(options, row.values())  # noqa: B905
        for (n, name), value in given:
            if makes(ops[n].with_(**{name: value})):  # beside those before
                ops[n] = ops[n].with_(**{name: value})
        found.append(case.with_(ops=tuple(ops)))
    return tuple(dict.fromkeys(found))


def _by_name(op: Op) -> Op:
    """The op with its numbers and flags, and what is behind them, given by name."""
    cut = next((n for n, arg in enumerate(op.args) if isinstance(arg, (bool, float))), None)
    names = [*inspect.signature(op.cls).parameters][: len(op.args)]
    named = dict(zip(names, op.args, strict=False))
    kept = () if cut is None else names[cut:]
    return Op(op.cls, *op.args[:cut], **{n: named[n] for n in kept}, **dict(op.kwargs))


@functools.lru_cache(maxsize=1024)
def choices(op: Op) -> list[tuple[str, tuple[Any, ...]]]:
    """The numbers and flags that the constructor of an op takes by name, and values to try."""
    made, found = op(), list[tuple[str, tuple[Any, ...]]]()
    positional = [*inspect.signature(op.cls).parameters][: len(op.args)]
    for name, parameter in inspect.signature(op.cls).parameters.items():
        value = getattr(made, name, parameter.default)
        if name not in positional and isinstance(value, (bool, float)):
            other = (1.0, 0.5) if name == "eps" else NUMBERS
            tried = (value, not value) if isinstance(value, bool) else (value, *other)
            values = tuple(v for v in dict.fromkeys(tried) if makes(op.with_(**{name: v})))
            found.append((name, values))
    return found


def crossed(case: Case) -> Case:
    """The case inside two channels; the channel that begins first also ends first."""
    rest = (op for op in case.before if op.cls is not MakeExtraOutput)
    before = (Op(MakeExtraOutput), Op(ConstantScale, -2.0), Op(MakeExtraOutput), *rest)
    after = (*case.after, *(Op(AddExtraInput),) * 2)
    return case.with_(before=before, after=after, channels="crossing")


# One case in several circumstances


@functools.lru_cache(maxsize=1024)
def covered(case: Case, every: bool = False) -> tuple[Case, ...]:
    """One case in all pairs of circumstances; ``every``: three times, each in other company."""
    axes = _axes(case)
    rows = [row for seed in range(3 if every else 1) for row in combined(axes, seed)]
    return tuple(dict.fromkeys(_varied(case, axes, row) for row in rows))


def in_halves(case: Case, is_wide: bool = False) -> list[Case]:
    """One case in both half precisions, in one of them with other circumstances and rows.

    Of a chain that is as wide as a tile, too, that one has the other half precision.
    """
    rng = random.Random(repr(_kind(case)))
    one, other = rng.sample(_HALVES, 2)
    if is_wide:
        return [case.with_(dtype=one)]
    layout, rows = rng.choice(LAYOUTS), rng.choice([rows for rows in ROWS if math.prod(rows)])
    return [case.with_(dtype=other, layout=layout, rows=rows, training=rng.random() < 0.5)]


# Checks, and the cases that they run on


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


def plain(chains: Chains) -> Iterable[Case]:
    """One chain per structure of the pattern."""
    return chains.plain


@functools.lru_cache(maxsize=8)
def scenarios(chains: Chains) -> tuple[Case, ...]:
    """Every chain; one per structure in every circumstance, shape and place in a chain."""
    thorough = chains.thorough
    found = [*chains.all, *chains.models, *chains.residual, *numbered(chains)]
    for case in chains.tiles:  # those of other classes than the plainest in half precision
        (half,) = in_halves(case, is_wide=True)
        is_half = _kind(case) not in map(_kind, chains.plain) and refusal(half) is None
        found += [half, case][not is_half : 2 if thorough or not is_half else 1]
    for case in chains.plain:
        found += [case.with_(rows=rows) for rows in ROWS + (MORE_ROWS if thorough else ())]
        for one in (case, case.with_(dtype=torch.bfloat16)):
            found += [one.with_(rows=MANY_ROWS), one.with_(gradient=1e6)]
        found += [case.with_(mean=100.0), *_long_sums(case, case is chains.plain[0])]
        found += [case.with_(autocast=h, prefer=p) for h in _HALVES for p in ("speed", "memory")]
        found += [case.with_(dtype=half, scale=s) for s in (500.0, 2.0**-9) for half in _HALVES]
    found += [*map(crossed, chains.residual or chains.plain), *_in_modes(chains)]
    for case in chains.all:
        found += in_halves(case)
        found += in_halves(case, is_wide=True) if thorough or case in chains.plain else []
        found += [case.with_(rows=(2, 5), layout=of) for of in LAYOUTS] if thorough else []
    found += [case.with_(dtype=torch.float16) for case in chains.models] if thorough else []
    for case in chains.plain:
        found += covered(case, thorough)
    return tuple(dict.fromkeys(found))


def _kind(case: Case) -> list[Any]:
    return [(op.cls, op.kwargs) for op in case.ops]


def exact(chains: Chains) -> Iterator[Case]:
    """Scenarios without autocast, and with numbers around 1."""
    return (case for case in scenarios(chains) if not case.autocast and case.scale == 1)


def _long_sums(case: Case, is_first: bool) -> Iterator[Case]:
    """Cases that show errors of a sum over rows: many of one sign, and some that cancel.

    The first is of more than a million numbers, in rows that no strip divides.
    """
    width = case.first_width()
    if is_first:
        rows = (1 << 20) // min(width, width_behind(case.ops, width)) + 1
        yield case.with_(rows=(rows,), positive=True)
    yield case.with_(rows=(20001 if width <= 64 else 8192,), positive=True, dtype=torch.bfloat16)
    yield case.with_(rows=(64,), cancelling=True, dtype=torch.float64)


def _in_modes(chains: Chains) -> Iterator[Case]:
    """In evaluation, as a whole or one op of it: chains whose ops look at it."""
    for case in chains.all:
        if case.has_modes:
            yield case.with_(training=False)
            before, after = neighbours(case)
            case = case.with_(before=(*before, *case.before), after=(*case.after, *after))
            for number, op in enumerate(case.chain_ops):
                if op in case.ops:
                    yield from (case.with_(training=t, switched=(number,)) for t in (True, False))


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
