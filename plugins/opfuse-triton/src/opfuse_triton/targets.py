"""Targets: the GPU that a kernel is compiled for, and what it can do."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from triton.backends.compiler import GPUTarget

from .machine import is_interpreting


@dataclass(frozen=True)
class Target:
    """A kind of GPU.

    Attributes:
        backend: ``"cuda"`` or ``"hip"``.
        arch: The capability as a number, such as 90, or the name of the architecture: ``"gfx942"``.
        multiprocessors: Number of multiprocessors (compute units) it has.
        shared_memory: Bytes of shared memory that one program may have.
        bandwidth: Bytes per second of its memory, reads and writes together.
        flops: Floating-point operations per second of a matrix product in bf16, without sparsity.
        name: What the device calls itself; ``""``: it is only simulated.
    """

    backend: str
    arch: int | str
    multiprocessors: int
    shared_memory: int
    bandwidth: float
    flops: float
    name: str = ""

    def for_triton(self) -> GPUTarget:
        """The same as Triton has it."""
        return GPUTarget(self.backend, self.arch, 32 if self.backend == "cuda" else 64)

    def __str__(self) -> str:
        return f"sm_{self.arch}" if self.backend == "cuda" else str(self.arch)


TARGETS = MappingProxyType(
    {
        80: Target("cuda", 80, 108, 166912, 2.04e12, 312e12),  # A100 SXM, 80 GB
        90: Target("cuda", 90, 132, 232448, 3.35e12, 989e12),  # H100 SXM
        100: Target("cuda", 100, 148, 232448, 8.0e12, 2250e12),  # B200
        "gfx942": Target("hip", "gfx942", 304, 65536, 5.3e12, 1307e12),  # MI300X
        "gfx950": Target("hip", "gfx950", 256, 163840, 8.0e12, 2517e12),  # MI355X
    }
)
"""One GPU of each architecture, by ``arch``; the numbers are those of its data sheet."""

_OTHERS = {
    86: Target("cuda", 86, 84, 101376, 0.70e12, 150e12),  # A40
    89: Target("cuda", 89, 142, 101376, 0.86e12, 362e12),  # L40S
    120: Target("cuda", 120, 188, 101376, 1.79e12, 504e12),  # RTX PRO 6000
}
"""GPUs that kernels are not checked for, but run on; from their data sheets too."""


INTERPRETER = replace(TARGETS[90], name="interpreter")
"""A CPU while Triton interprets: tile sizes are those for an H100."""

LATENCY = 1.2e-6
"""Seconds from a load to its data when memory is busy, as assumed of every target; not measured."""

pretended: ContextVar[Target | None] = ContextVar("opfuse_target", default=None)


@contextlib.contextmanager
def target(chosen: Target | int | str) -> Iterator[Target]:
    """Within the context, :func:`current_target` is this one.

    Args:
        chosen: A target, or a key of :data:`TARGETS`.

    Raises:
        KeyError: There is no such key.
    """
    found = chosen if isinstance(chosen, Target) else TARGETS[chosen]
    token = pretended.set(found)
    try:
        yield found
    finally:
        pretended.reset(token)


def current_target(device: torch.device | int) -> Target:
    """The target of kernels on a device, or the one set by :func:`target`.

    A CPU counts as an H100 while Triton interprets: tile sizes are then those for one.

    Args:
        device: The device, or the index of a GPU.

    Raises:
        RuntimeError: Triton compiles nothing for the device.
    """
    if (chosen := pretended.get()) is not None:
        return chosen
    if isinstance(device, torch.device):
        if device.type == "cuda":
            device = torch.cuda.current_device() if device.index is None else device.index
        elif is_interpreting():
            return INTERPRETER
        else:
            raise RuntimeError(
                f"a Triton kernel cannot run on {device}: move the tensors to a GPU, "
                "or say for which one in opfuse_triton.target(...)"
            )
    return _of_gpu(device)


@functools.cache
def _of_gpu(index: int) -> Target:
    """The target of a GPU of this machine; numbers that its driver lacks are those of its kind."""
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip:
        arch: int | str = properties.gcnArchName.partition(":")[0]
        like = TARGETS.get(arch, TARGETS["gfx942"])
    else:
        arch = properties.major * 10 + properties.minor
        known = {key: found for key, found in (TARGETS | _OTHERS).items() if isinstance(key, int)}
        like = known[max([key for key in known if key <= arch], default=80)]
    count = properties.multi_processor_count
    clock = getattr(properties, "memory_clock_rate", 0)  # in kHz; a transfer at both edges
    width = getattr(properties, "memory_bus_width", 0)  # in bits
    return replace(
        like,
        arch=arch,
        multiprocessors=count,
        shared_memory=getattr(properties, "shared_memory_per_block_optin", like.shared_memory),
        bandwidth=2e3 * clock * width / 8 or like.bandwidth,
        flops=like.flops * count / like.multiprocessors,
        name=properties.name,
    )
