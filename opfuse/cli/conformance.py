"""The conformance suite on one distribution, run by pytest in a process of its own.

``opfuse check-plugin`` starts it. What to do is JSON on stdin, what came of it goes into a file.
"""

from __future__ import annotations

import functools
import itertools
import json
import pathlib
import sys
import tempfile
from collections import Counter
from collections.abc import Generator, Iterator, Mapping
from typing import Any

import pytest
import torch

from ..core.engine.planner import processor
from ..core.fusion import Fusion
from ..testing import CHECKS, FusionSuite
from ..testing.cases import Case, Subject, has_collectives, offered
from ..testing.failures import Failure
from ..testing.generate import ask, chains, matched, placed, structures
from ..testing.machine import is_interpreting, tiers
from ..testing.processes import PLUGIN_CHECKS
from ..testing.recipes import recipes_for
from ..testing.running import only
from ..testing.suite import Suite

QUICK = "runs", "output", "gradients"
"""The checks that the others rest on."""

H100: dict[str, Any] = {
    "device": torch.device("cuda", 0),
    "capability": (9, 0),
    "architecture": "sm_90",
    "device_name": "NVIDIA H100 80GB HBM3",
    "multiprocessors": 132,
}
"""What a condition is told of a GPU where there is none: it sees no tensor, only this."""

SUITE = """
from opfuse.testing import FusionSuite


class TestConformance(FusionSuite):
    plugin = {name!r}
"""


class Collector:
    """Keeps the kit's suites of some plugins, and notes what becomes of each of their tests."""

    def __init__(self, plugins: list[str], quick: bool) -> None:
        self.plugins, self.quick = plugins, quick
        self.suites: dict[type, None] = {}
        self.results: list[dict[str, Any]] = []
        self.errors: list[str] = []

    def pytest_collectreport(self, report: Any) -> None:
        """Note a module that cannot be imported."""
        if report.failed:
            self.errors.append(f"{report.nodeid} cannot be collected: {_last_line(report)}")

    def pytest_collection_modifyitems(self, config: Any, items: list[Any]) -> None:
        """Leave the other tests out."""
        mine = [item for item in items if self._is_mine(item)]
        config.hook.pytest_deselected(items=[item for item in items if item not in {*mine}])
        items[:] = mine
        self.suites = dict.fromkeys(item.cls for item in mine)

    def _is_mine(self, item: Any) -> bool:
        cls, given = getattr(item, "cls", None), _parameters_of(item)
        if cls is None or not issubclass(cls, Suite) or "skipped_tier" in given:
            return False
        if getattr(cls, "plugin", None) not in (None, *self.plugins):
            return False
        is_quick = "plugin_check" not in given and given.get("fusion_check", QUICK[0]) in QUICK
        return is_quick or not self.quick

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: Any, call: Any) -> Generator[None, Any, Any]:
        """Note a result."""
        report: Any = yield
        if report.when == "call" or not report.passed:
            given = _parameters_of(item)
            subject, check = given.get("subject"), given.get("fusion_check") or item.name
            outcome, why = _outcome(report)
            fusion = subject and [subject.passes, subject.name]
            check = check if fusion else f"{item.cls.__name__}: {check}"
            row = {"fusion": fusion, "check": check, "outcome": outcome, "why": why}
            self.results.append(row)
        return report


def _parameters_of(item: Any) -> Mapping[str, Any]:
    return getattr(getattr(item, "callspec", None), "params", {})


def _last_line(report: Any) -> str:
    return str(report.longreprtext).strip().splitlines()[-1]


def _outcome(report: Any) -> tuple[str, str]:
    """What a test's report says: passed, failed, limit or skipped, and why."""
    if hasattr(report, "wasxfail"):
        return "limit", f"expected to fail: {report.wasxfail}"
    if report.passed:
        return "passed", ""
    if report.failed:
        return "failed", str(report.longreprtext).strip()
    why = str(report.longrepr[2]).removeprefix("Skipped: ")
    limit = "declared limit: "
    return ("limit", why.removeprefix(limit)) if why.startswith(limit) else ("skipped", why)


def overrides(suite: type) -> list[str]:
    """What a suite of a plugin's tests changes of the kit's suite that it derives from."""
    kit: Any = next(cls for cls in suite.__mro__ if Suite in cls.__bases__)
    above = suite.__mro__[: suite.__mro__.index(kit)]
    names = dict.fromkeys(name for cls in above for name in vars(cls))
    return [name for name in names if not name.startswith("__") and name != "plugin"]


# Where a fusion is used


@functools.cache
def gpu() -> dict[str, Any]:
    """The fields of an environment about this machine's GPU, or about one that is not here."""
    if not torch.cuda.is_available():
        return H100
    device = torch.device("cuda", torch.cuda.current_device())
    capability = torch.cuda.get_device_capability(device)
    known = {"device": device, "capability": capability, **processor(device)}
    return {**known, "device_name": torch.cuda.get_device_name(device)}


