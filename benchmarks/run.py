"""Running cases: build, check, measure side by side, compare with the goals."""

from __future__ import annotations

import gc
import math
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from . import measure, special
from .cases import CASES, Case, Goal
from .chains import TOLERANCE, Work, error, flops, widths
from .measure import Step, around, timer
from .providers import PROVIDERS, Built, NotBuilt, Skip

AGAIN = " again"
Row = dict[str, Any]


class Harness:
    """Measures cases on a device.

    Args:
        device: Where.
        ceilings: What it reaches; see :func:`benchmarks.measure.ceilings`.
        providers: Names of those to run; None: all that a case needs.
        rounds: How often each provider has its turn.
        make_timer: The timer; None: the device's.
    """

    def __init__(
        self,
        device: torch.device,
        ceilings: dict[str, float | None],
        *,
        providers: Iterable[str] | None = None,
        rounds: int = 0,
        make_timer: Callable[[Any], Step] | None = None,
    ) -> None:
        self.device, self.ceilings = device, ceilings
        self.only = set(providers) if providers is not None else set(PROVIDERS)
        self.rounds = rounds or (5 if device.type == "cuda" else 15)
        self.make_timer = make_timer or timer(device)

    def run(self, case: Case) -> tuple[list[Row], list[Row]]:
        """The rows of a case's providers and the ratios of its goals."""
        rows: dict[str, Row] = {}
        if "torch._dynamo" in sys.modules:  # every case compiles the same few modules anew, and there is a limit
            torch._dynamo.reset()
        gc.collect()
        try:
            if case.special:
                samples = self._special(case, rows)
            else:
                samples = self._measure(case, rows)
        except torch.OutOfMemoryError as reason:
            samples = {}
            rows["eager"] = {"status": f"out of memory: {str(reason).splitlines()[0]}"}
        same = {"id": case.id, "case": case.name, "shape": [case.rows, case.chain], "dtype": case.dtype}
        listed = [same | {"provider": name, "metric": case.metric} | row for name, row in rows.items()]
        return listed, [self._ratio(case, goal, rows, samples) for goal in case.goals]

    def _special(self, case: Case, rows: dict[str, Row]) -> dict[str, list[float]]:
        try:
            numbers = getattr(special, case.special)(case, self.device)
        except Skip as reason:
            numbers = {"opfuse": reason}
        except Exception as reason:
            rows["opfuse"] = _failed(reason)
            return {}
        key = "median_us" if case.metric.split()[0] in PASSES else "value"
        for name, values in numbers.items():
            if name.endswith(AGAIN):
                continue
            rows[name] = _status(values) if isinstance(values, Skip) else {"status": "ok"} | _summary(values, key)
        return {name: values for name, values in numbers.items() if not isinstance(values, Skip)}

    def _wanted(self, case: Case) -> list[str]:
        needed = {name for goal in case.goals for name in (goal.subject, goal.versus)}
        if not case.chain.endswith(("cast", "castt")):
            needed |= {"eager"} | ({"opfuse-off"} if not case.recipe else set())
        elif case.metric == "inference":
            needed.add("eager")
        return [name for name in PROVIDERS if name in needed & self.only]

    def _measure(self, case: Case, rows: dict[str, Row]) -> dict[str, list[float]]:
        metric = case.metric.removeprefix("host ")
        work = Work(case.chain, case.rows, case.width, case.dtype, self.device, self._sets(case))
        casts = case.chain.endswith(("cast", "castt"))
        passing = "inference" if casts else metric if metric in PASSES else "forward+backward"
        built = self._build(case, work, passing, rows)
        if metric == "saved bytes":
            return {name: [rows[name]["saved_bytes"]] for name in built}
        accumulate = case.id[0] == "O"
        passes = {name: measure.steps(each, work, passing, accumulate) for name, each in built.items()}
        if metric == "peak bytes":
            peaks = {name: self._peak(each, passes[name][0], passing, rows[name]) for name, each in built.items()}
            return {name: [peak] for name, peak in peaks.items() if peak is not None}
        samplers, rounds = {}, min(self.rounds, case.rounds) if case.rounds == 5 else case.rounds or self.rounds
        for name in [*built, *list(built)[:1]]:
            each = built[name]
            sampler = self.make_timer(passes[name])
            if case.metric.startswith("host "):
                sampler = lambda step=passes[name][0]: measure.host_us(step)  # noqa: E731
            key = name if name not in samplers else name + AGAIN
            samplers[key] = sampler, lambda each=each: around(each, passing)
        samples = measure.sample_rounds(samplers, rounds, 2 if rounds > 5 else 1) if samplers else {}
        amount = flops(case.chain, case.rows, metric)
        for name in built:
            rows[name] |= _summary(samples[name]) | {"flops": amount, "bytes": case.traffic * case.rows or None}
            rows[name] |= self._shares(case, rows[name], amount)
            if self.device.type == "cuda" and not case.metric.startswith("host "):
                with around(built[name], passing):
                    rows[name]["host_us"] = measure.host_us(passes[name][0], 5)
                self._peak(built[name], passes[name][0], passing, rows[name])
        return samples

    def _peak(self, built: Built, step: Step, passing: str, row: Row) -> int | None:
        with around(built, passing):
            row["peak_mem"] = measure.peak_bytes(step, self.device)
        return row["peak_mem"]

    def _sets(self, case: Case) -> int:
        """How many sets of inputs are more than three times the L2 cache of a GPU."""
        if self.device.type != "cuda":
            return 1
        cache = torch.cuda.get_device_properties(self.device).L2_cache_size
        size = 2 * case.rows * widths(case.chain, case.width)[0]
        return min(16, max(2, math.ceil(3 * cache / size)))

    def _build(self, case: Case, work: Work, passing: str, rows: dict[str, Row]) -> dict[str, Built]:
        """The providers that run, each with the right answer."""
        found: dict[str, Built] = {}
        backward = passing in ("backward", "forward+backward")
        reference = work.reference(backward)
        limit = 0.15 if case.recipe else TOLERANCE[case.dtype]
        for name in self._wanted(case):
            start = time.perf_counter()
            try:
                with self.device:
                    built = PROVIDERS[name](work, case)
                measure.poison(self.device)
                with around(built, passing):
                    results = work.results(built.model, built.params, work.inputs[0], backward)
                first = time.perf_counter() - start
                wrong = error(results, reference) if built.config.get("checked", True) else None
                del results
                rows[name] = {"status": "ok", "rel_err": wrong, "first_call_s": first, "config": built.config}
                if wrong is not None and wrong > limit:
                    rows[name]["status"] = f"wrong answer: relative error {wrong:.1e}, at most {limit:.0e}"
                    continue
                if passing != "inference":
                    rows[name]["saved_bytes"] = measure.saved_bytes(built, work.inputs[0])
            except Skip as reason:
                rows[name] = _status(reason)
            except Exception as reason:  # a peer's failure is a result
                rows[name] = _failed(reason)
            else:
                found[name] = built
        return found

    def _shares(self, case: Case, row: Row, amount: int) -> Row:
        """Of what the machine reaches: bandwidth where a case says its bytes, else matrix products."""
        seconds, copy = row["median_us"] * 1e-6, self.ceilings.get("copy_TBps")
        top = self.ceilings.get("fp32_TF" if case.dtype == "fp32" else "fp8_TF" if case.recipe else "bf16_TF")
        moved = case.traffic * case.rows
        return {
            "sol": moved / seconds / (copy * 1e12) if moved and copy else None,
            "flops_share": amount / seconds / (top * 1e12) if amount and top else None,
        }

    def _ratio(self, case: Case, goal: Goal, rows: dict[str, Row], samples: dict[str, list[float]]) -> Row:
        """A goal with what was measured; without a number, with the reason."""
        made = {"id": goal.id or case.id, "case": case.name, "num": goal.subject, "den": goal.versus}
        made |= {"metric": case.metric, "goal": goal.goal, "stretch": goal.stretch, "bound": goal.bound}
        made |= {"cost": goal.cost, "value": None, "noise": None, "pass": None, "reason": ""}
        for name in (goal.subject, goal.versus):
            if name not in ("", "sol") and name not in samples:
                status = rows.get(name, {}).get("status", "not asked for")
                status = "no number" if status == "ok" else status
                made["pass"] = False if status.startswith(("wrong", "failed")) and name == goal.subject else None
                return made | {"reason": status if name == goal.subject else f"{name}: {status}"}
        mine = samples[goal.subject]
        if goal.versus in ("", "sol"):
            value = rows[goal.subject]["sol"] if goal.versus else measure.spread(mine)[1]
        else:
            other = samples[goal.versus]
            value = measure.ratio(mine, other) if goal.cost else measure.ratio(other, mine)
        if value is None:
            return made | {"reason": "the copy was not measured"}
        again = next((name for name in samples if name.endswith(AGAIN)), None)
        floor = measure.noise(samples[again.removesuffix(AGAIN)], samples[again]) if again else 0.0
        reached = value == goal.goal if goal.exact else value <= goal.goal if goal.cost else value >= goal.goal
        return made | {"value": value, "noise": floor, "pass": reached, "beyond_noise": abs(value - 1) > 2 * floor}


