"""The projections of attention: one product, with the module's own forward around it."""

import contextlib
import copy

import pytest
import torch
from opfuse_transformers.attention import _Shared, is_attention
from torch import nn

import opfuse
from opfuse import ops


def attention(twin):
    return twin.model.layers[0].self_attn


@pytest.mark.parametrize("kind", ["eager", "sdpa", "flex_attention"])
def test_other_attention_implementations_give_the_same_step(models, kind):
    model, twin, _ = models.pair("llama")
    if kind == "flex_attention":
        pytest.skip("it compiles, which takes a minute")
    for each in (model, twin):
        each.set_attn_implementation(kind)
    assert models.worst(models.step(twin), models.step(model))[0] <= 1e-5
    assert not any(why for name, why in opfuse.converted(twin).items() if "o_proj" not in name)


def test_what_an_attention_function_sees(models):
    """The stand-in is of the module's class, has its parts, and what is written to it stays."""
    from transformers import AttentionInterface

    seen = []

    def spy(module, query, key, value, mask, **kwargs):
        seen.append(module)
        module.calls = getattr(module, "calls", 0) + 1
        linears = [part for part in module.modules() if isinstance(part, nn.Linear)]
        assert len(linears) == 4 and module.q_proj.weight is linears[0].weight
        assert query.shape[-1] == module.head_dim
        return value.repeat_interleave(2, 1).transpose(1, 2), None

    AttentionInterface.register("spy", spy)
    _, twin, _ = models.pair("llama")
    twin.set_attn_implementation("spy")
    models.step(twin), models.step(twin)
    assert attention(twin).calls == 2 and isinstance(seen[0], type(attention(twin)))
    assert not any(why for name, why in opfuse.converted(twin).items() if "o_proj" not in name)
    assert set(dict(twin.named_modules())) == set(dict(models.make("llama").named_modules()))


@pytest.mark.parametrize("change", ["hook", "replace", "dtype"])
def test_a_changed_attention_layer_falls_back_and_stays_right(models, change):
    model, twin, _ = models.pair("llama")
    for each in (model, twin):
        part = attention(each)
        if change == "hook":
            part.k_proj.register_forward_hook(lambda module, args, output: output * 2)
        elif change == "replace":
            torch.manual_seed(5)
            part.v_proj = nn.Sequential(nn.Linear(64, 32, bias=False))
        else:
            part.double()
            part.register_forward_pre_hook(
                lambda module, args, kwargs: (args, _wide(kwargs)), with_kwargs=True
            )
            part.register_forward_hook(lambda module, args, out: (out[0].float(), out[1]))
    assert models.worst(models.step(twin), models.step(model))[0] <= 1e-5
    why = opfuse.converted(twin)["model.layers.0.self_attn"]
    assert (
        why
        == {
            "hook": "k_proj has forward hooks",
            "replace": "v_proj was replaced by Sequential",
            "dtype": "",
        }[change]
    )


def _wide(kwargs):
    cos_sin = tuple(t.double() for t in kwargs["position_embeddings"])
    wide = kwargs["hidden_states"].double()
    return {**kwargs, "hidden_states": wide, "position_embeddings": cos_sin}


def test_projections_of_other_tensors_are_left_alone(models):
    """A forward that the names do not tell apart is found at its first call."""
    from transformers.models.llama import modeling_llama

    class Crossed(modeling_llama.LlamaAttention):
        def forward(self, hidden_states, position_embeddings=None, attention_mask=None, **kwargs):
            input_shape = hidden_states.shape[:-1]
            hidden_shape = (*input_shape, -1, self.head_dim)
            q = self.q_proj(hidden_states).view(hidden_shape)
            k = self.k_proj(2 * hidden_states).view(hidden_shape)
            v = self.v_proj(hidden_states).view(hidden_shape)
            assert modeling_llama.ALL_ATTENTION_FUNCTIONS is not None
            return q.sum() + k.sum() + v.sum()

    module = Crossed(models.make("llama").config, 0)
    twin = copy.deepcopy(module)
    with opfuse.options(**{"transformers.projections": "joined"}):
        assert opfuse.convert(twin).converted
    x = torch.randn(2, 3, 64)
    for _ in range(2):
        torch.testing.assert_close(twin(x), module(x))
    assert opfuse.converted(twin)[""] == "its projections are not those of one tensor"


def test_cross_attention_is_left_alone(models):
    _, _, report = models.pair("t5")
    assert not any("Attention" in row.cls for row in report.converted)


def test_without_a_recipe_they_are_not_joined(models):
    model = models.make("llama")
    twin = copy.deepcopy(model)
    opfuse.convert(twin)
    with opfuse.plugins.using("transformers"):
        assert models.worst(models.step(twin), models.step(model))[0] <= 1e-5
    why = opfuse.converted(twin)["model.layers.0.self_attn"]
    assert why == "its projections are joined under a recipe alone"


