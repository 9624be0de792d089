"""A model of a launch's time, from what its programs do. It has not been measured on a GPU."""

from __future__ import annotations

from typing import NamedTuple

from opfuse_triton.resources import programs_at_once
from opfuse_triton.targets import LATENCY, Target

REGISTERS = 256 * 1024
"""Bytes of registers of a multiprocessor: what is loaded has to fit."""


class LaunchWork(NamedTuple):
    """The work of a launch.

    Attributes:
        programs: Number of programs.
        warps: Warps per program.
        dram: Bytes that have to come from memory or go there.
        average: Bytes that a program moves on average.
        longest: Bytes that the busiest program moves.
        in_flight: Bytes that a program loads before it has to wait.
        flops: Floating-point operations of matrix products.
    """

    programs: int
    warps: int
    dram: float
    average: float
    longest: float
    in_flight: float
    flops: float


def launch_seconds(target: Target, work: LaunchWork) -> float:
    """A modelled time: the longest of what limits it.

    A matrix product takes its bytes at the bandwidth, or its operations at the peak: its tiles come
    from the L2 cache, and are loaded ahead.

    For others, by Little's law, bytes per second are the bytes in flight, over all programs that
    run at once, divided by the latency, at most the bandwidth. The limits are all bytes at that
    rate, and the programs that one place of a multiprocessor runs in turn, each at the rate of its
    own bytes in flight. Registers and shared memory are not known here, so as many programs run at
    once as there are warps for. Starting a kernel takes no time.

    Args:
        target: The target.
        work: What the launch does.

    Returns:
        Seconds.
    """
    if work.flops:
        return max(work.dram / target.bandwidth, work.flops / target.flops)
    at_once = max(programs_at_once(target, work.warps), 1)
    places = target.multiprocessors * at_once
    in_flight = min(work.in_flight, REGISTERS / at_once)
    rate = target.bandwidth
    chain = 0.0
    if in_flight:
        rate = min(rate, min(work.programs, places) * in_flight / LATENCY)
        chain = -(-work.programs // places) * work.longest * LATENCY / in_flight
    return max(work.dram / rate, chain)
