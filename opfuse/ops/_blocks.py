"""Blocks of rows: on a CPU, formulas of several steps work on as much as a core's cache holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

BLOCK = 1 << 18
"""How many numbers a block has.

A few temporaries in fp32 fit a cache, and a call in Python is a small part of it.
"""

LEAST = 1 << 19
"""How many numbers are worth it."""

dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
_transforms: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack


def tracing() -> bool:
    """Whether something else than torch's kernels runs what is called.

    Formulas are then better than kernels.
    """
    return is_dynamo_compiling() or dispatch_modes() > 0


def in_blocks(x: Tensor, *others: Tensor) -> bool:
    """Whether to compute by blocks: a large, dense tensor on a CPU, in an eager pass.

    ``others`` are dense too.
    """
    return (
        not tracing()
        and x.is_cpu
        and x.numel() > LEAST
        and not torch.is_grad_enabled()
        and type(x) is Tensor
        and x.ndim > 1
        and x.is_contiguous()
        and all([other.is_contiguous() for other in others])
        and _transforms() is None
        and forward_ad._current_level < 0
    )


def blocks(x: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Blocks of rows of tensors with as many rows."""
    tensors = [tensor.view(-1, tensor.shape[-1]) for tensor in (x, *others)]
    rows = max(1, BLOCK // x.shape[-1])
    return zip(*[torch.split(tensor, rows) for tensor in tensors], strict=True)
