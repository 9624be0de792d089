"""Plans as data: the steps of each pass, and the reasons for them."""

from __future__ import annotations

import dataclasses
import hashlib


@dataclasses.dataclass(frozen=True)
class PlanStep:
    """One step of a pass: the op that runs, the basic ops that it covers, and its origin.

    ``fusion``, ``distribution`` and ``version`` are None for an op that runs unfused. ``basic_ops``
    and ``start`` count basic ops only: a cast by itself has none, and ``start`` is its edge.
    ``casts`` lists each cast of a step with its edge and quantizer. ``note`` is a further sentence
    about the step, or empty. ``fallback`` says why a fused step runs in PyTorch's operations here,
    and not in its own kernel, or is empty.
    """

    op: str
    basic_ops: tuple[str, ...]
    start: int
    fusion: str | None = None
    distribution: str | None = None
    version: str | None = None
    casts: tuple[tuple[int, str], ...] = ()
    note: str = ""
    fallback: str = ""

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of its ops and casts, in the order of the forward."""
        named = [(2 * (self.start + i) + 1, name) for i, name in enumerate(self.basic_ops)]
        named += [(2 * edge, f"Cast[{by}]") for edge, by in self.casts]
        return tuple(name for _, name in sorted(named))

    @property
    def owner(self) -> str:
        """The origin of a fused step."""
        return f"{self.distribution} {self.version}" if self.distribution else "registered in code"

    def __str__(self) -> str:
        who = f"fused by {self.fusion}, {self.owner}" if self.fusion else "not fused"
        return f"{' + '.join(self.parts) or self.op}, {who}"


@dataclasses.dataclass(frozen=True)
class Refusal:
    """A candidate that was not taken, and the reason as a sentence.

    ``lost_to`` is the distribution of the first candidate that was taken in its place, or ``""`` if
    that was registered in code; None if the reason is the candidate's own.
    """

    fusion: str
    passes: str
    basic_ops: tuple[str, ...]
    start: int
    reason: str
    distribution: str | None = None
    lost_to: str | None = None

    def __str__(self) -> str:
        who = f"{self.fusion}, {self.distribution or 'registered in code'}"
        return f"refused {self.passes} {who}, on {' + '.join(self.basic_ops)}: {self.reason}"


@dataclasses.dataclass(frozen=True)
class FusionPlan:
    """The steps of both passes for one key, and the reason for every decision.

    Data only: printable, comparable, hashable. Two processes with the same installs and options, in
    which tools know the same, make equal plans. ``backward`` lists the steps in the order they run:
    last op first. ``table`` is a hash of what tools know, such as a table of times, or empty.
    """

    forward: tuple[PlanStep, ...]
    backward: tuple[PlanStep, ...]
    refused: tuple[Refusal, ...] = ()
    table: str = ""

    def digest(self) -> str:
        """A hash of the plan; equal plans have equal hashes in all processes."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16]

    def __str__(self) -> str:
        lines = []
        for name, steps in (("forward", self.forward), ("backward", self.backward)):
            lines += [name, *(f"  {step}" for step in steps)] if steps else [f"{name}: none"]
        return "\n".join([*lines, *map(str, self.refused)])
