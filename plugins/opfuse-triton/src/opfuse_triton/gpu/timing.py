"""Timing on a GPU: a CUDA graph over sets of inputs, together larger than the L2 cache."""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Call = Callable[[], Any]
CALLS = 40
"""Calls in a graph, at least."""

SAMPLES = 5
MOST_SETS = 16


def own_stream(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """A stream of a GPU that is not the default one, on which no CUDA graph can be captured."""
    on_gpu = device.type == "cuda"
    own: Any = torch.cuda.Stream() if on_gpu else None  # type: ignore[no-untyped-call]
    return torch.cuda.stream(own) if on_gpu else contextlib.nullcontext()


def capture(calls: Sequence[Call], times: int) -> Callable[[], float]:
    """Capture all calls, again and again, in one CUDA graph, within :func:`own_stream`.

    Args:
        calls: What to call, in turns.
        times: How often.

    Returns:
        A function that replays the graph and gives the seconds of one call.

    Raises:
        RuntimeError: They cannot be captured: one of them waits for the GPU, say.
    """
    graph = torch.cuda.CUDAGraph()
    try:
        # a capture that fails spoils random numbers, so see before that nothing waits
        for mode in ("default", "error"):
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode(mode)
            for call in calls:
                call()
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            for _ in range(times):
                for call in calls:
                    call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
    start: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    end: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def replay() -> float:
        graph.replay()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / (times * len(calls))

    return replay


class Clock:
    """Times calls on a device.

    Args:
        device: A GPU; or a CPU, where kernels are interpreted and each call is timed once.
        now: Seconds, for a CPU and for budgets.
    """

    def __init__(self, device: torch.device, now: Callable[[], float] = time.monotonic) -> None:
        self.device, self.now = device, now

    @property
    def cache(self) -> int:
        """Bytes of the L2 cache."""
        if self.device.type != "cuda":
            return 0
        return int(torch.cuda.get_device_properties(self.device).L2_cache_size)

    def sets(self, nbytes: int) -> int:
        """The number of sets of inputs of this size that do not fit into the cache together."""
        return max(1, min(MOST_SETS, math.ceil(2 * self.cache / max(nbytes, 1))))

    def seconds(self, calls: Sequence[Call]) -> float:
        """Return the seconds of a call, without the time that the host takes.

        Raises:
            RuntimeError: The calls cannot be captured in a CUDA graph.
        """
        if self.device.type != "cuda":
            began = self.now()
            calls[0]()
            return self.now() - began
        replay = capture(calls, math.ceil(CALLS / len(calls)))
        return statistics.median(replay() for _ in range(SAMPLES))

    def limits(self, size: int = 1 << 28, width: int = 8192) -> tuple[float, float]:
        """What this device reaches: bytes per second of a copy, operations of a bf16 product.

        Args:
            size: Number of elements copied.
            width: Rows, columns and depth of the product.
        """
        source = torch.zeros(size, dtype=torch.bfloat16, device=self.device)
        target = torch.empty_like(source)
        copied = 2 * source.nbytes / self.seconds([lambda: target.copy_(source)])
        left = torch.randn(width, width, device=self.device).bfloat16()
        product = 2 * width**3 / self.seconds([lambda: left @ left])
        return copied, product


def bound(run: Callable[..., Any], sets: Sequence[dict[str, Tensor]]) -> list[Call]:
    """A call for each set of inputs."""
    return [lambda given=given: run(**given) for given in sets]  # type: ignore[misc]
