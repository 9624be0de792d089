"""Timers, ceilings and counters. Every time is in microseconds."""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from opfuse.report.calls import saved_bytes as count_saved_bytes
from opfuse.tuning import clock

from .chains import Work, several
from .providers import Built

SHORT_US = 100.0
"""GPU calls below this are timed by replaying a CUDA graph."""

Step = Callable[[], Any]


def steps(built: Built, work: Work, metric: str, accumulate: bool = False) -> list[Step]:
    """What a timer calls: one pass for each set of inputs.

    Args:
        built: A provider's form of the chain.
        work: The chain.
        metric: Which pass: inference, forward, backward, or forward+backward.
        accumulate: ``y.backward()``, as a training loop does, instead of the gradients alone.
    """
    model = built.model

    def step(inputs: list[Tensor]) -> Step:
        if metric in ("inference", "forward"):
            return lambda: model(*inputs)
        if accumulate:
            (grad,) = work.grads
            return lambda: model(*inputs).backward(grad)
        wanted = [*inputs, *built.params]
        if metric == "forward+backward":
            return lambda: torch.autograd.grad(several(model(*inputs)), wanted, work.grads)
        kept: list[Any] = []

        def backward() -> Any:
            if not kept:
                kept.append(several(model(*inputs)))
            return torch.autograd.grad(kept[0], wanted, work.grads, retain_graph=True)

        return backward

    return [step(inputs) for inputs in work.inputs]


@contextlib.contextmanager
def around(built: Built, metric: str):
    """The context to call a step in."""
    with built.context(), torch.set_grad_enabled(metric != "inference"):
        yield


def cpu_timer(passes: Sequence[Step], seconds: float = 0.01, before: Step | None = None) -> Step:
    """CPU time of this process.

    With one thread it does not count the time that other programs get. With more threads it is the
    time on the clock: CPU time would be the sum of theirs, as if nothing ran at once.

    Args:
        passes: What to call; one set of inputs is enough.
        seconds: How long a sample should take.
        before: Called before each call, and not timed.
    """
    (step,) = passes[:1]
    calls, now = 0, time.process_time if torch.get_num_threads() == 1 else time.perf_counter

    def sample() -> float:
        nonlocal calls
        if not calls:
            step()
            start = now()
            step()
            calls = 1 if before else max(1, int(seconds / (now() - start + 1e-6)))
        if before:
            before()
        start = now()
        for _ in range(calls):
            step()
        return (now() - start) / calls * 1e6

    return sample


def cuda_timer(passes: Sequence[Step]) -> Step:
    """Time on the GPU: ``do_bench``, or a CUDA graph for calls below a millisecond.

    The graph runs over several sets of inputs. A millisecond is well above ``SHORT_US``, where it
    begins to matter, so that two programs of one ratio are timed alike.
    """
    from triton.testing import do_bench

    replays: list[Step | None] = []

    def long() -> float:
        return do_bench(passes[0], warmup=25, rep=100, return_mode="median") * 1e3

    def sample() -> float:
        if not replays:
            replays.append(capture(passes) if long() < 10 * SHORT_US else None)
        return replays[0]() if replays[0] else long()

    return sample


def capture(passes: Sequence[Step], calls: int = 200) -> Step | None:
    """A replay of at least ``calls`` calls in one CUDA graph; None if they cannot be captured."""
    try:
        replay = clock.capture(passes, math.ceil(calls / len(passes)))
    except RuntimeError:
        return None
    return lambda: replay() * 1e6


def timer(device: torch.device) -> Callable[[Sequence[Step]], Step]:
    """The timer of a device."""
    return cuda_timer if device.type == "cuda" else cpu_timer


def host_us(step: Step, calls: int = 50) -> float:
    """Wall time of a call on a GPU with its launches: how long an eager program waits for it."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / calls * 1e6


def launch_us(step: Step, calls: int = 200, samples: int = 20) -> list[float]:
    """Time of the host alone: calls that queue their work and return."""
    taken = []
    for _ in range(samples + 1):  # the first one warms up
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            step()
        taken.append((time.perf_counter() - start) / calls * 1e6)
    return taken[1:]


def sample_rounds(
    samplers: dict[str, tuple[Step, Callable[[], Any]]],
    rounds: int,
    warmup: int,
    deadline: float = math.inf,
    failed: dict[str, str] | None = None,
) -> dict[str, Any]:
    """Round-robin over the samplers, each in its context: name -> one sample a round.

    Past the deadline it stops after five rounds. A sampler that raises an error leaves the
    round-robin; its reason is in ``failed`` if that is given.
    """
    samples: dict[str, list[float]] = {name: [] for name in samplers}
    for round_ in range(-warmup, rounds):
        if round_ >= 5 and time.monotonic() > deadline:
            break
        for name, (sampler, context) in samplers.items():
            if name not in samples:
                continue
            try:
                with context():
                    taken = sampler()
            except Exception as reason:
                if failed is None:
                    raise
                failed[name] = failure(reason)
                del samples[name]
                continue
            if round_ >= 0:
                samples[name].append(taken)
    return samples


def failure(error: Exception) -> str:
    """The first line of what went wrong."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """The 20th percentile, the median and the 80th."""
    ordered = sorted(values)
    return ordered[len(ordered) // 5], statistics.median(ordered), ordered[-1 - len(ordered) // 5]


def ratio(numerator: Sequence[float], denominator: Sequence[float]) -> float:
    """Median of the rounds' ratios."""
    return statistics.median([a / b for a, b in zip(numerator, denominator, strict=True)])


