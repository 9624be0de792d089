"""FP8 products of columns of a wider matrix of codes: as they lie there, and copied first.

python benchmarks/slices.py --out slices.json

The left operand is a slice along what is summed over, so that its rows are as far apart as the
matrix is wide. The shapes are those of gradients in a Llama 3 8B: gate and up, and queries, keys
and values. A slice begins at a multiple of 16 bytes, or not; that comes last, since a GPU that
refuses an address computes nothing afterwards. For each product there are its microseconds, whether
its result is the copy's to the bit, and how many times as fast it is as the copy and a product; or
why there is none.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from benchmarks.measure import failure, rounded, sample_rounds, spread, timer  # noqa: E402
from benchmarks.record import about  # noqa: E402
from opfuse.tuning.job import replace  # noqa: E402

SHAPES = [  # rows, width, where the slice begins, its width, columns of the product
    (4096, 28672, 0, 14336, 4096),
    (4096, 28672, 14336, 14336, 4096),
    (4096, 6144, 0, 4096, 4096),
    (4096, 6144, 4096, 1024, 4096),
    (4096, 6144, 5120, 1024, 4096),
    (4096, 28672, 16, 14336, 4096),
    (4096, 28680, 0, 14336, 4096),  # rows at multiples of 8 bytes
    (4096, 28672, 8, 14336, 4096),
    (4096, 28672, 4, 14336, 4096),
    (4096, 28672, 1, 14336, 4096),
]
TINY = [(16, 96, begin, 32, 48) for begin in (0, 16, 8, 1)]
Call = Callable[[], torch.Tensor]


def products(left: torch.Tensor, right: torch.Tensor) -> dict[str, Call]:
    """PyTorch's functions for a product of codes with one scale each."""
    one, kind, dtype = torch.ones((), device=left.device), F.ScalingType.TensorWise, torch.bfloat16
    older = {"scale_a": one, "scale_b": one, "out_dtype": dtype}
    return {
        "scaled_mm": lambda: F.scaled_mm(left, right.t(), one, kind, one, kind, output_dtype=dtype),
        "_scaled_mm": lambda: torch._scaled_mm(left, right.t(), **older),
    }


def compared(rows: int, wide: int, begin: int, deep: int, columns: int) -> Iterator[dict[str, Any]]:
    """Time each product of a slice beside that of its copy, in turns."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    codes, right = (
        rounded(torch.randn(*shape, device=device)) for shape in ((rows, wide), (columns, deep))
    )
    part = codes[:, begin : begin + deep]
    expected = part.float() @ right.float().t()
    for name, call in products(part, right).items():
        copied = functools.partial(_copied, name, part, right)
        row: dict[str, Any] = {"product": name, "shape": [rows, wide, begin, deep, columns]}
        try:
            got, wanted = call(), copied()
            row["wrong_by"] = float((got.float() - expected).norm() / expected.norm())
            row["same"] = torch.equal(got, wanted)
            alone = products(part.contiguous(), right)[name]
            calls = {"slice": call, "copied": copied, "alone": alone}
            taken = sample_rounds(
                {of: (timer(device)([each]), contextlib.nullcontext) for of, each in calls.items()},
                5, 1,
            )  # fmt: skip
            us = {of: spread(values)[1] for of, values in taken.items()}
            row |= {"us": us, "speed": us["copied"] / us["slice"]}
        except Exception as error:
            row["why"] = failure(error)
        yield row


def _copied(name: str, part: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return products(part.contiguous(), right)[name]()


def lines(rows: list[dict[str, Any]]) -> Iterator[str]:
    """A table for a page."""
    yield "| product | slice | begins at | copied, us | slice, us | speed | to the bit |"
    yield "|---|---|---|---|---|---|---|"
    for row in rows:
        high, wide, begin, deep, columns = row["shape"]
        cells = [row["product"], f"{high} x {deep} of {wide}, to {columns}", str(begin)]
        if "us" in row:
            cells += [f"{row['us']['copied']:.0f}", f"{row['us']['slice']:.0f}"]
            cells += [f"{row['speed']:.2f}", "yes" if row["same"] else f"no: {row['wrong_by']:.1e}"]
        else:
            cells += ["", "", "", row["why"].replace("|", "/")]
        yield f"| {' | '.join(cells)} |"


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=pathlib.Path, metavar="FILE", help="written after each shape")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Compare all shapes, and print a table."""
    asked, on_gpu = parsed(arguments), torch.cuda.is_available()
    result = about("slices", torch.device("cuda" if on_gpu else "cpu")) | {"rows": []}
    stream = torch.cuda.stream(torch.cuda.Stream()) if on_gpu else contextlib.nullcontext()
    with stream, torch.no_grad():  # a CUDA graph cannot be captured on the default one
        for shape in SHAPES if on_gpu else TINY:
            result["rows"] += compared(*shape)
            if asked.out:
                replace(asked.out, result)
    print("\n".join(lines(result["rows"])))


if __name__ == "__main__":
    main()
