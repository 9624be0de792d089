"""Chains in pieces equal whole layers, on two processes over gloo."""

from __future__ import annotations

import gloo
import overlapping as ranks
import pytest
import torch

pytestmark = pytest.mark.xdist_group("gloo")


@pytest.mark.parametrize("mode", ["column", "row"])
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(2,), (6,), (4, 3), (2, 1, 3), (0, 2), (2, 0)], ids=str)
def test_a_layer_equals_the_whole_one(mode, sequence, bias, shape):
    gloo.together(ranks.one_layer, mode, sequence, bias, shape, "c10d", 3, torch.float64)


@pytest.mark.parametrize("mode", ["column", "row"])
@pytest.mark.parametrize("provider", ["c10d", "symm_mem"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(6,), (2, 3)], ids=str)
def test_providers_and_dtypes(mode, provider, bias, dtype, shape):
    gloo.together(ranks.one_layer, mode, True, bias, shape, provider, 0, dtype)
