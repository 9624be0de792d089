"""Writes the plans of many chains, one line of JSON each, so that two commits can be compared.

``python tests/recorded_plans.py > before.jsonl`` plans random chains under random fusions of both passes, and with the
plugins that are installed. A change that is to move code only gives the same file.
"""

import dataclasses
import json
import pathlib
import sys
import warnings

import torch

sys.path.insert(0, str(pathlib.Path(__file__).parent / "support"))

import chains
import fusing

import opfuse
from opfuse import ops

MODELS = {
    "mlp": lambda n: [ops.Linear(n, 4 * n), ops.GELU(), ops.Linear(4 * n, n)],
    "llama": lambda n: [
        ops.RMSNorm(n),
        ops.Linear(n, 4 * n, bias=False),
        ops.SwiGLU(),
        ops.Linear(2 * n, n, bias=False),
    ],
    "bias": lambda n: [ops.Bias(n), ops.SiLU(), ops.ConstantScale(0.5), ops.Dropout(0.1)],
    "norms": lambda n: [ops.LayerNorm(n), ops.L2Normalization(), ops.RMSNorm(n), ops.GEGLU()],
}


def passes(call):
    """The steps and refusals of a call, as data."""
    plan = call.plan
    return (
        None
        if plan is None
        else {
            f.name: [vars(row) for row in getattr(plan, f.name)] for f in dataclasses.fields(plan)
        }
    )


def record(name, model, *inputs):
    explanation = opfuse.explain(model, *inputs)
    found = [[call.ops, call.cut, passes(call)] for call in explanation.calls]
    print(json.dumps([name, found], default=str))


def main():
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for seed in range(150):
        drawn = chains.RandomChain(seed)
        record(f"random {seed} installed", drawn.forward)
        for name in fusing.VARIANTS:
            with fusing.fusions(name):
                record(f"random {seed} {name}", drawn.forward)
        for style in (chains.intervals, chains.patterns):
            with chains.covers(seed, style=style):
                record(f"random {seed} {style.__name__}", drawn.forward)
    for name, make in MODELS.items():
        for width in (16, 64, 256, 1024):
            for dtype in (torch.float32, torch.bfloat16):
                model = opfuse.Sequential(*make(width)).to(dtype)
                for rows in (1, 16, 1024):
                    x = torch.zeros(rows, width, dtype=dtype, requires_grad=True)
                    record(f"{name} {width} {rows} {dtype}", model, x)
                with torch.no_grad():
                    record(f"{name} {width} {dtype} no_grad", model, x)


if __name__ == "__main__":
    main()