class InOneStep(opfuse.FusedOperation):
    """The backward of three linears of one input."""

    def fuser_backward(self, basic_op_ctxs, grad_output, **given):
        InOneStep.ran += 1
        return self.run_separately_backward(basic_op_ctxs, grad_output, **given)


class Adding:
    @opfuse.hookimpl
    def opfuse_backward_fusions(self):
        linear = ops.BasicLinear, opfuse.Optional(ops.Bias)
        kept = ops.MakeExtraOutput, *linear, ops.SwapExtraInput
        return [opfuse.Fusion((*kept, *kept, *linear), InOneStep)]


@pytest.fixture
def adding():
    record = opfuse.plugins.register(Adding(), name="adding", distribution="adding")
    InOneStep.ran = 0
    chained = opfuse.options(**{"transformers.projections": "chained"})
    with opfuse.plugins.using("transformers,adding"), chained:
        yield
    opfuse.plugins.remove(record)


def _hook(linear):
    linear.register_forward_hook(lambda module, args, output: output * 2)


def _write(linear):
    with torch.no_grad():
        linear.weight.mul_(2)


def _replace(linear):
    linear.weight = nn.Parameter(2 * linear.weight.detach())


CHANGES = {
    "called again": (None, contextlib.nullcontext),
    "without gradients": (None, torch.no_grad),
    "autocast": (None, lambda: torch.autocast("cpu", torch.bfloat16)),
    "other options": (None, lambda: opfuse.options(prefer="memory")),
    "a hook": (_hook, contextlib.nullcontext),
    "another weight": (_replace, contextlib.nullcontext),
    "a weight written to": (_write, contextlib.nullcontext),
    "another forward": (lambda linear: setattr(linear, "forward", torch.neg), torch.no_grad),
    "frozen": (lambda linear: linear.requires_grad_(False), contextlib.nullcontext),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_projection_that_differs_from_the_first_runs_by_itself(change):
    linears, x = [nn.Linear(4, 4) for _ in range(3)], torch.randn(2, 4)
    shared = _Shared(lambda x: [x, x + 1, x + 2], linears)
    assert shared.part(0, x) is x and torch.equal(shared.part(2, x), x + 2)
    changed, around = CHANGES[change]
    if changed is not None:
        changed(linears[1])
    with around():
        number = 0 if change == "called again" else 1
        got, expected = shared.part(number, x), linears[number](x)
    assert torch.equal(got, expected) and got.dtype is expected.dtype
    assert got.requires_grad is expected.requires_grad


def test_projections_see_a_function_that_is_replaced(models, monkeypatch, adding):
    model = models.make("llama")
    twin, linear = copy.deepcopy(model), nn.functional.linear
    for module in filter(is_attention, twin.modules()):
        opfuse.convert(module)
    monkeypatch.setattr(nn.functional, "linear", lambda x, w, b=None: 1.25 * linear(x, w, b))
    assert models.worst(models.step(twin), models.step(model))[0] <= 1e-5
    assert InOneStep.ran == 0


def test_on_the_meta_device(models):
    model = models.make("llama")
    given = models.inputs(model)["input_ids"]
    opfuse.convert(model)
    assert model.to("meta")(given.to("meta")).logits.is_meta


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "qwen2", "bert"])
def test_the_gradients_of_their_input_are_added_up_in_one_step(
    models, adding, family, dtype, autocast
):
    model = models.make(family, dtype)
    twin = copy.deepcopy(model)
    for module in filter(is_attention, twin.modules()):
        opfuse.convert(module)
    got, expected = (models.step(each, autocast=autocast) for each in (twin, model))
    fits = not (autocast and dtype is torch.float64)
    assert InOneStep.ran == 2 * fits
    half = autocast or dtype is torch.bfloat16
    most = 0.1 if half else {torch.float64: 1e-12, torch.float32: 1e-5}[dtype]
    if half and dtype is not torch.float64:  # compared with what is exact
        exact = models.step(copy.deepcopy(model).double())
        double = [
            (loss.double(), {n: g.double() for n, g in gs.items()}) for loss, gs in (got, expected)
        ]
        far, usual = (models.worst(each, exact)[0] for each in double)
        assert far <= max(1.25 * usual, most / 10)
    else:
        assert models.worst(got, expected)[0] <= most


def test_where_no_gradient_of_the_input_is_needed_the_projections_run(models, adding):
    model = models.make("llama")
    opfuse.convert(model)
    with torch.no_grad():
        model(**models.inputs(model))
    for name, param in model.named_parameters():
        param.requires_grad_("o_proj" in name or "lm_head" in name)
    model(**models.inputs(model)).loss.backward()
    assert InOneStep.ran == 1  # of the second layer
    attention(model).q_proj.requires_grad_(True)
    models.step(model)
    assert InOneStep.ran == 2


