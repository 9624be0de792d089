"""Run probes on a GPU, or compile their kernels without one.

python -m benchmarks.probes --out probes.json  # all, in the order in which they decide something
python -m benchmarks.probes fp8 norm --out probes.json
python -m benchmarks.probes compile  # no GPU: registers, spills, shared memory, instructions
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from benchmarks.measure import (
    ceilings,
    cuda_timer,
    failure,
    launch_us,
    rounded,
    sample_rounds,
    spread,
)
from benchmarks.record import about

from . import CONFIGS, FP8_CONFIG, FP8_SMALL, SHAPES

Rows = list[dict[str, Any]]


def side_by_side(work: dict[str, Callable[[], Any]], rounds: int = 5) -> dict[str, float]:
    """Median microseconds of each, in turns."""
    samplers = {name: (cuda_timer([step]), contextlib.nullcontext) for name, step in work.items()}
    return {name: spread(values)[1] for name, values in sample_rounds(samplers, rounds, 1).items()}


def randn(*shape: int) -> torch.Tensor:
    """Random numbers of the size that products of matrices keep."""
    return (torch.randn(*shape, device="cuda") / math.sqrt(shape[-1])).bfloat16()


def triton_gemm(a, b, config, *, gelu=False, save=False, imprecise=None, rows_of_b=False):
    """A call of the kernel, and where it writes."""
    import triton

    from .kernels import gemm

    triton.set_allocator(
        lambda size, align, stream: torch.empty(size, dtype=torch.int8, device="cuda")
    )
    (m, k), n = a.shape, b.shape[1] if rows_of_b else b.shape[0]
    bm, bn, bk, group, subtiles, warps, stages, ws = config
    c, h = (torch.full((m, n), math.nan, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    grid = (min(sms, triton.cdiv(m, bm) * triton.cdiv(n, bn)),)
    fixed = (sms, bm, bn, bk, group, subtiles, ws, gelu, save, imprecise, rows_of_b)
    return (lambda: gemm[grid](a, b, c, h, m, n, k, *fixed, num_warps=warps, num_stages=stages)), c


def tried(
    make: Callable[[], tuple[Callable[[], Any], torch.Tensor]], expected: torch.Tensor
) -> dict[str, Any]:
    """A step that ran and is right, or what is wrong with it; and how long its first call took."""
    start = time.perf_counter()
    try:
        step, c = make()
        step()
        torch.cuda.synchronize()
    except Exception as error:
        return {"failed": failure(error)}
    wrong = float((c.float() - expected).norm() / expected.norm())
    first = {"first_s": time.perf_counter() - start}
    return first | ({"step": step} if wrong < 2e-2 else {"failed": f"relative error {wrong:.1e}"})


def compared(
    base: dict[str, Callable[[], Any]], steps: dict[str, dict[str, Any]], **about: Any
) -> Rows:
    """A row for each: its time, how many times faster than the first, or its failure."""
    times = side_by_side(
        base | {name: found["step"] for name, found in steps.items() if "step" in found}
    )
    first, rows = times[next(iter(base))], []
    for name in [*base, *steps]:
        found = {key: value for key, value in steps.get(name, {}).items() if key != "step"}
        measured = {"us": times[name], "ratio": first / times[name]} if name in times else {}
        rows.append(about | {"name": name} | found | measured)
    return rows


def attempted(probe: Callable[..., Rows], shape: tuple[int, ...]) -> Rows:
    """A probe's rows, or why there are none: the others still have something to say."""
    try:
        return probe(*shape)
    except Exception as error:
        return [{"failed": failure(error)}]


def probe_gemm(m: int, k: int, n: int) -> Rows:
    """A persistent bf16 product against cuBLAS.

    Below 0.92 at K=4096, epilogues belong to the library there. The product then runs with a GELU,
    and with the store of what was before it: whether warp specialization, or halves, hide them. The
    first call of each says whether kernels compiled elsewhere, in TRITON_CACHE_DIR, are found.
    """
    a, b = randn(m, k), randn(n, k)
    expected, steps = (a @ b.t()).float(), {}
    for word, options in (
        ("", {}),
        (", GELU", {"gelu": True}),
        (", GELU, stored", {"gelu": True, "save": True}),
    ):
        right = F.gelu(expected, approximate="tanh") if options else expected
        for config in CONFIGS:
            steps[f"{config}{word}"] = tried(partial(triton_gemm, a, b, config, **options), right)
    return compared({"cublas": partial(torch.matmul, a, b.t())}, steps)


