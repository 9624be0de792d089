"""``opfuse.plan_memory``: the least time that a number of bytes allows, for a whole model."""

from __future__ import annotations

import bisect
import hashlib
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from opfuse.core.introspection import is_dtensor
from opfuse.core.options import options
from opfuse.report.calls import saved_bytes
from opfuse.report.isolation import isolated
from opfuse.report.lines import as_bytes, wrap
from opfuse.report.replaced_forward import MEMORY, replaced_forwards
from opfuse.tuning.timing import MOST_NOISE
from opfuse.tuning.whole import switched_off

from .actions import put_on
from .costs import Actions, Costs, Option, Point, acting, front, named, options_of, pareto, placed
from .plan import Choice, MemoryPlan
from .units import Place, Unit, units_of

_Choices = list[tuple[Unit, Option]]
_UNITS = {"": 1, "b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def plan_memory(
    model: nn.Module,
    *inputs: Any,
    budget: float | int | str | None = None,
    measure: bool = True,
    compiled: Sequence[float] = (),
    **kwargs: Any,
) -> MemoryPlan:
    """Choose what of a model to compute again, so that a forward keeps no more than a budget.

    The model runs as it will be trained: in the caller's autocast mode, with the plugins, options
    and recipe in force, in training mode if it is to drop out. Its layers, and what is before and
    after them, are run by themselves: layers that are alike once. For each, and for the modules
    inside a layer and the chains of converted ones, the ways are: as it is, under
    ``prefer="memory"``, computed again in the backward (``torch.utils.checkpoint``), and on a GPU
    moved to the host. Their bytes are counted, and their times are measured in the same rounds, or
    read from the table of this device, into which they are written. So with the same table the
    choice is the same. The fastest choice within the budget, and of those as fast the one that
    keeps least, is attached to the model, in place of one that is there.
    :meth:`MemoryPlan.detach` removes it.

    Parameters, buffers and random numbers stay as they are. Gradients are those without the plan:
    what is computed again, or compiled, draws the same random numbers. Only ``prefer="memory"`` and
    what is compiled may round otherwise, by other fusions. Without grad mode nothing is done. A
    layer whose own ``gradient_checkpointing`` is on does only that. A layer that is called with an
    object that a second run would change, such as a cache of keys and values, runs as it is. So
    does one whose forward changes attributes or buffers, draws from other random numbers than
    PyTorch's default ones, or gives other numbers when it runs again. If it begins to change
    something later, that run is not repeated, and it runs as it is from then on.

    Args:
        model: The model; converted or not.
        *inputs: Its inputs, with labels if it computes its loss.
        budget: What a forward may keep: a share of what the model keeps unfused, a float (``0.5``),
            or bytes, an integer or text (``38400``, ``"200MB"``, ``"1.5GiB"``). None: nothing is
            attached; print the plan to see the curve.
        measure: Measure times that are not in the table. If not, the operations of what is computed
            again are counted, and the times are estimates.
        compiled: Budgets of ``torch.compile`` (``activation_memory_budget``, from 0 to 1) with
            which a layer, or the model, may be compiled: each is compared with what runs without,
            and measured, which takes a compilation. Layers that are alike share one.
        **kwargs: Its keyword arguments.

    Returns:
        The plan: print it, ``save`` the curve, or ``attach`` it to a copy.

    Raises:
        TypeError: ``model`` is not a module, or it is a compiled one.
        ValueError: The budget is no share and no number of bytes, or is below the lowest possible
            number, which the message has; nothing is kept; gradient checkpointing is on; or
            ``compiled`` has something else than shares, or comes without ``measure``.
        RuntimeError: Called in traced code, or on a model that is sharded.
    """
    _check(model)
    limit = _parsed(budget)
    shares = isinstance(compiled, (list, tuple)) and all(
        type(n) in (int, float) and 0.0 <= float(n) <= 1.0 for n in compiled
    )
    if not shares or (compiled and not measure):
        raise ValueError(
            f"opfuse.plan_memory expected as compiled shares from 0 to 1, and measure=True, since "
            f"the time of what is compiled cannot be estimated: got {compiled!r}, {measure!r}"
        )
    before = {m: vars(m)[MEMORY] for m in model.modules() if MEMORY in vars(m)}

    with isolated(model, who="opfuse.plan_memory"), torch.enable_grad():
        MemoryPlan.detach(model)
        try:
            plan = _Planning(model, (inputs, kwargs), measure, compiled).plan(limit)
        finally:
            for module, memory in before.items():
                put_on(module, memory)
    if budget is not None:
        plan.attach(model)
    return plan


