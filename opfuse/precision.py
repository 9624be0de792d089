"""How PyTorch multiplies matrices in fp32, whichever of its settings said so."""

from __future__ import annotations

import torch

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
