"""Everything that waits for a GPU, in the order of what it decides, in the minutes that there are.

python benchmarks/gpu_hour.py --minutes 14

Each part is a process with a limit of its own. It writes its file while it runs; when it ends, or
is ended, what it has written goes into ``gpu-hour.json``, and what a page can say of it into
``gpu-hour.md``, over what is there. A part for which too little time is left is skipped, and the
file says so. Where no command may last so long, ``--parts`` runs some, each time into a folder of
its own. Nothing is installed and nothing is fetched: opfuse, its plugins, torch, Triton and
transformers must be there. Without a GPU everything runs on the CPU, tiny and with interpreted
kernels, to try it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

ROOT = pathlib.Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from benchmarks import gpu_formulas, products, report, slices  # noqa: E402
from benchmarks.record import about  # noqa: E402
from opfuse.tuning.job import replace  # noqa: E402

Row = dict[str, Any]
SPARE = 15.0
"""Seconds between the limit that a part is told and the one at which its process is ended."""


class Part(NamedTuple):
    """Something to measure.

    Attributes:
        name: A word for files.
        limit: Seconds, at most.
        least: Seconds with which it is worth beginning.
        command: Of Python; ``{out}`` is its file, and ``{seconds}`` when it should end by itself.
        lines: What a page says of its file.
    """

    name: str
    limit: float
    least: float
    command: list[str]
    lines: Callable[[Row], Iterable[str]]


def parts() -> list[Part]:
    """All parts, the first of which matters most."""
    kernels = ["-m", "opfuse_triton", "gpu", "--report", "{out}", "--budget", "{seconds}", "--only"]
    behind = [
        word
        for name in report.behind_in(report.stored("h100-kernels"))
        for word in ("--case", name)
    ]
    step = [str(ROOT / "benchmarks" / "gpu_step.py"), "--kernels", "--limit", "{seconds}"]
    sliced = [str(ROOT / "benchmarks" / "slices.py"), "--out", "{out}"]
    formulas = [str(ROOT / "benchmarks" / "gpu_formulas.py"), "--out", "{out}"]
    fused = [str(ROOT / "benchmarks" / "products.py"), "--out", "{out}", "--limit", "{seconds}"]
    return [
        Part("odd-shapes", 210, 60 + SPARE, [*kernels, "odd"], judged_lines),
        Part("step", 240, 90, [*step, "--out", "{out}"], step_lines),
        Part("slices", 60, 30, sliced, lambda found: slices.lines(found["rows"])),
        Part("formulas", 90, 40, formulas, gpu_formulas.lines),
        Part("products", 90, 45, fused, products.lines),
        Part("behind", 600, 60 + SPARE, [*kernels, "real", *behind], kernel_lines),
    ]


def judged_lines(found: Row) -> list[str]:
    """How many shapes were right, and everything that was not."""
    wrong = [f"- WRONG: {row['part']}: {text}" for row in found["rows"] for text in row["wrong"]]
    ended = [f"- ended: {row['part']}: {row['how']}" for row in found["ended"]]
    left = sum(row.get("left", 0) for row in found["rows"]) + sum(map(len, found["left"].values()))
    more = [f"- no time for {left} shapes or cases"] * bool(left)
    host = found["host"]
    versions = f"{host['device']}, torch {host['torch']}, Triton {host['triton']}"
    return [f"- {versions}: {report.compared_in(found)}", *wrong, *ended, *more]


def kernel_lines(found: Row) -> list[str]:
    """The table of kernels; an interpreter has no limits."""
    limits = found.get("limits", (math.nan, math.nan))
    return [*report.on_gpu(found | {"limits": limits})["kernels"], "", *judged_lines(found)]


def step_lines(found: Row) -> list[str]:
    """The table of a training step, and what it launches."""
    cut = [f"- it was ended while it ran {found['now']}"] * bool(found["now"])
    return [*report.of_step(found), "", *report.launches_of(found), *cut]


class Running(subprocess.Popen[bytes]):
    """A part that runs, in a session of its own.

    Args:
        command: Of Python.
        log: Where what it prints goes.
    """

    def __init__(self, command: list[str], log: pathlib.Path) -> None:
        env = dict(os.environ)
        if "opfuse_triton" in command and not torch.cuda.is_available():
            env["TRITON_INTERPRET"] = "1"
        given = {"stderr": subprocess.STDOUT, "env": env, "cwd": ROOT, "start_new_session": True}
        with log.open("wb") as file:
            super().__init__([sys.executable, *command], stdout=file, **given)

    def end(self) -> None:
        """End it and everything that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # a driver may hold it
            self.wait(timeout=10)


