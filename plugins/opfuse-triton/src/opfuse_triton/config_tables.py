"""Tables of what was measured on a GPU: configurations of kernels, and speeds of cases.

``python -m opfuse_triton gpu`` writes one file for each GPU. It is looked for next to the tuning
table of that GPU. An entry counts only on the GPU and with the versions that it was measured with,
and only as a choice among the configurations that the kernel has for a launch. The speed of a case
decides whether a fusion waits, see :class:`opfuse_triton.Predicted`. So a table may make a kernel
or a chain faster or slower, and nothing else.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import triton

from opfuse.tuning.table import kernels_path, warn_of

from .configs import Config

FORMAT = 1
LARGEST = 1 << 24
"""Bytes of a file that is read; a larger one is none of these tables."""

COUNTS = frozenset({"rows", "count"})
"""Integers by these names may differ at each launch: an entry is for all up to twice as many."""

Entry = dict[str, Any]
_Choices = Mapping[str, Mapping[str, str]]
_Speeds = Mapping[str, float]


def chosen(
    device: str, kernel: str, facts: Mapping[str, Any], possible: Sequence[Config]
) -> Config:
    """The configuration in the table of a GPU if the kernel has it for these facts; else the first.

    Args:
        device: Name of the GPU; ``""``: one that is only simulated, which has no table.
        kernel: Name of the kernel, with its module.
        facts: See :attr:`opfuse_triton.Launch.facts`.
        possible: The configurations of the kernel.
    """
    of_kernel = _table(device)[0].get(kernel) if device else None
    wanted = of_kernel and of_kernel.get(as_key(as_text(facts)))
    if not wanted:
        return possible[0]
    return next((one for one in possible if as_key(one.to_dict()) == wanted), possible[0])


def lowest_speed(device: str, cases: Iterable[str]) -> float | None:
    """The lowest speed in the table of a GPU, relative to the separate ops; None: it has none.

    Args:
        device: As for :func:`chosen`.
        cases: Names of cases, each after that of its plugin, as in ``"norm: RMSNorm forward"``.
    """
    speeds = _table(device)[1] if device else {}
    return min([speeds[case] for case in cases if case in speeds], default=None)


def as_text(facts: Mapping[str, Any]) -> dict[str, str]:
    """Facts as an entry has them: numbers of rows rounded down to a power of two."""
    rounded = {
        name: 1 << fact.bit_length() - 1
        for name, fact in facts.items()
        if name in COUNTS and isinstance(fact, int) and fact > 0
    }
    return {name: _name_of(fact) for name, fact in {**facts, **rounded}.items()}


def _name_of(fact: Any) -> str:
    if isinstance(fact, tuple):
        return f"({', '.join(map(_name_of, fact))})"
    function = getattr(fact, "fn", None)  # a device function
    return f"{function.__module__}.{function.__qualname__}" if function else str(fact)


def as_key(content: Any) -> str:
    """Return JSON as text, equal for equal content."""
    return json.dumps(content, sort_keys=True)


def setting(device: str) -> Entry:
    """What an entry is measured with, and counts with."""
    return {"device": device, "torch": torch.__version__, "triton": triton.__version__}


@functools.cache  # once in a process: launches and plans that are remembered know no later table
def _table(device: str) -> tuple[_Choices, _Speeds]:
    """What counts here: the configurations by kernel and facts, the lowest speed of each case."""
    path, choices, speeds = kernels_path(device), dict[str, dict[str, str]](), dict[str, float]()
    try:
        entries = read(path) if path else []
    except (OSError, ValueError) as error:
        warn_of(error, "run `python -m opfuse_triton gpu` again")
        return {}, {}
    here = setting(device)
    for entry in entries:
        if entry["setting"] != here or not _is_installed(*entry["package"]):
            continue
        if case := entry.get("case"):
            speeds[case] = min(entry["speed"], speeds.get(case, math.inf))
        else:
            of_kernel = choices.setdefault(entry["kernel"], {})
            of_kernel[as_key(entry["facts"])] = as_key(entry["config"])
    return choices, speeds


@functools.cache
def _is_installed(package: str, version: str) -> bool:
    """Whether a package has this version; cases that belong to no package have no name either."""
    try:
        return not package or importlib.metadata.version(package) == version
    except importlib.metadata.PackageNotFoundError:
        return False


def read(path: Path) -> list[Entry]:
    """All entries of a file, whether they count here or not; none if there is no file.

    Raises:
        ValueError: It is not a table of configurations.
        OSError: It cannot be read.
    """
    if not path.is_file():
        return []
    try:
        if path.stat().st_size > LARGEST:
            raise ValueError(f"it has more than {LARGEST} bytes")
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise ValueError(f"format {content['format']!r} instead of {FORMAT}")
        entries: list[Entry] = content["entries"]
        for entry in entries:
            _check(entry)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        what = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"{path} is not a table of configurations that this opfuse_triton reads ({what}): "
            "delete it"
        ) from error
    return entries


def _check(entry: Entry) -> None:
    """Refuse what :func:`opfuse_triton.gpu.winners.write` cannot have written."""
    package, is_case = entry["package"], "case" in entry
    name, facts = (entry[key] for key in (("case", "shape") if is_case else ("kernel", "facts")))
    strings = [name, *package, *facts, *entry["setting"].values()]
    strings += () if is_case else facts.values()
    if len(package) != 2 or not all(isinstance(text, str) for text in strings):
        raise ValueError(f"{name!r} of {package!r} has facts or a setting that are no strings")
    if not is_case:
        Config(**entry["config"])
    elif not (isinstance(entry["speed"], float) and 0 < entry["speed"] < math.inf):
        raise ValueError(f"{name!r} of {package!r} has the speed {entry['speed']!r}")
