"""The table and the plots of ``python -m benchmarks --suite models``, for the docs.

python benchmarks/models_page.py benchmarks/results/cpu-models.json
python benchmarks/models_page.py benchmarks/results/cpu-models.json --docs docs
python benchmarks/models_page.py benchmarks/results/cpu-budgets.json --docs docs

The first prints the tables. The others write them into the pages, between their marks, and the
plots next to the pages. What has budgets is measured with ``--together``.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import re
import sys
from collections.abc import Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from benchmarks.models import LAYERS

Row = dict[str, Any]
TITLES = {
    "converted": "converted",
    "memory": 'with `prefer="memory"`',
    "compile": "`torch.compile`",
    "compile-0.8": "its budget 0.8",
    "compile-0.5": "its budget 0.5",
    "converted-compile": "converted, then compiled",
}
HEADS = "converted", '`"memory"`', "compiled", "budget 0.8", "budget 0.5", "both"
"""The same in few words, so that the table is no wider than a page."""
MARKERS = {"fp32": "o", "bf16": "s", "autocast": "^"}
COLORS = {
    "converted": "#3b6ea5",
    "memory": "#12355b",
    "compile": "#d9822b",
    "compile-0.8": "#e8a765",
    "compile-0.5": "#f3cfa8",
    "converted-compile": "#6b8e4e",
}
BUDGETS = {f"budget-{name}-compiled": f"compile-{name}" for name in ("0.8", "0.65", "0.5", "0.35")}
BUDGETS["budget-least-compiled"] = "compile-0"
"""Plans, and the budget of ``torch.compile`` that is in the same column."""
NAMES = {"llama": "Llama", "gpt2": "GPT-2", "vit": "ViT", "bert": "BERT", "mixtral": "Mixtral"}
APART = "its projections are joined under a recipe alone"
"""Why attention runs its own forward: it is none of the modules that a row counts."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Print, or write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("result", type=pathlib.Path, help="what the suite wrote")
    parser.add_argument("--docs", type=pathlib.Path, metavar="FOLDER", help="write into its pages")
    options = parser.parse_args(arguments)
    rows = json.loads(options.result.read_text(encoding="utf-8"))["rows"]
    of_budgets = any(row["way"] in BUDGETS for row in rows)
    if of_budgets:
        tables = {"budgets": budgets(rows)}
    else:
        tables = {"first": summary(rows), "speed": speeds(rows), "chains": shares(rows)}
    if options.docs is None:
        print("\n\n".join(tables.values()))
        return
    pages = {"first": "index.md", "speed": "models.md", "chains": "bring-your-model.md"}
    pages["budgets"] = "memory-budget.md"
    for name, table in tables.items():
        page = options.docs / pages[name]
        page.write_text(replaced(page.read_text(encoding="utf-8"), name, table), encoding="utf-8")
    if not of_budgets:
        plot(rows, options.docs / "models.svg")


def replaced(page: str, name: str, table: str) -> str:
    """A page with another table between its marks."""
    marks = f"<!-- models: {name} -->", f"<!-- end of {name} -->"
    pattern = re.escape(marks[0]) + ".*?" + re.escape(marks[1])
    found, count = re.subn(pattern, lambda _: f"{marks[0]}\n{table}\n{marks[1]}", page, flags=re.S)
    if count != 1:
        raise SystemExit(f"expected {marks[0]} and {marks[1]} once in the page, got {count}")
    return found


def grouped(rows: list[Row]) -> dict[tuple[str, str], dict[str, Row]]:
    """The rows of each model and dtype, by way."""
    found: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        found.setdefault((row["model"], row["dtype"]), {})[row["way"]] = row
    return found


