"""What runs say: two of them compared, and the page in the docs."""

from __future__ import annotations

import hashlib
import io
import json
import pathlib
import statistics
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from .cases import CASES, TITLES
from .record import ROOT
from .run import in_order, near

Run = dict[str, Any]
Row = dict[str, Any]
RESULTS = ROOT / "benchmarks" / "results"
COLORS = {True: "#3b6ea5", False: "#d9822b"}
LABELS = {  # by whether a ratio is a cost
    False: "times as fast: right is better; orange misses its goal",
    True: "cost over the other's: left is better; orange misses its goal",
}


def load(path: str | pathlib.Path) -> Run:
    """A run's file; ends the program where it is none."""
    try:
        run = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
        if {"schema", "host", "versions", "cases", "ratios"} <= set(run):
            return run
        reason = "no ratios in it"
    except (OSError, ValueError, TypeError) as error:
        reason = str(error)
    raise SystemExit(f"expected what python -m benchmarks --out FILE wrote, got {path}: {reason}")


def stored(name: str) -> Run:
    """What a file of ``benchmarks/results`` holds."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def runs_in(folder: pathlib.Path) -> dict[pathlib.Path, Run]:
    """The runs of a folder.

    Other files, such as the numbers of probes, are left out, and a message says so.
    """
    found = {}
    for path in sorted(folder.glob("*.json")):
        try:
            found[path] = load(path)
        except SystemExit as reason:
            print(f"left out: {reason}", file=sys.stderr)
    return found


def key(row: Row) -> tuple[str, ...]:
    """What a ratio is of."""
    return row["id"], row["case"], row["num"], row["den"], row["metric"]


def device(run: Run) -> str:
    """What a run measured on."""
    name = (
        run["gpu"]["name"]
        if run["gpu"]
        else f"{run['host']['cpu']}, {run['host']['threads']} thread(s)"
    )
    return name + "; allocator tuned" * (run["host"].get("allocator") == "tuned")


def machine(run: Run) -> str:
    """What ratios depend on besides the code of opfuse."""
    versions = {name: run["versions"].get(name) for name in ("torch", "triton")}
    return device(run) + "".join(
        f"; {name} {version}" for name, version in versions.items() if version
    )


def compare(before: str, after: str) -> int:
    """Print the ratios of two runs side by side; times of different runs are never compared."""
    first, second = load(before), load(after)
    old, new = ({key(row): row for row in run["ratios"]} for run in (first, second))
    both = [
        (old[of], row)
        for of, row in new.items()
        if of in old and (old[of]["value"], row["value"]) != (None, None)
    ]
    if not both:
        raise SystemExit(f"{before} and {after} have no ratio in common")
    if machine(first) != machine(second):
        print(f"of different machines or settings: {machine(first)}\nand: {machine(second)}")
    names = [f"{now['id']:4}{now['case']}  {now['num']} / {now['den']}" for _, now in both]
    wide = max(map(len, names)) + 2
    print(f"{'':{wide}}  before   after  change")
    for name, (then, now) in zip(names, both, strict=True):
        numbers = "".join(
            " " * 8 if row["value"] is None else f"{row['value']:8.3f}" for row in (then, now)
        )
        print(f"{name:{wide}}{numbers}{change(then, now)}")
    if alone := len(old.keys() ^ new.keys()):
        print(f"{alone} ratios are in one of the two only")
    return 0


def change(then: Row, now: Row) -> str:
    """How a ratio changed, and whether by more than the noise; or why one of them has no number."""
    for when, row in (("before", then), ("after", now)):
        if row["value"] is None:
            return f"{'':8}  {when}: {row['reason']}"
    a, b = then["value"], now["value"]
    share = f"{b / a - 1:+8.1%}" if a else f"{b - a:+8.3g}"
    floor = (then["noise"] or 0) + (now["noise"] or 0)
    if a == b or (a and abs(b / a - 1) <= 2 * floor):
        return share
    better = (
        abs(b - now["goal"]) < abs(a - now["goal"]) if now.get("exact") else (b < a) == now["cost"]
    )
    return f"{share}  {'better' if better else 'WORSE'}"


def against(row: Row) -> str:
    """A ratio in words."""
    other = {"sol": "share of copy bandwidth", "self": row["metric"], "": row["metric"]}.get(
        row["den"]
    )
    who = "" if row["num"] == "opfuse" else f"{row['num']}: "
    return who + (other or f"{'cost over' if row['cost'] else 'times as fast as'} {row['den']}")


def percent(share: float) -> str:
    """A share in percent, with two digits and without an exponent."""
    return f"{float(f'{100 * share:.2g}'):g} %"


def state(row: Row) -> str:
    """Whether a row met its goal, and whether noise could turn that."""
    missed = "missed" if near(row) else f"**missed** {row['reason']}".strip()
    met = row["reason"] if row["pass"] is None else "met" if row["pass"] else missed
    return met + ", within the noise" * (near(row) and row["pass"] is not None)


def table(rows: Iterable[Row]) -> list[str]:
    """Ratios as a Markdown table, which names a case in the first of its rows."""
    lines = ["| case | | ratio | measured | goal | bound | |", "|---|---|---|---|---|---|---|"]
    of_case: dict[str, list[Row]] = {}
    for row in rows:
        of_case.setdefault(row["case"], []).append(row)
    for case, found in of_case.items():
        for row in found:
            value = "" if row["value"] is None else f"{row['value']:.3g}"
            value += f" ±{percent(row['noise'])}" if row["noise"] else ""
            value = "≈" * (row.get("beyond_noise") is False and bool(row["noise"])) + value
            ratio = against(row).replace("times as fast as ", "")
            sign = "=" if row.get("exact", row["den"] == "plan") else "≤" if row["cost"] else "≥"
            bound = "" if row["bound"] is None else f"{row['bound']:.3g}"
            lines.append(
                f"| {case if row is found[0] else ''} | {row['id']} | {ratio} | {value} "
                f"| {sign}{row['goal']:.3g} | {bound} | {state(row)} |"
            )
    return lines


def unsaid(row: Row) -> Row:
    """A row for a part of the page whose title says whether its goal is met."""
    return row | {"pass": None, "reason": "within the noise" if near(row) else row["reason"]}


def tables(rows: Iterable[Row]) -> list[str]:
    """A table of ratios for each machine, under its name."""
    places: dict[str, list[Row]] = {}
    for row in rows:
        case, _, place = row["case"].partition("; ")
        places.setdefault(place, []).append(row | {"case": case})
    lines = []
    for place, found in places.items():
        name = {"": "CPU", "tuned allocator": "CPU, tuned allocator"}.get(place, place)
        lines += [f"**{name}**", "", *table(found), ""]
    return lines[:-1]


def bars(axis: Any, rows: list[Row], label: str) -> None:
    """A bar from 1 to each ratio, on a logarithmic scale.

    A line is its goal, and a ring is its bound.
    """
    at = range(len(rows))
    style = {
        "xerr": [(row["noise"] or 0) * row["value"] for row in rows],
        "height": 0.6,
        "error_kw": {"lw": 0.8},
    }
    axis.barh(
        at,
        [row["value"] - 1 for row in rows],
        left=1,
        color=[COLORS[row["pass"]] for row in rows],
        **style,
    )
    axis.set_xscale("log")
    ticks = [0.2, 0.5, 0.7, 1, 1.5, 2, 3, 5, 10, 20]
    axis.set_xticks(ticks, map(str, ticks), minor=False)
    axis.set_xticks([], minor=True)
    marked = [row[name] for row in rows for name in ("value", "goal", "bound") if row[name]]
    axis.set_xlim(min([0.8, *marked]) / 1.1, max([1.8, *marked]) * 1.15)
    line, ring = (
        {"marker": "|", "s": 110, "color": "black"},
        {"s": 22, "facecolors": "none", "edgecolors": "black"},
    )
    for name, style in (("goal", line), ("bound", ring)):
        if found := [(row[name], i) for i, row in enumerate(rows) if row[name] is not None]:
            axis.scatter(*zip(*found, strict=True), zorder=3, label=name, **style)
    axis.axvline(1, color="gray", lw=0.6)
    axis.set_yticks(at, [f"{row['id']}  {row['case']}  ·  {against(row)}" for row in rows])
    axis.invert_yaxis()
    axis.set_xlabel(label)
    axis.margins(y=0.5 / len(rows))
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(loc="lower right", frameon=False, ncols=2, bbox_to_anchor=(1, 1), borderaxespad=0)


def plot(rows: list[Row], title: str) -> str:
    """An SVG picture of ratios, those where more is better above those where less is."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    shown = [
        row for row in rows if row["value"] and row["den"] not in ("", "self", "plan", "fused-plan")
    ]
    halves = [
        (half, label)
        for cost, label in LABELS.items()
        if (half := [row for row in shown if row["cost"] == cost])
    ]
    if not halves:
        return ""
    heights = [len(half) + 1.5 for half, _ in halves]
    with matplotlib.rc_context({"svg.hashsalt": "opfuse", "font.size": 8, "svg.fonttype": "none"}):
        # inches: bars, and their names
        wide = 5 + 0.056 * max(len(row["case"] + against(row)) for row in shown)
        options = {
            "figsize": (wide, 0.24 * sum(heights) + 0.6),
            "squeeze": False,
            "height_ratios": heights,
        }
        figure, axes = pyplot.subplots(len(halves), **options)
        for (half, label), axis in zip(halves, axes[:, 0], strict=True):
            bars(axis, half, label)
        figure.suptitle(title, x=0.01, ha="left", fontsize=10)
        figure.tight_layout()
        file = io.StringIO()
        options = {"metadata": {"Date": None, "Description": digest(rows)}, "bbox_inches": "tight"}
        figure.savefig(file, format="svg", **options)
        pyplot.close(figure)
    return file.getvalue()


