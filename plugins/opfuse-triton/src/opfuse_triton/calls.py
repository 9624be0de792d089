"""What kernels here take, and operations for graphs. Importing this imports no Triton."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that the kernels read and write. They compute in fp32."""

PLAIN = Tensor, torch.nn.Parameter
"""A subclass of them may do something else."""


def are_plain(first: Tensor, *others: Tensor | None) -> bool:
    """Return whether tensors are contiguous, on one device, of :data:`DTYPES`, and not empty.

    Args:
        first: The first, which says what is empty.
        *others: All others, or None.
    """
    if not first.numel():
        return False
    for tensor in (first, *others):
        if tensor is not None and not (
            type(tensor) in PLAIN
            and tensor.dtype in DTYPES
            and tensor.is_contiguous()
            and tensor.device == first.device
        ):
            return False
    return True


def there(made: Iterable[Tensor | None]) -> list[Tensor]:
    """The tensors that are not None: an operation in a graph gives a list of them.

    Args:
        made: What a launch gives.
    """
    return [tensor for tensor in made if tensor is not None]


def placed(made: Sequence[Tensor], *is_there: bool) -> Any:
    """The tensors of a list in their places, None in the others.

    Args:
        made: The list.
        *is_there: Of each place, whether one belongs there.
    """
    left = iter(made)
    return tuple([next(left) if one else None for one in is_there])


def define(
    name: str, takes: str, run: Callable[..., list[Tensor]], fake: Callable[..., list[Tensor]]
) -> None:
    """Define an operation for graphs, which gives a list of tensors.

    Args:
        name: Its name behind ``opfuse_triton::``.
        takes: Its parameters, as torch writes them.
        run: Launches it.
        fake: Gives tensors of the same shapes and dtypes.
    """
    name = f"opfuse_triton::{name}"
    torch.library.define(name, f"({takes}) -> Tensor[]")
    torch.library.impl(name, ("cpu", "cuda"), run)
    torch.library.register_fake(name, fake)
