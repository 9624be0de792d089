"""Ranks of a process group, simulated by threads of this process.

A collective here is as late as it may be: what it gives is NaN until its rank waits for it. It
remembers what it was given, so that a change before the wait is noticed. Ranks that start different
collectives get an error, where a real group would hang or mix up their data.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.multi_threaded_pg import ThreadLocalWorld

from opfuse.core.settings import current
from opfuse.testing.tensors import same_bits

R = TypeVar("R")
NAME = "simulated_gloo"  # it lets a rank look around while it waits, as gloo does
SECONDS = 20
"""After which a rank that waits gives up."""


@dataclasses.dataclass
class Call:
    """A collective that one rank started.

    Attributes:
        kind: Its name.
        dtype: Of what is sent.
        sent: Number of bytes that this rank sends, if no rank passes on what it need not.
        reduces: Whether it adds up, or reduces otherwise.
        waited: Whether the rank waited for it.
        changed: Whether what is sent was changed before that.
    """

    kind: str
    dtype: torch.dtype
    sent: int
    reduces: bool
    waited: bool = False
    changed: bool = False


class Rank:
    """One simulated rank, as its function gets it.

    Attributes:
        number: Its number.
        size: How many there are.
        calls: The collectives that it started.
    """

    def __init__(self, number: int, size: int) -> None:
        self.number, self.size = number, size
        self.calls: list[Call] = []


@dataclasses.dataclass
class Answer:
    """What a rank's function returned, or the error that it raised, and its collectives."""

    value: Any
    error: Exception | None
    calls: list[Call]


class Ranks:
    """The ranks of one run, and what they exchange.

    Args:
        size: How many there are.
    """

    def __init__(self, size: int) -> None:
        self.ranks = [Rank(number, size) for number in range(size)]
        self.changed = threading.Condition()
        self.ended: set[int] = set()
        self.places: dict[Any, dict[int, _Started]] = {}

    def run(self, worker: Callable[..., Any], *args: Any) -> list[Answer]:
        """Call ``worker(rank, *args)`` as each rank, with the settings of this thread."""
        answers: list[Any] = [None] * len(self.ranks)
        store, settings = torch._C._distributed_c10d.HashStore(), current.values

        def serve(rank: Rank) -> None:
            torch.set_num_threads(1)
            _here.ranks, current.values = self, settings
            value = error = None
            number, size = rank.number, rank.size
            try:
                dist.init_process_group(NAME, rank=number, world_size=size, store=store)
                value = worker(rank, *args)
            except Exception as raised:
                error = raised
            finally:
                answers[number] = Answer(value, error, rank.calls)
                with self.changed:
                    self.ended.add(number)
                    self.changed.notify_all()
                if dist.is_initialized():
                    dist.destroy_process_group()

        with _worlds_apart():
            threads = [threading.Thread(target=serve, args=(r,), daemon=True) for r in self.ranks]
            for thread in threads:
                thread.start()
            until = time.monotonic() + 3 * SECONDS
            for thread in threads:
                thread.join(until - time.monotonic())
        for number, answer in enumerate(answers):
            if answer is None:
                raise TimeoutError(f"rank {number} hangs")
        return answers


def simulate(size: int, worker: Callable[..., Any], *args: Any) -> list[Answer]:
    """Call ``worker(rank, *args)`` as each of ``size`` ranks; what they returned or raised."""
    return Ranks(size).run(worker, *args)


class _Here(threading.local):
    """The ranks that the threads belong to."""

    ranks: Ranks


_here = _Here()


@contextmanager
def _worlds_apart() -> Iterator[None]:
    """Each thread has groups of its own, for a ``with`` block."""
    c10d: Any = torch._C._distributed_c10d
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _make_group, extended_api=True, devices=["cpu"])
        # torch 2.15 would attach its recorder, which asks C++ for the name of the group
        getattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set[str]()).add(NAME)
    world = dist.distributed_c10d._world
    dist.distributed_c10d._world = ThreadLocalWorld()  # type: ignore[assignment]
    c10d._set_thread_isolation_mode(True)
    try:
        yield
    finally:
        c10d._set_thread_isolation_mode(False)
        dist.distributed_c10d._world = world


def _make_group(options: Any, _: Any) -> _Group:
    return _Group(_here.ranks, options)


