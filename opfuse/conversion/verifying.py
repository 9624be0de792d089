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
    expected, got = original(*given), converted(*given)
    if not isinstance(expected, Tensor) or not isinstance(got, Tensor):
        return f"it gives {type(got).__name__}, the module {type(expected).__name__}"
    if (expected.shape, expected.dtype) != (got.shape, got.dtype):
        return (
            f"it gives {tuple(got.shape)} of {got.dtype}, the module {tuple(expected.shape)} of "
            f"{expected.dtype}"
        )
    if not wanted:
        return ((why := _problem(got, expected)) and f"its output {why}") or ""
    dy = torch.randn_like(expected)
    theirs = torch.autograd.grad(expected, wanted, dy, allow_unused=True)
    mine = torch.autograd.grad(got, wanted, dy, allow_unused=True)
    pairs = [("output", got, expected), *zip(["gradient"] * len(mine), mine, theirs, strict=True)]
    for what, a, b in pairs:
        if (a is None) != (b is None):
            return f"its {what} is {'None' if a is None else 'not None'}, that of the module is not"
        if a is not None and (problem := _problem(a, b)):
            return f"its {what} {problem}"
    return ""


def _problem(got: Tensor, expected: Tensor) -> str | None:
    return difference(
        got, expected.double(), rounded=expected, dtype=expected.dtype, gemm=True, roundings=3
    )