def digest(rows: Any) -> str:
    """A fingerprint of data."""
    return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()


def where(run: Run) -> str:
    """The machine of a run, in one sentence."""
    host, versions = run["host"], run["versions"]
    plugins = (
        ", ".join(f"{name} {version}" for name, version in versions["plugins"].items())
        or "no plugin"
    )
    state = (run["git_sha"][:10] or "an unknown commit") + (" with changes" if run["dirty"] else "")
    return (
        f"{device(run)}; {run['time'][:10]}; torch {versions['torch']}, "
        f"Python {versions['python']}, opfuse {versions['opfuse']} at {state}, {plugins}; "
        f"load {host['load'] or 0:.1f} when it began; `{run['command']}`"
    )


PAGE = pathlib.Path(__file__).parent / "page.md"


def committed() -> list[Run]:
    """The runs in ``benchmarks/results``, newest first.

    Each is without what a newer one of its suite measured again.
    """
    runs: list[Run] = []
    seen: set[tuple[str, ...]] = set()
    for run in sorted(runs_in(RESULTS).values(), key=lambda run: run["time"], reverse=True):
        mark = "; tuned allocator" * (run["host"].get("allocator") == "tuned")
        mark += f"; {run['gpu']['name']}" if run.get("gpu") else ""
        marked = {
            of: [row | {"case": row["case"] + mark} for row in run[of]]
            for of in ("ratios", "cases")
        }
        ratios = [row for row in marked["ratios"] if (run["suite"], *key(row)) not in seen]
        cases = {(row["id"], row["case"]) for row in ratios}
        if ratios:
            left = [case for case in marked["cases"] if (case["id"], case["case"]) in cases]
            runs.append(run | {"ratios": ratios, "cases": left})
            seen |= {(run["suite"], *key(row)) for row in ratios}
    return runs


