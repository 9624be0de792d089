"""Whether a case gives on this GPU what its twin gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from opfuse.tuning.tolerance import code_steps, difference

from ..cases import KernelCase

RUNS = 3
"""How often a case runs; all results must be equal to the bit."""

NEXT_CODES = 0.02
"""The share of FP8 codes that may be others: what was cast had another last bit. Where the largest
magnitude of a block had one, which decides about a power of two, codes are doubled or halved, and
so is the scale."""

FAR_CODES = 1e-4
"""The share that may be others than those."""

NEAR_ZERO = 2.0**-8
"""Two codes whose values differ by less than this part of the largest do not count as far: terms of
that size may cancel, each with another last bit."""


class Poisoned(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within this context, memory that is not written yet holds NaN, or the largest integer."""

    keeps_no_tensors = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__.startswith(("empty", "new_empty")) and made.numel():
            if made.dtype.is_floating_point and made.dtype.itemsize > 1:
                made.fill_(torch.nan)
            else:
                made.view(torch.uint8).fill_(0x7F)
        return made


def several(given: Any) -> tuple[Tensor, ...]:
    """Return the results of a case as a tuple."""
    return tuple(given) if isinstance(given, (tuple, list)) else (given,)


def judge(case: KernelCase, shape: Mapping[str, int], inputs: Mapping[str, Tensor]) -> str:
    """Return what is wrong with the results of a case, as a sentence; ``""``: nothing.

    Integers must be the twin's. So must FP8 codes if the case is ``exact``; if not, few may differ,
    see :data:`NEXT_CODES`. Other results are compared with the twin in fp64, or as it is if it
    cannot compute in fp64, by the tolerance of their dtype or twice the twin's own error.

    Args:
        case: The case.
        shape: The shape of the inputs.
        inputs: Its inputs; they are not written into.
    """
    names = [name for name, operand in case.tensors(**shape).items() if operand.output]
    with Poisoned():  # type: ignore[no-untyped-call]
        runs = [several(case.run(**_copies(inputs))) for _ in range(RUNS)]
    for name, *each in zip(names, *runs, strict=True):
        if not all(torch.equal(_bits(each[0]), _bits(other)) for other in each[1:]):
            return f"{name} differs between {RUNS} runs of the same"
    twin = case.twin or case.separate
    if not callable(twin):
        return "it has no twin to be compared with"
    rounded = several(twin(**_copies(inputs)))
    truth = _in_fp64(twin, inputs) or rounded
    for name, got, own, true in zip(names, runs[0], rounded, truth, strict=True):
        rounds = got.dtype.is_floating_point and not case.exact
        if rounds and _are_powers_of_2(got) and _are_powers_of_2(own):  # scales are codes, too
            got, own = (torch.frexp(tensor).exponent for tensor in (got, own))
        is_code = got.dtype.itemsize == 1 or not got.dtype.is_floating_point
        if got.shape != own.shape or (is_code and got.dtype != own.dtype):
            gives, of_twin = (f"{tuple(t.shape)} {t.dtype}" for t in (got, own))
            return f"{name} is {gives}, and its twin's is {of_twin}"
        if is_code:
            steps = code_steps(got, own)
            differing, far = int(steps.count_nonzero()), _far(got, own, steps)
            most, farthest = (rounds * share * got.numel() for share in (NEXT_CODES, FAR_CODES))
            if differing > most or far > farthest:
                of = f"{differing} of {got.numel()} codes, by up to {steps.max():.0f} steps"
                return f"{name} differs from its twin in {of}"
        elif wrong := difference(got, true, rounded=own, dtype=got.dtype, gemm=bool(case.gemms)):
            return f"{name} {wrong}"
    return ""


def _are_powers_of_2(tensor: Tensor) -> bool:
    """Whether all of a tensor of fp32 are: the scales of blocks."""
    fits = tensor.dtype is torch.float32 and tensor.numel() > 0
    return fits and bool((torch.frexp(tensor).mantissa == 0.5).all())


def _far(got: Tensor, own: Tensor, steps: Tensor) -> int:
    """How many codes are no neighbors of the twin's, nor of these times or by 2, nor near zero."""
    far = steps > 1
    if got.dtype.itemsize == 1 and got.dtype.is_floating_point and "x2" not in str(got.dtype):
        one, other = got.float(), own.float()
        for factor in (2.0, 0.5):
            far &= code_steps(got, (factor * other).to(got.dtype)) > 1
        largest = other.where(other.isfinite(), 0.0).abs().max() if other.numel() else 0.0
        far &= ~((one - other).abs() <= NEAR_ZERO * largest)  # not a number: it is far
    return int(far.sum())


def _copies(inputs: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Copies of tensors, laid out in memory as they are; ``dtype``: of floating-point ones."""
    found = {}
    for name, tensor in inputs.items():
        own = dtype if dtype and tensor.dtype.is_floating_point else tensor.dtype
        start = tensor.storage_offset()
        memory = torch.empty(start + tensor.numel(), dtype=own, device=tensor.device)
        found[name] = memory[start:].view(tensor.shape).copy_(tensor)
    return found


def _in_fp64(twin: Callable[..., Any], inputs: Mapping[str, Tensor]) -> tuple[Tensor, ...] | None:
    """The results of a twin in fp64; None: it cannot compute in that dtype."""
    try:
        return several(twin(**_copies(inputs, torch.float64)))
    except torch.AcceleratorError:  # the device is lost
        raise
    except (RuntimeError, TypeError, ValueError, KeyError, AssertionError):
        return None


def _bits(tensor: Tensor) -> Tensor:
    """The bytes of a tensor."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
