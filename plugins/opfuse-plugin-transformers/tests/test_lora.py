"""PEFT's linear layers: the adapter added to the base layer's output in one chain."""

import copy
import warnings

import pytest
import torch
from opfuse_transformers import rotations
from opfuse_transformers.lora import linear_ops

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
    assert set(opfuse.converted(twin).values()) == {"", rotations.UNFUSED}
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


def head_of(bias=True, **config):
    """A small head with one adapter."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(6, 11, bias=bias))
    usual = {"r": 2, "lora_alpha": 4, "target_modules": ["0"], "init_lora_weights": False}
    model = peft.get_peft_model(net, peft.LoraConfig(**{**usual, **config}))
    return model, model.base_model.model[0]


@pytest.mark.parametrize("bias", [False, True])
def test_a_head_with_an_adapter_and_log_probabilities(bias):
    model, head = head_of(bias)
    chain = opfuse.Sequential(*linear_ops(head), opfuse.ops.TokenLogProb())
    x, tokens = torch.randn(5, 6, requires_grad=True), torch.arange(5)
    trained = [param for param in model.parameters() if param.requires_grad]
    assert len(trained) == 2 and not list(chain.parameters())
    results = []
    for call in (
        lambda: chain(x, tokens),
        lambda: head(x).log_softmax(-1).gather(-1, tokens[:, None])[:, 0],
    ):
        y = call()
        results.append([y, *torch.autograd.grad(y.sum(), [x, *trained])])
    torch.testing.assert_close(*results)
    assert [type(op).__name__ for op in linear_ops(head)] == ["LowRankLinear"] + ["Bias"] * bias
    assert linear_ops(head_of(lora_dropout=0.25)[1])[0].dropout == 0.25


@pytest.mark.parametrize(
    "change, why",
    [
        (
            lambda model, head: model.add_adapter("b", peft.LoraConfig(r=1, target_modules=["0"])),
            "",
        ),
        (lambda model, head: head.set_adapter(["default", "b"]), r"its active adapters are \['d"),
        (lambda model, head: model.base_model.disable_adapter_layers(), "adapters are disabled"),
        (lambda model, head: model.merge_adapter(), "its adapters are merged"),
    ],
    ids=["another", "two active", "disabled", "merged"],
)
def test_a_head_that_computes_something_else_is_refused(change, why):
    model, head = head_of()
    model.add_adapter("b", peft.LoraConfig(r=1, target_modules=["0"])) if "active" in why else None
    change(model, head)
    if not why:
        assert linear_ops(head)
        return
    with pytest.raises(ValueError, match=f"one adapter: .*{why}"):
        linear_ops(head)


def test_a_layer_without_adapters_is_refused():
    with pytest.raises(ValueError, match="a Linear has no adapters"):
        linear_ops(torch.nn.Linear(3, 4))