def condition_answers(
    subject: Subject, suites: list[type[FusionSuite]]
) -> dict[str, dict[str, Any]]:
    """What the condition of a fusion says, by device, with the options that a user has.

    It is asked about the chains that the pattern matches: in bf16 and fp32, with many rows and few,
    and with a backward; that of a forward also without one.
    """
    makers = {cls: make for suite in suites for cls, make in suite.makers.items()}
    cases = [*_cases(subject, makers)]
    grads = (True, False) if subject.passes == "forward" else (True,)
    answers: dict[str, dict[str, Any]] = {}
    for device in ("cpu", "cuda"):
        reasons = Counter(_refusal(case, device, grad) for case in cases for grad in grads)
        counts = {"asked": reasons.total(), "used": reasons.pop("", 0)}
        answers[device] = {**counts, "refusals": [why for why, _ in reasons.most_common(3)]}
    return answers


def _cases(subject: Subject, makers: Any) -> Iterator[Case]:
    """A case for each chain of a pattern, dtype and size."""
    fusion = subject.fusion
    if not isinstance(fusion, Fusion) or has_collectives(fusion):
        return
    subject = subject._replace(makers=tuple(makers.items()))
    has_casts = "recipe" in fusion.needs or fusion.names_casts
    recipes = recipes_for(subject.plugin) if has_casts else [None]
    sizes = itertools.product((torch.bfloat16, torch.float32), (((4096,), 1024), ((3,), 32)))
    for (dtype, (rows, width)), recipe in itertools.product([*sizes], recipes):
        for elements in structures(fusion.pattern):
            base = Case(subject, (), rows=rows, dtype=dtype, recipe=recipe)
            for ops in chains(base, elements, width)[: 1 if recipe else None]:
                case = placed(base, ops, width)
                try:
                    matched(case)
                except Exception:  # the recipe casts nothing there, or no op can be made so
                    continue
                yield case


def _refusal(case: Case, device: str, grad: bool) -> str:
    """Why the condition refuses a case on a device; "" if it does not."""
    facts = gpu() if device == "cuda" else {}
    try:
        return ask(case, features=case.first_width(), requires_grad=grad, **facts)
    except Exception as error:
        return f"its condition raised {type(error).__name__}: {error}"


# The process


def _loads(plugin: str) -> Iterator[str]:
    """What is wrong with how a plugin loads, in fresh processes."""
    for name in ("entry_point", "imports"):
        try:
            PLUGIN_CHECKS[name](plugin, ())
        except Failure as failure:
            yield str(failure)


def _left_out(subject: Subject, collector: Collector) -> list[str]:
    """The checks that the suites lack of a fusion; of one of collectives they may have none."""
    fusion = [subject.passes, subject.name]
    ran = {each["check"] for each in collector.results if each["fusion"] == fusion}
    return [
        name
        for name, check in ({} if has_collectives(subject.fusion) else CHECKS).items()
        if subject.passes in check.passes
        and not (check.slow and is_interpreting())
        and (name in QUICK or not collector.quick)
        and name not in ran
    ]


def examine(
    plugins: list[str], tests: str | None, quick: bool, collect_only: bool = False
) -> dict[str, Any]:
    """Run the suite on every fusion of some plugins of one distribution.

    Args:
        plugins: Names of their entry points.
        tests: The file or folder with the suites; None: the kit's, as it is.
        quick: Run only the checks of ``QUICK``.
        collect_only: Run none of the tests; conditions are asked all the same.
    """
    with tempfile.TemporaryDirectory() as folder:
        where = [tests]
        if tests is None:
            (pathlib.Path(folder) / "pytest.ini").write_text("[pytest]\n")
            for number, name in enumerate(filter(offered, plugins)):
                file = pathlib.Path(folder) / f"test_plugin_{number}.py"
                file.write_text(SUITE.format(name=name), encoding="utf-8")
            where = ["--rootdir", folder, "-c", str(pathlib.Path(folder) / "pytest.ini"), folder]
        collector = Collector(plugins, quick)
        options = ["-q", "--no-header", "--no-summary", "-p", "no:cacheprovider"]
        options += ["-qq", "--collect-only"] * collect_only
        code = int(pytest.main([*options, *map(str, where)], plugins=[collector]))
    if code not in (0, 1, 5) and not collector.errors:
        collector.errors.append(f"pytest ended with exit status {code}")
    suites = [suite for suite in collector.suites if issubclass(suite, FusionSuite)]
    fusions = [subject for name in plugins for subject in offered(name)]
    loads = [f"{name}: {text}" for name in plugins for text in _loads(name)]
    with only():
        used = [condition_answers(subject, suites) for subject in fusions]
    return {
        "suites": {suite.__name__: overrides(suite) for suite in collector.suites},
        "tiers": {tier.name: tier.reason for tier in tiers()},
        "device": gpu()["device_name"] if torch.cuda.is_available() else None,
        "errors": [*loads, *collector.errors],
        "results": collector.results,
        "fusions": [
            {"pass": s.passes, "name": s.name, "used": of, "left_out": _left_out(s, collector)}
            for s, of in zip(fusions, used, strict=True)
        ],
    }


def main() -> None:
    """What the process does."""
    request = json.loads(sys.stdin.read())
    out = pathlib.Path(request.pop("out"))
    out.write_text(json.dumps(examine(**request)), encoding="utf-8")


if __name__ == "__main__":
    main()
