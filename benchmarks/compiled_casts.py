"""How much faster casts are on a CPU that ``torch.compile`` fuses with a GELU, under each recipe.

python benchmarks/compiled_casts.py
python benchmarks/compiled_casts.py --rows 4096 --features 1024 --dtype bfloat16 --threads 1

The forward is a GELU and the cast of its output, the backward the gradient of the GELU, its sum for
a bias and its cast, both copies each. They are compared with the same operations of PyTorch one
after the other, in turns, as ``opfuse tune`` does it.
"""

from __future__ import annotations

import argparse
import functools
import logging
import pathlib
import sys

import torch

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


def main() -> None:
    """Measure, and print a line for each recipe and pass."""
    from opfuse_fp8 import compiled, make, opfuse_recipes, twins

    from opfuse import QuantizerRole, ops
    from opfuse.core.quantization import BOTH
    from opfuse.tuning.timing import compare

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--features", type=int, default=1024)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--recipes", default="fp8-delayed,fp8-current,fp8-block,mxfp8")
    given = parser.parse_args()
    logging.getLogger("opfuse.fp8").setLevel(logging.ERROR)
    torch.set_num_threads(given.threads)
    dtype, op = getattr(torch, given.dtype), ops.GELU()
    x, dy = torch.randn(2, given.rows, given.features).to(dtype)
    for name in given.recipes.split(","):
        for role, call, arguments in (
            ("input", "activation", (op, x, None, dtype, False)),
            ("grad_output", "gradient", (op, (), dy, x, True)),
        ):
            quantizer = make(opfuse_recipes()[name](), QuantizerRole("linear", role), "cpu")
            ways = [
                functools.partial(getattr(module, call), *arguments, twins.Into(quantizer, BOTH))
                for module in (twins, compiled)
            ]
            with torch.no_grad():
                found = compare(*ways, x.device, most=40)
            times = f"{found.first * 1e3:6.1f} ms, compiled {found.second * 1e3:6.1f} ms"
            print(f"{name:12} {call:11} {times}, {found.speed:.2f} +-{found.noise:.2f}", flush=True)


if __name__ == "__main__":
    main()