HEADLINE = (  # a row of the page's first table: id, what its case contains, against whom
    ("C1", "fp32 of 4096", "eager"),
    ("C1", "bf16 of 4096", "eager"),
    ("C3", "add fork rmsnorm:1024, bf16 of 4096x1024; tuned allocator", "eager"),
    ("P1", "bf16 of 128", "eager"),
    ("G8", "NVIDIA", "liger"),
)
SWARMS = ("L1", "L3", "C4")
"""Goals with so many cases that the page sums them up."""

SLOW = 0.9
"""A chain without plugins has a row of its own below this share of the speed of PyTorch."""

TOO_NOISY = 0.25
"""A row with this noise or more says neither that a goal is met nor that it is missed."""


def too_noisy(row: Row) -> bool:
    """Whether a row says nothing about its goal."""
    return (row["noise"] or 0) >= TOO_NOISY


def written(runs: list[Run]) -> tuple[str, str]:
    """The page, and the fingerprint of the rows in its picture."""
    rows = [row for run in runs for row in run["ratios"]]
    single = [row for row in rows if row["id"] not in SWARMS]
    noisy = [row for row in single if too_noisy(row)]
    clear = [row for row in single if row not in noisy]
    behind, met = (
        tables(map(unsaid, (row for row in clear if row["pass"] is wanted)))
        for wanted in (False, True)
    )
    for missed, line in swarms(rows):
        (behind if missed else met).extend(["", line])
    pairs = sorted((pair for run in runs for pair in unfused(run)), key=lambda pair: pair[1])
    slow = [(case, speed) for case, speed in pairs if speed < SLOW]
    parts = {
        "headline": table(filter(None, (first(rows, *wanted) for wanted in HEADLINE))),
        "behind": behind,
        "met": met,
        "noisy": tables(row | {"pass": None, "reason": ""} for row in noisy),
        "runs": [f"- {where(run)}" for run in runs],
        "unfused": ["| chain | ratio |", "|---|---|", *(f"| {n} | {v:.2f} |" for n, v in slow)],
        "chains": [chains_in(pairs, len(slow))],
        "alone": alone([row for row in rows if row["id"] == "L3"]),
        "unknown": unknown(runs, rows),
        **on_gpu(stored("h100-kernels")),
        "steps": of_step(stored("h100-step")),
        "launches": launches_of(stored("h100-step-kernels")),
    }
    text = PAGE.read_text(encoding="utf-8")
    return text.format(**{name: "\n".join(lines) for name, lines in parts.items()}), digest(
        pictured(runs)
    )


