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
    draw: Callable[[Tensor, int], Tensor] = lambda y, place: torch.randn_like(y),
) -> str:
    """How the outputs and gradients of two functions differ, as a sentence, or ``""``.

    Args:
        original: The one that is right, apart from rounding.
        converted: The other one.
        given: The arguments of both.
        wanted: The tensors that get gradients.
        exact: The result of :func:`in_fp64`; None: that of ``original`` counts as exact.
        dtype: The compute dtype; None: the dtypes of the results.
        draw: Gives the gradient of an output at a place.
    """
    outputs, got = as_tuple(original(*given)), as_tuple(converted(*given))
    if len(outputs) != len(got) or not all(isinstance(y, Tensor) for y in (*outputs, *got)):
        kinds = [", ".join(type(y).__name__ for y in of) for of in (got, outputs)]
        return f"it gives {kinds[0]}, the module {kinds[1]}"
    pairs = [("its output", mine, y) for mine, y in zip(got, outputs, strict=True)]
    for pair in pairs:
        if problem := problem_of(*pair, values=False):
            return problem
    needs = [y.requires_grad and bool(wanted) for y in outputs]
    if any(need > mine.requires_grad for need, mine in zip(needs, got, strict=True)):
        return "an output needs no gradient, that of the module does"
    numbered = enumerate(zip(outputs, needs, strict=True))
    dys = tuple([draw(y, place) if need else None for place, (y, need) in numbered])
    grads = [gradients(ys, wanted, dys) for ys in (got, outputs)]
    pairs += [("its gradient", *pair) for pair in zip(*grads, strict=True)]
    truths = [None] * len(pairs) if exact is None else exact(dys)
    for pair, truth in zip(pairs, truths, strict=True):
        if problem := problem_of(*pair, truth, dtype=dtype, gemm=True, roundings=3):
            return problem
    return ""


def problem_of(
    what: str,
    got: Tensor | None,
    expected: Tensor | None,
    truth: Tensor | None = None,
    *,
    values: bool = True,
    dtype: torch.dtype | None = None,
    **rule: Any,
) -> str:
    """How a tensor differs from the one that is expected, as a sentence, or ``""``.

    Args:
        what: Its name.
        got: The tensor.
        expected: The one that is right, apart from rounding.
        truth: The same without rounding; None: ``expected`` counts as exact.
        values: Compare values, and not only shape, dtype and device.
        dtype: The compute dtype; None: that of the tensor.
        **rule: For :func:`opfuse.tuning.tolerance.difference`.
    """
    if got is None or expected is None:
        return "" if got is expected else f"{what} is {'' if got is None else 'not '}None"
    both = got, expected
    facts: dict[str, list[Any]] = {"shape": [tuple(tensor.shape) for tensor in both]}
    facts |= {fact: [getattr(tensor, fact) for tensor in both] for fact in ("dtype", "device")}
    for fact, (mine, other) in facts.items():
        if mine != other:
            return f"{what} has {fact} {mine} instead of {other}"
    if not values:
        return ""
    if not expected.is_floating_point():
        return "" if torch.equal(got, expected) else f"{what} has other values"
    truth, dtype = expected if truth is None else truth, dtype or expected.dtype
    problem = difference(got, truth.double(), rounded=expected, dtype=dtype, **rule)
    return f"{what} {problem}" if problem else ""


class _Own(nn.Module):
    """Operations of a module, as the forward of another one."""

    def __init__(self, module: nn.Module, own: Callable[..., Any]) -> None:
        super().__init__()
        self.of, self._own = module, own

    def forward(self, *given: Tensor) -> Any:
        """Run the operations."""
        return self._own(self.of, *given)


def in_fp64(
    module: nn.Module,
    own: Callable[..., Any],
    given: Sequence[Tensor],
    wanted: Sequence[Tensor],
    dtype: torch.dtype = torch.float64,
) -> Exact:
    """Return a function for outputs and gradients of a module's operations in fp64.

    Args:
        module: The module.
        own: ``own(module, *given)``.
        given: Its arguments.
        wanted: The arguments and parameters that get gradients. The others, and buffers, are
            widened too: operations take one dtype.
        dtype: Another dtype than fp64.
    """
    named = (*module.named_parameters(), *module.named_buffers())
    held = {f"of.{name}": tensor for name, tensor in named if tensor.is_floating_point()}

    def exact(dys: Sequence[Tensor | None]) -> list[Tensor | None]:
        floating = [t for t in (*given, *held.values()) if t.is_floating_point()]
        wide = {id(t): t.detach().to(dtype, copy=True) for t in (*floating, *wanted)}
        leaves = [wide[id(tensor)].requires_grad_() for tensor in wanted]
        args = tuple([wide.get(id(t), t) for t in given])
        replaced = {name: wide[id(tensor)] for name, tensor in held.items()}
        with torch.autocast(given[0].device.type, enabled=False):
            outputs = as_tuple(torch.func.functional_call(_Own(module, own), replaced, args))
            if all(dy is None for dy in dys):
                return [*outputs]
            pairs = zip(dys, outputs, strict=True)
            upstream = [dy if dy is None else dy.to(y.dtype) for dy, y in pairs]
            return [*outputs, *gradients(outputs, leaves, upstream)]

    return exact


def gradients(
    outputs: Sequence[Tensor],
    wanted: Sequence[Tensor],
    dys: Sequence[Tensor | None],
    *,
    again: bool = False,
) -> Sequence[Tensor | None]:
    """The gradients of what is wanted, through those outputs that need one and have one.

    Args:
        outputs: The outputs.
        wanted: The tensors that get gradients.
        dys: The gradient of each output, or None.
        again: Keep the graph for another call.

    Returns:
        The gradients; none at all if nothing is wanted or no output has one.
    """
    pairs = zip(outputs, dys, strict=True)
    chosen = [(y, dy) for y, dy in pairs if y.requires_grad and dy is not None]
    if not (wanted and chosen):
        return []
    ys, weights = zip(*chosen, strict=True)
    return torch.autograd.grad(ys, wanted, weights, retain_graph=again, allow_unused=True)


def as_tuple(result: Any) -> tuple[Any, ...]:
    """Return a result as a tuple."""
    return result if isinstance(result, tuple) else (result,)
