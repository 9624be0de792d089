"""What the Python of one kernel launch costs: Triton's JIT against ``opfuse_triton.Kernel``.

python benchmarks/launcher.py

Needs Triton and no GPU: the kernel is compiled for an H100, and a driver that does nothing stands
where Triton's is, so that loading and launching cost nothing. Both ways end in the same call of its
launcher. The two take turns of a few milliseconds; what is printed is the median of the turns in
microseconds, and the median ratio of a turn to the one next to it.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # Triton 3.9 warns where nobody says so

import torch
import triton
import triton.language as tl
from opfuse_triton import TARGETS, Config, Kernel, kernels
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

TURNS, CALLS = 200, 200
CONFIG = Config({"BLOCK": 1024}, num_warps=4, num_stages=2)


@triton.jit
def _twice(x):
    return 2 * x


@triton.jit
def _ten_arguments(
    a, b, c, d, e, out, rows, columns, stride, eps,
    VALUE: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < rows * columns
    total = VALUE(tl.load(a + at, inside).to(tl.float32)) + eps + stride
    if BIAS:
        total += tl.load(b + at, inside) + tl.load(c + at, inside)
    total += tl.load(d + at, inside) + tl.load(e + at, inside)
    tl.store(out + at, total, inside)


class IdleLauncher:
    """Triton's launcher of a compiled kernel, which does nothing."""

    def __init__(self, source: Any, metadata: Any) -> None:
        pass

    def __call__(self, *args: Any) -> None:
        pass


class IdleDriver:
    """A driver of Triton's with an H100 that does nothing; CPU tensors are on it."""

    launcher_cls = IdleLauncher

    def __init__(self) -> None:
        self.utils = self

    def get_current_device(self) -> int:
        """What ``get_device()`` of a CPU tensor says."""
        return -1

    def get_current_stream(self, device: int) -> int:
        """The handle of some stream."""
        return 7

    def get_current_target(self) -> GPUTarget:
        """Compile for an H100."""
        return GPUTarget("cuda", 90, 32)

    def get_device_properties(self, device: int) -> dict[str, int]:
        """What Triton wants to know before it loads a kernel."""
        return {"max_shared_mem": TARGETS[90].shared_memory}

    def load_binary(self, *unused: Any) -> tuple[int, ...]:
        """Load nothing: module, function, registers, spills, and the most threads."""
        return 1, 2, 32, 0, 1024

    def unload_module(self, *unused: Any) -> None:
        """Nothing was loaded."""


@contextlib.contextmanager
def idle_driver() -> Iterator[None]:
    """Within the context, launches on CPU tensors do nothing."""
    before = driver._active
    driver.set_active(IdleDriver())
    try:
        with mock.patch.object(kernels, "current_target", lambda device: TARGETS[90]):
            yield
    finally:
        driver._active = before


def ways() -> dict[str, Callable[[], Any]]:
    """The same launch through Triton's JIT and through opfuse."""
    tensors = [torch.empty(64, 64, dtype=torch.bfloat16) for _ in range(6)]
    numbers = 64, 64, 48, 1e-5
    kernel = Kernel(_ten_arguments, [CONFIG])
    options = CONFIG.compiler_options()

    def jit() -> Any:
        return _ten_arguments[(4,)](
            *tensors, *numbers, VALUE=_twice, BIAS=True, BLOCK=1024, **options
        )

    def opfuse() -> Any:
        return kernel.launch((4,), *tensors, *numbers, VALUE=_twice, BIAS=True)

    return {"JITFunction.run": jit, "Kernel.launch": opfuse}


def microseconds(call: Callable[[], Any]) -> float:
    """The time of one call, over a turn."""
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - start) / CALLS * 1e6


def main() -> None:
    """Measure and print."""
    with idle_driver():
        calls = ways()
        for call in calls.values():
            call()
        turns = [[microseconds(call) for call in calls.values()] for _ in range(TURNS)]
    for name, times in zip(calls, zip(*turns, strict=True), strict=True):
        print(f"{name:16} {statistics.median(times):6.2f} us")
    print(f"{'ratio':16} {statistics.median(ours / jit for jit, ours in turns):6.2f}")


if __name__ == "__main__":
    main()
