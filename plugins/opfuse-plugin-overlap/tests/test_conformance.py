"""opfuse's own checks of every fusion, in a group of one process: what each does to its ops.

What several processes do is in test_kernels.py.
"""

import pytest
import torch.distributed as dist
from opfuse_distributed.testing import DistributedSuite

import opfuse
from opfuse import ops
from opfuse.testing import FusionSuite, Op

COLLECTIVES = (ops.AllGather, ops.AllReduce, ops.CopyToTensorParallelRegion, ops.ReduceScatter)


@pytest.fixture(scope="class")
def group(tmp_path_factory):
    """This process is a group."""
    file = tmp_path_factory.mktemp("group") / "init"
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
@pytest.mark.costly(0.3, always=("output", "gradients"), each=16)
class TestConformance(FusionSuite):
    plugin = "overlap"
    makers = {cls: (lambda width, cls=cls: Op(cls)) for cls in COLLECTIVES}  # noqa: RUF012
    limits = dict.fromkeys(
        ("entry_point", "imports", "processes"), "its ops need a process group there"
    )

    @pytest.fixture(autouse=True)
    def _always(self):
        """Fused, though nothing is sent, and in several pieces."""
        given = {"overlap.use": "always", "overlap.pieces": 2}
        with opfuse.options(**given):
            yield


@pytest.mark.costly(0.4)
class TestRanks(DistributedSuite):
    """Layers that are split among ranks, in pieces."""

    plugin = "overlap"
    options = {"overlap.use": "always", "overlap.pieces": 2}  # noqa: RUF012
