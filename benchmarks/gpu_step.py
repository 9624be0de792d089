"""A training step of a Llama on a GPU: eager, converted, compiled, with Liger's kernels.

python benchmarks/gpu_step.py --out gpu-step.json

The model has the widths of Llama 3 8B, four layers and a vocabulary of 32,000, in bf16 with random
weights. A step is the forward with the loss, and the backward, over 2 x 2,048 tokens. Each way runs
in a process of its own: after three steps, the median of 15, by the GPU's clock. ``peak`` is the
largest amount of memory in use; weights and their gradients are part of it. ``loss`` is that of the
first step: all ways start with the same weights and tokens. ``graph`` is the median of 15 replays
of a CUDA graph that holds the step (``--graph``): what it takes where Python takes nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import pathlib
import statistics
import subprocess
import sys
from collections.abc import Callable
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
WAYS = ("eager", "converted", "memory", "fp8", "compile", "liger", "converted-compile")
BATCH, TOKENS = 2, 2048


def main() -> None:
    """Time each way in a process, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ways", default=",".join(WAYS), help="names, with commas")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--limit", type=float, default=150.0, help="seconds for each way")
    parser.add_argument("--kernels", action="store_true", help="print what takes the GPU's time")
    parser.add_argument("--graph", action="store_true", help="the step in a CUDA graph too")
    parser.add_argument("--out", type=pathlib.Path, metavar="FILE", help="write all numbers")
    parser.add_argument("--part", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        print(json.dumps(run(options.part, options.layers, options.kernels, options.graph)))
        return
    import torch

    from benchmarks.record import about

    result = about("gpu-step", torch.device("cuda")) | {"layers": options.layers, "rows": []}
    print(f"{'':18} {'ms':>8} {'speed':>6} {'peak GB':>8} {'loss':>9} {'graph':>8}")
    for way in options.ways.split(","):
        command = [sys.executable, __file__, "--part", way, "--layers", str(options.layers)]
        command += ["--kernels"] * options.kernels + ["--graph"] * options.graph
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=options.limit
            )
            said, failed = done.stderr, done.returncode or not done.stdout.strip()
        except subprocess.TimeoutExpired:
            said, failed = f"not done after {options.limit:.0f} s", True
        row = {"why": said[-400:]} if failed else json.loads(done.stdout.splitlines()[-1])
        result["rows"].append({"way": way} | row)
        if options.out:
            options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        if failed:
            print(f"{way:18} {(said.strip().splitlines() or ['it says nothing'])[-1]}")
            continue
        first = result["rows"][0].get("ms", row["ms"])
        speed = f"{first / row['ms']:6.2f} {row['peak_gb']:8.2f} {row['loss']:9.5f}"
        print(f"{way:18} {row['ms']:8.2f} {speed} {row.get('graph_ms', ''):>8}", flush=True)
        for name, ms, count in row.get("kernels", ()):
            print(f"{ms:27.2f} ms {count:5}x {name[:70]}")


def run(way: str, layers: int, kernels: bool = False, graph: bool = False) -> dict[str, Any]:
    """The milliseconds of a step, the peak of memory and the first loss, one way.

    ``kernels`` adds those that take most of the GPU's time: names, milliseconds and calls of a
    step, and their sum first. ``graph`` adds the milliseconds of a captured step, and the losses of
    its first replay and of one more step as it is, which would be equal but for new scales.
    """
    import torch
    import transformers

    import opfuse

    if way == "liger":
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8,
        num_hidden_layers=layers, vocab_size=32000, dtype=torch.bfloat16, use_cache=False,
    )  # fmt: skip
    with torch.device("cuda"):
        model: Any = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
        tokens = torch.randint(32000, (BATCH, TOKENS))
    if way in ("converted", "memory", "fp8", "converted-compile"):
        opfuse.convert(model)
    called = torch.compile(model) if "compile" in way else model

    def step() -> Any:
        model.zero_grad(set_to_none=True)
        prefer = opfuse.options(prefer="memory" if way == "memory" else "speed")
        recipe = opfuse.autocast("fp8-delayed") if way == "fp8" else contextlib.nullcontext()
        with prefer, recipe:
            loss = called(input_ids=tokens, labels=tokens).loss
        loss.backward()
        return loss.detach()

    loss = float(step())
    for _ in range(2):
        step()
    torch.cuda.reset_peak_memory_stats()
    ms = median(step)
    peak = torch.cuda.max_memory_allocated() / 2**30
    result = {"ms": ms, "peak_gb": peak, "loss": loss}
    if graph:
        try:
            result |= in_a_graph(step)
        except RuntimeError as error:  # the step waits for the GPU: nothing more can be measured
            result["graph"] = f"PyTorch cannot capture it: {str(error).partition(chr(10))[0]}"
            return result
    if kernels:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            step()
            torch.cuda.synchronize()
        each = [(e.key, e.self_device_time_total / 1e3, e.count) for e in profile.key_averages()]
        each.sort(key=lambda row: -row[1])
        total = ("all", sum(ms for _, ms, _ in each), sum(count for *_, count in each))
        result["kernels"] = [total, *each[:25]]
    return result


def in_a_graph(step: Callable[[], Any]) -> dict[str, Any]:
    """Capture a step in a CUDA graph; what a replay takes, and its loss beside one more step's."""
    import torch
    from transformers import masking_utils

    # while a graph is captured it would take any tokens for packed ones, and make a mask
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    captured, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    with torch.cuda.graph(captured, stream=stream):
        again = step()
    captured.replay()
    loss = float(again)
    ms = round(median(captured.replay), 3)
    return {"graph_ms": ms, "graph_losses": [loss, float(step())]}


def median(call: Callable[[], Any]) -> float:
    """The median milliseconds of 15 calls by the GPU's clock."""
    import torch

    taken = []
    for _ in range(15):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        taken.append(start.elapsed_time(end))
    return statistics.median(taken)


if __name__ == "__main__":
    main()
