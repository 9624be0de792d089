"""Whether ``opfuse tune`` chooses the same each time: a model, tuned several times.

python benchmarks/retuned.py --models llama,bert --dtypes bf16 --tunings 5 --out retuned.json

Each tuning is a process of its own, with a table of its own. Its choices are, under
``prefer="speed"`` and under ``"memory"``, for each entry of the table whether that is used, and
what runs in the model: the fused steps, and the converted modules that run their own forward. Two
tunings agree in the share of entries that both use, or both refuse. Then the step of the model is
timed in rounds with eager, and its bytes are counted, as ``python -m benchmarks --suite models``
does. ``--judge FILE`` prints the tables of a result again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
PREFERS = ("speed", "memory")


def main() -> None:
    """Tune, each time in a process of its own; or be one of these."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="llama,bert")
    parser.add_argument("--dtypes", default="bf16")
    parser.add_argument("--tunings", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=pathlib.Path, help="a JSON file for the result")
    parser.add_argument("--judge", type=pathlib.Path, help="a result to print again")
    parser.add_argument("--part", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        print(json.dumps(tuned(options)))
        return
    if options.judge:
        for row in json.loads(options.judge.read_text(encoding="utf-8"))["rows"]:
            print(told(row))
        return
    import torch

    from benchmarks.record import about

    result = about("retuned", torch.device("cpu")) | {"threads": options.threads, "rows": []}
    for model, dtype in itertools.product(options.models.split(","), options.dtypes.split(",")):
        tunings = []
        for _ in range(options.tunings):
            with tempfile.TemporaryDirectory() as folder:
                command = [sys.executable, __file__, "--part", "--models", model]
                command += ["--dtypes", dtype, "--threads", str(options.threads)]
                environ = os.environ | {"OPFUSE_TUNING": folder}
                done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, check=True)
                tunings.append(json.loads(done.stdout.splitlines()[-1]))
        result["rows"].append({"model": model, "dtype": dtype, "tunings": tunings})
        print(told(result["rows"][-1]), flush=True)
        if options.out:
            options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def tuned(options: argparse.Namespace) -> dict[str, Any]:
    """What one process finds."""
    import torch

    import opfuse
    from benchmarks.models import Ready, prepared
    from opfuse.tuning import timing

    model, inputs, cast = prepared(options)
    ways = {way: Ready(way, model, inputs, cast) for way in ("eager", "converted", "memory")}
    with cast:
        report = opfuse.tune(lambda: ways["converted"].model(**inputs).loss)
    ways = {way: Ready(way, model, inputs, cast) for way in ways}
    rounds = timing.in_rounds([way.step for way in ways.values()], torch.device("cpu"))
    found: dict[str, Any] = {"entries": dict(entries(report))}
    for prefer, way, took in zip(PREFERS, ("converted", "memory"), rounds[1:], strict=True):
        kept = ways[way].kept / ways["eager"].kept
        with opfuse.options(prefer=prefer), cast:
            runs = sorted(running(opfuse.explain(ways[way].model, **inputs).to_dict()))
        found[prefer] = {"speed": took.speed, "noise": took.noise, "kept": kept, "runs": runs}
    return found


def entries(report: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """What was measured, and whether it is used."""
    seen: dict[str, int] = {}
    for result in report.results:
        m, name = result.found, f"{result.fusion} {result.passes} {'+'.join(result.basic_ops)}"
        seen[name] = seen.get(name, 0) + 1
        trades = result.passes == "whole" or 'prefer="memory"' in result.refusal
        rows = {"times": m.speed, "noise": m.noise, "us": 1e6 * m.seconds, "saved": m.saved_bytes}
        rows["configuration"] = m.configuration
        for prefer in PREFERS:
            rows[prefer] = not m.refusal(trades_time=trades, prefer=prefer)
        yield f"{name} #{seen[name]}", rows


def running(explained: dict[str, Any]) -> Iterator[str]:
    """What is fused in a model, and what runs its own forward."""
    for name in ("forward", "backward"):
        for step in explained[name]:
            if step["fusion"]:
                where = f"{step['path']} {step['call']} {name}"
                yield f"{where}: {step['fusion']} of {'+'.join(step['basic_ops'])}"
    for row in explained["own_forward"]:
        yield f"{row['path']} runs its own forward"


def told(row: dict[str, Any]) -> str:
    """The choices of all tunings of a model, and how far they agree."""
    tunings, lines = row["tunings"], [f"{row['model']} {row['dtype']}"]
    for prefer in PREFERS:
        votes = [{name: e[prefer] for name, e in t["entries"].items()} for t in tunings]
        shares = [agreement(a, b) for a, b in itertools.combinations(votes, 2)]
        lines.append(
            f"  {prefer}: two tunings agree in {min(shares):.1%} of {len(votes[0])} entries or "
            f"more, {sum(shares) / len(shares):.1%} on average"
        )
        for each in tunings:
            of = each[prefer]
            lines.append(f"    {of['speed']:.3f}x +-{of['noise']:.3f}, bytes {of['kept']:.3f}x")
        for name in sorted({name for each in votes for name in each}):
            if len({each.get(name) for each in votes}) > 1:
                of = [each["entries"].get(name) for each in tunings]
                each = ", ".join(
                    f"{e['times']:.3f}+-{e['noise']:.3f} {'used' if e[prefer] else 'refused'}"
                    for e in filter(None, of)
                )
                lines.append(f"    differs: {name}, saves {of[0] and of[0]['saved']}: {each}")
        everywhere = set.intersection(*[set(each[prefer]["runs"]) for each in tunings])
        counts: dict[str, int] = {}
        for name in itertools.chain(*[each[prefer]["runs"] for each in tunings]):
            counts[name] = counts.get(name, 0) + 1
        lines.append(f"    runs in every tuning: {len(everywhere)}; in some: ")
        lines += [
            f"      {n} of {len(tunings)}: {k}" for k, n in counts.items() if n < len(tunings)
        ]
    return "\n".join(lines)


def agreement(one: dict[str, bool], other: dict[str, bool]) -> float:
    """The share of entries in which two tunings agree."""
    names = one.keys() | other.keys()
    return sum(one.get(name) == other.get(name) for name in names) / len(names)


if __name__ == "__main__":
    main()
