"""A training step of a Llama on a GPU: eager, converted, compiled, with Liger's kernels.

python benchmarks/gpu_step.py --out gpu-step.json

The model has the widths of Llama 3 8B, four layers and a vocabulary of 32,000, in bf16 with random
weights. A step is the forward with the loss, the backward, and a fused AdamW, over 2 x 2,048
tokens. All ways take turns in one process, in rounds whose order is drawn. A turn is two steps that
are not timed, then ten that are, by the GPU's clock; only when all are queued does the host wait.

The ways share one set of weights and one optimizer, so that one step's memory is there at a time.
The learning rate is 0: all turns compute with the same numbers, and the optimizer moves the same
bytes. transformers would look for packed sequences in each step, and wait for the GPU; that is
off for all ways.

For each way the file has the median of its turns in milliseconds, ``low`` and ``high`` (the 20th
and the 80th percentile), ``speed`` (the median over the rounds of eager's time over its own),
``python_ms`` (what the host takes for a step that waits for nothing), ``sm_mhz`` (the clock during
its turns, where nvidia-smi says it), ``peak_gb`` (weights, optimizer, what the way keeps between
steps, and its step's peak), and the losses of its first step and of its last. A way whose name ends
in ``-layers`` replays its layers from CUDA graphs, one in ``-graph`` its whole step.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import pathlib
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple
from unittest import mock

ROOT = pathlib.Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

import opfuse  # noqa: E402
from benchmarks import report  # noqa: E402
from benchmarks.measure import failure, spread  # noqa: E402
from benchmarks.record import about, begin_state, ended_state  # noqa: E402
from opfuse.tuning.job import replace  # noqa: E402

WAYS = ("eager", "converted", "memory", "fp8", "liger", "compile", "converted-compile")
WAYS += ("eager-layers", "converted-layers", "fp8-layers")
WAYS += ("eager-graph", "converted-graph", "fp8-graph")  # what breaks a GPU comes last
LEAD, STEPS = 2, 10
Row = dict[str, Any]


class Sizes(NamedTuple):
    """Sizes of the model and its batch; the defaults are those of Llama 3 8B, but for two."""

    layers: int = 4
    width: int = 4096
    hidden: int = 14336
    heads: int = 32
    kv_heads: int = 8
    classes: int = 32000
    tokens: int = 2048


TINY = Sizes(1, 64, 96, 4, 2, 128, 16)


class Way(NamedTuple):
    """How a step is computed.

    Attributes:
        step: Queues a step and returns its loss.
        around: The context of a turn.
    """

    step: Callable[[], torch.Tensor]
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext


class Bench:
    """Makes ways and times their turns, on a GPU, or on a CPU to try it."""

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        import transformers
        from transformers import masking_utils

        masking_utils.find_packed_sequence_indices = lambda position_ids: None
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            hidden_size=sizes.width, intermediate_size=sizes.hidden, vocab_size=sizes.classes,
            num_attention_heads=sizes.heads, num_key_value_heads=sizes.kv_heads,
            num_hidden_layers=sizes.layers, dtype=torch.bfloat16, use_cache=False,
        )  # fmt: skip
        self.on_gpu = device.type == "cuda"
        with device:
            self.model: Any = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
            self.tokens = torch.randint(sizes.classes, (2, sizes.tokens))
        same = {"lr": 0.0, "weight_decay": 0.0, "fused": True, "capturable": self.on_gpu}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **same)
        for param in self.model.parameters():
            param.grad = torch.zeros_like(param)
        self.optimizer.step()  # its state is there before the first way's memory is looked at

    def make(self, name: str) -> Way:
        """A way by its name; what it imports may be missing, and its model may not compile."""
        # the copy has the same parameters
        shared = {id(p): p for p in self.model.parameters()}
        model, around = copy.deepcopy(self.model, shared), contextlib.nullcontext
        kind = name.removesuffix("-graph").removesuffix("-layers")
        if kind == "liger":
            around = with_liger(model)
        if kind in ("converted", "memory", "fp8", "converted-compile"):
            opfuse.convert(model)
        recipe = "fp8-delayed" if kind == "fp8" else None
        prefer = "memory" if kind == "memory" else "speed"
        called = torch.compile(model) if "compile" in kind else model

        def step() -> torch.Tensor:
            self.optimizer.zero_grad(set_to_none=True)
            low = opfuse.autocast(recipe) if recipe else contextlib.nullcontext()
            with opfuse.options(prefer=prefer), low:
                loss = called(input_ids=self.tokens, labels=self.tokens).loss
            loss.backward()
            self.optimizer.step()
            return loss.detach()

        if name.endswith("-layers"):
            step()  # makes the state of a recipe
            with opfuse.options(prefer=prefer):
                opfuse.graphed(model, input_ids=self.tokens, labels=self.tokens, recipe=recipe)
        return Way(captured(step) if name.endswith("-graph") else step, around)

    def state(self) -> int:
        """Bytes in use between steps."""
        self.optimizer.zero_grad(set_to_none=True)
        return torch.cuda.memory_allocated() if self.on_gpu else 0

    def wait(self) -> None:
        """Wait for the GPU."""
        if self.on_gpu:
            torch.cuda.synchronize()

    def first(self, name: str) -> tuple[Way, Row]:
        """A way, warmed up, and what is known of it: its first loss, and its memory."""
        before = self.state()
        way = self.make(name)
        with way.around():
            loss = float(way.step())
            for _ in range(LEAD):
                way.step()
            self.wait()
            held = self.state() - before
            if self.on_gpu:
                torch.cuda.reset_peak_memory_stats()
            way.step()
            self.wait()
        row: Row = {"way": name, "loss": loss}
        if self.on_gpu and not name.endswith(("-graph", "-layers")):  # a graph keeps its memory
            used = torch.cuda.max_memory_allocated() - before - held
            row["held_gb"], row["step_gb"] = held / 2**30, used / 2**30
            row["peak_gb"] = (self.shared_bytes() + held + used) / 2**30
        return way, row

    def shared_bytes(self) -> int:
        """Bytes of the weights and of the optimizer."""
        states = [each for of in self.optimizer.state.values() for each in of.values()]
        return sum(each.nbytes for each in [*self.model.parameters(), *states])

    def turn(self, way: Way) -> Row:
        """Milliseconds of a step, those of its Python, the clock meanwhile, and the last loss."""
        with way.around():
            began = time.perf_counter()
            way.step()
            python = time.perf_counter() - began
            for _ in range(LEAD - 1):
                way.step()
            asked, started = begin_state(), self._mark()
            for _ in range(STEPS):
                loss = way.step()
            ended = self._mark()
            self.wait()
        taken = started.elapsed_time(ended) if self.on_gpu else 1e3 * (ended - started)
        clocks = ended_state(asked).get("clocks.sm", "")
        mhz = int(clocks.split()[0]) if clocks[:1].isdigit() else None
        row = {"ms": taken / STEPS, "python_ms": 1e3 * python, "sm_mhz": mhz}
        return row | {"last_loss": float(loss)}

    def _mark(self) -> Any:
        """Now: an event that the GPU reaches, or the clock of a CPU."""
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def kernels(self, way: Way) -> list[Any]:
        """What :func:`kernels_of` says of one step."""
        activity = torch.profiler.ProfilerActivity
        kinds = [activity.CUDA if self.on_gpu else activity.CPU]
        with way.around(), torch.profiler.profile(activities=kinds) as profile:
            way.step()
            self.wait()
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "trace.json")
            profile.export_chrome_trace(str(path))
            return kernels_of(json.loads(path.read_text(encoding="utf-8")))


def with_liger(model: Any) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """Give a model Liger's kernels; the functions that it replaces for all models, in a context."""
    from liger_kernel.transformers import apply_liger_kernel_to_llama
    from transformers.models.llama import modeling_llama as library

    before = dict(vars(library))
    apply_liger_kernel_to_llama(model=model)
    put = {name: value for name, value in vars(library).items() if before.get(name) is not value}
    vars(library).update(before)
    return lambda: mock.patch.multiple(library, **put)


