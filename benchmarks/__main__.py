"""Measure opfuse and its peers, compare two runs, or write the page of the committed ones.

python -m benchmarks --suite cpu --out run.json
python -m benchmarks --suite models --out models.json
python -m benchmarks compare before.json after.json
python -m benchmarks page
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import re
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from .cases import Case
from .measure import ceilings
from .providers import PROVIDERS
from .record import TUNED, about, gpu_state, load
from .run import Harness, Row, near, select, together

COMMANDS = {"compare": ("BEFORE.json", "AFTER.json"), "page": ()}


def measure(options: argparse.Namespace, cases: list[Case]) -> dict[str, Any]:
    """Run cases until they or the budget are spent."""
    from tqdm import tqdm

    device = torch.device("cpu" if options.suite == "cpu" else "cuda")
    if device.type == "cpu":
        torch.set_num_threads(options.threads)
    start = time.monotonic()
    deadline = start + options.budget
    command = re.sub(r" --out[ =]\S+", "", " ".join(["python -m benchmarks", *sys.argv[1:]]))
    result = about(options.suite, device) | {"command": command}
    stream = (
        torch.cuda.stream(torch.cuda.Stream())
        if device.type == "cuda"
        else contextlib.nullcontext()
    )
    with stream:  # a CUDA graph cannot be captured on the default one
        result["ceilings"] = {} if options.no_ceilings else ceilings(device)
        harness = Harness(
            device,
            result["ceilings"],
            providers=options.providers,
            rounds=options.rounds,
            deadline=deadline,
        )
        result |= {"cases": [], "ratios": [], "left_out": [], "interrupted": False}
        for case in (bar := tqdm(cases, unit="case", file=sys.stderr)):
            if time.monotonic() > deadline:
                result["left_out"].append(f"{case.id} {case.name}")
                continue
            bar.set_description(case.id)
            try:
                rows, ratios = harness.run(case)
            except KeyboardInterrupt:  # keep what there is
                deadline, result["interrupted"] = 0.0, True
                result["left_out"].append(f"{case.id} {case.name}")
                continue
            result["cases"] += rows
            result["ratios"] += ratios
            save(result, options.out)  # what follows may end the process
    result["ratios"] += together(result["ratios"])
    if device.type == "cuda":
        result["gpu"]["after"] = gpu_state()
    result["host"]["load_after"] = load()
    return result | {"seconds": round(time.monotonic() - start, 1)}


def save(result: dict[str, Any], path: pathlib.Path | None) -> None:
    """Write the run's file, if one was asked for."""
    if path:
        path.write_text(json.dumps(result, indent=1), encoding="utf-8")


def verdict(row: Row, slack: float = 0.0) -> str:
    """met, missed, or why there is no number."""
    if row["pass"] is None:
        return row["reason"]
    if row["value"] is None:
        return f"MISSED: {row['reason']}"
    slack = 0.0 if row["exact"] else slack
    slack_goal = row["goal"] * (1 + slack if row["cost"] else 1 - slack)
    met = row["pass"] or (
        slack and (row["value"] <= slack_goal if row["cost"] else row["value"] >= slack_goal)
    )
    return "met" if met else "MISSED"


def show(result: dict[str, Any], slack: float) -> list[str]:
    """A short table: a line for each ratio, with ~ before one that noise may have made."""
    lines = []
    for row in result["ratios"]:
        against = f"{row['num']} / {row['den']}"
        value = (
            ""
            if row["value"] is None
            else f"{'~' if row.get('beyond_noise') is False and row['noise'] else ' '}"
            f"{row['value']:.3f}"
        )
        noise = f"±{row['noise']:.1%}" if row["noise"] else ""
        goal = f"{'=' if row['exact'] else '<=' if row['cost'] else '>='}{row['goal']:.2f}"
        lines.append(
            f"{row['id']:4}{row['case']:84}{against:24}{value:9}{noise:8}{goal:8}"
            f"{verdict(row, slack)[:60]}" + ", within the noise" * near(row)
        )
    if result["left_out"]:
        lines.append(
            f"left out {len(result['left_out'])} cases: "
            "the budget is spent, or the run was interrupted"
        )
    return lines


