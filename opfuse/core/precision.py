"""The dtypes that ops compute in, and how PyTorch multiplies matrices in fp32."""

from __future__ import annotations

import torch
from torch import Tensor

_CUDA = torch.backends.cuda.matmul
_OTHERS = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]


def matmul_precision(device: str) -> str:
    """What a product of fp32 matrices is computed in on a kind of device.

    ``torch.backends.*.fp32_precision`` decides, and every older setting writes to it. What reads
    the older ones raises once they do not agree with it.

    Args:
        device: The type of a ``torch.device``.

    Returns:
        ``"ieee"``, ``"tf32"`` or ``"bf16"``; what nobody has set is ``"ieee"``.
    """
    found: str = (_CUDA if device == "cuda" else _OTHERS).fp32_precision
    return "ieee" if found == "none" else found


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype to do pointwise math in: fp32 for half precision, else ``dtype`` itself."""
    return torch.float32 if dtype is torch.float16 or dtype is torch.bfloat16 else dtype


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """``tensor.to(dtype)``, at no cost where there is nothing to do."""
    return tensor if tensor.dtype is dtype else tensor.to(dtype)


def widen(tensor: Tensor) -> Tensor:
    """``tensor`` in the dtype that :func:`wide` gives."""
    return cast(tensor, wide(tensor.dtype))
