"""Tensor parallelism: the part of a layer that a process has, and the collectives around it."""

from __future__ import annotations

from typing import Any

from opfuse.core.op import BasicOperation
from opfuse.ops.authoring import NotSplit, expected

from .collectives import AllGather, AllReduce, CopyToTensorParallelRegion, ReduceScatter
from .ranks import Group


class TensorParallel(NotSplit):
    """How a layer is split among processes.

    Args:
        mode: ``"column"`` or ``"row"``.
        processes: They.
        sequence: Whether tensors outside of the region are split along the rows.
    """

    def __init__(self, mode: str | None, processes: Group, sequence: bool = False) -> None:
        self.mode, self.sequence = mode, sequence
        self.size, self._processes = processes.size, processes

    @property
    def group(self) -> Any:
        """The process group; None: all processes."""
        return self._processes.given

    @classmethod
    def of(cls, mode: str, group: Any, sequence: bool) -> NotSplit:
        """That of a layer, which a group of one process leaves whole."""
        processes = Group(group)
        return NotSplit() if processes.size == 1 else cls(mode, processes, sequence)

    def part(self, op: object, name: str, size: int, mode: str) -> int:
        """The size of this process's part of a dimension, which ``mode`` splits."""
        if self.mode != mode:
            return size
        if size % self.size:
            what = f"{name} to be a multiple of {self.size}, the number of processes"
            raise ValueError(expected(op, what, size))
        return size // self.size

    @property
    def before(self) -> list[BasicOperation]:  # type: ignore[override]
        """The collective that gives each process the whole input of its part of the outputs."""
        if self.mode != "column":
            return []
        return [(AllGather if self.sequence else CopyToTensorParallelRegion)(self.group)]

    @property
    def after(self) -> list[BasicOperation]:  # type: ignore[override]
        """The collective that adds up the products of all processes."""
        if self.mode != "row":
            return []
        return [(ReduceScatter if self.sequence else AllReduce)(self.group)]

    @property
    def shows(self) -> str:  # type: ignore[override]
        """It as an addition to a ``repr``."""
        more = ", sequence_parallel=True" if self.sequence else ""
        return f", tensor_parallel_mode={self.mode!r}, tensor_parallel_size={self.size}{more}"
