"""A memory plan: the choice, what it keeps and costs, and the curve from which it was taken."""

from __future__ import annotations

import dataclasses
import os
from typing import Any
from xml.sax.saxutils import escape

from torch import nn

from opfuse.report.lines import as_bytes, counted, table, wrap
from opfuse.report.picture import write
from opfuse.report.replaced_forward import MEMORY, replaced_forward

from .actions import Action, ModuleMemory, attach, put_on, take_off


@dataclasses.dataclass(frozen=True)
class Choice:
    """What one part of the model does.

    Attributes:
        path: Its dotted name.
        name: The name of its class.
        option: What it does, in words.
        nbytes: Bytes that it keeps.
        seconds: Seconds that it adds to a step.
        actions: For each place: its dotted name, whether that is its chain, and the action.
    """

    path: str
    name: str
    option: str
    nbytes: int
    seconds: float
    actions: tuple[tuple[str, bool, Action], ...] = ()


@dataclasses.dataclass(frozen=True, repr=False)
class MemoryPlan:
    """What :func:`opfuse.plan_memory` chose; ``str()`` fits a screen.

    Attributes:
        budget: The bytes that a forward may keep; None: nothing is attached, see ``curve``.
        unfused: The bytes that it keeps without any fusion.
        before: The bytes that it keeps without the plan.
        kept: The bytes that it keeps with the plan, measured.
        seconds: Seconds of a step without the plan.
        added: Seconds that a step takes longer with it, by the costs of its parts.
        measured: The same, as measured for the whole model; None: it was not.
        choices: What each part does.
        curve: The fastest choices: bytes, and seconds of a step.
        compiled: ``torch.compile``'s budgets: their share, bytes, and seconds of a step.
        notes: Sentences about parts for which nothing can be done, and their numbers.
        estimated: Whether times were estimated, not measured.
    """

    budget: int | None
    unfused: int
    before: int
    kept: int
    seconds: float
    added: float
    measured: float | None = None
    choices: tuple[Choice, ...] = ()
    curve: tuple[tuple[int, float], ...] = ()
    compiled: tuple[tuple[float, int, float], ...] = ()
    notes: tuple[tuple[str, int], ...] = ()
    estimated: bool = False

    # What is said

    def __str__(self) -> str:
        if self.budget is None:
            lines = self._curve_lines()
        else:
            lines = wrap(f"memory plan: {self.summary}", "", "  ") + self._choice_lines()
        for note, count in self.notes:
            lines += wrap(f"{note} ({counted(count, 'call')})", "", "  ")
        return "\n".join(lines)

    __repr__ = __str__

    @property
    def summary(self) -> str:
        """What it keeps, what it costs, and what less would cost, in one line."""
        share = f"{self.kept / max(self.unfused, 1):.2f}x of {as_bytes(self.unfused)} unfused"
        said = [f"keeps {as_bytes(self.kept)} for the backward, {share}"]
        if self.budget is not None:
            said.append(f"the budget is {as_bytes(self.budget)}")
        said.append(f"without the plan it keeps {as_bytes(self.before)}")
        how = "estimated" if self.estimated else "by the times of its parts"
        more = "less" if self.added < 0 else "longer"
        cost = f"a step takes {_ms(abs(self.added))} {more}, {how}"
        if self.measured is not None:
            share = f"{self.measured / max(self.seconds, 1e-9):+.1%}"
            cost += f", and {_ms(self.measured)} as measured ({share} of {_ms(self.seconds)})"
        return "; ".join([*said, cost, self.next])

    @property
    def next(self) -> str:
        """What fewer bytes would cost, as a sentence."""
        planned, step = self.seconds + self.added, max(self.unfused // 100, 1)
        here = max((b for b, s in self.curve if s >= planned - 5e-7), default=self.kept)
        less = [(b, s) for b, s in self.curve if b <= here - step]
        if not less:
            return f"no choice keeps {as_bytes(step)} less"
        nbytes, seconds = less[-1]
        cost = f"the next {as_bytes(here - nbytes)} less would cost"
        return f"{cost} {_ms(seconds - planned)} more"

    def _choice_lines(self) -> list[str]:
        """A line for each kind of part and what it does."""
        groups: dict[tuple[str, str], list[Choice]] = {}
        for choice in self.choices:
            named = (choice.name, choice.option) if choice.actions else ("the rest", "as it is")
            groups.setdefault(named, []).append(choice)
        rows = []
        for (name, option), those in sorted(
            groups.items(), key=lambda row: row[0][0] == "the rest"
        ):
            kept = as_bytes(sum(choice.nbytes for choice in those))
            added = _ms(sum(c.seconds for c in those), "+") if those[0].actions else ""
            rows.append((f"  {name} x {len(those)}", option, kept, added))
        return table(rows, 2)

    def _curve_lines(self) -> list[str]:
        """The curve as lines, with a bar for the time of each point."""
        how = " (times are estimated)" if self.estimated else ""
        lines = [f"kept for the backward against the time of a step{how}:"]
        # of those in each tenth of the bytes the fastest, which comes last
        apart = {int(10 * b / max(self.unfused, 1)): ("", b, s) for b, s in self.curve}
        points = [*apart.values()][::-1]
        points += [(f"torch.compile, budget {share:g}", b, s) for share, b, s in self.compiled]
        longest = max([s for *_, s in points], default=1.0)
        rows = []
        for what, nbytes, seconds in points:
            bar = "#" * max(1, round(30 * seconds / longest))
            share = f"{nbytes / max(self.unfused, 1):.2f}x"
            rows.append((f"  {as_bytes(nbytes)}", share, _ms(seconds), f"{bar} {what}".rstrip()))
        return lines + table(rows)

    def to_dict(self) -> dict[str, Any]:
        """The same as JSON-able data, from which :meth:`from_dict` makes the plan again."""
        data = dataclasses.asdict(self)
        for row, choice in zip(data["choices"], self.choices, strict=True):
            row["actions"] = [[p, chain, *dataclasses.astuple(a)] for p, chain, a in choice.actions]
        return data

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> MemoryPlan:
        """A plan from its data, to attach it in another process.

        Raises:
            TypeError: It is not the data of a plan.
        """
        choices = [
            Choice(
                **{
                    **row,
                    "actions": tuple((p, bool(c), Action(*how)) for p, c, *how in row["actions"]),
                }
            )
            for row in data["choices"]
        ]
        tuples = {k: tuple(map(tuple, data[k])) for k in ("curve", "compiled", "notes")}
        return cls(**{**data, **tuples, "choices": tuple(choices)})

    def save(self, path: str | os.PathLike[str]) -> None:
        """Draw the curve into an SVG file.

        Args:
            path: The file, whose name ends with ``.svg``; one that exists is replaced.

        Raises:
            ValueError: Another name.
        """
        write(path, _drawn(self))

    # What it does

    def attach(self, model: nn.Module) -> None:
        """Attach the choice to a model, in place of one that is there.

        For the model that it was made for, or one of the same structure: a copy, or the model of
        another process, before or after it is sharded.

        Raises:
            ValueError: The model has no module of a name, or that is not converted.
        """
        found = []
        for path, is_chain, action in [row for c in self.choices for row in c.actions]:
            try:
                module = model.get_submodule(path)
            except AttributeError:
                raise ValueError(f"the plan is for a model with a module {path!r}") from None
            if is_chain and replaced_forward(module) is None:
                raise ValueError(f"the plan is for a model whose {path or 'root'} is converted")
            found.append((module, is_chain, action))
        self.detach(model)
        if model not in attach(found):
            put_on(model, ModuleMemory())
        vars(model)[MEMORY].note = self.summary

    @staticmethod
    def detach(model: nn.Module) -> None:
        """Remove from a model what any plan attached; chains of a conversion stay.

        Raises:
            RuntimeError: A class that others derived from a module's cannot be derived again.
        """
        for module in model.modules():
            if MEMORY in vars(module):
                take_off(module)


def _ms(seconds: float, sign: str = "") -> str:
    return f"{seconds * 1e3:{sign}.{2 if abs(seconds) < 0.1 else 0}f} ms"


def _drawn(plan: MemoryPlan) -> str:
    """The curve as an SVG image: bytes to the right, seconds of a step up."""
    width, height, margin = 640, 400, 70
    dots = [(b, s) for b, s in plan.curve] + [(b, s) for _, b, s in plan.compiled]
    dots += [(plan.kept, plan.seconds + plan.added)]
    right = max([b for b, _ in dots] + [plan.unfused]) * 1.05 or 1
    low, high = min(s for _, s in dots), max(s for _, s in dots)
    low, high = low - 0.1 * (high - low) - 1e-9, high + 0.1 * (high - low) + 1e-9

    def place(nbytes: float, seconds: float) -> tuple[float, float]:
        x = margin + (width - 2 * margin) * nbytes / right
        return x, height - margin - (height - 2 * margin) * (seconds - low) / (high - low)

    def text(x: float, y: float, words: str, more: str = "") -> str:
        return f'<text x="{x:.1f}" y="{y:.1f}" {more}>{escape(words)}</text>'

    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in plan.curve))
    body = [f'<polyline points="{line}" fill="none" stroke="#2060c0" stroke-width="2"/>']
    for share, nbytes, seconds in plan.compiled:
        x, y = place(nbytes, seconds)
        body.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="#c06020"/>')
        body.append(text(x + 7, y + 4, f"torch.compile {share:g}"))
    if plan.budget is not None:
        x, y = place(plan.kept, plan.seconds + plan.added)
        body += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="#208040"/>']
        body += [text(x + 8, y - 6, "the plan")]
    x, y, end = margin, height - margin, 'text-anchor="end"'
    body.append(f'<path d="M{x} {margin}V{y}H{width - margin}" fill="none" stroke="#808080"/>')
    body += [text(x - 6, margin + 4, _ms(high), end), text(x - 6, y, _ms(low), end)]
    body += [text(width - margin, y + 18, as_bytes(int(right)), end), text(x, y + 18, "0")]
    body.append(text(width / 2, height - 20, "kept for the backward", 'text-anchor="middle"'))
    body.append(text(x, margin - 16, "time of a step"))
    style = "<style>text{font:13px sans-serif;fill:#404040}</style>"
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    inner = "\n".join([style, '<rect width="100%" height="100%" fill="#ffffff"/>', *body])
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n{inner}\n</svg>\n'
