"""A training step of each family, converted, against the same in eager PyTorch."""

import pytest
import torch

import opfuse

NO_DROPOUT = {
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "bert": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "t5": {"dropout_rate": 0.0},
}
FAMILIES = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma", "phi3", "mixtral", "qwen3_moe"),
    *("gpt2", "bert", "vit", "t5"),
)
MODES = {"fp32": 1e-5, "bf16": 0.05, "autocast": 0.05}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", MODES)
def test_a_training_step(models, family, mode):
    dtype = torch.bfloat16 if mode == "bf16" else torch.float32
    model, twin, report = models.pair(family, dtype, **NO_DROPOUT.get(family, {}))
    expected, got = [models.step(each, mode == "autocast") for each in (model, twin)]
    difference, name = models.worst(got, expected)
    assert difference <= MODES[mode], f"{name}: {difference}\n{report}"
    assert report.converted
    assert not any(opfuse.converted(twin).values()), opfuse.converted(twin)


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])
def test_dropout_draws_anew(models, family):
    """In training a layer with dropout is converted too, and draws other numbers at each call."""
    where = {"llama": {"attention_dropout": 0.5}, "gpt2": {"resid_pdrop": 0.5}}
    _, twin, report = models.pair(family, **where.get(family, {}))
    assert any("Layer" in row.cls or "Block" in row.cls for row in report.converted)
    given = models.inputs(twin)
    assert not torch.equal(twin(**given).loss, twin(**given).loss)
    twin.eval()
    assert torch.equal(twin(**given).loss, twin(**given).loss)
