"""``opfuse check-plugin``: what the plugin index says of a distribution, and what it requires."""

from __future__ import annotations

import importlib.metadata as metadata
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import textwrap
from collections import Counter
from collections.abc import Iterator
from typing import Any

import click

from ..report.lines import counted
from ..testing.processes import fresh_environment
from .declared import describe
from .models import UserError, quiet_stdout

OUTCOMES = "failed", "passed", "limit", "skipped"
"""What may come of a check in one of several suites or tiers, what counts first before the rest."""


@click.command(name="check-plugin", short_help="Check a plugin for the plugin index.")
@click.argument("dist")
@click.option(
    "--tests",
    type=click.Path(exists=True),
    help="The plugin's own tests: its suites run, with their makers and limits.",
)
@click.option(
    "--results",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=pathlib.Path),
    help="A report of `python -m opfuse_triton gpu`: what ran on hardware.",
)
@click.option("--quick", is_flag=True, help="Run the checks runs, output and gradients alone.")
@click.option("--json", "as_json", is_flag=True, help="The report, JSON on stdout, nothing else.")
def check_plugin(
    dist: str, tests: str | None, results: tuple[pathlib.Path, ...], quick: bool, as_json: bool
) -> None:
    """Check an installed distribution: metadata, entry points, loading, conformance.

    DIST is its name, such as opfuse-plugin-norm. The conformance suite runs on each of its fusions,
    in a process of its own, which takes minutes. With TRITON_INTERPRET=1 kernels are interpreted.
    Without a GPU, what a fusion's condition says on cuda is what it says of an H100. The exit
    status is 1 if something failed, and the list is at the end. Nothing is downloaded.
    """
    missing = [name for name in ("pytest", "packaging") if importlib.util.find_spec(name) is None]
    if missing:
        needs = 'python -m pip install "opfuse[testing]"'
        raise UserError(f"check-plugin needs {' and '.join(missing)}: {needs}")
    try:
        found = metadata.distribution(dist)
    except (metadata.PackageNotFoundError, ValueError):
        raise UserError(f"no distribution {dist!r} is installed here: pip install it") from None
    records = [_record(path) for path in results]
    with quiet_stdout():
        report = describe(found)
        names = [plugin["name"] for plugin in report["plugins"]]
        add_conformance(report, run_suite(names, tests, quick) if names else {}, tests, quick)
    for record in records:
        add_hardware(report, record)
    click.echo(json.dumps(report, indent=1) if as_json else "\n".join(as_text(report)))
    if report["failures"]:
        sys.exit(1)


# What is checked


def run_suite(plugins: list[str], tests: str | None, quick: bool) -> dict[str, Any]:
    """Run the conformance suite in another process; see :mod:`opfuse.cli.conformance`.

    If kernels are interpreted there, conditions are asked in a third one, where they are not.
    """
    request = {"plugins": plugins, "tests": tests, "quick": quick}
    interpreter = {name: os.environ[name] for name in ("TRITON_INTERPRET",) if name in os.environ}
    report = _process(request, interpreter)
    if interpreter:
        others = _process({**request, "collect_only": True}, {})
        pairs = zip(report.get("fusions", []), others.get("fusions", []), strict=False)
        for fusion, other in pairs:
            fusion["used"] = other["used"]
    return report


