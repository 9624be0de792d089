"""Experts: one chain in place of a loop over them, and when the module's own forward runs."""

import copy
import inspect
import types

import pytest
import torch
import transformers

import opfuse


def experts(model):
    return model.model.layers[0].mlp.experts


@pytest.mark.parametrize(
    ("how", "act"), [("eager", "silu"), ("grouped_mm", "gelu_pytorch_tanh"), ("batched_mm", "silu")]
)
def test_each_experts_implementation_gives_the_same_step(models, how, act):
    model, twin, report = models.pair("mixtral", hidden_act=act)
    assert [row.cls for row in report.converted].count("MixtralExperts") == 2
    for each in (model, twin):
        each.set_experts_implementation(how)
    assert models.worst(models.step(twin), models.step(model))[0] <= 1e-5
    assert not any(why for name, why in opfuse.converted(twin).items() if "o_proj" not in name)


@pytest.mark.parametrize(
    ("how", "why"),
    [("eager", ""), ("batched_mm", "under autocast no chain rounds as batched_mm does")],
)
def test_products_that_know_autocast(models, how, why):
    model, twin, _ = models.pair("mixtral")
    for each in (model, twin):
        each.set_experts_implementation(how)
    expected, got = [models.step(each, autocast=True) for each in (model, twin)]
    assert models.worst(got, expected)[0] <= 0.05
    assert opfuse.converted(twin)["model.layers.0.mlp.experts"] == why


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_grouped_product_does_not_know_autocast(models, dtype):
    model, twin, _ = models.pair("mixtral")
    index, found = torch.tensor([[0, 2], [1, 2], [3, 0]]), []
    given = torch.randn(3, 64).to(dtype), torch.rand(3, 2)
    for each in (model, twin):
        x, weights = [tensor.clone().requires_grad_() for tensor in given]
        part = experts(each)
        with torch.autocast("cpu", torch.bfloat16):
            y = part(x, index, weights)
        y.float().square().sum().backward()
        found.append((y, x.grad, weights.grad, part.gate_up_proj.grad, part.down_proj.grad))
    near = 1e-5 if dtype is torch.float32 else 1e-2
    torch.testing.assert_close(*found, rtol=near, atol=near)
    assert not opfuse.converted(twin)["model.layers.0.mlp.experts"]


def test_an_expert_without_tokens_gets_zeros(models):
    model, twin, _ = models.pair("mixtral")
    part, other = experts(twin), experts(model)
    x = torch.randn(6, 64)
    index, weights = torch.tensor([[0, 2]] * 6), torch.rand(6, 2)
    for each in (part, other):
        each(x, index, weights).sum().backward()
    assert part.gate_up_proj.grad[1].abs().sum() == 0 and part.gate_up_proj.grad[0].any()
    for name in ("gate_up_proj", "down_proj"):
        torch.testing.assert_close(getattr(part, name).grad, getattr(other, name).grad)


@pytest.mark.parametrize("number", [-1, 4])
def test_the_number_of_no_expert_is_refused(models, number):
    _, twin, _ = models.pair("mixtral")
    with pytest.raises((RuntimeError, ValueError), match="non-negative|split_sizes"):
        experts(twin)(torch.randn(2, 64), torch.tensor([[0, number], [1, 2]]), torch.rand(2, 2))


def test_one_graph_has_the_chain_of_experts(models):
    _, twin, _ = models.pair("mixtral")
    given = torch.randn(6, 64), torch.tensor([[0, 2], [1, 2], [3, 0]] * 2), torch.rand(6, 2)
    with opfuse.options(chains_under_compile=True):
        compiled = torch.compile(experts(twin), backend="aot_eager", fullgraph=True)(*given)
    torch.testing.assert_close(compiled, experts(twin)(*given))


@pytest.mark.parametrize(("name", "most"), [("fp8-current", 0.15), ("nvfp4", 0.6)])
def test_experts_under_a_recipe(models, name, most):
    """Each expert is quantized, whatever its number of tokens; they are skipped by name."""
    pytest.importorskip("opfuse_fp8")
    _, twin, _ = models.pair("mixtral")
    part = experts(opfuse.assign_names(twin))
    x, index = torch.randn(7, 64), torch.tensor([[0, 2]] * 5 + [[1, 2]] * 2)
    weights, found = torch.rand(7, 2), []
    for skip in ([], ["model.layers.0.mlp.experts"]):
        given = x.clone().requires_grad_()
        with opfuse.watch_quantization() as seen, opfuse.autocast(name, skip=skip):
            y = part(given, index, weights)
        y.square().sum().backward()
        found.append((y.detach(), given.grad))
        casts = [record.casts for key, record in seen.tensors.items() if " weight" in key]
        assert sum(casts) == (0 if skip else 2 * part.num_experts)
    assert not opfuse.converted(twin)["model.layers.0.mlp.experts"]
    for quantized, plain in zip(*found, strict=True):
        assert 0 < (quantized - plain).norm() / plain.norm() < most


