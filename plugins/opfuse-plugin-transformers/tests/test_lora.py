"""PEFT's linear layers: the adapter added to the base layer's output in one chain."""

import copy
import warnings

import pytest
import torch

import opfuse

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # theirs, at import
    peft = pytest.importorskip("peft")

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")

CHAIN = ("BasicLinear", "BasicLinear", "ConstantScale", "AddExtraInput")


def adapted(models, family="llama", dtype=torch.float32, **config):
    usual = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "init_lora_weights": False}
    model = peft.get_peft_model(models.make(family, dtype), peft.LoraConfig(**{**usual, **config}))
    twin = copy.deepcopy(model)
    return model, twin, opfuse.convert(twin)


@pytest.mark.parametrize("mode", ["fp32", "bf16", "autocast"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_training_step_with_lora_matches_the_original(models, mode, dropout):
    dtype = torch.bfloat16 if mode == "bf16" else torch.float32
    model, twin, report = adapted(models, dtype=dtype, lora_dropout=dropout)
    found = [row.ops for row in report.converted if row.converter == "linear layer with LoRA"]
    assert found == [("Dropout", *CHAIN) if dropout else CHAIN] * 14
    expected, got = [models.step(each, mode == "autocast") for each in (model, twin)]
    assert all("lora_" in name for name in got[1])
    assert models.worst(got, expected)[0] <= (1e-5 if mode == "fp32" else 0.05)
    assert not any(opfuse.converted(twin).values())
    model.eval(), twin.eval()
    assert models.worst(models.step(twin), models.step(model))[0] <= (
        1e-5 if mode == "fp32" else 0.05
    )


def first(model):
    return model.base_model.model.model.layers[0].mlp.down_proj


@pytest.mark.parametrize(
    "change, why",
    [
        (lambda model: model.base_model.disable_adapter_layers(), "its adapters are disabled"),
        (lambda model: model.merge_adapter(), "its adapters are merged"),
        (lambda model: first(model).set_scale("default", 3.0), ""),
        (
            lambda model: first(model).lora_A["default"].register_forward_hook(lambda *_: None),
            "lora_A.default has forward hooks",
        ),
    ],
    ids=["disabled", "merged", "scale", "hook"],
)
def test_a_changed_lora_layer_falls_back_with_a_reason(models, change, why):
    model, twin, _ = adapted(models)
    for each in (model, twin):
        change(each)
        each.eval()
    given = models.inputs(model)
    torch.testing.assert_close(twin(**given).logits, model(**given).logits, rtol=1e-4, atol=1e-4)
    name = "base_model.model.model.layers.0.mlp.down_proj"
    assert opfuse.converted(twin)[name] == why


def test_the_code_of_the_forward(models, monkeypatch):
    model, twin, _ = adapted(models)
    given = models.inputs(model)
    before = model(**given).logits
    forward = peft.tuners.lora.layer.Linear.forward
    monkeypatch.setattr(
        forward, "__code__", (lambda self, x, *_, **__: self.base_layer(x)).__code__
    )
    expected = model(**given).logits
    assert not torch.allclose(expected, before)
    torch.testing.assert_close(twin(**given).logits, expected, rtol=1e-4, atol=1e-4)


def test_another_active_adapter_falls_back_until_the_default_returns(models):
    usual = {"target_modules": ["q_proj", "down_proj"]}
    model, twin, _ = adapted(models, **usual)
    for each in (model, twin):
        torch.manual_seed(4)
        each.add_adapter("other", peft.LoraConfig(r=2, init_lora_weights=False, **usual))
        each.set_adapter("other")
    assert models.worst(models.step(twin), models.step(model))[0] <= 1e-5
    name = "base_model.model.model.layers.0.mlp.down_proj"
    assert opfuse.converted(twin)[name] == "its active adapters are ['other'], not 'default' alone"
    for each in (model, twin):
        each.set_adapter("default")
    models.step(twin)
    assert not opfuse.converted(twin)[name]


@pytest.mark.parametrize(
    "config, why",
    [
        ({"use_dora": True}, "adapter 'default' is a DoraLinearVariant"),
        ({"lora_bias": True}, "adapter 'default' is not made of two matrices"),
    ],
    ids=["DoRA", "bias"],
)
def test_what_is_left_alone(models, config, why):
    model, twin, report = adapted(models, "qwen2", target_modules=["q_proj"], **config)
    assert {row.reason for row in report.left if row.cls == "Linear"} == {why}
    assert models.worst(models.step(twin), models.step(model))[0] <= 1e-5
