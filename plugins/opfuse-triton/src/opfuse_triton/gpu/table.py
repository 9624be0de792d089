"""The report as text of 100 columns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_ROW = "{:38} {:>9} {:>7} {:>6} {:>6} {:>6} {:>8} {:>8} {:>4}"
HEAD = _ROW.format("case", "us", "T/s", "share", "model", "best", "separate", "compiled", "peer")


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
        if isinstance(row.get("seconds"), float):
            yield _line(row, copied, product)
    judged = [row for row in report["rows"] if "judged" in row]
    yield from ("", f"{sum(row['judged'] for row in judged)} odd shapes judged")
    for row in report["rows"]:
        yield from _faults(row)
    for ended in report["ended"]:
        yield f"ENDED its process: {ended['part'] or 'the start'}: {ended['how']}"
        yield from (f"  {text}" for text in ended["said"])
    if shapes := sum(row["left"] for row in judged):
        yield f"no time for {shapes} odd shapes"
    for plugin, parts in report["left"].items():
        if parts:
            first = f"{parts[0]}{f' and {len(parts) - 1} more' * (len(parts) > 1)}"
            yield f"not measured, {plugin}: {first}; --budget gives more time"
    yield f"{report['seconds']:.0f} of {report['budget']:.0f} s"


def _faults(row: dict[str, Any]) -> Iterator[str]:
    """What is wrong with a row, and what could not be timed."""
    wrong = row["wrong"] if isinstance(row["wrong"], list) else [row["wrong"]]
    for text in filter(None, wrong):
        yield f"WRONG {row['part']}: {text}"
    for text in row.get("refused", ()):
        yield f"refused {row['part']}: {text}"
    times = {"the case": row.get("seconds"), **row.get("others", {})}
    for name, why in times.items():
        if isinstance(why, str):
            yield f"not timed, {row['part']}, {name}: {why}"


def _line(row: dict[str, Any], copied: float, product: float) -> str:
    seconds = row["seconds"]
    rate = (row["flops"] or row["floor"]) / seconds
    reached = product if row["flops"] else copied
    fastest = min([seconds, *[best["seconds"] for best in row["best"].values()]])
    taken = {name: found for name, found in row["others"].items() if isinstance(found, float)}
    peers = [found for name, found in taken.items() if name not in ("separate", "compiled")]
    others = taken.get("separate"), taken.get("compiled"), min(peers, default=None)
    shown = ["-" if other is None else f"{other / seconds:.2f}" for other in others]
    return _ROW.format(
        row["part"][:38], f"{seconds * 1e6:.1f}", f"{rate / 1e12:.2f}",
        f"{rate / reached:.0%}" if reached else "-", f"{row['modelled'] / seconds:.2f}",
        f"{seconds / fastest:.2f}", *shown,
    )  # fmt: skip
