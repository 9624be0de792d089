"""Finds the installed plugins by their entry points; imports none."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from typing import Any

from . import hookspecs
from .records import PluginRecord, normalize

if sys.version_info >= (3, 12):
    import importlib.metadata as metadata
else:
    import importlib_metadata as metadata


def installed_plugins() -> list[PluginRecord]:
    """The plugins of all distributions, from the entry points of groups ``opfuse.v*``.

    A distribution whose metadata cannot be read becomes a plugin that is ``broken``: a warning
    says so when plugins are needed, unless it is blocked.
    """
    found: list[PluginRecord] = []
    seen: set[str] = set()
    for dist in metadata.distributions():
        name, version = str(getattr(dist, "_path", "unknown")).rpartition(os.sep)[2], "unknown"
        try:
            if "opfuse." not in (dist.read_text("entry_points.txt") or ""):
                continue
            name, version = dist.metadata["Name"] or name, dist.version or version
            if normalize(name) not in seen:  # otherwise an earlier entry of sys.path shadows it
                seen.add(normalize(name))
                found += _plugins_of(dist, name, version)
        except Exception as error:
            found.append(PluginRecord(name, name, version, broken=error))
    return found


def _plugins_of(dist: Any, name: str, version: str) -> Iterator[PluginRecord]:
    """The plugins of one distribution: one for each module that its entry points name."""
    known: dict[tuple[str, str], PluginRecord] = {}
    for ep in sorted(ep for ep in dist.entry_points if re.fullmatch(r"opfuse\.v\d+", ep.group)):
        if (ep.group, ep.value) in known:
            known[ep.group, ep.value].aliases += (ep.name,)
            continue
        record = PluginRecord(ep.name, name, version, ep.group, ep.load, module=ep.module)
        known[ep.group, ep.value] = record
        if ep.group != hookspecs.GROUP:
            record.state = "incompatible"
            record.error = f"written for {ep.group}, this opfuse speaks {hookspecs.GROUP}"
    yield from known.values()
