"""Tensor parallelism: Transformer Engine's arguments, and its attributes of a layer.

How a layer is split among processes is in another package; here is only a layer that is not.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch.distributed as dist

from ..core.op import BasicOperation
from ..core.plugins import manager
from ._common import check_bool, require

Tracker = Callable[[], Any] | None
"""Returns an object whose ``fork()`` gives a context in which this process draws its own numbers.

Megatron-LM and Transformer Engine have such objects.
"""


class NotSplit:
    """A layer that this process has as a whole; the base of one that is split.

    Attributes:
        mode: How it is split among processes; None: it is not.
        group: The process group; None: all processes, or only this one.
        size: The number of processes.
        sequence: Whether tensors outside of the layer are split along the rows.
        before, after: The collectives around it.
        shows: It as an addition to a ``repr``.
    """

    mode: str | None = None
    group: Any = None
    size: int = 1
    sequence: bool = False
    before: list[BasicOperation] = []  # noqa: RUF012
    after: list[BasicOperation] = []  # noqa: RUF012
    shows: str = ""

    def part(self, op: object, name: str, size: int, mode: str) -> int:
        """The size of this process's part of a dimension, which ``mode`` splits."""
        return size


def split_of(op: object, mode: str | None, group: Any, sequence: bool = False) -> NotSplit:
    """Check the arguments; in a group of one process they ask for nothing, and are cleared.

    Raises:
        TypeError, ValueError: They are wrong.
        RuntimeError: ``torch.distributed`` is not initialised.
        ImportError: There are several processes, and not the package for them.
    """
    check_bool(op, "sequence_parallel", sequence)
    if mode is None:
        return NotSplit()
    require(op, mode in ("column", "row"), 'None, "column" or "row" as tensor_parallel_mode', mode)
    if not (dist.is_available() and dist.is_initialized()):
        needed = "torch.distributed.init_process_group to be called first"
        raise RuntimeError(f"{type(op).__name__}: tensor_parallel_mode={mode!r} needs {needed}")
    if (group is None or isinstance(group, dist.ProcessGroup)) and dist.get_world_size(group) == 1:
        return NotSplit()
    return manager.give("opfuse.ops", "TensorParallel").of(mode, group, sequence)  # type: ignore[no-any-return]


class SplitLayer:
    """Transformer Engine's attributes of a layer that is split, from its ``_split``."""

    _split: NotSplit

    tensor_parallel_mode = property(lambda op: op._split.mode, doc="How the layer is split.")
    tensor_parallel_group = property(lambda op: op._split.group, doc="The processes; None: all.")
    tensor_parallel_size = property(lambda op: op._split.size, doc="The number of processes.")
    sequence_parallel = property(
        lambda op: op._split.sequence, doc="Whether tensors around the layer are split by rows."
    )


def check_tracker(op: object, tracker: Tracker) -> None:
    """Refuse a tracker that is not a function.

    Raises:
        TypeError: It is something else.
    """
    is_known = tracker is None or callable(tracker)
    require(op, is_known, "a function as rng_state_tracker_function", tracker, TypeError)


def forked(tracker: Tracker) -> AbstractContextManager[Any]:
    """The context in which this process draws its own numbers."""
    return nullcontext() if tracker is None else tracker().fork()


class WithLaterArguments(BasicOperation):
    """An op that takes Transformer Engine's arguments for features of a later release.

    A subclass names them in its own signature, and passes them to this ``__init__``.

    Args:
        **given: Their values in the constructor's call.

    Raises:
        NotImplementedError: One asks for an unsupported feature.
    """

    _later: ClassVar[dict[str, str]] = {
        "userbuffers_options": "overlapped communication",
        "single_grouped_weight": "one parameter for all groups",
        "single_grouped_bias": "one parameter for all groups",
        "delay_wgrad_compute": "a later gradient of the weights",
    }

    def __init__(self, **given: Any) -> None:
        super().__init__()
        for name, value in given.items():
            if value not in (None, False):
                what = f"{type(self).__name__}: {name}={value!r} is not supported"
                raise NotImplementedError(f"{what}, {self._later[name]} comes with a later release")
