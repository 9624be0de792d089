"""One comparison of a tuning run: an entry of the table, and a line of the report.

:mod:`opfuse.tuning.table` reads the tables that are written here.
"""

from __future__ import annotations

import dataclasses
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import filelock
import torch

from ..core.environment import Shape
from ..core.introspection import op_class
from . import table as tables
from .clock import Clock
from .report import Result
from .table import FORMAT, Measurement, read_rows


class Job(ABC):
    """Something to compare with the separate ops, or with a module's own operations.

    Attributes:
        title: Its name in progress and reports.
        device: The device on which it runs.
        subject: The subject of the entry.
        distribution, passes, ops: For the report: its package, its pass, and what it replaces.
        trades_time, prefer: Whether it may be slower, as for :meth:`Measurement.refusal`.
        shape: The shape of the input, known once it is measured.
        found: The measurement.
        unmeasured: Why there is no measurement, as a sentence, or ``""``.
        eager: On a GPU, why the time of the host counts too, or ``""``.
    """

    title: str
    device: torch.device
    subject: Mapping[str, Any]
    distribution: str | None
    passes: str
    ops: Iterable[Any]
    trades_time: bool
    prefer: str
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

    def result(self) -> Result:
        """The line of the report."""
        assert self.found is not None
        names = tuple(op_class(op).__name__ for op in self.ops)
        refusal = self.found.refusal(trades_time=self.trades_time, prefer=self.prefer)
        of = self.title, self.distribution, self.passes, names, self.shape
        return Result(*of, self.found, refusal, self.eager)


def one_line(error: Exception) -> str:
    """An error as text on one line, of at most 300 characters."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def check_writable(path: Path) -> None:
    """Refuse a place where no table can be written.

    Raises:
        OSError: It cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise PermissionError(f"{path} cannot be written: OPFUSE_TUNING names another folder")


def add(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Put entries into a file, in place of those of the same setting, subject and shape.

    Entries of other versions of the same plugins, in the same setting, go. One that is wrong stays,
    unless the same number of rows was measured again.

    Raises:
        ValueError: The file is there, and is not a tuning table.
        OSError: It cannot be written.
    """
    new: dict[str, dict[str, Any]] = {}
    for row in rows:  # of two with one key, such as of two chains, the one that is wrong
        before = new.get(_identity(row))
        if before is None or not before["found"]["wrong"]:
            new[_identity(row)] = row
    check_writable(path)
    with filelock.FileLock(f"{path}.lock"):
        old = read_rows(path)
        kept = {_identity(row): row for row in old if not _is_outdated(row, new.values())}
        for identity, row in new.items():
            was = kept.get(identity, row)["found"]
            if not was["wrong"] or was.get("rows", 0) == row["found"]["rows"]:
                kept[identity] = row
        replace(path, {"format": FORMAT, "entries": list(kept.values())})


def replace(path: Path, content: Any) -> None:
    """Write a file of JSON: who reads it sees the old one or the new one."""
    written = path.with_name(f"{path.name}.new")
    written.write_text(f"{json.dumps(content, indent=1)}\n", encoding="utf-8")
    os.replace(written, path)


def _is_outdated(row: Mapping[str, Any], new: Collection[Mapping[str, Any]]) -> bool:
    """Return whether new entries are of another version of its plugin, in the same setting."""
    plugin = row["subject"]["plugin"] or [None]
    others = [other["subject"]["plugin"] or () for other in new]
    another = plugin not in others and plugin[0] in [other[0] for other in others if other]
    return another and row["setting"] in [other["setting"] for other in new]


def _identity(row: Mapping[str, Any]) -> str:
    return json.dumps([row["setting"], row["subject"], row["shape"]], sort_keys=True)
