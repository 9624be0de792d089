"""What a run's file says besides the numbers: the machine, versions, the state of the checkout."""

from __future__ import annotations

import importlib.metadata
import os
import pathlib
import platform
import subprocess
import time
from typing import Any

import torch

import opfuse

SCHEMA = 2
ROOT = pathlib.Path(__file__).parents[1]
TUNED = {"MALLOC_MMAP_THRESHOLD_": str(1 << 32), "MALLOC_TRIM_THRESHOLD_": str(1 << 33)}
"""With these glibc keeps large blocks; half the cost of a large tensor on a CPU is page faults."""
PEERS = ("liger-kernel", "torchao", "transformer-engine", "transformers")
QUERY = "clocks.sm,clocks.mem,power.draw,temperature.gpu,mig.mode.current"


def _run(*command: str) -> str:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, cwd=ROOT, timeout=20
        ).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def begin_state() -> subprocess.Popen[str] | None:
    """Ask for clocks, power and temperature, which are read and never set; None: nobody knows."""
    command = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader"]
    try:
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
    except OSError:
        return None


def ended_state(asked: subprocess.Popen[str] | None) -> dict[str, str]:
    """What :func:`begin_state` asked for; it was read some milliseconds after that."""
    if asked is None:
        return {}
    try:
        line = asked.communicate(timeout=20)[0].partition("\n")[0]
    except subprocess.TimeoutExpired:
        asked.kill()
        return {}
    return (
        dict(zip(QUERY.split(","), map(str.strip, line.split(",")), strict=False)) if line else {}
    )


def gpu_state() -> dict[str, str]:
    """Clocks, power and temperature now."""
    return ended_state(begin_state())


def load() -> float | None:
    """How many programs want a core; None where the system does not say."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def _cpu() -> str:
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(
            line.partition(":")[2].strip() for line in lines if line.startswith("model name")
        )
    except (OSError, StopIteration):
        return platform.processor()


def about(suite: str, device: torch.device) -> dict[str, Any]:
    """Everything but the numbers."""
    host = {"cpu": _cpu(), "cores": os.cpu_count(), "threads": torch.get_num_threads()}
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        host["ram"] = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    host["allocator"] = "tuned" if TUNED.items() <= os.environ.items() else "default"
    host["load"] = load()
    versions: dict[str, Any] = {"python": platform.python_version(), "torch": torch.__version__}
    versions |= {
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "opfuse": opfuse.__version__,
    }
    versions["triton"] = _version("triton")
    versions["plugins"] = {row["distribution"]: row["version"] for row in opfuse.plugins.listing()}
    versions["peers"] = {name: _version(name) for name in PEERS}
    made = {
        "schema": SCHEMA,
        "suite": suite,
        "git_sha": _run("git", "rev-parse", "HEAD"),
        "host": host,
        "gpu": None,
    }
    changed = bool(_run("git", "status", "--porcelain", "--untracked-files=no"))
    made |= {"dirty": changed if made["git_sha"] else None, "versions": versions}
    made["time"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        made["gpu"] = {
            "name": found.name,
            "sms": found.multi_processor_count,
            "l2": found.L2_cache_size,
        }
        made["gpu"] |= {
            "mem": found.total_memory,
            "capability": [found.major, found.minor],
            "before": gpu_state(),
        }
        drivers = _run("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        made["gpu"] |= {"driver": drivers.partition("\n")[0], "runtime": torch.version.cuda}
    return made
