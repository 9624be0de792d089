"""The Python of small chains in this checkout against another one, in turns on one core.

python benchmarks/pairs.py OTHER_CHECKOUT
python benchmarks/pairs.py OTHER_CHECKOUT --ops
python benchmarks/pairs.py imports

The two processes of a pair take turns of a few milliseconds, so that what slows the machine down
slows both; which of them begins changes from pair to pair. What is printed is the median of the
ratios of the pairs, this checkout over the other, and a 95 % interval of that median (by ranks,
which assumes nothing about the noise). ``--ops`` measures every norm, activation and gated op alone
instead of the chains O1 and O2. ``imports`` prints how long ``import opfuse`` takes behind torch.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import math
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
SAMPLES, SECONDS = 40, 0.005


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("other", type=pathlib.Path, help="a checkout of another commit")
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument(
        "--ops",
        action="store_true",
        help="each op alone, forward and backward, instead of O1 and O2",
    )
    parser.add_argument("--core", type=int, default=None, help="default: the last one")
    options = parser.parse_args()
    core = options.core if options.core is not None else max(os.sched_getaffinity(0))
    other = options.other.resolve()
    if not (other / "opfuse" / "__init__.py").is_file():
        parser.error(f"{other} is not a checkout of opfuse")
    what = "ops" if options.ops else "chains"
    pairs = [
        run_pair((ROOT, other) if number % 2 else (other, ROOT), core, what)
        for number in range(options.pairs)
    ]
    print(
        f"{options.pairs} pairs of processes on core {core}, {cpu()}, "
        f"Python {platform.python_version()}"
    )
    for name in pairs[0][ROOT]:
        ratios = sorted(pair[ROOT][name] / pair[other][name] for pair in pairs)
        low, high = interval(ratios)
        before, after = (
            statistics.median(pair[where][name] for pair in pairs) for where in (other, ROOT)
        )
        middle = statistics.median(ratios)
        print(f"{name:40} {before:8.2f} -> {after:8.2f} us  {middle:.3f}x  [{low:.3f}, {high:.3f}]")


def interval(ratios: list[float]) -> tuple[float, float]:
    """A 95 % interval of the median of sorted numbers, by the ranks of a binomial distribution."""
    count, chance, rank = len(ratios), 0.0, 0
    while chance + math.comb(count, rank) / 2**count <= 0.025:
        chance += math.comb(count, rank) / 2**count
        rank += 1
    return ratios[max(rank - 1, 0)], ratios[min(count - rank, count - 1)]


def cpu() -> str:
    """The model of the CPU."""
    for line in pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def run_pair(
    checkouts: Sequence[pathlib.Path], core: int, what: str
) -> dict[pathlib.Path, dict[str, float]]:
    """The numbers of two checkouts, each from its own process: microseconds a call, by case."""
    children = {checkout: start_child(checkout, core, what) for checkout in checkouts}
    numbers: dict[pathlib.Path, dict[str, Any]] = {checkout: {} for checkout in checkouts}
    while not all("opfuse" in found for found in numbers.values()):
        for checkout, child in children.items():
            print("go", file=child.stdin, flush=True)
            numbers[checkout].update(json.loads(child.stdout.readline()))  # type: ignore[union-attr]
    for checkout, child in children.items():
        child.communicate()
        where = pathlib.Path(numbers[checkout].pop("opfuse"))
        assert where == checkout / "opfuse", f"{where} is not the opfuse of {checkout}"
    return numbers


def start_child(checkout: pathlib.Path, core: int, what: str) -> subprocess.Popen[str]:
    """Start the process that measures a checkout."""
    paths = [checkout, *checkout.glob("plugins/*/src")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"}
    command = ["taskset", "-c", str(core), sys.executable, __file__, "child", what]
    return subprocess.Popen(
        command, env=env, cwd=checkout, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def measure(what: str) -> Iterator[dict[str, Any]]:
    """What a child measures: after each turn, the best of a case so far."""
    import torch

    import opfuse

    torch.set_num_threads(1)
    torch.manual_seed(0)
    # torch's objects: to look through them before each sample would take longer than the samples
    gc.freeze()
    for title, plugins, chain, x in small_chains() if what == "chains" else single_ops():
        with opfuse.plugins.using(plugins):
            grad = torch.randn_like(chain(x))
            if what == "chains":
                for best in timed(functools.partial(chain, x)):
                    yield {f"{title} forward": best}
            for best in timed(lambda c=chain, x=x, g=grad: c(x).backward(g)):
                yield {f"{title} forward+backward": best}
    yield {"opfuse": str(pathlib.Path(opfuse.__file__).parent)}


def small_chains() -> Iterator[tuple[str, str | None, Any, Any]]:
    """O1 and O2, as in cases.txt: title, selection of plugins, chain, input."""
    import torch

    import opfuse
    from opfuse import ops

    x = torch.randn(4, 16, requires_grad=True)
    yield "O1 unfused", "", opfuse.Sequential(*[ops.Identity() for _ in range(4)]), x
    for title, plugins in (("O2 unfused", ""), ("O2", None)):
        yield (
            title,
            plugins,
            opfuse.Sequential(ops.Linear(16, 16), ops.GELU(), ops.Linear(16, 16)),
            x,
        )


def single_ops() -> Iterator[tuple[str, str | None, Any, Any]]:
    """The ops of L3 alone on 16 rows of 64 numbers.

    A call in Python takes most of their time.
    """
    import torch

    import opfuse
    from opfuse import ops

    norms = [(ops.RMSNorm, 64), (ops.LayerNorm, 64), (ops.L2Normalization,)]
    names = "GELU QGELU ReLU SReLU SiLU GLU GEGLU QGEGLU ReGLU SReGLU SwiGLU SiTUGLU ClampedSwiGLU"
    for dtype in (torch.float32, torch.bfloat16):
        for cls, *size in [*norms, *[(getattr(ops, name),) for name in names.split()]]:
            chain = opfuse.Sequential(cls(*size)).to(dtype)
            x = torch.randn(16, 64, dtype=dtype, requires_grad=True)
            yield f"{cls.__name__} {str(dtype).removeprefix('torch.')}", "", chain, x


def timed(call: Callable[[], Any]) -> Iterator[float]:
    """Microseconds a call takes: the least of the samples so far.

    The others only wait for something else.
    """
    for _ in range(200):
        call()  # the first one plans
    count, best = max(int(SECONDS / sample(call, 200) * 200), 1), math.inf
    for _ in range(SAMPLES):
        best = min(best, sample(call, count) / count * 1e6)
        yield best


def sample(call: Callable[[], Any], count: int) -> float:
    """Seconds that ``count`` calls take."""
    gc.collect()
    gc.disable()
    start = time.perf_counter()
    for _ in range(count):
        call()
    seconds = time.perf_counter() - start
    gc.enable()
    return seconds


def imports() -> None:
    """Print what importing opfuse takes once torch is there: the least of 15 processes."""
    code = (
        "import sys, time, torch; start = time.perf_counter(); import opfuse; "
        "print(time.perf_counter() - start, sum(m.split('.')[0] == 'opfuse' for m in sys.modules))"
    )
    command, found = [sys.executable, "-c", code], []
    for _ in range(15):
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
        found.append(done.stdout.split())
    seconds = min(float(each[0]) for each in found)
    print(f"{cpu()}, Python {platform.python_version()}")
    print(f"import opfuse behind torch: {seconds:.3f} s, {found[0][1]} modules")


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        for _, found in zip(sys.stdin, measure(sys.argv[2]), strict=False):
            print(json.dumps(found), flush=True)
    elif sys.argv[1:] == ["imports"]:
        imports()
    else:
        main()