@pytest.mark.parametrize(
    "change, why",
    [
        ({"_is_expert_parallel": True}, "_is_expert_parallel of MixtralExperts was False"),
        ({"act_fn": torch.nn.ReLU()}, "act_fn was replaced by ReLU"),
        ({"config": "deepgemm"}, "its experts_implementation is 'deepgemm'"),
    ],
    ids=["parallel", "activation", "implementation"],
)
def test_changed_experts_fall_back_with_a_reason(models, monkeypatch, change, why):
    _, twin, _ = models.pair("mixtral")
    part = experts(twin)
    for name, value in change.items():
        if name == "config":
            value = copy.copy(part.config)
            value._experts_implementation = "deepgemm"
        setattr(part, name, value)
    given = torch.randn(3, 64), torch.tensor([[0, 1]] * 3), torch.rand(3, 2)
    try:
        part(*given)
    except Exception as error:  # theirs: there is no such kernel here
        assert "deepgemm" in f"{error} {change}".lower()
    assert opfuse.converted(twin)["model.layers.0.mlp.experts"].startswith(why)


def halves(self, both):
    return both.chunk(2, -1)[0]


@pytest.mark.parametrize("how", ["instance", "class", "code", "implementation", "original"])
def test_what_the_chain_took_over_of_the_library(models, monkeypatch, how):
    moe = pytest.importorskip("transformers.integrations.moe")
    model, twin, _ = models.pair("mixtral")
    parts = experts(model), experts(twin)
    cls = type(parts[0])
    given = torch.randn(3, 64), torch.tensor([[0, 1]] * 3), torch.rand(3, 2)
    before = parts[0](*given)
    if how == "instance":
        for part in parts:
            part._apply_gate = types.MethodType(halves, part)
    elif how == "class":
        monkeypatch.setattr(cls, "_apply_gate", halves)
    elif how == "code":
        monkeypatch.setattr(cls._apply_gate, "__code__", halves.__code__)
    elif how == "implementation":
        table = moe.ALL_EXPERTS_FUNCTIONS._global_mapping
        monkeypatch.setitem(table, "grouped_mm", lambda self, x, *unused: x * 2)
    else:
        for part in parts:
            part.config._experts_implementation = "eager"
        own = inspect.getclosurevars(cls.forward).nonlocals["original_forward"]
        monkeypatch.setattr(own, "__code__", (lambda self, x, *unused: x * 2).__code__)
    expected, got = [part(*given) for part in parts]
    assert not torch.allclose(expected, before)
    torch.testing.assert_close(got, expected)
    assert opfuse.converted(twin)["model.layers.0.mlp.experts"]


# Experts of gpt-oss and its relatives: biases, transposed matrices, clamped gates


