"""The page with the plugin index, from the reports in plugin-index/."""

import json
import pathlib

from opfuse.cli.check_plugin import counts, usage
from opfuse.cli.declared import SCHEMA

HEAD = "| Plugin | Version | Contract | Fusions | torch | Triton | Conformance | Run on hardware |"
HERE = pathlib.Path(__file__).parent / "plugin-index"

PAGE = """# Plugin index

Each row is the report of `opfuse check-plugin` on one plugin, of `docs/plugin-index/`. Listing is
no recommendation: the plugin's authors ran the command, and anyone can run it again.

{table}

- **Contract** is the entry-point group that the plugin was written for ({{doc}}`versioning`).
- **torch** and **Triton** are the versions that the plugin declares, by itself or by what it
  requires of opfuse.
- **Conformance** counts checks of the suites of `opfuse.testing`, each on each fusion that it is
  for. A check is *skipped* if it does not apply, or if nothing here can run it, and a *limit* is
  a check that the plugin declares it fails. Both are listed below, with the reason. *Quick* means
  that of the checks of a fusion only {quick} ran. The tier *reference* is PyTorch on a CPU, with
  what stands in for a Triton kernel if the plugin's tests ask for that. The tier *interpret* runs
  the kernel in Triton's interpreter, and the tier *gpu* on a GPU.
- **Run on hardware** is yes if a record of `python -m opfuse_triton gpu` is in the report, or if
  the suite itself ran on a GPU.

## How to be listed

`opfuse new` writes a plugin with a workflow, `.github/workflows/check.yml`, which runs its tests
and the check below. You need no permission, and no host but that of your own code.

1. Install the plugin and run the check. It needs no network. The exit status is 1 if something
   failed, and the list is at the end of the output.

   ```console
   $ opfuse check-plugin opfuse-plugin-fast-bias --tests tests
   ```

   `--tests` names your own tests, of which your subclasses of the conformance suites run. The
   report names what they change. `TRITON_INTERPRET=1` before the command runs kernels in Triton's
   interpreter.
2. If you have a GPU, record a run on it. `--results` takes the record.

   ```console
   $ python -m opfuse_triton gpu fast-bias --report gpu.json
   $ opfuse check-plugin opfuse-plugin-fast-bias --tests tests --results gpu.json
   ```

3. Write the report with `--json`. In a checkout of opfuse it goes to `docs/plugin-index/`, under
   the name of the distribution. Then write this page.

   ```console
   $ opfuse check-plugin opfuse-plugin-fast-bias --tests tests --json > report.json
   $ mv report.json opfuse/docs/plugin-index/opfuse-plugin-fast-bias.json
   $ cd opfuse && python docs/generate.py
   ```

4. Send both files as a pull request. It is merged if the report is of a released version, names
   no failure, and its homepage has the code. A report with `--quick` is listed as such.

Send a new report with a new version. A row is removed if its authors ask for it, if the plugin's
contract is no longer supported, or if somebody shows that the report is not what the command
writes.

The reports of the plugins in this repository come from `python -m nox -s index`, and a test
compares their fusions with those that are installed.

## The plugins

*CPU* and *GPU* say whether the condition of a fusion takes the chains that its pattern matches,
with no tuning table and the options that a user has. A number is that of the most frequent
reason, below the table. Where the report was made without a GPU, the condition was told of an
H100.

{plugins}
"""


def reports():
    """Every report, by the name of its file.

    Raises:
        ValueError: A report is of another format, of another name, or names failures.
    """
    found = {
        path.stem: json.loads(path.read_text(encoding="utf-8")) for path in HERE.glob("*.json")
    }
    for name, report in found.items():
        if report.get("schema") != SCHEMA:
            raise ValueError(f"{name}: expected a report of schema {SCHEMA}: write it again")
        if report["distribution"] != name:
            raise ValueError(f"{name}: the report is of {report['distribution']}")
        if report["failures"]:
            raise ValueError(
                f"{name}: a report with failures is not listed: {report['failures'][0]}"
            )
    return dict(sorted(found.items()))


def page():
    found = reports().values()
    lines = [HEAD, "|---" * 8 + "|", *(f"| {' | '.join(row(report))} |" for report in found)]
    plugins, quick = "\n\n".join(map(section, found)), "`runs`, `output` and `gradients`"
    return PAGE.format(table="\n".join(lines), plugins=plugins, quick=quick)


