"""The resources of a compiled kernel: registers, shared memory, matrix instructions."""

from __future__ import annotations

import pathlib
import re
import subprocess
import tempfile
from dataclasses import dataclass
from typing import Any

import triton

from .targets import Target

MATRIX_INSTRUCTIONS = {
    "mma.sync": r"\bmma\.sync\b",
    "wgmma": r"\bwgmma\.mma_async\b",
    "tcgen05": r"\btcgen05\.mma\b",
    "mfma": r"\bv_s?mfmac?_",
}
"""Instructions that multiply matrices, by what to look for in a kernel's assembly."""


@dataclass(frozen=True)
class Resources:
    """The resources of one compiled kernel.

    Attributes:
        registers: Registers per thread.
        spilled: Bytes per thread of local memory, where registers are spilled to.
        shared: Bytes of shared memory per program.
        warps: Warps per program; a warp of an AMD GPU has 64 threads.
        matrix: Number of matrix instructions, of each kind in :data:`MATRIX_INSTRUCTIONS`.
        tma: Number of instructions that move a tile to or from shared memory (NVIDIA's TMA).
    """

    registers: int
    spilled: int
    shared: int
    warps: int
    matrix: dict[str, int]
    tma: int


@dataclass(frozen=True)
class Limits:
    """The resources that the programs on one multiprocessor share.

    The numbers are those of the CUDA programming guide's table of compute capabilities, and of
    AMD's guides to the instruction sets of CDNA 3 and 4.

    Attributes:
        warps: Warps per scheduler.
        shared: Bytes of shared memory.
        reserved: Bytes of it that every program takes in addition.
        registers: Registers per thread that one warp per scheduler could have.
        step: Registers are handed out in multiples of this many per thread.
        schedulers: Parts of a multiprocessor, each with its own registers and warps.
        programs: Programs.
    """

    warps: int
    shared: int
    reserved: int
    registers: int = 512
    step: int = 8
    schedulers: int = 4
    programs: int = 32


_NVIDIA = Limits(16, 233472, 1024)
_LIMITS: dict[int | str, Limits] = {
    80: Limits(16, 167936, 1024),
    90: _NVIDIA,
    100: _NVIDIA,
    "gfx942": Limits(8, 65536, 0),
    "gfx950": Limits(8, 163840, 0),
}


def read_resources(compiled: Any) -> Resources:
    """Read the resources of a kernel from its compiled code.

    Args:
        compiled: Triton's ``CompiledKernel``, see :meth:`opfuse_triton.Launch.compile`.

    Raises:
        RuntimeError: Triton's ``cuobjdump`` does not say what the registers are.
    """
    nvidia = "cubin" in compiled.asm
    text = compiled.asm["ptx" if nvidia else "amdgcn"]
    registers, spilled = _of_cubin(compiled.asm["cubin"]) if nvidia else _of_amdgcn(text)
    counts = {name: len(re.findall(what, text)) for name, what in MATRIX_INSTRUCTIONS.items()}
    return Resources(
        registers=registers,
        spilled=spilled,
        shared=compiled.metadata.shared,
        warps=compiled.metadata.num_warps,
        matrix={name: count for name, count in counts.items() if count},
        tma=len(re.findall(r"\bcp\.(?:reduce\.)?async\.bulk\.tensor\b", text)),
    )


def _of_cubin(cubin: bytes) -> tuple[int, int]:
    tool = pathlib.Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        done = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True)
    found = re.search(r"REG:(\d+) STACK:(\d+)", done.stdout)
    if found is None:
        raise RuntimeError(f"cuobjdump does not tell the registers: {done.stdout}{done.stderr}")
    return int(found[1]), int(found[2])


def _of_amdgcn(text: str) -> tuple[int, int]:
    names = "vgpr_count", "private_segment_fixed_size"
    registers, spilled = (re.findall(rf"\.{name}:\s+(\d+)", text) for name in names)
    return max(map(int, registers), default=0), max(map(int, spilled), default=0)


def programs_at_once(target: Target, warps: int, registers: int = 1, shared: int = 0) -> int:
    """Return how many programs of a kernel one multiprocessor holds at the same time.

    Args:
        target: The target.
        warps: Warps per program.
        registers: Registers per thread.
        shared: Bytes of shared memory per program.

    Returns:
        The number; 0 where not even one fits. It is that of the nearest known architecture where
        the target is of another.
    """
    limits = _limits(target)
    each = -(-max(registers, 1) // limits.step) * limits.step
    warps_held = limits.schedulers * min(limits.warps, limits.registers // each)
    space = shared + limits.reserved
    return min(warps_held // warps, limits.programs, limits.shared // space if space else 10**9)


def occupancy(target: Target, resources: Resources) -> float:
    """The share of a multiprocessor's warps that a kernel's programs can fill, from 0 to 1."""
    limits = _limits(target)
    programs = programs_at_once(target, resources.warps, resources.registers, resources.shared)
    return programs * resources.warps / (limits.schedulers * limits.warps)


def _limits(target: Target) -> Limits:
    if target.arch in _LIMITS:
        return _LIMITS[target.arch]
    return _NVIDIA if target.backend == "cuda" else _LIMITS["gfx942"]
