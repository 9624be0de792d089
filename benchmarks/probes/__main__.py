"""Run probes on a GPU, or compile their kernels without one.

python -m benchmarks.probes --out probes.json            # all, in the order in which they decide something
python -m benchmarks.probes fp8 norm --out probes.json
python -m benchmarks.probes compile                      # no GPU: registers, spills, shared memory, instructions
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.measure import ceilings, cuda_timer
from benchmarks.record import about

Rows = list[dict[str, Any]]
SHAPES = [(8192, 4096, 16384), (8192, 4096, 4096), (8192, 2048, 8192), (50432, 1024, 4096), (16384, 768, 3072)]
CONFIGS = [  # BM, BN, BK, group, subtiles, warps, stages, warp specialization
    (128, 256, 64, 8, 1, 8, 3, False),
    (128, 256, 64, 8, 2, 8, 4, False),
    (128, 256, 64, 1, 2, 8, 4, False),
    (128, 128, 64, 8, 1, 4, 4, False),
    (128, 128, 64, 8, 2, 4, 4, True),
    (128, 256, 64, 8, 2, 4, 3, True),
    (128, 128, 64, 8, 1, 4, 4, True),  # Triton 3.6 specializes no kernel that splits its result
    (128, 256, 64, 8, 1, 4, 3, True),
]
FP8_CONFIG = (128, 256, 128, 8, 2, 8, 4, False)


def side_by_side(work: dict[str, Callable[[], Any]], rounds: int = 5) -> dict[str, float]:
    """Median microseconds of each, in turns."""
    samplers = {name: cuda_timer([step]) for name, step in work.items()}
    samples = {name: [] for name in work}
    for _ in range(rounds):
        for name, sample in samplers.items():
            samples[name].append(sample())
    return {name: statistics.median(values) for name, values in samples.items()}


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Random numbers of the size that products of matrices keep."""
    return (torch.randn(*shape, device="cuda") / math.sqrt(shape[-1])).to(dtype)


