"""How fast are compiled runs on a CPU? The inductor plugin against the separate ops, PyTorch, and torch.compile.

Run ``python benchmarks/inductor_cpu.py``: chains of norms, activations and residual adds, forward and backward, all
variants interleaved in one process. Each ratio says how much faster the plugin is than something: the separate ops
(all plugins off), the same in plain PyTorch (``eager``), that under ``torch.set_float32_matmul_precision("medium")``,
and under ``torch.compile``; ``again`` is the plugin once more, the spread of the measurement itself. ``--chains mlp``
measures an MLP with every installed plugin.

What is timed is CPU time with one thread, which does not count the time that other programs get. Half the cost of a
large tensor is page faults, so ``--allocators`` runs everything twice, in fresh processes: with the allocator as it
comes, and with one that keeps large blocks (``MALLOC_MMAP_THRESHOLD_``, ``MALLOC_TRIM_THRESHOLD_``; glibc only).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import opfuse
from opfuse import ops

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TUNED = {"MALLOC_MMAP_THRESHOLD_": str(1 << 32), "MALLOC_TRIM_THRESHOLD_": str(1 << 33)}
GOALS = {"rmsnorm": 6.0, "add+rmsnorm": 5.0, "swiglu": 2.2}  # times eager, bf16, 4096 x 1024

Chain = tuple[opfuse.Sequential, Callable[..., Any], list[Tensor], list[nn.Parameter]]


def rms(x: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm in plain PyTorch."""
    return F.rms_norm(x, weight.shape, weight, 1e-5)


