"""What each way to run a unit keeps and costs: measured here, read from the table, or estimated."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

import opfuse
from opfuse.core import tuning_table as tables
from opfuse.core.authoring import saved_bytes
from opfuse.core.settings import current
from opfuse.core.tuning_table import Measurement, Shape
from opfuse.tuning.job import one_line
from opfuse.tuning.timing import TURNS, compare
from opfuse.tuning.writing import add

from .actions import Action, attach, take_off
from .checking import why_not
from .choosing import Option
from .units import Place, Unit, tensors_in

Actions = tuple[tuple[Place, Action], ...]
Those = tuple[tuple[int, Action], ...]
"""The same in a unit: the number of the part, or :data:`WHOLE`."""
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
    """A forward and its backward, to some tensors."""
    outputs = [t for t in tree_leaves(run()) if isinstance(t, Tensor) and t.requires_grad]
    if outputs:
        ones = [torch.ones_like(t) for t in outputs]
        torch.autograd.grad(outputs, wanted, ones, allow_unused=True)


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations of matrix products."""

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
        found = [Option(bare, 0.0, "as it is")]
        if unit.once:
            self._note(f"{unit.place.name} is not computed again: {unit.once}")
            return found
        saved = {
            number: bare - self._bytes(unit, ((number, _AGAIN),))
            for number in range(len(unit.parts))
        }
        best = sorted((n for n, nbytes in saved.items() if nbytes > 0), key=lambda n: -saved[n])
        added = {n: self._seconds(unit, ((n, _AGAIN),)) for n in sorted(best[:MOST_PARTS])}
        for count in range(1, len(added) + 1):
            for those in itertools.combinations(added, count):
                actions = tuple((number, _AGAIN) for number in those)
                kept = self._bytes(unit, actions) if count > 1 else bare - saved[those[0]]
                found.append(Option(kept, sum(map(added.get, those)), *_named(unit, actions)))  # type: ignore[arg-type]
        is_container = any(not part.is_chain for part in unit.parts)
        return found + self._as_a_whole(unit, bare) + (self.compiled(unit) if is_container else [])

    def _as_a_whole(self, unit: Unit, bare: int) -> list[Option]:
        """The ways in which all of a unit does the same, if they keep less than it does."""
        ways = [Action(prefer="memory"), _AGAIN, Action("recompute", "memory")]
        ways += [Action("offload")] * (self._device.type == "cuda")
        found: list[Option] = []
        for way in ways:
            kept = self._bytes(unit, whole := ((WHOLE, way),))
            less = [each.nbytes for each in found if way.what and way.prefer]
            if kept < min([bare, *less]):
                found.append(Option(kept, self._seconds(unit, whole), *_named(unit, whole)))
        return found

    def compiled(self, unit: Unit) -> list[Option]:
        """The ways to compile all of a unit, if that gives what the unit gives as it is."""
        found = []
        for budget in self._budgets:
            whole = ((WHOLE, Action("compile", budget=budget)),)
            if why := why_not(unit, functools.partial(acting, placed(unit, whole))):
                self._note(f"{unit.place.name} is not compiled with budget {budget:g}: {why}")
                break  # and no other budget, since each takes long
            kept, seconds = self._bytes(unit, whole), self._seconds(unit, whole)
            found.append(Option(kept, seconds, *_named(unit, whole)))
        return found

    def _bytes(self, unit: Unit, actions: Those) -> int:
        with acting(placed(unit, actions)):
            return saved_bytes(unit.run, [*self._params, *unit.shared])

    def _seconds(self, unit: Unit, actions: Those) -> float:
        """Seconds that a step of a unit takes longer; at least 0, unless it is compiled."""
        what = [[number, str(action)] for number, action in actions]
        _, longer = self.compared(unit.place.name, unit, what, placed(unit, actions))
        return longer if any(a.what == "compile" for _, a in actions) else max(longer, 0.0)

    def compared(self, name: str, unit: Unit, what: Any, how: Actions) -> tuple[float, float]:
        """Seconds of a step of a unit as it is, and how many more it takes with some actions.

        Both come from the table if they are there, and go into it if they are measured.
        """
        given = tensors_in((unit.args, unit.kwargs))
        wanted = [*dict.fromkeys([t for t in given if t.requires_grad]), *self._trained]
        shape = next((tables.shape_of(t) for t in given if t.ndim), Shape(0, 0, True))
        plain: dict[str, Any] = {"plugin": None, "pass": "step", "fusion": f"memory of {name}"}
        plain |= {"of": unit.kind, "action": [], **_circumstances(self._device)}
        subject, entries = {**plain, "action": what}, tables.table_for(self._device).entries
        known = [entries.get(tables.subject_key(each), {}).get(shape) for each in (plain, subject)]
        if known[0] is not None and known[1] is not None:
            return known[0].seconds, -known[1].seconds

        def other() -> None:
            with acting(how):
                step(unit.run, wanted)

        if not self._measure:
            return self._estimated(lambda: step(unit.run, wanted), other)
        timing = compare(lambda: step(unit.run, wanted), other, self._device, most=TURNS)
        took = Measurement(1.0, timing.noise, timing.first, rows=shape.rows)
        less = timing.first - timing.second
        longer = Measurement(timing.speed, timing.noise, less, rows=shape.rows)
        for each, found, there in ((plain, took, known[0]), (subject, longer, None)):
            if there is None:
                row = {"setting": tables.setting(self._device), "subject": each}
                self._rows.append(row | {"shape": [*shape], "found": dataclasses.asdict(found)})
        return (known[0] or took).seconds, -less

    def _estimated(self, one: Callable[[], Any], other: Callable[[], Any]) -> tuple[float, float]:
        """Seconds of a step, and how many more, by the operations of matrix products.

        What is computed again without products counts as nothing, so nothing is kept for it.
        """
        self.estimated = True
        took = []
        for way in (one, other):
            with _Operations() as counted:  # type: ignore[no-untyped-call]
                way()
            took.append(counted.total / RATES.get(self._device.type, RATES["cuda"]))
        return took[0], took[1] - took[0]

    def write(self) -> None:
        """Put what was measured into the device's table, if there is one."""
        path = tables.path_for(self._device)
        if path is not None and self._rows:
            add(path, self._rows)
            self._rows = []
            tables.reload()


def placed(unit: Unit, actions: Those) -> Actions:
    """Actions with the places in a unit."""
    return tuple((unit.place if n == WHOLE else unit.parts[n], action) for n, action in actions)


def _named(unit: Unit, actions: Those) -> tuple[str, Those]:
    """Actions in words, and the actions."""
    if actions[0][0] == WHOLE:
        return str(actions[0][1]), actions
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
