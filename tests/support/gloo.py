"""One process of a gloo group, for the tests that need two."""

from __future__ import annotations

import contextlib
import datetime
import os
import sys

import torch
import torch.distributed as dist


@contextlib.contextmanager
def member(rank, size, file):
    """Makes this process one of ``size`` for the block, and ends it with 0 behind a block that went well."""
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=60)
    dist.init_process_group(
        "gloo", init_method=f"file://{file}", rank=rank, world_size=size, timeout=timeout
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
