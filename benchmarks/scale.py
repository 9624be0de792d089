"""What tensor and data parallelism cost, on paper, and how far the paper is from this machine.

python benchmarks/scale.py predict
python benchmarks/scale.py measure --processes 2

``predict`` prints the time of a training step of a Llama-like model on H100s, for tensor parallel
groups of 1 to 8 GPUs and 1 to 4,096 data parallel replicas, and how much of the communication runs
beside products. A collective takes a latency per step of its ring and the time of its bytes (the
alpha-beta model of Hockney 1994); a product takes its operations over a rate. Nothing of it was
measured on a GPU. ``measure`` starts processes over gloo, measures latency, bandwidth and the rate
of a product between them, predicts chains of sizes that it did not measure, and measures those.
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import multiprocessing

import opfuse
from opfuse import ops


class Link(NamedTuple):
    """A connection between neighbours of a ring.

    Attributes:
        latency: Seconds of a step.
        bandwidth: Bytes per second of one process, in one direction.
    """

    latency: float
    bandwidth: float

    def gather(self, size: float, processes: int) -> float:
        """Seconds to gather, or to reduce and scatter, a tensor of ``size`` bytes in all."""
        return (processes - 1) * (self.latency + size / processes / self.bandwidth)

    def reduce(self, size: float, processes: int) -> float:
        """Seconds to add up ``size`` bytes on every process, by a ring or a tree."""
        tree = 2 * math.ceil(math.log2(processes)) if processes > 1 else 0
        moved = 2 * size * (processes - 1) / processes / self.bandwidth
        return min(2 * (processes - 1), tree) * self.latency + moved


class Machine(NamedTuple):
    """The constants of a prediction.

    Attributes:
        rate: Operations per second of a matrix product.
        inside: The link between the processes of a tensor parallel group.
        outside: The link between replicas.
    """

    rate: float
    inside: Link
    outside: Link


H100 = Machine(
    0.6 * 989e12,  # of the dense bf16 peak in its data sheet
    Link(5e-6, 0.8 * 450e9),  # NVLink 4: 450 GB/s in each direction
    Link(15e-6, 0.8 * 50e9),  # 400 Gb/s of InfiniBand for each GPU
)
PIECES = 4
"""How many pieces of a product an overlapped collective runs beside."""


class Model(NamedTuple):
    """A Llama-like model: sizes of Llama 3 8B, tokens of one step and replica."""

    hidden: int = 4096
    inner: int = 14336
    keys: int = 1024
    layers: int = 32
    tokens: int = 8192
    sequence: int = 8192

    @property
    def weights(self) -> int:
        """Weights of a layer."""
        return 2 * self.hidden * (self.hidden + self.keys) + 3 * self.hidden * self.inner

    @property
    def operations(self) -> float:
        """Operations of a layer's forward; attention sees half of a sequence, on average."""
        return 2 * self.tokens * (self.weights + self.sequence * self.hidden)


class Step(NamedTuple):
    """The seconds of a step, and what of its communication runs beside products."""

    total: float
    compute: float
    communication: float
    hidden: float


def beside(product: float, collective: float, pieces: int) -> float:
    """Seconds of a product and a collective of which each piece waits for one of the other."""
    return max(product, collective) + min(product, collective) / pieces


def predict(machine: Machine, model: Model, split: int, replicas: int, overlap: bool) -> Step:
    """Predict a training step.

    Args:
        machine: The constants.
        model: The model.
        split: Processes of a tensor parallel group, with sequence parallelism.
        replicas: Data parallel replicas.
        overlap: Whether collectives run beside the products next to them.
    """
    product = model.operations / split / machine.rate / 4  # of one of four linears, with its share
    collective = machine.inside.gather(2 * model.tokens * model.hidden, split)
    # forward: a collective at each of two gathers and two scatters. Backward: twice the products,
    # the adjoints of the four collectives, and what two linears gathered once more
    forward = 4 * (beside(product, collective, PIECES) if overlap else product + collective)
    backward = 8 * product + 6 * collective
    if overlap:  # the eight products, six of them beside a collective
        backward = 6 * beside(product, collective, PIECES) + 2 * product
    of_layer = 12 * product, (10 * collective if split > 1 else 0.0)
    compute, inside = (model.layers * each for each in of_layer)
    layers = model.layers * (forward + backward)
    gradients = machine.outside.reduce(2 * model.layers * model.weights / split, replicas)
    # the gradients of a layer go out while those of the layers before it are computed
    last = gradients / model.layers
    shown = max(last, gradients - model.layers * backward) if replicas > 1 else 0.0
    total = layers + (shown if overlap else gradients)
    communication = inside + gradients
    return Step(total, compute, communication, compute + communication - total)


