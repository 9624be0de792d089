"""The dtypes that ops compute in, and how PyTorch multiplies matrices in fp32."""

from __future__ import annotations

import torch
from torch import Tensor

_CUDA = torch.backends.cuda.matmul
_OTHERS = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]


def matmul_precision(device: str) -> str:
    """The precision of products of fp32 matrices on a kind of device.

    ``torch.backends.*.fp32_precision`` decides, and every older setting writes to it. Reading an
    older setting raises if it disagrees with it.

    Args:
        device: The type of a ``torch.device``.

    Returns:
        ``"ieee"``, ``"tf32"`` or ``"bf16"``; ``"ieee"`` if nothing is set.
    """
    found: str = (_CUDA if device == "cuda" else _OTHERS).fp32_precision
    return "ieee" if found == "none" else found


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype for pointwise math: fp32 for half precision, otherwise ``dtype`` itself."""
    return torch.float32 if dtype is torch.float16 or dtype is torch.bfloat16 else dtype


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """``tensor.to(dtype)``, at no cost if the dtype is right already."""
    return tensor if tensor.dtype is dtype else tensor.to(dtype)


def widen(tensor: Tensor) -> Tensor:
    """``tensor`` in the dtype :func:`wide` of its own."""
    return cast(tensor, wide(tensor.dtype))
