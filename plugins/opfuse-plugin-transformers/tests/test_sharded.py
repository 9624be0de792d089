"""Heads that FSDP2 shards: the loss needs no logits, and reading them is right or refused, in any one process."""

import importlib.util

import gloo
import pytest
import sharded_heads as ranks
import torch.distributed as dist

pytestmark = [
    pytest.mark.skipif(
        not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo"
    ),
    pytest.mark.xdist_group("gloo"),
]


needs_loss = pytest.mark.skipif(
    importlib.util.find_spec("opfuse_loss") is None,
    reason="without opfuse-plugin-loss the chain holds all logits",
)


def _stays(way, reshard):
    """Whether the parameters of the head are there when the forward has ended."""
    return reshard is False or (reshard is None and way in ("model", "wrapped", "layers"))


@needs_loss
@pytest.mark.costly(8)
@pytest.mark.parametrize("reshard", [None, True, False], ids=str)
@pytest.mark.parametrize("way", ranks.WAYS)
def test_a_step_makes_no_logits(way, reshard):
    (most, says), (other, nothing) = gloo.together(ranks.train, way, reshard, 2)
    assert max(most, other) < ranks.LOGITS and not nothing
    if _stays(way, reshard):
        assert says == "right"
    else:
        assert "FSDP2 has sharded its head again since" in says


@needs_loss
@pytest.mark.parametrize("way", ["model", "head", "tail"])
def test_what_is_sharded_before_it_is_converted(way):
    found = gloo.together(ranks.train, way, None, 2, False)
    assert max(most for most, _ in found) < ranks.LOGITS


@needs_loss
@pytest.mark.parametrize("way", ["model", "tail"])
def test_resharding_to_a_part_of_the_processes(way):
    """A number needs four processes to be something else than True or False."""
    (_, says), *_ = found = gloo.together(ranks.train, way, 2, 4, size=4)
    assert max(most for most, _ in found) < ranks.LOGITS
    assert "FSDP2 has sharded its head again since" in says


@pytest.mark.parametrize("way", ranks.WAYS)
def test_a_loss_of_logits_that_are_read_late(way):
    gloo.together(ranks.of_logits, way, False, 2)


@needs_loss
@pytest.mark.parametrize("tied", [False, True])
def test_accelerate_shards_a_head_with_its_norm(tied):
    """By FSDP2, in a group with hooks on the head; with the embedding too where they are tied."""
    gloo.apart(ranks.accelerated, tied)
