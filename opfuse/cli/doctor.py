"""``opfuse doctor``: installed packages, devices, tuning tables, and the recipes that run here."""

from __future__ import annotations

import platform
from typing import Any

import torch

from .. import __version__
from ..core.environment import device_name
from ..core.plugins import listing, manager
from ..report.lines import wrap
from ..tuning.table import installed, kernels_path, path_for, table_for


def examine() -> dict[str, Any]:
    """Look at versions, devices, plugins, tuning tables and recipes; JSON-able.

    Nothing is measured and nothing is downloaded. Plugins in use are loaded.
    """
    devices = [torch.device("cpu")]
    if torch.cuda.is_available():
        devices += [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    rows = listing()
    return {
        "versions": {
            "opfuse": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            **{name: version for name, version in installed().items() if name != "opfuse"},
        },
        "plugins": {row["name"]: row["state"] for row in rows},
        "errors": {row["name"]: row["error"] for row in rows if row["state"] == "failed"},
        "devices": [_device(device) for device in devices],
    }


def _device(device: torch.device) -> dict[str, Any]:
    """The facts of one device."""
    path, table = path_for(device), table_for(device)
    name = device_name(device.type, device.index)
    kernels = kernels_path(name)
    supported = {name: cls.support(device) for name, cls in sorted(manager.recipes().items())}
    return {
        "device": str(device),
        "name": name,
        "threads": torch.get_num_threads() if device.type == "cpu" else None,
        "table": str(path) if path else None,
        "entries": sum(map(len, table.entries.values())),
        "kernels": str(kernels) if kernels and kernels.is_file() else None,
        "recipes": {name: {"runs": how, "why": why} for name, (how, why) in supported.items()},
    }


def as_text(found: dict[str, Any]) -> str:
    """The result of :func:`examine`, as lines."""
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    lines = wrap(versions, "", "  ")
    states = [f"{name} ({state})" for name, state in found["plugins"].items()]
    lines += wrap(f"plugins: {', '.join(states) or 'none is installed'}", "", "  ")
    for name, error in found["errors"].items():
        lines += wrap(f"{name}: {' '.join(error.split())}", "  ", "    ")
    for device in found["devices"]:
        threads = f", {device['threads']} threads" if device["threads"] else ""
        lines += ["", f"{device['device']}: {device['name']}{threads}"]
        table = f"{device['entries']} entries that count here" if device["entries"] else "no entry"
        where = f", in {device['table']}" if device["table"] else ""
        lines += wrap(f"tuning: {table}{where}", "  ", "    ")
        if device["kernels"]:
            lines += wrap(f"configurations of kernels: {device['kernels']}", "  ", "    ")
        if not device["recipes"]:
            lines.append("  recipes: no plugin in use offers one")
        width = max(map(len, device["recipes"]), default=0)
        for name, how in device["recipes"].items():
            told = f"{name:{width}}  {how['runs']}" + (f": {how['why']}" if how["why"] else "")
            lines += wrap(told, "  ", " " * (width + 4))
    return "\n".join(lines)
