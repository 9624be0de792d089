"""The report as text of 100 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator
from typing import Any

from ..tables import settings_as_text

_ROW = "  {:36} {:>9} {:>7} {:>6} {:>6} {:>6} {:>8} {:>8} {:>4}"
HEAD = _ROW.format("", "us", "T/s", "share", "model", "best", "separate", "compiled", "peer")
LEGEND = """\
us: microseconds of a call, with the default configuration. T/s: terabytes per second, or teraflops
of a case with matrix products. share: of what a copy reaches here, or a product. model: the time
by the data sheet over the time measured. best: the time of the default over that of the fastest
configuration. separate, compiled, peer: the time of the separate operations, of torch.compile and
of the fastest other package, over that of the kernel: above 1, the kernel is faster."""


def lines(report: dict[str, Any]) -> Iterator[str]:
    """The lines of the table, and below it everything that is wrong or was left out."""
    host = report["host"]
    yield f"{host['device']}, torch {host['torch']}, Triton {host['triton']}"
    copied, product = report.get("limits") or (0.0, 0.0)
    if copied:
        speeds = f"{copied / 1e12:.2f} TB/s, a bf16 product {product / 1e12:.0f} TFLOP/s"
        yield f"a copy reaches {speeds}"
    yield from ("", HEAD)
    heading, rows = "", _with_compiled(report["rows"])
    for row in rows:
        if isinstance(row.get("seconds"), float):
            case, _, shape = row["part"].rpartition(": ")
            if heading != (heading := f"{row['plugin']}: {case}"):
                yield heading
            yield _line(row, shape, copied, product)
    yield from ("", *LEGEND.splitlines(), "")
    for text in _remarks(report | {"rows": rows}):
        yield from textwrap.wrap(text, 98, subsequent_indent="  ", break_on_hyphens=False)
    yield f"{report['seconds']:.0f} of {report['budget']:.0f} s"


def _with_compiled(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of cases, each with the time of torch.compile, which has rows of its own."""
    compiled = {row["part"]: row["compiled"] for row in rows if "compiled" in row}
    found = [row for row in rows if "compiled" not in row]
    for row in found:
        if (taken := compiled.get(f"{row['part']}, torch.compile")) is not None and "others" in row:
            row["others"]["compiled"] = taken
    return found


def _line(row: dict[str, Any], shape: str, copied: float, product: float) -> str:
    seconds = row["seconds"]
    rate = (row["flops"] or row["floor"]) / seconds
    reached = product if row["flops"] else copied
    fastest = min([seconds, *[best["seconds"] for best in row["best"].values()]])
    taken = {name: found for name, found in row["others"].items() if isinstance(found, float)}
    peers = [found for name, found in taken.items() if name not in ("separate", "compiled")]
    others = taken.get("separate"), taken.get("compiled"), min(peers, default=None)
    shown = ["-" if other is None else f"{other / seconds:.2f}" for other in others]
    return _ROW.format(
        shape[:36], f"{seconds * 1e6:.1f}", f"{rate / 1e12:.2f}",
        f"{rate / reached:.0%}" if reached else "-", f"{row['modelled'] / seconds:.2f}",
        f"{seconds / fastest:.2f}", *shown,
    )  # fmt: skip


def _remarks(report: dict[str, Any]) -> Iterator[str]:
    """What is faster, wrong, refused or not timed, and what there was no time for."""
    rows = report["rows"]
    for row in rows:
        for kernel, best in row.get("best", {}).items():
            if (gain := row["seconds"] / best["seconds"]) > 1:
                how = settings_as_text(best["config"])
                yield f"faster, {gain:.2f}x: {row['part']}: {kernel} with {how}"
    judged = [row for row in rows if "judged" in row]
    wrong = [f"WRONG {row['part']}: {text}" for row in rows for text in row["wrong"]]
    right = "nothing is wrong" if rows and not wrong else ""
    shapes = f"{sum(row['judged'] for row in judged)} odd shapes and dtypes"
    timed = f"{len(rows) - len(judged)} real shapes"
    yield ": ".join(filter(None, [f"compared with their twins at {shapes} and {timed}", right]))
    yield from wrong
    for row in rows:
        yield from (f"refused {row['part']}: {text}" for text in row.get("refused", ()))
    yield from _not_timed(rows)
    for ended in report["ended"]:
        said = "; ".join(ended["said"])
        yield f"ENDED its process: {ended['part'] or 'the start'}: {ended['how']}: {said}"
    if left := sum(row["left"] for row in judged):
        yield f"no time for {left} odd shapes"
    for plugin, parts in report["left"].items():
        if parts:
            first = f"{parts[0]}{f' and {len(parts) - 1} more' * (len(parts) > 1)}"
            yield f"not measured, {plugin}: {first}; --budget gives more time"


def _not_timed(rows: Iterable[dict[str, Any]]) -> Iterator[str]:
    """Who was not timed: one line for each reason, which names the first part."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        times = {"the case": row.get("seconds"), **row.get("others", {})}
        for name, why in times.items():
            if isinstance(why, str):
                reasons.setdefault((name, why), []).append(row["part"])
    for (name, why), parts in reasons.items():
        more = f" and {len(parts) - 1} more" * (len(parts) > 1)
        yield f"not timed, {name}, {parts[0]}{more}: {why}"
