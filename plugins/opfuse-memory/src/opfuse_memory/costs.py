"""What each way to run a unit keeps and costs: measured here, read from the table, or estimated.

And the choice of one for each unit: the least time that a number of bytes allows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

import opfuse
from opfuse.core.engine.checks import tensors_in
from opfuse.core.environment import Shape, shape_of
from opfuse.core.settings import current
from opfuse.report.calls import saved_bytes
from opfuse.tuning import table as tables
from opfuse.tuning.job import add, one_line
from opfuse.tuning.table import Measurement
from opfuse.tuning.timing import in_rounds

from .actions import Action, attach, take_off
from .checking import why_not
from .units import Place, Unit


class Option(NamedTuple):
    """One way to run a unit.

    Attributes:
        nbytes: The bytes that it keeps.
        seconds: The seconds that it adds to a step.
        name: What it is, in words.
        actions: Pairs of the number of a part and an action.
    """

    nbytes: int
    seconds: float
    name: str = ""
    actions: tuple[Any, ...] = ()


class Point(NamedTuple):
    """A choice for the units so far, with the least time for its bytes.

    Attributes:
        nbytes: Bytes of all units.
        ticks: Microseconds added, by all.
        before: The point without the last unit; None: there are no units.
        option: The number of the last unit's option.
    """

    nbytes: int
    ticks: int
    before: Point | None = None
    option: int = 0


def pareto(options: Iterable[Option]) -> list[Option]:
    """Options, the fewest bytes first, each with less time than all that keep fewer."""
    best: list[Option] = []
    for option in sorted(options, key=lambda each: (each.nbytes, each.seconds, each.name)):
        if not best or option.seconds < best[-1].seconds:
            best.append(option)
    return best


def front(units: Sequence[Sequence[Option]]) -> list[Point]:
    """All choices of which none has fewer bytes for the same time or less, the fewest bytes first.

    Units are merged one by one, and what is dominated is dropped at once: that is exact, since what
    follows adds the same to both.

    Args:
        units: The options of each unit.
    """
    points = [Point(0, 0)]
    for options in units:
        ticks = [round(option.seconds * 1e6) for option in options]
        sums = [
            (point.nbytes + option.nbytes, point.ticks + tick, number, index)
            for index, point in enumerate(points)
            for number, (option, tick) in enumerate(zip(options, ticks, strict=True))
        ]
        merged: list[Point] = []
        for nbytes, total, number, index in sorted(sums):
            if not merged or total < merged[-1].ticks:
                merged.append(Point(nbytes, total, points[index], number))
        points = merged
    return points


def options_of(point: Point, units: Sequence[Sequence[Option]], kinds: Sequence[str]) -> list[int]:
    """The number of the option of each unit; of units of one kind the earlier ones keep the least.

    Args:
        point: The choice.
        units: The options of each unit, those with fewer bytes first.
        kinds: The kind of each unit.
    """
    numbers = [0] * len(units)
    for place in reversed(range(len(units))):
        numbers[place] = point.option
        point = point.before  # type: ignore[assignment]
    for kind in dict.fromkeys(kinds):
        places = [place for place, its in enumerate(kinds) if its == kind]
        for place, number in zip(places, sorted(numbers[p] for p in places), strict=True):
            numbers[place] = number
    return numbers


Actions = tuple[tuple[Place, Action], ...]
Those = tuple[tuple[int, Action], ...]
"""The same in a unit: the number of the part, or :data:`WHOLE`."""
Compared = tuple[float, list[float], list[float]]
WHOLE = -1
_AGAIN = Action("recompute")

MOST_PARTS = 4
"""Parts of a unit that are combined, at most: those that save most."""

RATES = {"cpu": 100e9, "cuda": 200e12}
"""Operations per second that estimates assume; another device counts as a GPU."""


@contextlib.contextmanager
def acting(actions: Actions) -> Iterator[None]:
    """A block in which places act so."""
    modules = attach((p.module, p.is_chain, action) for p, action in actions)
    try:
        yield
    finally:
        for module in modules:
            take_off(module)


def step(run: Callable[[], Any], wanted: Sequence[Tensor]) -> None:
    """A forward and its backward to some tensors; from the loss alone, if there is a scalar."""
    torch.clear_autocast_cache()  # as at the end of each step's own block
    outputs = [t for t in tree_leaves(run()) if isinstance(t, Tensor) and t.requires_grad]
    outputs = [t for t in outputs if not t.ndim] or outputs
    if outputs:
        torch.autograd.grad(outputs, wanted, [*map(torch.ones_like, outputs)], allow_unused=True)


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations of matrix products."""

    keeps_no_tensors = True

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        count = flop_registry.get(func._overloadpacket)
        self.total += count(*args, **kwargs, out_val=result) if count else 0
        return result


