"""Running cases: build, check, measure side by side, compare with the goals."""

from __future__ import annotations

import dataclasses
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
SLOW = ("compile-max",)
"""Providers that tune for minutes: only ``gpu-full`` has goals against them."""

UNQUANTIZED = ("eager", "compile", "compile-max", "separate", "opfuse-off")
PASSES = ("inference", "forward", "backward", "forward+backward")
NUMBERS = (
    "median_us",
    "p20",
    "p80",
    "rounds",
    "bytes",
    "flops",
    "sol",
    "peak_mem",
    "saved_bytes",
    "rel_err",
    "config",
)
Row = dict[str, Any]


class Harness:
    """Measures cases on a device.

    Args:
        device: Where.
        ceilings: What it reaches; see :func:`benchmarks.measure.ceilings`.
        providers: Names of those to run; None: all that a case needs.
        rounds: How often each provider has its turn; 0: what the case says, or the device.
        make_timer: The timer; None: the device's.
        deadline: Of ``time.monotonic``; after it no provider is built, and rounds end when there
            are five.
    """

    def __init__(
        self,
        device: torch.device,
        ceilings: dict[str, float | None],
        *,
        providers: Iterable[str] | None = None,
        rounds: int = 0,
        make_timer: Callable[[Any], Step] | None = None,
        deadline: float = math.inf,
    ) -> None:
        self.device, self.ceilings, self.rounds, self.deadline = device, ceilings, rounds, deadline
        self.only = set(providers) if providers is not None else set(PROVIDERS)
        self.make_timer = make_timer or timer(device)

    def run(self, case: Case) -> tuple[list[Row], list[Row]]:
        """The rows of a case's providers and the ratios of its goals."""
        rows: dict[str, Row] = {}
        try:
            # every case compiles the same few modules again, and there is a limit
            if "torch._dynamo" in sys.modules:
                torch._dynamo.reset()
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            samples = self._special(case, rows) if case.special else self._measure(case, rows)
        except Exception as reason:
            # out of memory, or a GPU that an earlier kernel broke: what was measured stays
            status = {"status": f"failed: {measure.failure(reason)}"}
            samples, rows = {}, {name: status for name in self._wanted(case)}
        same = {
            "id": case.id,
            "family": case.id[0],
            "case": case.name,
            "shape": [case.rows, case.chain],
        }
        same |= {"dtype": case.dtype, "metric": case.metric} | dict.fromkeys(NUMBERS)
        listed = [same | {"provider": name} | row for name, row in rows.items()]
        return listed, [self._ratio(case, goal, rows, samples) for goal in case.goals]

    def _special(self, case: Case, rows: dict[str, Row]) -> dict[str, list[float]]:
        if "opfuse" not in self.only:
            return {}
        try:
            numbers = getattr(special, case.special)(case, self.device)
        except Skip as reason:
            numbers = {"opfuse": reason}
        except Exception as reason:
            rows["opfuse"] = {"status": f"failed: {measure.failure(reason)}"}
            return {}
        key = "median_us" if case.metric.split()[0] in PASSES else "value"
        for name, values in numbers.items():
            if not name.endswith(AGAIN):
                rows[name] = (
                    _status(values)
                    if isinstance(values, Skip)
                    else {"status": "ok"} | _summary(values, key)
                )
        return {name: values for name, values in numbers.items() if not isinstance(values, Skip)}

    def _wanted(self, case: Case) -> list[str]:
        needed = {name for goal in case.goals for name in (goal.subject, *goal.versus.split("/"))}
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
        passes = {
            name: measure.steps(each, work, passing, case.id[0] == "O")
            for name, each in built.items()
        }
        if metric == "peak bytes":
            peaks = {
                name: self._peak(each, passes[name][0], passing, rows[name])
                for name, each in built.items()
            }
            return {name: [peak] for name, peak in peaks.items() if peak is not None}
        samplers = {}
        for name in [*built, *list(built)[:1]]:
            step, each = passes[name][0], built[name]
            host = case.metric.startswith("host ")
            sampler = (
                (lambda step=step: measure.host_us(step)) if host else self.make_timer(passes[name])
            )
            key = name if name not in samplers else name + AGAIN
            samplers[key] = sampler, lambda each=each: around(each, passing)
        rounds = self.rounds or case.rounds or (5 if self.device.type == "cuda" else 15)
        failed: dict[str, str] = {}
        samples = measure.sample_rounds(
            samplers, rounds, 2 if rounds > 5 else 1, self.deadline, failed
        )
        for name in {name.removesuffix(AGAIN): None for name in failed}:
            rows[name]["status"] = f"failed: {failed.get(name) or failed[name + AGAIN]}"
            samples = {
                key: values for key, values in samples.items() if key.removesuffix(AGAIN) != name
            }
            del built[name]
        for name, each in built.items():
            rows[name] |= _summary(samples[name]) | self._shares(case, name, samples[name])
            if self.device.type == "cuda" and not case.metric.startswith("host "):
                with around(each, passing):
                    rows[name]["host_us"] = measure.host_us(passes[name][0], 5)
                self._peak(each, passes[name][0], passing, rows[name])
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

    def _build(
        self, case: Case, work: Work, passing: str, rows: dict[str, Row]
    ) -> dict[str, Built]:
        """The providers that run, each with the right answer."""
        found: dict[str, Built] = {}
        backward = passing in ("backward", "forward+backward")
        reference = work.reference(backward)
        limit = case.tolerance or (0.15 if case.recipe else TOLERANCE[case.dtype])
        for name in self._wanted(case):
            start = time.perf_counter()
            try:
                if time.monotonic() > self.deadline:
                    raise Skip("the budget is spent")
                with self.device:
                    built = PROVIDERS[name](work, case)
                measure.poison(self.device)
                with around(built, passing):
                    results = work.results(built.model, built.params, work.inputs[0], backward)
                first = time.perf_counter() - start
                wrong = (
                    error(results, built.reference or reference)
                    if built.config.get("checked", True)
                    else None
                )
                del results
                rows[name] = {
                    "status": "ok",
                    "rel_err": wrong,
                    "first_call_s": first,
                    "config": built.config,
                }
                if wrong is not None and wrong > limit:
                    rows[name]["status"] = (
                        f"wrong answer: relative error {wrong:.1e}, at most {limit:.0e}"
                    )
                    continue
                if passing != "inference":
                    rows[name]["saved_bytes"] = saved = measure.saved_bytes(built, work.inputs[0])
                    if case.recompute and name == "opfuse" and saved > work.inputs[0][0].nbytes:
                        raise NotBuilt("it saves more than its input, and recomputes nothing")
            except Skip as reason:
                rows[name] = _status(reason)
            except Exception as reason:  # a peer's failure is a result
                rows[name] = {"status": f"failed: {measure.failure(reason)}"}
            else:
                found[name] = built
        return found

    def _shares(self, case: Case, name: str, samples: list[float]) -> Row:
        """The share of the copy's bandwidth if a case says its bytes, else of matrix products."""
        seconds, copy = measure.spread(samples)[1] * 1e-6, self.ceilings.get("copy_TBps")
        dtype = (
            "fp8"
            if case.recipe and name not in UNQUANTIZED
            else "bf16"
            if name.endswith("-medium")
            else case.dtype
        )
        top = self.ceilings.get(f"{dtype}_TF")
        moved, amount = (
            case.traffic,
            flops(case.chain, case.rows, case.metric.removeprefix("host ")),
        )
        return {
            "bytes": moved or None,
            "flops": amount,
            "sol": moved / seconds / (copy * 1e12) if moved and copy else None,
            "flops_share": amount / seconds / (top * 1e12) if amount and top else None,
        }

    def _ratio(
        self, case: Case, goal: Goal, rows: dict[str, Row], samples: dict[str, list[float]]
    ) -> Row:
        """A goal with what was measured; without a number, with the reason."""
        made = {
            "id": goal.id or case.id,
            "case": case.name,
            "num": goal.subject,
            "den": goal.versus,
        }
        made |= {
            "metric": case.metric,
            "goal": goal.goal,
            "stretch": goal.stretch,
            "bound": goal.bound,
        }
        made |= {"cost": goal.cost, "exact": goal.exact}
        made |= {"value": None, "noise": None, "beyond_noise": None, "pass": None, "reason": ""}
        if "/" in goal.versus:
            return self._either(case, goal, rows, samples)
        for name in (goal.subject, goal.versus):
            if name not in ("self", "sol") and name not in samples:
                status = rows.get(name, {}).get("status", "not asked for")
                status = "no number" if status == "ok" else status
                made["pass"] = (
                    False
                    if status.startswith(("wrong", "failed")) and name == goal.subject
                    else None
                )
                return made | {"reason": status if name == goal.subject else f"{name}: {status}"}
        mine, alone = samples[goal.subject], goal.versus in ("self", "sol")
        if alone:
            value = rows[goal.subject]["sol"] if goal.versus == "sol" else measure.spread(mine)[1]
        else:
            pair = mine, samples[goal.versus]
            value = measure.ratio(*(pair if goal.cost or goal.exact else pair[::-1]))
        if value is None:
            return made | {"reason": "the copy was not measured"}
        again = next((name for name in samples if name.endswith(AGAIN)), None)
        if again:
            floor = measure.noise(samples[again.removesuffix(AGAIN)], samples[again])
        else:
            # a count has none; of times it is not known where who was to be measured twice failed
            floor = 0.0 if len(mine) == 1 else None
        reached = (
            value == goal.goal
            if goal.exact
            else value <= goal.goal
            if goal.cost
            else value >= goal.goal
        )
        if floor is not None and not alone:  # the other may be noisier than who is measured twice
            floor = max(floor, measure.unrest(mine, samples[goal.versus]))
        # a claim needs this
        beyond = None if alone or floor is None else abs(value - 1) > 2 * floor
        return made | {"value": value, "noise": floor, "pass": reached, "beyond_noise": beyond}

    def _either(
        self, case: Case, goal: Goal, rows: dict[str, Row], samples: dict[str, list[float]]
    ) -> Row:
        """A goal against the first of two, or the second where that does not reach it.

        The row has all three numbers.
        """
        first, second = goal.versus.split("/")
        pairs = {(goal.subject, first), (goal.subject, second), (second, first)}
        single = {
            (mine, other): self._ratio(
                case, dataclasses.replace(goal, subject=mine, versus=other), rows, samples
            )
            for mine, other in pairs
        }
        beside = {f"{mine} / {other}": row["value"] for (mine, other), row in single.items()}
        at_most = single[second, first]["pass"] is False
        best = single[
            goal.subject, second if at_most and not single[goal.subject, first]["pass"] else first
        ]
        return best | {"beside": beside}