def summary(rows: list[Row]) -> str:
    """What matters first: the converted model and the compiled one, in fp32 and bf16."""
    heads = ["model", "speed, fp32", "speed, bf16", "bytes, bf16"]
    heads += ["compiled: speed", "compiled: bytes"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    found = grouped(rows)
    for model in dict.fromkeys(model for model, _ in found):
        cells = [f"{found[model, 'fp32']['converted']['speed']:.2f}x"]
        for way in ("converted", "compile"):
            row = found[model, "bf16"][way]
            cells += [f"{row['speed']:.2f}x", f"{row['saved_mb'] / row['eager_mb']:.2f}x"]
        lines.append(f"| {NAMES[model]} | {' | '.join(cells)} |")
    return "\n".join(lines)


def speeds(rows: list[Row]) -> str:
    """Speed, and bytes kept, each as a multiple of eager's."""
    kept = {id(row): row["saved_mb"] / row["eager_mb"] for row in rows}
    speed = {id(row): row["speed"] for row in rows}
    tables = []
    for name, unit, of in (("eager_ms", "ms", speed), ("eager_mb", "MB", kept)):
        title = "speed" if of is speed else "bytes kept"
        lines = [f"| {title} | eager | {' | '.join(HEADS)} |", "|---" * (2 + len(HEADS)) + "|"]
        for (model, dtype), ways in grouped(rows).items():
            cells = [f"{of[id(ways[way])]:.2f}" if way in ways else "" for way in TITLES]
            first = f"{NAMES[model]}, {dtype}"
            size = f"{next(iter(ways.values()))[name]:.0f}\u00a0{unit}"
            lines.append(f"| {first} | {size} | {' | '.join(cells)} |")
        tables.append("\n".join(lines))
    return "\n\n".join(tables)


def shares(rows: list[Row]) -> str:
    """How many of the converted modules run as chains, and why the others do not."""
    titles = 'by default | with `prefer="memory"` | why not'
    lines = [f"| model | {titles} |", "|---" * 4 + "|"]
    for (model, dtype), ways in grouped(rows).items():
        both = [ways[way] for way in ("converted", "memory") if way in ways]
        told = [f"{of['as_chains']} of {modules(of)}" for of in both]
        whys = dict.fromkeys(
            _short(why) for of in both for why in of["own_forward"] if why != APART
        )
        lines.append(f"| {NAMES[model]}, {dtype} | {' | '.join(told)} | {'; '.join(whys)} |")
    return "\n".join(lines)


def budgets(rows: list[Row]) -> str:
    """Speed and bytes of plans and of ``torch.compile``'s budgets, of eager's."""
    heads = ["model", "", "1", "0.8", "0.65", "0.5", "0.35", "lowest"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for (model, dtype), ways in grouped(rows).items():
        plans = [f"{_cell(ways[way])}{'*' * beaten(ways, way)}" for way in BUDGETS]
        others = [_cell(ways[way]) for way in ("compile-1", *BUDGETS.values())]
        lines.append(f"| {NAMES[model]}, {dtype} | plan |  | {' | '.join(plans)} |")
        lines.append(f"| | `torch.compile` | {' | '.join(others)} |")
    return "\n".join(lines)


def _cell(row: Row) -> str:
    return f"{row['speed']:.2f}, {row['saved_mb'] / row['eager_mb']:.2f}"


def beaten(ways: dict[str, Row], plan: str) -> int:
    """Whether a budget of ``torch.compile`` is faster than a plan and keeps less.

    Returns:
        0: none is; 1: one is, by less than the noise of both; 2: one is, by more.
    """
    mine = ways[plan]
    both = [
        1 + (row["speed"] - mine["speed"] > row["noise"] + mine["noise"])
        for way, row in ways.items()
        if way.startswith("compile")
        and row["speed"] > mine["speed"]
        and row["saved_mb"] < mine["saved_mb"]
    ]
    return max(both, default=0)


def _short(why: str) -> str:
    """A reason in few words."""
    speed = re.search(r"it has ([\d.]+x) the speed", why)
    return f"measured at {speed[1]}" if speed else why


def modules(row: Row) -> int:
    """How many of the converted modules are none of attention."""
    count: int = row["modules"]
    return count - LAYERS if APART in row["own_forward"] else count


def plot(rows: list[Row], path: pathlib.Path) -> None:
    """Time of a step and bytes kept, of eager's: a plot per model."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": "opfuse", "svg.fonttype": "none", "font.size": 9}
    from matplotlib import pyplot
    from matplotlib.lines import Line2D

    names = list(dict.fromkeys(row["model"] for row in rows))
    figure, axes = pyplot.subplots(2, 3, figsize=(10, 6.4), sharex=True, sharey=True)
    places = list(axes.flat)
    for model, place in zip(names, places, strict=False):
        for row in rows:
            if row["model"] == model:
                at = row["saved_mb"] / row["eager_mb"], 1 / row["speed"]
                look = {"marker": MARKERS[row["dtype"]], "color": COLORS[row["way"]]}
                place.plot(*at, **look, linestyle="", markersize=7, alpha=0.9)
        place.axhline(1, color="0.8", zorder=0)
        place.axvline(1, color="0.8", zorder=0)
        place.set_title(NAMES[model])
        place.set_xlim(0, 1.2)
    for place in places[len(names) :]:
        place.axis("off")
    figure.supxlabel("bytes kept for the backward, of eager's")
    figure.supylabel("time of a training step, of eager's")
    ways = [
        Line2D([], [], color=color, marker="o", linestyle="", label=TITLES[way].replace("`", ""))
        for way, color in COLORS.items()
    ]
    dtypes = [
        Line2D([], [], color="0.4", marker=marker, linestyle="", label=dtype)
        for dtype, marker in MARKERS.items()
    ]
    places[-1].legend(handles=ways + dtypes, loc="center", frameon=False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