def _check(model: Any) -> None:
    """Refuse what cannot be planned."""
    expected = "opfuse.plan_memory expected a"
    if not isinstance(model, nn.Module):
        raise TypeError(f"{expected} torch.nn.Module, got {type(model).__name__}")
    if "_orig_mod" in model._modules:
        raise TypeError(f"{expected} model that is not compiled: compile it after")
    if any(is_dtensor(p) for p in model.parameters()):
        raise RuntimeError(
            "opfuse.plan_memory: the model is sharded, and each process would measure for itself. "
            "Plan the whole model in one process, and attach that plan in each of them: "
            "MemoryPlan.from_dict(plan.to_dict()).attach(model)"
        )
    if any(vars(m).get("gradient_checkpointing") is True for m in model.modules()):
        raise ValueError(
            "opfuse.plan_memory: gradient checkpointing is on, and the plan decides what is "
            "computed again: call model.gradient_checkpointing_disable() first"
        )


def _parsed(budget: Any) -> Callable[[int], int] | None:
    """A function from the bytes unfused to the budget in bytes."""
    if budget is None:
        return None
    if isinstance(budget, float) and 0 < budget <= 1:
        return lambda unfused: int(budget * unfused)
    if type(budget) is int and budget > 1:
        return lambda unfused: budget
    if isinstance(budget, str):
        match = re.fullmatch(r"([0-9]+|[0-9]+\.[0-9]*(?=.*b))\s*([a-z]*)", budget.strip().lower())
        if match and match[2] in _UNITS and (nbytes := int(float(match[1]) * _UNITS[match[2]])) > 0:
            return lambda unfused: nbytes
    raise ValueError(
        f"opfuse.plan_memory expected as budget a share above 0 and at most 1, such as 0.5 or 1.0, "
        f"or a number of bytes, such as 38400, '200MB' or '1 B', got {budget!r}"
    )


class _Way(NamedTuple):
    """A choice, its bytes, the seconds that it adds to a step, and their noise, a share of it."""

    choices: _Choices
    kept: int
    more: float = 0.0
    noise: float = 0.0