def chains_in(pairs: list[tuple[str, float]], slow: int) -> str:
    """What the chains without plugins have in common."""
    median = statistics.median(speed for _, speed in pairs)
    return f"{len(pairs)} chains have a median of {median:.2f}. {slow} of them are below {SLOW}"


def on_gpu(timed: dict[str, Any]) -> dict[str, list[str]]:
    """The parts of the page about kernels on a GPU: each case where most others were timed."""
    copied, product = timed["limits"]
    lines = ["| | at | us | share | separate | compile | Liger |", "|---|---|---|---|---|---|---|"]
    above = "", ""
    for case, row, ratios in timed_cases(timed):
        share = (row["flops"] / product or row["floor"] / copied) / row["seconds"]
        shown = ["" if of is None else f"{of:.2f}" for of in ratios]
        (plugin, _, name), at = case.partition(": "), row["part"].rpartition(": ")[2]
        first = name if plugin == above[0] else f"**{plugin}:** {name}"
        first = [first, "" if (plugin, at) == above else at, f"{row['seconds'] * 1e6:.0f}"]
        lines.append(f"| {' | '.join([*first, f'{share:.0%}', *shown])} |")
        above = plugin, at
    limits = f"{copied / 1e12:.1f} TB/s, and {product / 1e12:.0f} TFLOP/s in bf16"
    return {"kernels": lines, "compared": [compared_in(timed)], "limits": [limits]}


def timed_cases(timed: dict[str, Any]) -> Iterator[tuple[str, Row, list[float | None]]]:
    """Each case that was timed on a GPU, at the shape where most others were.

    Yields:
        Its plugin and name, its row, and how many times as long PyTorch's operations, what
        ``torch.compile`` makes of them, and Liger's kernel take.
    """
    apart = {row["part"]: row["compiled"] for row in timed["rows"] if "compiled" in row}
    cases: dict[str, Row] = {}
    for row in timed["rows"]:
        if not isinstance(row.get("seconds"), float):
            continue
        case = f"{row['plugin']}: {row['part'].rpartition(': ')[0]}"
        known = len([of for of in row["others"].values() if isinstance(of, float)])
        if known > cases.get(case, {"known": -1})["known"]:
            cases[case] = row | {"known": known}
    for case, row in cases.items():
        others = row["others"]
        liger = next((of for name, of in others.items() if name.startswith("liger")), None)
        compiled = others.get("compiled", apart.get(f"{row['part']}, torch.compile"))
        found = others.get("separate"), compiled, liger
        yield case, row, [of / row["seconds"] if isinstance(of, float) else None for of in found]


GONE = "cast, NVFP4 at 4 or 6", "cast, NVFP4 16 x 16 at 4 or 6"
"""Cases of stored runs that have no kernels any more."""


def behind_in(timed: dict[str, Any]) -> list[str]:
    """Names of the cases that something else is faster than, without their plugins."""
    named = [(case.partition(": ")[2], ratios) for case, _, ratios in timed_cases(timed)]
    return [
        name
        for name, ratios in named
        if name not in GONE and any(of is not None and of < 1 for of in ratios)
    ]


def compared_in(timed: dict[str, Any]) -> str:
    """At how many shapes results were compared on a GPU, and how many were wrong."""
    wrong = sum(len(row["wrong"]) for row in timed["rows"])
    said = "Compared with PyTorch's at {odd} odd shapes and dtypes, aligned and not, and at {real} "
    said += f"real shapes, three runs each: {wrong or 'none'} differ."
    return said.format(**sizes_in(timed["rows"]))


