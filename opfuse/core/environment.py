"""The environment that a fusion is asked about, and what it says of a device and an input."""

from __future__ import annotations

import functools
import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .quantization import Recipe


class Environment(NamedTuple):
    """The environment that a plan is made for: metadata only, never tensor data.

    Attributes:
        device: Device of the chain's input.
        capability: CUDA compute capability, or None on other devices.
        dtype: The dtype that the ops compute in, including autocast.
        recipe: The quantization recipe in force, or None.
        training: Whether any op of the chain is in training mode.
        requires_grad: Whether a backward pass is planned.
        row_alignment: The largest power of two up to 128 that divides the number of rows, for a
            fusion that needs ``"row_alignment"``; 1 for every other, and while tracing.
        rows: The number of rows rounded down to a power of two, for a fusion that declares
            ``"rows"``; None for every other, while tracing, and when asked whether it would
            fuse many rows.
        contiguous: Whether the chain's input is contiguous; not set for fusions.
        features: Last dimension of the tensor that the fused op would get, or None if the chain
            does not determine it.
        device_name: The model name that the CPU or GPU reports.
        multiprocessors: The number of multiprocessors of a GPU; of a CPU, of torch's threads.
        architecture: The architecture of a GPU: ``"sm_90"``, or on ROCm such as ``"gfx942"``; None
            on other devices.
        measured: The speed of this candidate on this machine, relative to the separate ops (1.0),
            as the tool ``tuning`` knows it; None: it was not measured here, and you may estimate
            whether it pays. While ``opfuse tune`` looks for candidates, it is infinite.
        configuration: The fastest of the fused op's ``configurations`` by ``opfuse tune``, or None.
        deterministic: ``torch.are_deterministic_algorithms_enabled()``.
        options: The options set with :func:`opfuse.options`.
        compiling: Whether ``torch.compile`` or ``torch.export`` is tracing.
    """

    device: torch.device
    capability: tuple[int, int] | None
    dtype: torch.dtype
    recipe: Recipe | None = None
    training: bool = True
    requires_grad: bool = False
    row_alignment: int = 1
    rows: int | None = None
    contiguous: bool | None = None
    features: int | None = None
    device_name: str = ""
    multiprocessors: int = 1
    architecture: str | None = None
    measured: float | None = None
    configuration: Mapping[str, Any] | None = None
    deterministic: bool = False
    options: Mapping[str, Any] = {}
    compiling: bool = False


class Shape(NamedTuple):
    """The shape of an input, as far as it is looked at.

    Attributes:
        rows: The number of rows, rounded down to a power of two.
        features: The last dimension.
        contiguous: Whether it is contiguous.
    """

    rows: int
    features: int
    contiguous: bool


def shape_of(x: torch.Tensor) -> Shape:
    """The shape of an input, as far as it is looked at."""
    rows = x.shape[:-1].numel()
    features = x.shape[-1] if x.ndim else 1
    return Shape(rows and 1 << rows.bit_length() - 1, features, x.is_contiguous())


@functools.cache
def device_name(kind: str, index: int | None = None) -> str:
    """The model name that a CPU or GPU reports."""
    if kind == "cuda":
        return torch.cuda.get_device_name(index)
    if kind != "cpu":
        return kind
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    model = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    name = model[1].strip() if model else platform.processor() or platform.machine()
    return f"{name} {torch.backends.cpu.get_cpu_capability()}"