class _Planning:
    """One plan in the making.

    Args:
        model: The model.
        given: Its arguments, and those by name.
        measure: As for :func:`plan_memory`.
        compiled: Likewise.
    """

    def __init__(
        self, model: nn.Module, given: Any, measure: bool, compiled: Sequence[float]
    ) -> None:
        self._model = model
        self._whole = Unit(Place("", model), *given)
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._costs = Costs(model, device, measure, compiled)

    def plan(self, limit: Callable[[int], int] | None) -> MemoryPlan:
        """The plan; nothing is attached yet."""
        unfused, before = self._unfused(), self._kept()
        if not before:
            raise ValueError("opfuse.plan_memory: the model keeps nothing for a backward")
        units = units_of(self._model, self._whole.run)
        found = [self._costs.options(unit) for unit in units]
        rest = before - sum(options[0].nbytes for options in found)
        bare: _Choices = [(unit, its[0]) for unit, its in zip(units, found, strict=True)]
        self._units, self._options = units, [pareto(options) for options in found]
        self._points = front(self._options)
        kinds = "".join(unit.kind for unit in units)
        self._whole.kind = hashlib.sha256(kinds.encode()).hexdigest()[:16]
        whole = self._costs.compiled(self._whole)
        budget = None if limit is None else limit(unfused)
        ways = [] if budget is None else self._fitting(budget, [before, *[n for n, _ in whole]])
        hows = [_actions(way.choices) for way in ways]
        hows += [placed(self._whole, actions) for _, actions in whole]
        seconds, longer, noises = self._costs.compared(self._whole, hows)
        compiled = [
            Option(nbytes, more, *named(self._whole, actions))
            for (nbytes, actions), more in zip(whole, longer[len(ways) :], strict=True)
        ]
        ways += [_Way([(self._whole, option)], option.nbytes) for option in compiled]
        timed = [_Way(*way[:2], *each) for way, *each in zip(ways, longer, noises, strict=True)]
        way = _Way([], before)
        if budget is not None:
            fits = [each for each in (*timed, _Way(bare, before)) if each.kept <= budget]
            best = min(fits, key=lambda each: each.more)
            noise = max(best.noise, MOST_NOISE)
            tied = [w for w in fits if w.more <= best.more + max(w.noise, noise) * seconds]
            way = min(tied, key=lambda each: (each.kept, each.more))
        parts = [Option(rest + p.nbytes, p.ticks / 1e6) for p in self._points]
        curve = [(o.nbytes, seconds + o.seconds) for o in pareto([*parts, *compiled])]
        budgets = [(o.actions[0][1].budget, o.nbytes, seconds + o.seconds) for o in compiled]
        self._costs.write()
        added = sum(option.seconds for _, option in way.choices)
        measured = None if budget is None else way.more
        return MemoryPlan(
            *(budget, unfused, before, way.kept, seconds, added, measured),
            tuple(map(_said, way.choices)),
            *(tuple(curve), tuple(budgets), tuple(sorted(self._costs.notes.items()))),
            self._costs.estimated,
        )

    def _fitting(self, budget: int, others: Sequence[int]) -> list[_Way]:
        """The fastest choice that keeps no more than a budget, and of those as fast the least.

        By the sums of the units, which are a little off, since what two of them keep together
        counts twice. So the fastest is searched for by halves, and each is counted.

        Args:
            budget: The budget.
            others: The bytes of what else the model can do.
        """
        lowest = min([self._kept_at(self._points[0]), *others])
        if lowest > budget:
            notes = "".join(f"\n{line}" for n in self._costs.notes for line in wrap(n, "  "))
            raise ValueError(
                f"opfuse.plan_memory: the lowest possible number of bytes is {lowest} "
                f"({as_bytes(lowest)}), the budget is {budget} ({as_bytes(budget)}){notes}"
            )
        fit = self._points[: bisect.bisect_right(self._points, budget, key=self._kept_at)]
        late = MOST_NOISE * self._costs.compared(self._whole, [])[0] * 1e6
        tied = [point for point in fit if point.ticks <= fit[-1].ticks + late]
        return [_Way(self._choices(p), self._kept_at(p)) for p in tied[:1] + tied[1:][-1:]]

    def _kept(self) -> int:
        return saved_bytes(self._whole.run, self._model.parameters())

    def _kept_at(self, point: Point) -> int:
        with acting(_actions(self._choices(point))):
            return self._kept()

    def _unfused(self) -> int:
        replaced = [each for _, _, each in replaced_forwards(self._model)]
        with switched_off(replaced), options(fusion_limit=0):
            return self._kept()

    def _choices(self, point: Point) -> _Choices:
        """What each unit does."""
        numbers = options_of(point, self._options, [unit.kind for unit in self._units])
        rows = zip(self._units, self._options, numbers, strict=True)
        return [(unit, options[number]) for unit, options, number in rows]


def _actions(choices: _Choices) -> Actions:
    """The actions of a choice with their places."""
    return tuple(pair for unit, option in choices for pair in placed(unit, option.actions))


def _said(choice: tuple[Unit, Option]) -> Choice:
    """A line of the plan."""
    unit, option = choice
    actions = [(p.path, p.is_chain, action) for p, action in placed(unit, option.actions)]
    named = unit.place.path, unit.place.name
    return Choice(*named, option.name, option.nbytes, option.seconds, tuple(actions))