@dataclasses.dataclass(eq=False)
class _Started(dist.Work):
    """A collective that a rank started.

    Args:
        group: Its group.
        key: Of its place, which the calls of all ranks share; a message has two.
        call: What is recorded.
        inputs: What is sent.
        outputs: Where the result goes.
        give: ``give(inputs of each rank that it waits for)`` are the results.
        alike: What has to be the same on every rank.
        awaited: The ranks that have to start it, too.
    """

    group: _Group
    key: Any
    call: Call
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    give: Callable[[list[Sequence[Tensor]]], Sequence[Tensor]]
    alike: Any
    awaited: Sequence[int]

    def __post_init__(self) -> None:
        super().__init__()
        self.sent = [tensor.detach().clone() for tensor in self.inputs]
        self.until = time.monotonic() + SECONDS
        for tensor in self.outputs:
            _spoil(tensor)
        ranks = self.group.ranks
        with ranks.changed:
            ranks.places.setdefault(self.key, {})[self.group.number] = self
            ranks.changed.notify_all()

    def _missing(self) -> list[int]:
        there = self.group.ranks.places[self.key]
        return [number for number in self.awaited if number not in there]

    def _problem(self) -> str:
        """Why it will never end; "" as long as it may."""
        missing, world = self._missing(), self.group.ranks
        ended = [number for number in missing if self.group.members[number] in world.ended]
        if ended:
            return f"rank {ended[0]} ended, and never started it"
        if missing and time.monotonic() > self.until:
            return f"rank {missing[0]} has not started it for {SECONDS} seconds"
        there = world.places[self.key]
        others = [number for number, other in there.items() if other.alike != self.alike]
        if others:
            other = " ".join(map(str, there[others[0]].alike))
            return f"rank {others[0]} started {other}, this one {' '.join(map(str, self.alike))}"
        return ""

    def is_completed(self) -> bool:
        """Whether waiting takes no time."""
        with self.group.ranks.changed:
            return not self._missing() or bool(self._problem())

    def is_success(self) -> bool:
        """Whether all ranks started it."""
        return not self._missing() and not self._problem()

    def wait(self, timeout: datetime.timedelta = datetime.timedelta(0)) -> bool:
        """Wait for it, and write what it gives.

        Raises:
            RuntimeError: Another rank ended or starts something else, or the time is over.
        """
        ranks = self.group.ranks
        until = time.monotonic() + (timeout.total_seconds() or 2 * SECONDS)
        with ranks.changed:
            while self._missing() and not self._problem():
                if time.monotonic() > until:
                    raise RuntimeError(f"{self.call.kind} is not done within {timeout}")
                ranks.changed.wait(min(1.0, max(until - time.monotonic(), 0.001)))
            if problem := self._problem():
                raise RuntimeError(f"{self.call.kind}: {problem}")
            there = ranks.places[self.key]
            sent: list[Any] = [there[number].sent for number in self.awaited]
        if not self.call.waited:
            self.call.waited = True
            self._write(self.give(sent))
        return True

    def _write(self, results: Sequence[Tensor]) -> None:
        memory = {tensor.untyped_storage().data_ptr() for tensor in self.outputs}
        for given, before in zip(self.inputs, self.sent, strict=True):
            apart = given.untyped_storage().data_ptr() not in memory
            self.call.changed |= apart and not same_bits(given, before)
        for output, result in zip(self.outputs, results, strict=True):
            output.detach().copy_(result.reshape(output.shape))


def _spoil(tensor: Tensor) -> None:
    """Write what nobody takes for a result."""
    if tensor.dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        tensor.detach().fill_(torch.nan)
    elif tensor.is_contiguous():
        tensor.detach().view(torch.uint8).fill_(0x7F)


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _reduced(how: Any, tensors: Sequence[Tensor]) -> Tensor:
    """The tensors of all ranks reduced, one after the other, in their dtype."""
    op = dist.ReduceOp
    steps: Any = {op.SUM: torch.add, op.AVG: torch.add}
    steps |= {op.MAX: torch.maximum, op.MIN: torch.minimum}
    kind = [known for known in steps if known == getattr(how, "op", how) or how == known]
    if not kind:
        raise NotImplementedError(f"simulated ranks know no reduction {how}")
    total: Tensor = functools.reduce(steps[kind[0]], tensors)
    return total / len(tensors) if kind[0] == op.AVG else total


_ProcessGroup: Any = dist.ProcessGroup  # whose methods have many forms


