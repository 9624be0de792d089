"""What the ledger has of a case: at a small shape, and at a real one for each target."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from opfuse_triton import KernelCase, Launch, Operand, Target
from opfuse_triton.floor import TorchBytes, count_bytes
from opfuse_triton.floor import by_role as sums_by_role
from opfuse_triton.recorded import CaseRun, record, storage_of, tensors_of

from .counting import LaunchCount, counting
from .model import LaunchWork, launch_seconds

SAMPLE = 16
"""Programs of a launch that run at real shapes."""

_Counted = dict[Any, tuple[LaunchCount, dict[int, int]]]


@dataclass(frozen=True)
class Moved:
    """Bytes moved, read and written together.

    Attributes:
        full: Of full-size operands.
        vector: Of weights and statistics that every program may read again: mostly from the cache.
        partial: Of partial sums, and of other tensors that are neither taken nor given.
    """

    full: float = 0
    vector: float = 0
    partial: float = 0

    def __add__(self, other: Moved) -> Moved:
        return Moved(
            self.full + other.full, self.vector + other.vector, self.partial + other.partial
        )


@dataclass(frozen=True)
class LaunchEntry:
    """One launch at a real shape.

    Attributes:
        kernel: Name of the kernel.
        programs: How many programs run.
        longest: The bytes of the program that moves most, over the average program's.
        moved: What all programs move.
        again: How often a program reads or writes a byte of a full-size operand, at most.
        flops: Floating-point operations of matrix products.
        seconds: The modelled time, see :func:`.model.launch_seconds`.
    """

    kernel: str
    programs: int
    longest: float
    moved: Moved
    again: float
    flops: float
    seconds: float


@dataclass(frozen=True)
class TargetEntry:
    """A case at one real shape on one target.

    Attributes:
        target: The target.
        launches: Its launches, in order.
        host: What PyTorch's operations around the launches move.
        seconds: The modelled time of all that.
        floor_seconds: The floor of the fusion at the full bandwidth, or its matrix products at the
            peak, whichever takes longer.
    """

    target: Target
    launches: tuple[LaunchEntry, ...]
    host: Moved
    seconds: float
    floor_seconds: float

    @property
    def moved(self) -> Moved:
        """What the launches and the operations around them move."""
        return sum((entry.moved for entry in self.launches), self.host)


def count_small(
    case: KernelCase, shape: Mapping[str, int], run: Callable[..., Any] | None = None
) -> Moved:
    """Count what every program of a case moves.

    Args:
        case: The case.
        shape: One of ``case.small``.
        run: Something else than ``case.run`` that takes and gives the same.

    Raises:
        RuntimeError: Triton does not interpret in this process.
    """
    with counting():  # refuses accesses outside tensors, and takes other packages' kernels
        return Moved(**count_bytes(case, shape, run))


def count_separate(case: KernelCase, shape: Mapping[str, int]) -> int | None:
    """The bytes of the separate operations at a shape; None if the case does not have them."""
    if case.separate is None:
        return None
    inputs = case.inputs(shape)
    with TorchBytes() as counted:
        given = case.separate(**inputs)
    return given if isinstance(given, int) else counted.moved.total()


def estimate(
    case: KernelCase,
    shape: Mapping[str, int],
    target: Target,
    sample: int = SAMPLE,
    counted: _Counted | None = None,
) -> TargetEntry:
    """Estimate what a case moves at a real shape, from some programs of each launch.

    Args:
        case: The case.
        shape: One of ``case.shapes``.
        target: The target whose launch rule is used.
        sample: Programs of each launch that run.
        counted: A dictionary that keeps what was counted, for other targets with the same launches
            of this case at this shape.

    Raises:
        RuntimeError: Triton does not interpret in this process.
    """
    inputs = case.inputs(shape)
    run, host = _around(case, shape, target, inputs)
    drawn = drawn_memory(case, shape, inputs)
    entries = tuple(
        _entry(run, launch, *_count(launch, sample, drawn, counted)) for launch in run.launches
    )
    return target_entry(case, shape, target, entries, host)


def target_entry(
    case: KernelCase,
    shape: Mapping[str, int],
    target: Target,
    entries: tuple[LaunchEntry, ...],
    host: Moved,
) -> TargetEntry:
    """All launches together, and what PyTorch's operations around them move."""
    host_seconds = (host.full + host.vector + host.partial) / target.bandwidth
    products = sum(entry.flops for entry in entries) / target.flops
    return TargetEntry(
        target,
        entries,
        host,
        sum(entry.seconds for entry in entries) + host_seconds,
        max(case.floor_bytes(shape) / target.bandwidth, products),
    )


def _around(
    case: KernelCase, shape: Mapping[str, int], target: Target, inputs: Mapping[str, torch.Tensor]
) -> tuple[CaseRun, Moved]:
    """What a case launches, and what PyTorch's operations around the launches move."""
    with TorchBytes() as counted:
        run = record(case, shape, target, inputs)
    return run, by_role(counted.moved, run.operands)


def by_role(bytes_: Mapping[int, float], operands: Mapping[int, tuple[str, Operand]]) -> Moved:
    """Bytes by the storage of their tensor, as :class:`Moved` has them."""
    return Moved(**sums_by_role(bytes_, operands))


