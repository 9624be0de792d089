"""Is a chain with the linear plugin ever slower than the same ops one by one? On a CPU, by default with one thread.

Run ``python benchmarks/linear_cpu.py``. Each line is one chain, shape, dtype and pass; every ratio comes from
interleaved rounds and says how much faster than the separate ops (all plugins off) something is: the linear plugin,
the separate ops once more (the spread of the measurement itself), and plain ``torch.nn``. ``--medium`` adds
``torch.nn`` under ``torch.set_float32_matmul_precision("medium")``, for information. What is timed is CPU time, which
with one thread does not count the time that other programs get. With ``--check`` the exit status says whether the
plugin reaches 0.97x everywhere.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import opfuse
from opfuse import ops

GOAL = 0.97
SHAPES = [(16, 64, 256), (128, 256, 1024), (1024, 256, 1024), (1024, 1024, 4096)]  # tokens, width, hidden
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
Work = dict[str, tuple[str | None, str, Callable[[], Any]]]
PASSES = ("inference", "forward", "forward+backward")


class Residual(nn.Module):
    """Linear + residual add in torch.nn."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor, extra: Tensor) -> Tensor:
        """The sum."""
        return self.linear(x) + extra


def chains(
    tokens: int, width: int, hidden: int, dtype: torch.dtype
) -> Iterator[tuple[str, nn.Module, nn.Module | None, list[Tensor]]]:
    """The chains of one shape: name, in opfuse, in torch.nn, inputs."""
    torch.manual_seed(0)
    up, down = nn.Linear(width, hidden), nn.Linear(hidden, width)
    narrow, wide = torch.randn(tokens, width, dtype=dtype), torch.randn(tokens, hidden, dtype=dtype)
    mlp = opfuse.Sequential(ops.Linear(width, hidden), ops.GELU(), ops.Linear(hidden, width))
    plain = nn.Sequential(up, nn.GELU("tanh"), down)
    mlp.load_state_dict(plain.state_dict())
    yield "MLP", mlp.to(dtype), plain.to(dtype), [narrow]
    add = opfuse.Sequential(ops.Linear(hidden, width), ops.AddExtraInput())
    add[0].load_state_dict(down.state_dict())
    yield "Linear+add", add.to(dtype), Residual(down), [wide, narrow]
    scaled = opfuse.Sequential(ops.Linear(hidden, width, bias=False), ops.ConstantScale(0.5), ops.AddExtraInput())
    yield "Linear+scale+add", scaled.to(dtype), None, [wide, narrow]


def call(fn: Callable[..., Tensor], inputs: list[Tensor], kind: str) -> Callable[[], Any]:
    """One step of a pass."""
    if kind == "inference":

        def step() -> None:
            with torch.no_grad():
                fn(*inputs)

        return step
    inputs = [tensor.clone().requires_grad_() for tensor in inputs]
    if kind == "forward":
        return lambda: fn(*inputs)
    grad = torch.randn_like(fn(*inputs))
    wanted = [*inputs, *fn.parameters()]
    return lambda: torch.autograd.grad(fn(*inputs), wanted, grad)


def variants(chain: nn.Module, plain: nn.Module | None, inputs: list[Tensor], kind: str, medium: bool) -> Work:
    """What is timed in each round: name -> (plugins, matmul precision, step)."""
    step = call(chain, inputs, kind)
    work = {"separate": ("", "highest", step), "fused": ("linear", "highest", step), "again": ("", "highest", step)}
    if plain is not None:
        work["torch.nn"] = (None, "highest", call(plain, inputs, kind))
        if medium:
            work["medium"] = (None, "medium", work["torch.nn"][2])
    return work


def measure(work: Work, rounds: int, seconds: float) -> dict[str, list[float]]:
    """CPU time of a call, in microseconds: one sample per variant and round."""
    samples: dict[str, list[float]] = {name: [] for name in work}
    calls = 0
    for round_ in range(-2, rounds):
        for name, (selection, precision, step) in work.items():
            torch.set_float32_matmul_precision(precision)
            with opfuse.plugins.using(selection):
                if not calls:
                    step()
                    start = time.process_time()
                    step()
                    calls = max(1, int(seconds / (time.process_time() - start + 1e-6)))
                start = time.process_time()
                for _ in range(calls):
                    step()
                taken = time.process_time() - start
            if round_ >= 0:  # the first rounds warm up
                samples[name].append(taken / calls * 1e6)
    torch.set_float32_matmul_precision("highest")
    return samples


def summarize(samples: dict[str, list[float]]) -> dict[str, float]:
    """Medians over the rounds: microseconds of the separate ops, and of each round's ratios to them."""
    base = samples["separate"]
    row = {"us": statistics.median(base)}
    for name, values in samples.items():
        if name != "separate":
            row[name] = statistics.median([b / v for b, v in zip(base, values, strict=True)])
    return row


def main() -> None:
    """Measure, print a table, and say what stays below the goal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="without the largest shape, fewer rounds")
    parser.add_argument("--rounds", type=int, help="default 15, with --quick 7")
    parser.add_argument("--threads", type=int, default=1, help="more than one: CPU time counts all of them")
    parser.add_argument("--shape", metavar="TxWxH", nargs="+", help="tokens x width x hidden, instead of the four")
    parser.add_argument("--dtype", choices=DTYPES, nargs="+", default=list(DTYPES))
    parser.add_argument("--medium", action="store_true", help='also torch.nn with matmul precision "medium"')
    parser.add_argument("--check", action="store_true", help=f"exit with 1 if the plugin is below {GOAL}x somewhere")
    parser.add_argument("--json", metavar="FILE", help="write the numbers there too")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rounds = options.rounds or (7 if options.quick else 15)
    versions = {"torch": torch.__version__, "python": platform.python_version(), "opfuse": opfuse.__version__}
    print(f"{versions}, {options.threads} thread(s), {rounds} rounds, CPU time")
    names = ("fused", "again", "torch.nn", *(("medium",) if options.medium else ()))
    titles = "".join(f"{name:>10}" for name in names)
    print(f"{'chain':17}{'shape':17}{'dtype':6}{'pass':17}{'separate':>12}{titles}")
    rows = []
    shapes = [tuple(map(int, shape.split("x"))) for shape in options.shape or ()]
    for tokens, width, hidden in shapes or SHAPES[: -1 if options.quick else None]:
        for dtype in options.dtype:
            for chain, fused, plain, inputs in chains(tokens, width, hidden, DTYPES[dtype]):
                for kind in PASSES:
                    row = summarize(measure(variants(fused, plain, inputs, kind, options.medium), rounds, 0.01))
                    shape = f"{tokens}x{width}x{hidden}"
                    rows.append({"chain": chain, "shape": shape, "dtype": dtype, "pass": kind, **row})
                    ratios = "".join(f"{row[name]:9.2f}x" if name in row else " " * 10 for name in names)
                    print(f"{chain:17}{shape:17}{dtype:6}{kind:17}{row['us']:9.0f} us{ratios}", flush=True)
    slow = [row for row in rows if row["fused"] < GOAL]
    worst = min(rows, key=lambda row: row["fused"])
    spread = max(abs(1 - row["again"]) for row in rows)
    print(f"worst {worst['fused']:.2f}x; the separate ops against themselves: within {spread:.0%}")
    print(f"below {GOAL}x: {len(slow)} of {len(rows)}")
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            settings = {"versions": versions, "threads": options.threads, "rounds": rounds}
            json.dump({**settings, "rows": rows}, file, indent=1)
    sys.exit(bool(slow and options.check))


if __name__ == "__main__":
    main()