def gpt_oss(dtype=torch.float32):
    """A model with such experts, and a converted copy."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GptOssConfig(
        num_hidden_layers=1,
        num_local_experts=4,
        num_experts_per_tok=2,
        vocab_size=32,
        hidden_size=32,
        intermediate_size=48,
        head_dim=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = transformers.GptOssForCausalLM(config).to(dtype)
    for name, param in model.named_parameters():
        if "experts" in name:
            torch.nn.init.normal_(param, std=1.0)  # some gates are beyond the limit
    twin = copy.deepcopy(model)
    report = opfuse.convert(twin)
    assert [row.cls for row in report.converted].count("GptOssExperts") == 1
    return model, twin


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("how", ["eager", "grouped_mm", "batched_mm"])
def test_experts_with_biases_and_a_clamped_gate(how, dtype):
    found = []
    for each in gpt_oss(dtype):
        each.set_experts_implementation(how)
        part = experts(each)
        torch.manual_seed(1)
        x = torch.randn(9, 32).to(dtype).requires_grad_()
        weights = torch.rand(9, 2).to(dtype).requires_grad_()
        index = torch.randint(0, 3, (9, 2))  # the last one has no token
        y = part(x, index, weights)
        y.float().square().mean().backward()
        found.append([y, x.grad, weights.grad, *[p.grad for p in part.parameters()]])
    for theirs, ours in zip(*found, strict=True):
        scale = theirs.abs().max().item()
        near = 1e-5 if dtype is torch.float32 else 3e-2
        torch.testing.assert_close(ours, theirs, rtol=0, atol=near * scale)
    assert found[0][3][3].abs().sum() == found[1][3][3].abs().sum() == 0
    assert not opfuse.converted(each)["model.layers.0.mlp.experts"]


@pytest.mark.parametrize("name", ["limit", "alpha"])
def test_another_number_of_a_clamped_gate_is_seen(name):
    model, twin = gpt_oss()
    given = torch.randn(3, 32), torch.tensor([[0, 1]] * 3), torch.rand(3, 2)
    for each in (model, twin):
        setattr(experts(each), name, 0.5)
    torch.testing.assert_close(experts(twin)(*given), experts(model)(*given))
    assert name in opfuse.converted(twin)["model.layers.0.mlp.experts"]


def plain(self, both):
    gate, up = both.chunk(2, -1)
    gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
    return self.act_fn(gate) * up


def offset(self, both):
    gate, up = both.chunk(2, -1)
    gate, up = gate.clamp(max=self.swiglu_limit), up.clamp(-self.swiglu_limit, self.swiglu_limit)
    return (up + 1) * gate * torch.sigmoid(gate * self.swiglu_alpha)


def unknown(self, both):
    gate, up = both.chunk(2, -1)
    return torch.tanh(gate.clamp(max=self.limit)) * up


def scaled(self, both):
    return plain(self, both) * self.gain


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(
    ("gate", "numbers"),
    [
        (plain, {"limit": 0.8}),
        (offset, {"swiglu_limit": 0.9, "swiglu_alpha": 1.3}),
        (unknown, {"limit": 0.8}),
        (scaled, {"limit": 0.8}),
    ],
)
def test_gates_of_relatives(gate, numbers, turned):
    moe = pytest.importorskip("transformers.integrations.moe")

    class Experts(torch.nn.Module):
        def __init__(self, config):
            super().__init__()
            self.num_experts, self.act_fn = 3, torch.nn.SiLU()
            sizes = (3, 24, 8), (3, 8, 12)
            for name, size in zip(("gate_up_proj", "down_proj"), sizes, strict=True):
                size = (size[0], *size[:0:-1]) if turned else size
                setattr(self, name, torch.nn.Parameter(torch.randn(size)))
            if gate is scaled:
                self.gain = torch.nn.Parameter(torch.ones(()))
            vars(self).update(numbers)

        _apply_gate = gate

        def forward(self, hidden_states, router_indices, routing_weights):
            raise NotImplementedError

    cls = moe.use_experts_implementation(is_transposed=turned)(Experts)
    torch.manual_seed(0)
    part = cls(types.SimpleNamespace(_experts_implementation="grouped_mm"))
    twin = copy.deepcopy(part)
    report = opfuse.convert(torch.nn.ModuleList([twin]))
    assert bool(report.converted) == (gate not in (unknown, scaled))
    found = []
    for each in (part, twin):
        x = torch.randn(5, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
        y = each(x, torch.tensor([[0, 2]] * 5), torch.full((5, 2), 0.5))
        y.square().sum().backward()
        found.append((y, x.grad, each.gate_up_proj.grad, each.down_proj.grad))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


MLA = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
}
GROUPS = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
INDEX = {"index_topk": 8, "index_head_dim": 16, "index_n_heads": 2, "head_dim": 8}
MIXTURES = {
    "DeepseekV3": {**MLA, **GROUPS},
    "DeepseekV32": {**MLA, **GROUPS, **INDEX},
    "Glm4Moe": {**GROUPS, "head_dim": 16},
    "KimiLinear": {
        **{**MLA, "q_lora_rank": None, "num_local_experts": 4, "n_group": 2},
        "layer_types": ["linear_attention", "full_attention"],
        **{"linear_head_dim": 16, "linear_num_heads": 4},
    },
    "MiniMaxM2": {"num_local_experts": 4, "head_dim": 16},
    "Qwen3Next": {
        **{"num_experts": 4, "shared_expert_intermediate_size": 32, "head_dim": 16},
        **{"linear_num_value_heads": 4, "linear_num_key_heads": 2},
        **{"linear_key_head_dim": 16, "linear_value_head_dim": 16},
        "layer_types": ["linear_attention", "full_attention"],
    },
}


@pytest.mark.parametrize("name", MIXTURES)
def test_the_routers_of_other_families(models, name):
    """Each has its own, with a bias for the choice, groups of experts, or a factor."""
    if not hasattr(transformers, f"{name}ForCausalLM"):
        pytest.skip(f"this version of transformers has no {name}")
    usual = {**models.decoder, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    config = getattr(transformers, f"{name}Config")(**{**usual, **MIXTURES[name]})
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config).double().train()
    for buffer in [b for n, b in model.named_buffers() if n.endswith("e_score_correction_bias")]:
        buffer.copy_(torch.linspace(0, 0.1, len(buffer)))
    model.set_experts_implementation("eager")  # the library's grouped product takes no fp64
    twin = copy.deepcopy(model)
    report = opfuse.convert(twin)
    assert [row.cls for row in report.converted].count(f"{name}Experts")
    expected, got = models.step(model), models.step(twin)
    # some of their operations are in fp32, whatever the dtype
    assert models.worst(got, expected)[0] <= 1e-5
    whys = opfuse.converted(twin)
    assert not any(why for path, why in whys.items() if ".mlp" in path)