PASSES = ("inference", "forward", "backward", "forward+backward")


def _status(reason: Skip) -> Row:
    return {"status": ("not built: " if isinstance(reason, NotBuilt) else "skipped: ") + str(reason)}


def _failed(reason: Exception) -> Row:
    return {"status": f"failed: {type(reason).__name__}: {reason}".splitlines()[0][:200]}


def _summary(values: list[float], key: str = "median_us") -> Row:
    low, middle, high = measure.spread(values)
    return {key: middle, "p20": low, "p80": high, "rounds": len(values)}


def select(suite: str, ids: Iterable[str] | None = None) -> list[Case]:
    """The cases of a suite, or those of them that some ids mean."""
    chosen = [case for case in CASES if suite in case.suites]
    known = {name for case in CASES for name in case.ids}
    wanted = set(ids) if ids is not None else known
    if wanted - known:
        raise ValueError(f"no such case: {', '.join(sorted(wanted - known))}; there are {', '.join(sorted(known))}")
    return [case for case in chosen if case.ids & wanted]


def together(ratios: list[Row]) -> list[Row]:
    """G1 over all its shapes: the geometric mean."""
    values = [row["value"] for row in ratios if row["id"] == "G1"]
    if not values:
        return []
    row = {"id": "G1", "case": "geometric mean of the shapes above", "num": "opfuse", "den": "eager"}
    row |= {"metric": "inference", "goal": 0.95, "stretch": 0.98, "bound": 1.05, "cost": False, "noise": None}
    if None in values:
        return [row | {"value": None, "pass": None, "reason": "not every shape has a number"}]
    value = math.exp(sum(map(math.log, values)) / len(values))
    return [row | {"value": value, "pass": value >= 0.95, "reason": ""}]
