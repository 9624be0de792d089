"""Writing tuning tables; :mod:`opfuse.core.tuning_table` reads them."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import filelock

from ..core.tuning_table import FORMAT, read_rows


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
