"""A chain compared with what it stands for, before it does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..plugins import using
from ..tolerance import difference

ROWS = (2, 3)


def compare(
    module: nn.Module,
    chain: Any,
    original: Callable[..., Any],
    converted: Callable[..., Any],
    extras: int = 0,
) -> str:
    """How a chain differs from the operations it stands for, as a sentence; ``""``: it does not.

    Both are given the same random numbers, in the dtype of the parameters and in evaluation mode,
    and the gradients of input and parameters are compared too. Random number generators, modes and
    gradients are left as they are.

    Args:
        module: The module.
        chain: The chain.
        original: ``original(x, *extras)``.
        converted: The same by way of the chain.
        extras: How many extra inputs there are, of the shape of ``x`` and of the output.
    """
    features = next((op.in_features for op in chain if getattr(op, "in_features", None)), None)
    shaped = [op.normalized_shape for op in chain if hasattr(op, "normalized_shape")]
    features = features or (shaped[0][-1] if shaped else None)
    params = [p for p in module.parameters() if p.is_floating_point()]
    if features is None or not params or any(p.is_meta for p in params):
        return ""
    modes = {child: child.training for of in (module, chain) for child in of.modules()}
    device, dtype = params[0].device, params[0].dtype
    try:
        module.eval()
        chain.eval()
        # without plugins: that a fusion is right is for its tests, and for opfuse.tune
        with torch.random.fork_rng([]), torch.enable_grad(), using(""):
            generator = torch.Generator().manual_seed(0)
            shape = (*ROWS, features)
            given = [
                torch.randn(shape, generator=generator).to(device, dtype).requires_grad_()
                for _ in range(1 + extras)
            ]
            wanted = [*given, *[p for p in params if p.requires_grad]]
            return differ(original, converted, given, wanted)
    finally:
        for child, training in modes.items():
            child.training = training


def differ(
    original: Callable[..., Any], converted: Callable[..., Any], given: Any, wanted: Any
) -> str:
    """How the outputs and gradients of two functions differ, as a sentence, or ``""``.

    Args:
        original: The one that is right.
        converted: The other one.
        given: The arguments of both.
        wanted: What is to have gradients.
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
    if wanted:
        dys = [torch.randn_like(y) for y in outputs[0]]
        of_both = [torch.autograd.grad(ys, wanted, dys, allow_unused=True) for ys in outputs]
        pairs += [("gradient", mine, y) for y, mine in zip(*of_both, strict=True)]
    for what, a, b in pairs:
        if (a is None) != (b is None):
            return f"its {what} is {'None' if a is None else 'not None'}, that of the module is not"
        if a is not None and (problem := _problem(a, b)):
            return f"its {what} {problem}"
    return ""


def as_tuple(result: Any) -> tuple[Any, ...]:
    """What a chain or a function gave, as a tuple."""
    return result if isinstance(result, tuple) else (result,)


def _problem(got: Tensor, expected: Tensor) -> str | None:
    return difference(
        got, expected.double(), rounded=expected, dtype=expected.dtype, gemm=True, roundings=3
    )