def sizes_in(rows: Iterable[Row]) -> dict[str, int]:
    """The numbers of odd and of real shapes; what is compiled runs at real shapes of others."""
    rows = list(rows)
    odd = sum(row.get("judged", 0) for row in rows)
    return {"odd": odd, "real": sum(not {"judged", "compiled"} & {*row} for row in rows)}


def of_step(run: dict[str, Any]) -> list[str]:
    """The table of a training step on a GPU."""
    shown = {"Python ms": "python_ms", "MHz": "sm_mhz"}  # of runs that have them
    shown = {title: of for title, of in shown.items() if any(of in row for row in run["rows"])}
    titles = "ms", "speed", "in a graph", *shown, "peak GB", "loss"
    lines = [f"| | {' | '.join(titles)} |", f"|{'---|' * (len(titles) + 1)}"]
    rows = {row["way"]: row for row in run["rows"]}
    for way, row in rows.items():
        if "ms" not in row:
            lines.append(f"| {way} | {row['why']} |{' |' * (len(titles) - 1)}")
        elif not way.endswith("-graph"):
            speed = row.get("speed") or row.get("eager_ms", run["rows"][0]["ms"]) / row["ms"]
            graph = row.get("graph_ms") or rows.get(f"{way}-graph", {}).get("ms")
            cells = [f"{row['ms']:.1f}", f"{speed:.2f}", f"{graph:.1f}" if graph else ""]
            cells += [f"{row[of]:.1f}" if row.get(of) else "" for of in shown.values()]
            cells += [f"{row['peak_gb']:.2f}" if "peak_gb" in row else "", f"{row['loss']:.4f}"]
            lines.append(f"| {' | '.join([way, *cells])} |")
    return lines


def launches_of(run: dict[str, Any]) -> list[str]:
    """How many kernels a step launches, and how long they compute, way by way.

    Where a file has the first kernels alone, with the number of all events, these are the least.
    """
    lines = []
    for row in run["rows"]:
        if not (found := row.get("kernels")):
            continue
        (_, ms, events), *kernels = found
        named, taken = (sum(row[at] for row in kernels) for at in (2, 1))
        text = (
            f"- {row['way']}, a step of {row['ms']:.1f} ms: {named:,} kernels took {taken:.1f} ms"
        )
        more = f"; {events - named} more events, kernels or not, took {ms - taken:.1f} ms"
        lines.append(text + more * (events > named))
    return lines


def ran_on_gpu() -> dict[str, list[str]]:
    """What READMEs say of a GPU, by package; "" is that of the repository.

    This is the one place for it: the stored runs. A test holds the READMEs to it.
    """
    timed, run = stored("h100-kernels"), stored("h100-step")
    ran = f"ran on one {timed['host']['device'].split()[1]}"
    plugins = sorted({row["plugin"] for row in timed["rows"]})
    found: dict[str, list[str]] = {}
    for name in plugins:
        sizes = sizes_in(row for row in timed["rows"] if row["plugin"] == name)
        shapes = "{odd} odd shapes and dtypes and {real} real shapes".format(**sizes)
        found[f"opfuse-plugin-{name}"] = [f"{ran}, at {shapes}"]
    rows = {row["way"]: row for row in run["rows"]}
    speeds = {
        way: f"{row.get('eager_ms', rows['eager']['ms']) / row['ms']:.2f} times"
        for way, row in rows.items()
    }
    step = f"{speeds['converted']} as fast as in eager PyTorch"
    found["opfuse-plugin-transformers"] = [f"training step of a converted Llama {ran}", step]
    graph = rows["eager"]["graph_ms"] / rows["fp8"]["graph_ms"]
    others = f"with Liger-Kernel {speeds['liger']}, and with `torch.compile` {speeds['compile']}"
    in_fp8 = f"In FP8 it was {speeds['fp8']} as fast, and {graph:.2f} times in a CUDA graph"
    found[""] = [f"{ran}. There a training step of a converted Llama was {step}, {others}", in_fp8]
    return found


def first(rows: list[Row], name: str, of: str, den: str) -> Row | None:
    """The first row of an id whose case contains a text, and which is measured against ``den``."""
    found = (r for r in rows if (r["id"], r["den"]) == (name, den) and of in r["case"])
    return next((row for row in found if row["value"] is not None), None)