def _count(
    launch: Launch, sample: int, drawn: Mapping[int, torch.UntypedStorage], counted: _Counted | None
) -> tuple[LaunchCount, dict[int, int]]:
    """Run some programs of a launch, or find what the same launch gave for another target.

    Returns:
        What they did, and for each storage there the place of its tensor in the arguments.
    """
    facts = [
        (value.shape, value.stride(), value.dtype) if isinstance(value, torch.Tensor) else value
        for value in launch.args
    ]
    key = (launch.kernel.name, repr(facts), repr(launch.constants), launch.config, launch.grid)
    if counted is not None and key in counted:
        return counted[key]
    args = with_memory(launch.args, drawn)
    with counting(sample) as counts:
        launch.kernel.fn[launch.grid](*args, **launch.constants, **launch.config.constants)
    places = {storage_of(new): i for i, value in enumerate(args) for new in tensors_of([value])}
    if counted is not None:
        counted[key] = counts[0], places
    return counts[0], places


def _entry(
    run: CaseRun, launch: Launch, count: LaunchCount, places: Mapping[int, int]
) -> LaunchEntry:
    old = {new: storage_of(next(tensors_of([launch.args[i]]))) for new, i in places.items()}
    operands = {new: run.operands[key] for new, key in old.items() if key in run.operands}
    name, config = launch.kernel.name, launch.config
    pipelined = max((config.num_stages or 1) - 1, 1)
    is_gemm = name in run.case.gemms
    return entry_of(launch.target, name, config.num_warps, count, operands, pipelined, is_gemm)


def entry_of(
    target: Target,
    name: str,
    warps: int,
    count: LaunchCount,
    operands: Mapping[int, tuple[str, Operand]],
    pipelined: int = 1,
    is_gemm: bool = False,
) -> LaunchEntry:
    """What a launch does on a target.

    Args:
        target: The target.
        name: Name of the kernel.
        warps: Warps per program.
        count: What the programs did that ran.
        operands: The operands of the case by the storage of their tensors.
        pipelined: For how many steps of a product a program loads ahead.
        is_gemm: Whether the cache serves the operands again that its programs share.
    """
    full = {key for key, (_, operand) in operands.items() if operand.role == "full"}
    bytes_ = Counter(count.total("read")) + Counter(count.total("written"))
    dram = _dram(bytes_, operands, full if is_gemm else set())
    work = _work(warps, pipelined, count, dram)
    return LaunchEntry(
        kernel=name,
        programs=count.total_programs,
        longest=work.longest / (work.average or 1),
        moved=by_role(bytes_, operands),
        again=max(
            (one.again[key] for one in count.programs for key in full & one.again.keys()), default=0
        ),
        flops=work.flops,
        seconds=launch_seconds(target, work),
    )


def _dram(
    bytes_: Mapping[int, float], operands: Mapping[int, tuple[str, Operand]], once: set[int]
) -> float:
    """What comes from memory or goes there: the cache serves vectors again, and tiles of a GEMM."""
    return sum(
        operands[key][1].nbytes
        if key in once or (key in operands and operands[key][1].role == "vector")
        else moved
        for key, moved in bytes_.items()
    )


def _work(warps: int, pipelined: int, count: LaunchCount, dram: float) -> LaunchWork:
    """What the model of a launch's time is told."""
    flops = count.average("flops")
    return LaunchWork(
        programs=count.total_programs,
        warps=warps,
        dram=dram,
        average=count.average("moved"),
        longest=max(one.moved for one in count.programs),
        in_flight=count.average("in_flight") * (pipelined if flops else 1),
        flops=flops * count.total_programs,
    )


def drawn_memory(
    case: KernelCase, shape: Mapping[str, int], inputs: Mapping[str, torch.Tensor]
) -> dict[int, torch.UntypedStorage]:
    """The memory of the inputs that a case draws, by the storage of those on the meta device."""
    drawn = {} if case.draw is None else case.draw(**shape)
    return {
        storage_of(inputs[name]): values.to(inputs[name].dtype, copy=True).untyped_storage()
        for name, values in drawn.items()
    }


def with_memory(
    args: Iterable[Any], drawn: Mapping[int, torch.UntypedStorage] = MappingProxyType({})
) -> list[Any]:
    """Arguments with memory in place of meta tensors.

    The memory is zeros that the system hands out when it is touched, and where the case draws an
    input, that: it may say how much work there is.
    """
    memory = dict(drawn)

    def real(tensor: torch.Tensor) -> torch.Tensor:
        key = storage_of(tensor)
        if key not in memory:
            zeros = np.zeros(tensor.untyped_storage().nbytes(), np.uint8)
            memory[key] = torch.from_numpy(zeros).untyped_storage()
        new = torch.empty(0, dtype=tensor.dtype)
        return new.set_(memory[key], tensor.storage_offset(), tensor.shape, tensor.stride())

    def replaced(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return real(value)
        bases = list(tensors_of([value]))
        return replace(value, base=real(bases[0])) if bases else value

    return [replaced(value) for value in args]