def _process(request: dict[str, Any], variables: dict[str, str]) -> dict[str, Any]:
    """What :mod:`opfuse.cli.conformance` writes, or how its process ended."""
    environ = fresh_environment() | variables
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / "out.json"
        text = json.dumps({**request, "out": str(out)})
        command = [sys.executable, "-m", f"{__package__}.conformance"]
        process = subprocess.run(command, input=text, text=True, env=environ, stdout=sys.__stderr__)
        if not out.is_file():
            what = f"the process of the conformance suite ended with status {process.returncode}"
            return {"errors": [f"{what}: its output is above"]}
        return json.loads(out.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def add_conformance(
    report: dict[str, Any], outcome: dict[str, Any], tests: str | None, quick: bool
) -> None:
    """Add what came of the suite: to each fusion its own, to the report the rest."""
    results = outcome.get("results", [])
    rest = _by_outcome([each for each in results if each["fusion"] is None])
    report["conformance"] = {
        "suite": "the plugin's tests" if tests else "as it comes",
        "changes": outcome.get("suites", {}),
        "checks": "runs, output, gradients" if quick else "all",
        "tiers": outcome.get("tiers", {}),
        "rest": rest,
    }
    report["failures"] += outcome.get("errors", [])
    report["failures"] += [f"rest: {name}: {why}" for name, why in rest["failed"].items()]
    fusions = [fusion for plugin in report["plugins"] for fusion in plugin["fusions"]]
    examined = {(each["pass"], each["name"]): each for each in outcome.get("fusions", [])}
    for fusion in fusions:
        key = fusion["pass"], fusion["name"]
        found = examined.get(key, {"used": {}, "left_out": []})
        fusion["used"] = found["used"]
        fusion["checks"] = _by_outcome([each for each in results if each["fusion"] == [*key]])
        report["failures"] += _failures_of(fusion, found["left_out"])
    passed = sum(fusion["checks"]["passed"] for fusion in fusions)
    if fusions and not passed and "results" in outcome:
        reasons = [why for fusion in fusions for why in fusion["checks"]["skipped"].values()]
        why = reasons[0] if reasons else "the tests have no FusionSuite of this plugin"
        hint = "with TRITON_INTERPRET=1 Triton kernels run on a CPU"
        report["failures"].append(f"no check of a fusion ran here: {why}; {hint}")
    if outcome.get("device") and passed:
        versions = {name: report["checked_with"].get(name) for name in ("torch", "triton")}
        by = f"the conformance suite, {counted(passed, 'check')} passed"
        report["hardware"].append({"device": outcome["device"], **versions, "by": by, "wrong": []})


def _failures_of(fusion: dict[str, Any], left_out: list[str]) -> Iterator[str]:
    """What failed of a fusion, and which checks the tests leave out."""
    name = f"{fusion['pass']} {fusion['name']}"
    for check, why in fusion["checks"]["failed"].items():
        yield f"{name}: {check}: {why}"
    if left_out:
        yield f"{name}: the tests leave out {', '.join(left_out)}; a limit would give a reason"


def _by_outcome(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Results by what came of each check: of several, failed counts first, then passed."""
    reasons: dict[str, dict[str, str]] = {}
    for each in results:
        reasons.setdefault(each["check"], {}).setdefault(each["outcome"], each["why"])
    sorted_out: dict[str, dict[str, str]] = {outcome: {} for outcome in OUTCOMES}
    for check, by in reasons.items():
        first = next(outcome for outcome in OUTCOMES if outcome in by)
        sorted_out[first][check] = by[first]
    failed, passed, _, skipped = sorted_out.values()
    limits = {check: by["limit"] for check, by in reasons.items() if "limit" in by}
    return {"passed": len(passed), "failed": failed, "limits": limits, "skipped": skipped}


def _record(path: pathlib.Path) -> dict[str, Any]:
    """A report of ``python -m opfuse_triton gpu``, of every plugin, as far as it is needed here.

    Raises:
        UserError: It is no such report.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        known = {name: found["host"][name] for name in ("device", "torch", "triton")}
        rows = [
            {
                "plugin": row["plugin"],
                "case": row["part"].partition(":")[0],
                "timed": isinstance(row.get("seconds"), float),
                "wrong": [f"{row['part']}: {why}" for why in row["wrong"]],
            }
            for row in found["rows"]
        ]
    except (ValueError, KeyError, TypeError) as error:
        what = f"expected a report of python -m opfuse_triton gpu, got {type(error).__name__}"
        raise UserError(f"{path}: {what}: {error}") from None
    return {**known, "rows": rows}


def add_hardware(report: dict[str, Any], record: dict[str, Any]) -> None:
    """Add what a record says of the plugins, unless the device was Triton's interpreter."""
    names = {plugin["name"] for plugin in report["plugins"]}
    rows = [row for row in record["rows"] if row["plugin"] in names]
    device = record["device"]
    if not rows or device == "interpreter":
        return
    cases, timed = len({row["case"] for row in rows}), sum(row["timed"] for row in rows)
    wrong = [why for row in rows for why in row["wrong"]]
    versions = {name: record[name] for name in ("torch", "triton")}
    by = f"{counted(cases, 'kernel case')} compared, {timed} timed"
    report["hardware"].append({"device": device, **versions, "by": by, "wrong": wrong})
    report["failures"] += [f"on {device}: {why}" for why in wrong]


# As text


def as_text(report: dict[str, Any]) -> list[str]:
    """A report as lines of at most 80 columns."""
    requires, conformance = report["requires"], report["conformance"]
    ranges = [f"{name} {text or 'not named'}" for name, text in requires.items()]
    lines = _wrapped(f"{report['distribution']} {report['version']}: {report['summary']}")
    lines += _wrapped(f"licence {report['licence'] or 'not named'}, {', '.join(ranges)}", "  ")
    versions = [f"{name} {version}" for name, version in report["checked_with"].items()]
    lines += _wrapped(f"checked with {', '.join(versions)}", "  ")
    lines += _wrapped(f"run on hardware: {'; '.join(_hardware(report)) or 'no record'}", "  ")
    lines += _wrapped(f"suite: {conformance['suite']}; checks: {conformance['checks']}", "  ")
    for suite, names in conformance["changes"].items():
        changed = f", which changes {', '.join(names)}" if names else ""
        lines += _wrapped(f"{suite}{changed}", "    ")
    for tier, reason in conformance["tiers"].items():
        lines += _wrapped(f"tier {tier}: {f'not run: {reason}' if reason else 'run'}", "  ")
    for plugin in report["plugins"]:
        hooks = ", ".join(plugin["hooks"]) or "none"
        lines += ["", *_wrapped(f"plugin {plugin['name']} ({report['contract']}): {hooks}")]
        for fusion in plugin["fusions"]:
            lines += _fusion(fusion)
    lines += ["", *_of_checks("the rest", conformance["rest"])]
    failures = report["failures"]
    lines += ["", f"{len(failures)} failed:" if failures else "Nothing failed."]
    for failure in failures:
        first, *rest = failure.splitlines()
        lines += [*_wrapped(f"- {first}", "", "  "), *(f"  {line}" for line in rest)]
    return lines


def _wrapped(text: str, indent: str = "", rest: str | None = None) -> list[str]:
    rest = f"{indent}  " if rest is None else rest
    return textwrap.wrap(text, 80, initial_indent=indent, subsequent_indent=rest)


def _hardware(report: dict[str, Any]) -> Iterator[str]:
    for one in report["hardware"]:
        wrong = f"{len(one['wrong'])} wrong" if one["wrong"] else "none wrong"
        yield f"{one['device']} ({one['by']}, {wrong})"


def _fusion(fusion: dict[str, Any]) -> Iterator[str]:
    """A fusion as lines."""
    yield from _wrapped(f"{fusion['pass']} {fusion['name']}: {fusion['pattern']}", "  ", "      ")
    if fusion["default"] != "on":
        yield from _wrapped(fusion["default"], "    ")
    for device in fusion["used"]:
        yield from _wrapped(f"on {device}: {usage(fusion, device)}", "    ")
    yield from _of_checks("checks", fusion["checks"])


def usage(fusion: dict[str, Any], device: str) -> str:
    """Whether a fusion's condition takes what its pattern matches on a device, and why not."""
    answers = fusion["used"].get(device, {})
    if not answers.get("asked"):
        return "not asked: no chain can be made for it in one process"
    why = f": {answers['refusals'][0]}" if answers["refusals"] else ""
    if answers["used"] == answers["asked"]:
        return "yes"
    return f"{'in part' if answers['used'] else 'no'}{why}"


def counts(*results: dict[str, Any]) -> str:
    """How many checks passed, failed, are limits, or were skipped."""
    passed = sum(checks["passed"] for checks in results)
    failed, limits, skipped = (
        sum(len(checks[name]) for checks in results) for name in ("failed", "limits", "skipped")
    )
    phrases = [f"{passed} passed"] * bool(passed) + [f"{failed} failed"] * bool(failed)
    phrases += [counted(limits, "limit")] * bool(limits) + [f"{skipped} skipped"] * bool(skipped)
    return ", ".join(phrases) or "none ran"


def _of_checks(what: str, checks: dict[str, Any]) -> Iterator[str]:
    yield from _wrapped(f"{what}: {counts(checks)}", "    ")
    for name, why in checks["limits"].items():
        yield from _wrapped(f"limit: {name}: {why}", "      ", "        ")
    reasons = Counter(checks["skipped"].values())
    for why, times in reasons.items():
        names = [name for name, reason in checks["skipped"].items() if reason == why]
        which = ", ".join(names[:3]) + ("" if times <= 3 else f" and {times - 3} more")
        yield from _wrapped(f"skipped: {which}: {why}", "      ", "        ")