def positive(kind: type) -> Callable[[str], Any]:
    """A reader of numbers above zero."""

    def read(text: str) -> Any:
        with contextlib.suppress(ValueError):
            if (number := kind(text)) > 0:
                return number
        raise argparse.ArgumentTypeError(
            f"expected {'a' if kind is float else 'a whole'} number above 0, got {text}"
        )

    return read


def asked(arguments: list[str]) -> tuple[argparse.Namespace, list[Case]]:
    """What the arguments mean, and their cases; ends the program where they mean nothing."""
    form = {
        "description": __doc__,
        "formatter_class": argparse.RawTextHelpFormatter,
        "allow_abbrev": False,
    }
    parser = argparse.ArgumentParser("benchmarks", **form)
    add = parser.add_argument
    add("--suite", choices=("cpu", "gpu-quick", "gpu-full"), required=True)
    add("--ids", type=lambda text: text.split(","), help="such as M1,G2; default: all of the suite")
    add(
        "--providers",
        type=lambda text: text.split(","),
        help=f"of {','.join(PROVIDERS)}; default: what a case needs",
    )
    add("--out", type=pathlib.Path, metavar="FILE", help="write the run there, as JSON")
    add(
        "--budget",
        type=positive(float),
        default=float("inf"),
        metavar="SECONDS",
        help="start nothing after that",
    )
    add("--rounds", type=positive(int), default=0, help="turns of each provider")
    add("--threads", type=positive(int), default=1, help="CPU threads of the suite cpu")
    add("--no-ceilings", action="store_true", help="do not measure what the machine reaches")
    add(
        "--check", action="store_true", help="exit with 1 if a goal is missed, or none was measured"
    )
    add("--slack", type=float, default=0.0, help="a goal missed by this share counts as met")
    add(
        "--allocators",
        action="store_true",
        help="then again, into FILE-tuned, with a glibc that keeps large blocks",
    )
    options = parser.parse_args(arguments)
    if strange := set(options.providers or ()) - set(PROVIDERS):
        parser.error(
            f"--providers: expected some of {', '.join(PROVIDERS)}; "
            f"got {', '.join(sorted(strange))}"
        )
    if options.out and (options.out.is_dir() or not options.out.absolute().parent.is_dir()):
        parser.error(f"--out: expected a file in a folder that exists, got {options.out}")
    if options.suite != "cpu" and not torch.cuda.is_available():
        parser.error(
            f"the suite {options.suite} needs a CUDA GPU, and there is none; "
            "--suite cpu runs anywhere"
        )
    try:
        return options, select(options.suite, options.ids)
    except ValueError as reason:
        parser.error(f"--ids: {reason}")


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments and (names := COMMANDS.get(arguments[0])) is not None:
        from . import report

        if len(arguments) != 1 + len(names) or set(arguments) & {"-h", "--help"}:
            raise SystemExit(" ".join(["usage: python -m benchmarks", arguments[0], *names]))
        return getattr(report, arguments[0])(*arguments[1:])
    if arguments[:2] == ["--suite", "models"]:
        from . import models

        models.main(arguments[2:])
        return 0
    options, cases = asked(arguments)
    result = measure(options, cases)
    save(result, options.out)
    print("\n".join(show(result, options.slack)))
    if result["interrupted"]:
        return 130  # as a shell says it
    missed = any(verdict(row, options.slack).startswith("MISSED") for row in result["ratios"])
    if options.check and all(row["pass"] is None for row in result["ratios"]):
        print("no goal was checked")
        missed = True
    if options.allocators:
        again = [argument for argument in arguments if argument != "--allocators"]
        again += (
            ["--out", str(options.out.with_stem(f"{options.out.stem}-tuned"))]
            if options.out
            else []
        )
        print("with the tuned allocator:", flush=True)
        missed |= bool(
            subprocess.run(
                [sys.executable, "-m", "benchmarks", *again], env=os.environ | TUNED
            ).returncode
        )
    return int(options.check and missed)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ModuleNotFoundError as missing:
        if missing.name not in ("tqdm", "matplotlib"):
            raise
        sys.exit(f"{missing.name} is not installed; pip install --group bench")
