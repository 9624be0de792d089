"""The circumstances of cases: each pair of values of two axes, in as few cases as that takes."""

from __future__ import annotations

import functools
import inspect
import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ..ops import AddExtraInput, BasicLinear, ConstantScale, MakeExtraOutput
from ..tuning.tolerance import ROWS
from .cases import Case, Op, is_cast
from .generate import DTYPES, fitted, neighbours, refusal
from .placing import width_behind
from .tensors import LAYOUTS

MANY_ROWS = (2048,)
"""Enough for a kernel that only takes large tensors."""

TINY = {torch.float32: 2.0**-122, torch.bfloat16: 2.0**-122, torch.float16: 2.0**-8}
"""Scales whose reciprocal leaves the range of the dtype."""

NUMBERS = (0.0, 1.0, -1.0, 2.0, 0.5)
"""Numbers of ops for which an author may have written another way."""

_ROWS = ((3,), (), (1,), (2, 3), (5, 51), (2, 1, 3), (127,), (64,), (0,))
_HALVES = torch.bfloat16, torch.float16


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
            known = list(chosen.items())

            def gain(number: int, place: int = place, known: Any = known) -> int:
                pairs = (tuple(sorted((other, (place, number)))) for other in known)
                return sum(pair in left for pair in pairs)

            if place not in chosen:
                numbers = rng.sample(range(sizes[place]), sizes[place])
                chosen[place] = max(numbers, key=gain)
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
    own, numbers = case.leaf_names(), range(len(case.basic_ops()))
    before, after = neighbours(case)
    around: list[Any] = [((), ()), (before, ()), ((), after), (before, after)]
    around += [((), (Op(AddExtraInput),))]
    if not case.after:
        width = width_behind(case.chain_ops, case.first_width())
        around += [((), (Op(BasicLinear, width, 3),))]
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
        "hidden": (False, True) if forks else (False,),
        "main_only": (False, True) if forks else (False,),
    }
    taken: dict[str, list[Any]] = {
        name: [value for value in values if refusal(case.with_(**{name: value})) is None]
        for name, values in axes.items()
    }
    sets = [sets for sets in frozen_sets(own) if refusal(case.with_(frozen=sets), True) is None]
    taken |= {"around": around, "frozen": [*dict.fromkeys((case.frozen, *sets))]}
    taken |= {"switched": [(), *((k,) for k in numbers)], "size": ["", "", "odd", "least", "most"]}
    return {name: values for name, values in taken.items() if len(values) > 1}


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
            if _makes(ops[n], name, value):  # beside those before
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
            values = (value, not value) if isinstance(value, bool) else (value, *other)
            found.append((name, tuple(v for v in dict.fromkeys(values) if _makes(op, name, v))))
    return found


def _makes(op: Op, name: str, value: Any) -> bool:
    try:
        op.with_(**{name: value})()
    except Exception:  # it says why not
        return False
    return True


def crossed(case: Case) -> Case:
    """The case inside two channels; the channel that begins first also ends first."""
    rest = (op for op in case.before if op.cls is not MakeExtraOutput)
    before = (Op(MakeExtraOutput), Op(ConstantScale, -2.0), Op(MakeExtraOutput), *rest)
    after = (*case.after, *(Op(AddExtraInput),) * 2)
    return case.with_(before=before, after=after, residual=False, crossing=True)


# The cases


@functools.lru_cache(maxsize=1024)
def covered(case: Case, every: bool = False) -> tuple[Case, ...]:
    """One case in all pairs of circumstances; ``every``: three times, each in other company."""
    axes = _axes(case)
    rows = [row for seed in range(3 if every else 1) for row in combined(axes, seed)]
    return tuple(dict.fromkeys(_varied(case, axes, row) for row in rows))


@functools.lru_cache(maxsize=1024)
def in_halves(case: Case) -> tuple[Case, ...]:
    """One case in both half precisions, in one of them with other circumstances and rows."""
    rng = random.Random(repr(case.ops))
    layout, rows = rng.choice(LAYOUTS), rng.choice([rows for rows in ROWS if math.prod(rows)])
    one, other = (case.with_(dtype=dtype) for dtype in rng.sample(_HALVES, 2))
    return one, other.with_(layout=layout, rows=rows, training=rng.random() < 0.5)