class Costs:
    """The bytes and seconds of the ways to run units; units that are alike are measured once.

    Args:
        model: The model.
        device: Where it computes.
        measure: Measure times that are not in the table; if not, they are estimated.
        compiled: The budgets with which ``torch.compile`` may compile a unit.

    Attributes:
        notes: Sentences about units for which nothing can be done.
        estimated: Whether a time was estimated.
    """

    def __init__(
        self, model: nn.Module, device: torch.device, measure: bool, compiled: Sequence[float] = ()
    ) -> None:
        self._params = list(model.parameters())
        self._trained = [p for p in self._params if p.requires_grad]
        self._device, self._measure, self._budgets = device, measure, compiled
        self._known: dict[str, list[Option]] = {}
        self._rows: list[dict[str, Any]] = []
        self.notes: dict[str, int] = {}
        self.estimated = False

    def options(self, unit: Unit) -> list[Option]:
        """The ways to run a unit; the first is as it is."""
        known = self._known.get(unit.kind)
        if known is None:
            try:
                known = self._found(unit)
            except Exception as error:
                self._note(f"{unit.place.name} cannot be run by itself: {one_line(error)}")
                known = [Option(0, 0.0, "as it is")]
            self._known[unit.kind] = known
        elif unit.once:
            self._note(f"{unit.place.name} is not computed again: {unit.once}")
        return known

    def _note(self, note: str) -> None:
        self.notes[note] = self.notes.get(note, 0) + 1

    def _found(self, unit: Unit) -> list[Option]:
        bare = self._bytes(unit, ())
        if unit.once:
            self._note(f"{unit.place.name} is not computed again: {unit.once}")
            return [Option(bare, 0.0, "as it is")]
        saved = {
            number: bare - self._bytes(unit, ((number, _AGAIN),))
            for number in range(len(unit.parts))
        }
        best = sorted((n for n, nbytes in saved.items() if nbytes > 0), key=lambda n: -saved[n])
        parts = sorted(best[:MOST_PARTS])
        ways: list[tuple[int, Those]] = [
            (bare - saved[number], ((number, _AGAIN),)) for number in parts
        ]
        ways += self._as_a_whole(unit, bare)
        if any(not part.is_chain for part in unit.parts):
            ways += self.compiled(unit)
        longer = self.compared(unit, [placed(unit, how) for _, how in ways])[1] if ways else []
        found: list[tuple[int, float, Those]] = [(bare, 0.0, ())]
        found += [(kept, more, how) for (kept, how), more in zip(ways, longer, strict=True)]
        for count in range(2, len(parts) + 1):
            for those in itertools.combinations(range(len(parts)), count):
                actions = tuple((parts[index], _AGAIN) for index in those)
                kept = self._bytes(unit, actions)
                found.append((kept, sum(longer[index] for index in those), actions))
        return [Option(kept, seconds, *named(unit, how)) for kept, seconds, how in found]

    def _as_a_whole(self, unit: Unit, bare: int) -> list[tuple[int, Those]]:
        """The ways in which all of a unit does the same, if they keep less than it does."""
        ways = [Action(prefer="memory"), _AGAIN, Action("recompute", "memory")]
        ways += [Action("offload")] * (self._device.type == "cuda")
        found: list[tuple[int, Those]] = []
        for way in ways:
            kept = self._bytes(unit, whole := ((WHOLE, way),))
            less = [nbytes for nbytes, _ in found if way.what and way.prefer]
            if kept < min([bare, *less]):
                found.append((kept, whole))
        return found

    def compiled(self, unit: Unit) -> list[tuple[int, Those]]:
        """The ways to compile all of a unit, if that gives what the unit gives as it is."""
        found: list[tuple[int, Those]] = []
        for budget in self._budgets:
            whole = ((WHOLE, Action("compile", budget=budget)),)
            if why := why_not(unit, functools.partial(acting, placed(unit, whole))):
                self._note(f"{unit.place.name} is not compiled with budget {budget:g}: {why}")
                break  # and no other budget, since each takes long
            found.append((self._bytes(unit, whole), whole))
        return found

    def _bytes(self, unit: Unit, actions: Those) -> int:
        with acting(placed(unit, actions)):
            return saved_bytes(unit.run, [*self._params, *unit.shared])

    def compared(self, unit: Unit, ways: Sequence[Actions]) -> Compared:
        """Seconds of a step of a unit as it is, how many more each of some ways takes, and noises.

        At least 0, unless something is compiled. A noise is a share of a step. They come from the
        table if all are there. If not, all are measured, in the same rounds, and go into it.
        """
        given = [*tensors_in((unit.args, unit.kwargs))]
        wanted = [*dict.fromkeys([t for t in given if t.requires_grad]), *self._trained]
        shape = next((shape_of(t) for t in given if t.ndim), Shape(0, 0, True))
        plain: dict[str, Any] = {"plugin": None, "pass": "step", "of": unit.kind}
        plain |= {"fusion": f"memory of {unit.place.name}", **_circumstances(self._device)}
        inside = len(unit.place.path)
        subjects = [
            {**plain, "action": [[p.path[inside:], p.is_chain, str(a)] for p, a in way]}
            for way in ((), *ways)
        ]
        entries = tables.table_for(self._device).entries
        known = [entries.get(tables.subject_key(each), {}).get(shape) for each in subjects]
        found = [each for each in known if each is not None]

        def run(way: Actions) -> None:
            with acting(way):
                step(unit.run, wanted)

        runs = [functools.partial(run, way) for way in ((), *ways)]
        if None in known and not self._measure:
            return self._estimated(runs)
        if None in known:
            found = [
                Measurement(each.speed, each.noise, each.second, rows=shape.rows)
                for each in in_rounds(runs, self._device)
            ]
            for subject, each in zip(subjects, found, strict=True):
                row = {"setting": tables.setting(self._device), "subject": subject}
                self._rows.append(row | {"shape": [*shape], "found": dataclasses.asdict(each)})
        seconds = found[0].seconds
        longer = [seconds / each.speed - seconds for each in found[1:]]
        compiles = [any(action.what == "compile" for _, action in way) for way in ways]
        longer = [s if c else max(s, 0.0) for s, c in zip(longer, compiles, strict=True)]
        return seconds, longer, [each.noise for each in found[1:]]

    def _estimated(self, runs: Sequence[Callable[[], Any]]) -> Compared:
        """Seconds of a step, and how many more, by the operations of matrix products.

        What is computed again without products counts as nothing, so nothing is kept for it.
        """
        self.estimated = True
        took = []
        for run in runs:
            with _Operations() as counted:  # type: ignore[no-untyped-call]
                run()
            took.append(counted.total / RATES.get(self._device.type, RATES["cuda"]))
        return took[0], [seconds - took[0] for seconds in took[1:]], [0.0] * len(took[1:])

    def write(self) -> None:
        """Put what was measured into the device's table, if there is one."""
        path = tables.path_for(self._device)
        if path is not None and self._rows:
            add(path, self._rows)
            tables.reload()


def placed(unit: Unit, actions: Those) -> Actions:
    """Actions with the places in a unit."""
    return tuple((unit.place if n == WHOLE else unit.parts[n], action) for n, action in actions)


def named(unit: Unit, actions: Those) -> tuple[str, Those]:
    """Actions in words, and the actions."""
    if not actions or actions[0][0] == WHOLE:
        return str(actions[0][1]) if actions else "as it is", actions
    names = []
    for place, _ in placed(unit, actions):
        name = place.path[len(unit.place.path) :].lstrip(".")
        names.append("the chain" if place.is_chain else name)
    return f"recompute {' and '.join(names)}", actions


def _circumstances(device: torch.device) -> dict[str, Any]:
    """What else a time depends on, as JSON-able data."""
    autocast = torch.is_autocast_enabled(device.type)
    versions = sorted(tables.installed().items())
    return {
        "dtype": [str(torch.get_autocast_dtype(device.type)) if autocast else None],
        "mode": [None, torch.are_deterministic_algorithms_enabled(), False],
        "options": [[k, repr(v)] for k, v in sorted(current.options)],
        "versions": [opfuse.__version__, current.selection, *map(list, versions)],
    }
