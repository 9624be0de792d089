"""PEFT's linear layers: alone, in the chains of blocks, and after what PEFT does to a model."""

import copy
import warnings
from importlib import util

import pytest
import torch
from opfuse_transformers import attention, rotations
from opfuse_transformers.adapted import ParallelLoRALinear
from opfuse_transformers.lora import linear_ops

import opfuse
from opfuse.report.calls import saved_bytes

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # theirs, at import
    peft = pytest.importorskip("peft")

pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable:FutureWarning"),
]

LAYER = "base_model.model.model.layers.0"
BLOCK = ("ParallelLoRALinear", "SwiGLU", "LoRALinear")
APART = ("BasicLinear", "BasicLinear", "ConstantScale", "AddExtraInput")
FREE = {"", rotations.UNFUSED, attention.NO_NORM}
"""What a converted model says of itself where its chains run as far as they can."""


def adapted(models, family="llama", dtype=torch.float32, same_dtype=False, seed=0, **config):
    usual = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "init_lora_weights": False}
    config = peft.LoraConfig(**{**usual, **config})
    made = models.make(family, dtype)
    torch.manual_seed(seed)
    model = peft.get_peft_model(made, config, autocast_adapter_dtype=not same_dtype)
    twin = copy.deepcopy(model)
    return model, twin, opfuse.convert(twin)


@pytest.mark.parametrize("mode", ["fp32", "bf16", "autocast"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_training_step_with_lora_matches_the_original(models, mode, dropout):
    dtype = torch.bfloat16 if mode == "bf16" else torch.float32
    model, twin, report = adapted(models, dtype=dtype, lora_dropout=dropout)
    found = [row.ops for row in report.converted if row.converter == "linear layer with LoRA"]
    assert found == [("LoRALinear",)] * 14
    blocks = [row.ops for row in report.converted if row.cls == "LlamaDecoderLayer"]
    add = ("AddExtraInput",)
    assert blocks == [(*add, "MakeExtraOutput", "RMSNorm", *BLOCK, *add)] * 2
    expected, got = [models.step(each, mode == "autocast") for each in (model, twin)]
    assert all("lora_" in name for name in got[1])
    assert models.worst(got, expected)[0] <= (1e-5 if mode == "fp32" else 0.05)
    whys = opfuse.converted(twin)
    assert {*whys.values()} <= FREE and not whys[LAYER]
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
        (lambda model: first(model).set_scale("default", 3.0), ""),  # by its own chain
        (
            lambda model: first(model).lora_A["default"].register_forward_hook(lambda *_: None),
            "lora_A.default has forward hooks",
        ),
        (
            lambda model: first(model).scaling.update(default=torch.tensor(3.0)),
            "the scaling of 'default' is a tensor",
        ),
    ],
    ids=["disabled", "merged", "scale", "hook", "tensor"],
)
def test_a_changed_lora_layer_falls_back_with_a_reason(models, change, why):
    model, twin, _ = adapted(models)
    for each in (model, twin):
        change(each)
        each.eval()
    given = models.inputs(model)
    torch.testing.assert_close(twin(**given).logits, model(**given).logits, rtol=1e-4, atol=1e-4)
    whys = opfuse.converted(twin)
    assert whys[f"{LAYER}.mlp.down_proj"] == why
    said = why or "the scaling of 'default' was 2.0 and is 6.0"
    assert said in whys[LAYER] and not whys["base_model.model.model.layers.1"].count("scaling")


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
    why = "its active adapters are ['other'], not 'default' alone"
    whys = opfuse.converted(twin)
    assert whys[f"{LAYER}.self_attn.q_proj"] == whys[f"{LAYER}.mlp.down_proj"] == why
    assert whys[LAYER].endswith(why)
    for each in (model, twin):
        each.set_adapter("default")
    models.step(twin)
    whys = opfuse.converted(twin)
    assert not whys[f"{LAYER}.self_attn.q_proj"] and not whys[LAYER]


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


