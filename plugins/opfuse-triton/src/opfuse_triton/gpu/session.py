"""Divides a budget among processes, one for each plugin, and outlives those that hang or crash."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import triton

from ..machine import is_interpreting
from ..recorded import case_lists, load_cases
from ..targets import current_target
from .ahead import compile_ahead
from .measuring import EVERYTHING, Wanted, parts

SILENCE = 120.0
"""Seconds without a line after which a process counts as hanging: compiling takes less."""

START, SPARE, LEAST = 30.0, 10.0, 60.0
"""Seconds that are too few to begin another process, those that one has to finish a step, and the
smallest share of a plugin."""

COMPILING = 0.4
"""The share of the budget in which kernels may be compiled, before anything is timed."""

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
    wanted: Wanted = EVERYTHING,
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
        wanted: What is measured.
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
    order = sorted(lists, key=lambda name: (min(case.turn for case in cases[name]), name))
    report: Row = {"host": host(), "budget": budget, "rows": [], "ended": [], "seconds": 0.0}
    report["plugins"] = dict.fromkeys(order, 0.0)
    report["left"] = {
        name: [part.name for part in parts(of_plugin, not is_interpreting(), wanted)]
        for name, of_plugin in cases.items()
    }
    order = [name for name in order if report["left"][name]]
    if not is_interpreting():
        target = current_target(torch.cuda.current_device())
        compile_ahead(lists.values(), target, budget * COMPILING, wanted)
        report["compiled"] = now() - began
    workers = _Workers(report, keep, begin, now, wait, works or device_works, silence)
    # first each plugin has its share of the time, then what the others left
    for number, name in enumerate(order * 2):
        started = now()
        left = budget - (started - began)
        share = left / (len(order) - number) if number < len(order) else left
        if report["left"][name] and name not in workers.given_up:
            workers.run(name, lists[name], started + min(left, max(share, LEAST)))
        report["plugins"][name] += now() - started
        report["seconds"] = now() - began
        keep(report)
    return report


@dataclass
class _Workers:
    """Starts and follows processes, and adds what they find to a report; see :func:`session`."""

    report: Row
    keep: Callable[[Row], None]
    begin: Spawn
    now: Callable[[], float]
    wait: Callable[[float], None]
    works: Callable[[], bool]
    silence: float
    given_up: set[str] = field(default_factory=set)

    def run(self, name: str, where: str, until: float) -> None:
        """Measure parts of a plugin until there is none left, or no time."""
        report, left = self.report, self.report["left"]
        with tempfile.TemporaryDirectory() as folder:
            for number in itertools.count():
                if (seconds := until - self.now()) <= START:
                    return
                out = pathlib.Path(folder, f"{number}.jsonl")
                out.touch()
                arguments = [name, where, str(out), str(seconds - SPARE), *left[name]]
                process = self.begin(arguments, out.with_suffix(".log"))
                part, how = self.follow(process, out, until)
                over = {row["part"] for row in report["rows"] if row["plugin"] == name}
                if how not in ("", OUT_OF_TIME):
                    log = out.with_suffix(".log").read_text(errors="replace").strip()
                    ended = {"plugin": name, "part": part, "how": how}
                    report["ended"].append(ended | {"said": log.splitlines()[-3:]})
                    over.add(part)
                left[name] = [part for part in left[name] if part not in over]
                if how in ("", OUT_OF_TIME):
                    return
                if not part or not self.works():
                    self.given_up.add(name)
                    return

    def follow(self, process: Any, out: pathlib.Path, until: float) -> tuple[str, str]:
        """Read the lines of a process until it ends; return the part that ended it, and how."""
        part, read, last = "", 0, self.now()
        while True:
            ended = process.poll() is not None
            lines = out.read_text(encoding="utf-8").split("\n")[:-1]
            for line in lines[read:]:
                row = json.loads(line)
                part, last = row.get("begins", ""), self.now()
                if "limits" in row:
                    self.report["limits"] = row["limits"]
                elif not part:
                    self.report["rows"].append(row)
                    self.keep(self.report)
            read = len(lines)
            if ended:
                return part, f"exit status {process.returncode}" if process.returncode else ""
            if self.now() - last > self.silence or self.now() > until:
                process.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):  # a driver may hold it
                    process.wait(timeout=SPARE)
                late = self.now() > until
                return part, OUT_OF_TIME if late else f"nothing for {self.silence:.0f} s"
            self.wait(0.2)


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
