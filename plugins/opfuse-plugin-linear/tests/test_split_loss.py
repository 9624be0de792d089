"""Linear + loss with the classes split among processes over gloo, chunk by chunk."""

from __future__ import annotations

import gloo
import pytest
import tensor_parallel
import torch
import torch.distributed as dist

pytestmark = [
    pytest.mark.skipif(
        not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo"
    ),
    pytest.mark.xdist_group("gloo"),
]


@pytest.mark.parametrize(
    "numbers",
    [
        {"label_smoothing": 0.2, "z_loss": 0.1, "softcap": 3.0, "ignore_index": 3},
        {"reduction": "sum"},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("sequence", [False, True])
def test_a_split_loss(numbers, dtype, sequence):
    gloo.together(tensor_parallel.loss, numbers, dtype, sequence, not sequence, True)
