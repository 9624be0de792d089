"""Collectives between two processes over gloo."""

import collectives
import gloo
import pytest
import torch.distributed as dist

from opfuse import ops

pytestmark = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo"
)


def test_collectives_between_two_processes_work():
    gloo.together(collectives.run)


@pytest.mark.parametrize(
    "op", [ops.AllGather, ops.AllReduce, ops.ReduceScatter, ops.CopyToTensorParallelRegion]
)
def test_without_a_process_group(op):
    with pytest.raises(
        RuntimeError,
        match=f"{op.__name__} needs torch.distributed.init_process_group to be called first",
    ):
        op()
    assert not op.differentiable