Begin = Callable[[list[str], pathlib.Path], Any]


def run(
    part: Part,
    seconds: float,
    out: pathlib.Path,
    begin: Begin,
    now: Callable[[], float],
    wait: Callable[[float], None],
) -> Row:
    """Run a part; what it wrote counts, however it ended."""
    file, log = (out / f"gpu-hour.{part.name}.{kind}" for kind in ("json", "log"))
    file.unlink(missing_ok=True)
    words = {"{out}": str(file), "{seconds}": f"{seconds - SPARE:.0f}"}
    began = now()
    process = begin([words.get(word, word) for word in part.command], log)
    row: Row = {"name": part.name, "state": "done"}
    try:
        while process.poll() is None and now() - began < seconds:
            wait(0.5)
        if process.poll() is None:
            row["state"] = f"ended after {seconds:.0f} s"
        elif process.returncode:
            row["state"] = f"exit status {process.returncode}"
    finally:
        process.end()
    row |= {"seconds": now() - began, "result": None}
    if row["state"] != "done":
        row["said"] = log.read_text(errors="replace").splitlines()[-8:] if log.exists() else []
    with contextlib.suppress(OSError, ValueError):
        row["result"] = json.loads(file.read_text(encoding="utf-8"))
    return row


def page(parts: list[Part], rows: list[Row]) -> str:
    """What a page can say, part by part."""
    lines: list[str] = []
    for part, row in zip(parts, rows, strict=False):
        lines += [f"## {part.name}: {row['state']}", ""]
        if row.get("result"):
            try:
                lines += part.lines(row["result"])
            except Exception as error:  # the numbers are in the file
                lines.append(f"- no lines: {type(error).__name__}: {error}")
        lines.append("")
    return "\n".join(lines)


def hour(
    parts: list[Part],
    seconds: float,
    out: pathlib.Path,
    *,
    begin: Begin = Running,
    now: Callable[[], float] = time.monotonic,
    wait: Callable[[float], None] = time.sleep,
) -> Row:
    """Run the parts that the time holds, and write down each when it is over.

    Args:
        parts: What to measure, in order.
        seconds: For all of them.
        out: The folder of the files.
        begin: Starts a process.
        now: The clock.
        wait: Sleeps.
    """
    until = now() + seconds
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    result = about("gpu-hour", device) | {"seconds": seconds, "parts": []}
    out = out.resolve()  # a part runs elsewhere
    out.mkdir(parents=True, exist_ok=True)
    for part in parts:
        left = min(part.limit, until - now())
        if left < part.least:
            row: Row = {"name": part.name, "state": "skipped"}
            row["why"] = f"{left:.0f} s were left, and it needs {part.least:.0f} s"
        else:
            row = run(part, left, out, begin, now, wait)
        result["parts"].append(row)
        replace(out / "gpu-hour.json", result)
        (out / "gpu-hour.md").write_text(page(parts, result["parts"]), encoding="utf-8")
        for kind in ("json", "log"):  # it is in the result now
            (out / f"gpu-hour.{part.name}.{kind}").unlink(missing_ok=True)
        why = row.get("why") or f"{row['seconds']:.0f} s"
        print(f"{part.name}: {row['state']}, {why}", flush=True)
    return result


def main(arguments: list[str] | None = None) -> int:
    """Measure, and print what a page can say; 1: a part that was begun left nothing."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    known = parts()
    names = [part.name for part in known]
    parser.add_argument("--minutes", type=float, default=14.0, help="for everything")
    parser.add_argument("--parts", nargs="*", choices=names, default=names, help="only these")
    parser.add_argument("--out", type=pathlib.Path, default=report.RESULTS, metavar="FOLDER")
    asked = parser.parse_args(arguments)
    chosen = [part for part in known if part.name in asked.parts]
    result = hour(chosen, 60 * asked.minutes, asked.out)
    print((asked.out / "gpu-hour.md").read_text(encoding="utf-8"))
    return int(any("result" in row and not row["result"] for row in result["parts"]))


if __name__ == "__main__":
    sys.exit(main())
