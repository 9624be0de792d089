"""Two functions compared: their outputs, and the gradients of what they read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .tolerance import difference

Exact = Callable[[Sequence[Tensor]], Sequence[Tensor | None]]
"""Gives outputs and gradients without rounding, for gradients of the outputs."""


def differ(
    original: Callable[..., Any],
    converted: Callable[..., Any],
    given: Any,
    wanted: Any,
    *,
    exact: Exact | None = None,
    dtype: torch.dtype | None = None,
) -> str:
    """How the outputs and gradients of two functions differ, as a sentence, or ``""``.

    Args:
        original: The one that is right, but for rounding.
        converted: The other one.
        given: The arguments of both.
        wanted: What is to have gradients.
        exact: See :func:`in_fp64`; None: what ``original`` gives is taken for exact.
        dtype: What was computed in; None: the dtypes of the results.
    """
    outputs = as_tuple(original(*given)), as_tuple(converted(*given))
    flat = [*outputs[0], *outputs[1]]
    if len(outputs[0]) != len(outputs[1]) or not all(isinstance(y, Tensor) for y in flat):
        kinds = [", ".join(type(y).__name__ for y in of) for of in outputs]
        return f"it gives {kinds[1]}, the module {kinds[0]}"
    for expected, got in zip(*outputs, strict=True):
        if (expected.shape, expected.dtype) != (got.shape, got.dtype):
            theirs = f"{tuple(expected.shape)} of {expected.dtype}"
            return f"it gives {tuple(got.shape)} of {got.dtype}, the module {theirs}"
    pairs: list[Any] = [("output", got, y) for y, got in zip(*outputs, strict=True)]
    dys = [torch.randn_like(y) for y in outputs[0]] if wanted else []
    if wanted:
        of_both = [torch.autograd.grad(ys, wanted, dys, allow_unused=True) for ys in outputs]
        pairs += [("gradient", mine, y) for y, mine in zip(*of_both, strict=True)]
    truths = [None] * len(pairs) if exact is None else exact(dys)
    for (what, a, b), truth in zip(pairs, truths, strict=True):
        if (a is None) != (b is None):
            return f"its {what} is {'None' if a is None else 'not None'}, that of the module is not"
        if a is not None and (problem := _problem(a, b, b if truth is None else truth, dtype)):
            return f"its {what} {problem}"
    return ""


class _Own(nn.Module):
    """Operations of a module, as the forward of another one."""

    def __init__(self, module: nn.Module, own: Callable[..., Any]) -> None:
        super().__init__()
        self.of, self._own = module, own

    def forward(self, *given: Tensor) -> Any:
        """What they give."""
        return self._own(self.of, *given)


def in_fp64(
    module: nn.Module, own: Callable[..., Any], given: Sequence[Tensor], wanted: Sequence[Tensor]
) -> Exact:
    """What tells the outputs and gradients of a module's operations in fp64.

    Args:
        module: The module.
        own: ``own(module, *given)``.
        given: Its arguments.
        wanted: What is to have gradients: some of the arguments and of the module's parameters.
    """
    names = {id(param): name for name, param in module.named_parameters()}
    params = [tensor for tensor in wanted if id(tensor) in names]

    def exact(dys: Sequence[Tensor]) -> list[Tensor | None]:
        wide = {id(t): t.detach().double().requires_grad_() for t in (*wanted, *params)}
        others = [t.double() if t.is_floating_point() else t for t in given]
        args = tuple([wide.get(id(t), o) for t, o in zip(given, others, strict=True)])
        replaced = {f"of.{names[id(param)]}": wide[id(param)] for param in params}
        with torch.autocast(given[0].device.type, enabled=False):
            outputs = as_tuple(torch.func.functional_call(_Own(module, own), replaced, args))
            if not dys:
                return [*outputs]
            leaves = [wide[id(tensor)] for tensor in wanted]
            upstream = [dy.to(y.dtype) for dy, y in zip(dys, outputs, strict=True)]
            return [*outputs, *torch.autograd.grad(outputs, leaves, upstream, allow_unused=True)]

    return exact


def as_tuple(result: Any) -> tuple[Any, ...]:
    """What a chain or a function gave, as a tuple."""
    return result if isinstance(result, tuple) else (result,)


def _problem(got: Tensor, rounded: Tensor, truth: Tensor, dtype: torch.dtype | None) -> str | None:
    rule: Any = {"dtype": dtype or rounded.dtype, "gemm": True, "roundings": 3}
    return difference(got, truth.double(), rounded=rounded, **rule)