def near(row: Row) -> bool:
    """Whether the noise could turn what is said of a ratio's goal."""
    return (
        bool(row["value"] and row["goal"] and row["noise"])
        and abs(row["value"] / row["goal"] - 1) <= 2 * row["noise"]
    )


def _status(reason: Skip) -> Row:
    return {
        "status": ("not built: " if isinstance(reason, NotBuilt) else "skipped: ") + str(reason)
    }


def _summary(values: list[float], key: str = "median_us") -> Row:
    low, middle, high = measure.spread(values)
    return {key: middle, "p20": low, "p80": high, "rounds": len(values)}


def select(suite: str, ids: Iterable[str] | None = None) -> list[Case]:
    """The cases of a suite, or those of them that some ids mean."""
    slow = () if suite == "gpu-full" else SLOW
    chosen = [case.without(slow) for case in CASES if suite in case.suites]
    known, here = ({name for case in cases for name in case.ids} for cases in (CASES, chosen))
    wanted = set(ids) if ids is not None else here
    if strange := wanted - known:
        raise ValueError(
            f"expected ids of {', '.join(in_order(known))}; got {', '.join(sorted(strange))}"
        )
    if absent := wanted - here:
        raise ValueError(
            f"{', '.join(in_order(absent))}: not in the suite {suite}, "
            f"which has {', '.join(in_order(here))}"
        )
    return [case for case in chosen if case.ids & wanted]


def in_order(ids: Iterable[str]) -> list[str]:
    """Ids by letter and number."""
    return sorted(ids, key=lambda name: (name[0], int(name[1:])))


def together(ratios: list[Row]) -> list[Row]:
    """G1 over all its shapes: the geometric mean."""
    if not (rows := [row for row in ratios if row["id"] == "G1"]):
        return []
    values = [row["value"] for row in rows]
    made = rows[0] | {
        "case": "geometric mean of the shapes above",
        "goal": 0.95,
        "stretch": 0.98,
        "bound": 1.05,
    }
    made |= {"value": None, "noise": None, "beyond_noise": None, "pass": None, "reason": ""}
    if None in values:
        return [made | {"reason": "not every shape has a number"}]
    value = math.exp(sum(map(math.log, values)) / len(values))
    return [made | {"value": value, "pass": value >= made["goal"]}]
