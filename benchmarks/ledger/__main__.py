"""``python -m benchmarks.ledger [PLUGIN]``: count the bytes that kernels move, with no GPU.

``python -m benchmarks.ledger launches`` counts what a training step of a block launches, and
``python -m benchmarks.ledger experts`` what one of a mixture of experts launches and moves.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from opfuse_triton import TARGETS, KernelCase, Target, is_interpreting
from opfuse_triton.recorded import case_lists, load_cases

from .entries import SAMPLE, Moved, count_separate, count_small, estimate
from .peers import estimate_peer
from .predicted import separate_seconds
from .tables import peer_lines, small_table, target_table

MODEL = (
    "* a model, not measured: bytes in flight over a latency of 1.2 us, at most the bandwidth; "
    "matrix\n  products at the peak."
)


def main() -> None:
    """Print the ledger of one plugin, or of all that are installed; or count launches."""
    if sys.argv[1:2] == ["launches"]:
        from .launches import main as count_launches

        return count_launches(sys.argv[2:])
    if sys.argv[1:2] == ["experts"]:
        from .experts import main as count_experts

        return count_experts(sys.argv[2:])
    if sys.argv[1:2] == ["host"]:
        from .host import main as count_calls

        return count_calls(sys.argv[2:])
    names = [str(target) for target in TARGETS.values()]
    parser = argparse.ArgumentParser(prog=f"python -m {__package__}", description=__doc__)
    parser.add_argument("plugin", nargs="?", help="an installed plugin, or module:object")
    parser.add_argument("--target", action="append", choices=names, help="only for this target")
    parser.add_argument("--sample", type=int, default=SAMPLE, help="programs of a launch that run")
    asked = parser.parse_args()
    if not is_interpreting():  # Triton decides when it is imported
        command = [sys.executable, "-m", str(__package__), *sys.argv[1:]]
        sys.exit(subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}).returncode)
    chosen = [target for target in TARGETS.values() if str(target) in (asked.target or names)]
    for name, where in case_lists(asked.plugin).items():
        for case in load_cases(where):
            print(f"{name}: {case.name}")
            for line in _ledger_of(case, [*filter(case.fits, chosen)], asked.sample):
                print(line, flush=True)
            print()
    print(MODEL)


def _ledger_of(case: KernelCase, targets: list[Target], sample: int) -> Iterator[str]:
    for shape in case.small:
        rows: dict[str, Moved | int | str] = {"opfuse": count_small(case, shape)}
        separate = count_separate(case, shape)
        if separate is not None:
            rows["separate ops"] = separate
        for peer, run in case.peers.items():
            try:
                rows[peer] = count_small(case, shape, run)
            except ImportError:
                rows[peer] = "not installed"
            except Exception as error:  # another package's
                rows[peer] = f"does not run here: {type(error).__name__}: {error}"[:80]
        yield from small_table(shape, case.floor_bytes(shape), rows)
    for shape in case.shapes:
        counted: dict[Any, Any] = {}
        entries = [estimate(case, shape, target, sample, counted) for target in targets]
        yield from target_table(case, shape, entries, sample)
        separate_times = [separate_seconds(case, shape, target) for target in targets]
        pairs = zip(entries, separate_times, strict=True)
        speeds = [f"{entry.target} {time / entry.seconds:.2f}x" for entry, time in pairs if time]
        if speeds:
            yield f"    over the separate ops*: {', '.join(speeds)}"
        for name, run in case.peers.items():
            try:
                others = [estimate_peer(case, shape, target, run, sample) for target in targets]
                yield from peer_lines(case, shape, name, others)
            except Exception as error:  # another package's
                if not case.small:  # where it was not said before
                    yield f"    {name} does not run here: {type(error).__name__}: {error}"[:100]


if __name__ == "__main__":
    main()
