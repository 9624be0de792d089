"""How much faster than PyTorch's separate operations a case is, by the model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from opfuse_triton import TARGETS, KernelCase, Predicted, Target
from opfuse_triton.floor import TorchBytes
from opfuse_triton.predicted import PAYS
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


def case_seconds(case: KernelCase, shape: Mapping[str, int], target: Target, sample: int) -> float:
    """The modelled time of a case.

    A matrix product takes its operations at the peak or its floor at the bandwidth, whichever is
    longer: as the separate one does, since no model says which of two products is faster.
    """
    if case.gemms and case.flops is not None:
        moved = case.floor_bytes(shape) / target.bandwidth
        return max(moved, case.flops(**shape) / target.flops)
    return estimate(case, shape, target, sample).seconds


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
        speeds.append(separate / case_seconds(case, shape, target, sample))
    return min(speeds)


def assert_predicted(table: Predicted, cases: Iterable[KernelCase], sample: int = 3) -> None:
    """Assert that a plugin's table has the speeds of the model within 2 %.

    They are those on an H100. Of a product they are the lowest of all targets: how much is left to
    gain beside it depends on how fast it is.

    Args:
        table: The table.
        cases: The cases of the plugin.
        sample: Programs of each launch that run.

    Raises:
        AssertionError: One differs, or is on the other side of what pays.
        RuntimeError: Triton does not interpret in this process.
    """
    used = {name for _, names in table.fusions.values() for name in names}
    found = {
        case.name: min(
            predicted_speed(case, target, sample)
            for target in (filter(case.fits, TARGETS.values()) if case.gemms else [TARGETS[90]])
        )
        for case in cases
        if case.name in used
    }
    for name, (speed, names) in table.fusions.items():
        lowest = min(found[case] for case in names)
        assert math.isclose(speed, lowest, rel_tol=0.02) and (speed < PAYS) == (lowest < PAYS), (
            f"the table predicts {speed:.2f}x of {name}, and the model {lowest:.3f}x: "
            f"{ {case: round(found[case], 3) for case in names} }"
        )
