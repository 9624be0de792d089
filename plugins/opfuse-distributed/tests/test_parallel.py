"""``parallelize_module`` on ops, over gloo; parameters are DTensors."""

from __future__ import annotations

import gloo
import pytest
import torch
import torch.distributed as dist

from opfuse import ops

pytestmark = [
    pytest.mark.skipif(
        not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo"
    ),
    pytest.mark.xdist_group("gloo"),
]
if dist.is_available():
    import parallel_ranks as ranks


@pytest.mark.costly(6)
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize(("bias", "gate"), [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("called", [False, True])
def test_a_chain_equals_the_whole_one(sequence, bias, gate, called):
    gloo.together(ranks.a_chain, sequence, bias, gate, called)


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("check", [ranks.dtensors_at_its_ends, ranks.as_torch_does])
def test_styles(check, sequence):
    gloo.together(check, sequence)


def test_what_is_refused():
    gloo.together(ranks.refusals)


@pytest.mark.parametrize("called", [False, True])
def test_a_dtensor_without_a_style(called):
    gloo.together(ranks.a_foreign_dtensor, called)


@pytest.mark.parametrize("build", [ops.LayerNorm, ops.RMSNorm])
def test_norms_that_sum_their_gradients(build):
    gloo.together(ranks.summed_norms, build)


def test_keys_of_te():
    gloo.together(ranks.keys_of_te)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_checkpoint_of_another_size(tmp_path):
    import torch.distributed.checkpoint as dcp

    (expected, _) = gloo.together(ranks.saved_by_two, tmp_path / "two")
    found = {name: torch.zeros_like(value) for name, value in expected.items()}
    dcp.load(found, checkpoint_id=tmp_path / "two", no_dist=True)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    more = {name: value + 1 for name, value in found.items()}
    dcp.save(more, checkpoint_id=tmp_path / "one", no_dist=True)
    gloo.together(ranks.loaded_by_two, tmp_path / "one")


def test_sharded_over_it():
    gloo.together(ranks.fully_sharded, size=4)