class _Group(_ProcessGroup):  # type: ignore[misc]
    """A process group of simulated ranks."""

    _device_types = (torch.device("cpu"),)

    def __init__(self, ranks: Ranks, options: Any) -> None:
        super().__init__(options.group_rank, options.group_size)
        self.ranks, self.number, self.count = ranks, options.group_rank, options.group_size
        self.members = [*options.global_ranks_in_group] or [*range(self.count)]
        self._id, self._numbers = options.group_id, itertools.count()
        self._messages: dict[Any, Any] = {}
        self._log = ranks.ranks[self.members[self.number]].calls

    @property
    def group_name(self) -> str:
        """The name of the group."""
        return str(self._id)

    def getBackendName(self) -> str:
        """The name of the backend."""
        return NAME

    def _get_backend(self, device: torch.device) -> Any:
        timeout = datetime.timedelta(seconds=SECONDS)
        return SimpleNamespace(options=SimpleNamespace(_timeout=timeout), supports_coalescing=False)

    def _start(
        self,
        kind: str,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        give: Callable[[list[Sequence[Tensor]]], Sequence[Tensor]],
        sent: float,
        reduces: bool = False,
        alike: Any = (),
    ) -> _Started:
        call = Call(kind, inputs[0].dtype, round(sent), reduces)
        self._log.append(call)
        key = self._id, next(self._numbers)
        alike = (kind, call.dtype, *alike)
        return _Started(self, key, call, inputs, outputs, give, alike, range(self.count))

    def _message(self, kind: str, key: Any, tensors: Any) -> _Started:
        """One end of the next message with this key, which begins with the rank that sends it."""
        place = self._id, *key, next(self._messages.setdefault(key, itertools.count()))
        ends = (tensors, []) if kind == "send" else ([], tensors)
        call = Call(kind, tensors[0].dtype, _bytes(ends[0]), False)
        self._log.append(call)
        give = lambda all_: all_[0] if kind == "recv" else []  # noqa: E731
        return _Started(self, place, call, *ends, give, ("message", call.dtype), [key[0]])

    # What torch.distributed calls; the names changed with torch 2.13

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> _Started:
        """Join the tensors of all ranks in one."""
        sent = _bytes([input]) * (self.count - 1)
        give = lambda all_: [torch.cat([one[0].flatten() for one in all_])]  # noqa: E731
        return self._start("all_gather", [input], [output], give, sent, alike=[(*input.shape,)])

    _allgather_base = all_gather_single

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> _Started:
        """Give all ranks the tensors of all ranks."""
        sent, shape = _bytes(inputs) * (self.count - 1), (*inputs[0].shape,)
        give = lambda all_: [one[0] for one in all_]  # noqa: E731
        return self._start("all_gather", inputs, outputs[0], give, sent, alike=[shape])

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any) -> _Started:
        """Reduce, and give each rank its part."""
        sent = _bytes([input]) * (self.count - 1) / self.count

        def give(all_: list[Sequence[Tensor]]) -> Sequence[Tensor]:
            parts = [one[0].reshape(self.count, -1)[self.number] for one in all_]
            return [_reduced(opts.reduceOp, parts)]

        shape = (*input.shape,)
        return self._start("reduce_scatter", [input], [output], give, sent, True, [shape])

    _reduce_scatter_base = reduce_scatter_single

    def allreduce(self, tensors: Any, opts: Any) -> _Started:
        """Reduce in place."""
        sent = 2 * _bytes(tensors) * (self.count - 1) / self.count
        give = lambda all_: [_reduced(opts.reduceOp, [one[0] for one in all_])]  # noqa: E731
        shape = (*tensors[0].shape,)
        return self._start("all_reduce", tensors, tensors, give, sent, True, [shape])

    def barrier(self, opts: Any = None) -> _Started:
        """Wait for all ranks."""
        return self._start("barrier", [torch.empty(0)], [], lambda all_: [], 0)

    def broadcast(self, tensors: Any, opts: Any) -> _Started:
        """Give all ranks the tensor of one."""
        root = opts.rootRank
        sent = _bytes(tensors) * (self.count - 1) * (root == self.number)
        give = lambda all_: all_[root]  # noqa: E731
        return self._start("broadcast", tensors, tensors, give, sent, alike=[root])

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> _Started:
        """Give each rank its entry of all lists."""
        sent = _bytes([t for number, t in enumerate(inputs) if number != self.number])
        give = lambda all_: [one[self.number] for one in all_]  # noqa: E731
        return self._start("all_to_all", inputs, outputs, give, sent)

    def all_to_all_single(
        self, output: Tensor, input: Tensor, outputs: Any, inputs: Any, opts: Any = None
    ) -> _Started:
        """Give each rank its rows of the tensors of all ranks."""
        sizes = [split or [t.shape[0] // self.count] * self.count
                 for split, t in ((outputs, output), (inputs, input))]  # fmt: skip
        return self.alltoall(torch.split(output, sizes[0]), torch.split(input, sizes[1]))

    alltoall_base = all_to_all_single

    def send(self, tensors: Any, to: int, tag: int) -> _Started:
        """Send a tensor to one rank."""
        return self._message("send", (self.number, to, tag), tensors)

    def recv(self, tensors: Any, of: int, tag: int) -> _Started:
        """Receive a tensor of one rank."""
        return self._message("recv", (of, self.number, tag), tensors)
