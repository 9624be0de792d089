"""What is measured: every case with its goals, by priority, as ``cases.txt`` lists them."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
from collections.abc import Collection, Iterator
from typing import Any

from .chains import widths

SUITES = {"cpu": ("cpu",), "quick": ("gpu-quick", "gpu-full"), "full": ("gpu-full",)}
GOAL = re.compile(r"(?:([\w-]+)\.)?([\w/-]+)([<>=])([\d.:/]+)(?:@(\w+))?")


@dataclasses.dataclass(frozen=True)
class Goal:
    """What a ratio should reach.

    Attributes:
        versus: A provider; "eager/hand": eager, or what is written by hand where that does not
            reach the goal against eager; "sol": the share of the copy's bandwidth; "self": the
            subject's own number.
        goal, stretch, bound: The bar; what would be worth telling; what the hardware or the
            arithmetic allows.
        subject: Whose.
        cost: Smaller is better: the subject over the other. Else how many times faster the subject
            is.
        exact: It must be equal.
        id: The goal's id, where it is not the case's.
    """

    versus: str
    goal: float
    stretch: float | None = None
    bound: float | None = None
    subject: str = "opfuse"
    cost: bool = False
    exact: bool = False
    id: str = ""


@dataclasses.dataclass(frozen=True)
class Case:
    """One workload and one number of it.

    Attributes:
        id: Of its goals.
        chain: See :mod:`benchmarks.chains`.
        rows: Of the input.
        metric: inference, forward, backward, forward+backward, saved bytes, peak bytes, or one of
            these after "host ", the wall time of a GPU program.
        goals: What it is held to.
        suites: Where it belongs.
        width: Features of the input, where the chain does not say.
        dtype: A name in ``chains.DTYPES``.
        element_bytes: How many must move for each element of the output.
        recipe: Class of a quantization recipe.
        unfused: Whether opfuse counts without any fusion.
        recompute: Whether it counts only if its forward saves nothing but its input.
        special: A function in :mod:`benchmarks.special`, where it is no pass of the chain.
        rounds: How many, where the run does not say.
        tolerance: The largest relative error; 0: the dtype's.
    """

    id: str
    chain: str
    rows: int
    metric: str
    goals: tuple[Goal, ...] = ()
    suites: tuple[str, ...] = ()
    width: int = 0
    dtype: str = "bf16"
    element_bytes: int = 0
    recipe: str = ""
    unfused: bool = False
    recompute: bool = False
    special: str = ""
    rounds: int = 0
    tolerance: float = 0

    @property
    def name(self) -> str:
        """What the case is called, in addition to its id."""
        size = f" of {self.rows}" + (f"x{self.width}" if self.width else "")
        parts = [self.metric, self.chain, self.dtype + size, self.recipe]
        return ", ".join(part for part in parts if part)

    @property
    def ids(self) -> set[str]:
        """Of the case and of its goals."""
        return {self.id} | {goal.id for goal in self.goals if goal.id}

    def without(self, providers: Collection[str]) -> Case:
        """The case with no goal against these providers."""
        goals = tuple(goal for goal in self.goals if goal.versus not in providers)
        return dataclasses.replace(self, goals=goals)

    @property
    def traffic(self) -> int:
        """Bytes that must move."""
        return (
            self.element_bytes
            and self.element_bytes * self.rows * widths(self.chain, self.width)[-1]
        )


def expand(line: str) -> Iterator[str]:
    """Yield the lines that a line with alternatives expands to."""
    if every := re.search(r"\[(.*?)\]", line):
        for each in every[1].split(","):
            yield from expand(line[: every.start()] + each + line[every.end() :])
        return
    together = [group.split(",") for group in re.findall(r"\{(.*?)\}", line)]
    for alternative in zip(*together, strict=True) if together else [()]:
        chosen = iter(alternative)
        yield re.sub(r"\{.*?\}", lambda match, chosen=chosen: next(chosen), line)


def goal(text: str) -> Goal:
    """``subject.provider>goal/stretch/bound@id``."""
    if not (match := GOAL.fullmatch(text)):
        raise ValueError(f"expected a goal such as eager>1.5/1.6/1.7, got {text!r}")
    subject, versus, how, numbers, name = match.groups()
    values = [
        float(a) / float(b or 1) if a else None
        for a, _, b in (n.partition(":") for n in numbers.split("/"))
    ]
    return Goal(
        versus,
        *values,
        subject=subject or "opfuse",
        cost=how == "<",
        exact=how == "=",
        id=name or "",
    )


def case(name: str, line: str, index: int) -> Case:
    """One of the cases of a line of the table: ``line`` has no alternatives.

    ``index`` says which one it is.
    """
    chain, size, metric, goals, words = (part.strip() for part in line.split("|"))
    rows, dtype, *width = size.split()
    options: dict[str, Any] = {"dtype": dtype, "width": int(width[0]) if width else 0}
    for word in words.split():
        key, _, value = word.partition("=")
        if key in SUITES:
            options["suites"] = SUITES["full" if value and index >= int(value) else key]
        elif key.endswith("B"):
            options["element_bytes"] = int(key[:-1])
        else:
            options[key] = json.loads(value) if value[:1].isdigit() else value or True
    return Case(name, chain, int(rows), metric, tuple(map(goal, goals.split())), **options)


def table(text: str) -> tuple[dict[str, str], list[Case]]:
    """The titles and the cases of a table."""
    titles: dict[str, str] = {}
    cases, name = [], ""
    for line in text.splitlines():
        if line.startswith("  "):
            cases += [case(name, each, index) for index, each in enumerate(expand(line))]
        elif line and not line.startswith("#"):
            name, _, titles[name] = line.partition(" ")
    return titles, cases


def captures(cases: list[Case]) -> Iterator[Case]:
    """A CUDA graph of every chain of layers, after those that the table has."""
    seen = {"", *(each.chain for each in cases if each.id == "O5")}
    for each in cases:
        chain, goals = each.chain, (Goal("self", 1, exact=True),)
        if (
            chain not in seen
            and each.id != "G1"
            and each.dtype == "bf16"
            and not re.search("cast|product", chain)
        ):
            seen.add(chain)
            options = {"width": each.width, "special": "captured", "unfused": True}
            yield Case("O5", chain, 512, "captured", goals, SUITES["full"], **options)


TITLES, CASES = table((pathlib.Path(__file__).parent / "cases.txt").read_text(encoding="utf-8"))
CASES += captures([each for each in CASES if "gpu-full" in each.suites])
