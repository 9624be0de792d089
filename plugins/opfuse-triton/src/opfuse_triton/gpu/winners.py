"""The fastest configurations, and speeds of cases, as entries of a table, and writing them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import filelock

from opfuse.tuning.job import check_writable, replace

from ..config_tables import FORMAT, Entry, as_key, as_text, read, setting
from ..recorded import GROUP


def entry(
    plugin: str, device: str, kernel: Any, facts: Mapping[str, Any], config: Mapping[str, Any]
) -> Entry:
    """The entry of a configuration.

    Args:
        plugin: Name of the plugin, or ``module:object``, cases of no package.
        device: Name of the GPU.
        kernel: The kernel.
        facts: What it was asked with for a configuration.
        config: The fastest.
    """
    key = _of(plugin, device) | {"kernel": kernel.full_name}
    return {**key, "facts": as_text(facts), "config": dict(config)}


def speed_entry(
    plugin: str, device: str, case: str, shape: Mapping[str, int], speed: float
) -> Entry:
    """The entry of a case.

    Args:
        plugin: As for :func:`entry`.
        device: As for :func:`entry`.
        case: Name of the case.
        shape: One of its real shapes.
        speed: With the fastest configuration, relative to the separate ops (1.0).
    """
    key = _of(plugin, device) | {"case": f"{plugin}: {case}"}
    return {**key, "shape": dict(shape), "speed": speed}


def _of(plugin: str, device: str) -> Entry:
    """What entries of a plugin on a device have in common."""
    found = [one.dist for one in entry_points(group=GROUP, name=plugin) if one.dist]
    package = [found[0].name, found[0].version] if found else ["", ""]
    return {"setting": setting(device), "package": package}


def write(path: Path, entries: Iterable[Entry]) -> None:
    """Put entries into a file, in place of those of the same setting, package and what they are of.

    Of two new ones the first counts. Entries of other versions of the same packages, in the same
    setting, go.

    Raises:
        ValueError: The file is there, and is not a table of configurations.
        OSError: It cannot be written.
    """
    new: dict[str, Entry] = {}
    for one in entries:
        new.setdefault(_identity(one), one)
    versions = {as_key([one["setting"], one["package"]]) for one in new.values()}
    packages = {as_key([one["setting"], one["package"][0]]) for one in new.values()}
    check_writable(path)
    with filelock.FileLock(f"{path}.lock"):
        kept = {
            _identity(one): one
            for one in read(path)
            if as_key([one["setting"], one["package"][0]]) not in packages
            or as_key([one["setting"], one["package"]]) in versions
        }
        kept |= new
        replace(path, {"format": FORMAT, "entries": [kept[key] for key in sorted(kept)]})


def _identity(one: Entry) -> str:
    return as_key({name: one[name] for name in one if name not in ("config", "speed")})
