"""The floor of a fusion: bytes that it has to move, compared with those that its kernels move.

Triton's interpreter runs kernels on numpy arrays, so that each access is seen with its addresses
and its mask. Its builder is private to Triton: what is wrapped here exists in Triton 3.6 to 3.9,
and tests compare the counts with those made by hand.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime import interpreter

from .cases import KernelCase, Operand
from .machine import is_interpreting
from .recorded import describe, find_operands, record, storage_of, tensors_of
from .targets import TARGETS

_FREE = ("empty", "new_empty", "detach", "_unsafe_view", "alias", "lift_fresh", "set_")
_WRITE_ONLY = ("copy_", "fill_", "zero_", "zeros_like", "ones_like", "full_like", "new_zeros")
_ACCESSES: Mapping[str, tuple[int, int | None, tuple[str, ...]]] = {
    # a descriptor's load and store end in the first two
    "create_masked_load": (0, 1, ("read",)),
    "create_masked_store": (0, 2, ("written",)),
    "create_atomic_rmw": (1, 3, ("read", "written")),
    "create_atomic_cas": (0, None, ("read", "written")),
}
"""Methods of the interpreter's builder: which argument has the addresses, which the mask."""


class TorchBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within this context, counts the bytes that PyTorch's operations move.

    Each reads its operands and writes its result. Views move nothing.

    Attributes:
        moved: Bytes read and written, by the storage of the tensor
            (:func:`opfuse_triton.recorded.storage_of`).
        memory: The storages that were seen. While they are kept no two have the same address.
    """

    keeps_no_tensors = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.moved: Counter[int] = Counter()
        self.memory: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        moves = not func.is_view and not name.startswith(_FREE)
        self.add(tree_leaves((args[1:] if name in _WRITE_ONLY else args, kwargs)), moves)
        self.add(tree_leaves(result), moves)
        return result

    def add(self, values: Iterable[Any], moves: bool = True) -> None:
        """Count tensors, or only keep their memory. A dimension of stride 0 has one element."""
        for tensor in tensors_of(values):
            self.memory[storage_of(tensor)] = tensor.untyped_storage()
            if moves and tensor.numel():
                sizes = zip(tensor.shape, tensor.stride(), strict=True)
                own = torch.Size(size if stride else 1 for size, stride in sizes).numel()
                self.moved[storage_of(tensor)] += own * tensor.itemsize


@contextlib.contextmanager
def watching(seen: Callable[[str, Any, int], None]) -> Iterator[None]:
    """Within the context, be told of each access of a kernel that Triton interprets.

    Args:
        seen: Called with ``"read"`` or ``"written"``, the addresses that the mask lets through,
            each once, and the bytes of an element. An atomic operation reads and writes.

    Raises:
        RuntimeError: Triton does not interpret in this process.
    """
    if not is_interpreting():
        raise RuntimeError("bytes are counted in Triton's interpreter: set TRITON_INTERPRET=1")
    builder = type(interpreter.interpreter_builder)

    def watched(name: str, at: int, masked: int | None, kinds: tuple[str, ...]) -> Any:
        original = getattr(builder, name)

        def access(self: Any, *given: Any, **more: Any) -> Any:
            pointers, mask = given[at], np.True_ if masked is None else given[masked].data
            addresses, mask = np.broadcast_arrays(pointers.data, mask)
            addresses = addresses[mask.astype(bool)]
            if addresses.size > 1 and not (addresses[1:] > addresses[:-1]).all():
                addresses = np.unique(addresses)
            for kind in kinds:
                seen(kind, addresses, max(1, pointers.get_element_ty().primitive_bitwidth // 8))
            return original(self, *given, **more)

        return mock.patch.object(builder, name, access)

    # the interpreter copies tensors, which are on the CPU already
    restore = mock.patch.object(interpreter.GridExecutor, "_restore_args_dev", lambda *unused: None)
    with contextlib.ExitStack() as stack:
        stack.enter_context(np.errstate(all="ignore"))  # the numbers do not matter
        for patch in (restore, *(watched(name, *where) for name, where in _ACCESSES.items())):
            stack.enter_context(patch)
        yield


def count_bytes(
    case: KernelCase, shape: Mapping[str, int], run: Callable[..., Any] | None = None
) -> dict[str, float]:
    """Count what every program of a case moves, and what PyTorch's operations around it move.

    An address that one access names several times counts once, one that a later access names
    again counts again.

    Args:
        case: The case.
        shape: One of ``case.small``.
        run: A replacement of ``case.run`` with the same arguments and results.

    Returns:
        The bytes by the role of their operand; partial for one that is neither input nor output.

    Raises:
        RuntimeError: Triton does not interpret in this process.
    """
    inputs = case.inputs(shape, "cpu")
    counted = TorchBytes()
    counted.add(inputs.values(), moves=False)

    def seen(kind: str, addresses: Any, width: int) -> None:
        for key, storage in counted.memory.items():
            start, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
            inside = np.count_nonzero((addresses >= start) & (addresses < end))
            counted.moved[key] += int(inside) * width

    with counted, watching(seen):
        given = (run or case.run)(**inputs)
    return by_role(counted.moved, find_operands(case, shape, inputs, given))


def by_role(
    moved: Mapping[int, float], operands: Mapping[int, tuple[str, Operand]]
) -> dict[str, float]:
    """Bytes by the role of their operand, from those by storage."""
    sums = {"full": 0.0, "vector": 0.0, "partial": 0.0}
    for key, bytes_ in moved.items():
        sums[operands[key][1].role if key in operands else "partial"] += bytes_
    return sums


def assert_floor(case: KernelCase, full: float = 1.02, partial: float = 0.10) -> None:
    """Assert that a case moves little more than its fusion has to. For tests in the interpreter.

    At the small shapes every access of every program is counted. Give one of them the width of a
    real model, and few rows: a kernel may read only a wide row twice. At the real shapes nothing
    runs. For each target, every launch moves each of its partial sums once.

    Args:
        case: The case.
        full: Bytes of full-size operands over the floor, at most, at small shapes.
        partial: Bytes of partial sums over the floor, at most, at real shapes.

    Raises:
        AssertionError: It moves more.
        RuntimeError: Triton does not interpret in this process.
    """
    for shape in case.small:
        ratio = count_bytes(case, shape)["full"] / case.floor_bytes(shape)
        assert ratio <= full, (
            f"{case.name} at {describe(shape)} moves {ratio:.3f} times the bytes that its fusion "
            f"has to, and {full} times is allowed"
        )
    for shape in case.shapes:
        for target in filter(case.fits, TARGETS.values()):
            inputs = case.inputs(shape)
            with TorchBytes() as counted:
                run = record(case, shape, target, inputs)
            for launch in run.launches:
                counted.add(launch.args)
            ratio = by_role(counted.moved, run.operands)["partial"] / case.floor_bytes(shape)
            assert ratio <= partial, (
                f"{case.name} at {describe(shape)} for {target}: partial sums are {ratio:.3f} of "
                f"the bytes that the fusion has to move, and {partial} is allowed"
            )
