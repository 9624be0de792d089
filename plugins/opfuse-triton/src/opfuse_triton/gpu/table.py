"""The report as text of 100 columns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_ROW = "{:48} {:>9} {:>8} {:>6} {:>6} {:>8} {:>8}"
HEAD = _ROW.format("case", "us", "T/s", "share", "best", "separate", "compiled")


def lines(report: dict[str, Any]) -> Iterator[str]:
    """The lines of the table, and below it everything that is wrong or was left out."""
    host = report["host"]
    yield f"{host['device']}, torch {host['torch']}, Triton {host['triton']}"
    copied, product = report.get("limits") or (0.0, 0.0)
    if copied:
        speeds = f"{copied / 1e12:.2f} TB/s, a bf16 product {product / 1e12:.0f} TFLOP/s"
        yield f"a copy reaches {speeds}"
    yield from ("", HEAD)
    for row in report["rows"]:
        if "seconds" in row:
            yield _line(row, copied, product)
    judged = [row for row in report["rows"] if "judged" in row]
    left = sum(row["left"] for row in judged)
    yield ""
    yield f"{sum(row['judged'] for row in judged)} odd shapes judged" + (
        f", {left} left for lack of time" if left else ""
    )
    for row in report["rows"]:
        wrong = row["wrong"] if isinstance(row["wrong"], list) else [row["wrong"]]
        for text in filter(None, wrong):
            yield f"WRONG {row['part']}: {text}"
        for text in row.get("refused", ()):
            yield f"refused {row['part']}: {text}"
        for name, other in row.get("others", {}).items():
            if isinstance(other, str):
                yield f"{row['part']}, {name}: {other}"
    for ended in report["ended"]:
        yield f"ENDED its process: {ended['part'] or 'the start'}: {ended['how']}"
        yield from (f"  {text}" for text in ended["said"])
    yield f"{report['seconds']:.0f} of {report['budget']:.0f} s"


def _line(row: dict[str, Any], copied: float, product: float) -> str:
    seconds = row["seconds"]
    rate = (row["flops"] or row["floor"]) / seconds
    reached = product if row["flops"] else copied
    fastest = min([seconds, *[best["seconds"] for best in row["best"].values()]])
    others = [row["others"].get(name) for name in ("separate", "compiled")]
    shown = [f"{other / seconds:.2f}x" if isinstance(other, float) else "-" for other in others]
    return _ROW.format(
        row["part"][:48], f"{seconds * 1e6:.1f}", f"{rate / 1e12:.2f}",
        f"{rate / reached:.0%}" if reached else "-", f"{seconds / fastest:.2f}x", *shown,
    )  # fmt: skip
