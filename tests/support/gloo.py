"""Two processes that form a gloo group."""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import os
import sys

import torch
import torch.distributed as dist
from torch import multiprocessing

RANKS = 2


def spawn(worker, folder, *args):
    """Calls ``worker(rank, folder, *args)`` in two processes; an error in one of them fails the test.

    If a signal ended one, both start again, once. With torch 2.13 the heap of such a process broke once in about 150
    runs, and opfuse has no native code that could break it. A wrong answer is an error and fails at once.
    """
    for attempt in ("first", "second"):
        own = folder / attempt
        own.mkdir()
        try:
            return multiprocessing.spawn(worker, (own, *args), nprocs=RANKS)
        except multiprocessing.ProcessExitedException as died:
            if died.signal_name is None or attempt == "second":
                raise


@contextlib.contextmanager
def member(rank, folder):
    """Makes this process one of two for the block, and ends it with 0 behind a block that went well."""
    faulthandler.enable()
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=60)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/init", rank=rank, world_size=RANKS, timeout=timeout
    )
    try:
        yield
        dist.barrier()  # neither leaves while the other still reads from it
    finally:
        dist.destroy_process_group()
    # What compiled or wrapped a model keeps the group, and its threads, alive. One that lets go of a tensor while the
    # interpreter shuts down aborts the process (pytorch/pytorch#179291), so it does not come to that.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