def triton_gemm(a, b, config, *, gelu=False, save=False, imprecise=None, rows_of_b=False):
    """A call of the kernel, and where it writes."""
    import triton

    from .kernels import gemm

    triton.set_allocator(lambda size, align, stream: torch.empty(size, dtype=torch.int8, device="cuda"))
    (m, k), n = a.shape, b.shape[1] if rows_of_b else b.shape[0]
    bm, bn, bk, group, subtiles, warps, stages, ws = config
    c, h = (torch.full((m, n), math.nan, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    grid = (min(sms, triton.cdiv(m, bm) * triton.cdiv(n, bn)),)
    fixed = (sms, bm, bn, bk, group, subtiles, ws, gelu, save, imprecise, rows_of_b)
    return (lambda: gemm[grid](a, b, c, h, m, n, k, *fixed, num_warps=warps, num_stages=stages)), c


def tried(name: str, make: Callable[[], tuple[Callable[[], Any], torch.Tensor]], expected: torch.Tensor) -> Any:
    """A step that was run and is right, or what is wrong with it."""
    try:
        step, c = make()
        step()
        torch.cuda.synchronize()
    except Exception as error:
        return f"{name}: {type(error).__name__}: {error}".splitlines()[0][:200]
    wrong = float((c.float() - expected).norm() / expected.norm())
    return step if wrong < 2e-2 else f"{name}: relative error {wrong:.1e}"


def compared(base: dict[str, Callable[[], Any]], steps: dict[str, Any], **about: Any) -> Rows:
    """A row for each: its time, how many times faster than the first, or its failure."""
    times = side_by_side(base | {name: step for name, step in steps.items() if callable(step)})
    first = next(iter(times.values()))
    rows = [about | {"name": name, "us": us, "ratio": first / us} for name, us in times.items()]
    return rows + [about | {"name": name, "failed": step} for name, step in steps.items() if not callable(step)]


def probe_gemm() -> Rows:
    """A persistent bf16 product against cuBLAS: below 0.92 at K=4096, epilogues belong to the library there."""
    rows = []
    for m, k, n in SHAPES:
        a, b = randn(m, k), randn(n, k)
        expected = (a @ b.t()).float()
        steps = {str(c): tried(str(c), lambda c=c: triton_gemm(a, b, c), expected) for c in CONFIGS}  # noqa: B023
        rows += compared({"cublas": lambda: a @ b.t()}, steps, shape=[m, k, n])  # noqa: B023
    return rows


def probe_addmm() -> Rows:
    """``_addmm_activation``: its kernels, and its time against product and GELU apart."""
    rows = []
    for m, k, n in SHAPES:
        x, w, bias = randn(m, k), randn(n, k), randn(n)
        fused = lambda: torch._addmm_activation(bias, x, w.t(), use_gelu=True)  # noqa: B023, E731
        apart = lambda: torch.nn.functional.gelu(torch.addmm(bias, x, w.t()), approximate="tanh")  # noqa: B023, E731
        fused()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            fused()
            torch.cuda.synchronize()
        kernels = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
        rows += compared({"apart": apart}, {"fused": fused}, shape=[m, k, n], kernels=kernels)
    return rows


def probe_specialization() -> Rows:
    """Whether warp specialization, or halves, hide a GELU and the store of what was before it."""
    rows = []
    for m, k, n in SHAPES:
        a, b = randn(m, k), randn(n, k)
        expected = torch.nn.functional.gelu((a @ b.t()).float(), approximate="tanh")
        steps = {}
        for config in CONFIGS:
            for save in (False, True):
                name = f"{config}, {'stored' if save else 'not stored'}"
                make = lambda c=config, s=save: triton_gemm(a, b, c, gelu=True, save=s)  # noqa: B023, E731
                steps[name] = tried(name, make, expected)
        rows += compared({"cublas, no GELU": lambda: a @ b.t()}, steps, shape=[m, k, n])  # noqa: B023
    return rows


def probe_fp8() -> Rows:
    """FP8 products: the library's, with and without fast accumulation, and the kernel's variants."""
    rows = []
    for size in (4096, 8192):
        x, w = (randn(size, size, dtype=torch.float8_e4m3fn) for _ in range(2))
        one, expected = torch.ones((), device="cuda"), x.float() @ w.float().t()
        options = {"scale_a": one, "scale_b": one, "out_dtype": torch.bfloat16}
        library = {
            name: lambda fast=fast: torch._scaled_mm(x, w.t(), **options, use_fast_accum=fast)  # noqa: B023
            for name, fast in (("library, fast", True), ("library", False))
        }
        turned = w.t().contiguous()
        variants = {"imprecise": {}, "promoted every 128": {"imprecise": 128}, "b is [K, N]": {"rows_of_b": True}}
        steps = {
            name: tried(
                name,
                lambda v=variant: triton_gemm(x, turned if "rows_of_b" in v else w, FP8_CONFIG, **v),  # noqa: B023
                expected,
            )
            for name, variant in variants.items()
        }
        steps["library, 1x128 and 128x128"] = tried("blocks", lambda: blockwise(x, w), expected)  # noqa: B023
        rows += compared(library, steps, shape=[size] * 3, flops=2 * size**3)
    return rows


def blockwise(x: torch.Tensor, w: torch.Tensor) -> tuple[Callable[[], Any], torch.Tensor]:
    """The library's product with a scale for each 1x128 of the input and each 128x128 of the weight."""
    from torch.nn import functional as F

    (m, k), n, kinds = x.shape, w.shape[0], F.ScalingType
    scale_x = torch.ones(k // 128, m, device="cuda").t()
    scale_w = torch.ones(n // 128, k // 128, device="cuda").t()
    scales = scale_x, kinds.BlockWise1x128, scale_w, kinds.BlockWise128x128
    step = lambda: F.scaled_mm(x, w.t(), *scales, output_dtype=torch.bfloat16)  # noqa: E731
    return step, step()


def probe_norm() -> Rows:
    """RMSNorm's backward by programs a multiprocessor, as a share of what the same bytes take to copy."""
    import triton

    from .kernels import norm_backward

    rows, sms = [], torch.cuda.get_device_properties(0).multi_processor_count
    for h in (2048, 4096, 8192):
        x, dy, weight = randn(8192, h), randn(8192, h), 1 + randn(h)
        rstd = torch.rsqrt(x.float().square().mean(-1) + 1e-5)
        n, g = x.float() * rstd[:, None], dy.float() * weight.float()
        expected = rstd[:, None] * (g - n * (g * n).mean(-1, keepdim=True))
        steps, block, copy = {}, triton.next_power_of_2(h), torch.empty(3 * x.numel() // 2, device="cuda").bfloat16()
        for each in (1, 2, 4, 8, 16):
            for warps in (4, 8):

                def make(each=each, warps=warps):
                    dx, partial = torch.full_like(x, math.nan), torch.empty(each * sms, h, device="cuda")  # noqa: B023

                    def step():
                        given = x, dy, weight, rstd, dx, partial, 8192, h, block  # noqa: B023
                        norm_backward[(each * sms,)](*given, each * sms, num_warps=warps)
                        return partial.sum(0)

                    return step, dx

                steps[f"{each} programs, {warps} warps"] = tried("norm", make, expected)
        target = torch.empty_like(copy)
        rows += compared({"copy of the same bytes": lambda: target.copy_(copy)}, steps, h=h)  # noqa: B023
    return rows


def probe_launcher() -> Rows:
    """Host time of one launch: through the JIT, and of the compiled kernel."""
    from .kernels import nothing

    x = torch.empty(64, device="cuda", dtype=torch.int32)
    given = (x,) * 8 + (3, 4)
    compiled = nothing[(1,)](*given)
    rows = []
    for name, step in {"jit": lambda: nothing[(1,)](*given), "compiled": lambda: compiled[(1, 1, 1)](*given)}.items():
        samples = []
        for _ in range(20):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(200):
                step()
            samples.append((time.perf_counter() - start) / 200 * 1e6)
        rows.append({"name": name, "host_us": statistics.median(samples)})
    return rows


def probe_cache() -> Rows:
    """Whether kernels compiled elsewhere, in TRITON_CACHE_DIR, are found: seconds until the first product is over."""
    a, b = randn(512, 512), randn(512, 512)
    rows = []
    for config in CONFIGS[:2]:
        start = time.perf_counter()
        triton_gemm(a, b, config)[0]()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        rows.append({"name": str(config), "first_s": seconds, "cache": os.environ.get("TRITON_CACHE_DIR", "")})
    return rows


PROBES = {name.removeprefix("probe_"): value for name, value in globals().items() if name.startswith("probe_")}


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser("probes", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(PROBES)}; or compile")
    parser.add_argument("--out", metavar="FILE", help="write the numbers there, as JSON, after each probe")
    parser.add_argument("--capability", type=int, default=90, help="of the GPU to compile for")
    options = parser.parse_args(arguments)
    if "compile" in options.names:
        from .ahead import compile_all

        result = {"compiled": compile_all(options.capability)}
    elif not torch.cuda.is_available():
        raise SystemExit("probes need a CUDA GPU, and there is none; compile runs anywhere")
    else:
        result = about("probes", torch.device("cuda"))
    with torch.cuda.stream(torch.cuda.Stream()) if "suite" in result else torch.no_grad(), torch.no_grad():
        if "suite" in result:
            result["ceilings"] = ceilings(torch.device("cuda"))
        for name in [] if "compile" in options.names else options.names or PROBES:
            result[name] = PROBES[name]()
            print(name, json.dumps(result[name], indent=1), flush=True)
            if options.out:
                with open(options.out, "w", encoding="utf-8") as file:
                    json.dump(result, file, indent=1)
    print(json.dumps(result.get("compiled", []), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
