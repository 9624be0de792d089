"""Tuning tables: measurements on this machine, read from JSON files, and their lookup.

``opfuse tune`` writes one file per device into the user's cache directory, or into the directory
that the environment variable ``OPFUSE_TUNING`` names; if that is empty, there are no tables. An
entry applies only to the setting that it was measured in: device, threads, precision of matrix
products, versions of torch, Triton and the plugin.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import math
import os
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..core.environment import Shape, device_name
from ..core.plugins import manager
from ..core.records import is_strict, normalize
from ..core.settings import current
from ..ops.arithmetic import matmul_precision

FORMAT = 1
THRESHOLD = 0.99
"""A fusion is slower for sure if the whole interval of its speed is below this."""
REPEATS = 0.02
"""How far two processes find speeds apart, however often each calls a fusion. No interval is
narrower.
"""
DRIFTS = 0.2
"""How far apart two measurements of the same saved time are, as a share: they are not taken in
turns, and a processor is slower at some times than at others.
"""


class TuningWarning(UserWarning):
    """A tuning table, or entries of it, cannot be used; plans are made without it.

    The text names the file and what to do.
    """


@dataclasses.dataclass(frozen=True)
class Measurement:
    """The result of one fusion on this machine, compared with the separate ops.

    Attributes:
        speed: Time of the separate ops divided by that of the fused op.
        noise: From the speed to that end of a 95 % interval of it that is nearer 1.
        seconds: Time that a call saves.
        saved_bytes: Number of bytes that a forward keeps less for its backward; of the chain of a
            converted module under ``prefer="memory"``.
        saved_by_speed: The same under ``prefer="speed"``; None: the same number.
        wrong: A sentence about how it differs from the separate ops, or ``""``.
        configuration: The fastest configuration, or None if it has only one.
        compared: Whether values were compared; False: its ops draw random numbers.
        rows: The number of rows of the input; a wrong result applies to that number.
        took: Seconds of the separate ops; 0: they were not noted.
    """

    speed: float
    noise: float
    seconds: float
    saved_bytes: int = 0
    wrong: str = ""
    configuration: Mapping[str, Any] | None = None
    compared: bool = True
    rows: int = 0
    took: float = 0.0
    saved_by_speed: int | None = None

    def refusal(self, *, trades_time: bool, prefer: str) -> str:
        """Return why the fusion must not be used, or ``""``.

        Args:
            trades_time: Whether it declares to trade time for memory.
            prefer: The option ``prefer``.
        """
        if self.wrong:
            return f"measured here, it {self.wrong}"
        saved, error = self.saved_bytes, max(self.noise, REPEATS)
        if prefer == "speed" and self.saved_by_speed is not None:
            saved = self.saved_by_speed
        if saved < 0:
            is_used = self.speed - error >= 1
        elif saved and trades_time and prefer == "memory":
            is_used = True
        elif saved:  # a tie in time goes to fewer bytes
            is_used = self.speed + error >= THRESHOLD
        else:
            is_used = self.speed + REPEATS >= 1  # noise is no excuse
        if is_used:
            return ""
        slower = f"measured here, it has {self.speed:.2f}x the speed of the separate ops"
        if saved < 0:
            return f"{slower}, and keeps more for the backward"
        if trades_time and self.saved_bytes > 0:
            return f'{slower}; it saves memory, which prefer="memory" asks for'
        return slower

    @property
    def error(self) -> float:
        """How far ``seconds`` may be off, compared with those of another fusion."""
        own = self.took * max(self.noise, REPEATS) / max(self.speed, REPEATS)
        return math.hypot(own, DRIFTS * self.seconds)

    def __str__(self) -> str:
        return f"measured here: {self.speed:.2f}x the speed of the separate ops"


Entries = Mapping[Shape, Measurement]


@dataclasses.dataclass(frozen=True)
class Table:
    """The entries of one file that apply in this process.

    Attributes:
        entries: By subject, as :func:`subject_key` writes it.
        digest: A hash of them; ``""`` if there are none.
        in_graphs: The measurements under ``torch.compile``, by name.
    """

    entries: Mapping[str, Entries] = dataclasses.field(default_factory=dict)
    digest: str = ""
    in_graphs: Mapping[str, Sequence[Measurement]] = dataclasses.field(default_factory=dict)


NO_TABLE = Table()
_known: dict[tuple[Path, str], Table] = {}


def directory() -> Path | None:
    """The directory of the tables; None: there are none."""
    named = os.environ.get("OPFUSE_TUNING")
    if named is not None:
        return Path(named) if named.strip() else None
    from platformdirs import user_cache_path

    return user_cache_path("opfuse", appauthor=False) / "tuning"


def path_for(device: torch.device) -> Path | None:
    """The file of a device; None: there are no tables."""
    name = device_name(device.type, device.index if device.type == "cuda" else None)
    folder = directory()
    return folder and folder / f"{file_name(name)}.json"


def kernels_path(device_name: str) -> Path | None:
    """The file with the configurations of kernels on a device, which the toolkit reads."""
    folder = directory()
    return folder and folder / f"{file_name(device_name)}.kernels.json"


def kernels_digest(device_name: str) -> str:
    """A hash of the configurations of kernels on a device; ``""``: there are none."""
    path = kernels_path(device_name)
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path and path.is_file() else ""


def file_name(device_name: str) -> str:
    """What files are called that are about devices of this name."""
    return re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-")


def setting(device: torch.device) -> dict[str, Any]:
    """The setting that an entry is measured in, and applies to."""
    return {
        "device": device_name(device.type, device.index if device.type == "cuda" else None),
        "threads": torch.get_num_threads() if device.type == "cpu" else None,
        "matmul_precision": matmul_precision(device.type),
        "torch": torch.__version__,
        "triton": _triton_version(),
    }


@functools.cache
def _triton_version() -> str | None:
    for name in ("triton", "pytorch-triton", "triton-windows"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None


def subject_key(subject: Mapping[str, Any]) -> str:
    """A subject as text, the key for lookups."""
    return json.dumps(subject, sort_keys=True)


# Reading


def table_for(device: torch.device) -> Table:
    """The table of a device, as it applies in this process; read once.

    There is none where the tool ``tuning`` is switched off.

    Warns of a file that cannot be read, and of entries of other versions. Strict mode raises.
    """
    path = path_for(device)
    tools = [tool.name for tool in manager.active_tools(current.selection)]
    if path is None or "tuning" not in tools:
        return NO_TABLE
    here = setting(device)
    key = path, subject_key(here)
    found = _known.get(key)
    if found is None:
        found = _known[key] = _read(path, here)
    return found


def reload() -> None:
    """Discard the tables that were read, and all plans."""
    _known.clear()
    manager.changed()


def _read(path: Path, here: Mapping[str, Any]) -> Table:
    try:
        rows = read_rows(path)
    except (OSError, ValueError) as error:
        warn_of(error, "run `opfuse tune` again")
        return NO_TABLE
    _warn_of_other_versions(path, rows, here)
    entries: dict[str, dict[Shape, Measurement]] = {}
    versions, in_graphs = installed(), dict[str, list[Measurement]]()
    for row in rows:
        plugin = row["subject"]["plugin"]
        if row["setting"] == here and (not plugin or versions.get(plugin[0]) == plugin[1]):
            shape = Shape(*row["shape"])
            found = Measurement(**row["found"])
            entries.setdefault(subject_key(row["subject"]), {})[shape] = found
            if row["subject"].get("mode", ())[2:] == [True]:
                in_graphs.setdefault(row["subject"]["fusion"], []).append(found)
    if not entries:
        return NO_TABLE
    lines = [f"{subject} {shape} {of[shape]!r}" for subject, of in entries.items() for shape in of]
    digest = hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()[:16]
    return Table(entries, digest, in_graphs)


def warn_of(error: Exception, cure: str) -> None:
    """Warn of a table that cannot be read. Strict mode raises."""
    warning = TuningWarning(f"{error}, and {cure}; it is not used")
    if is_strict():
        raise warning from error
    warnings.warn(warning, stacklevel=3)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """All entries of a file, whether they apply or not; none if there is no file.

    Raises:
        ValueError: It is not a tuning table.
        OSError: It cannot be read.
    """
    if not path.is_file():
        return []
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise ValueError(f"format {content['format']!r} instead of {FORMAT}")
        rows: list[dict[str, Any]] = content["entries"]
        for row in rows:
            _check(Shape(*row["shape"]), Measurement(**row["found"]), row["subject"]["plugin"])
            subject_key(row["subject"]), row["setting"]["torch"]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        what = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"{path} is not a tuning table that this opfuse reads ({what}): delete it"
        ) from error
    return rows


def _check(shape: Shape, found: Measurement, plugin: Any) -> None:
    """Refuse entries that tuning cannot have written."""
    counts = {**shape._asdict(), "rows measured": found.rows}
    signed = {"seconds": found.seconds, "saved_bytes": found.saved_bytes}
    if found.saved_by_speed is not None:
        signed["saved_by_speed"] = found.saved_by_speed
    sizes = {"speed": found.speed, "noise": found.noise, "took": found.took}
    strings = isinstance(plugin, list) and [type(name) for name in plugin] == [str, str]
    for name, value, right in (
        *((name, n, isinstance(n, int) and n >= 0) for name, n in counts.items()),
        *((name, x, _is_number(x)) for name, x in signed.items()),
        *((name, x, _is_number(x) and x >= 0) for name, x in sizes.items()),
        ("wrong", found.wrong, isinstance(found.wrong, str)),
        ("configuration", found.configuration, isinstance(found.configuration, dict | None)),
        ("plugin", plugin, plugin is None or strings),
    ):
        if not right:
            raise ValueError(f"{name} is {value!r}, which no tuning writes")


def _is_number(value: Any) -> bool:
    """Return whether a value is a plain number, neither NaN nor infinite."""
    return type(value) in (int, float) and abs(value) < 1e18


def installed() -> dict[str, str]:
    """The versions of the installed plugins, by distribution."""
    return {normalize(record.distribution): record.version for record in manager.records}


def _warn_of_other_versions(
    path: Path, rows: Iterable[Mapping[str, Any]], here: Mapping[str, Any]
) -> None:
    versions = installed()
    seen: dict[str, set[str]] = {}
    for row in rows:
        plugin = row["subject"]["plugin"]
        if plugin and plugin[0] in versions and row["setting"] == here:
            seen.setdefault(plugin[0], set()).add(plugin[1])
    for name, measured in seen.items():
        if versions[name] not in measured:
            what = f"has entries of {name} {', '.join(sorted(measured))}, {versions[name]} is here"
            warning = TuningWarning(f"{path} {what}: they are not used, run `opfuse tune` again")
            warnings.warn(warning, stacklevel=2)
