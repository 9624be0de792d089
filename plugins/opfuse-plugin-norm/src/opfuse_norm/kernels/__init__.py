"""The Triton kernels and their PyTorch twins. Importing this imports no Triton."""

from __future__ import annotations

import importlib.util
import os
from typing import NamedTuple

import torch
from torch import Tensor

RMS, LAYER, L2 = "rms", "layer", "l2"
"""The three norms, as the kernels call them."""


class Norm(NamedTuple):
    """A kind of norm.

    Attributes:
        kind: ``RMS``, ``LAYER`` or ``L2``.
        dims: How many of the last dimensions are normalized together.
        zero_centered: The factor is ``1 + weight``.
    """

    kind: str
    dims: int
    zero_centered: bool


DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that the kernels read and write. They compute in fp32."""

MOST_FEATURES = 65536
"""The widest row that the kernels take."""


def why_not(device: torch.device, capability: tuple[int, int] | None = None) -> str:
    """Why no kernel can run on a device, as a sentence; empty: one can.

    Args:
        device: The device.
        capability: Its CUDA compute capability, if it has one.
    """
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed: on Linux, python -m pip install triton"
    if device.type == "cuda":
        if torch.version.hip is None and capability is not None and capability < (8, 0):
            return "its kernels need a GPU of compute capability 8.0 or newer"
        return ""
    interpreting = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")
    if device.type == "cpu" and interpreting:
        return ""
    return f"its kernels run on a GPU, and this is {device.type}"


def normalized_dtype(x: Tensor, extra: Tensor | None, into: Tensor | None = None) -> torch.dtype:
    """The dtype of what is normalized: that of ``x``, of ``x + extra``, or of where the sum goes.

    The gradient of ``x`` with another one added to it has it too.
    """
    if extra is None:
        return x.dtype
    return torch.promote_types(x.dtype, extra.dtype) if into is None else into.dtype
