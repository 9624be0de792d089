"""Converted models in DDP and FSDP2, sharded layer by layer, with two gloo processes."""

import pytest

pytest.importorskip("transformers", reason="the models are those of transformers")

import families
import gloo
import torch

pytestmark = [
    pytest.mark.skipif(
        not torch.distributed.is_available(), reason="this PyTorch has no torch.distributed"
    ),
    pytest.mark.xdist_group("gloo"),
]


@pytest.mark.costly(2)
@pytest.mark.parametrize("how", ["ddp", "fsdp", "fsdp first", "plan"])
def test_data_parallel(how):
    import model_ranks

    names = list(families.FAMILIES) if families.ALL else ["llama", "encoder"]
    gloo.together(model_ranks.worker, names, model_ranks.ORDERS[how], how != "plan")