# Against fp64


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "qwen2"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("prefer", ["speed", "memory"])
def test_two_training_steps_match_peft_in_fp64(models, family, dropout, prefer):
    """Where nothing but a norm is rounded; each adapter draws the mask that it draws there."""
    bias = "all" if family == "qwen2" and not dropout else "none"
    model, twin, _ = adapted(models, family, torch.float64, lora_dropout=dropout, bias=bias)
    for _ in range(2):
        expected = models.step(model)
        with opfuse.options(prefer=prefer):
            got = models.step(twin)
        assert len(got[1]) == 2 * 14 + (2 * 3 if bias == "all" else 0)
        # Qwen3 has norms in fp32 in each head
        assert models.worst(got, expected)[0] <= (1e-5 if family == "qwen3" else 1e-6)
        for each, (_, grads) in ((model, expected), (twin, expected)):
            for name, param in each.named_parameters():
                if name in grads:
                    param.data -= 0.1 * grads[name]
    assert not opfuse.converted(twin)[LAYER]


@pytest.mark.parametrize("mode", ["bf16", "bf16, adapters too", "autocast", "fp32"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("prefer", ["speed", "memory"])
def test_errors_are_no_larger_than_those_of_peft(models, mode, dropout, prefer):
    dtype = torch.bfloat16 if "bf16" in mode else torch.float32
    how = {"same_dtype": "too" in mode, "lora_dropout": dropout}
    errors = [[], []]
    for seed in range(4):  # one model says little: its errors are one draw
        model, twin, _ = adapted(models, "llama", dtype, seed=seed, **how)
        _, exact = models.step(copy.deepcopy(model).double())
        _, theirs = models.step(model, mode == "autocast")
        with opfuse.options(prefer=prefer):
            _, got = models.step(twin, mode == "autocast")
        assert not opfuse.converted(twin)[LAYER]
        assert {n: g.dtype for n, g in got.items()} == {n: g.dtype for n, g in theirs.items()}
        for of, grads in zip(errors, (got, theirs), strict=True):
            squares = [float((grads[n].double() - g).square().sum()) for n, g in exact.items()]
            of.append(sum(squares) / sum(float(g.square().sum()) for g in exact.values()))
    assert sum(errors[0]) ** 0.5 <= 1.5 * sum(errors[1]) ** 0.5


def test_the_numbers_of_a_module_in_mixed_dtypes(models):
    """The base in bf16 and the adapter in fp32: the input is kept in bf16."""
    model, twin, _ = adapted(models, dtype=torch.bfloat16)
    mine, theirs = first(twin), first(model)
    x = torch.randn(3, 5, 176).bfloat16().requires_grad_()
    rows = x.detach().double().requires_grad_()
    exact = copy.deepcopy(theirs).double()
    y, wide = mine(x), exact(rows)
    assert y.dtype is theirs(x).dtype is torch.bfloat16
    dy = torch.randn(y.shape).bfloat16()
    named = [[p for p in each.parameters() if p.requires_grad] for each in (mine, exact)]
    got = torch.autograd.grad(y, [x, *named[0]], dy)
    expected = torch.autograd.grad(wide, [rows, *named[1]], dy.double())
    assert [g.dtype for g in got] == [torch.bfloat16, torch.float32, torch.float32]
    for one, other, least in zip(
        [y, *got], [wide, *expected], (2e-3, 2e-3, 1e-6, 1e-6), strict=True
    ):
        assert ((one.double() - other).norm() / other.norm()).item() <= least
    kept = [saved_bytes(lambda of=of: of(x), of.parameters()) for of in (mine, theirs)]
    assert kept[0] == 15 * (176 * 2 + 4 * 4) and kept[1] == 15 * (176 * 4 + 4 * 4)


def test_a_model_keeps_less_than_half(models):
    pytest.importorskip("opfuse_mlp", reason="it computes again")
    pytest.importorskip("opfuse_loss", reason="it keeps no logits")
    for dropout in (0.0, 0.3):
        model, twin, _ = adapted(models, lora_dropout=dropout)
        kept = []
        for each in (model, twin):
            with opfuse.options(prefer="memory"):
                models.step(each)  # compiled, or not
                forward = lambda each=each: each(**models.inputs(each)).loss  # noqa: E731
                kept.append(saved_bytes(forward, each.parameters()))
        assert kept[1] <= 0.5 * kept[0]


def test_linears_adapted():
    torch.manual_seed(0)
    parts = {n: opfuse.ops.LowRankLinear(6, size, 2, scaling=s, dropout=p, dtype=torch.float64)
             for n, size, s, p in (("a", 5, 0.5, 0.3), ("b", 7, 2.0, 0.0))}  # fmt: skip
    for part in parts.values():
        torch.nn.init.normal_(part.lora_b)
    op = ParallelLoRALinear(parts)
    assert op.param_names == tuple(f"{n}.{p}" for n in "ab" for p in ("weight", "lora_a", "lora_b"))
    x = torch.randn(2, 4, 6, dtype=torch.float64, requires_grad=True)
    torch.manual_seed(1)
    y = op(x)
    torch.manual_seed(1)
    expected = torch.cat([part(x) for part in parts.values()], -1)
    torch.testing.assert_close(y, expected)
    leaves, dy = [x, *op.parameters()], torch.randn_like(y)
    torch.testing.assert_close(
        torch.autograd.grad(y, leaves, dy), torch.autograd.grad(expected, leaves, dy)
    )
    with pytest.raises(ValueError, match=r"linears of one number of features, got \[5, 6\]"):
        ParallelLoRALinear({"a": parts["a"], "b": opfuse.ops.LowRankLinear(5, 6, 2)})
    with opfuse.options(double_backward=True):
        op.eval()
        assert torch.autograd.gradgradcheck(op, (x[0, :2].detach().requires_grad_(),))


# What PEFT and torch do to a model afterwards


def rest(model):
    model.merge_adapter()
    model.unmerge_adapter()


def within(model):
    with model.disable_adapter():
        model(input_ids=torch.ones(1, 3, dtype=torch.long))


def another(model):
    torch.manual_seed(5)
    config = peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    model.add_adapter("other", config)


def removed(model):
    another(model)
    model.set_adapter("other")
    model.delete_adapter("default")


def frozen(model):
    for name, param in model.named_parameters():
        param.requires_grad_("lora_B" in name)


def trained(model):
    for param in model.parameters():
        param.requires_grad_(True)


def both(model):
    another(model)
    model.base_model.set_adapter(["default", "other"])


def less_dropout(model):
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.1


def another_scaling(model):
    for module in model.modules():
        if hasattr(module, "scaling") and hasattr(module, "lora_A"):
            module.scaling = {name: 3 * scaling for name, scaling in module.scaling.items()}


CHANGES = {
    "another scaling, in another dictionary": (another_scaling, "the scaling of 'default' was"),
    "merged and unmerged": (rest, ""),
    "disabled for a while": (within, ""),
    "another adapter": (another, ""),
    "the first one removed": (removed, "lora_A.default was replaced by nothing"),
    "A is frozen": (frozen, ""),
    "all is trained": (trained, ""),
    "two are active": (both, "its active adapters are ['default', 'other'], not 'default' alone"),
    "another dropout": (less_dropout, "the dropout of 'default' was 0.3 and is 0.1"),
    "frozen norms in eval": (lambda model: model.eval(), ""),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_changes_after_convert(models, change):
    model, twin, _ = adapted(models, lora_dropout=0.3)
    do, why = CHANGES[change]
    models.step(twin)
    for each in (model, twin):
        do(each)
    expected, got = models.step(model), models.step(twin)
    assert models.worst(got, expected)[0] <= 2e-5
    said = opfuse.converted(twin)[LAYER]
    assert (why in said) if why else not said
    made = opfuse.convert(twin)  # again, for what it is now
    assert models.worst(models.step(twin), expected)[0] <= 2e-5
    if change in ("the first one removed", "another dropout", next(iter(CHANGES))):
        assert made.converted and not opfuse.converted(twin)[LAYER]


def test_unload_save_and_revert(models, tmp_path):
    model, twin, _ = adapted(models)
    models.step(twin)
    assert {*twin.state_dict()} == {*model.state_dict()}
    twin.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(models.make("llama"), tmp_path, is_trainable=True)
    assert models.worst(models.step(again), models.step(model))[0] == 0
    opfuse.convert(again)
    assert models.worst(models.step(again), models.step(model))[0] <= 1e-5
    opfuse.revert(again)
    assert models.worst(models.step(again), models.step(model))[0] == 0
    assert type(first(again)) is peft.tuners.lora.layer.Linear
    given = models.inputs(model)
    plain, expected = twin.merge_and_unload(), model.merge_and_unload()
    torch.testing.assert_close(
        plain(**given).logits, expected(**given).logits, rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_checkpointing(models, reentrant, dropout):
    model, twin, _ = adapted(models, lora_dropout=dropout)
    expected = models.step(model)
    twin.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        twin.enable_input_require_grads()
    assert models.worst(models.step(twin), expected)[0] <= 1e-5


def test_checkpoint_contexts(models):
    from torch.utils.checkpoint import checkpoint

    model, twin, _ = adapted(models, lora_dropout=0.3)
    expected = models.step(model)
    twin.zero_grad()
    torch.manual_seed(2)
    loss = checkpoint(
        lambda: twin(**models.inputs(twin)).loss,
        use_reentrant=False,
        context_fn=opfuse.checkpoint_contexts,
    )
    loss.backward()
    grads = {n: p.grad for n, p in twin.named_parameters() if p.grad is not None}
    assert models.worst((loss.detach(), grads), expected)[0] <= 1e-5


# The norm before query, key and value


def inputs_trained(model):
    model.enable_input_require_grads()
    return model


def test_the_norm_before_the_projections_is_computed_again(models):
    pytest.importorskip("opfuse_mlp", reason="it computes norms again")
    model, twin, _ = adapted(models)
    for each in (model, twin):
        inputs_trained(each)
    with opfuse.options(prefer="memory"):
        got = models.step(twin)
        assert not opfuse.converted(twin)[f"{LAYER}.self_attn"]
        kept = saved_bytes(lambda: twin(**models.inputs(twin)).loss, twin.parameters())
    assert models.worst(got, models.step(model))[0] <= 1e-5
    norm = twin.base_model.model.model.layers[0].input_layernorm
    seen = []
    norm.register_forward_hook(lambda module, args, y: seen.append(y))
    with opfuse.options(prefer="memory"):
        more = saved_bytes(lambda: twin(**models.inputs(twin)).loss, twin.parameters())
        (grad,) = torch.autograd.grad(twin(**models.inputs(twin)).loss, seen[-1])
    assert more > kept and grad.abs().sum() > 0
    seen.clear()
    hook = model.base_model.model.model.layers[0].input_layernorm
    hook.register_forward_hook(lambda module, args, y: seen.append(y))
    (expected,) = torch.autograd.grad(model(**models.inputs(model)).loss, seen[-1])
    torch.testing.assert_close(grad, expected, rtol=1e-3, atol=1e-6)


def test_what_a_norm_gives_can_be_saved_as_before(models, tmp_path):
    _, twin, _ = adapted(models)
    inputs_trained(twin)
    hidden = twin.base_model.model.model(**models.inputs(twin)).last_hidden_state
    assert not vars(hidden) and hidden.grad_fn is not None
    torch.save(hidden, tmp_path / "hidden.pt")
    torch.testing.assert_close(torch.load(tmp_path / "hidden.pt"), hidden.detach())


def test_an_input_that_is_written_to_after_the_norm(models):
    model, twin, _ = adapted(models)

    def doubled(layer, args, kwargs):
        kwargs["hidden_states"].data.mul_(2) if "hidden_states" in kwargs else None

    for each in (model, twin):
        inputs_trained(each)
        attention_ = each.base_model.model.model.layers[1].self_attn
        attention_.register_forward_pre_hook(doubled, with_kwargs=True)
    with opfuse.options(prefer="memory"):
        assert models.worst(models.step(twin), models.step(model))[0] <= 1e-5


# What is left alone


@pytest.mark.parametrize("kind", ["VeraConfig", "LoHaConfig"])
def test_other_adapters_are_left_alone(models, kind):
    torch.manual_seed(0)
    config = getattr(peft, kind)(r=4, target_modules=["down_proj"], init_weights=False)
    model = peft.get_peft_model(models.make("llama"), config)
    twin = copy.deepcopy(model)
    report = opfuse.convert(twin)
    assert models.worst(models.step(twin), models.step(model))[0] <= 1e-5
    assert f"{LAYER}.mlp.down_proj" in {row.path for row in report.left}
    assert not any(row.path.endswith(("up_proj", "down_proj")) for row in report.converted)


def test_another_base_layer_is_called_as_it_is(models):
    model, twin, report = adapted(models, "gpt2", target_modules=["c_fc"], fan_in_fan_out=True)
    found = [row.ops for row in report.converted if row.converter == "linear layer with LoRA"]
    assert found == [APART] * 2
    assert models.worst(models.step(twin), models.step(model))[0] <= 1e-5


@pytest.mark.parametrize("mode", ["fp64", "bf16", "autocast"])
@pytest.mark.parametrize("bias", ["none", "all"])
@pytest.mark.parametrize("prefer", ["speed", "memory"])
def test_linears_with_biases_side_by_side(models, mode, bias, prefer):
    dtypes = {"fp64": torch.float64, "bf16": torch.bfloat16, "autocast": torch.float32}
    made = models.make("llama", dtypes[mode], attention_bias=True, mlp_bias=True)
    for name, param in made.named_parameters():
        if name.endswith("bias"):  # 0 at first
            torch.nn.init.uniform_(param, -1, 1)
    how = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False, "bias": bias}
    model = inputs_trained(peft.get_peft_model(made, peft.LoraConfig(**how)))
    twin = copy.deepcopy(model)
    opfuse.convert(twin)
    autocast = mode == "autocast"
    exact = models.step(copy.deepcopy(model).double())
    with opfuse.options(prefer=prefer):
        got = models.step(twin, autocast)
    whys = opfuse.converted(twin)
    assert not whys[LAYER] and whys[f"{LAYER}.self_attn"] in ("", attention.NO_NORM)
    if prefer == "memory" and util.find_spec("opfuse_mlp"):
        assert not whys[f"{LAYER}.self_attn"]
    expected = models.step(model, autocast)
    assert any("bias" in name for name in got[1]) == (bias == "all")
    assert {n: g.dtype for n, g in got[1].items()} == {n: g.dtype for n, g in expected[1].items()}
    error, theirs = models.worst(got, exact)[0], models.worst(expected, exact)[0]
    assert error <= max(1e-6, 1.3 * theirs)


@pytest.mark.parametrize("config", [{"use_rslora": True}, {"bias": "all"}, {"bias": "lora_only"}])
def test_options_of_lora(models, config):
    model, twin, _ = adapted(models, "qwen2", **config)
    got, expected = models.step(twin), models.step(model)
    assert models.worst(got, expected)[0] <= 1e-5
    assert any("bias" in name for name in got[1]) == ("bias" in config)
    assert not opfuse.converted(twin)[LAYER]


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


@pytest.fixture
def warned_of_nothing(monkeypatch):
    monkeypatch.setattr(opfuse.plugins.manager, "_warned", set())


def test_a_recipe_that_leaves_adapted_layers_unquantized_is_warned_of_once(
    models, warned_of_nothing
):
    pytest.importorskip("opfuse_fp8", reason="the recipe is that of opfuse-plugin-fp8")
    _, twin, _ = adapted(models)
    said = "Float8CurrentScaling does not quantize every linear layer .*: no recipe .* LoRA adapter"
    with opfuse.autocast("fp8-current"):
        with pytest.warns(opfuse.PluginWarning, match=said):
            models.step(twin)
        with warnings.catch_warnings():
            warnings.simplefilter("error", opfuse.PluginWarning)
            models.step(twin)


@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-delayed", "mxfp8", "nvfp4"])
def test_no_recipe_quantizes_an_adapter_beside_a_base_of_another_class(recipe, warned_of_nothing):
    """Its rank need not suit the recipe."""
    pytest.importorskip("opfuse_fp8", reason="the recipe is that of opfuse-plugin-fp8")
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D
    base = torch.nn.Sequential(conv1d(32, 64))
    config = peft.LoraConfig(r=3, target_modules=["0"], fan_in_fan_out=True)
    model = peft.get_peft_model(base, config).base_model.model
    torch.nn.init.normal_(model[0].lora_B["default"].weight)
    assert opfuse.convert(model).converted
    x = torch.randn(5, 64)
    params = [each for each in model.parameters() if each.requires_grad]
    expected = model(x)
    with pytest.warns(opfuse.PluginWarning, match="LoRA adapter"), opfuse.autocast(recipe):
        found = model(x)
    grads = [torch.autograd.grad(y.sum(), params) for y in (found, expected)]
    assert torch.equal(found, expected) and all(map(torch.equal, *grads))
