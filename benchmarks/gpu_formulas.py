"""How far approximate formulas are from fp64, and what they and the FP8 casts take on a GPU.

python benchmarks/gpu_formulas.py --out formulas.json
python benchmarks/gpu_formulas.py --count

First each function is compared with fp64 at all 2^32 numbers, next to Triton's own, of which tanh
is none. Then kernels are timed in turns with a copy of as many bytes as they must move: with the
instructions of PTX, with Triton's formulas and codes by integers (``exact``), in another process,
and some next to ``torch.compile``. ``instructions`` are those of the machine code of the kernel for
one element of its output, of a gated activation for one feature. ``--count`` only counts them, for
sm_90, and needs no GPU. Without a GPU everything runs on the CPU, tiny and interpreted, to try it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from benchmarks.measure import failure, sample_rounds, spread, timer  # noqa: E402
from benchmarks.record import about  # noqa: E402
from opfuse.tuning.job import replace  # noqa: E402

Row = dict[str, Any]
REFERENCES = {
    "exp": torch.exp,
    "reciprocal": torch.reciprocal,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}
CHUNK = 1 << 26
LARGE = {"rows": 8192, "features": 14336}
CASES = [  # plugin, case, the rows that it is timed at, whether next to torch.compile
    ("fp8", "rowwise cast, delayed", (4096, 8192), True),
    ("fp8", "cast, delayed", (4096, 8192), True),
    ("fp8", "cast, current", (4096, 8192), False),
    ("fp8", "cast + SwiGLU, delayed", (8192,), False),
    ("fp8", "cast + bias + GELU, delayed", (8192,), False),
    ("fp8", "SwiGLU + cast, delayed", (8192,), False),
    ("fp8", "bias + GELU + cast, delayed", (8192,), False),
    ("activation", "SwiGLU", (8192,), False),
    ("activation", "SwiGLU backward", (8192,), False),
    ("activation", "bias + GELU", (8192,), False),
    ("activation", "bias + GELU backward", (8192,), False),
]
INSTRUCTION = re.compile(r"/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_.]+)")


def errors(name: str, ours: bool) -> Row:
    """Compare a function with fp64 at every fp32 number; without a GPU, at 2^14 of them.

    Args:
        name: One of :data:`REFERENCES`.
        ours: Whether it is the one of ``opfuse_triton.functions``, or Triton's.
    """
    from opfuse_triton import functions

    from benchmarks import formula_kernels as kernels

    on_gpu = torch.cuda.is_available()
    device, step = ("cuda", 1) if on_gpu else ("cpu", 1 << 18)
    function = getattr(functions, name) if ours else getattr(kernels, f"triton_{name}")
    row: Row = {"function": name, "of": "opfuse" if ours else "Triton", "flushed": 0, "wrong": 0}
    for first in range(-(1 << 31), 1 << 31, CHUNK if on_gpu else 1 << 32):
        last = first + (CHUNK if on_gpu else 1 << 32)
        bits = torch.arange(first, last, step, dtype=torch.int64, device=device)
        x = bits.to(torch.int32).view(torch.float32)
        y = torch.empty_like(x)
        kernels.apply[(len(x) // kernels.BLOCK,)](x, y, FUNCTION=function, BLOCK=kernels.BLOCK)
        compare(row, x, y, REFERENCES[name](x.double()))
    return row


def compare(row: Row, x: torch.Tensor, y: torch.Tensor, exact: torch.Tensor) -> None:
    """Add the errors of ``y`` against ``exact`` to a row.

    ``relative`` and ``ulps`` are the largest of normal results, each with its ``x``, and likewise
    ``near``, the ``ulps`` where ``|x| <= 8``. ``flushed`` counts subnormal results that are 0, and
    ``wrong`` where one is NaN or infinite and the other is not, or where the sign differs.
    """
    rounded, size = exact.float(), exact.abs()
    tiny = torch.finfo(torch.float32).tiny
    apart = (rounded.isnan() != y.isnan()) | (rounded.isinf() != y.isinf())
    apart &= ~((size > 3.402e38) & (size < 3.404e38))  # an ulp is between them and infinity
    apart |= (rounded.signbit() != y.signbit()) & ~rounded.isnan()
    row["wrong"] += int(apart.sum())
    row["flushed"] += int(((size < tiny) & (rounded != 0) & (y == 0)).sum())
    normal = rounded.isfinite() & y.isfinite() & (size >= tiny)
    error = torch.where(normal, (y.double() - exact).abs(), 0.0)
    _, exponent = torch.frexp(exact)
    ulps = error / torch.ldexp(torch.ones_like(exact), exponent - 24)
    found = {"relative": error / size, "ulps": ulps}
    found["near"] = torch.where(x.abs() <= 8, ulps, 0.0)
    for name, values in found.items():
        values = torch.where(normal, values, 0.0)
        place = int(values.argmax())
        if float(values[place]) >= row.get(name, (-1.0,))[0]:
            row[name] = float(values[place]), float(x[place])


def launches(plugin: str, name: str, rows: int, target: Any) -> tuple[Any, dict[str, int], list]:
    """A case, its shape and what it launches for a target."""
    from opfuse_triton.recorded import case_lists, load_cases, record

    (case,) = [one for one in load_cases(case_lists(plugin)[plugin]) if one.name == name]
    shape = {**LARGE, "rows": rows}
    return case, shape, record(case, shape, target).launches


def instructions(launch: Any) -> float:
    """How many instructions the machine code has for one element of a tile."""
    import triton

    tool = pathlib.Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "kernel.cubin")
        path.write_bytes(launch.compile().asm["cubin"])
        text = subprocess.run([tool, "-c", path], capture_output=True, text=True, check=True).stdout
    count = sum(name != "NOP" for name in INSTRUCTION.findall(text))
    tile = launch.config.constants
    return count * launch.config.num_warps * 32 / (tile["BLOCK_ROWS"] * tile["BLOCK_COLUMNS"])


def counted(launched: list) -> list[tuple[str, float]]:
    """The instructions of each kernel, but for sums of what others have summed up."""
    kernels = [one for one in launched if not one.kernel.name.startswith("column_sums")]
    return [(one.kernel.name, instructions(one)) for one in kernels]


def timed(plugin: str, name: str, rows: int, compiled: bool) -> Row:
    """Time a case next to a copy of its bytes, in turns."""
    from opfuse_triton import current_target

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    row: Row = {"case": name, "rows": rows}
    try:
        case, shape, launched = launches(plugin, name, rows, current_target(device))
        shape = shape if on_gpu else case.small[0]
        given, nbytes = case.inputs(shape, device), case.floor_bytes(shape)
        source = torch.ones(nbytes // 2, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        calls = {"copy": lambda: target.copy_(source), "opfuse": lambda: case.run(**given)}
        if compiled and on_gpu:
            torch.compiler.reset()
            separate = torch.compile(case.separate, dynamic=False)
            calls["compiled"] = lambda: separate(**given)
        samplers = {
            of: (timer(device)([call]), contextlib.nullcontext) for of, call in calls.items()
        }
        failed: dict[str, str] = {}
        taken = sample_rounds(samplers, 3 if on_gpu else 1, 1, failed=failed)
        row["us"] = {of: spread(values)[1] for of, values in taken.items() if of not in failed}
        row["GB/s"] = nbytes / row["us"]["opfuse"] / 1e3
        row["of copy"] = row["us"]["copy"] / row["us"]["opfuse"]
        row |= {"why": str(failed)} if failed else {}
        row["instructions"] = counted(launched) if on_gpu else []
    except Exception as error:
        row["why"] = failure(error)
    return row


def use_exact() -> None:
    """Make kernels of this process compute with Triton's formulas, and codes by integers."""
    import triton.language as tl
    from opfuse_fp8.kernels import device
    from opfuse_triton import functions

    def nothing() -> Any:
        return tl.constexpr(0)

    nothing.__triton_builtin__ = True  # type: ignore[attr-defined]
    functions.ptx_capability = device.ptx_capability = nothing


