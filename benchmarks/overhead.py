"""What a chain costs in Python: tiny tensors, one thread, every ratio from one interleaved run.

Run ``python benchmarks/overhead.py``. The goals are ratios. Four ``Identity`` ops are held against a bare
``torch.autograd.Function`` (12/4.3 of its forward, 28/17 of its forward and backward); Linear + GELU + Linear
against ``torch.nn`` (1.25 and 1.15 with the linear plugin, 1.7 and 1.4 with all plugins off). With ``--check``
the exit status says whether all are met.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
import timeit

import torch

import opfuse

ROUNDS, CALLS = 60, 200
GOALS = {  # case -> (baseline, forward ratio, forward + backward ratio)
    "4 Identity": ("bare autograd.Function", 12 / 4.3, 28 / 17),
    "Linear+GELU+Linear, linear plugin": ("torch.nn", 1.25, 1.15),
    "Linear+GELU+Linear, plugins off": ("torch.nn", 1.7, 1.4),
}


class Bare(torch.autograd.Function):
    """The floor: an autograd function that does nothing."""

    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


def cases():
    """The functions to time: name -> (function of x, context to call it in)."""
    torch.manual_seed(0)
    identity = opfuse.Sequential(*[opfuse.ops.Identity() for _ in range(4)])
    chain = opfuse.Sequential(opfuse.ops.Linear(16, 16), opfuse.ops.GELU(), opfuse.ops.Linear(16, 16))
    plain = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.GELU("tanh"), torch.nn.Linear(16, 16))
    plain.load_state_dict(chain.state_dict())
    return {
        "bare autograd.Function": (Bare.apply, None),
        "4 Identity": (identity, ""),
        "torch.nn": (plain, None),
        "Linear+GELU+Linear, linear plugin": (chain, "linear"),
        "Linear+GELU+Linear, plugins off": (chain, ""),
    }


def measure(rounds=ROUNDS, calls=CALLS):
    """Median microseconds of CPU time: name -> (forward, forward + backward), in rounds over all cases."""
    x = torch.randn(4, 16, requires_grad=True)
    grad = torch.randn(4, 16)
    samples = {name: ([], []) for name in cases()}
    work = cases()
    for round_ in range(rounds + 1):
        for name, (fn, selection) in work.items():
            with opfuse.plugins.using(selection):
                forward = timeit.timeit(lambda fn=fn: fn(x), number=calls, timer=time.process_time)
                both = timeit.timeit(lambda fn=fn: fn(x).backward(grad), number=calls, timer=time.process_time)
            if round_:  # the first round warms up
                samples[name][0].append(forward / calls * 1e6)
                samples[name][1].append(both / calls * 1e6)
    return {name: (statistics.median(f), statistics.median(b)) for name, (f, b) in samples.items()}


def main():
    """Measure, print a table, and say what meets its goal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit with 1 if a goal is missed")
    parser.add_argument("--json", metavar="FILE", help="write the numbers there too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    times = measure()
    versions = {"opfuse": opfuse.__version__, "torch": torch.__version__, "Python": platform.python_version()}
    print(", ".join(f"{name} {version}" for name, version in versions.items()) + "; CPU, 1 thread, fp32, 4x16")
    print(f"{'':36}{'forward':>20}{'forward+backward':>22}")
    missed = []
    for name, (forward, both) in times.items():
        row = f"{name:36}{forward:9.1f} us{both:19.1f} us"
        if name in GOALS:
            base, *goals = GOALS[name]
            ratios = [forward / times[base][0], both / times[base][1]]
            row = f"{name:36}{forward:9.1f} us {ratios[0]:5.2f}x{both:11.1f} us {ratios[1]:5.2f}x"
            row += f"   (goal {goals[0]:.2f}x, {goals[1]:.2f}x)"
            missed += [name for ratio, goal in zip(ratios, goals, strict=True) if ratio > goal]
        print(row)
    print("missed: " + ", ".join(dict.fromkeys(missed)) if missed else "all goals met")
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(
                {"versions": versions, "shape": [4, 16], "dtype": "float32", "threads": 1, "us": times}, file, indent=1
            )
    sys.exit(bool(missed and options.check))


if __name__ == "__main__":
    main()
