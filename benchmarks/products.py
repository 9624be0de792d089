"""A product with its activation in one kernel, and products of groups, next to PyTorch's.

python benchmarks/products.py --out products.json

One part is ``gelu(x @ w.T + bias)`` in bf16, without a backward, and in the training form,
which stores the input of the GELU too: opfuse's Triton kernel in its fastest configuration, the
library's product and opfuse's elementwise kernel, the library's own epilogue, torch.compile in its
default mode, and the product alone. Another is what a layer of experts multiplies: the kernels
of opfuse-plugin-moe, ``grouped_mm``, and a product for each group. For FP8 codes, where each group
has a scale, it is ``scaled_grouped_mm``, which gets that scale for each row. Each row has
microseconds, how far each result is from that in fp32, and the configurations that were tried, or
why there is none. It also says whether the library's epilogues keep NaN.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.nn import functional as F  # noqa: E402

ON_GPU = torch.cuda.is_available()
if __name__ == "__main__" and not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

from benchmarks.measure import cpu_timer, failure, sample_rounds, spread  # noqa: E402
from benchmarks.record import about  # noqa: E402
from opfuse.ops import GELU  # noqa: E402
from opfuse.tuning.job import replace  # noqa: E402

SHAPES = [  # rows, features in, features out
    (8192, 4096, 16384),
    (8192, 2048, 8192),
    (50432, 1024, 4096),
    (16384, 768, 3072),
]
GROUPS = [1000, 1048, 1500, 548, 1024, 1024, 2000, 48]
"""Tokens of each expert."""
EXPERTS = [(4096, 14336), (14336, 4096)]
TINY, TINY_GROUPS, TINY_EXPERTS = [(24, 32, 48)], [3, 5, 0, 8], [(16, 32)]
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
DTYPE = torch.bfloat16 if ON_GPU else torch.float16
Call = Callable[[], Any]
Ways = dict[str, Callable[[dict[str, Any]], Call]]
"""Ways to compute something; each gets the row of its case, to which it may add."""


def random(*shape: int, scale: float = 1.0) -> Tensor:
    """Normal numbers."""
    return (torch.randn(*shape, device=DEVICE) * scale).to(DTYPE)


def gelu(x: Tensor, weight: Tensor, bias: Tensor, keep: bool) -> Any:
    """What the products compute, in PyTorch's operations."""
    hidden = F.linear(x, weight, bias)
    y = F.gelu(hidden, approximate="tanh")
    return (y, hidden) if keep else y


def sampler(call: Call) -> Callable[[], float]:
    """Microseconds of a call: shorter samples than those of a case that a claim rests on."""
    if not ON_GPU:
        return cpu_timer([call], 0.0)
    from triton.testing import do_bench

    return lambda: do_bench(call, warmup=8, rep=30, return_mode="median") * 1e3


def fused(x: Tensor, weight: Tensor, bias: Tensor, keep: bool, row: dict[str, Any]) -> Call:
    """The kernel in the fastest of its configurations; all of them are written into the row."""
    from opfuse_linear import gemm
    from opfuse_triton import functions_of

    functions: Any = functions_of(GELU())

    def call(config: Mapping[str, Any]) -> Any:
        y, hidden = gemm.multiply(x, weight, bias, functions, keep=keep, config=config)
        return y if hidden is None else (y, hidden)

    tried: list[tuple[float, dict[str, Any]]] = []
    row["configurations"] = []
    offered = gemm.configurations(DEVICE, DTYPE, x.shape[0], weight.shape[0])
    for config in offered if ON_GPU else offered[:1]:
        try:
            tried.append((sampler(functools.partial(call, config))(), config))
            row["configurations"].append({"config": config, "us": tried[-1][0]})
        except Exception as error:
            row["configurations"].append({"config": config, "why": failure(error)})
    best = min(tried, key=lambda each: each[0])[1]
    return functools.partial(call, best)


def compile_ahead() -> ProcessPoolExecutor | None:
    """Begin to compile the configurations of the kernel, all at once; None: there is no GPU."""
    if not ON_GPU:
        return None
    from opfuse_linear import gemm
    from opfuse_triton import current_target

    target, (rows, _, features) = current_target(DEVICE), SHAPES[0]
    pool = ProcessPoolExecutor(len(os.sched_getaffinity(0)), mp_context=get_context("spawn"))
    for keep in (False, True):
        for config in gemm.configurations(DEVICE, DTYPE, rows, features):
            pool.submit(compile_one, target, config, keep)
    return pool


def compile_one(target: Any, config: Mapping[str, Any], keep: bool) -> None:
    """Compile the kernel into Triton's cache on disk."""
    from opfuse_linear import gemm
    from opfuse_triton import functions_of, recording

    rows, depth, features = SHAPES[0]
    shapes = (rows, depth), (features, depth), (features,)
    given = [torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes]
    with recording(target) as launches:
        gemm.multiply(*given, functions_of(GELU()), keep=keep, config=config)
    launches[0].compile()


