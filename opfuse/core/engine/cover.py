"""Chooses among candidates that overlap, by the benefit they declare."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from ..fusion import PASSES
from .facts import Candidate

Explain = Callable[[Candidate, Sequence[Candidate]], str]


def best_cover(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The non-overlapping candidates of one pass with the largest total benefit."""
    groups = overlap_groups(candidates)
    return [c for group in groups for c in best_of(group, [(0, c.benefit) for c in group])]


def overlap_groups(candidates: Sequence[Candidate]) -> Iterator[list[Candidate]]:
    """The candidates in groups, none of which overlaps another."""
    group: list[Candidate] = []
    end = 0
    for candidate in sorted(candidates, key=lambda candidate: candidate.begin):
        if group and candidate.begin >= end:
            yield group
            group = []
        group.append(candidate)
        end = max(end, candidate.end)
    if group:
        yield group


def best_of(
    candidates: Sequence[Candidate], values: Sequence[tuple[float, float]]
) -> list[Candidate]:
    """The non-overlapping candidates with the largest sums, first values first.

    Dynamic programming over half steps: the best cover from ``i`` on either skips ``i`` or takes a
    candidate that begins there. Ties: more ops covered by fewer fusions, then names.
    """
    length = max((c.end for c in candidates), default=0)
    best: list[tuple[float, float, int, int, tuple[tuple[str, str], ...], tuple[Candidate, ...]]]
    best = [(0.0, 0.0, 0, 0, (), ())] * (length + 1)
    starting: dict[int, list[tuple[Candidate, tuple[float, float]]]] = {}
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


def overlaps(candidate: Candidate, others: Sequence[Candidate]) -> list[Candidate]:
    """The candidates among others that cover the same op or edge in the same pass."""
    found = [o for o in others if o.begin < candidate.end and candidate.begin < o.end]
    return [
        o for o in found if "joint" in (candidate.passes, o.passes) or candidate.passes == o.passes
    ]


def conflict(loser: Candidate, winners: Sequence[Candidate], explain: Explain) -> tuple[str, str]:
    """Return why a candidate lost to those that overlap it, and the plugin of the first of them.

    Args:
        loser: The candidate.
        winners: Those that overlap it, and are used.
        explain: Says what they have that is not a benefit, or ``""``.
    """
    if not winners:
        return "another set of fusions has the larger total benefit", ""
    first = min(winners, key=lambda c: (*c.source.order, c.begin))
    plugin = first.source.distribution
    who = f"overlaps {first.source.name}{f' of {plugin}' if plugin else ''}"
    return f"{who}, {_why_first(first, loser, winners, explain)}", plugin or ""


def _why_first(
    first: Candidate, loser: Candidate, winners: Sequence[Candidate], explain: Explain
) -> str:
    """Return why the first winner was taken and not the loser."""
    own, other = first.source.precedence, loser.source.precedence
    if own.kind < other.kind or own.order != other.order:
        if own.kind == 0:
            return "which is the first of these in the selection of plugins"
        return f"which is registered {'later ' * (other.kind == 1)}with prepend=True"
    if own != other:
        return f"whose priority is {-own.priority} against {-other.priority}"
    if PASSES.index(first.passes) < PASSES.index(loser.passes):
        return "and joint fusions choose first"
    if reason := explain(loser, winners):
        return reason
    gain = sum(winner.benefit for winner in winners)
    if gain != loser.benefit:
        return f"which saves {gain:g} tensor reads and writes against {loser.benefit:g}"
    covers_more = sum(len(winner.matched) for winner in winners) > len(loser.matched)
    why = "covers more ops" if covers_more else "comes first by name"
    return f"which saves as much and {why}"
