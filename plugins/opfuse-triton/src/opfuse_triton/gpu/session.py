"""Divides a budget among processes, one for each plugin, and outlives those that hang or crash."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton

from ..machine import is_interpreting
from ..recorded import case_lists, load_cases
from .measuring import parts

SILENCE = 120.0
"""Seconds without a line after which a process counts as hanging: compiling takes less."""

START, SPARE = 30.0, 10.0
"""Seconds that are too few to begin another process, and those that one has to finish a step."""

OUT_OF_TIME = "out of time"
Row = dict[str, Any]
Spawn = Callable[[Sequence[str], pathlib.Path], "subprocess.Popen[bytes]"]


def spawn(arguments: Sequence[str], log: pathlib.Path) -> subprocess.Popen[bytes]:
    """Start a worker; what it prints goes into a file. No table changes the defaults there."""
    command = [sys.executable, "-m", "opfuse_triton.gpu.worker", *arguments]
    env = {**os.environ, "OPFUSE_TUNING": ""}
    with log.open("ab") as file:
        return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=env)


def session(
    plugin: str | None,
    budget: float,
    keep: Callable[[Row], None],
    *,
    begin: Spawn = spawn,
    now: Callable[[], float] = time.monotonic,
    wait: Callable[[float], None] = time.sleep,
    works: Callable[[], bool] | None = None,
    silence: float = SILENCE,
) -> Row:
    """Measure the cases of one plugin or of all.

    Args:
        plugin: As for :func:`opfuse_triton.checking.check`.
        budget: Seconds for everything.
        keep: Called with the report so far after each part.
        begin: Starts a worker.
        now: The clock.
        wait: Sleeps.
        works: Whether the device still computes, asked after a process died.
        silence: Seconds without a line after which a process is ended.

    Returns:
        The report: ``host``, ``rows`` (see :mod:`opfuse_triton.gpu.measuring`), ``ended`` (parts
        that ended their process, each with how), ``left`` (parts that there was no time for, by
        plugin), ``plugins`` (seconds for each), ``seconds``.

    Raises:
        ValueError: There is no such plugin.
    """
    began = now()
    lists = case_lists(plugin)
    cases = {name: load_cases(where) for name, where in lists.items()}
    turns = {name: min(case.turn for case in of_plugin) for name, of_plugin in cases.items()}
    report: Row = {"host": host(), "budget": budget, "rows": [], "ended": [], "plugins": {}}
    report["left"] = {
        name: [part for case in of_plugin for part, _ in parts(case, not is_interpreting())]
        for name, of_plugin in cases.items()
    }
    with tempfile.TemporaryDirectory() as folder:
        for name in sorted(lists, key=lambda name: (turns[name], name)):
            started = now()
            ended: list[str] = []
            while (left := budget - (now() - began)) > START:
                out = pathlib.Path(folder, f"{name.replace(':', '-')}-{len(ended)}.jsonl")
                out.touch()
                done = [row["part"] for row in report["rows"] if row["plugin"] == name]
                arguments = [name, lists[name], str(out), str(left - SPARE), *ended, *done]
                process = begin(arguments, out.with_suffix(".log"))
                part, how = _followed(process, out, report, keep, left, silence, now, wait)
                if how in ("", OUT_OF_TIME):
                    break
                log = out.with_suffix(".log").read_text(errors="replace").strip().splitlines()
                report["ended"].append({"part": part, "how": how, "said": log[-3:]})
                if not part or not (works or device_works)():
                    break
                ended.append(part)
            over = {row["part"] for row in report["rows"] if row["plugin"] == name}.union(ended)
            report["left"][name] = [part for part in report["left"][name] if part not in over]
            report["plugins"][name] = now() - started
            report["seconds"] = now() - began
            keep(report)
    return report


def _followed(
    process: Any, out: pathlib.Path, report: Row, keep: Any, left: float, silence: float,
    now: Callable[[], float], wait: Callable[[float], None],
) -> tuple[str, str]:  # fmt: skip
    """Read the lines of a process until it ends; return the part that ended it, and how."""
    part, read, started = "", 0, now()
    last = started
    while True:
        ended = process.poll() is not None
        lines = out.read_text(encoding="utf-8").split("\n")[:-1]
        for line in lines[read:]:
            row = json.loads(line)
            part, last = row.get("begins", ""), now()
            if "limits" in row:
                report["limits"] = row["limits"]
            elif not part:
                report["rows"].append(row)
                keep(report)
        read = len(lines)
        if ended:
            code = process.returncode
            return (part, f"exit status {code}") if code else ("", "")
        if now() - last > silence or now() - started > left:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # a driver may hold it
                process.wait(timeout=SPARE)
            return part, OUT_OF_TIME if now() - started > left else f"nothing for {silence:.0f} s"
        wait(0.2)


def device_works() -> bool:
    """Return whether the device computes, asked in a process of its own."""
    if is_interpreting():
        return True
    code = "import torch; assert torch.ones(8, device='cuda').sum().item() == 8"
    try:
        return not subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode
    except subprocess.TimeoutExpired:
        return False


def host() -> Row:
    """The device, and the versions that numbers depend on."""
    device = "interpreter" if is_interpreting() else torch.cuda.get_device_name()
    versions = {"torch": torch.__version__, "triton": triton.__version__}
    return {"device": device, "cuda": torch.version.cuda, "hip": torch.version.hip, **versions}