def row(report):
    name, home = report["distribution"], report["homepage"]
    requires = report["requires"]
    return (
        f"[{name}]({home})" if home else name,
        report["version"],
        f"`{report['contract']}`",
        str(len(fusions(report))),
        requires["torch"],
        requires["triton"] or "not named",
        conformance(report),
        f"yes, {devices(report)}" if report["hardware"] else "no",
    )


def fusions(report):
    return [fusion for plugin in report["plugins"] for fusion in plugin["fusions"]]


def tiers(report):
    """The tiers that ran."""
    return [name for name, reason in report["conformance"]["tiers"].items() if not reason]


def devices(report):
    return ", ".join(dict.fromkeys(one["device"] for one in report["hardware"]))


def conformance(report):
    checks = [*(fusion["checks"] for fusion in fusions(report)), report["conformance"]["rest"]]
    if not fusions(report):
        return "no fusion to check"
    quick = ", quick" if report["conformance"]["checks"] != "all" else ""
    return f"{' and '.join(tiers(report))}: {counts(*checks)}{quick}"


def section(report):
    """What there is to know of one plugin."""
    with_ = ", ".join(f"{name} {version}" for name, version in report["checked_with"].items())
    parts = [
        f"### {report['distribution']} {report['version']}",
        f"{cell(report['summary'])}. {report['licence']}. Checked with {with_}.",
    ]
    for one in report["hardware"]:
        versions = f"torch {one['torch']}, Triton {one['triton'] or 'not installed'}"
        parts.append(f"On {one['device']}: {one['by']}, none wrong ({versions}).")
    for plugin in report["plugins"]:
        others = [hook for hook in plugin["hooks"] if not hook.endswith("_fusions")]
        if others:
            parts.append(f"Other hooks of `{plugin['name']}`: {', '.join(others)}.")
    if fusions(report):
        lines = ["| Pass | Fusion | Pattern | CPU | GPU | Checks |", "|---|---|---|---|---|---|"]
        reasons: dict[str, int] = {}
        parts.append("\n".join([*lines, *(line(fusion, reasons) for fusion in fusions(report))]))
        parts += filter(None, ["\n".join(f"{at}. {cell(why)}" for why, at in reasons.items())])
    changed = [
        f"`{suite}`: {', '.join(f'`{name}`' for name in names)}"
        for suite, names in report["conformance"]["changes"].items()
        if names
    ]
    if changed:
        parts.append(f"What the plugin's tests change of the suite: {'; '.join(changed)}.")
    parts += filter(None, [limits(report), skipped(report)])
    return "\n\n".join(parts)


def cell(text):
    return text.replace("|", "\\|").replace("*", "\\*").replace("<", "&lt;").replace("_", "\\_")


def line(fusion, reasons):
    """The row of a fusion; adds why devices do not take it to ``reasons``, which are numbered."""

    def taken(device):
        answer, _, why = usage(fusion, device).partition(": ")
        return f"{answer} ({reasons.setdefault(why, len(reasons) + 1)})" if why else answer

    name = fusion["name"] + ("" if fusion["default"] == "on" else f" ({fusion['default']})")
    cells = (
        fusion["pass"],
        cell(name),
        f"`{fusion['pattern']}`",
        *(cell(taken(device)) for device in ("cpu", "cuda")),
    )
    return f"| {' | '.join(cells)} | {counts(fusion['checks'])} |"


def each_of(report):
    """The checks of each fusion by its name, and of the rest."""
    named = [(f"{of['pass']} {of['name']}: ", of["checks"]) for of in fusions(report)]
    return [*named, ("", report["conformance"]["rest"])]


def limits(report):
    told = {}
    for name, checks in each_of(report):
        for check, why in checks["limits"].items():
            told.setdefault(why, []).append(f"{name}{check}")
    return bullets("Declared limits:", told)


def skipped(report):
    told = {}
    for _, checks in each_of(report):
        for check, why in checks["skipped"].items():
            told.setdefault(why, {})[check.partition("[")[0]] = None
    return bullets("Skipped:", {why: [*names] for why, names in told.items()})


def bullets(head, told):
    lines = [
        f"- {cell(', '.join(names))}: {cell(' '.join(why.split()))}" for why, names in told.items()
    ]
    return "\n".join([head, "", *lines]) if lines else ""