def noise(first: Sequence[float], again: Sequence[float]) -> float:
    """How far a provider is from itself.

    It is half the width of the middle 60 % of its rounds' ratios, or how far their median is from
    1, whichever is more.
    """
    low, middle, high = spread([a / b for a, b in zip(first, again, strict=True)])
    return max((high - low) / 2, abs(middle - 1))


def unrest(numerator: Sequence[float], denominator: Sequence[float]) -> float:
    """How far the rounds' ratios are from each other.

    It is half the width of their middle 60 %, as a share of the median.
    """
    if not all(denominator):
        return 0.0
    low, middle, high = spread([a / b for a, b in zip(numerator, denominator, strict=True)])
    return (high - low) / 2 / middle if middle else 0.0


def saved_bytes(built: Built, inputs: list[Tensor]) -> int:
    """What one forward keeps for the backward, parameters not counted, each storage once."""
    with around(built, "forward"):
        return count_saved_bytes(lambda: built.model(*inputs), built.params)


def peak_bytes(step: Step, device: torch.device) -> int | None:
    """What a call allocates at its highest, beyond what was there; GPU only."""
    if device.type != "cuda":
        return None
    step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def poison(device: torch.device, megabytes: int = 512) -> None:
    """Fill memory that is about to be reused with NaN, so that what is not written shows."""
    sizes = [megabytes << 18] if device.type == "cuda" else [1 << 10, 1 << 16, 1 << 20]
    for size in sizes:
        torch.full((size,), math.nan, device=device)


def rounded(x: Tensor) -> Tensor:
    """Rounded to FP8 as a real cast does, scaled first.

    Without the scale most bits of small numbers would be zero, and products of them faster.
    """
    return (x * (448 / x.abs().amax())).to(torch.float8_e4m3fn)


def ceilings(device: torch.device, size: int = 0) -> dict[str, float | None]:
    """What the machine reaches now: a copy, and matrix products of random numbers."""
    size = size or (8192 if device.type == "cuda" else 1024)
    sample = timer(device)
    a, b = (
        torch.randn(size, size, device=device, dtype=torch.bfloat16) / math.sqrt(size)
        for _ in range(2)
    )
    source = torch.randint(
        0,
        100,
        (size * size * (8 if device.type == "cuda" else 64),),
        device=device,
        dtype=torch.int16,
    )
    target = torch.empty_like(source)
    work = {
        "copy_TBps": (lambda: target.copy_(source), 2 * source.nbytes),
        "bf16_TF": (lambda: a @ b, 2 * size**3),
    }
    # The driver's copy is not the fastest: on an H100 a kernel moved 3.0 TB/s where it moved 2.4.
    work["kernel_TBps"] = lambda: torch.bitwise_not(source, out=target), 2 * source.nbytes
    if device.type == "cpu":
        wide, other = a.float(), b.float()
        work["fp32_TF"] = lambda: wide @ other, 2 * size**3
    elif torch.cuda.get_device_capability(device) >= (8, 9):
        one = torch.ones((), device=device)
        x, y = rounded(a), rounded(b.t().contiguous()).t()
        options = {
            "scale_a": one,
            "scale_b": one,
            "out_dtype": torch.bfloat16,
            "use_fast_accum": True,
        }
        work["fp8_TF"] = lambda: torch._scaled_mm(x, y, **options), 2 * size**3
    found: dict[str, float | None] = dict.fromkeys(("copy_TBps", "bf16_TF", "fp8_TF"))
    for name, (step, amount) in work.items():
        one_sample = sample([step])
        found[name] = amount / statistics.median([one_sample() for _ in range(5)]) * 1e-6
    found["copy_TBps"] = max(found["copy_TBps"], found.pop("kernel_TBps"))
    return found
