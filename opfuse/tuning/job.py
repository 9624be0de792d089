"""One comparison of a tuning run: an entry of the table, and a line of the report."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ..core import tuning_table as tables
from ..core.introspection import op_class
from ..core.tuning_table import Measurement, Shape
from .clock import Clock
from .report import Result


class Job(ABC):
    """Something to compare with the separate ops, or with a module's own operations.

    Attributes:
        title: Its name in progress and reports.
        device: The device on which it runs.
        subject: The subject of the entry.
        shape: The shape of the input, known once it is measured.
        found: The measurement.
        unmeasured: Why there is no measurement, as a sentence, or ``""``.
        eager: On a GPU, why the time of the host counts too, or ``""``.
    """

    title: str
    device: torch.device
    subject: Mapping[str, Any]
    shape: Shape
    found: Measurement | None = None
    unmeasured: str = ""
    eager: str = ""

    def run(self) -> None:
        """Measure; an error of the separate ops says nothing about the fusion."""
        try:
            with Clock.of(self.device).around():
                self.found = self._measure()
        except Exception as error:
            self.unmeasured = f"{self.title}: it cannot be run by itself here, {one_line(error)}"

    @abstractmethod
    def _measure(self) -> Measurement:
        """The measurement; raises if there can be none."""

    def row(self) -> dict[str, Any]:
        """The entry."""
        assert self.found is not None
        return {
            "setting": tables.setting(self.device),
            "subject": self.subject,
            "shape": list(self.shape),
            "found": dataclasses.asdict(self.found),
        }

    @abstractmethod
    def result(self) -> Result:
        """The line of the report."""

    def _result(
        self, distribution: str | None, passes: str, ops: Iterable[Any], **rule: Any
    ) -> Result:
        """The line of the report; ``rule`` as for ``Measurement.refusal``."""
        assert self.found is not None
        names = tuple(op_class(op).__name__ for op in ops)
        of = self.title, distribution, passes, names, self.shape, self.found
        return Result(*of, self.found.refusal(**rule), self.eager)


def one_line(error: Exception) -> str:
    """An error as text on one line, of at most 300 characters."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
