"""Bytes and operations of each program, counted where Triton's interpreter runs it.

:mod:`opfuse_triton.floor` watches the accesses. What is wrapped here besides is private to Triton,
too: it exists in Triton 3.6 to 3.9, and ``tests/test_ledger.py`` compares the counts with those
made by hand.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np
import torch
import triton.language as tl
from opfuse_triton.floor import watching
from opfuse_triton.recorded import storage_of, tensors_of
from triton.runtime import interpreter

_BESIDE = 1 << 20
"""So many bytes before and behind a tensor, an address is taken for a mistake."""


@dataclass
class ProgramCount:
    """What one program does.

    Attributes:
        read: Bytes read, by tensor (:func:`opfuse_triton.recorded.storage_of`). An address that one
            access names several times counts once, one that a later access names again counts
            again. What is read through an address that was itself read does not count.
        written: Bytes written, likewise. An atomic operation reads and writes.
        again: How often the program reads each byte that it reads of a tensor, on average, or
            writes each that it writes: the larger.
        flops: Floating-point operations of its matrix products, two per multiplication.
        in_flight: The bytes that it loads before it has to wait, between two stores or products;
            where these differ, the average over the bytes that it loads.
    """

    read: Counter[int] = field(default_factory=Counter)
    written: Counter[int] = field(default_factory=Counter)
    again: dict[int, float] = field(default_factory=dict)
    flops: int = 0
    in_flight: float = 0

    @property
    def moved(self) -> int:
        """All bytes, read and written."""
        return self.read.total() + self.written.total()


@dataclass
class LaunchCount:
    """What the programs of a launch do.

    Attributes:
        name: The kernel's function.
        grid: How many programs there are, in three dimensions.
        programs: Each program, or those that were sampled.
        tensors: The launch's tensors. They are kept, so that no two have the same address.
        warps: Warps per program, as the launch asked for.
        stands_for: For how many programs of the launch each of ``programs`` counts.
    """

    name: str
    grid: tuple[int, int, int]
    programs: list[ProgramCount]
    tensors: list[torch.Tensor]
    warps: int = 4
    stands_for: list[Fraction] = field(default_factory=list)

    @property
    def total_programs(self) -> int:
        """How many programs the launch has, sampled or not."""
        return self.grid[0] * self.grid[1] * self.grid[2]

    def total(self, kind: str) -> dict[int, float]:
        """The bytes of all programs, ``"read"`` or ``"written"``, by tensor."""
        every: defaultdict[int, Fraction] = defaultdict(Fraction)
        for one, times in zip(self.programs, self.stands_for, strict=True):
            for key, moved in getattr(one, kind).items():
                every[key] += moved * times
        return {key: float(moved) for key, moved in every.items()}

    def average(self, what: str) -> float:
        """The average program's ``"moved"``, ``"in_flight"`` or ``"flops"``."""
        pairs = zip(self.programs, self.stands_for, strict=True)
        whole = sum(Fraction(getattr(one, what)) * times for one, times in pairs)
        return float(whole / self.total_programs)


@contextlib.contextmanager
def counting(sample: int | None = None) -> Iterator[list[LaunchCount]]:
    """Count what the kernels do that are launched within the context.

    Args:
        sample: Run at most so many programs of each launch, at least 3: the last two, which may
            have less to do than the others, and the first of equal shares of the others, for
            which it stands. None: run all.

    Raises:
        RuntimeError: Triton does not interpret in this process.
    """
    launches: list[LaunchCount] = []
    recorder = _Recorder(launches, sample)
    with contextlib.ExitStack() as stack:
        stack.enter_context(watching(recorder.access))
        _wrap_launches(stack, recorder)
        yield launches


