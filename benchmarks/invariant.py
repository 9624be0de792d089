"""What ``options(invariant="batch")`` costs: a forward in the mode, compared with one without it.

python benchmarks/invariant.py --out invariant.json
python benchmarks/invariant.py --rows 1,64 --dtypes bfloat16 --turns 5

The chain is the MLP of a Llama: RMSNorm, Linear, SwiGLU, Linear, with a residual branch. Times are
medians of calls in turns: of one thread the time that the processor worked for it, of several the
time that went by. No plugin is used on either side, so that both run the same ops. It also says how
many of the first 64 rows have other bits, without the mode, if each runs alone.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import platform
import statistics
import sys
import time
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

import opfuse  # noqa: E402
from benchmarks.scale import cpu  # noqa: E402
from opfuse import ops  # noqa: E402


def main() -> None:
    """Print the table, and write it as JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--rows", default="1,16,64,65,256,1024")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=pathlib.Path, help="a JSON file for the result")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    found: dict[str, Any] = {
        "device": "cpu",
        "cpu": cpu(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": options.threads,
        "torch": torch.__version__,
        "opfuse": opfuse.__version__,
        "python": platform.python_version(),
        "chain": f"RMSNorm, Linear {options.hidden} to {8 * options.hidden}, SwiGLU, Linear to "
        f"{options.hidden}, residual",
        "rows": [],
    }
    with torch.no_grad(), opfuse.plugins.using(""):
        for dtype in options.dtypes.split(","):
            chain = mlp(options.hidden, getattr(torch, dtype))
            for rows in map(int, options.rows.split(",")):
                x = torch.randn(rows, options.hidden).to(getattr(torch, dtype))
                row = {"dtype": dtype, "rows": rows, **measure(chain, x, options.turns)}
                found["rows"].append(row)
                print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    text = json.dumps(found, indent=1)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n", encoding="utf-8")


def mlp(hidden: int, dtype: torch.dtype) -> opfuse.Sequential:
    """The chain."""
    return opfuse.Sequential(
        ops.MakeExtraOutput().set_extra_output_channel(0, "residual", output_to_caller=False),
        ops.RMSNorm(hidden),
        ops.Linear(hidden, 8 * hidden, bias=False),
        ops.SwiGLU(),
        ops.Linear(4 * hidden, hidden, bias=False),
        ops.AddExtraInput().set_extra_input_channel(0, "residual"),
    ).to(dtype)


def measure(chain: opfuse.Sequential, x: torch.Tensor, turns: int) -> dict[str, float]:
    """Times of both sides in milliseconds, their ratio, and rows that differ when alone."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter

    def timed() -> float:
        start = clock()
        chain(x)
        return (clock() - start) * 1e3

    chain(x)
    with opfuse.options(invariant="batch"):
        chain(x)
    plain, invariant = [], []
    for _ in range(turns):
        plain.append(timed())
        with opfuse.options(invariant="batch"):
            invariant.append(timed())
    one, other = statistics.median(plain), statistics.median(invariant)
    alone = torch.cat([chain(row) for row in x[:64].split(1)])
    differ = (alone != chain(x)[:64]).any(1).sum().item()
    return {
        "plain_ms": round(one, 3),
        "invariant_ms": round(other, 3),
        "ratio": round(other / one, 2),
        "of_64_rows_alone_differ": differ,
    }


if __name__ == "__main__":
    main()
