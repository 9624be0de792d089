"""Clocks: how calls are timed on a device, and the one way to capture them in a CUDA graph."""

from __future__ import annotations

import contextlib
import functools
import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.settings import current

Call = Callable[[], object]
Sampler = Callable[[], float]
"""Measures once, and gives the seconds of a call."""

TURN = 0.001
"""Seconds of a turn, at least; a GPU call that takes as long is timed without a graph."""

MOST_SETS = 16
"""Sets of inputs, at most."""

_SEED = 0x5DEECE66D
_MOST_CALLS = 1000  # in a graph


class Clock:
    """Times calls on a CPU.

    Processes that tune together make each call the same number of times, since its collectives wait
    for those of the others. So each time is that of the slowest of them, and all know it.

    Args:
        device: Where they compute.

    Attributes:
        device: The device.
        together: The processes that tune together, or None.
        runs: How often a fusion runs on the same inputs, to see that its bits are the same.
    """

    runs = 1

    def __init__(self, device: torch.device) -> None:
        self.device, self.together = device, current.tuning_group

    def slowest(self, seconds: float) -> float:
        """The time of the slowest of the processes that tune together; or the largest of others."""
        if self.together is None:
            return seconds
        return float(self.together.largest(seconds, self.device))

    def agreed(self, problem: str) -> str:
        """The first problem that one of the processes that tune together has, or ``""``."""
        if self.together is None:
            return problem
        facts = {"what runs": "opfuse.tune", "problem": problem}
        found = [of_rank["problem"] for of_rank in self.together.exchange(facts)]
        return next(filter(None, found), "")

    @staticmethod
    def of(device: torch.device) -> Clock:
        """The clock of a device."""
        return GPUClock(device) if device.type == "cuda" else Clock(device)

    def draw(self, shape: Sequence[int], dtype: torch.dtype, place: int = 0) -> Tensor:
        """Random numbers, drawn on the device, the same for the same shape and place.

        The seed is none that people take, so that no input has the same numbers.
        """
        generator = torch.Generator(self.device).manual_seed(_SEED + place)
        return torch.randn(shape, generator=generator, device=self.device).to(dtype)

    def sets(self, nbytes: int) -> int:
        """The number of sets of inputs of this size that calls should take in turns."""
        return 1

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        """The context in which everything is computed that is timed."""
        yield

    def samplers(self, ways: Sequence[Sequence[Call]]) -> tuple[list[Sampler], str]:
        """The samplers of several ways to do the same, all of one kind.

        Args:
            ways: For each way a call for each set of inputs.

        Returns:
            The samplers, and why they count the time of the host too, or ``""``.
        """
        return [self._sampler(calls) for calls in ways], ""

    def _sampler(self, calls: Sequence[Call]) -> Sampler:
        """Warm up, and find out how many calls a turn takes."""
        calls[0]()
        self._time(calls[0], 1)
        times = max(1, math.ceil(TURN / max(self._time(calls[0], 1), 1e-9)))
        return lambda: self._time(calls[0], times)

    def _time(self, way: Call, times: int) -> float:
        """Seconds of a call.

        With one thread on a CPU it is CPU time, which does not count what other programs get. With
        more it is the time on the clock: CPU time would be the sum of theirs, as if nothing ran at
        once.
        """
        alone = self.device.type == "cpu" and torch.get_num_threads() == 1
        waits = self.together is not None  # for other processes, which takes no CPU time
        now = time.process_time if alone and not waits else time.perf_counter
        start = now()
        for _ in range(times):
            way()
        return self.slowest((now() - start) / times)


