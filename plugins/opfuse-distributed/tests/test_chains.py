"""DDP and FSDP2 around a chain, with two gloo processes: gradients equal torch.nn's on the whole batch."""

from __future__ import annotations

import data_parallel
import gloo
import pytest
import torch


@pytest.mark.alone
@pytest.mark.skipif(
    not torch.distributed.is_available(), reason="this PyTorch has no torch.distributed"
)
def test_data_parallel():
    gloo.apart(data_parallel.worker)
