"""Time and memory of a language model's last linear and its loss, compared with eager PyTorch.

python benchmarks/loss.py --out loss.json
python benchmarks/loss.py --of log-probs
python benchmarks/loss.py --classes 32768 --dtypes float32 --turns 3

Eager is ``F.cross_entropy(F.linear(x, weight), targets)``, forward and backward. The other side is
``opfuse.Sequential(Linear, CrossEntropy)`` with the installed plugins. Times are medians of steps
in turns: of one thread the time that the processor worked for it, which other programs change
little, of several the time that went by. Memory is the largest resident size of a process of its
own during a step, minus what was resident before it: the input, the weight and its gradient, which
the step adds to, as in the second of two microbatches.

With ``--of log-probs`` it is ``TokenLogProb``, with a factor for each token, under
``prefer="memory"``, and eager is ``log_softmax`` in fp32 and ``gather``; with ``frozen-log-probs``
the linear needs no gradient. ``--beside`` adds sides: the eager function under ``torch.compile``,
the function of Liger Kernel's losses that gives log-probabilities by chunks, in PyTorch's
operations, that of trl, opfuse with the entropy too, and whole losses of responses of 64 tokens:
GRPO and DPO in the chain of opfuse, and those of Liger Kernel in PyTorch's operations. What is
compiled runs once before its memory is measured. Beside the loss there is ``torch``, the chunked
``F.linear_cross_entropy`` of PyTorch 2.13 with its default chunks; ``weighted`` and
``torch-weighted`` are opfuse and that with class weights.
"""

from __future__ import annotations

import argparse
import gc
import json
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
RESPONSE = 64
BESIDE = "compiled", "liger", "trl", "entropy", "grpo", "liger-grpo", "dpo", "liger-dpo"
BESIDE_LOSS = "torch", "weighted", "torch-weighted"
MOST_MEMORY, LEAST_SPEED = 0.30, 1.0
"""Goals: memory at most this part of eager's, speed at least this."""


