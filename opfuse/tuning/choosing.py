"""Chooses among the candidates of a plan by what was measured here, where all were."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..core.engine.cover import best_cover, best_of, overlap_groups, overlaps
from ..core.engine.facts import Candidate, Facts, ToolFacts
from ..core.engine.selection import Choice
from ..core.fusion import PASSES
from .lookup import applicable_entry, subject_of, trades_time
from .table import Measurement, Table, subject_key


class Measurements(ToolFacts):
    """What was measured of the candidates of one plan.

    Attributes:
        facts: What the plan is made from.
        found: The measurements of those that were looked up.

    Args:
        facts: As above.
        table: The table of its device.
    """

    def __init__(self, facts: Facts, table: Table) -> None:
        self.digest = table.digest
        self.facts, self._table = facts, table
        self._prefer: str = facts.env.options.get("prefer", "speed")
        self.found: dict[Candidate, Measurement] = {}

    def fields(self, candidate: Candidate, read: Callable[[str], Any]) -> Mapping[str, Any] | None:
        """Look a candidate up."""
        found = self.look_up(candidate, read)
        if found is None:
            return None
        self.found[candidate] = found
        candidate.remark(str(found))
        return {"measured": found.speed, "configuration": found.configuration}

    def look_up(self, candidate: Candidate, read: Callable[[str], Any]) -> Measurement | None:
        """The measurement of a candidate, for the input of this plan."""
        entries = self._table.entries.get(subject_key(subject_of(self.facts, candidate)), {})
        if not entries:
            return None
        read_facts = {name: read(name) for name in ("rows", "features", "contiguous")}
        known = {name: value for name, value in read_facts.items() if value is not None}
        time = trades_time(candidate.source)
        return applicable_entry(entries, known, trades_time=time, prefer=self._prefer)

    def wrapped(self, run: Callable[[Choice], Any]) -> Callable[[Choice], Any]:
        """The choice with these measurements."""

        def choose(choice: Choice) -> Any:
            for candidate in choice.candidates:
                if why := self._refusal(candidate):
                    choice.refused[candidate] = why
            choice.cover = lambda free: self._cover(self._without_rejected(choice, free))
            choice.explain = self.explain
            return run(choice)

        return choose

    def _refusal(self, candidate: Candidate) -> str:
        """Return why a candidate is refused by its own measurement, or ``""``."""
        found, time = self.found.get(candidate), trades_time(candidate.source)
        return found.refusal(trades_time=time, prefer=self._prefer) if found else ""

    def _without_rejected(self, choice: Choice, free: Sequence[Candidate]) -> list[Candidate]:
        """Refuse candidates to which others are preferred.

        Those are joint. To each, fusions of one pass and the same precedence may be preferred, and
        to one that trades time for memory also any that choose later.
        """
        joint = [c for c in free if c.passes == "joint" and c in self.found]
        slow = [c for c in joint if trades_time(c.source)]
        for candidates, alike in ((slow, False), (joint, True)):
            others = choice.rivals(alike=alike) if candidates else []
            others = [c for c in others if not self._refusal(c)]
            others += [] if alike else joint
            for candidate in candidates:
                if candidate not in choice.refused and (why := self._rejection(candidate, others)):
                    choice.refused[candidate] = why
        return [c for c in free if c not in choice.refused]

    def _rejection(self, joint: Candidate, others: Sequence[Candidate]) -> str:
        """Return why others are preferred to a joint fusion over the same ops, or ``""``.

        They are preferred if all that overlap, directly or through others, are measured, and gain
        more without it than with it.

        Args:
            joint: The joint fusion.
            others: Fusions of one pass, or joint ones.
        """
        others = [c for c in others if c is not joint and not _is_preceded(c, others)]
        (near,) = [group for group in overlap_groups([joint, *others]) if joint in group]
        near.remove(joint)
        if not near or not self._measured(joint, *near):
            return ""
        without = self._best_covers(near)
        beside = self._best_covers([c for c in near if not overlaps(joint, [c])])
        if not (what := self._advantage(without, [*beside, joint])):
            return ""
        one_pass = all(c.passes != "joint" for c in near)
        who = "the forward and backward fusions" if one_pass else "other fusions"
        return f"{who} of these ops {what}, measured here"

    def _best_covers(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """The best covers of measured candidates, joint ones first."""
        chosen: list[Candidate] = []
        for name in PASSES:
            free = [c for c in candidates if c.passes == name]
            joint = [c for c in chosen if c.passes == "joint"]
            chosen += self._cover([c for c in free if not overlaps(c, joint)])
        return chosen

    def _cover(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """The non-overlapping candidates of one pass that gain most.

        Among candidates that overlap, directly or through others, that is the declared benefit. If
        all of them were measured, others are taken in place of those where they gain more.
        """
        chosen: list[Candidate] = []
        for group in overlap_groups(candidates):
            cover = best_cover(group)
            if self._measured(*group):
                found = [self.found[c] for c in group]
                bytes_first = [(float(each.saved_bytes), each.seconds) for each in found]
                for values in (bytes_first, [(0.0, max(each.seconds, 0.0)) for each in found]):
                    other = best_of(group, values)
                    cover = other if other and self._advantage(other, cover) else cover
            chosen += cover
        return chosen

    def _advantage(self, candidates: Sequence[Candidate], others: Sequence[Candidate]) -> str:
        """Return in what measured candidates are preferred to others, or ``""``.

        A tie in time, which is a difference within the errors, goes to fewer bytes.
        """
        (saved, mine), (less, theirs) = self._sums(candidates), self._sums(others)
        both = {*candidates} & {*others}
        errors = [self.found[c].error for c in (*candidates, *others) if c not in both]
        if abs(mine - theirs) > math.hypot(*errors) and (self._prefer != "memory" or saved == less):
            return "are faster together" if mine > theirs else ""
        return "save more memory" if saved > less else ""

    def explain(self, loser: Candidate, winners: Sequence[Candidate]) -> str:
        """Return what was measured of winners and loser; ``""``: a tie, or not all were."""
        if self._measured(loser, *winners) and (what := self._advantage(winners, [loser])):
            (saved, won), (less, lost) = self._sums(winners), self._sums([loser])
            told = f"{won * 1e6:.0f} us a call against {lost * 1e6:.0f} us"
            if what == "save more memory":
                told = f"{saved:.0f} bytes a call against {less:.0f} bytes"
            return f"which saves {told}, measured here"
        if sum(winner.benefit for winner in winners) < loser.benefit:
            return "which is in a set of fusions that is better, measured here"
        return ""

    def _sums(self, candidates: Sequence[Candidate]) -> tuple[int, float]:
        """The bytes and the seconds that measured candidates save."""
        found = [self.found[c] for c in candidates]
        return sum(each.saved_bytes for each in found), sum(each.seconds for each in found)

    def _measured(self, *candidates: Candidate) -> bool:
        return self.found.keys() >= {*candidates}


def _is_preceded(candidate: Candidate, others: Sequence[Candidate]) -> bool:
    """Return whether a candidate of higher precedence may take one of its ops."""
    own = candidate.source.precedence
    rivals = [o for o in others if o.passes != "joint" and o.source.precedence < own]
    return candidate.passes == "joint" and bool(overlaps(candidate, rivals))
