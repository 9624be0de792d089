"""What the check and the ledger say, as text of 100 columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from .cases import KernelCase
from .checking import CheckedLaunch
from .ledger import Moved, TargetEntry
from .recorded import describe

_CHECK = "      {:7} {:>9} {:>10} {:>9} {:>9}  {:13} {:>3}  {}"
_TARGET = "    {:7} {:23} {:>9} {:>7} {:>7} {:>8} {:>8} {:>9} {:>9}"


def check_table(rows: Sequence[CheckedLaunch]) -> Iterator[str]:
    """The lines of a table of launches, by case and kernel. Shapes with equal lines share them."""
    for (plugin, case), of_case in groupby(_by_case(rows), lambda row: (row.plugin, row.case)):
        yield f"{plugin}: {case}"
        by_shape: dict[str, list[str]] = {}
        for row in of_case:
            by_shape.setdefault(row.shape, []).extend(_check_lines(row))
        shapes: dict[tuple[str, ...], list[str]] = {}
        for shape, lines in by_shape.items():
            shapes.setdefault(tuple(_without_repeats(lines)), []).append(shape)
        for lines_, names in shapes.items():
            yield from (f"  {name}" for name in names)
            yield _CHECK.format(
                "", "registers", "spilled, B", "shared, B", "occupancy", "matrix", "TMA",
                "narrowest access, B",
            )  # fmt: skip
            yield from lines_
        yield ""


def _by_case(rows: Sequence[CheckedLaunch]) -> list[CheckedLaunch]:
    """The rows in their order, those of one case, shape and compiled kernel side by side."""
    places: dict[Any, int] = {}

    def keys(row: CheckedLaunch) -> list[Any]:
        return [(row.plugin, row.case), row.shape, row.kernel, _heading(row)]

    for row in rows:
        for key in keys(row):
            places.setdefault(key, len(places))
    return sorted(rows, key=lambda row: [places[key] for key in keys(row)])


def _heading(row: CheckedLaunch) -> str:
    """A kernel, and what it is compiled with."""
    constants = {**row.constants, **row.config["constants"], **row.config["options"]}
    stages = row.config["num_stages"]
    settings = [" ".join(f"{name}={value}" for name, value in constants.items())]
    settings += [f"{row.config['num_warps']} warps"] + [f"{stages} stages"] * bool(stages)
    return f"    {row.kernel}: {', '.join(filter(None, settings))}"


def _check_lines(row: CheckedLaunch) -> Iterator[str]:
    yield _heading(row)
    if (found := row.resources) is None:
        yield f"      {row.target:7} does not compile"
        return
    widths = " ".join(f"{name.removesuffix('_ptr')}:{n}" for name, n in row.widths.items())
    yield _CHECK.format(
        row.target, found.registers, found.spilled or "-", found.shared or "-",
        f"{row.occupancy:.0%}",
        " ".join(f"{count} {name}" for name, count in found.matrix.items()) or "-",
        found.tma or "-", widths or "-",
    )  # fmt: skip


def _without_repeats(lines: Sequence[str]) -> Iterator[str]:
    """The lines, each kernel and what it is compiled with once above its own."""
    heading = None
    for line in lines:
        is_heading = not line.startswith("      ")
        if not (is_heading and line == heading):
            yield line
        heading = line if is_heading else heading


def small_table(
    shape: Mapping[str, int], floor: int, rows: Mapping[str, Moved | int | str]
) -> Iterator[str]:
    """The lines of a table of who moves how much at a small shape, all programs counted.

    Args:
        shape: The shape.
        floor: The bytes that the fusion has to move.
        rows: By who moves: the bytes by role, all bytes, or why there are none.
    """
    yield f"  {describe(shape)}: every program counted, over the floor of {floor:,} bytes"
    yield f"    {'':14} {'full':>7} {'vectors':>8} {'partial':>8}"
    for name, moved in rows.items():
        if isinstance(moved, Moved):
            yield f"    {name:14} {_ratios(moved, floor)}"
        elif isinstance(moved, int):
            yield f"    {name:14} {moved / floor:7.3f}  in all"
        else:
            yield f"    {name:15} {moved}"


def target_table(
    case: KernelCase, shape: Mapping[str, int], entries: Sequence[TargetEntry], sample: int
) -> Iterator[str]:
    """The lines of a table of what a case does at a real shape on each target."""
    floor = case.floor_bytes(shape)
    yield (
        f"  {describe(shape)}: floor {floor / 1e6:,.1f} MB; up to {sample} programs of each launch "
        "counted"
    )
    yield _TARGET.format(
        "", "", "programs", "longest", "full", "vectors", "partial", "time*, us", "of floor*"
    )
    for entry in entries:
        name = str(entry.target)
        for one in entry.launches:
            numbers = (
                f"{one.programs:,}",
                f"{one.longest:.2f}",
                *_ratios(one.moved, floor).split(),
            )
            last = len(entry.launches) == 1 and not any(vars(entry.host).values())
            share = f"{entry.floor_seconds / entry.seconds:.0%}" if last else ""
            yield _TARGET.format(
                name, one.kernel, *numbers, f"{one.seconds * 1e6:.1f}", share
            ).rstrip()
            name = ""
        if not last:
            yield _whole("", "all, with PyTorch's ops", entry, floor)


def peer_lines(
    case: KernelCase, shape: Mapping[str, int], name: str, entries: Sequence[TargetEntry]
) -> Iterator[str]:
    """The lines of another package's kernels below :func:`target_table`, one per target."""
    for entry in entries:
        yield _whole(str(entry.target), name, entry, case.floor_bytes(shape))


def _whole(target: str, name: str, entry: TargetEntry, floor: int) -> str:
    """A line of all launches of a case on a target, with PyTorch's operations around them."""
    return _TARGET.format(
        target, name, "", "", *_ratios(entry.moved, floor).split(),
        f"{entry.seconds * 1e6:.1f}", f"{entry.floor_seconds / entry.seconds:.0%}",
    )  # fmt: skip


def _ratios(moved: Moved, floor: int) -> str:
    return f"{moved.full / floor:7.3f} {moved.vector / floor:8.3f} {moved.partial / floor:8.3f}"
