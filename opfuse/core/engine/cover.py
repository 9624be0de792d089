"""Chooses among candidates that overlap, by the benefit they declare or by what was measured."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from ..fusion import PASSES
from ..tuning_table import Measurement
from .step import Step


def best_cover(candidates: Sequence[Step], length: int, prefer: str = "speed") -> list[Step]:
    """Return the non-overlapping candidates of one pass with the largest gain.

    Among candidates that overlap, directly or through others, that is the declared benefit. If all
    of them were measured here, others are taken in place of those where they gain more.
    """
    chosen: list[Step] = []
    for group in grouped(candidates):
        cover = _best_of(group, [(0, step.benefit) for step in group], length)
        if all(step.measured is not None for step in group):
            found: list[Measurement] = [step.measured for step in group]
            bytes_first = [(float(each.saved_bytes), each.seconds) for each in found]
            for values in (bytes_first, [(0.0, max(each.seconds, 0.0)) for each in found]):
                other = _best_of(group, values, length)
                cover = other if other and ahead(other, cover, prefer) else cover
        chosen += cover
    return chosen


def ahead(steps: Sequence[Step], others: Sequence[Step], prefer: str) -> str:
    """Return in what measured candidates are preferred to others, or ``""``.

    A tie in time, which is a difference within the errors, goes to fewer bytes.
    """
    sides = steps, others
    saved, less = (sum(step.measured.saved_bytes for step in side) for side in sides)
    mine, theirs = (sum(step.measured.seconds for step in side) for side in sides)
    both = {id(step) for step in steps} & {id(step) for step in others}
    errors = [step.measured.error for step in (*steps, *others) if id(step) not in both]
    if abs(mine - theirs) > math.hypot(*errors) and (prefer != "memory" or saved == less):
        return "are faster together" if mine > theirs else ""
    return "save more memory" if saved > less else ""


def grouped(candidates: Sequence[Step]) -> Iterator[list[Step]]:
    """The candidates in groups, none of which overlaps another."""
    group: list[Step] = []
    end = 0
    for step in sorted(candidates, key=lambda step: step.begin):
        if group and step.begin >= end:
            yield group
            group = []
        group.append(step)
        end = max(end, step.end)
    if group:
        yield group


def _best_of(
    candidates: Sequence[Step], values: Sequence[tuple[float, float]], length: int
) -> list[Step]:
    """Dynamic programming over half steps.

    The best cover from ``i`` on either skips ``i`` or takes a candidate that begins there. Ties:
    more ops covered by fewer fusions, then names.
    """
    best: list[tuple[float, float, int, int, tuple[tuple[str, str], ...], tuple[Step, ...]]]
    best = [(0.0, 0.0, 0, 0, (), ())] * (length + 1)
    starting: dict[int, list[tuple[Step, tuple[float, float]]]] = {}
    for candidate, value in zip(candidates, values, strict=True):
        starting.setdefault(candidate.begin, []).append((candidate, value))
    for i in reversed(range(length)):
        best[i] = best[i + 1]
        for c, (first, second) in starting.get(i, ()):
            cost, more, left, count, names, rest = best[c.end]  # smaller is better
            name = c.source.distribution or "", c.source.name
            cost, more, left = cost - first, more - second, left - len(c.matched)
            option = cost, more, left, count + 1, (name, *names), (c, *rest)
            best[i] = min(best[i], option, key=lambda cover: cover[:5])
    return list(best[0][5])


def beaten(joint: Step, others: Sequence[Step], length: int, prefer: str) -> str:
    """Return why others are preferred to a joint fusion over the same ops, or ``""``.

    They are preferred if all that overlap, directly or through others, are measured, and gain more
    without it than with it.

    Args:
        joint: The joint fusion.
        others: Fusions of one pass, or joint ones.
        length: The number of half steps.
        prefer: The option ``prefer``.
    """
    others = [step for step in others if step is not joint and not _preceded(step, others)]
    (near,) = [group for group in grouped([joint, *others]) if joint in group]
    near.remove(joint)
    if not near or any(step.measured is None for step in (joint, *near)):
        return ""
    without = _brought(near, length, prefer)
    beside = _brought([step for step in near if not overlapping(joint, [step])], length, prefer)
    if not (what := ahead(without, [*beside, joint], prefer)):
        return ""
    one_pass = all(step.passes != "joint" for step in near)
    who = "the forward and backward fusions" if one_pass else "other fusions"
    return f"{who} of these ops {what}, measured here"


def _preceded(step: Step, others: Sequence[Step]) -> bool:
    """Return whether a candidate of higher precedence may take one of its ops."""
    rivals = [o for o in others if o.passes != "joint" and o.source.rank < step.source.rank]
    return step.passes == "joint" and bool(overlapping(step, rivals))


def overlapping(step: Step, others: Sequence[Step]) -> list[Step]:
    """The candidates among others that cover the same op or edge in the same pass."""
    found = [o for o in others if o.begin < step.end and step.begin < o.end]
    return [o for o in found if "joint" in (step.passes, o.passes) or step.passes == o.passes]


def _brought(candidates: Sequence[Step], length: int, prefer: str) -> list[Step]:
    """The best covers of measured candidates, joint ones first."""
    chosen: list[Step] = []
    for name in PASSES:
        free = [step for step in candidates if step.passes == name]
        joint = [step for step in chosen if step.passes == "joint"]
        free = [step for step in free if not overlapping(step, joint)]
        chosen += best_cover(free, length, prefer)
    return chosen


def _gains(loser: Step, winners: Sequence[Step], prefer: str) -> tuple[str, str] | None:
    """Describe the measured gains of winners and loser; None: a tie, or not all are measured."""
    both = winners, [loser]
    if any(step.measured is None for side in both for step in side):
        return None
    if not (what := ahead(winners, [loser], prefer)):
        return None
    won, lost = [sum(step.measured.saved_bytes for step in steps) for steps in both]
    if what == "save more memory":
        return f"{won:.0f} bytes", f"{lost:.0f} bytes"
    won, lost = [sum(step.measured.seconds for step in steps) * 1e6 for steps in both]
    return f"{won:.0f} us", f"{lost:.0f} us"


def conflict(loser: Step, winners: Sequence[Step], prefer: str) -> tuple[str, str]:
    """Return why a candidate lost to those that overlap it, and the plugin of the first of them."""
    if not winners:
        return "another set of fusions has the larger total benefit", ""
    first = min(
        winners, key=lambda winner: (winner.source.rank, PASSES.index(winner.passes), winner.begin)
    )
    plugin = first.source.distribution
    who = f"overlaps {first.source.name}{f' of {plugin}' if plugin else ''}"
    return f"{who}, {_why_first(first, loser, winners, prefer)}", plugin or ""


def _why_first(first: Step, loser: Step, winners: Sequence[Step], prefer: str) -> str:
    """Return why the first winner was taken and not the loser."""
    own, other = first.source.rank, loser.source.rank
    if own[:2] == other[:2] and own != other:
        return f"whose priority is {-own[2]} against {-other[2]}"
    if own != other:
        if not own[0]:
            return "which is the first of these in the selection of plugins"
        return f"which is registered {'later ' * (other[0] == 1)}with prepend=True"
    if PASSES.index(first.passes) < PASSES.index(loser.passes):
        return "and joint fusions choose first"
    if (measured := _gains(loser, winners, prefer)) is not None:
        return f"which saves {measured[0]} a call against {measured[1]}, measured here"
    gain = sum(winner.benefit for winner in winners)
    if gain < loser.benefit:
        return "which is in a set of fusions that is better, measured here"
    if gain != loser.benefit:
        return f"which saves {gain:g} tensor reads and writes against {loser.benefit:g}"
    covers_more = sum(len(winner.matched) for winner in winners) > len(loser.matched)
    why = "covers more ops" if covers_more else "comes first by name"
    return f"which saves as much and {why}"
