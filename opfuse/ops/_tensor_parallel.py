"""Tensor parallelism: Transformer Engine's arguments, and the part that a process has."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch.distributed as dist

from ..core.op import BasicOperation
from ..core.ranks import Group
from ._common import check_bool, expected
from .distributed import AllGather, AllReduce, CopyToTensorParallelRegion, ReduceScatter

Tracker = Callable[[], Any] | None
"""Returns an object whose ``fork()`` gives a context in which this process draws its own numbers.

Megatron-LM and Transformer Engine have such objects.
"""


class TensorParallel(NamedTuple):
    """How a layer is split among processes.

    Attributes:
        mode: ``"column"``, ``"row"``, or None: it is not.
        processes: They; None: there is only this one.
        sequence: Whether tensors outside of the region are split along the rows.
    """

    mode: str | None = None
    processes: Group | None = None
    sequence: bool = False

    @classmethod
    def of(cls, op: object, mode: str | None, group: Any, sequence: bool = False) -> TensorParallel:
        """Check the arguments; in a group of one process they ask for nothing, and are cleared."""
        check_bool(op, "sequence_parallel", sequence)
        if mode is None:
            return cls()
        if mode not in ("column", "row"):
            what = 'None, "column" or "row" as tensor_parallel_mode'
            raise ValueError(expected(op, what, repr(mode)))
        if not (dist.is_available() and dist.is_initialized()):
            needed = "torch.distributed.init_process_group to be called first"
            raise RuntimeError(f"{type(op).__name__}: tensor_parallel_mode={mode!r} needs {needed}")
        processes = Group(group)
        return cls() if processes.size == 1 else cls(mode, processes, sequence)

    @property
    def group(self) -> Any:
        """The process group; None: all processes, or only this one."""
        return self.processes and self.processes.given

    @property
    def size(self) -> int:
        """The number of processes."""
        return self.processes.size if self.processes else 1

    def part(self, op: object, name: str, size: int, mode: str) -> int:
        """The size of this process's part of a dimension, which ``mode`` splits."""
        if self.mode != mode:
            return size
        if size % self.size:
            what = f"{name} to be a multiple of {self.size}, the number of processes"
            raise ValueError(expected(op, what, size))
        return size // self.size

    @property
    def before(self) -> list[BasicOperation]:
        """The collective that gives each process the whole input of its part of the outputs."""
        if self.mode != "column":
            return []
        return [(AllGather if self.sequence else CopyToTensorParallelRegion)(self.group)]

    @property
    def after(self) -> list[BasicOperation]:
        """The collective that adds up the products of all processes."""
        if self.mode != "row":
            return []
        return [(ReduceScatter if self.sequence else AllReduce)(self.group)]

    @property
    def shows(self) -> str:
        """It as an addition to a ``repr``."""
        if self.mode is None:
            return ""
        more = ", sequence_parallel=True" if self.sequence else ""
        return f", tensor_parallel_mode={self.mode!r}, tensor_parallel_size={self.size}{more}"


class SplitLayer:
    """Transformer Engine's attributes of a layer that is split, from its ``_split``."""

    _split: TensorParallel

    @property
    def tensor_parallel_mode(self) -> str | None:
        """How the layer is split among processes."""
        return self._split.mode

    @property
    def tensor_parallel_group(self) -> Any:
        """The processes; None: all."""
        return self._split.group

    @property
    def tensor_parallel_size(self) -> int:
        """The number of processes."""
        return self._split.size

    @property
    def sequence_parallel(self) -> bool:
        """Whether tensors outside of the layer are split along the rows."""
        return self._split.sequence


def check_tracker(op: object, tracker: Tracker) -> None:
    """Refuse a tracker that is not a function.

    Raises:
        TypeError: It is something else.
    """
    if tracker is not None and not callable(tracker):
        what = "a function as rng_state_tracker_function"
        raise TypeError(expected(op, what, repr(tracker)))


def forked(tracker: Tracker) -> AbstractContextManager[Any]:
    """The context in which this process draws its own numbers."""
    return nullcontext() if tracker is None else tracker().fork()
