"""Whether a chain is slower than the separate ops after ``opfuse tune``: a second process says.

python benchmarks/tuned.py --out tuned.json
python benchmarks/tuned.py --ids demo,L1 --threads 1
python benchmarks/tuned.py --tables DIR; OPFUSE_TUNING=DIR python benchmarks/tuned.py --part measure

One process tunes for every chain, into a table of its own. A second process then times each chain
with the plans that follow from the table against the same ops without any plugin, in turns: at
least 20 a side, at most 400, and again, up to three times, while half the width of a 95 % interval
of the median is more than 0.02 of it (of 1, where it is less). A chain is in order if its median
speed is at least 0.98 and the upper end of the interval at least 0.99, or if the plan took no
fusion, so that both sides run the same ops; where the interval stays wide it counts as failed. The
chains are those of the demo, and those of the cases L1, C1, C3 and
L2, at one and at two passes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
MEDIAN, UPPER, TRIES, TURNS = 0.98, 0.99, 3, 400
IDS = ("demo", "L1", "C1", "C3", "L2")
DEMO = {"batch": 16, "context": 128, "width": 256, "layers": 1}


class Chain(NamedTuple):
    """A chain to time.

    Attributes:
        name: What it is called.
        metric: inference, forward or forward+backward.
        model: What is called.
        inputs: With these.
        grads: The gradients of its outputs.
    """

    name: str
    metric: str
    model: Any
    inputs: Sequence[Any]
    grads: Sequence[Any]


def main() -> None:
    """Tune, then measure, each in a process of its own; or be one of these."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ids", default=",".join(IDS))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--tables", type=pathlib.Path, help="a folder for the table; default: one that is deleted"
    )
    parser.add_argument("--out", type=pathlib.Path, help="a JSON file for the result")
    parser.add_argument("--part", choices=("tune", "measure"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part is None:
        with tempfile.TemporaryDirectory() as folder:
            os.environ["OPFUSE_TUNING"] = str(options.tables or folder)
            for part in ("tune", "measure"):
                subprocess.run([sys.executable, *sys.argv, "--part", part], check=True)
        return
    import torch

    torch.set_num_threads(options.threads)
    found = chains(options.ids.split(","))
    if options.part == "tune":
        tune(found)
    else:
        measure(found, options)


def chains(ids: Sequence[str]) -> list[Chain]:
    """Every chain, each metric once."""
    import torch

    from benchmarks.cases import CASES
    from benchmarks.chains import Work
    from benchmarks.providers import with_opfuse

    found = list(demo()) if "demo" in ids else []
    seen = set()
    for case in CASES:
        key = case.chain, case.rows, case.width, case.dtype, case.metric
        wanted = case.id in ids and "cpu" in case.suites and key not in seen
        if wanted and case.metric in ("inference", "forward", "forward+backward"):
            seen.add(key)
            work = Work(case.chain, case.rows, case.width, case.dtype, torch.device("cpu"))
            model = with_opfuse(work, case, selection="").model
            name = f"{case.id} {case.chain}, {case.dtype} of {case.rows}"
            found.append(Chain(name, case.metric, model, work.inputs[0], work.grads))
    return found


def demo() -> Iterator[Chain]:
    """The chains of the example's model."""
    import importlib.util

    import torch

    path = ROOT / "examples" / "train_lm.py"
    spec = importlib.util.spec_from_file_location("train_lm", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.manual_seed(0)
    model = module.LanguageModel(DEMO["width"], DEMO["layers"])
    shape = DEMO["batch"], DEMO["context"], DEMO["width"]
    block = model.blocks[0]
    for name, chain, count in (
        ("qkv", block.qkv, 1),
        ("project", block.project, 2),
        ("mlp", block.mlp, 1),
        ("head", model.head, 1),
    ):
        inputs = [torch.randn(shape, requires_grad=True) for _ in range(count)]
        grads = [torch.randn_like(chain(*inputs))]
        for metric in ("inference", "forward+backward"):
            yield Chain(f"demo {name}", metric, chain, inputs, grads)


@contextlib.contextmanager
def around(chain: Chain) -> Iterator[None]:
    """The grad mode of a chain."""
    import torch

    with torch.set_grad_enabled(chain.metric != "inference"):
        yield


def tune(found: Sequence[Chain]) -> None:
    """Measure every candidate of every chain."""
    from tqdm import tqdm

    import opfuse

    for chain in tqdm(found, unit="chain", desc="tuning"):
        with around(chain):
            report = opfuse.tune(chain.model, *chain.inputs)
        tqdm.write(f"{chain.name}, {chain.metric}: {str(report).splitlines()[0]}")


def measure(found: Sequence[Chain], options: argparse.Namespace) -> None:
    """Time every chain and print how many are in order."""
    import torch
    from tqdm import tqdm

    import opfuse
    from benchmarks.record import about
    from opfuse.tuning.timing import compare

    rows = []
    timing: Any = None
    for chain in tqdm(found, unit="chain", desc="measuring"):
        with around(chain):
            separate, fused = step(chain, ""), step(chain, None)
            with opfuse.plugins.using(None):
                plan = opfuse.explain(chain.model, *chain.inputs).calls[0].plan
            tries, given = 0, (separate, fused, torch.device("cpu"))
            while not tries or (not is_narrow(timing) and tries < TRIES):
                timing, tries = compare(*given, clear=False, most=TURNS), tries + 1
        narrow = is_narrow(timing)
        fusions = [s.fusion for s in (*plan.forward, *plan.backward) if s.fusion]
        fast = timing.speed >= MEDIAN and timing.speed + timing.noise >= UPPER
        right = narrow and (fast or not fusions)
        rows.append(
            {"chain": chain.name, "metric": chain.metric, "tries": tries}
            | {"speed": timing.speed, "noise": timing.noise, "us": timing.second * 1e6}
            | {"fusions": fusions, "in_order": right}
        )
        mark = "" if right else "  <-- not in order"
        speed = f"{timing.speed:.3f} +-{timing.noise:.3f}"
        tqdm.write(f"{speed}  {chain.metric:16} {chain.name}{mark}")
    good = sum(row["in_order"] for row in rows)
    device = torch.device("cpu")
    sure = sum(row["speed"] - row["noise"] > 1 for row in rows)
    slowest = min(row["speed"] for row in rows)
    print(f"{good} of {len(rows)} in order; {sure} faster for sure; slowest {slowest:.3f}")
    if options.out:
        result = about("tuned", device) | {"threads": options.threads, "chains": rows}
        options.out.write_text(json.dumps(result, indent=1) + "\n")


def is_narrow(timing: Any) -> bool:
    """Whether the interval is narrow enough to judge by."""
    from opfuse.tuning.timing import MOST_NOISE

    return bool(timing.noise <= MOST_NOISE * max(timing.speed, 1.0))


def step(chain: Chain, selection: str | None) -> Callable[[], object]:
    """A call of a chain with some plugins."""
    import torch

    import opfuse

    model, inputs = chain.model, chain.inputs
    params = [param for param in model.parameters() if param.requires_grad]

    def call() -> object:
        with opfuse.plugins.using(selection):
            y = model(*inputs)
        if chain.metric != "forward+backward":
            return y
        outputs = y if isinstance(y, tuple) else (y,)
        return torch.autograd.grad(outputs, [*inputs, *params], chain.grads)

    return call


if __name__ == "__main__":
    main()
