"""What processes run in the tests of their order: chains that one of them calls in another one."""

from __future__ import annotations

import contextlib
import copy
import datetime
import random
import time

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import opfuse
from opfuse import ops

SIZES = 6, 8


def new_group(ranks=None):
    """A group of its own, so that a failure in it disturbs no other test."""
    return dist.new_group(ranks, timeout=datetime.timedelta(seconds=20))


def column(group, size=6, sequence=False):
    """A layer that is split by columns."""
    given = dict(tensor_parallel_group=group, sequence_parallel=sequence)
    return opfuse.Sequential(
        ops.Linear(size, size, tensor_parallel_mode="column", **given), ops.GELU()
    )


def row(group, size=6, sequence=False):
    """A layer that is split by rows."""
    given = dict(tensor_parallel_group=group, sequence_parallel=sequence)
    return opfuse.Sequential(ops.Linear(size, size, tensor_parallel_mode="row", **given))


def mlp(group, size=6, sequence=False):
    """Both, in one chain."""
    given = dict(tensor_parallel_group=group, sequence_parallel=sequence, bias=False)
    return opfuse.Sequential(
        ops.Linear(size, 2 * size, tensor_parallel_mode="column", **given),
        ops.GELU(),
        ops.Linear(2 * size, size, tensor_parallel_mode="row", **given),
    )


def outcome(run):
    """What a call raised, as its name and its text, and after how many seconds; or what it gave."""
    start = time.monotonic()
    try:
        return "", run()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - start


def leaf(size, rows=4):
    return torch.randn(rows, size).requires_grad_()


def swapped(rank, build, sizes, warm, what):
    """Two chains of equal structure, in the other order on rank 1, forward or backward."""
    group = new_group()
    a, b = (globals()[build](group, size, sequence=True) for size in sizes)
    x = leaf(sizes[0] // (2 if build == "row" else 1)), leaf(sizes[1] // (2 if build == "row" else 1))

    def step(order):
        chains = [(a, x[0]), (b, x[1])]
        if what == "forward":
            for chain, given in chains[::order]:
                chain(given)
        else:
            for y in [chain(given) for chain, given in chains][::order]:
                y.sum().backward()

    for _ in range(warm):
        step(1)
    return outcome(lambda: step(-1 if rank else 1))