def captured(step: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """A step from a CUDA graph."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        loss = step()

    def replay() -> torch.Tensor:
        graph.replay()
        return loss

    return replay


def kernels_of(trace: Row) -> list[Any]:
    """Names, milliseconds and launches of a trace's kernels, and their sum first.

    A trace has copies, memory that is filled, calls of the runtime and annotations too: they are no
    kernels.
    """
    taken, count = Counter[str](), Counter[str]()
    for event in trace["traceEvents"]:
        if event.get("cat") == "kernel":
            taken[event["name"]] += event["dur"] / 1e3
            count[event["name"]] += 1
    rows = [[name, ms, count[name]] for name, ms in taken.most_common()]
    return [["all", taken.total(), count.total()], *rows]


def rounds_of(
    bench: Any,
    names: Iterable[str],
    rounds: int,
    left: Callable[[], float],
    keep: Callable[[Row], None],
    *,
    kernels: bool = False,
    seed: int = 0,
) -> Row:
    """Let ways take turns.

    When a way is there, all that are there have a round, so that what a later one takes or breaks
    costs no more than itself. Then as many rounds follow as were asked for.

    Args:
        bench: See :class:`Bench`.
        names: Of the ways.
        rounds: How many with all of them.
        left: Seconds that are left.
        keep: Called with the result so far.
        kernels: Whether each way has a step in the profiler, at the end.
        seed: Of the orders.
    """
    order, ready = random.Random(seed), dict[str, Way]()
    result: Row = {"rows": [], "rounds": [], "seed": seed}
    rows: dict[str, Row] = {}

    def attempt(name: str, call: Callable[..., Any], *given: Any) -> Any:
        result["now"] = name
        keep(result)
        try:
            return call(*given)
        except Exception as error:
            rows.setdefault(name, {"way": name})["why"] = failure(error)
            ready.pop(name, None)

    def one_round() -> None:
        turns: list[Row] = []
        for name in order.sample(sorted(ready), len(ready)):
            if found := attempt(name, bench.turn, ready[name]):
                turns.append({"way": name} | found)
        result["rounds"].append(turns)
        result["rows"] = [row | summary(row["way"], result["rounds"]) for row in rows.values()]
        keep(result)

    for name in names:
        if left() <= 0:
            rows[name] = {"way": name, "why": "no time"}
        elif found := attempt(name, bench.first, name):
            ready[name], rows[name] = found
            one_round()
    for _ in range(rounds):
        if left() > 0 and ready:
            one_round()
    for name in list(ready) if kernels else ():
        if left() > 0 and (found := attempt(name, bench.kernels, ready[name])):
            rows[name]["kernels"] = found
    result["rows"] = [row | summary(row["way"], result["rounds"]) for row in rows.values()]
    result["now"] = ""
    keep(result)
    return result


def summary(way: str, rounds: list[list[Row]]) -> Row:
    """What the turns of a way say together; nothing if it had none."""
    pairs = [({turn["way"]: turn for turn in turns}) for turns in rounds]
    mine = [pair[way] for pair in pairs if way in pair]
    if not mine:
        return {}
    low, middle, high = spread([turn["ms"] for turn in mine])
    beside = [pair["eager"]["ms"] / pair[way]["ms"] for pair in pairs if {way, "eager"} <= {*pair}]
    clocks = [turn["sm_mhz"] for turn in mine if turn["sm_mhz"]]
    return {
        "ms": middle, "low": low, "high": high, "turns": len(mine),
        "speed": statistics.median(beside) if beside else None,
        "python_ms": statistics.median(turn["python_ms"] for turn in mine),
        "sm_mhz": statistics.median(clocks) if clocks else None,
        "last_loss": mine[-1]["last_loss"],
    }  # fmt: skip


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ways", default=",".join(WAYS), help="names, with commas")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each way")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for everything")
    parser.add_argument("--kernels", action="store_true", help="which kernels a step launches")
    parser.add_argument("--seed", type=int, default=0, help="of the orders of the rounds")
    parser.add_argument("--out", type=pathlib.Path, metavar="FILE", help="write all numbers")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Time all ways, and print a table."""
    asked, end = parsed(arguments), time.monotonic()
    end += asked.limit
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sizes = Sizes() if device.type == "cuda" else TINY
    base = about("gpu-step", device) | {"sizes": sizes._asdict(), "steps": STEPS}

    def keep(found: Row) -> None:
        if asked.out:
            replace(asked.out, base | found)

    found = rounds_of(
        Bench(sizes, device), asked.ways.split(","), asked.rounds, lambda: end - time.monotonic(),
        keep, kernels=asked.kernels, seed=asked.seed,
    )  # fmt: skip
    print("\n".join([*report.of_step(found), "", *report.launches_of(found)]))


if __name__ == "__main__":
    main()
