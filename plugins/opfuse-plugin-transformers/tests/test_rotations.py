"""Functions that rotate queries and keys: which are known, what a model computes, what changes."""

import copy

import opfuse_convert
import pytest
import torch
from opfuse_transformers import rotations

import opfuse
from opfuse import ops
from opfuse.report.calls import saved_bytes


class Together(opfuse.FusedOperation):
    """Rotations one after the other: what the models call is all that is tried here."""

    def fuser_forward(self, basic_op_ctxs, input_, **given):
        return self.run_separately(basic_op_ctxs, input_, **given)


class Rotating:
    @opfuse.hookimpl
    def opfuse_forward_fusions(self):
        pair = ops.ApplyRoPE, ops.SwapExtraInput, ops.ApplyRoPE
        return [opfuse.Fusion(pair, Together), opfuse.Fusion(pair[:1], Together)]


@pytest.fixture(autouse=True)
def fused():
    record = opfuse.plugins.register(Rotating(), name="rotating", distribution="rotating")
    yield
    opfuse.plugins.remove(record)


@pytest.fixture
def ran(monkeypatch):
    """The chains that ran, by their first op."""
    found = []
    one = rotations.Turning.call

    def call(self, seen, *args, **kwargs):
        result = one(self, seen, *args, **kwargs)
        found.extend(chain[0] for chain in seen[len(seen) - 1 :])
        return result

    monkeypatch.setattr(rotations.Turning, "call", call)
    return found


def halves(x):
    return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), dim=-1)


def neighbours(x):
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


