"""How much faster than PyTorch's separate operations a case is, by the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from opfuse_triton import KernelCase, Target
from opfuse_triton.floor import TorchBytes
from torch.utils.flop_counter import flop_registry

from .entries import SAMPLE, estimate


def _of_grouped(left: torch.Tensor, right: torch.Tensor, *unused: Any, **more: Any) -> int:
    """Of torch's grouped product, where groups divide the rows or what is added up."""
    return 2 * left.numel() * right.shape[-1]


_FLOPS = {**flop_registry, torch.ops.aten._grouped_mm: _of_grouped}


class _SeparateTime(TorchBytes):
    """Within this context, adds up what PyTorch's operations take on a target, one by one.

    Each takes its bytes at the bandwidth or its matrix product at the peak, whichever is longer.
    """

    def __init__(self, target: Target) -> None:
        super().__init__()
        self._target, self.seconds = target, 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        before = self.moved.total()
        result = super().__torch_dispatch__(func, types, args, kwargs)
        count = _FLOPS.get(func.overloadpacket)
        flops = count(*args, **(kwargs or {}), out_val=result) if count else 0
        bytes_ = self.moved.total() - before
        self.seconds += max(bytes_ / self._target.bandwidth, flops / self._target.flops)
        return result


def separate_seconds(case: KernelCase, shape: Mapping[str, int], target: Target) -> float | None:
    """The modelled time of the separate operations; None if the case does not have them.

    Starting an operation takes no time.
    """
    if case.separate is None:
        return None
    inputs = case.inputs(shape)
    with torch.no_grad(), _SeparateTime(target) as counted:
        given = case.separate(**inputs)
    return given / target.bandwidth if isinstance(given, int) else counted.seconds


def predicted_speed(case: KernelCase, target: Target, sample: int = SAMPLE) -> float:
    """The modelled speed of a case, relative to the separate operations (1.0).

    Args:
        case: The case.
        target: The target.
        sample: Programs of each launch that run.

    Returns:
        The lowest over its real shapes.

    Raises:
        ValueError: The case has no separate operations.
        RuntimeError: Triton does not interpret in this process.
    """
    speeds = []
    for shape in case.shapes:
        separate = separate_seconds(case, shape, target)
        if separate is None:
            raise ValueError(f"{case.name} has no separate operations to compare with")
        speeds.append(separate / estimate(case, shape, target, sample).seconds)
    return min(speeds)