def exact_rows(seconds: float) -> Iterator[Row]:
    """The same timings in another process with the exact formulas; its caches are its own."""
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder, "exact.json")
        env = {**os.environ, "TRITON_CACHE_DIR": folder}
        command = [sys.executable, __file__, "--exact", "--out", str(out)]
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(command, env=env, timeout=seconds, stdout=subprocess.DEVNULL)
        if out.exists():
            yield from json.loads(out.read_text(encoding="utf-8"))["times"]


def lines(found: Row) -> Iterator[str]:
    """Tables for a page."""
    yield "| function | of | error, ulp | at | up to 8, ulp | relative | flushed | wrong |"
    yield "|---|---|---|---|---|---|---|---|"
    for row in found["errors"]:
        if "why" in row:
            yield f"| {row['function']} | {row['of']} | {row['why'].replace('|', '/')} | | | | | |"
            continue
        (ulps, at), (near, _), (relative, _) = row["ulps"], row["near"], row["relative"]
        cells = row["function"], row["of"], f"{ulps:.2f}", f"{at:.9g}", f"{near:.2f}"
        rest = f"{relative:.2e}", str(row["flushed"]), str(row["wrong"])
        yield f"| {' | '.join((*cells, *rest))} |"
    yield ""
    yield "| kernels | rows | instructions | us | GB/s | of a copy | exact, us | compiled, us |"
    yield "|---|---|---|---|---|---|---|---|"
    exact = {(row["case"], row["rows"]): row.get("us", {}) for row in found["exact"]}
    for row in found["times"]:
        counts = ", ".join(f"{each:.1f}" for _, each in row.get("instructions", []))
        us, other = row.get("us", {}), exact.get((row["case"], row["rows"]), {})
        cells = [row["case"], str(row["rows"]), counts]
        if "opfuse" in us:
            cells += [f"{us['opfuse']:.1f}", f"{row['GB/s']:.0f}", f"{row['of copy']:.2f}"]
        else:
            cells += [row.get("why", "").replace("|", "/"), "", ""]
        cells += [f"{one:.1f}" if one else "" for one in (other.get("opfuse"), us.get("compiled"))]
        yield f"| {' | '.join(cells)} |"


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=pathlib.Path, metavar="FILE", help="written after each row")
    parser.add_argument("--exact", action="store_true", help="only times, with exact formulas")
    parser.add_argument("--count", action="store_true", help="only count instructions, for sm_90")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Compare, time, and print tables."""
    asked, on_gpu = parsed(arguments), torch.cuda.is_available()
    if asked.count:
        for plugin, name, rows, _ in CASES:
            counts = counted(launches(plugin, name, rows[0], 90)[2])
            print(name, *[f"{kernel} {each:.1f}" for kernel, each in counts], sep="  ")
        return
    if not on_gpu:
        os.environ["TRITON_INTERPRET"] = "1"
    if asked.exact:
        use_exact()
    result = about("formulas", torch.device("cuda" if on_gpu else "cpu"))
    result |= {"errors": [], "times": [], "exact": []}

    def add(where: str, row: Row) -> None:
        result[where].append(row)
        if asked.out:
            replace(asked.out, result)

    stream = torch.cuda.stream(torch.cuda.Stream()) if on_gpu else contextlib.nullcontext()
    with stream, torch.no_grad():  # a CUDA graph cannot be captured on the default one
        for name in () if asked.exact else REFERENCES:
            for ours in (True, False) if name != "tanh" else (True,):
                try:
                    row = errors(name, ours)
                except Exception as error:
                    row = {"function": name, "of": "opfuse" if ours else "Triton"}
                    row["why"] = failure(error)
                add("errors", row)
        for plugin, name, sizes, compiled in CASES if on_gpu else CASES[::4]:
            for rows in sizes if on_gpu else sizes[:1]:
                add("times", timed(plugin, name, rows, compiled and not asked.exact))
    for row in () if asked.exact else exact_rows(60 if on_gpu else math.inf):
        add("exact", row)
    print("\n".join(lines(result)))


if __name__ == "__main__":
    main()
