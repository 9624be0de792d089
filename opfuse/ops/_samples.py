"""What ops offer to tests: how to make them, and their extra inputs."""

from __future__ import annotations

from typing import Any

import torch

INTERLEAVED = {"glu_interleave_size": 2}
BOUNDED = {"beta1": 2.0, "beta2": 3.0}
CLAMPED = {"limit": 0.5, "alpha": 1.1, "glu_linear_offset": 0.5}
"""Numbers that matter for inputs around 1."""


def samples(*every: Any) -> Any:
    """Make a ``sample_inputs``.

    Args:
        every: The argument of each sample, or its keyword arguments, or a function of the number of
            features that gives these; the plainest first.
    """

    def sample_inputs(cls: type, op: Any, features: int, out_features: int | None) -> list[Any]:
        given = [some(features) if callable(some) else some for some in every]
        return [op(cls, **some) if isinstance(some, dict) else op(cls, some) for some in given]

    return classmethod(sample_inputs)


def sample_targets(op: Any, shape: tuple[int, ...], generator: torch.Generator) -> list[Any]:
    """The targets of a loss. The first third is to be ignored, except for a sum."""
    targets = torch.randint(0, max(1, shape[-1]), shape[:-1], generator=generator)
    if getattr(op, "reduction", "") != "sum":
        targets.view(-1)[: -(-targets.numel() // 3)] = op.ignore_index
    return [targets]