def llama(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + halves(q) * sin, k * cos + halves(k) * sin


def partial(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    width = cos.shape[-1]
    turned = [x[..., :width] * cos + halves(x[..., :width]) * sin for x in (q, k)]
    return tuple(torch.cat([a, x[..., width:]], -1) for a, x in zip(turned, (q, k), strict=True))


def wide_partial(q, k, cos, sin):
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    width = cos.shape[-1]
    q_turned = q[..., :width] * cos + halves(q[..., :width]) * sin
    k_turned = k[..., :width] * cos + halves(k[..., :width]) * sin
    return torch.cat([q_turned, q[..., width:]], -1), torch.cat([k_turned, k[..., width:]], -1)


def glm(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    cos = cos[..., : cos.shape[-1] // 2].repeat_interleave(2, dim=-1)
    sin = sin[..., : sin.shape[-1] // 2].repeat_interleave(2, dim=-1)
    return q * cos + neighbours(q) * sin, k * cos + neighbours(k) * sin


def cohere(q, k, cos, sin, unsqueeze_dim=1):
    dtype, cos, sin = q.dtype, cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    q, k = q.float(), k.float()
    return (q * cos + neighbours(q) * sin).to(dtype=dtype), (k * cos + neighbours(k) * sin).to(
        dtype
    )


def pairs(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    q_a, q_b = q.chunk(2, dim=-1)
    k_a, k_b = torch.chunk(k, 2, dim=-1)
    turned = torch.cat((q_a * cos - q_b * sin, q_b * cos + q_a * sin), -1)
    return turned, torch.cat((k_a * cos - k_b * sin, k_b * cos + k_a * sin), -1)


def one(x, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return x * cos + halves(x) * sin


def vision(q, k, cos, sin):
    dtype, q, k = q.dtype, q.float(), k.float()
    cos, sin = cos.unsqueeze(-2).float(), sin.unsqueeze(-2).float()
    return (q * cos + halves(q) * sin).to(dtype), (k * cos + halves(k) * sin).to(dtype)


KNOWN = {
    llama: (1, False, "whole", False),
    wide_partial: (1, False, "whole", True),
    glm: (1, True, "first", False),
    cohere: (1, True, "whole", False),
    pairs: (1, False, "pairs", False),
    one: (1, False, "whole", False),
    vision: (2, False, "whole", False),
}


@pytest.mark.parametrize("function", KNOWN, ids=lambda function: function.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_functions_of_the_library_are_known_by_what_they_compute(function, dtype, ran):
    rotary = rotations.Rotary(function)
    turning = rotations.Turning(rotary)
    count = 1 if function is one else 2
    turn = rotary.turns[2 + count, (), 4]
    assert (turn.heads, turn.interleaved, turn.tables, turn.is_partial) == KNOWN[function]
    for of_table in (torch.float32, dtype):
        size, width = 12, 8 if turn.is_partial else 6 if turn.tables == "pairs" else 12
        shape = (2, 3, 5, size) if turn.heads == 1 else (2, 5, 3, size)
        given = [torch.randn(shape, dtype=dtype, requires_grad=True) for _ in range(count)]
        tables = [torch.randn(2, 5, width).to(of_table) for _ in range(2)]
        results = []
        for run in (lambda *args: turning.call([], *args), function):
            ys = run(*given, *tables)
            ys = ys if isinstance(ys, tuple) else (ys,)
            dys = [torch.ones_like(y) for y in ys]
            results.append([*ys, *torch.autograd.grad(ys, given, dys)])
        for got, expected in zip(*results, strict=True):
            assert got.shape == expected.shape
            torch.testing.assert_close(got, expected, atol=0.05 if dtype is torch.bfloat16 else 1e-5, rtol=0.02)  # fmt: skip
    assert len(ran) == 2


def clipped(q, k, cos, sin):
    q, k = llama(q, k, cos, sin)
    return q.clamp(-100, 100), k


def scaled(q, k, cos, sin):
    return llama(q * 1.0000001, k, cos, sin)


def backwards(q, k, cos, sin):
    return llama(q, k, cos, -sin)


def keys_alone(q, k, cos, sin):
    return q, llama(q, k, cos, sin)[1]


def fixed(q, k, cos, sin):
    return llama(q, k, cos, sin) if q.shape[-1] < 64 else (q, k)


def woven(q, k, cos, sin):
    """Neighbours come in and halves go out."""
    cos, sin = (
        cos[..., : cos.shape[-1] // 2].unsqueeze(1),
        sin[..., : sin.shape[-1] // 2].unsqueeze(1),
    )
    q_a, q_b, k_a, k_b = q[..., 0::2], q[..., 1::2], k[..., 0::2], k[..., 1::2]
    turned = torch.cat([q_a * cos - q_b * sin, q_b * cos + q_a * sin], dim=-1)
    return turned, torch.cat([k_a * cos - k_b * sin, k_b * cos + k_a * sin], dim=-1)


COUNT = []


def counting(q, k, cos, sin):
    COUNT.append(1)
    return llama(q, k, cos, sin)


def trailing(q, k, cos, sin, **kwargs):
    return llama(q, k, cos, sin)


@pytest.mark.parametrize(
    "function",
    [clipped, scaled, backwards, keys_alone, fixed, woven, counting, trailing],
    ids=lambda function: function.__name__,
)
def test_what_computes_something_else_is_left_alone(function):
    assert not rotations.Rotary(function).turns
    assert not COUNT


@pytest.mark.parametrize(
    "change",
    ["more heads of keys", "one sequence of tables", "decoding", "trained", "wide", "too long"],
)
def test_calls_of_other_shapes(change, ran):
    turning, lead = rotations.Turning(rotations.Rotary(llama)), (2, 5)
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 1, 5, 8)
    cos, sin = torch.randn(2, *lead, 8)
    if change == "one sequence of tables":
        cos, sin = cos[:1], sin[:1]
    elif change == "decoding":
        q, k, cos, sin = q[:, :, :1], k[:, :, :1], cos[:, :1], sin[:, :1]
    elif change == "trained":
        cos.requires_grad_()
    elif change == "wide":
        q, k, cos, sin = q.double(), k.double(), cos.double(), sin.double()
    elif change == "too long":
        q = q[:, :, :1]
    assert len(ran) == 0
    for got, expected in zip(turning.call([], q, k, cos, sin), llama(q, k, cos, sin), strict=True):
        torch.testing.assert_close(got, expected)
    assert len(ran) == (change in ("more heads of keys", "one sequence of tables", "decoding"))


def paths(report):
    return [row.path for row in report.converted if "ApplyRoPE" in row.ops]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(
    "family", ["llama", "mistral", "qwen2", "qwen3", "gemma", "phi3", "mixtral", "qwen3_moe"]
)
def test_models_rotate_by_chains(models, ran, family, autocast):
    model = models.make(family)
    twin = copy.deepcopy(model)
    assert len(paths(opfuse.convert(twin, only="*self_attn"))) == 2
    got, expected = models.step(twin, autocast), models.step(model, autocast)
    assert models.worst(got, expected)[0] <= (2e-2 if autocast else 1e-5)
    told = opfuse.converted(twin)
    assert len(ran) == 2 and not any(told[path] for path in told if path.endswith("self_attn"))


def test_with_a_cache_and_positions_of_a_packed_batch(models, ran):
    model = models.make("llama").eval()
    twin = copy.deepcopy(model)
    opfuse.convert(twin)
    ids = models.inputs(model)["input_ids"]
    positions = torch.cat([torch.arange(10), torch.arange(14)]).expand(2, -1)
    for each in ({}, {"position_ids": positions}):
        torch.testing.assert_close(twin(ids, **each).logits, model(ids, **each).logits)
    settings = {"max_new_tokens": 5, "do_sample": False}
    assert torch.equal(twin.generate(ids, **settings), model.generate(ids, **settings))
    assert len(ran) > 10


@pytest.mark.parametrize("kind", ["theta", "scaling", "function", "helper", "forward", "revert"])
def test_what_changes_after_conversion(models, ran, kind, monkeypatch):
    from transformers.models.llama import modeling_llama as home

    model = models.make("llama")
    twin = copy.deepcopy(model)
    opfuse.convert(twin)
    models.step(twin)
    assert len(ran) == 2
    for each in (model, twin):
        if kind == "theta":
            each.model.rotary_emb.inv_freq.mul_(0.5)
        elif kind == "scaling":
            each.model.rotary_emb.attention_scaling = 2.0
    if kind == "function":
        monkeypatch.setattr(home, "apply_rotary_pos_emb", lambda q, k, *args, **kwargs: (q, k))
    elif kind == "helper":
        monkeypatch.setattr(home, "rotate_half", lambda x: x)
    elif kind == "forward":
        of_class = home.LlamaAttention.forward
        monkeypatch.setattr(home.LlamaAttention, "forward", lambda *a, **k: of_class(*a, **k))
    elif kind == "revert":
        opfuse_convert.revert(twin)
    ran.clear()
    assert models.worst(models.step(twin), models.step(model))[0] <= 1e-5
    assert len(ran) == (2 if kind in ("theta", "scaling") else 0)
    if kind in ("function", "helper"):
        why = opfuse.converted(twin)["model.layers.0.self_attn"]
        assert why.endswith("was replaced by function") or "code" in why


def test_a_name_that_stands_for_something_else_is_left_alone(models, monkeypatch):
    from transformers.models.llama import modeling_llama as home

    monkeypatch.setattr(home, "rotate_half", lambda x: x)
    assert not paths(opfuse.convert(models.make("llama")))


class Gated(torch.nn.Module):
    """Attention without its product: a gate that a chain replaces, and a rotation."""

    def __init__(self):
        super().__init__()
        self.head_dim = 8
        self.gate, self.act = torch.nn.Linear(8, 8), torch.nn.SiLU()

    def forward(self, x, cos, sin):
        q = self.act(self.gate(x))
        q, k = llama(q, x, cos, sin)
        return q + k


def test_a_forward_with_other_chains_has_both(ran):
    module = Gated()
    twin = copy.deepcopy(module)
    report = opfuse.convert(twin)
    assert next(row.ops for row in report.converted)[:2] == ("BasicLinear", "Bias")
    x, cos, sin = torch.randn(2, 3, 5, 8, requires_grad=True), *torch.randn(2, 2, 5, 8)
    results = []
    for each in (module, twin):
        y = each(x, cos, sin)
        results.append([y, *torch.autograd.grad(y.square().sum(), [x, *each.parameters()])])
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected)
    assert len(ran) == 1 and opfuse.converted(twin) == {"": ""}


class Functions(dict):
    """Stands for the library's functions of attention, which are known by their name alone."""

    def get_interface(self, name, default):
        return self.get(name, default)


def attention(module, query, key, value, factor=1.0):
    module.seen = value
    weights = (query @ key.transpose(-1, -2)).softmax(-1)
    return weights @ value * factor


ALL_ATTENTION_FUNCTIONS = Functions(ours=attention)


class Packed(torch.nn.Module):
    """One product gives queries, keys and values."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.head_dim = kind, 8
        self.product = torch.nn.Linear(8, 24)
        self.norm = torch.nn.LayerNorm(8)

    def forward(self, x, cos, sin):
        q, k, v = self.product(x).chunk(3, -1)
        if self.kind == "normed":
            q, k = self.norm(q), self.norm(k)
        if self.kind == "used":
            q, _ = llama(q, k, cos, sin)
        else:
            q, k = llama(q, k, cos, sin)
        if self.kind == "by key":
            return ALL_ATTENTION_FUNCTIONS["ours"](self, q, k, v, factor=2.0)
        if self.kind == "by name":
            given = {"query": q, "key": k, "value": v}
            return ALL_ATTENTION_FUNCTIONS["ours"](module=self, factor=2.0, **given)
        assert "ours" in ALL_ATTENTION_FUNCTIONS and len(ALL_ATTENTION_FUNCTIONS) == 1
        return ALL_ATTENTION_FUNCTIONS.get_interface("ours", None)(self, q, k, v, 2.0)


@pytest.mark.parametrize(
    "kind", ["plain", "by key", "by name", "normed", "used", "frozen", "no grad"]
)
def test_values_keep_no_rotated_queries_and_keys(ran, kind):
    """They are copied, unless something else keeps the memory in which they are."""
    module, results = Packed(kind).requires_grad_(kind != "frozen"), []
    module.norm.requires_grad_(True)
    twin = copy.deepcopy(module)
    opfuse.convert(twin)
    x, cos, sin = torch.randn(2, 3, 5, 8), *torch.randn(2, 2, 5, 8)
    with torch.set_grad_enabled(kind != "no grad"):
        for each in (module, twin):
            y = each(x, cos, sin)
            if y.requires_grad:
                y.square().sum().backward()
            results.append([y.detach(), *[param.grad for param in each.product.parameters()]])
    torch.testing.assert_close(*results)
    assert len(ran) == 1 and module.seen._is_view()
    assert twin.seen._is_view() == (kind not in ("plain", "by key"))


@pytest.mark.parametrize("family", ["phi3", "modernbert"])
def test_models_keep_no_rotated_queries_and_keys(models, ran, monkeypatch, family):
    sizes = models.families["bert"][2] | {f"{key}_token_id": 0 for key in ("bos", "eos", "cls")}
    made = "ModernBertForMaskedLM", "ModernBertConfig", sizes | {"sep_token_id": 0}
    monkeypatch.setitem(models.families, "modernbert", made)
    model = models.make(family)
    model.config.use_cache = False  # a cache keeps copies
    twin, given = copy.deepcopy(model), models.inputs(model)
    assert models.worst(models.step(twin), models.step(model))[0] <= 1e-5
    before = saved_bytes(lambda: twin(**given), twin.parameters())
    opfuse.convert(twin, only="*attn")
    assert models.worst(models.step(twin), models.step(model))[0] <= 1e-5
    rows, layers = given["input_ids"].numel(), model.config.num_hidden_layers
    turned = 4 * 16 + (2 if family == "phi3" else 4) * 16
    after = saved_bytes(lambda: twin(**given), twin.parameters())
    assert before - after >= layers * 4 * rows * turned and ran


COUNTED = 0


def test_a_forward_that_sets_globals_is_left_alone(models):
    class Counting(type(models.make("llama").model.layers[0].self_attn)):
        def forward(self, q, k, cos, sin):
            global COUNTED
            COUNTED += 1
            return llama(q, k, cos, sin)

    assert not rotations.Rotations(Counting(models.make("llama").config, 0)).found


def test_transforms_of_functions_run_the_function(ran):
    turning = rotations.Turning(rotations.Rotary(llama))
    q, k, cos, sin = *torch.randn(2, 3, 1, 4, 5, 8), *torch.randn(2, 1, 5, 8)
    mapped = torch.vmap(lambda q, k: turning.call([], q, k, cos, sin))(q, k)
    for got, expected in zip(mapped, llama(q[:, 0], k[:, 0], cos, sin), strict=True):
        torch.testing.assert_close(got[:, 0], expected)
    assert not ran


def test_a_renamed_function_keeps_its_defaults_and_variables():
    number = 5

    def function(x, *, more=2):
        return x + more + number + len(str(x))

    made = rotations.renamed(function, {"len": lambda text: 100})
    assert (made(1), made(1, more=3), function(1)) == (108, 109, 9)


def test_layers_have_chains_of_their_own(models):
    twin = models.make("phi3")
    opfuse.convert(twin)
    first, second = (layer.self_attn._opfuse.chain for layer in twin.model.layers)
    assert first is not second and first[0].name != second[0].name


def test_no_plugin_fuses_them_and_the_report_says_so(models, ran):
    model = models.make("phi3")
    twin = copy.deepcopy(model)
    opfuse.convert(twin)
    with opfuse.plugins.using(""):
        models.step(twin)
    assert opfuse.converted(twin)["model.layers.0.self_attn"] == rotations.UNFUSED and not ran
