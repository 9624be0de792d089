"""A GPU whose tensors are on the CPU, and whose time goes by as the ops of a test say."""

from __future__ import annotations

import contextlib
from unittest import mock

import torch

from opfuse.tuning.clock import Clock, GPUClock


class FakeGPU(GPUClock):
    """Is the clock of every device, for a ``with`` block.

    Attributes:
        did: What it was asked to do, in order.
        host, gpu: Seconds that went by.
        waits: Nothing can be captured.
    """

    cache = 4096

    def __init__(self):
        super().__init__(torch.device("cpu"))
        self.did, self.host, self.gpu, self.waits = [], 0.0, 0.0, False

    def spend(self, gpu, host=0.0):
        """Called by an op: the GPU is busy for so long, and so is the host that launches it."""
        self.gpu += gpu
        self.host += host

    def told(self, what):
        """How often it did that."""
        return [name for name, *_ in self.did].count(what)

    def __enter__(self):
        self._patch = mock.patch.object(Clock, "of", lambda device: self)
        self._patch.__enter__()
        return self

    def __exit__(self, *exc_info):
        self._patch.__exit__(*exc_info)

    @contextlib.contextmanager
    def around(self):
        yield

    def draw(self, shape, dtype, place=0):
        self.did.append(("draw", tuple(shape)))
        return super().draw(shape, dtype, place)

    def elapsed(self, calls):
        self.did.append(("events", len(calls)))
        gpu, host = self._ran(calls)
        return max(gpu, host), host

    def capture(self, calls, times):
        if self.waits:
            raise RuntimeError("called a synchronizing CUDA operation")
        self.did.append(("capture", len(calls), times))
        gpu, _ = self._ran(calls)

        def replay():
            self.did.append(("replay", len(calls) * times))
            return gpu

        return replay

    def _ran(self, calls):
        """Seconds of the GPU and of the host for a call."""
        gpu, host = self.gpu, self.host
        for call in calls:
            call()
        gpu, host = max(self.gpu - gpu, 1e-6), self.host - host
        return gpu / len(calls), host / len(calls)