def main() -> None:
    """Measure every size and dtype; or be the process whose memory is measured."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--classes", default="32768,131072")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--of", choices=("loss", "log-probs", "frozen-log-probs"), default="loss")
    parser.add_argument("--beside", default="", help="some of: " + ",".join(BESIDE + BESIDE_LOSS))
    parser.add_argument("--out", type=pathlib.Path, help="a JSON file for the result")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    import torch

    torch.set_num_threads(options.threads)
    if options.memory_of:
        print(memory(options))
        return
    rows = [
        measure(options, int(classes), dtype)
        for dtype in options.dtypes.split(",")
        for classes in options.classes.split(",")
    ]
    if options.out:
        from benchmarks.record import about

        sizes = {
            name: getattr(options, name) for name in ("tokens", "hidden", "threads", "turns", "of")
        }
        result = about("loss", torch.device("cpu")) | sizes | {"rows": rows}
        options.out.write_text(json.dumps(result, indent=1) + "\n")


def steps(options: argparse.Namespace, classes: int, dtype: str) -> dict[str, Callable[[], None]]:
    """A step of each side, which adds to the gradient of one weight."""
    import torch
    from torch.nn import functional as F

    import opfuse
    from opfuse import ops

    torch.manual_seed(0)
    kind = getattr(torch, dtype)
    head = ops.Linear(options.hidden, classes, bias=False, dtype=kind)
    log_probs = options.of != "loss"
    chain = opfuse.Sequential(head, ops.TokenLogProb() if log_probs else ops.CrossEntropy())
    head.weight.requires_grad_(options.of != "frozen-log-probs")
    x = torch.randn(options.tokens, options.hidden, dtype=kind, requires_grad=True)
    targets = torch.randint(0, classes, (options.tokens,))
    x.grad = torch.ones_like(x)
    if head.weight.requires_grad:
        head.weight.grad = torch.ones_like(head.weight)
    if log_probs:
        factors = torch.randn(options.tokens)

        with_entropy = opfuse.Sequential(head, ops.TokenLogProb(entropy=True))

        def plain(x: Any, weight: Any) -> Any:
            log_p = F.linear(x, weight).float().log_softmax(-1)
            return (log_p.gather(-1, targets[:, None])[:, 0] * factors).sum()

        compiled = torch.compile(plain)

        def liger() -> None:
            from liger_kernel.chunked_loss import fused_linear_ppo as of  # type: ignore[import-not-found]

            log_p = of._ChunkedSelectiveLogProbFunction.apply(
                x, head.weight, targets, None, 1.0, of._SELECTIVE_LOGPROB_VOCAB_CHUNK_SIZE
            )
            (log_p * factors).sum().backward()

        def by_trl() -> None:
            from trl.kernels import ChunkedLogProbFunction  # type: ignore[import-not-found]

            given = x, head.weight, None, targets, 1.0, 32768, None, 1.0, ("log_probs",)
            (ChunkedLogProbFunction.apply(*given)[0] * factors).sum().backward()

        def fused() -> None:
            with opfuse.options(prefer="memory"):
                log_p = chain(x, targets)
            (log_p * factors).sum().backward()

        def entropy() -> None:
            with opfuse.options(prefer="memory"):
                log_p, of_rows = with_entropy(x, targets)
            ((log_p + 0.01 * of_rows) * factors).sum().backward()

        beside = {
            "compiled": lambda: compiled(x, head.weight).backward(),
            "liger": liger,
            "trl": by_trl,
            "entropy": entropy,
            **whole_losses(head, x, targets),
        }
        chosen = {name: beside[name] for name in options.beside.split(",") if name}
        return {"eager": lambda: plain(x, head.weight).backward(), "opfuse": fused, **chosen}
    of_classes = torch.rand(classes)
    weighted = opfuse.Sequential(head, ops.CrossEntropy(weight=of_classes))

    def by_torch(**more: Any) -> None:
        more["options"] = torch.nn.LinearCrossEntropyOptions()
        F.linear_cross_entropy(x, head.weight, targets, **more).backward()

    beside = {
        "torch": by_torch,
        "weighted": lambda: weighted(x, targets).backward(),
        "torch-weighted": lambda: by_torch(weight=of_classes.to(kind)),
    }
    return {
        "eager": lambda: F.cross_entropy(F.linear(x, head.weight), targets).backward(),
        "opfuse": lambda: chain(x, targets).backward(),
        **{name: beside[name] for name in options.beside.split(",") if name},
    }


def whole_losses(head: Any, x: Any, targets: Any) -> dict[str, Callable[[], None]]:
    """GRPO and DPO over responses, of opfuse and of Liger, without a reference model."""
    import torch
    from opfuse_loss import losses

    import opfuse
    from opfuse import ops

    count = len(targets) // RESPONSE
    sequences = torch.arange(count).repeat_interleave(RESPONSE)
    responses, hidden = targets.view(count, RESPONSE), x.view(count, RESPONSE, -1)
    advantages, mask = torch.randn(count), torch.ones(count, RESPONSE)
    policy = opfuse.Sequential(head, ops.TokenLogProb(), losses.GRPO())
    preference = opfuse.Sequential(head, ops.TokenLogProb(), losses.DPO())
    pairs, nothing = torch.arange(count).view(2, -1).t(), torch.zeros(len(targets))
    few = 512 // RESPONSE  # responses, of as many rows as a chunk of opfuse has

    def dpo() -> None:
        with opfuse.options(prefer="memory"):
            preference(x, targets, sequences, pairs, nothing).backward()

    def liger_grpo() -> None:
        from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss as Loss

        loss = Loss(beta=0.0, compiled=False, use_ref_model=False, chunk_size=few)
        loss(hidden, head.weight, responses, mask, advantages)[0].backward()

    def liger_dpo() -> None:
        from liger_kernel.chunked_loss import LigerFusedLinearDPOLoss as Loss

        loss = Loss(compiled=False, use_ref_model=False, chunk_size=few // 2)
        loss(head.weight, hidden, responses)[0].backward()

    return {
        "grpo": lambda: policy(x, targets, sequences, advantages).backward(),
        "liger-grpo": liger_grpo,
        "dpo": dpo,
        "liger-dpo": liger_dpo,
    }


def measure(options: argparse.Namespace, classes: int, dtype: str) -> dict[str, Any]:
    """One row of the result."""
    sides = steps(options, classes, dtype)
    names = list(sides)
    held = {name: in_a_process(options, classes, dtype, name) for name in names}
    times: dict[str, list[float]] = {name: [] for name in names}
    clock = time.process_time if options.threads == 1 else time.perf_counter
    for turn in range(options.turns + 1):
        for name in names if turn % 2 else names[::-1]:
            start = clock()
            sides[name]()
            if turn:  # the first one plans, and compiles kernels
                times[name].append(clock() - start)
    middle = {name: statistics.median(values) for name, values in times.items()}
    pairs = [a / b for a, b in zip(times["eager"], times["opfuse"], strict=True)]
    row = {
        "dtype": dtype,
        "classes": classes,
        "seconds": times,
        "speed": middle["eager"] / middle["opfuse"],
        "speed_of_turns": [min(pairs), max(pairs)],
        "bytes": held,
        "memory": held["opfuse"] / held["eager"],
        "beside": {
            name: {"speed": middle["eager"] / middle[name], "memory": held[name] / held["eager"]}
            for name in names[2:]
        },
    }
    good = row["memory"] <= MOST_MEMORY and row["speed"] >= LEAST_SPEED
    low, high = row["speed_of_turns"]
    print(
        f"{dtype:9} {classes:7} classes: {middle['eager']:.2f} s eager, {middle['opfuse']:.2f} s "
        f"opfuse, speed {row['speed']:.2f} ({low:.2f} to {high:.2f}); "
        f"{held['eager'] / 1e6:.0f} MB eager, {held['opfuse'] / 1e6:.0f} MB opfuse, "
        f"memory {row['memory']:.2f}{'' if good else '  <-- misses the goal'}",
        flush=True,
    )
    for name, ratios in row["beside"].items():
        print(
            f"{'':10}{name}: speed {ratios['speed']:.2f}, memory {ratios['memory']:.2f}", flush=True
        )
    return row


def in_a_process(options: argparse.Namespace, classes: int, dtype: str, name: str) -> int:
    """The memory of one side, in bytes."""
    command = [sys.executable, __file__, "--memory-of", name, "--classes", str(classes)]
    for each in ("tokens", "hidden", "threads", "of", "beside"):
        command += [f"--{each}", str(getattr(options, each))]
    given = [*command, "--dtypes", dtype]
    return int(subprocess.run(given, check=True, capture_output=True, text=True).stdout)


def memory(options: argparse.Namespace) -> int:
    """The largest resident size during a step above that before it."""
    warm = argparse.Namespace(**{**vars(options), "tokens": 256, "hidden": 128})
    for name, step in steps(warm, 1024, options.dtypes).items():  # libraries take memory once
        if name != "compiled":
            step()
    step = steps(options, int(options.classes), options.dtypes)[options.memory_of]
    if options.memory_of == "compiled":
        step()
    gc.collect()
    before = resident("VmRSS")
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the largest size is the present one
    step()
    return resident("VmHWM") - before


def resident(name: str) -> int:
    """A size of this process, as Linux tells it."""
    lines = pathlib.Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(name)))


if __name__ == "__main__":
    main()