class GPUClock(Clock):
    """Times calls on a GPU without the time of the host, as far as possible.

    Calls below a millisecond, and those whose launches take half of their time, are timed in a CUDA
    graph. The others are timed by events, and so is what cannot be captured.
    """

    runs = 3

    @property
    def cache(self) -> int:
        """Bytes of the L2 cache."""
        return int(torch.cuda.get_device_properties(self.device).L2_cache_size)

    def sets(self, nbytes: int) -> int:
        """The number of sets of inputs of this size that do not fit into the cache together."""
        return max(1, min(MOST_SETS, math.ceil(2 * self.cache / max(self.slowest(nbytes), 1))))

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        """A stream that can be captured: the backward runs on the stream of its forward."""
        outer = inner = torch.cuda.current_stream(self.device)
        if outer == torch.cuda.default_stream(self.device):
            inner = _side_stream(self.device)
            inner.wait_stream(outer)
        try:
            with torch.cuda.stream(inner):  # makes the device the current one, too
                yield
        finally:
            outer.wait_stream(inner)

    def samplers(self, ways: Sequence[Sequence[Call]]) -> tuple[list[Sampler], str]:
        """See :meth:`Clock.samplers`: all by graphs, or all by events."""
        for calls in ways:
            calls[0]()  # compiles
        took = [self._elapsed(calls) for calls in ways for _ in range(2)][1::2]
        why = ""
        if any(seconds < max(TURN, 2 * host) for seconds, host in took):
            try:
                return [self._captured(calls) for calls in ways], ""
            except RuntimeError as error:
                why = " ".join(str(error).split())[:200]
        return [lambda calls=calls: self._elapsed(calls)[0] for calls in ways], why  # type: ignore[misc]

    def _elapsed(self, calls: Sequence[Call]) -> tuple[float, float]:
        on_gpu, on_host = self.elapsed(calls)
        return self.slowest(on_gpu), self.slowest(on_host)

    def _captured(self, calls: Sequence[Call]) -> Sampler:
        """Capture each call once, then as often as a turn takes."""
        replay = self.capture(calls, 1)
        times = math.ceil(TURN / max(self.slowest(replay()) * len(calls), 1e-9))
        times = min(times, max(1, _MOST_CALLS // len(calls)))
        often = replay if times == 1 else self.capture(calls, times)
        return lambda: self.slowest(often())

    # What a test without a GPU replaces, besides ``cache`` and ``around``

    def elapsed(self, calls: Sequence[Call]) -> tuple[float, float]:
        """Seconds of a call by the GPU's events, and seconds in which the host launches it."""
        start, end = _event(), _event()
        torch.cuda.synchronize(self.device)
        began = time.perf_counter()
        start.record()
        for call in calls:
            call()
        end.record()
        host = time.perf_counter() - began
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / len(calls), host / len(calls)

    def capture(self, calls: Sequence[Call], times: int) -> Sampler:
        """See :func:`capture`."""
        return capture(calls, times)


@functools.cache
def _side_stream(device: torch.device) -> Any:
    """One for all: memory that was freed on a stream is for that stream."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def capture(calls: Sequence[Call], times: int) -> Sampler:
    """Capture all calls, again and again, in one CUDA graph, on the current stream.

    CUDA captures no default stream, see :meth:`GPUClock.around`.

    Args:
        calls: What to call, in turns.
        times: How often.

    Returns:
        A function that replays the graph and gives the seconds of one call.

    Raises:
        RuntimeError: They cannot be captured: one of them waits for the GPU, say.
    """
    graph = torch.cuda.CUDAGraph()
    before: Any = torch.cuda.get_sync_debug_mode()
    try:
        # a capture that fails spoils random numbers, so see before that nothing waits
        for mode in ("default", "error"):
            torch.cuda.synchronize()
            _let_wait(mode)
            for call in calls:
                call()
        _let_wait("default")
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            for _ in range(times):
                for call in calls:
                    call()
    finally:
        _let_wait("default")
        torch.cuda.synchronize()
        _let_wait(before)
    start, end = _event(), _event()

    def replay() -> float:
        graph.replay()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / (times * len(calls))

    return replay


def _let_wait(mode: Any) -> None:
    """Set what happens where the host waits for the GPU; PyTorch warns that it may miss a case."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode(mode)


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
