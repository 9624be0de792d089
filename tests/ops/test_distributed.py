"""Collectives between two processes over gloo."""

import collectives
import pytest
import torch.distributed as dist
from torch import multiprocessing

from opfuse import ops

pytestmark = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo"
)


def test_collectives_between_two_processes_work(tmp_path):
    context = multiprocessing.spawn(
        collectives.run, args=(2, tmp_path / "rendezvous"), nprocs=2, join=False
    )
    try:
        for _ in range(60):
            if context.join(timeout=1):
                return
        pytest.fail("the processes did not finish in 60 s")
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()


@pytest.mark.parametrize("op", [ops.AllGather, ops.AllReduce, ops.ReduceScatter])
def test_without_a_process_group(op):
    with pytest.raises(
        RuntimeError,
        match=f"{op.__name__} needs torch.distributed.init_process_group to be called first",
    ):
        op()
    assert not op.differentiable and op.saved_names == ()
