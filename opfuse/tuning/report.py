"""The measurements, as text and as data."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..core.environment import Shape
from ..report.lines import as_bytes, counted, wrap
from ..report.text import where_of
from .table import THRESHOLD, Measurement


@dataclasses.dataclass(frozen=True)
class Result:
    """One measured candidate.

    Attributes:
        fusion: Its name.
        distribution: Its distribution; None: registered in code.
        passes: ``"forward"``, ``"backward"`` or ``"joint"``.
        basic_ops: The classes of its ops.
        shape: The shape of the input.
        found: The measurement.
        refusal: Why it is not used here, or ``""``.
        eager: On a GPU, why the time of the host counts too, or ``""``: no CUDA graph could hold
            the calls.
    """

    fusion: str
    distribution: str | None
    passes: str
    basic_ops: tuple[str, ...]
    shape: Shape
    found: Measurement
    refusal: str
    eager: str = ""

    def __str__(self) -> str:
        where = f"{where_of(self)} at {self.shape.rows} rows"
        if self.found.wrong:
            return f"{where}: it {self.found.wrong}"
        speed = f"{self.found.speed:.2f}x +-{self.found.noise:.2f}"
        size = self.found.saved_bytes
        saved = f", {'saves' if size > 0 else 'keeps'} {as_bytes(abs(size))}" if size else ""
        saved += " more" if size < 0 else ""
        notes = "" if self.found.compared else ", values not compared: its ops draw random numbers"
        notes += f", timed with the host, no CUDA graph holds it: {self.eager}" * bool(self.eager)
        return f"{where}: {speed}{saved}{', not used' if self.refusal else ''}{notes}"


@dataclasses.dataclass(frozen=True)
class TuningReport:
    """Everything that was measured. ``str()`` fits a screen, ``details`` has every candidate.

    Attributes:
        results: In the order in which they were measured.
        path: The file that was written; None: there are no tables.
        unmeasured: The candidates that were not measured because the separate ops fail, and why.
    """

    results: Sequence[Result]
    path: Path | None
    unmeasured: Sequence[str] = ()

    @property
    def wrong(self) -> list[Result]:
        """The wrong results."""
        return [result for result in self.results if result.found.wrong]

    @property
    def slower(self) -> list[Result]:
        """The right results that are not used because they are slower."""
        return [r for r in self.results if r.refusal and not r.found.wrong]

    def __str__(self) -> str:
        if not self.results and not self.unmeasured:
            return "Nothing to measure: no fusion of a plugin in use fits a chain of this model."
        used = [result for result in self.results if not result.refusal]
        traded = [result for result in used if result.found.speed < THRESHOLD]
        fast = [result for result in used if result not in traded]
        drawn = [result for result in used if not result.found.compared]
        eager = [result for result in self.results if result.eager]
        groups: Any = (
            (min, self.slower, "{} refused as slower here, worst {:.2f}x"),
            (min, self.wrong, "{} refused as wrong"),
            (max, fast, "{} no slower than the separate ops, best {:.2f}x"),
            (min, traded, "{} slower, worst {:.2f}x, taken for the memory"),
            (max, drawn, "the values of {} not compared, since their ops draw"),
            (max, eager, "{} timed with the host, since no CUDA graph holds them"),
        )
        parts = [counted(len(self.results), "run")]
        for extreme, results, text in groups:
            if results:
                speed = extreme(result.found.speed for result in results)
                parts.append(text.format(counted(len(results), "fusion"), speed))
        lines = wrap("; ".join(parts) + ".", "")
        for text in (*map(str, self.wrong), *(f"not measured: {why}" for why in self.unmeasured)):
            lines += wrap(text, "  ", "    ")
        end = f"Written to {self.path}." if self.path else "Not written: OPFUSE_TUNING is empty."
        return "\n".join([*lines, end])

    __repr__ = __str__

    @property
    def details(self) -> str:
        """The report, and a line about every candidate."""
        lines = [line for result in self.results for line in wrap(str(result), "  ", "    ")]
        return "\n".join([str(self), *lines])

    def to_dict(self) -> dict[str, Any]:
        """Return the same as JSON-able data."""
        rows = [dataclasses.asdict(r) | {"shape": r.shape._asdict()} for r in self.results]
        path = self.path and str(self.path)
        return {"results": rows, "path": path, "unmeasured": list(self.unmeasured)}
