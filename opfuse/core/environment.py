"""The environment that a fusion is asked about."""

from __future__ import annotations

from collections.abc import Mapping
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
            fusion that declares ``needs_row_alignment``; 1 for every other, and while tracing.
        rows: The number of rows rounded down to a power of two, for a fusion that declares
            ``needs_rows``; None for every other, while tracing, and when asked whether it would
            fuse many rows.
        contiguous: Whether the chain's input is contiguous; not set for fusions.
        features: Last dimension of the tensor that the fused op would get, or None if the chain
            does not determine it.
        device_name: The model name that the CPU or GPU reports.
        multiprocessors: The number of multiprocessors of a GPU; of a CPU, of torch's threads.
        architecture: The architecture of a GPU: ``"sm_90"``, or on ROCm such as ``"gfx942"``; None
            on other devices.
        measured: The speed of this candidate in the tuning table of this machine, relative to the
            separate ops (1.0); None: it was not measured here, and you may estimate whether it
            pays. While ``opfuse tune`` looks for candidates, it is infinite.
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
