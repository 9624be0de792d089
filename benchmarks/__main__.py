"""Measure opfuse and its peers, compare two runs, or report on a folder of them.

python -m benchmarks --suite cpu --out run.json
python -m benchmarks compare before.json after.json
python -m benchmarks report benchmarks/results
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from typing import Any

import torch

from .measure import ceilings
from .providers import PROVIDERS
from .record import about, gpu_state
from .run import Harness, Row, select, together


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run a suite's cases until they or the budget are spent."""
    from tqdm import tqdm

    device = torch.device("cpu" if options.suite == "cpu" else "cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit(f"the suite {options.suite} needs a CUDA GPU, and there is none; --suite cpu runs anywhere")
    if device.type == "cpu":
        torch.set_num_threads(options.threads)
    start = time.monotonic()
    cases = select(options.suite, options.ids.split(",") if options.ids else None)
    result = about(options.suite, device) | {"command": " ".join(["python -m benchmarks", *sys.argv[1:]])}
    stream = torch.cuda.stream(torch.cuda.Stream()) if device.type == "cuda" else contextlib.nullcontext()
    with stream:  # a CUDA graph cannot be captured on the default one
        result["ceilings"] = {} if options.no_ceilings else ceilings(device)
        providers = options.providers.split(",") if options.providers else None
        harness = Harness(device, result["ceilings"], providers=providers, rounds=options.rounds)
        result |= {"cases": [], "ratios": [], "left_out": []}
        for case in (bar := tqdm(cases, unit="case", file=sys.stderr)):
            if options.budget and time.monotonic() - start > options.budget:
                result["left_out"].append(f"{case.id} {case.name}")
                continue
            bar.set_description(case.id)
            rows, ratios = harness.run(case)
            result["cases"] += rows
            result["ratios"] += ratios
    result["ratios"] += together(result["ratios"])
    if device.type == "cuda":
        result["gpu"]["after"] = gpu_state()
    result["host"]["load_after"] = about(options.suite, device)["host"]["load"]
    return result | {"seconds": round(time.monotonic() - start, 1)}


def verdict(row: Row, slack: float = 0.0) -> str:
    """met, missed, or why there is no number."""
    if row["pass"] is None:
        return row["reason"]
    if row["value"] is None:
        return f"MISSED: {row['reason']}"
    slack_goal = row["goal"] * (1 + slack if row["cost"] else 1 - slack)
    met = row["pass"] or (slack and (row["value"] <= slack_goal if row["cost"] else row["value"] >= slack_goal))
    return "met" if met else "MISSED"


def show(result: dict[str, Any], slack: float) -> list[str]:
    """A short table: a line for each ratio."""
    lines = []
    for row in result["ratios"]:
        against = f"{row['num']} / {row['den']}" if row["den"] else row["num"]
        value = "" if row["value"] is None else f"{row['value']:8.3f}"
        noise = f"±{row['noise']:.2f}" if row.get("noise") else ""
        goal = f"{'<=' if row['cost'] else '>='}{row['goal']:.2f}"
        lines.append(
            f"{row['id']:4}{row['case'][:66]:67}{against:24}{value:9}{noise:7}{goal:8}{verdict(row, slack)[:60]}"
        )
    if result["left_out"]:
        lines.append(f"the budget left out {len(result['left_out'])} cases")
    return lines


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] in (["compare"], ["report"], ["page"]):
        from . import report

        return getattr(report, arguments[0])(*arguments[1:])
    parser = argparse.ArgumentParser("benchmarks", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--suite", choices=("cpu", "gpu-quick", "gpu-full"), required=True)
    parser.add_argument("--ids", help="such as M1,G2; default: all of the suite")
    parser.add_argument("--providers", help=f"of {','.join(PROVIDERS)}; default: what each case needs")
    parser.add_argument("--out", metavar="FILE", help="write the run there, as JSON")
    parser.add_argument("--budget", type=float, default=0, metavar="SECONDS", help="start no case after that")
    parser.add_argument("--rounds", type=int, default=0, help="turns of each provider")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of the suite cpu")
    parser.add_argument("--no-ceilings", action="store_true", help="do not measure what the machine reaches")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a goal is missed")
    parser.add_argument("--slack", type=float, default=0.0, help="a goal missed by this share counts as met")
    options = parser.parse_args(arguments)
    result = measure(options)
    if options.out:
        with open(options.out, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=1)
    print("\n".join(show(result, options.slack)))
    return int(options.check and any(verdict(row, options.slack).startswith("MISSED") for row in result["ratios"]))


if __name__ == "__main__":
    sys.exit(main())
