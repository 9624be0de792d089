"""Whether a unit that acts in some way gives the results and gradients that it gives as it is."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from opfuse.core.engine.checks import tensors_in
from opfuse.report.replaced_forward import MEMORY, replaced_forwards
from opfuse.tuning.comparing import Exact, differ, gradients, in_fp64
from opfuse.tuning.job import one_line
from opfuse.tuning.tolerance import difference
from opfuse.tuning.whole import switched_off

from .actions import put_tensors, take_tensors
from .units import Unit

_DRAWS = 3
"""Gradients of the results that are tried: noise is within twice other noise for most of them."""
_MOST_FAR, _ROUNDING = 0.02, 0.03
"""Where a module chooses by values, the share of rows of a result that may differ by more."""


def why_not(unit: Unit, acting: Callable[[], contextlib.AbstractContextManager[None]]) -> str:
    """How results or gradients of a unit are others in a block, as a sentence, or ``""``.

    They are compared with those of the module's own operations, to the rounding of their dtype. A
    gradient that is 0 apart from rounding is noise; so where they differ, the same in fp64 decides.
    Where a module chooses by values, as a router of experts does, a few results may differ, if both
    ways compute the same in fp32: another rounding of nearly equal values chooses differently.

    Args:
        unit: The unit: a module, not a chain.
        acting: The block, in which the unit acts so.
    """
    module, given = unit.place.module, list[Tensor]()
    form = take_tensors(given, (unit.args, unit.kwargs))

    def run(module: nn.Module, *given: Tensor) -> tuple[Tensor, ...]:
        args, kwargs = put_tensors(iter(given), form)
        with torch.random.fork_rng():
            return tuple(tensors_in(module(*args, **kwargs)))

    def own(module: nn.Module, *given: Tensor) -> tuple[Tensor, ...]:
        with switched_off([each for _, _, each in replaced_forwards(module)]):
            return run(module, *given)

    def so(*given: Tensor) -> tuple[Tensor, ...]:
        with acting():
            results = run(module, *given)
            if why := vars(module)[MEMORY].fallback:
                raise RuntimeError(why)
            return results

    kind = given[0].device.type if given else "cpu"
    autocast = torch.is_autocast_enabled(kind)
    dtype = torch.get_autocast_dtype(kind) if autocast else None
    wanted = [t for t in dict.fromkeys((*given, *module.parameters())) if t.requires_grad]
    ways: Any = (lambda *given: own(module, *given)), so, given, wanted
    try:
        why = differ(*ways, dtype=dtype)
    except Exception as error:
        return one_line(error)
    for _ in range(_DRAWS if why else 0):
        with contextlib.suppress(Exception):  # if it cannot run in fp64, there is no truth
            why = differ(*ways, dtype=dtype, exact=_exact(module, own, given, wanted, dtype))
        if not why:
            break
    if why and {dtype, *[t.dtype for t in wanted]} & {torch.bfloat16, torch.float16}:
        with contextlib.suppress(Exception):  # likewise
            both: Any = own, lambda _, *given: so(*given)
            wide = [in_fp64(module, way, given, wanted, torch.float32) for way in both]
            outputs = [way(module, *given) for way in both]
            why = "" if _choose(outputs, wanted, wide) else why
    return why


def _choose(
    outputs: Sequence[Sequence[Tensor]], wanted: Sequence[Tensor], wide: Sequence[Exact]
) -> bool:
    """Whether two ways differ in few rows of the results, and in fp32 in no result or gradient."""
    dys = [torch.randn_like(y) if y.requires_grad else None for y in outputs[0]]
    found = [gradients(ys, wanted, dys) for ys in outputs]
    near = [_far(y, z, _ROUNDING) <= _MOST_FAR for y, z in zip(*outputs, strict=True)]
    grads = [pair for pair in zip(*found, strict=True) if pair != (None, None)]
    near += [not _far(dy.flatten(), dz.flatten(), 5 * _ROUNDING) for dy, dz in grads]
    pairs = zip(
        *[way([dy if dy is None else dy.float() for dy in dys]) for way in wide], strict=True
    )
    how: Any = {"dtype": torch.float32, "gemm": True, "roundings": 3}
    return all(near) and all(
        truth is other or not difference(other, truth.double(), **how) for truth, other in pairs
    )


def _far(y: Tensor, z: Tensor, rounding: float) -> float:
    """The share of the last dimension's rows that differ by more than rounding; 1: beyond all."""
    if not y.is_floating_point():
        return float((y != z).double().mean()) if y.numel() else 0.0
    for kind in (torch.isnan, torch.isposinf, torch.isneginf):
        if not torch.equal(kind(y), kind(z)):
            return 1.0
    y, z = (t.detach().double().nan_to_num(0, 0, 0) for t in (y, z))
    if not y.numel() or z.abs().amax() > 2 * y.abs().amax():
        return float(y.numel() > 0)
    return float(((z - y).norm(dim=-1) > rounding * y.norm(dim=-1)).double().mean())


def _exact(
    module: nn.Module,
    own: Callable[..., tuple[Tensor, ...]],
    given: Sequence[Tensor],
    wanted: Sequence[Tensor],
    dtype: torch.dtype | None,
) -> Exact:
    """Gives results and gradients in fp64, or raises if these are others, and not more exact.

    They are, if random numbers of another dtype are others.
    """

    def exact(dys: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        truths = in_fp64(module, own, given, wanted)(dys)
        for y, truth in zip(own(module, *given), truths, strict=False):
            how: Any = {"dtype": dtype or y.dtype, "gemm": True, "roundings": 3}
            if truth is not None and (problem := difference(y, truth.double(), **how)):
                raise RuntimeError(f"in fp64 a result {problem}")
        return truths

    return exact
