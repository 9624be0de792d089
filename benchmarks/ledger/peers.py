"""Other packages' kernels in the ledger: what they move, and the same model's time for it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from opfuse_triton import KernelCase, Target
from opfuse_triton import target as pretend
from opfuse_triton.floor import TorchBytes
from opfuse_triton.recorded import find_operands
from torch.overrides import TorchFunctionMode

from .counting import counting
from .entries import SAMPLE, TargetEntry, by_role, drawn_memory, entry_of, target_entry, with_memory

_device_of: Any = torch.Tensor.device.__get__


class _AsOnGpu(TorchFunctionMode):
    """Tensors on the CPU say that they are on a GPU; what is made there is made on the CPU."""

    keeps_no_tensors = True

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func == _device_of:
            return torch.device("cuda")
        given = dict(kwargs or {})
        if given.get("device") is not None:
            given["device"] = "cpu"
        return func(*args, **given)


@contextlib.contextmanager
def as_on(target: Target) -> Iterator[None]:
    """Within the context, code that asks for the GPU's multiprocessors is told those of a target.

    It may hold CPU tensors and launch kernels that Triton interprets.
    """
    told = SimpleNamespace(multi_processor_count=target.multiprocessors)
    with (
        mock.patch("torch.cuda.get_device_properties", lambda *unused: told),
        mock.patch("torch.cuda.device", lambda *unused: contextlib.nullcontext()),
        pretend(target),
        _AsOnGpu(),
    ):
        yield


def estimate_peer(
    case: KernelCase,
    shape: Mapping[str, int],
    target: Target,
    run: Callable[..., Any],
    sample: int = SAMPLE,
) -> TargetEntry:
    """Estimate what another package's kernels move at a real shape; see :func:`estimate`.

    Args:
        case: The case.
        shape: One of ``case.shapes``.
        target: The GPU that the package is told it is on.
        run: One of ``case.peers``.
        sample: Programs of each launch that run.

    Raises:
        RuntimeError: Triton does not interpret in this process.
    """
    meta = case.inputs(shape)
    memory = with_memory(meta.values(), drawn_memory(case, shape, meta))
    inputs = dict(zip(meta, memory, strict=True))
    with TorchBytes() as around, counting(sample) as counts, as_on(target):
        given = run(**inputs)
    operands = find_operands(case, shape, inputs, given)
    entries = tuple(
        entry_of(
            *(target, count.name, count.warps, count, operands),
            is_gemm=bool(case.gemms) and count.average("flops") > 0,
        )
        for count in counts
    )
    return target_entry(case, shape, target, entries, by_role(around.moved, operands))