def table() -> None:
    """Print the predictions."""
    model = Model()
    print("H100, Llama 3 8B, 8,192 tokens per step and replica, bf16; nothing here was measured\n")
    heads = "tensor parallel", "replicas", "GPUs", "serial", "overlapped", "hidden", "efficiency"
    print(f"| {' | '.join(heads)} |\n|{'---:|' * len(heads)}")
    alone = predict(H100, model, 1, 1, False).total
    for split in (1, 2, 4, 8):
        for replicas in sorted({1, 8, 64, 512, 4096 // split}):
            serial = predict(H100, model, split, replicas, False)
            step = predict(H100, model, split, replicas, True)
            share = step.hidden / step.communication if step.communication else 0.0
            cells = (
                f"{split}", f"{replicas:,}", f"{split * replicas:,}",
                f"{serial.total * 1e3:,.0f} ms",
                f"{step.total * 1e3:,.0f} ms", f"{share:.0%}" if step.communication else "",
                f"{alone / split / step.total:.0%}",
            )  # fmt: skip
            print(f"| {' | '.join(cells)} |")


# Held against processes over gloo


def seconds(call: Callable[[], Any], repeats: int = 7) -> float:
    """The median time of a call, after a barrier; that of the slowest process."""
    call()
    found = []
    for _ in range(repeats):
        dist.barrier()
        started = time.perf_counter()
        call()
        took = torch.tensor(time.perf_counter() - started)
        dist.all_reduce(took, dist.ReduceOp.MAX)
        found.append(float(took))
    return statistics.median(found)


def constants() -> Machine:
    """Measure the constants of this machine, while all processes do the same."""
    size, gather = dist.get_world_size(), ops.AllGather()
    few, many = torch.zeros(16), torch.zeros(1 << 20)
    with torch.no_grad():
        small, large = (seconds(lambda x=x: gather(x)) for x in (few, many))
    steps = size - 1
    link = Link(small / steps, steps * many.nbytes / max(large - small, 1e-9))
    a, b = torch.randn(512, 512), torch.randn(512, 1024)
    return Machine(2 * 512 * 512 * 1024 / seconds(lambda: a @ b), link, link)


def chain(width: int, inner: int) -> opfuse.Sequential:
    """Two linears, the first split by columns and the second by rows, with parts of the rows."""
    split = {"sequence_parallel": True, "bias": False}
    return opfuse.Sequential(
        ops.Linear(width, inner, tensor_parallel_mode="column", **split),
        ops.ReLU(),
        ops.Linear(inner, width, tensor_parallel_mode="row", **split),
    )


def compare(rank: int, processes: int, folder: str) -> None:
    """Measure constants, predict chains, and measure those."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/init", rank=rank, world_size=processes
    )
    machine, rows = constants(), []
    for tokens, width, inner in ((512, 256, 1024), (1024, 512, 2048), (2048, 256, 512)):
        model = chain(width, inner)
        x = torch.randn(tokens // processes, width, requires_grad=True)

        def step(model: Any = model, x: Any = x) -> None:
            model(x).sum().backward()

        product = 2 * tokens * width * inner / processes / machine.rate
        collective = machine.inside.gather(4 * tokens * width, processes)
        # three times two products; two collectives, their adjoints, and one gathered again
        predicted, measured = 6 * product + 5 * collective, seconds(step)
        rows.append({"tokens": tokens, "width": width, "inner": inner, "predicted": predicted,
                     "measured": measured})  # fmt: skip
    if rank == 0:
        found = {"processes": processes, "cpu": platform.processor() or cpu(), **about(machine)}
        print(json.dumps({**found, "torch": torch.__version__, "chains": rows}, indent=1))
    dist.barrier()
    dist.destroy_process_group()


def about(machine: Machine) -> dict[str, float]:
    """The measured constants, with their units."""
    return {
        "latency_us": machine.inside.latency * 1e6,
        "bandwidth_GBps": machine.inside.bandwidth / 1e9,
        "product_GFLOPs": machine.rate / 1e9,
    }


def cpu() -> str:
    """The model and family of the CPU."""
    lines = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    known = dict(tuple(map(str.strip, line.split(":", 1))) for line in lines if ":" in line)
    return f"{known['model name']}, family {known['cpu family']}"


def main() -> None:
    """Print what was asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("predict", "measure"))
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    if options.what == "predict":
        table()
        return
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(compare, (options.processes, folder), nprocs=options.processes)


if __name__ == "__main__":
    main()
