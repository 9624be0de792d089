"""Whether a Triton kernel can run. Importing this imports no Triton, so conditions can ask."""

from __future__ import annotations

import functools
import importlib.util
import os
from contextvars import ContextVar
from typing import Any

import torch

recorded: ContextVar[list[Any] | None] = ContextVar("opfuse_launches", default=None)
"""Takes each launch while launches are recorded; None: kernels run."""


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


def kernels_run(device: torch.device) -> bool:
    """Return whether kernels run on the tensors of a call, for code that no plan chooses.

    The meta device counts as a GPU while launches are recorded.

    Args:
        device: The device of the tensors.
    """
    if device.type == "cuda":
        return _run_on_gpu(device)
    return recorded.get() is not None if device.type == "meta" else not why_no_kernel(device)


@functools.cache
def _run_on_gpu(device: torch.device) -> bool:
    return not why_no_kernel(device, torch.cuda.get_device_capability(device))