class _Recorder:
    """The launch and the program that are being counted."""

    def __init__(self, launches: list[LaunchCount], sample: int | None) -> None:
        self.launches, self.sample = launches, sample
        self.memory: list[tuple[int, int, int]] = []
        self.touched: dict[tuple[str, int, int], Any] = {}
        self.waits: list[int] = []
        self.program = ProgramCount()

    def begin_launch(self, name: str, tensors: list[torch.Tensor], warps: int) -> None:
        spans = {storage_of(t): t.untyped_storage() for t in tensors}
        self.memory = [
            (storage.data_ptr(), storage.data_ptr() + storage.nbytes(), key)
            for key, storage in spans.items()
        ]
        self.launches.append(LaunchCount(name, (0, 0, 0), [], tensors, warps))

    def choose(self, grid: Sequence[int]) -> list[tuple[int, int, int]]:
        """The programs to run, of all in the grid."""
        whole = (grid[0], grid[1] if len(grid) > 1 else 1, grid[2] if len(grid) > 2 else 1)
        self.launches[-1].grid = whole
        count = whole[0] * whole[1] * whole[2]
        places: Any = range(count)
        stands_for = [Fraction(1)] * count
        if self.sample is not None and count > self.sample:
            shares = self.sample - 2
            first = np.linspace(0, count - 2, shares, endpoint=False).round().astype(int)
            places = [*first, count - 2, count - 1]
            stands_for = [Fraction(count - 2, shares)] * shares + [Fraction(1)] * 2
        self.launches[-1].stands_for = stands_for
        x, y, z = np.unravel_index(np.array(places, dtype=int), whole) if count else ((),) * 3
        return list(zip(map(int, x), map(int, y), map(int, z), strict=True))

    def begin_program(self) -> None:
        self.end_program()
        self.program, self.waits = ProgramCount(), [0]
        self.launches[-1].programs.append(self.program)

    def end_program(self) -> None:
        touched: Counter[tuple[str, int]] = Counter()
        for (kind, key, width), seen in self.touched.items():
            touched[kind, key] += int(np.count_nonzero(seen)) * width
        for (kind, key), size in touched.items():
            ratio = getattr(self.program, kind)[key] / size
            self.program.again[key] = max(self.program.again.get(key, 0), ratio)
        self.touched = {}
        if any(self.waits):
            self.program.in_flight = sum(n * n for n in self.waits) / sum(self.waits)

    def access(self, kind: str, addresses: Any, width: int) -> None:
        self._refuse_outside(kind, addresses)
        for start, end, key in self.memory:
            inside = addresses[(addresses >= start) & (addresses < end)]
            if inside.size:
                getattr(self.program, kind)[key] += inside.size * width
                self._touch((kind, key, width), inside - start, end - start)
        if kind == "read":
            self.waits[-1] += addresses.size * width
        else:
            self.waits.append(0)

    def _refuse_outside(self, kind: str, addresses: Any) -> None:
        """Refuse addresses next to a tensor; what was read as an address may lie anywhere."""
        known = np.zeros(addresses.shape, dtype=bool)
        beside = np.zeros(addresses.shape, dtype=bool)
        for start, end, _ in self.memory:
            known |= (addresses >= start) & (addresses < end)
            beside |= (addresses >= max(start - _BESIDE, 0)) & (addresses < end + _BESIDE)
        if (beside & ~known).any():
            raise IndexError(
                f"{self.launches[-1].name}: {int((beside & ~known).sum())} of the addresses that "
                f"an access has {kind} are outside its tensors; is a mask missing?"
            )

    def _touch(self, what: tuple[str, int, int], places: Any, size: int) -> None:
        """Remember which elements were touched; of the array, only touched pages are allocated."""
        width = what[-1]
        if what not in self.touched:
            self.touched[what] = np.zeros(size // width + 1, dtype=bool)
        self.touched[what][places // np.uint64(width)] = True

    def product(self, a: Any, b: Any) -> None:
        *batch, rows, depth = a.data.shape
        self.program.flops += 2 * int(np.prod(batch)) * rows * depth * b.data.shape[-1]
        self.waits.append(0)


def _wrap_launches(stack: contextlib.ExitStack, recorder: _Recorder) -> None:
    """Tell the recorder of launches, programs and products; run the programs that it chooses."""
    builder = type(interpreter.interpreter_builder)
    chosen: list[tuple[int, int, int]] = []

    def call(original: Any, self: Any, *args: Any, **keywords: Any) -> Any:
        given = [*args, *keywords.values()]
        warps = keywords.get("num_warps", 4)
        recorder.begin_launch(self.fn.__name__, list(tensors_of(given)), warps)
        _fill_in(stack, self.fn.__globals__)
        if callable(self.grid):
            known = inspect.signature(self.fn).parameters
            taken = {name: value for name, value in keywords.items() if name in known}
            self.grid = self.grid(inspect.getcallargs(self.fn, *args, **taken))
        chosen[:] = recorder.choose(self.grid)
        self.grid = (len(chosen),)
        original(self, *args, **keywords)
        recorder.end_program()

    def set_grid_dim(original: Any, self: Any, *unused: int) -> None:
        original(self, *recorder.launches[-1].grid)

    def set_grid_idx(original: Any, self: Any, index: int, *unused: int) -> None:
        recorder.begin_program()
        original(self, *chosen[index])

    def product(original: Any, self: Any, a: Any, b: Any, *rest: Any) -> Any:
        recorder.product(a, b)
        return original(self, a, b, *rest)

    def convert(original: Any, value: Any) -> Any:
        if isinstance(value, float):  # on a GPU it is a value of the kernel, which has methods
            return tl.tensor(
                interpreter.TensorHandle(np.array([value], np.float32), tl.float32), tl.float32
            )
        return original(value)

    executor = interpreter.GridExecutor
    _replace(stack, executor, "__call__", call)
    _replace(stack, builder, "create_dot", product)
    _replace(stack, builder, "set_grid_dim", set_grid_dim)
    _replace(stack, builder, "set_grid_idx", set_grid_idx)
    _replace(stack, interpreter, "_implicit_cvt", convert)


def _replace(
    stack: contextlib.ExitStack, owner: Any, name: str, wrapper: Callable[..., Any]
) -> None:
    """Let ``wrapper(original, ...)`` be called instead of ``original(...)``, within the stack."""
    original = getattr(owner, name)

    def wrapped(*given: Any, **keywords: Any) -> Any:
        return wrapper(original, *given, **keywords)

    setattr(owner, name, functools.wraps(original)(wrapped))
    stack.callback(setattr, owner, name, original)


def _fill_in(stack: contextlib.ExitStack, names: dict[str, Any]) -> None:
    """Give a kernel of another package the functions of ``libdevice``, which are empty here."""
    for name, function in (("rsqrt", _rsqrt), ("tanh", _tanh)):
        known = names.get(name)
        if (getattr(known, "__module__", None) or "").endswith("libdevice"):
            names[name] = function
            stack.callback(names.__setitem__, name, known)


def _rsqrt(x: Any) -> Any:
    return tl.rsqrt(x)


def _tanh(x: Any) -> Any:
    return 2 * tl.sigmoid(2 * x) - 1
