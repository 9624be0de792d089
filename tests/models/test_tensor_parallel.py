"""Converted models whose layers are split among processes over gloo."""

import pytest

pytest.importorskip("transformers", reason="the models are those of transformers")

import gloo
import torch

pytestmark = [
    pytest.mark.skipif(
        not torch.distributed.is_available() or not torch.distributed.is_gloo_available(),
        reason="needs gloo",
    ),
    pytest.mark.xdist_group("gloo"),
]
if torch.distributed.is_available():
    import tp_models as ranks


@pytest.mark.costly(3)
@pytest.mark.parametrize(
    ("family", "config", "joined"),
    [
        ("Llama", {}, False),
        ("Llama", {"mlp_bias": True, "attention_bias": True}, True),
        ("Qwen3", {}, True),
        ("Mixtral", {}, False),
    ],
)
def test_a_model_under_its_plan(family, config, joined, tmp_path):
    first, second = gloo.together(ranks.a_model, family, tmp_path, config, joined)
    assert first == second


@pytest.mark.costly(1)
@pytest.mark.parametrize("family", ["Llama", "Mixtral"])
def test_a_memory_plan(family, tmp_path):
    gloo.together(ranks.planned, family, tmp_path)


@pytest.mark.costly(1)
@pytest.mark.parametrize("family", ["Llama", "Mixtral"])
def test_sharded_over_it(family, tmp_path):
    gloo.together(ranks.sharded, family, tmp_path, size=4)


@pytest.mark.costly(1)
@pytest.mark.parametrize("family", ["Qwen3", "Mixtral"])
def test_split_after_conversion(family, tmp_path):
    gloo.together(ranks.split_after, family, tmp_path)


def test_styles_that_change(tmp_path):
    for style, forward in gloo.together(ranks.changed_styles, tmp_path):
        assert "transform_inputs_pre_forward was replaced by function" in style
        assert forward == "the forward of up_proj was replaced by function"


@pytest.mark.costly(4)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize(
    "order", [("split", "convert"), ("convert", "split"), ("convert", "call", "split")], ids=str
)
def test_styles_of_torch(bias, rows, order):
    gloo.together(ranks.torch_styles, bias, rows, order)


def test_what_is_left_alone():
    for found in gloo.together(ranks.left_alone):
        assert found["another_hook"] == "it has more hooks than those of the style that split it"
        assert found["gathered"] == "it is split among processes with R before and R after it"
        assert found["dtensor"] == "it gives a DTensor"
        assert found["placed"] == "its weight is not placed as its style does"
        assert found["later"] == "up has forward and forward pre- hooks beside those of its style"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_checkpoint_of_another_size(tmp_path):
    import torch.distributed.checkpoint as dcp

    expected, _ = gloo.together(ranks.saved_by_two, tmp_path / "two")
    found = {name: torch.zeros_like(value) for name, value in expected.items()}
    dcp.load(found, checkpoint_id=tmp_path / "two", no_dist=True)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    more = {name: 2 * value for name, value in found.items()}
    dcp.save(more, checkpoint_id=tmp_path / "one", no_dist=True)
    gloo.together(ranks.loaded_by_two, tmp_path / "one", more)