def swarms(rows: list[Row]) -> Iterator[tuple[int, str]]:
    """How many cases of a goal are missed, and a sentence about all of them."""
    for name in SWARMS:
        of = [row for row in rows if row["id"] == name and row["value"] is not None]
        clear = [row for row in of if not too_noisy(row)]
        if not clear:
            continue
        values, missed = [row["value"] for row in clear], sum(not row["pass"] for row in clear)
        worst = max(values) if of[0]["cost"] else min(values)
        noisy = f", {n} of them too noisy to say" if (n := len(of) - len(clear)) else ""
        line = f"{name}, {TITLES[name]}: {len(of)} cases{noisy}; median "
        line += f"{statistics.median(values):.3g}, worst {worst:.3g}, goal {of[0]['goal']:.3g}"
        yield missed, f"{line}, missed by {missed}." if missed else f"{line}, missed by none."


def unknown(runs: list[Run], rows: list[Row]) -> list[str]:
    """What was not measured on a GPU, and what no plugin here does."""

    def listed(ids: set[str]) -> list[str]:
        return [f"- {name}: {TITLES[name]}" for name in in_order(ids)]

    measured = {row["id"] for row in rows if row["value"] is not None}
    of_gpu = [row for run in runs if run["gpu"] for row in run["ratios"]]
    seen = {row["id"] for row in of_gpu if row["value"] is not None}
    on_gpu = {name for case in CASES if "gpu-full" in case.suites for name in case.ids} - seen
    reasons = {row["id"]: row["reason"] for row in rows if row["value"] is None}
    absent = {name for name, reason in reasons.items() if reason.startswith("not built")}
    absent -= measured
    lines = []
    if on_gpu := on_gpu - absent:
        lines += ["Not measured on a GPU yet:", "", *listed(on_gpu)]
    if absent:
        lines += ["", "Not measured, because no plugin here does it:", "", *listed(absent)]
    return lines or ["Every goal has been measured."]


def alone(rows: list[Row]) -> list[str]:
    """A table of single ops: over eager / over a function by hand; a column for each size."""
    of_op: dict[str, dict[str, str]] = {}
    usual = statistics.mode(row["goal"] for row in rows)
    for row in sorted(rows, key=lambda row: row["case"]):
        passes, op, size = row["case"].split(", ")
        beside = row.get("beside") or {}
        over = [beside.get(f"opfuse-off / {name}") for name in ("eager", "hand")]
        cell = "/".join(f"{value:.2f}" if value else "" for value in over)
        if row["reason"] or too_noisy(row):
            cell = f"({cell})"
        elif not row["pass"]:
            cell = f"**{cell}**"
        cell += f" ≥{row['goal']:.3g}" * (row["goal"] != usual)
        name, _, width = op.partition(":")
        size = size if not width or "x" in size else f"{size}x{width}"
        of_op.setdefault(name, {})[f"{passes}, {size}"] = cell
    sizes = sorted({size for cells in of_op.values() for size in cells})
    lines = [f"| op | {' | '.join(sizes)} |", f"|{'---|' * (len(sizes) + 1)}"]
    for name, cells in of_op.items():
        lines.append(f"| {name} | {' | '.join(cells.get(size, '') for size in sizes)} |")
    return lines


def unfused(run: Run) -> list[tuple[str, float]]:
    """How many times faster than eager a chain is with all plugins off."""
    timed = [
        row for row in run["cases"] if row.get("median_us") and row["id"] not in ("L1", "L3", "O1")
    ]
    times = {(row["case"], row["provider"]): row["median_us"] for row in timed}
    found = [
        (case, times.get((case, "eager")), mine)
        for (case, name), mine in times.items()
        if name == "opfuse-off"
    ]
    return [(case, plain / mine) for case, plain, mine in found if plain]


def pictured(runs: list[Run]) -> list[Row]:
    """The rows in the page's picture."""
    rows = [
        row
        for run in runs
        for row in run["ratios"]
        if row["id"] not in ("L1", "L3") and row["value"] is not None and not too_noisy(row)
    ]
    return sorted(rows, key=lambda row: row["id"])


def page() -> int:
    """Write ``docs/performance.md`` and its picture from the committed runs."""
    runs = committed()
    (ROOT / "docs" / "performance.md").write_text(written(runs)[0], encoding="utf-8", newline="\n")
    picture = plot(pictured(runs), "")
    (ROOT / "docs" / "performance.svg").write_text(picture, encoding="utf-8", newline="\n")
    return 0