def apart(x: Tensor, weight: Tensor, bias: Tensor, keep: bool) -> Call:
    """The library's product, and opfuse's kernel of the activation."""
    from opfuse_triton.elementwise import formulas, kernels

    formula: Any = formulas.formula_of(GELU())

    def call() -> Any:
        hidden = F.linear(x, weight, bias)
        y, _ = kernels.forward(formula, (), hidden, None, None, hidden.dtype, False)
        return (y, hidden) if keep else y

    return call


def activated(rows: int, depth: int, features: int, keep: bool) -> tuple[Any, Ways]:
    """The result in fp32, and ways to compute it."""
    x, weight = random(rows, depth), random(features, depth, scale=depth**-0.5)
    bias = random(features)
    given = x, weight, bias, keep
    expected = gelu(x.float(), weight.float(), bias.float(), keep)
    torch.compiler.reset()  # a function has only so many compiled forms
    compiled = torch.compile(gelu, dynamic=False, backend="inductor" if ON_GPU else "eager")
    ways: Ways = {
        "kernel": lambda row: fused(*given, row),
        "library + kernel": lambda row: apart(*given),
        "compiled": lambda row: functools.partial(compiled, *given),
        "product alone": lambda row: functools.partial(F.linear, x, weight, bias),
    }
    if not keep:
        epilogue = functools.partial(torch._addmm_activation, bias, x, weight.t(), use_gelu=True)
        ways["epilogue"] = lambda row: epilogue
    return expected, ways


def one_by_one(call: Callable[..., Tensor], sizes: list[int], *tensors: Tensor) -> list[Tensor]:
    """A product for each group, of its rows of a matrix, or of its matrix."""
    parts = [t.split(sizes) if t.ndim == 2 else t.unbind() for t in tensors]
    return [call(*each) for each in zip(*parts, strict=True)]


def grouped(kind: str, sizes: list[int], depth: int, features: int) -> tuple[Any, Ways]:
    """The same for a layer of experts: its forward, or the gradient of its input or weights."""
    from opfuse_moe.kernels import library

    ends = torch.tensor(sizes, device=DEVICE).cumsum(0, dtype=torch.int32)
    x, dy = random(sum(sizes), depth), random(sum(sizes), features)
    weights = random(len(sizes), features, depth, scale=depth**-0.5)
    grouped_mm = getattr(F, "grouped_mm", None) or torch._grouped_mm
    matrices = library.matrices_of(weights)
    known: dict[str, tuple[Call, Call, Callable[..., Tensor], tuple[Tensor, Tensor]]] = {
        "forward": (
            lambda: library.product(x, matrices, ends),
            lambda: grouped_mm(x, weights.transpose(1, 2), offs=ends),
            F.linear,
            (x, weights),
        ),
        "dx": (
            lambda: library.product(dy, matrices.transposed(), ends),
            lambda: grouped_mm(dy, weights, offs=ends),
            torch.mm,
            (dy, weights),
        ),
        "dw": (
            lambda: library.weight_grads(dy, x, ends),
            lambda: grouped_mm(dy.t(), x, offs=ends),
            lambda a, b: a.t().mm(b),
            (dy, x),
        ),
    }
    own, pytorch, each, operands = known[kind]
    apart = functools.partial(one_by_one, each, sizes, *operands)
    exact = one_by_one(lambda a, b: each(a.float(), b.float()), sizes, *operands)
    return (torch.stack if kind == "dw" else torch.cat)(exact), {
        "kernel": lambda row: own,
        "grouped_mm": lambda row: pytorch,
        "one by one": lambda row: apart,
    }


def grouped_codes(sizes: list[int], depth: int, features: int) -> tuple[Any, Ways]:
    """The same for the forward of a layer of experts whose tensors have a scale each."""
    from opfuse_moe.kernels import library

    ends = torch.tensor(sizes, device=DEVICE).cumsum(0, dtype=torch.int32)
    codes = random(sum(sizes), depth).to(torch.float8_e4m3fn)
    weights = random(len(sizes), features, depth).to(torch.float8_e4m3fn)
    scales = torch.rand(len(sizes), device=DEVICE) + 0.5
    of_weights = torch.rand(len(sizes), device=DEVICE) * depth**-0.5
    matrices = library.matrices_of(weights)
    wide = [x.float() * s for x, s in zip(codes.split(sizes), scales, strict=True)]
    others = [w.float() * s for w, s in zip(weights, of_weights, strict=True)]

    def pytorch() -> Tensor:
        groups = torch.arange(len(sizes), device=DEVICE)
        of_rows = torch.repeat_interleave(
            groups, ends.diff(prepend=ends.new_zeros(1)), output_size=len(codes)
        )
        row_wise = F.ScalingType.RowWise
        return F.scaled_grouped_mm(
            *(codes, weights.transpose(1, 2), scales[of_rows], row_wise),
            *(of_weights[:, None].expand(-1, features).contiguous(), row_wise),
            offs=ends,
            output_dtype=DTYPE,
        )

    def own(exact: bool) -> Tensor:
        given = (codes, scales), matrices, of_weights, ends, DTYPE
        return library.coded_product(*given, exact=exact)

    return torch.cat([F.linear(*each) for each in zip(wide, others, strict=True)]), {
        "kernel": lambda row: functools.partial(own, False),
        "kernel, fp32 sums": lambda row: functools.partial(own, True),
        "scaled_grouped_mm": lambda row: pytorch,
    }


