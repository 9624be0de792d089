"""One case at one shape: whether it is right, how fast it is, and how fast others are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from ..cases import KernelCase
from ..checking import check_launch
from ..launches import asked
from ..recorded import CaseRun, describe, record
from ..tables import settings_as_text
from ..targets import TARGETS, current_target
from .judging import judge
from .timing import Clock, bound
from .winners import entry, speed_entry

Row = dict[str, Any]
Shape = Mapping[str, int]
Given = TypeVar("Given")
GAIN = 1.02
"""How many times as fast as the default a configuration must be, to be put into a table."""

Tell = Callable[[], None]
"""Called before each step that may take long: who waits knows then that nothing hangs."""


class Part(NamedTuple):
    """What is done and reported as one.

    Attributes:
        name: The case, and the shape.
        case: The case.
        shape: One of its real shapes; None: it is judged at its odd ones.
        compiled: Whether ``torch.compile`` of the separate operations is timed, not the case.
    """

    name: str
    case: KernelCase
    shape: Shape | None = None
    compiled: bool = False


class Wanted(NamedTuple):
    """What of all parts is asked for.

    Attributes:
        only: ``"odd"``: the odd shapes; ``"real"``: the real ones; None: both.
        cases: Names of cases; none: all of them.
    """

    only: str | None = None
    cases: Sequence[str] = ()

    def takes(self, case: KernelCase, odd: bool) -> bool:
        """Whether a case is asked for, at odd or at real shapes."""
        named = not self.cases or case.name in self.cases
        return named and self.only in (None, "odd" if odd else "real")


EVERYTHING = Wanted()


def parts(cases: Sequence[KernelCase], on_gpu: bool, wanted: Wanted = EVERYTHING) -> list[Part]:
    """The parts in the order of the cases' turns: each case at its odd shapes, then the real ones.

    ``torch.compile``, which takes seconds for each shape, comes after all of them, first at the
    first shape of each case. Cases that do not run on the GPU have no parts.
    """
    if on_gpu:
        here = current_target(torch.cuda.current_device())
        cases = [case for case in cases if case.fits(here)]
    found, last = [], list[tuple[int, Part]]()
    for case in sorted(cases, key=lambda case: case.turn):
        found += [Part(case.name, case)] * wanted.takes(case, True)
        shapes = case.shapes if on_gpu else case.small[:1]
        for number, shape in enumerate(shapes if wanted.takes(case, False) else ()):
            name = f"{case.name}: {describe(shape)}"
            found.append(Part(name, case, shape))
            if on_gpu and _separate(case, shape):
                last.append((number, Part(f"{name}, torch.compile", case, shape, compiled=True)))
    return found + [part for _, part in sorted(last, key=lambda one: one[0])]


def variants(case: KernelCase) -> Iterator[tuple[str, Shape, torch.dtype, int]]:
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


def _judged(case: KernelCase, shape: Shape, clock: Clock, *how: Any) -> str:
    """Return what is wrong with a case, or with running it; ``how``: dtype and offset of inputs."""
    return _or_why(lambda: judge(case, shape, case.inputs(shape, clock.device, *how)))


def _or_why(call: Callable[[], Given]) -> Given | str:
    """What a call gives, or why it gives nothing."""
    try:
        return call()
    except torch.AcceleratorError:  # the device is lost, and with it this process
        raise
    except ImportError as error:
        return f"not installed: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def measure(
    plugin: str, case: KernelCase, shape: Shape, clock: Clock, deadline: float, tell: Tell
) -> Row:
    """Judge and time a case at a real shape.

    Returns:
        ``wrong``, a sentence for each fault; ``seconds`` with the default configurations, or why
        there are none, and then nothing else; ``floor``, bytes that it has to move, and ``flops``;
        ``modelled`` seconds; ``best``: for each kernel with several configurations what
        :func:`_fastest` found; ``entries`` for a table; ``others``: of ``separate`` and each of
        ``peers``, seconds or why there are none; ``refused``: what ``check`` says.
    """
    tell()
    fault = _judged(case, shape, clock)
    row: Row = {"wrong": [fault] if fault else []}
    sets = _sets(case, shape, clock)

    def timed(call: Callable[..., Any]) -> float | str | None:
        if clock.now() > deadline:
            return None
        tell()
        return _or_why(lambda: clock.seconds(bound(call, sets)))

    tell()
    row["seconds"] = _or_why(lambda: clock.seconds(bound(case.run, sets)))
    if isinstance(row["seconds"], str):
        return row
    target, (run, questions) = current_target(clock.device), _recorded(case, shape, clock)
    row["floor"] = case.floor_bytes(shape)
    row["flops"] = case.flops(**shape) if case.flops else 0
    row["modelled"] = max(row["floor"] / target.bandwidth, row["flops"] / target.flops)
    if clock.device.type == "cuda" and target.arch in TARGETS:  # what check knows
        rows = [check_launch(plugin, run, launch) for launch in run.launches]
        row["refused"] = [f"{one.kernel} {why}" for one in rows for why in one.refusals]
    row["best"], row["entries"] = {}, []
    for kernel, each in questions.items():
        best = _fastest(case, shape, clock, kernel, each[0], row["seconds"], timed)
        row["wrong"] += best.pop("faults", ())
        row["best"] |= {kernel.name: best} if best else {}
        if best and not fault and clock.now() <= deadline:
            config = best["config"]
            row["entries"] += [entry(plugin, target.name, kernel, facts, config) for facts in each]
    others = {"separate": _separate(case, shape), **case.peers}
    found = {name: timed(other) for name, other in others.items() if other}
    row["others"] = {name: taken for name, taken in found.items() if taken is not None}
    if not row["wrong"] and (speed := _speed(row)):
        row["entries"].append(speed_entry(plugin, target.name, case.name, shape, speed))
    return row


def measure_compiled(case: KernelCase, shape: Shape, clock: Clock) -> Row:
    """Time ``torch.compile`` of the separate operations.

    Returns:
        ``compiled``: seconds, or why there are none; ``wrong``: nothing.
    """
    torch.compiler.reset()  # cases share functions, and one is compiled a few times at most
    sets = _sets(case, shape, clock)
    call = torch.compile(_separate(case, shape), dynamic=False)
    return {"compiled": _or_why(lambda: clock.seconds(bound(call, sets))), "wrong": []}


def _sets(case: KernelCase, shape: Shape, clock: Clock) -> list[dict[str, Any]]:
    """Sets of inputs that do not fit into the cache together."""
    nbytes = sum(operand.nbytes for operand in case.tensors(**shape).values())
    return [case.inputs(shape, clock.device) for _ in range(clock.sets(nbytes))]


def _speed(row: Row) -> float | None:
    """The speed with the fastest configuration, relative to the separate ops, if timed."""
    separate = row["others"].get("separate")
    fastest = min([row["seconds"], *[best["seconds"] for best in row["best"].values()]])
    return separate / fastest if isinstance(separate, float) else None


def _recorded(
    case: KernelCase, shape: Shape, clock: Clock
) -> tuple[CaseRun, dict[Any, list[Mapping[str, Any]]]]:
    """The launches of a case, and the facts with which each kernel was asked to configure."""
    questions: list[tuple[Any, Mapping[str, Any]]] = []
    token = asked.set(questions)
    try:
        run = record(case, shape, current_target(clock.device))
    finally:
        asked.reset(token)
    found: dict[Any, list[Mapping[str, Any]]] = {}
    for kernel, facts in questions:
        if facts not in found.setdefault(kernel, []):
            found[kernel].append(facts)
    return run, found


def _fastest(
    case: KernelCase,
    shape: Shape,
    clock: Clock,
    kernel: Any,
    facts: Mapping[str, Any],
    usual: float,
    timed: Callable[[Callable[..., Any]], float | str | None],
) -> Row:
    """The fastest configuration whose results are right, if the kernel has several.

    Args:
        case: The case.
        shape: Its shape.
        clock: The clock.
        kernel: The kernel.
        facts: What it was asked with for a configuration.
        usual: Seconds of the case with the default one.
        timed: Gives the seconds of a call, why there are none, or None: there is no time.

    Returns:
        ``config``, its ``seconds``, ``faults`` of those that are faster, the ``default``, and what
        else was ``tried``, with seconds or why there are none.
    """
    target, taken = current_target(clock.device), list[tuple[float, Row]]()
    default, possible = kernel.pick(target, facts).to_dict(), kernel.candidates(target, facts)
    tried: list[Row] = []
    for config in possible:
        if config != default:
            with kernel.pinned(config):
                seconds = timed(case.run)
            tried.append({"config": config, "seconds": seconds})
            if isinstance(seconds, float) and seconds * GAIN < usual:
                taken.append((seconds, config))
    faults, found = list[str](), (usual, default)
    for one in sorted(taken, key=lambda one: one[0]):
        with kernel.pinned(one[1]):
            fault = _judged(case, shape, clock)
        if not fault:
            found = one
            break
        faults.append(f"{kernel.name} with {settings_as_text(one[1])}: {fault}")
    best = {"config": found[1], "seconds": found[0], "faults": faults, "default": default}
    return best | {"tried": tried} if len(possible) > 1 else {}


def _separate(case: KernelCase, shape: Shape) -> Callable[..., Any] | None:
    """The separate operations, if they can run: instead, a case may count their bytes."""
    counts = case.separate and isinstance(case.separate(**case.inputs(shape)), int)
    return None if counts else case.separate