def probe_addmm(m: int, k: int, n: int) -> Rows:
    """``_addmm_activation``: its kernels, and its time against product and GELU apart."""
    x, w, bias = randn(m, k), randn(n, k), randn(n)
    fused = partial(torch._addmm_activation, bias, x, w.t(), use_gelu=True)
    fused()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        fused()
        torch.cuda.synchronize()
    kernels = [
        event.name
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    apart = {"apart": lambda: F.gelu(torch.addmm(bias, x, w.t()), approximate="tanh")}
    return compared(apart, {"fused": {"step": fused}}, kernels=kernels)


def probe_fp8(size: int) -> Rows:
    """FP8 products: the library's, with and without fast accumulation, and kernel variants."""
    x, w = (rounded(randn(size, size)) for _ in range(2))
    one, expected = torch.ones((), device="cuda"), x.float() @ w.float().t()
    product = partial(
        torch._scaled_mm, x, w.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16
    )
    library = {"library, fast": partial(product, use_fast_accum=True), "library": product}
    mine = partial(triton_gemm, x)
    steps = {
        "imprecise": tried(partial(mine, w, FP8_CONFIG), expected),
        "promoted every 128": tried(partial(mine, w, FP8_CONFIG, imprecise=128), expected),
        "promoted, smaller tile": tried(partial(mine, w, FP8_SMALL, imprecise=128), expected),
        "b is [K, N]": tried(
            partial(mine, w.t().contiguous(), FP8_CONFIG, rows_of_b=True), expected
        ),
        "library, 1x128 and 128x128": tried(partial(blockwise, x, w), expected),
    }
    return compared(library, steps, flops=2 * size**3)


def blockwise(x: torch.Tensor, w: torch.Tensor) -> tuple[Callable[[], Any], torch.Tensor]:
    """The library's product with a scale per 1x128 of the input and per 128x128 of the weight."""
    (m, k), n, kinds = x.shape, w.shape[0], F.ScalingType
    scale_x = torch.ones(k // 128, m, device="cuda").t()
    scale_w = torch.ones(n // 128, k // 128, device="cuda").t()
    scales = scale_x, kinds.BlockWise1x128, scale_w, kinds.BlockWise128x128
    step = partial(F.scaled_mm, x, w.t(), *scales, output_dtype=torch.bfloat16)
    return step, step()


def probe_norm(h: int) -> Rows:
    """RMSNorm's backward by programs a multiprocessor, as a share of a copy of the same bytes."""
    x, dy, weight = randn(8192, h), randn(8192, h), 1 + randn(h)
    rstd = torch.rsqrt(x.float().square().mean(-1) + 1e-5)
    n, g = x.float() * rstd[:, None], dy.float() * weight.float()
    expected = rstd[:, None] * (g - n * (g * n).mean(-1, keepdim=True))
    steps, sms = {}, torch.cuda.get_device_properties(0).multi_processor_count
    for each in (1, 2, 4, 8, 16):
        for warps in (4, 8):
            make = partial(norm_backward, x, dy, weight, rstd, each * sms, warps)
            steps[f"{each} programs, {warps} warps"] = tried(make, expected)
    source, target = (randn(3 * x.numel() // 2) for _ in range(2))
    return compared({"copy of the same bytes": partial(target.copy_, source)}, steps)


def norm_backward(x, dy, weight, rstd, programs, warps):
    """A call of the kernel with the sum of its partial results, and where it writes."""
    import triton

    from .kernels import norm_backward as kernel

    (m, h), dx = x.shape, torch.full_like(x, math.nan)
    partial_sums = torch.empty(programs, h, device="cuda")
    given = x, dy, weight, rstd, dx, partial_sums, m, h, triton.next_power_of_2(h), programs
    return (lambda: (kernel[(programs,)](*given, num_warps=warps), partial_sums.sum(0))), dx


def probe_launcher() -> Rows:
    """Host time of one launch: through the JIT, and of the compiled kernel."""
    from .kernels import nothing

    x = torch.empty(64, device="cuda", dtype=torch.int32)
    given = (x,) * 8 + (3, 4)
    compiled = nothing[(1,)](*given)
    steps = {"jit": lambda: nothing[(1,)](*given), "compiled": lambda: compiled[(1, 1, 1)](*given)}
    return [{"name": name, "host_us": spread(launch_us(step))[1]} for name, step in steps.items()]


PROBES: dict[str, tuple[Callable[..., Rows], list[tuple[int, ...]]]] = {
    "gemm": (probe_gemm, SHAPES),
    "addmm": (probe_addmm, SHAPES),
    "fp8": (probe_fp8, [(4096,), (8192,)]),
    "norm": (probe_norm, [(2048,), (4096,), (8192,)]),
    "launcher": (probe_launcher, [()]),
}


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        "probes", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("names", nargs="*", help=f"of {', '.join(PROBES)}; or compile")
    parser.add_argument(
        "--out", metavar="FILE", help="write the numbers there, as JSON, after each shape"
    )
    parser.add_argument("--capability", type=int, default=90, help="of the GPU to compile for")
    options = parser.parse_args(arguments)
    if strange := set(options.names) - {*PROBES, "compile"}:
        parser.error(
            f"expected some of {', '.join(PROBES)}, or compile; got {', '.join(sorted(strange))}"
        )
    if "compile" in options.names:
        from .ahead import compile_all

        print(json.dumps(compile_all(options.capability), indent=1))
        return 0
    if not torch.cuda.is_available():
        parser.error("probes need a CUDA GPU, and there is none; compile runs anywhere")
    device = torch.device("cuda")
    # a CUDA graph cannot be captured on the default one
    with torch.cuda.stream(torch.cuda.Stream()), torch.no_grad():
        result = about("probes", device) | {"ceilings": ceilings(device)}
        result["cache"] = os.environ.get("TRITON_CACHE_DIR", "")
        for name in options.names or PROBES:
            probe, shapes = PROBES[name]
            result[name] = []
            for shape in shapes:
                rows = [{"shape": shape} | row for row in attempted(probe, shape)]
                print(name, json.dumps(rows, indent=1), flush=True)
                result[name] += rows
                if options.out:  # a kernel that hangs takes no more with it than its shape
                    with open(options.out, "w", encoding="utf-8") as file:
                        json.dump(result, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
