"""Timing on a GPU, over sets of inputs that are together larger than the L2 cache."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from opfuse.tuning.clock import Call, GPUClock

SAMPLES = 5

WARM = 0.02
"""Seconds of calls before the samples: a GPU that waited for the host is up to 17 % slower."""


class Clock:
    """Times calls on a device.

    Args:
        device: A GPU; or a CPU, where kernels are interpreted and each call is timed once.
        now: Seconds, for a CPU and for budgets.
    """

    def __init__(self, device: torch.device, now: Callable[[], float] = time.monotonic) -> None:
        self.device, self.now = device, now

    def sets(self, nbytes: int) -> int:
        """The number of sets of inputs of this size that do not fit into the L2 cache together."""
        return GPUClock(self.device).sets(nbytes) if self.device.type == "cuda" else 1

    def seconds(self, calls: Sequence[Call]) -> float:
        """Return the seconds of a call, without the time that the host takes.

        Raises:
            RuntimeError: The calls cannot be captured in a CUDA graph.
        """
        if self.device.type != "cuda":
            began = self.now()
            calls[0]()
            return self.now() - began
        clock = GPUClock(self.device)
        with clock.around():
            (sampler,), why = clock.samplers([calls])
            if why:
                raise RuntimeError(why)
            end = time.monotonic() + WARM
            while time.monotonic() < end:
                sampler()
            return statistics.median(sampler() for _ in range(SAMPLES))

    def limits(self, size: int = 1 << 28, width: int = 8192) -> tuple[float, float]:
        """What this device reaches: bytes per second of a copy, operations of a bf16 product.

        Args:
            size: Number of elements copied.
            width: Rows, columns and depth of the product.
        """
        source = torch.zeros(size, dtype=torch.bfloat16, device=self.device)
        target = torch.empty_like(source)
        ways = (lambda: target.copy_(source)), (lambda: torch.neg(source, out=target))
        copied = 2 * source.nbytes / min(self.seconds([way]) for way in ways)
        left = torch.randn(width, width, device=self.device).bfloat16()
        return copied, 2 * width**3 / self.seconds([lambda: left @ left])


def bound(run: Callable[..., Any], sets: Sequence[dict[str, Tensor]]) -> list[Call]:
    """A call for each set of inputs."""
    return [lambda given=given: run(**given) for given in sets]  # type: ignore[misc]
