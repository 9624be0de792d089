"""Whether a Triton kernel can run. Importing this imports no Triton, so conditions can ask."""

from __future__ import annotations

import importlib.util
import os

import torch


def is_interpreting() -> bool:
    """Return whether Triton runs kernels in Python, to test them."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")


def why_no_kernel(device: torch.device, capability: tuple[int, int] | None = None) -> str:
    """Return why no kernel can run on a device, as a sentence; ``""`` if one can.

    Args:
        device: The device.
        capability: Its CUDA compute capability, if it has one.
    """
    if device.type != "cuda" and not (device.type == "cpu" and is_interpreting()):
        return f"its kernels run on a GPU, and this is {device.type}"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed: on Linux, python -m pip install triton"
    if torch.version.hip is None and capability is not None and capability < (8, 0):
        return "its kernels need a GPU of compute capability 8.0 or newer"
    return ""