def wrong_by(got: Any, expected: Any) -> float:
    """The relative error of the worst of several tensors."""
    if isinstance(expected, tuple):
        return max(map(wrong_by, got, expected))
    if isinstance(got, list):
        got = torch.stack(got) if expected.ndim == 3 else torch.cat(got)
    return float((got.float() - expected).norm() / expected.norm())


def compared(make: Callable[..., Any], **case: Any) -> dict[str, Any]:
    """Time all ways of a case in turns; what fails says why."""
    row: dict[str, Any] = {"case": case, "us": {}, "wrong_by": {}, "why": {}}
    try:
        expected, ways = make(**case)
    except Exception as error:
        return row | {"why": {"all": failure(error)}}
    calls: dict[str, Call] = {}
    for name, way in ways.items():
        began = time.monotonic()
        try:
            call = way(row)
            got = call()
            if name != "product alone":
                row["wrong_by"][name] = wrong_by(got, expected)
            calls[name] = call
        except Exception as error:
            row["why"][name] = failure(error)
        row.setdefault("first_s", {})[name] = time.monotonic() - began
    del expected
    samplers = {name: (sampler(call), contextlib.nullcontext) for name, call in calls.items()}
    taken = sample_rounds(samplers, 3, 1, failed=row["why"])
    row["us"] = {name: spread(values)[1] for name, values in taken.items()}
    return row


def keeps_nan() -> dict[str, Any]:
    """Whether the library's epilogues give NaN for NaN."""
    x, weight, bias = random(16, 32), random(48, 32), random(48)
    x[0, 0] = float("nan")
    found: dict[str, Any] = {}
    for name, use_gelu in (("gelu", True), ("relu", False)):
        try:
            y = torch._addmm_activation(bias, x, weight.t(), use_gelu=use_gelu)
            found[name] = bool(y[0].isnan().all()) and not bool(y[1:].isnan().any())
        except Exception as error:
            found[name] = failure(error)
    return found


def cases() -> Iterator[tuple[Callable[..., Any], dict[str, Any]]]:
    """Everything that is compared; while the groups are, the kernel is compiled."""
    sizes = GROUPS if ON_GPU else TINY_GROUPS
    for depth, features in EXPERTS if ON_GPU else TINY_EXPERTS:
        for kind in ("forward", "dx", "dw"):
            yield grouped, {"kind": kind, "sizes": sizes, "depth": depth, "features": features}
        yield grouped_codes, {"sizes": sizes, "depth": depth, "features": features}
    for rows, depth, features in SHAPES if ON_GPU else TINY:
        for keep in (False, True):
            yield activated, {"rows": rows, "depth": depth, "features": features, "keep": keep}


def lines(result: Mapping[str, Any]) -> Iterator[str]:
    """A table for a page."""
    yield "| product | way | us | TFLOP/s | error | why not |"
    yield "|---|---|---|---|---|---|"
    for row in result["rows"]:
        case = row["case"]
        rows = case.get("rows") or sum(case["sizes"])
        kind = case.get("kind") or ("codes" if "sizes" in case else "gelu")
        kind += ", kept" if case.get("keep") else ""
        title = f"{kind}, {rows} x {case['depth']} -> {case['features']}"
        for name in {**row["us"], **row["why"]}:
            us, why = row["us"].get(name), row["why"].get(name, "").replace("|", "/")
            speed = us and 2 * rows * case["depth"] * case["features"] / us * 1e-6
            cells = [title, name, f"{us:.0f}" if us else "", f"{speed:.0f}" if us else ""]
            error = row["wrong_by"].get(name)
            cells += ["" if error is None else f"{error:.1e}", why]
            yield f"| {' | '.join(cells)} |"
        known = [each for each in row.get("configurations", ()) if "us" in each]
        if known:
            best = min(known, key=lambda each: each["us"])
            yield f"| {title} | fastest of {len(known)}: {best['config']} | | | | |"
    yield ""
    yield f"NaN stays NaN in the library's epilogues: {result['nan']}"


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=pathlib.Path, metavar="FILE", help="written after each case")
    parser.add_argument("--limit", type=float, default=90, metavar="SECONDS", help="begin no more")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Compare all cases, and print a table."""
    asked = parsed(arguments)
    until = time.monotonic() + asked.limit
    result = about("products", DEVICE) | {"rows": [], "left": 0}
    pool = compile_ahead()
    with torch.no_grad():
        result["nan"] = keeps_nan()
        for make, case in cases():
            if make is activated and pool is not None:
                pool.shutdown()
            if time.monotonic() > until:
                result["left"] += 1
                continue
            result["rows"].append(compared(make, **case))
            if asked.out:
                replace(asked.out, result)
    if asked.out:
        replace(asked.out, result)
    print("\n".join(lines(result)))


if __name__ == "__main__":
    main()
