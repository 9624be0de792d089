"""Planning: chooses the fusions for ops in an environment, with reasons. No tensor is read.

Fusions choose in precedence classes (the user's list, prepended registrations, then priority).
Inside a class, joint fusions choose first, then forward and backward fusions independently; a lower
class sees only what is left. Inside a class and pass, the set of non-overlapping candidates with
the largest total benefit wins; ties go to the longer pattern, then to the distribution's name, then
to the fusion's. Nothing depends on the order in which plugins were discovered.

What a tool knows of a candidate takes precedence over declarations: see :class:`Choice`, and
:class:`opfuse.core.engine.facts.ToolFacts`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

from ..environment import Environment
from ..fused_op import FusedOperation
from ..fusible import declared
from ..fusion import PASSES, Fusion
from ..introspection import kwarg_names, op_class
from ..op import BasicOperation
from ..records import FusionSource
from .cover import Explain, best_cover, conflict, overlaps
from .facts import Candidate, Facts
from .plan import Refusal

logger = logging.getLogger("opfuse")
_MOST = 1e6  # a larger benefit would make sums inexact


@dataclasses.dataclass(frozen=True)
class Chosen:
    """The result of choosing: the candidates taken, left to right per pass, and the refusals."""

    taken: tuple[Candidate, ...]
    refused: tuple[Refusal, ...]
    row_facts: tuple[str, ...]


class Choice:
    """One round of choosing: the fusions of one precedence and pass.

    Attributes:
        taken: The candidates taken before, of higher precedence.
        refused: Why a candidate is not taken.
        cover: Takes those that are not refused, and returns those that are used: the ones with the
            largest total benefit. A tool may put another function here.
        explain: Takes a candidate and those used that overlap it, and returns why these won, as a
            clause such as ``"which is registered on a Tuesday"``; ``""`` means the larger benefit.
            A tool may put another function here.

    Args:
        finder: Finds candidates.
        sources: The fusions.
        later: Those that choose after them.
        taken: As above.
    """

    def __init__(
        self,
        finder: _Finder,
        sources: Sequence[FusionSource],
        later: Sequence[FusionSource],
        taken: Sequence[Candidate],
    ) -> None:
        self._finder, self._sources, self._later = finder, sources, later
        self.taken, self.refused = taken, finder.lost
        self.cover: Callable[[Sequence[Candidate]], list[Candidate]] = best_cover
        self.explain: Explain = lambda loser, winners: ""
        self.found: list[Candidate] = []

    @functools.cached_property
    def candidates(self) -> list[Candidate]:
        """Those that overlap nothing taken; their conditions are asked when this is first read."""
        for source in self._sources:
            self.found += self._finder.candidates(source, self.taken)
        return [c for c in self.found if not overlaps(c, self.taken)]

    def rivals(self, *, alike: bool) -> list[Candidate]:
        """The candidates that choose later, and overlap nothing taken.

        Args:
            alike: Only those of the same precedence, in the other passes.
        """
        own = self._sources[0].precedence
        sources = [source for source in self._later if not alike or source.precedence == own]
        return self._finder.peek(sources, self.taken)

    def best(self) -> list[Candidate]:
        """The candidates that are used."""
        return self.cover([c for c in self.candidates if c not in self.refused])


def choose(
    facts: Facts, sources: Iterable[FusionSource], excluded: Collection[tuple[Any, int, int]] = ()
) -> Chosen:
    """Choose the fusions of a chain.

    Args:
        facts: The chain, and everything that the choice depends on.
        sources: Every fusion on offer.
        excluded: ``(source, begin, end)`` of candidates whose build failed.
    """
    limit = facts.env.options.get("fusion_limit")
    if isinstance(limit, str):
        raise ValueError(
            f"OPFUSE_FUSION_LIMIT must be a whole number of fusions to keep, got {limit!r}"
        )
    finder = _Finder(facts, excluded)
    best = facts.wrap("opfuse_wrap_choice", Choice.best)
    choices: list[Choice] = []
    taken: list[Candidate] = []
    ordered = sorted(sources, key=operator.attrgetter("order"))
    for _, of_class in groupby(enumerate(ordered, 1), key=lambda pair: pair[1].order):
        positions, group = zip(*of_class, strict=True)
        choices.append(Choice(finder, group, ordered[positions[-1] :], taken))
        taken = taken + _check_choice(best(choices[-1]), choices[-1])
    taken.sort(key=lambda c: (PASSES.index(c.passes), c.begin))
    kept = taken[:limit]
    won, fitting = {*kept}, {*taken}
    losers = [(c, each) for each in choices for c in each.found if c not in won]
    for loser, choice in losers:
        limited = f"beyond the limit of {limit} fusions" if loser in fitting else ""
        why = limited or finder.lost.get(loser)
        lost = (why, None) if why else conflict(loser, overlaps(loser, taken), choice.explain)
        finder.refuse(loser, *lost)
    refused = tuple(sorted(finder.refused, key=_place))
    return Chosen(tuple(kept), refused, tuple(sorted(finder.row_facts)))


def _check_choice(chosen: Any, choice: Choice) -> list[Candidate]:
    """What a choice gave; refused if a tool made it no choice among the candidates."""
    is_list = isinstance(chosen, (list, tuple))
    if not is_list or not all(any(c is each for each in choice.candidates) for c in chosen):
        got = type(chosen).__name__ if not is_list else f"{len(chosen)} candidates"
        what = "must return a list of the candidates of its Choice"
        raise TypeError(f"a tool's opfuse_wrap_choice {what}, got {got}")
    for candidate in chosen:
        if len(both := overlaps(candidate, chosen)) > 1:
            names = " and ".join(each.source.name for each in both)
            raise RuntimeError(f"a tool's opfuse_wrap_choice took {names}, which overlap")
    return [*chosen]


def find_candidates(facts: Facts, sources: Iterable[FusionSource]) -> list[Candidate]:
    """Every candidate of a chain, including overlapping ones; see :func:`choose`."""
    return _Finder(facts).peek(sources, [])


def _place(refusal: Refusal) -> tuple[Any, ...]:
    """The sort key of refusals."""
    who = refusal.distribution or "", refusal.fusion, refusal.basic_ops, refusal.reason
    return refusal.start, PASSES.index(refusal.passes), *who


@dataclasses.dataclass
class _Finder:
    """Finds the candidates of one chain and keeps the refusals."""

    facts: Facts
    excluded: Collection[tuple[Any, int, int]] = ()
    refused: list[Refusal] = dataclasses.field(default_factory=list)
    row_facts: set[str] = dataclasses.field(default_factory=set)
    lost: dict[Candidate, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self.ops, self.env, self.edges = self.facts.chain.ops, self.facts.env, self.facts.edges
        self.prefer: str = self.env.options.get("prefer", "speed")
        self.views = {name: self.edges.view(self.ops, name) for name in PASSES}
        seen = [op for view in self.views.values() for op in view.values()]
        self.classes = {cls for op in seen for cls in (type(op), op_class(op))}
        keeping = [declared(op, "keeps_rows") for op in self.ops]
        self.rows_kept = list(itertools.accumulate(keeping, operator.and_, initial=True))

    def peek(self, sources: Iterable[FusionSource], taken: Sequence[Candidate]) -> list[Candidate]:
        """The candidates of some sources, without recording refusals."""
        finder = dataclasses.replace(self, refused=[])
        return [
            candidate
            for source in sources
            for candidate in finder.candidates(source, taken)
            if not overlaps(candidate, taken)
        ]

    def refuse(self, candidate: Candidate, reason: str, lost_to: str | None = None) -> None:
        source, names = candidate.source, tuple(op_class(op).__name__ for op in candidate.matched)
        where = source.name, source.passes, names, candidate.start
        self.refused.append(Refusal(*where, reason, source.distribution, lost_to))
        logger.debug("refused %s: %s", source.name, reason)

    def candidates(self, source: FusionSource, taken: Sequence[Candidate]) -> Iterator[Candidate]:
        """The candidates of a fusion; it is asked only where none of higher precedence is."""
        if source.passes == "backward" and not self.env.requires_grad:
            return
        if self.env.recipe is None and "recipe" in getattr(source.fusion, "needs", ()):
            return
        if source.passes == "joint" and getattr(source.fusion, "names_casts", False):
            source.warn("a joint fusion makes its casts itself: its pattern must not name Cast")
            return
        declared_fusion = source.fusion if isinstance(source.fusion, Fusion) else None
        if declared_fusion and not declared_fusion.may_match(self.classes):
            return
        for found in self._found(source):
            benefit = 0 if overlaps(found, taken) else self._benefit(found)
            if isinstance(benefit, str):
                self.refuse(found, benefit)
            else:
                found.benefit = benefit
                yield found
        if declared_fusion:
            self._refuse_near_matches(source, declared_fusion)

    def _found(self, source: FusionSource) -> Iterator[Candidate]:
        """The matches of a fusion: the ops with the casts of its pass, or the ops alone.

        A pattern that names no cast is searched in both: if it matches only the ops alone, casts
        are between them.
        """
        alone = self.views["joint"]
        if not isinstance(source.fusion, Fusion):
            for i, j, op in _function_matches(source, self.ops, self.env):
                yield Candidate(2 * i + 1, 2 * j, self.ops[i:j], source, op=op)
            return
        ops_alone = source.passes == "joint" or "casts" in source.fusion.declares
        view = alone if ops_alone else self.views[source.passes]
        views = (view,) if len(view) == len(alone) else (view, alone)
        seen: set[tuple[int, int]] = set()
        for each in views:
            places, ops = [*each], tuple(each.values())
            for i in range(len(ops)):
                for j in source.fusion.match(ops, i):
                    candidate = Candidate(places[i], places[j - 1] + 1, ops[i:j], source)
                    if (candidate.begin, candidate.end) not in seen:
                        seen.add((candidate.begin, candidate.end))
                        yield candidate

    def _refuse_near_matches(self, source: FusionSource, fusion: Fusion) -> None:
        """Record, once per fusion, which ops override the arithmetic of its pattern."""
        view = self.views[source.passes]
        places, ops = [*view], tuple(view.values())
        missed = [
            (j - i, i, j, why)
            for i in range(len(ops))
            for j, why in fusion.near_matches(ops, i).items()
        ]
        said: set[int] = set()
        for _, i, j, why in sorted(missed):
            if said.isdisjoint(range(i, j)):
                self.refuse(Candidate(places[i], places[j - 1] + 1, ops[i:j], source), why)
                said |= set(range(i, j))

    def _benefit(self, candidate: Candidate) -> float | str:
        """The benefit, or a sentence that says why it is no reason to fuse."""
        source, start, stop, op = candidate.source, candidate.start, candidate.stop, candidate.op
        first = self.facts.needs.first_backward
        if source.passes == "backward" and start < first:
            return f"no gradient is needed before op {first}"
        if (source, candidate.begin, candidate.end) in self.excluded:
            return "its build failed, see the warning"
        fusion = source.fusion
        casts = "casts" in fusion.declares if op is None else getattr(op, "casts", False)
        if not (candidate.casts or casts):
            if between := self.edges.between(source.passes, start, stop):
                return f"{between}, and this fusion does not cast there"
        if surplus := self._surplus(candidate):
            return surplus
        known = self._known(candidate)
        candidate.env = self.env._replace(**known)
        asked = self._asked(candidate) if isinstance(fusion, Fusion) else 2 * (stop - start - 1)
        trades = "trades_time" in getattr(fusion, "declares", ()) and self.prefer != "memory"
        if trades and not known and not isinstance(asked, str):
            return 'it trades time for memory, which prefer="memory" asks for'
        return asked

    def _surplus(self, candidate: Candidate) -> str:
        """A sentence about a keyword argument that the candidate does not take; ``""``: none."""
        op, build = candidate.op, getattr(candidate.source.fusion, "build", None)
        takes = getattr(build, "kwarg_names", ()) if op is None else kwarg_names(op)
        for index in range(candidate.start, candidate.stop):
            for name in self.facts.kwargs[index]:
                if takes is not None and name not in takes:
                    given_to = type(self.ops[index]).__name__
                    return f"it does not take the keyword argument {name!r} given to {given_to}"
        return ""

    def _asked(self, candidate: Candidate) -> float | str:
        """Ask the condition and the benefit of a fusion; check the types of the answers."""
        source: FusionSource = candidate.source
        fusion: Any = source.fusion
        ops, asked = candidate.matched, "condition"
        try:
            answer, env = self._condition(fusion, candidate)
            asked, candidate.env = "benefit", env
            benefit = fusion.benefit_of(ops, env) if answer is True else 0
        except Exception as error:
            return source.warn(f"its {asked} raised {type(error).__name__}: {error}")
        if isinstance(answer, str) and answer:
            return answer
        if answer is not True:
            return source.warn(f"its condition returned {answer!r} instead of True or a sentence")
        if not (isinstance(benefit, (int, float)) and abs(benefit) <= _MOST):
            return source.warn(
                f"its benefit is {benefit!r} instead of a number of tensors, {_MOST:g} at most"
            )
        return f"it declares a benefit of {benefit:g}" if benefit < 0 else benefit

    def _condition(self, fusion: Fusion, candidate: Candidate) -> tuple[Any, Environment]:
        """The answer of a condition, and the environment it was given for."""
        env = self._environment(fusion, candidate)
        if "recipe" in fusion.needs and env.recipe is None:
            return "no recipe quantizes these ops", env
        answer = fusion.when is None or fusion.when(candidate.matched, env)
        # otherwise the number of rows is known only when the chain runs
        if answer is True and "rows" in fusion.needs and self.rows_kept[candidate.start]:
            self.row_facts.add("rows")
            env = env._replace(rows=self.env.rows)
            answer = fusion.when is None or fusion.when(candidate.matched, env)
        return answer, env

    def _environment(self, fusion: Fusion, candidate: Candidate) -> Environment:
        """The environment passed to a fusion, before the number of rows is added."""
        start = candidate.start
        aligned = "row_alignment" in fusion.needs and self.rows_kept[start]
        self.row_facts |= {"row_alignment"} if aligned else set()
        return candidate.env._replace(  # type: ignore[no-any-return]
            rows=None,
            recipe=self.edges.recipe_of(self.env.recipe, start, candidate.stop),
            features=self.facts.chain.widths[start],
            contiguous=None,
            row_alignment=self.env.row_alignment if aligned else 1,
        )

    def _known(self, candidate: Candidate) -> dict[str, Any]:
        """What tools know of a candidate, as fields of its environment."""
        found: dict[str, Any] = {}
        for known in self.facts.tool_facts:
            found.update(known.fields(candidate, functools.partial(self._read, candidate)) or {})
        return found

    def _read(self, candidate: Candidate, name: str) -> Any:
        """A fact about the input of a candidate, which the plan then depends on, or None."""
        # the rows are known as long as no op changes them; everything else only at the start of
        # the chain
        if not (self.rows_kept[candidate.start] if name == "rows" else candidate.start == 0):
            return None
        self.row_facts.add(name)
        return getattr(self.env, name)


def _function_matches(
    source: FusionSource, ops: tuple[BasicOperation, ...], env: Environment
) -> list[tuple[int, int, FusedOperation]]:
    """The runs that a fusion function replaced, with the ops that it built."""
    fusion: Any = source.fusion
    try:
        result = fusion(list(ops), recipe=env.recipe)
    except Exception as error:
        if source.distribution is None:
            raise
        source.warn(f"it raised {type(error).__name__}: {error}")
        return []
    if not isinstance(result, (list, tuple)):
        got = type(result).__name__
        raise TypeError(f"{source.full_name} must return a list of ops, got {got}")
    found: list[tuple[int, int, FusedOperation]] = []
    start = stop = 0
    for item in result:
        basic = list(item.basic_ops) if isinstance(item, FusedOperation) else [item]
        start, stop = stop, stop + len(basic)
        _check_order(source, basic, ops[start:stop])
        if isinstance(item, FusedOperation):
            found.append((start, stop, item))
    if stop != len(ops):
        _check_order(source, result, ops)
    return found


def check_expansion(source: FusionSource, fused: Any, ops: Sequence[BasicOperation]) -> None:
    """Raise unless ``fused`` replaces ``ops``, in order, and implements the pass it is for."""
    who, given = source.full_name, type(fused).__name__
    if not isinstance(fused, FusedOperation):
        raise TypeError(f"{who} must build a FusedOperation, got {given}")
    _check_order(source, fused.basic_ops, ops)
    for passes in ("forward", "backward"):
        name = f"fuser_{passes}"
        method = getattr(getattr(fused, name), "__func__", None)
        if source.passes in (passes, "joint") and method is getattr(FusedOperation, name):
            what = f"is a {source.passes} fusion, but {given} does not implement {name}"
            raise TypeError(f"{who} {what}")
    if fused.recomputes and type(fused).fuser_recompute is FusedOperation.fuser_recompute:
        raise TypeError(f"{who}: {given} recomputes, but has no fuser_recompute")


def _check_order(source: FusionSource, got: Iterable[Any], expected: Iterable[Any]) -> None:
    if [*map(id, got)] != [*map(id, expected)]:
        names = [", ".join(type(op).__name__ for op in ops) for ops in (expected, got)]
        what = "does not expand to the same basic ops in the same order"
        raise RuntimeError(f"{source.full_name} {what}: expected [{names[0]}], got [{names[1]}]")
