"""Kernels of plugins at real widths: each of their configurations, next to a copy.

python benchmarks/gpu_kernels.py --out kernels.json

For each case there are the microseconds of a call as it is launched, those of each kernel in it,
and for each configuration of each kernel the microseconds of a call, the share of the speed of a
copy of as many bytes, and how far a small call is from the separate operations in fp64, relative to
the largest number. To measure the kernels of another checkout, put the ``src`` folders of its
plugins into ``PYTHONPATH``. Without a GPU it tries itself, tiny and with interpreted kernels.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

ROOT = pathlib.Path(__file__).resolve().parent.parent
ON_GPU = torch.cuda.is_available()
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    if not ON_GPU:
        os.environ["TRITON_INTERPRET"] = "1"

from opfuse_triton.gpu.timing import Clock  # noqa: E402
from opfuse_triton.launches import asked  # noqa: E402
from opfuse_triton.recorded import case_lists, load_cases  # noqa: E402
from opfuse_triton.targets import current_target  # noqa: E402

from benchmarks.measure import failure  # noqa: E402
from benchmarks.record import about  # noqa: E402
from opfuse.tuning.job import replace  # noqa: E402

LLAMA = {"tokens": 8192, "heads": 32, "keys": 8, "dim": 128}
WIDE, NARROW = {"rows": 8192, "classes": 128256}, {"rows": 4096, "classes": 32000}
CASES = [  # plugin, case, shape
    ("rope", "RMSNorm + RoPE of queries and keys, backward", LLAMA),
    ("loss", "cross entropy with all options", WIDE),
    ("loss", "cross entropy with all options", NARROW),
    ("loss", "with all options", WIDE),
    ("loss", "with all options", NARROW),
    ("rope", "L2Normalization + RoPE, backward", LLAMA),
    ("loss", "cross entropy", WIDE),
]
TINY = {"tokens": 20, "heads": 2, "keys": 1, "dim": 16, "rows": 2, "classes": 300}
FEW = {"tokens": 37, "rows": 5}
Row = dict[str, Any]


def measured(plugin: str, name: str, shape: Mapping[str, int], copied: float) -> Iterator[Row]:
    """Time a case as it is launched, and with each configuration of each of its kernels.

    Args:
        plugin: The plugin.
        name: Its case.
        shape: The shape.
        copied: Bytes per second of a copy.
    """
    device = torch.device("cuda" if ON_GPU else "cpu")
    (case,) = [one for one in load_cases(case_lists(plugin)[plugin]) if one.name == name]
    given, clock = case.inputs(shape, device), Clock(device)
    small = case.inputs({**shape, **{k: n for k, n in FEW.items() if k in shape}}, device)
    reference = case.separate or case.twin
    expected = reference(**{name: wide(one) for name, one in small.items()})

    def row(said: str, config: Any) -> Row:
        found: Row = {"case": name, "shape": dict(shape), "kernel": said, "config": config}
        try:
            copies = {name: one.clone() for name, one in small.items()}  # one may be overwritten
            found["off"] = max(map(off, case.run(**copies), expected))
            seconds = clock.seconds([lambda: case.run(**given)])
            share = case.floor_bytes(shape) / seconds / copied
            found |= {"us": 1e6 * seconds, "share": share}
        except Exception as error:
            found["why"] = failure(error)
        return found

    token = asked.set(questions := [])
    try:
        case.run(**given)
    finally:
        asked.reset(token)
    yield row("as launched", None) | {"kernels": split(lambda: case.run(**given))}
    for kernel, facts in {one.name: (one, facts) for one, facts in questions}.values():
        possible = kernel.candidates(current_target(device), facts)
        for config in possible if len(possible) > 1 else ():
            with kernel.pinned(config):
                yield row(kernel.name, config)


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor in fp64, if it has fractions."""
    return tensor.double() if tensor.is_floating_point() else tensor


def off(got: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest error, relative to the largest number."""
    return float((got.double() - expected).abs().max() / expected.abs().max())


def split(call: Callable[[], Any]) -> dict[str, float] | str:
    """The microseconds of each kernel of a call, those of its launches together; or why not."""
    if not ON_GPU:
        return {}
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(4):
                call()
            torch.cuda.synchronize()
        return {one.key[:60]: one.device_time_total / 4 for one in profile.key_averages()}
    except Exception as error:
        return failure(error)


def lines(rows: list[Row]) -> Iterator[str]:
    """A table for a page."""
    yield "| case | kernel | configuration | us | of a copy | off |"
    yield "|---|---|---|---|---|---|"
    for row in rows:
        size = " x ".join(map(str, row["shape"].values()))
        config = row["config"] or {"constants": row["kernels"], "num_warps": ""}
        pairs = config["constants"].items() if isinstance(config["constants"], dict) else ()
        said = [f"{k} {v:.0f}" for k, v in pairs] + [f"{config['num_warps']} warps"]
        cells = [f"{row['case']}, {size}", row["kernel"], ", ".join(said)]
        if "us" in row:
            cells += [f"{row['us']:.1f}", f"{row['share']:.0%}", f"{row['off']:.0e}"]
        else:
            cells += ["", "", row["why"].replace("|", "/")]
        yield f"| {' | '.join(cells)} |"


def main(arguments: list[str] | None = None) -> None:
    """Measure all cases, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=pathlib.Path, metavar="FILE", help="written after each row")
    out = parser.parse_args(arguments).out
    device = torch.device("cuda" if ON_GPU else "cpu")
    result = about("gpu-kernels", device) | {"rows": []}
    copied = result["copied"] = Clock(device).limits()[0] if ON_GPU else 1e9
    with torch.no_grad():
        for plugin, name, shape in CASES if ON_GPU else CASES[:2]:
            shape = shape if ON_GPU else {k: TINY[k] for k in shape}
            try:
                for row in measured(plugin, name, shape, copied):
                    result["rows"].append(row)
                    if out:
                        replace(out, result)
            except Exception as error:
                print(f"{name}: {failure(error)}", flush=True)
    print("\n".join(lines(result["rows"])))


if __name__ == "__main__":
    main()