def chains(rows: int, width: int, dtype: torch.dtype, wanted: str) -> Iterator[tuple[str, Chain]]:
    """The chains: in opfuse, in plain PyTorch, their inputs and the parameters of the latter."""
    torch.manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape).to(dtype).requires_grad_()

    def parameter(value: float) -> nn.Parameter:
        return nn.Parameter(torch.full((width,), value, dtype=dtype))

    if wanted == "mlp":
        for hidden, act in ((4 * width, "gelu"), (2816 * width // 1024, "swiglu")):
            yield f"{act} mlp", mlp(rows, width, hidden, act, dtype)
        return
    weight, bias = parameter(1.0), parameter(0.1)
    norm = [ops.RMSNorm(width, dtype=dtype)]
    yield "rmsnorm", (opfuse.Sequential(*norm), lambda x: rms(x, weight), [draw(rows, width)], [weight])
    fork = [ops.AddExtraInput(), ops.MakeExtraOutput(), ops.RMSNorm(width, dtype=dtype)]

    def add_norm(x: Tensor, extra: Tensor) -> tuple[Tensor, Tensor]:
        h = x + extra
        return rms(h, weight), h

    yield "add+rmsnorm", (opfuse.Sequential(*fork), add_norm, [draw(rows, width), draw(rows, width)], [weight])
    gated = lambda x: F.silu(x[..., : x.shape[-1] // 2]) * x[..., x.shape[-1] // 2 :]  # noqa: E731
    yield "swiglu", (opfuse.Sequential(ops.SwiGLU()), gated, [draw(rows, 2 * width)], [])
    tail = [ops.Bias(width, dtype=dtype), ops.GELU(), ops.ConstantScale(0.5), ops.AddExtraInput()]

    def bias_gelu(x: Tensor, extra: Tensor) -> Tensor:
        return F.gelu(x + bias, approximate="tanh") * 0.5 + extra

    yield "bias+gelu+scale+add", (opfuse.Sequential(*tail), bias_gelu, [draw(rows, width), draw(rows, width)], [bias])
    block = [*norm, ops.SwiGLU()]

    def norm_gated(x: Tensor) -> Tensor:
        return gated(rms(x, weight))

    yield "rmsnorm+swiglu", (opfuse.Sequential(*block), norm_gated, [draw(rows, width)], [weight])


def mlp(rows: int, width: int, hidden: int, act: str, dtype: torch.dtype) -> Chain:
    """An MLP; with SwiGLU it starts with RMSNorm and has no biases."""
    x = torch.randn(rows, width).to(dtype).requires_grad_()
    if act == "gelu":
        plain = nn.Sequential(nn.Linear(width, hidden), nn.GELU("tanh"), nn.Linear(hidden, width)).to(dtype)
        chain = opfuse.Sequential(ops.Linear(width, hidden), ops.GELU(), ops.Linear(hidden, width)).to(dtype)
        chain.load_state_dict(plain.state_dict())
        return chain, plain, [x], list(plain.parameters())
    chain = opfuse.Sequential(
        ops.RMSNorm(width),
        ops.Linear(width, 2 * hidden, bias=False),
        ops.SwiGLU(),
        ops.Linear(hidden, width, bias=False),
    ).to(dtype)
    weight, up, down = [nn.Parameter(p.detach().clone()) for p in chain.parameters()]

    def plainly(x: Tensor) -> Tensor:
        gate, linear = F.linear(rms(x, weight), up).chunk(2, -1)
        return F.linear(F.silu(gate) * linear, down)

    return chain, plainly, [x], [weight, up, down]


Variant = tuple[str | None, str, Callable[[], Any]]


def variants(chain: Chain, medium: bool) -> dict[str, Variant]:
    """What is timed in each round: name -> (plugins, matmul precision, a step)."""
    module, plain, inputs, params = chain
    compiled = torch.compile(plain, dynamic=False)
    installed = None if isinstance(module[0], (ops.Linear,)) or len(list(module.parameters())) > 2 else "inductor"

    def step(fn: Callable[..., Any], leaves: list[Any]) -> Callable[[], Any]:
        result = fn(*inputs)
        grads = [torch.randn_like(y) for y in (result if isinstance(result, tuple) else (result,))]
        return lambda: torch.autograd.grad(fn(*inputs), leaves, grads)

    with opfuse.plugins.using(""):
        ours = step(module, [*inputs, *module.parameters()])
    eager = step(plain, [*inputs, *params])
    work: dict[str, Variant] = {
        "plugin": (installed, "highest", ours),
        "separate": ("", "highest", ours),
        "eager": (None, "highest", eager),
        "compile": (None, "highest", step(compiled, [*inputs, *params])),
        "again": (installed, "highest", ours),
    }
    if medium:
        work["medium"] = (None, "medium", eager)
        work["compile medium"] = (None, "medium", work["compile"][2])
    return work


def measure(work: dict[str, Variant], rounds: int) -> dict[str, list[float]]:
    """CPU time of a step in microseconds: a sample per variant and round."""
    samples: dict[str, list[float]] = {name: [] for name in work}
    for round_ in range(-2, rounds):
        for name, (selection, precision, step) in work.items():
            torch.set_float32_matmul_precision(precision)
            with opfuse.plugins.using(selection):
                start, calls = time.process_time(), 0
                while not calls or time.process_time() - start < 0.02:
                    step()
                    calls += 1
                taken = time.process_time() - start
            if round_ >= 0:  # the first rounds compile and warm up
                samples[name].append(taken / calls * 1e6)
    torch.set_float32_matmul_precision("highest")
    return samples


def saved_bytes(chain: Chain, selection: str | None) -> int:
    """What one forward of the chain keeps for its backward, inputs and parameters excluded, shared memory once."""
    module, _, inputs, _ = chain
    known = {t.untyped_storage().data_ptr() for t in (*inputs, *module.parameters())}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with opfuse.plugins.using(selection), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        result = module(*inputs)
    del result
    return sum(kept.values())


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure everything with the allocator of this process, and print as it goes."""
    torch.set_num_threads(options.threads)
    allocator = "tuned" if all(os.environ.get(n) == v for n, v in TUNED.items()) else "default"
    rows = []
    print(f"{'chain':21}{'shape':12}{'dtype':6}{'allocator':10}{'plugin':>12}   times faster than ...", flush=True)
    for shape in options.shape:
        count, width = map(int, shape.split("x"))
        for dtype in options.dtype:
            for name, chain in chains(count, width, DTYPES[dtype], options.chains):
                medium = options.chains == "mlp" and dtype == "fp32"
                work = variants(chain, medium)
                samples = measure(work, options.rounds)
                ours = samples["plugin"]
                row = {"chain": name, "shape": shape, "dtype": dtype, "allocator": allocator}
                row["us"] = statistics.median(ours)
                for other, values in samples.items():
                    if other != "plugin":
                        row[other] = statistics.median([v / o for v, o in zip(values, ours, strict=True)])
                row["saved bytes"] = saved_bytes(chain, work["plugin"][0])
                row["saved bytes, separate"] = saved_bytes(chain, "")
                rows.append(row)
                ratios = "  ".join(f"{other} {row[other]:.2f}" for other in samples if other != "plugin")
                saved = f"saved MB {row['saved bytes'] / 1e6:.1f} of {row['saved bytes, separate'] / 1e6:.1f}"
                print(f"{name:21}{shape:12}{dtype:6}{allocator:10}{row['us']:9.0f} us   {ratios}  {saved}", flush=True)
                torch.compiler.reset()
    return rows


def main() -> None:
    """Measure, in one process or in one per allocator; write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chains", choices=("pointwise", "mlp"), default="pointwise")
    parser.add_argument("--shape", metavar="ROWSxWIDTH", nargs="+", default=["4096x1024"])
    parser.add_argument("--dtype", choices=DTYPES, nargs="+", default=list(DTYPES))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--allocators", action="store_true", help="run twice: as it comes, and tuned")
    parser.add_argument("--json", metavar="FILE", help="write the numbers there")
    options = parser.parse_args()
    if options.allocators:
        arguments = [argument for argument in sys.argv[1:] if argument != "--allocators"]
        with contextlib.suppress(ValueError):
            at = arguments.index("--json")
            del arguments[at : at + 2]
        rows = []
        for settings in ({}, TUNED):
            out = f"{options.json or 'inductor_cpu.json'}.part"
            command = [sys.executable, __file__, *arguments, "--json", out]
            subprocess.run(command, env={**os.environ, **settings}, check=True)
            with open(out, encoding="utf-8") as file:
                rows += json.load(file)["rows"]
            os.unlink(out)
    else:
        rows = run(options)
    if options.json:
        versions = {"torch": torch.__version__, "python": platform.python_version(), "opfuse": opfuse.__version__}
        report = {"versions": versions, "machine": platform.processor() or platform.machine()}
        report |= {"threads": options.threads, "rounds": options.rounds, "goals": GOALS, "rows": rows}
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=1)


if __name__ == "__main__":
    main()
