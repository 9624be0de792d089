"""What the plans of a process depend on, which locks and other processes compare."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..core.plugins import manager
from ..core.settings import current
from . import table as tables


def devices() -> list[torch.device]:
    """The devices of this process: the CPU, and the current GPU."""
    devices = [torch.device("cpu")]
    if torch.cuda.is_available():
        devices.append(torch.device("cuda", torch.cuda.current_device()))
    return devices


def causes() -> dict[str, Any]:
    """What plans depend on in a process, as JSON-able data; causes come before effects."""
    active = manager.active(current.selection)
    given = [pair for pair in current.options if pair[0] != "locked"]
    return {
        "torch": torch.__version__,
        "the plugins": {record.distribution: record.version for record in active},
        "the selection of plugins": current.selection,
        "the options": {name: repr(value) for name, value in given},
        "the tuning tables": {
            device.type: tables.table_for(device).digest or "none" for device in devices()
        },
    }


def first_difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """The first difference between the facts of two processes; ``""``: there is none."""
    for what, mine in [pair for pair in one.items() if pair[1] != other.get(pair[0])]:
        theirs = other.get(what)
        if isinstance(mine, dict) and isinstance(theirs, dict):
            key = min(key for key in {*mine, *theirs} if mine.get(key) != theirs.get(key))
            what, mine, theirs = f"{what}: {key}", mine.get(key, "none"), theirs.get(key, "none")
            return f"{what}: {' '.join(str(mine).split())} against {' '.join(str(theirs).split())}"
        return f"{what}: {mine!r} against {theirs!r}"
    return ""
