"""What the ledger says, as text of 100 columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from opfuse_triton import KernelCase
from opfuse_triton.recorded import describe

from .entries import Moved, TargetEntry

_TARGET = "    {:7} {:23} {:>9} {:>7} {:>7} {:>8} {:>8} {:>9} {:>9}"


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
