"""Tiers: with which devices, and which kind of Triton, the checks can run on this machine.

``reference`` is torch on the CPU, and always runs. ``interpret`` runs Triton kernels on the CPU, in
a process of its own with ``TRITON_INTERPRET=1``. ``gpu`` runs everything on CUDA tensors.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from typing import Any, NamedTuple

import torch

from . import interpreter
from .running import fused


class Tier(NamedTuple):
    """One way to run the checks.

    Attributes:
        name: ``reference``, ``interpret`` or ``gpu``.
        device: Where the tensors are.
        reason: Why it cannot run here, or ``""``.
    """

    name: str
    device: str
    reason: str


def is_interpreting() -> bool:
    """Return whether Triton interprets its kernels in this process."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")


def tiers() -> list[Tier]:
    """The three tiers, as this process can run them."""
    reference = interpret = gpu = ""
    if is_interpreting():
        reference = gpu = "TRITON_INTERPRET is set"
    else:
        interpret = "it needs a process of its own: TRITON_INTERPRET=1 python -m pytest"
    if importlib.util.find_spec("triton") is None:
        reference, interpret = "", "triton is not installed"
    if not torch.cuda.is_available():
        gpu = "torch finds no CUDA device"
    cpus = Tier("reference", "cpu", reference), Tier("interpret", "cpu", interpret)
    return [*cpus, Tier("gpu", "cuda", gpu)]


PROGRAMS = 512
"""So many programs of kernels take the interpreter seconds."""


def rows_by_grid(chains: Any) -> int | None:
    """The rows with which an interpreted fusion starts about :data:`PROGRAMS`; None: any number."""
    found = []
    for case in chains.plain[:1]:
        for rows in (64, 128):
            with contextlib.suppress(Exception), interpreter.count_programs() as programs:
                fused(case.with_(rows=(rows,)))
                found.append(len(programs))
    if len(found) < 2 or found[0] == found[1]:
        return None
    return max(128, 64 * PROGRAMS // (found[1] - found[0]))
