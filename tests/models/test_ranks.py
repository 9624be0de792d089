"""Converted models in DDP and FSDP2, sharded layer by layer, with two gloo processes."""

import pytest

pytest.importorskip("transformers", reason="the models are those of transformers")

import families
import gloo
import torch

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="this PyTorch has no torch.distributed"
)


def ranks(how, least, tmp_path):
    import model_ranks

    names = list(families.FAMILIES) if families.ALL else ["llama", "encoder"]
    gloo.spawn(model_ranks.worker, tmp_path, names, model_ranks.ORDERS[how], least)


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_data_parallel(how, tmp_path):
    ranks(how, True, tmp_path)


def test_sharded_and_then_converted(tmp_path):
    ranks("fsdp first", True, tmp_path)
