"""A chain compared with what it stands for, before it does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from opfuse.core.plugins import using
from opfuse.tuning.comparing import differ

ROWS = (2, 3)


def compare(
    module: nn.Module,
    chain: Any,
    original: Callable[..., Any],
    converted: Callable[..., Any],
    extras: Sequence[str] = (),
) -> str:
    """How a chain differs from the operations it stands for, as a sentence; ``""``: it does not.

    Both are given the same random numbers, in the dtype of the parameters and in evaluation mode,
    and the gradients of input and parameters are compared too. Random number generators, modes and
    gradients are left as they are.

    Args:
        module: The module.
        chain: The chain.
        original: ``original(x, *extras)``.
        converted: The same through the chain.
        extras: The extra inputs: ``"integer"`` is zeros of the rows' shape, others are as ``x``.
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
                torch.zeros(ROWS, dtype=torch.long, device=device)
                if kind == "integer"
                else torch.randn(shape, generator=generator).to(device, dtype).requires_grad_()
                for kind in ("", *extras)
            ]
            wanted = [t for t in (*given, *params) if t.requires_grad]
            return differ(original, converted, given, wanted)
    finally:
        for child, training in modes.items():
            child.training = training
