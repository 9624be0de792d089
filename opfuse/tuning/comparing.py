"""Two functions compared: their outputs, and the gradients of what they read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .tolerance import difference

Exact = Callable[[Sequence[Tensor | None]], Sequence[Tensor | None]]
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
        wanted: The tensors that get gradients.
        exact: The result of :func:`in_fp64`; None: that of ``original`` counts as exact.
        dtype: The compute dtype; None: the dtypes of the results.
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
    needs = [y.requires_grad and bool(wanted) for y in outputs[0]]
    if any(need > got.requires_grad for need, got in zip(needs, outputs[1], strict=True)):
        return "an output needs no gradient, that of the module does"
    dys = [torch.randn_like(y) if need else None for y, need in zip(outputs[0], needs, strict=True)]
    if any(needs):
        of_both = [gradients(ys, wanted, dys) for ys in outputs]
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
        """Run the operations."""
        return self._own(self.of, *given)


def in_fp64(
    module: nn.Module, own: Callable[..., Any], given: Sequence[Tensor], wanted: Sequence[Tensor]
) -> Exact:
    """Return a function for outputs and gradients of a module's operations in fp64.

    Args:
        module: The module.
        own: ``own(module, *given)``.
        given: Its arguments.
        wanted: The arguments and parameters that get gradients. The others, and buffers, are
            widened too: operations take one dtype.
    """
    held = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    held = {f"of.{name}": tensor for name, tensor in held.items() if tensor.is_floating_point()}

    def exact(dys: Sequence[Tensor | None]) -> list[Tensor | None]:
        floating = [t for t in (*given, *held.values()) if t.is_floating_point()]
        wide = {id(t): t.detach().double() for t in (*floating, *wanted)}
        leaves = [wide[id(tensor)].requires_grad_() for tensor in wanted]
        args = tuple([wide.get(id(t), t) for t in given])
        replaced = {name: wide[id(tensor)] for name, tensor in held.items()}
        with torch.autocast(given[0].device.type, enabled=False):
            outputs = as_tuple(torch.func.functional_call(_Own(module, own), replaced, args))
            if not any(dy is not None for dy in dys):
                return [*outputs]
            pairs = zip(dys, outputs, strict=True)
            upstream = [dy if dy is None else dy.to(y.dtype) for dy, y in pairs]
            return [*outputs, *gradients(outputs, leaves, upstream)]

    return exact


def gradients(
    outputs: Sequence[Tensor], wanted: Sequence[Tensor], dys: Sequence[Tensor | None]
) -> Sequence[Tensor | None]:
    """The gradients of what is wanted, through those outputs that need one and have one."""
    pairs = zip(outputs, dys, strict=True)
    chosen = [(y, dy) for y, dy in pairs if y.requires_grad and dy is not None]
    ys, weights = zip(*chosen, strict=True)
    return torch.autograd.grad(ys, wanted, weights, allow_unused=True)


def as_tuple(result: Any) -> tuple[Any, ...]:
    """Return a result as a tuple."""
    return result if isinstance(result, tuple) else (result,)


def _problem(got: Tensor, rounded: Tensor, truth: Tensor, dtype: torch.dtype | None) -> str | None:
    rule: Any = {"dtype": dtype or rounded.dtype, "gemm": True, "roundings": 3}
    return difference(got, truth.double(), rounded=rounded, **rule)
