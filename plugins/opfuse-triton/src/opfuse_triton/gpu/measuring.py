"""One case at one shape: whether it is right, how fast it is, and how fast others are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from ..cases import KernelCase
from ..checking import check_launch
from ..configs import Config
from ..launches import Launch
from ..recorded import describe, record
from ..targets import current_target
from .judging import judge
from .timing import Clock, bound

Row = dict[str, Any]
Tell = Callable[[], None]
"""Called before each step that may take long: who waits knows then that nothing hangs."""


def parts(case: KernelCase, on_gpu: bool) -> list[tuple[str, Mapping[str, int] | None]]:
    """The parts that a case is measured in, by name: its odd shapes, then each real shape."""
    shapes = case.shapes if on_gpu else case.small[:1]
    return [(case.name, None), *[(f"{case.name}: {describe(shape)}", shape) for shape in shapes]]


def variants(case: KernelCase) -> Iterator[tuple[str, Mapping[str, int], torch.dtype, int]]:
    """Where a case is judged besides the real shapes: name, shape, dtype, and offset."""
    for dtype in case.dtypes:
        for offset in (0, 1):
            for shape in case.small:
                how = f"{str(dtype).removeprefix('torch.')}{', unaligned' * offset}"
                yield f"{describe(shape)}, {how}", shape, dtype, offset


def judge_variants(case: KernelCase, clock: Clock, deadline: float, tell: Tell) -> Row:
    """Judge a case at its odd shapes, in each dtype, aligned and not.

    Returns:
        ``judged``: how many; ``wrong``: a sentence for each that is; ``left``: how many there was
        no time for.
    """
    row: Row = {"judged": 0, "wrong": [], "left": 0}
    for name, shape, dtype, offset in variants(case):
        if clock.now() > deadline:
            row["left"] += 1
            continue
        tell()
        fault = _judged(case, shape, clock, dtype, offset)
        row["judged"] += 1
        row["wrong"] += [f"{name}: {fault}"] if fault else []
    return row


def _judged(
    case: KernelCase,
    shape: Mapping[str, int],
    clock: Clock,
    dtype: torch.dtype = torch.bfloat16,
    offset: int = 0,
) -> str:
    """Return what is wrong with a case, or with running it."""
    try:
        return judge(case, shape, case.inputs(shape, clock.device, dtype, offset))
    except torch.AcceleratorError:  # the device is lost, and with it this process
        raise
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def measure(
    plugin: str,
    case: KernelCase,
    shape: Mapping[str, int],
    clock: Clock,
    deadline: float,
    tell: Tell,
) -> Row:
    """Judge and time a case at a real shape.

    Returns:
        ``wrong``, a sentence or ""; ``seconds`` with the default configurations, or why there are
        none, and then nothing else; ``floor``, bytes that it has to move, and ``flops``;
        ``modelled`` seconds; ``best``: for each kernel with several configurations the fastest,
        with its ``seconds``; ``others``: of ``separate``, ``compiled`` and each of ``peers``,
        seconds or why there are none; ``refused``: what ``check`` says.
    """
    tell()
    row: Row = {"wrong": _judged(case, shape, clock)}
    nbytes = sum(operand.nbytes for operand in case.tensors(**shape).values())
    sets = [case.inputs(shape, clock.device) for _ in range(clock.sets(nbytes))]
    tell()
    row["seconds"] = _timed(case.run, sets, clock)
    if isinstance(row["seconds"], str):
        return row
    row["floor"] = case.floor_bytes(shape)
    row["flops"] = case.flops(**shape) if case.flops else 0
    target = current_target(clock.device)
    row["modelled"] = max(row["floor"] / target.bandwidth, row["flops"] / target.flops)
    recorded = record(case, shape, target)
    if clock.device.type == "cuda":
        rows = [check_launch(plugin, recorded, launch) for launch in recorded.launches]
        row["refused"] = [f"{one.kernel} {why}" for one in rows for why in one.refusals]
    row["best"] = {}
    for launch in {launch.kernel: launch for launch in recorded.launches}.values():
        if clock.now() < deadline:
            row["best"] |= _fastest(case, launch, sets, clock, row["seconds"], deadline, tell)
    others = {"separate": case.separate, "compiled": _compiled(case, clock), **case.peers}
    row["others"] = {}
    for name, other in others.items():
        if callable(other) and clock.now() < deadline:
            tell()
            row["others"][name] = _timed(other, sets, clock)
    return row


def _fastest(
    case: KernelCase,
    launch: Launch,
    sets: Any,
    clock: Clock,
    usual: float,
    deadline: float,
    tell: Tell,
) -> Row:
    """The fastest configuration of one kernel, if it has several."""
    possible = launch.kernel.candidates(launch.target, launch.facts)
    if len(possible) < 2:
        return {}
    found, seconds = launch.config.to_dict(), usual
    for config in possible:
        if clock.now() > deadline or Config(**config) == launch.config:
            continue
        tell()
        with launch.kernel.pinned(config):
            taken = _timed(case.run, sets, clock)
        if isinstance(taken, float) and taken < seconds:
            found, seconds = config, taken
    facts = {name: str(value) for name, value in launch.facts.items()}
    return {launch.kernel.name: {"config": found, "seconds": seconds, "facts": facts}}


def _compiled(case: KernelCase, clock: Clock) -> Callable[..., Any] | None:
    """The separate operations under ``torch.compile``, where there is a GPU."""
    on_gpu = clock.device.type == "cuda" and callable(case.separate)
    return torch.compile(case.separate, dynamic=False) if on_gpu else None


def _timed(run: Callable[..., Any], sets: Any, clock: Clock) -> float | str:
    """Return the seconds of a call, or why there are none."""
    try:
        return clock.seconds(bound(run, sets))
    except torch.AcceleratorError:
        raise
    except ImportError as error:
        return f"not installed: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