def test_hooks_and_adapters_of_a_projection_run(models, adding):
    model = models.make("llama")
    twin = copy.deepcopy(model)
    opfuse.convert(twin)
    for each in (model, twin):
        attention(each).k_proj.register_forward_hook(lambda module, args, output: output * 2)
    assert models.worst(models.step(twin), models.step(model))[0] <= 1e-5
    assert InOneStep.ran == 1


def test_an_attention_function_may_overwrite_queries_in_place(models, adding):
    """They are tensors of their own, not parts of one."""
    from transformers import AttentionInterface

    def scaled(module, query, key, value, mask, **kwargs):
        query = query.mul_(2).add_(key.repeat_interleave(2, 1))
        value.mul_(0.5)
        return (query + value.repeat_interleave(2, 1)).transpose(1, 2), None

    AttentionInterface.register("in place", scaled)
    model = models.make("llama")
    twin = copy.deepcopy(model)
    opfuse.convert(twin)
    for each in (model, twin):
        each.set_attn_implementation("in place")
    assert models.worst(models.step(twin), models.step(model))[0] <= 1e-5
    assert InOneStep.ran == 2


def test_under_a_recipe_the_projections_are_quantized(models):
    pytest.importorskip("opfuse_fp8")
    model = models.make("llama", torch.bfloat16)
    twin = copy.deepcopy(model)
    opfuse.convert(twin)
    with opfuse.autocast("fp8-current"):
        got = models.step(twin)
        report = opfuse.explain(twin, *[models.inputs(twin)["input_ids"]])
    assert 0 < abs(float(got[0] - models.step(model)[0])) < 0.1
    assert "model.layers.0.self_attn" in str(report) and "ParallelLinear" in str(report)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_so_is_the_projection_of_the_output(models, family):
    """As if it were a chain of the user's, in every product; other steps are PyTorch's."""
    pytest.importorskip("opfuse_fp8")
    model = models.make(family)
    module, x = attention(model).o_proj, torch.randn(2, 24, 64)
    twin, plain = copy.deepcopy(model), copy.deepcopy(module)
    report = opfuse.convert(twin)
    assert [row.path for row in report.converted if row.cls == "Linear"] == [
        f"model.layers.{number}.self_attn.o_proj" for number in range(2)
    ]
    chain = opfuse.Sequential(ops.BasicLinear.reading(plain))
    found = []
    for run, linear in ((attention(twin).o_proj, attention(twin).o_proj), (chain, plain)):
        leaf = x.clone().requires_grad_()
        with opfuse.autocast("fp8-current"):
            y = run(leaf)
        y.backward(x)
        found.append([y.detach(), leaf.grad, linear.weight.grad])
    assert all(map(torch.equal, *found))
    exact = torch.nn.functional.linear(x.double(), plain.weight.double())
    error = (found[0][0] - exact).norm() / exact.norm()
    assert 1e-3 < error < 0.06  # three bits of mantissa
    attention(twin).o_proj.weight.grad = None
    assert torch.equal(attention(twin).o_proj(x), module(x))  # without a recipe
    assert opfuse.converted(twin)["model.layers.0.self_attn.o_proj"].endswith("recipe alone")


@pytest.mark.parametrize(("way", "count"), [("all", 21), ("skip", 18), ("convert", 18)])
def test_the_projection_of_the_output_may_be_left_out(models, way, count):
    pytest.importorskip("opfuse_fp8")
    model = models.make("llama", num_hidden_layers=1)
    given = models.inputs(model)["input_ids"]
    opfuse.convert(model, skip="*.o_proj" if way == "convert" else ())
    with opfuse.autocast("fp8-current", skip=["*.o_proj"] if way == "skip" else []):
        report = str(opfuse.explain(model, given))
    assert f" {count} of {18 if way == 'convert' else 21} products of linear ops" in report


def test_a_changed_projection_of_the_output(models):
    pytest.importorskip("opfuse_fp8")
    model = models.make("llama")
    opfuse.convert(model)
    part, x = attention(model), torch.randn(3, 64)
    with opfuse.autocast("fp8-current"):
        once = part.o_proj(x)
        handle = part.o_proj.register_forward_hook(lambda module, args, output: output * 2)
        assert torch.equal(part.o_proj(x), 2 * once)
        handle.remove()
        part.o_proj.weight = nn.Parameter(2 * part.o_proj.weight.detach())
        assert torch.equal(part.o_proj(x), 2 * once)
        part.o_proj.forward = lambda x: x * 3
        assert torch.equal(part.o_proj(x), 3 * x)
        part.o_proj = nn.Linear(64, 64)
        expected = nn.functional.linear(x, part.o_proj.weight, part.o_proj.bias)
        assert torch.equal(part.o_proj(x), expected)
