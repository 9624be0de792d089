"""opfuse.convert on modules of torch.nn and of classes that nobody knows."""

import copy
import io
import pickle
import subprocess
import sys
import threading

import opfuse_convert
import pytest
import torch
from converting import WIDTH, Gated, RootMean, an_input, assert_same
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

import opfuse
from opfuse import ops


class Straight(nn.Module):
    def __init__(self, act=None, drop=0.0):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 40), nn.Linear(40, WIDTH)
        self.act, self.drop = act or nn.GELU(), nn.Dropout(drop)

    def forward(self, x):
        return self.drop(self.down(self.act(self.up(x))))


class Functional(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 40), nn.Linear(40, WIDTH)

    def forward(self, x):
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Chunked(nn.Module):
    def __init__(self):
        super().__init__()
        self.both, self.down = nn.Linear(WIDTH, 80), nn.Linear(40, WIDTH)

    def forward(self, x):
        gate, up = self.both(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Attention(nn.Module):
    """What no graph can hold."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, mask=None):
        if mask is not None and bool(mask.any()):
            x = x + 1
        return self.inner(x), None


class Block(nn.Module):
    def __init__(self, mlp=None):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), RootMean()
        self.attention, self.mlp = Attention(), mlp or Gated()

    def forward(self, x, mask=None, **kwargs):
        y, _ = self.attention(self.norm1(x), mask=mask, **kwargs)
        x = x + y
        return x + self.mlp(self.norm2(x))


class PostNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp, self.norm = Straight(), nn.LayerNorm(WIDTH)

    def forward(self, x, residual):
        return self.norm(self.mlp(x) + residual)


class NewGELU(nn.Module):
    def forward(self, x):
        inner = 0.7978845608028654 * (x + 0.044715 * torch.pow(x, 3.0))
        return 0.5 * x * (1.0 + torch.tanh(inner))


class Clamped(nn.Module):
    def forward(self, x):
        return F.silu(x).clamp(max=7.0)


class Transposed(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) * 0.2)
        self.bias = nn.Parameter(torch.randn(outputs))

    def forward(self, x):
        shape = (*x.shape[:-1], self.weight.shape[1])
        return torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight).view(shape)


class OfTransposed(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.act = Transposed(WIDTH, 40), Transposed(40, WIDTH), NewGELU()

    def forward(self, x):
        return self.down(self.act(self.up(x)))


def sequential():
    return nn.Sequential(nn.Linear(WIDTH, 40), nn.ReLU(), nn.Linear(40, WIDTH), nn.Dropout(0.0))


MODELS = {
    "straight": (Straight, "Straight x 1 -> BasicLinear Bias GELU BasicLinear Bias"),
    "functional": (Functional, "Functional x 1 -> BasicLinear Bias GELU BasicLinear Bias"),
    "sequential": (sequential, "Sequential x 1 -> BasicLinear Bias ReLU BasicLinear Bias"),
    "gated": (Gated, "Gated x 1 -> ParallelLinear SwiGLU BasicLinear"),
    "gated with biases": (
        lambda: Gated(NewGELU(), True),
        "Gated x 1 -> ParallelLinear GEGLU BasicLinear Bias",
    ),
    "gated by erf": (lambda: Gated(nn.GELU()), "Gated x 1 -> ParallelLinear GEGLU BasicLinear"),
    "chunked": (Chunked, "Chunked x 1 -> BasicLinear Bias SwiGLU BasicLinear Bias"),
    "transposed": (OfTransposed, "OfTransposed x 1 -> BasicLinear Bias GELU BasicLinear Bias"),
    "norm": (RootMean, "RootMean x 1 -> RMSNorm"),
    "norm from zero": (lambda: RootMean(offset=1.0), "RootMean x 1 -> RMSNorm"),
    "block": (
        Block,
        "Block x 1 -> AddExtraInput MakeExtraOutput RMSNorm ParallelLinear SwiGLU BasicLinear "
        "AddExtraInput",
    ),
}


def a_model(name):
    torch.manual_seed(0)
    return MODELS[name][0]()


@pytest.mark.parametrize("name", MODELS)
def test_it_is_recognised_and_computes_the_same(name):
    model = a_model(name)
    twin, keys = copy.deepcopy(model), list(model.state_dict())
    params, cls = list(model.parameters()), type(model)
    report = opfuse.convert(model, an_input())
    assert MODELS[name][1] in str(report)
    assert "kept for the backward" in str(report)
    assert list(model.state_dict()) == keys and isinstance(model, cls)
    assert all(a is b for a, b in zip(model.parameters(), params, strict=True))
    assert type(model).__name__ == cls.__name__ and type(model) is not cls
    for rows in ((2, 5), (), (1,), (127,), (0,), (3, 1, 2)):
        assert_same(model, twin, an_input(*rows) if rows else an_input(1)[0].detach())
    assert not any(opfuse.converted(model).values())
    with torch.no_grad():
        x = an_input()
        torch.testing.assert_close(model(x), twin(x), rtol=1e-5, atol=1e-5)
    opfuse.revert(model)
    assert type(model) is cls and not opfuse.converted(model)
    assert not any("opfuse" in name for module in model.modules() for name in vars(module))


class Product(nn.Module):
    """Not one that an op computes, though with these parameters it is ``x @ weight + bias``."""

    def __init__(self, fill=0.02):
        super().__init__()
        self.weight = nn.Parameter(torch.full((WIDTH, WIDTH), fill))
        self.bias = nn.Parameter(torch.zeros(WIDTH), requires_grad=False)


class OfClamped(Product):
    def forward(self, x):
        return x @ self.weight.clamp(-0.1, 0.1)


class OfSizes(Product):
    def forward(self, x):
        return x @ torch.abs(self.weight)


class OfChangedBias(Product):
    def forward(self, x):
        return x @ self.weight + torch.tanh(self.bias)


class Subtracted(Product):
    def forward(self, x):
        return x @ self.weight - self.bias


class AddedFirst(Product):
    def forward(self, x):
        return (x + self.bias) @ self.weight


class AddedTwice(Product):
    def forward(self, x):
        return x @ self.weight + self.bias + self.bias


class Doubled(Product):
    def forward(self, x):
        y = torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight, beta=2.0)
        return y.view(x.shape)


class Halved(Product):
    def __init__(self):
        super().__init__(0.0)

    def forward(self, x):
        return x @ self.weight * 0.5


class Squeezed(Product):
    def forward(self, x):
        return (x @ self.weight).squeeze(0)


class WithoutNaN(Product):
    def forward(self, x):
        return torch.where(torch.isnan(x), torch.zeros_like(x), x) @ self.weight


@pytest.mark.parametrize("cls", Product.__subclasses__())
def test_a_product_with_more_to_it_is_no_linear_layer(cls):
    """What its parameters are now does not tell."""
    model = nn.Sequential(cls(), nn.Linear(WIDTH, 40), nn.GELU())
    twin = copy.deepcopy(model)
    report = opfuse.convert(model)
    assert f"{cls.__name__}" in str(report) and "no op computes what" in str(report)
    for each in (model, twin):
        torch.manual_seed(1)
        for param in each.parameters():
            param.data.normal_()
    assert_same(model, twin, an_input())


class BiasFirst(Product):
    def forward(self, x):
        return self.bias + x.reshape(-1, x.shape[-1]).matmul(self.weight).view(x.shape)


def test_a_product_may_be_written_in_other_ways():
    layer = BiasFirst()
    layer.weight.data.normal_()
    model = nn.Sequential(layer, nn.Linear(WIDTH, 40), nn.GELU())
    twin = copy.deepcopy(model)
    assert "-> BasicLinear Bias BasicLinear Bias GELU" in str(opfuse.convert(model))
    assert_same(model, twin, an_input())


class AtLeastZero(nn.Module):
    def forward(self, x):
        return x.clamp(min=0)


class ZeroPasses(nn.Module):
    def forward(self, x):
        return torch.where(x >= 0, x, 0.0)


class Positive(nn.Module):
    def forward(self, x):
        return torch.where(x > 0, x, 0.0)


@pytest.mark.parametrize("cls", [AtLeastZero, ZeroPasses, Positive, nn.ReLU])
def test_gradients_at_zero_are_those_of_the_module(cls):
    """The same values as ReLU, but the first two pass the gradient there, the first in torch 2.13."""
    model = nn.Sequential(nn.Linear(WIDTH, 40), cls(), nn.Linear(40, WIDTH))
    nn.init.zeros_(model[0].bias)
    twin = copy.deepcopy(model)
    report = str(opfuse.convert(model))
    assert ("ReLU" in report) or cls is not nn.ReLU
    for each in (model, twin):
        each(torch.zeros(3, WIDTH)).sum().backward()
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("how", ["bf16", "fp64", "autocast"])
def test_a_converted_model_computes_the_same_in_other_dtypes(name, how):
    model = a_model(name)
    dtype = {"bf16": torch.bfloat16, "fp64": torch.float64}.get(how, torch.float32)
    model.to(dtype)
    twin = copy.deepcopy(model)
    opfuse.convert(model)
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        rtol = 1e-6 if how == "fp64" else 4e-2
        assert_same(model, twin, an_input(dtype=dtype), rtol=rtol)


def test_an_input_of_another_dtype_than_the_parameters_is_the_modules_to_judge():
    model = a_model("norm")
    opfuse.convert(model)
    x = an_input(dtype=torch.bfloat16)
    assert model(x).dtype is torch.float32  # as the module's own operations promote it
    assert "bfloat16" in opfuse.converted(model)[""]
    with pytest.raises(RuntimeError, match="dtype"):
        gated = a_model("gated")
        opfuse.convert(gated)
        gated(x)


def test_an_activation_that_is_another_one_far_out_is_left_alone():
    report = opfuse.convert(nn.Sequential(nn.Linear(4, 4), Clamped(), nn.Linear(4, 4)))
    assert not report.converted and "no op computes what Clamped does" in str(report)


def test_an_activation_that_draws_or_differs_in_training_is_left_alone():
    class Noisy(nn.Module):
        def forward(self, x):
            return F.silu(x) + (0.1 * torch.rand_like(x) if self.training else 0)

    model = nn.Sequential(nn.Linear(4, 4), Noisy(), nn.Linear(4, 4)).eval()
    assert not opfuse.convert(model).converted


def test_under_autocast_a_residual_may_be_wider_than_what_is_added_to_it():
    model = PostNorm()
    twin = copy.deepcopy(model)
    opfuse.convert(model)
    with torch.autocast("cpu", torch.bfloat16):
        x = an_input(dtype=torch.bfloat16)
        assert_same(model, twin, x, an_input(), rtol=4e-2)
        assert model(x, an_input()).dtype is torch.float32
    assert opfuse.converted(model)[""] == ""


def test_what_is_compared_with_its_chain_may_be_in_training():
    model = Straight(NewGELU(), drop=0.5).train()
    assert opfuse.convert(model).converted and model.drop.training


def test_a_dropout_draws_and_follows_the_mode_of_its_module():
    model = Straight(drop=0.5)
    twin = copy.deepcopy(model)
    opfuse.convert(model)
    x = an_input()
    outputs = []
    for each in (model, twin):
        torch.manual_seed(3)
        outputs.append(each(x))
    assert torch.equal((outputs[0] == 0), (outputs[1] == 0)) and (outputs[0] == 0).any()
    model.eval(), twin.eval()
    assert_same(model, twin, x)
    model.train()
    model.drop.p = 0.0
    assert torch.equal(model(x), twin.train(False)(x))
    assert opfuse.converted(model)[""] == ""


def test_arguments_of_a_block_go_to_what_it_calls():
    model = a_model("block")
    twin = copy.deepcopy(model)
    opfuse.convert(model)
    x = an_input()
    assert_same(model, twin, x)
    assert_same(model, twin, x, mask=torch.ones(1))
    assert opfuse.converted(model)[""] == ""
    with pytest.raises(TypeError, match="unexpected keyword argument 'other'"):
        model(x, other=1)
    with pytest.raises(TypeError, match="missing 1 required"):
        model()


def test_a_block_of_two_inputs():
    model = PostNorm()
    twin = copy.deepcopy(model)
    report = opfuse.convert(model)
    assert "Bias AddExtraInput LayerNorm" in str(report)
    assert_same(model, twin, an_input(), an_input())
    assert_same(model, twin, an_input(), residual=an_input().detach())


@pytest.mark.parametrize("first", [True, False], ids=["norm first", "norm last"])
@pytest.mark.parametrize("act", ["relu", "gelu", NewGELU()], ids=["relu", "gelu", "unknown"])
def test_an_encoder_layer_converts_as_a_whole(first, act):
    layer = nn.TransformerEncoderLayer(
        WIDTH, 4, 40, 0.0, activation=act, batch_first=True, norm_first=first
    )
    twin = copy.deepcopy(layer)
    assert opfuse.convert(layer).converted
    x, mask = an_input(), nn.Transformer.generate_square_subsequent_mask(5)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    assert_same(layer, twin, x)
    assert_same(layer, twin, x, src_mask=mask, is_causal=True)
    assert_same(layer, twin, x, src_key_padding_mask=padding)
    assert opfuse.converted(layer)[""] == ""
    with torch.no_grad():
        layer.eval(), twin.eval()
        torch.testing.assert_close(layer(x), twin(x))  # some by the fast path of torch
    stack = nn.TransformerEncoder(twin, 2, enable_nested_tensor=False)
    other = copy.deepcopy(stack)
    assert len(opfuse.convert(stack).converted) >= 2
    assert_same(stack, other, x)


# The guard


def hook(model):
    model.up.register_forward_hook(lambda module, args, output: output + 1)


def replace(model):
    model.up = nn.Linear(WIDTH, 40)


def forward_on_instance(model):
    model.act.forward = F.relu


def another_class(model):
    class Adapter(nn.Linear):
        def forward(self, x):
            return super().forward(x) + 1

    model.up.__class__ = Adapter


def another_eps(model):
    model.act.approximate = "tanh"


def backward_hook(model):
    model.down.register_full_backward_hook(lambda module, gi, go: (gi[0] * 2,))


def a_quantized_weight(model):
    model.up.weight = nn.Parameter(model.up.weight.detach().half(), requires_grad=False)
    model.up.forward = lambda x: F.linear(x, model.up.weight.float(), model.up.bias)


def a_bias_gone(model):
    model.up.bias = None


CHANGES = {
    hook: "up has forward hooks",
    replace: "up was replaced by Linear",
    forward_on_instance: "the forward of act was replaced",
    another_class: "up is a Adapter now",
    another_eps: "approximate of GELU was 'none' and is 'tanh'",
    backward_hook: "down has backward hooks",
    a_quantized_weight: "its parameters are of torch.float32 and of torch.float16",
    a_bias_gone: "up.bias is gone",
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("when", ["before the first call", "later"])
def test_what_was_changed_runs_as_it_is_now(change, when):
    model = a_model("straight")
    twin = copy.deepcopy(model)
    opfuse.convert(model)
    if when == "later":
        assert_same(model, twin, an_input())
    for each in (model, twin):
        torch.manual_seed(5)
        change(each)
    assert_same(model, twin, an_input())
    assert CHANGES[change] in opfuse.converted(model)[""]


def test_a_class_that_gets_another_forward_runs_it(monkeypatch):
    model = a_model("gated")
    opfuse.convert(model)
    model(an_input())
    monkeypatch.setattr(Gated, "forward", lambda self, hidden: hidden * 2)
    x = an_input()
    assert torch.equal(model(x), x * 2)
    assert opfuse.converted(model)[""] == "Gated got another forward"


def test_a_parametrization_of_a_part_is_followed():
    class Double(nn.Module):
        def forward(self, weight):
            return 2 * weight

    model = a_model("gated")
    twin = copy.deepcopy(model)
    opfuse.convert(model)
    model(an_input())
    for each in (model, twin):
        parametrize.register_parametrization(each.up, "weight", Double())
    assert_same(model, twin, an_input())
    assert opfuse.converted(model)[""] == ""


def test_weights_may_be_others():
    model, twin = a_model("gated"), Gated()
    opfuse.convert(model)
    model(an_input())
    model.load_state_dict(twin.state_dict(), assign=True)
    assert_same(model, twin, an_input())
    model.double(), twin.double()
    assert_same(model, twin, an_input(dtype=torch.float64), rtol=1e-6)
    model.up.requires_grad_(False), twin.up.requires_grad_(False)
    assert_same(model, twin, an_input(dtype=torch.float64), rtol=1e-6)
    assert opfuse.converted(model)[""] == ""


def test_a_part_of_another_dtype():
    model = a_model("block")
    twin = copy.deepcopy(model)
    opfuse.convert(model)
    model.norm2.double(), twin.norm2.double()
    x = an_input()
    outputs = []
    for each in (model, twin):
        try:
            outputs.append(str(each(x)))
        except RuntimeError as error:
            outputs.append(str(error))
    assert outputs[0] == outputs[1]


# What else holds a model


def test_pickles_name_the_original_class_and_load_without_opfuse(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    opfuse.convert(model)
    torch.save(model, tmp_path / "model.pt")
    assert opfuse.converted(model)
    code = (
        "import sys, torch; sys.modules['opfuse'] = None\n"
        f"model = torch.load({str(tmp_path / 'model.pt')!r}, weights_only=False)\n"
        "assert type(model) is torch.nn.Sequential and 'opfuse' not in str(vars(model))\n"
        "model(torch.ones(2, 4))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    loaded = pickle.loads(pickle.dumps(a_converted("block")))
    assert type(loaded) is Block and not opfuse.converted(loaded)


def a_converted(name):
    model = a_model(name)
    opfuse.convert(model)
    return model


@pytest.mark.parametrize("name", MODELS)
def test_a_deep_copy_stays_converted_and_is_its_own(name):
    model = a_converted(name)
    twin = copy.deepcopy(model)
    assert list(opfuse.converted(twin)) == list(opfuse.converted(model))
    assert_same(twin, model, an_input())
    with torch.no_grad():
        next(iter(twin.parameters())).mul_(3)
    assert not torch.equal(twin(an_input()), model(an_input()))
    assert not any(opfuse.converted(twin).values())
    inference = copy.deepcopy(model)
    with torch.inference_mode():
        inference(an_input().detach())
    assert_same(inference, model, an_input())


def test_revert_takes_off_its_own_layer_alone():
    class Double(nn.Module):
        def forward(self, weight):
            return 2 * weight

    model = RootMean()
    opfuse.convert(model)
    parametrize.register_parametrization(model, "weight", Double())
    x, expected = an_input(), model(an_input())
    opfuse.revert(model)
    assert parametrize.is_parametrized(model) and isinstance(model, RootMean)
    assert "opfuse" not in str(type(model).__mro__[1].__dict__.keys())
    assert torch.equal(model(x), expected)
    parametrize.remove_parametrizations(model, "weight", leave_parametrized=False)
    assert type(model) is RootMean
    before = RootMean()
    parametrize.register_parametrization(before, "weight", Double())
    cls = type(before)
    opfuse.convert(before)
    assert opfuse.revert(before) is before and type(before) is cls


def test_revert_refuses_what_it_cannot_take_apart():
    model = RootMean()
    opfuse.convert(model)
    inner = type(model)

    class Around(inner):
        def forward(self, x):
            return super().forward(x)

    model.__class__ = Around
    with pytest.raises(RuntimeError, match="undo that first, then revert"):
        opfuse.revert(model)
    assert torch.equal(model(an_input()), RootMean.forward(model, an_input()))


def test_converting_twice_changes_nothing_more():
    model = a_converted("block")
    cls = type(model)
    report = opfuse.convert(model)
    assert not report.converted and type(model) is cls


@pytest.mark.parametrize("chains", [False, True], ids=["own forward", "chains"])
def test_compile_without_a_graph_break(chains):
    model, twin = a_converted("block"), a_model("block")
    model.attention = twin.attention = nn.Identity()
    model = nn.Sequential(a_converted("gated"), a_converted("straight"))
    twin = opfuse.revert(copy.deepcopy(model))
    torch.compiler.reset()
    with opfuse.options(chains_under_compile=chains):
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        assert_same(compiled, twin, an_input())
    torch.compiler.reset()


def test_export_and_fx_see_the_modules_themselves():
    model = a_converted("straight")
    x = an_input().detach()
    exported = torch.export.export(model, (x,)).module()
    torch.testing.assert_close(exported(x), model(x))
    assert "up" in torch.fx.symbolic_trace(model).code


def test_a_converted_model_works_under_checkpointing_and_functorch():
    model, twin = a_converted("gated"), a_model("gated")
    x = an_input()

    def run(hidden):
        return torch.utils.checkpoint.checkpoint(model, hidden, use_reentrant=False)

    for mine, theirs in zip(
        torch.autograd.grad(run(x).sum(), [x, *model.parameters()]),
        torch.autograd.grad(twin(x).sum(), [x, *twin.parameters()]),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs)
    torch.testing.assert_close(torch.vmap(model)(x), twin(x))
    _, tangent = torch.func.jvp(model, (x.detach(),), (torch.ones_like(x),))
    torch.testing.assert_close(
        tangent, torch.func.jvp(twin, (x.detach(),), (torch.ones_like(x),))[1]
    )


def test_threads_share_a_model():
    model, twin = a_converted("block"), a_model("block")
    model = copy.deepcopy(model)
    x = an_input()  # seeds are shared, too
    expected, found = twin(x), []

    def call():
        found.append(model(x))

    threads = [threading.Thread(target=call) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 6
    for y in found:
        torch.testing.assert_close(y, expected)


def test_a_model_on_meta_is_converted_and_then_loaded():
    with torch.device("meta"):
        model = Block()
    assert opfuse.convert(model).converted
    twin = a_model("block")
    model.load_state_dict(twin.state_dict(), assign=True)
    assert_same(model, twin, an_input())
    assert opfuse.converted(model)[""] == ""


def test_state_dict_after_torch_save():
    model = a_converted("gated")
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    Gated().load_state_dict(torch.load(buffer, weights_only=True))


# What is asked for


def test_only_and_skip_select_modules_by_name():
    def make():
        return nn.ModuleDict({"a": Gated(), "b": nn.ModuleDict({"c": Straight(), "d": Gated()})})

    model = make()
    assert [row.path for row in opfuse.convert(model, only="b").converted] == ["b.c", "b.d"]
    model = make()
    assert [row.path for row in opfuse.convert(model, skip=["*.d", "a"]).converted] == ["b.c"]
    for given in ({"only": "c.*"}, {"skip": ["a", "nothing"]}):
        with pytest.raises(ValueError, match="matches no module"):
            opfuse.convert(make(), **given)
    with pytest.raises(TypeError, match="dotted names"):
        opfuse.convert(make(), skip=[3])
    with pytest.raises(TypeError, match="dotted names, got 3"):
        opfuse.convert(make(), only=3)
    with pytest.raises(TypeError, match="an object that has some as attributes, got list"):
        opfuse.convert([Gated()])


def test_ops_are_called_like_what_they_read():
    model = nn.ModuleDict({"a": Straight()})
    opfuse.convert(model)
    chain = vars(model["a"])["_opfuse"].chain
    assert [op.name for op in chain if op.param_names] == ["a.up", "a.up", "a.down", "a.down"]


def test_what_is_opfuses_own_is_left_alone():
    model = nn.ModuleDict({"chain": opfuse.Sequential(ops.Linear(4, 4), nn.GELU(), Gated())})
    assert not opfuse.convert(model).converted


def test_verify_finds_a_wrong_chain():
    def build(module, env):
        chain = opfuse.Sequential(ops.BasicLinear.reading(module.up), ops.GELU())
        return opfuse_convert.Conversion(chain, ["up"], lambda module, chain, x: chain(x))

    plugin = type("Wrong", (), {})()
    plugin.opfuse_converters = opfuse.hookimpl(lambda: [opfuse_convert.Converter(Gated, build)])
    with opfuse.plugins.isolated():
        opfuse.plugins.register(plugin, name="wrong")
        report = opfuse.convert(Gated(), verify=True)
        assert not report.converted or report.converted[0].converter == "what its forward computes"
        report = opfuse.convert(Gated())
        assert report.converted[0].converter == "build"


def test_a_child_may_hold_its_parent():
    model = Gated()
    next(model.children()).owner = model
    expected = model(x := torch.randn(3, WIDTH))
    assert opfuse.convert(model).converted
    torch.testing.assert_close(model(x), expected)


class Leafless(nn.Module):
    """Its weight is its own, and nothing reads its forward."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH))

    def forward(self, x):
        return (x @ self.weight).cumsum(-1)


def a_chain(op, reads=("",), constants=()):
    return opfuse_convert.Conversion(
        opfuse.Sequential(op), reads, lambda module, chain, x: chain(x), constants=constants
    )


@pytest.mark.parametrize(
    "build, why",
    [
        (lambda module, env: "its author says no", "its author says no"),
        (lambda module, env: None, "mine gave None: expected a Conversion, or a sentence"),
        (
            lambda module, env: a_chain(ops.BasicLinear.reading(module), ["inner"]),
            "the conversion of mine reads 'inner', and Leafless has no such child",
        ),
        (
            lambda module, env: a_chain(ops.Linear(WIDTH, WIDTH)),
            "the conversion of mine has a parameter of its own, 0.weight: make its ops by reading",
        ),
        (
            lambda module, env: a_chain(ops.BasicLinear.reading(nn.Linear(WIDTH, WIDTH))),
            "the conversion of mine does not name in reads the module that has the weight of its",
        ),
        (
            lambda module, env: a_chain(ops.GELU(), constants=[("", "epss")]),
            "the conversion of mine has the constant ('', 'epss'), and Leafless has no such attr",
        ),
    ],
    ids=[
        "a sentence",
        "None",
        "no such child",
        "own parameter",
        "not in reads",
        "no such constant",
    ],
)
def test_what_a_plugins_converter_refuses_or_has_wrong_is_said(build, why):
    converter = opfuse_convert.Converter(Leafless, build, "mine")
    plugin = type("Mine", (), {})()
    plugin.opfuse_converters = opfuse.hookimpl(lambda: [converter])
    model = nn.ModuleDict({"a": Leafless(), "b": Gated()})
    with opfuse.plugins.isolated():
        opfuse.plugins.register(plugin, name="mine")
        report = opfuse.convert(model)
    assert [row.path for row in report.converted] == ["b"]
    assert f"Leafless x 1: {why}" in str(report)


def test_a_converter_need_not_look_for_a_forward_replaced_on_a_class_of_torch(monkeypatch):
    def build(module, env):
        chain = opfuse.Sequential(ops.BasicLinear.reading(module.up), ops.GELU())
        return opfuse_convert.Conversion(chain, ["up"], lambda module, chain, x: chain(x))

    plugin = type("Trusting", (), {})()
    plugin.opfuse_converters = opfuse.hookimpl(lambda: [opfuse_convert.Converter(Gated, build)])
    own = nn.Linear.forward
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: own(self, x) * 2)
    with opfuse.plugins.isolated():
        opfuse.plugins.register(plugin, name="trusting")
        report = opfuse.convert(Gated())
    assert not report.converted
    assert "Linear got another forward" in str(report)


def test_explain_names_converted_modules_and_says_what_could_be():
    model = nn.ModuleDict({"a": Gated(), "b": Gated()})
    run = lambda x: model["b"](model["a"](x))  # noqa: E731
    assert "opfuse.convert" in str(opfuse.explain(Gated(), an_input()))
    opfuse.convert(model)
    text = str(opfuse.explain(nn.Sequential(model["a"], model["b"]), an_input()))
    assert "Gated [ParallelLinear, SwiGLU, BasicLinear]" in text
    assert run(an_input()).shape == (2, 5, WIDTH)


class Plainly(nn.Module):
    """A base for forwards that a graph would not hold as they are."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 40), nn.Linear(40, WIDTH)
        self.history, self.calls, self.scale = [], 0, 1.0
        self.config = type("Config", (), {})()
        self.config.twice = False


class Counts(Plainly):
    def forward(self, x):
        self.calls += 1
        return self.down(F.relu(self.up(x)))


class Remembers(Plainly):
    def forward(self, x):
        hidden = F.relu(self.up(x))
        self.history.append(hidden)
        return self.down(hidden)


class Draws(Plainly):
    def forward(self, x):
        if torch.rand(()) < 0.5:
            return x
        return self.down(F.relu(self.up(x)))


class WithoutGradients(Plainly):
    def forward(self, x):
        with torch.no_grad():
            hidden = F.relu(self.up(x))
        return self.down(hidden)


class Decorated(Plainly):
    @torch.no_grad()
    def forward(self, x):
        return self.down(F.relu(self.up(x)))


class InFp32(Plainly):
    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return self.down(F.relu(self.up(x)))


class InPlace(Plainly):
    def forward(self, x):
        hidden = F.relu(self.up(x), inplace=True)
        hidden += 1
        return self.down(hidden)


class WithATensor(Plainly):
    def forward(self, x):
        return self.down(F.relu(self.up(x)) * torch.tensor(self.scale))


class ByGradMode(Plainly):
    def forward(self, x):
        y = self.down(F.relu(self.up(x)))
        return y if torch.is_grad_enabled() else 2 * y


class ByConfig(Plainly):
    def forward(self, x):
        y = self.down(F.relu(self.up(x)))
        return 2 * y if self.config.twice else y


BESIDE_CHAINS = [
    Counts,
    Remembers,
    Draws,
    WithoutGradients,
    Decorated,
    InFp32,
    InPlace,
    WithATensor,
]


@pytest.mark.parametrize("cls", BESIDE_CHAINS)
def test_what_a_graph_would_lose_stays_the_authors_code(cls):
    model = cls()
    twin = copy.deepcopy(model)
    opfuse.convert(model)
    assert (model.history, model.calls) == ([], 0)
    for autocast in (False, True, False):
        results = []
        for each in (model, twin):
            x = an_input()
            torch.manual_seed(3)
            with torch.autocast("cpu", enabled=autocast):
                y = each(x)
            if y.requires_grad and cls is not InPlace:  # of which PyTorch keeps the output
                y.sum().backward()
            results.append((y, x.grad, *[p.grad for p in each.parameters()], *each.history))
        for mine, theirs in zip(*results, strict=True):
            assert (mine is None) == (theirs is None)
            if mine is not None:
                close = {"rtol": 0.03, "atol": 0.03} if autocast else {}
                torch.testing.assert_close(mine, theirs, **close)
                assert mine.requires_grad == theirs.requires_grad
        assert model.calls == twin.calls
        for each in (model, twin):
            each.zero_grad(), each.history.clear()


@pytest.mark.parametrize("cls", [ByGradMode, ByConfig])
def test_what_a_forward_looks_at_is_looked_at_again(cls):
    model = cls()
    twin = copy.deepcopy(model)
    assert opfuse.convert(model).converted
    for twice in (False, True, False):
        model.config.twice = twin.config.twice = twice
        assert_same(model, twin, an_input())
        with torch.no_grad():
            torch.testing.assert_close(model(an_input()), twin(an_input()))


class Shared(nn.Module):
    """A block whose sum is needed behind the norm too, in the same chain."""

    def __init__(self):
        super().__init__()
        self.norm, self.attention = RootMean(), Attention()

    def forward(self, x, y):
        total = x + y
        return total + self.attention(self.norm(total))[0]


def test_a_residual_stays_inside_of_the_chain():
    model = Shared()
    twin = copy.deepcopy(model)
    report = opfuse.convert(model, verify=True)
    assert "Shared x 1 -> AddExtraInput MakeExtraOutput RMSNorm" in str(report)
    assert_same(model, twin, an_input(), an_input().detach())
    assert opfuse.converted(model)[""] == ""
    model.norm.register_forward_hook(lambda *_: None)
    assert_same(model, twin, an_input(), an_input())


class Output(dict):
    pass


class GivesAnOutput(Plainly):
    def forward(self, x):
        return Output(hidden=self.down(F.relu(self.up(x))))


class DropsByFunction(Plainly):
    p = 0.5

    def forward(self, x):
        hidden = F.dropout(F.relu(self.up(x)), p=self.p, training=self.training)
        return self.down(hidden)


def test_a_dict_of_a_class_of_its_own_stays_one():
    model = GivesAnOutput()
    twin = copy.deepcopy(model)
    assert opfuse.convert(model).converted
    given = model(an_input())
    assert type(given) is Output and opfuse.converted(model)[""] == ""
    torch.testing.assert_close(given["hidden"], twin(an_input())["hidden"])


def test_a_dropout_by_function_follows_the_mode_of_the_module():
    model = DropsByFunction()
    twin = copy.deepcopy(model)
    assert "ReLU Dropout BasicLinear" in str(opfuse.convert(model))
    for training in (True, False, True):
        model.train(training), twin.train(training)
        outputs = []
        for each in (model, twin):
            torch.manual_seed(4)
            outputs.append(each(an_input()))
        torch.testing.assert_close(*outputs)
        assert opfuse.converted(model)[""] == ""
    model.p = twin.p = 0.1
    torch.manual_seed(4)
    y = model(an_input())
    torch.manual_seed(4)
    torch.testing.assert_close(y, twin(an_input()))


class Decoder(nn.Module):
    """As those of transformers: what is optional is there in each call."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = RootMean(), RootMean()
        self.attention, self.mlp = Attention(), Gated()

    def forward(self, x, encoded=None):
        x = x + self.attention(self.norm1(x))[0]
        if encoded is not None:
            x = x + encoded
        return x + self.mlp(self.norm2(x))


def test_the_chain_is_for_the_way_in_which_the_module_is_called():
    model = Decoder()
    twin = copy.deepcopy(model)
    opfuse.convert(model)
    encoded = an_input().detach()
    for _ in range(2):
        assert_same(model, twin, an_input(), encoded=encoded)
        assert opfuse.converted(model)[""] == ""
    assert_same(model, twin, an_input())
    assert opfuse.converted(model)[""] == "encoded is None, and the chain is for another value"


def test_a_plugin_says_which_ops_a_module_is_within_a_longer_chain():
    from opfuse_convert import by_reading, leaf_of
    from opfuse_convert.grammar import Place
    from opfuse_convert.probing import Leaf

    class Twice(nn.Module):  # no reader knows what it does
        def __init__(self):
            super().__init__()
            self.inner, self.state = nn.Linear(6, 6, bias=False), {"factor": 2.0}

        def forward(self, x):
            return torch.ops.aten.mul(self.inner(x), self.state["factor"])

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.twice = nn.LayerNorm(6), Twice()

        def forward(self, x):
            return x + self.twice(self.norm(x))

    def leaves(module):
        if not isinstance(module, Twice):
            return leaf_of(module)
        made = [ops.BasicLinear.reading(module.inner), ops.ConstantScale(2.0)]
        return Leaf(
            made, places=[Place(module.state, "factor", 2.0, "its factor")], reads=["inner"]
        )

    model = Outer()
    assert isinstance(by_reading(model), str)  # a norm and a sum alone
    build = lambda module, env: by_reading(module, leaf_of=leaves)  # noqa: E731
    plugin = type("Mine", (), {})()
    plugin.opfuse_converters = opfuse.hookimpl(lambda: [opfuse_convert.Converter(Outer, build)])
    with opfuse.plugins.isolated():
        opfuse.plugins.register(plugin, name="mine")
        report = opfuse.convert(model)
    assert report.converted[0].ops[1:4] == ("LayerNorm", "BasicLinear", "ConstantScale")
    x = torch.randn(3, 6)
    twin = opfuse.revert(copy.deepcopy(model))
    torch.testing.assert_close(model(x), twin(x))
    assert opfuse.converted(model)[""] == ""
    for each in (model, twin):
        each.twice.state["factor"] = 3.0
    torch.testing.assert_close(model(x), twin(x))
    assert opfuse.converted(model)[""] == "its factor was 2.0 and is 3.0"
    hook = model.twice.inner.register_forward_hook(lambda module, args, y: y)
    model(x)
    assert "twice.inner has forward hooks" in opfuse.converted(model)[""]
    hook.remove()


def test_sample_inputs_may_be_given_by_name():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.mlp = Gated()

        def forward(self, hidden, *, scale=1.0):
            return self.mlp(hidden * scale)

    models = Scaled(), Scaled()
    by_place, by_name = (
        opfuse.convert(model, *inputs)
        for model, inputs in zip(
            models, [(an_input(), {"scale": 2.0}), ({"hidden": an_input(), "scale": 2.0},)], strict=True
        )
    )  # fmt: skip
    assert by_place.after == by_name.after and by_name.after.saved > 0
    with pytest.raises(TypeError, match="unexpected keyword argument 'size'"):
        opfuse.convert(Scaled(), an_input(), {"size": 2.0})


class Chosen(nn.Module):
    """An activation that its attributes choose."""

    def __init__(self, function, doubled=False):
        super().__init__()
        self.function, self.doubled = function, doubled

    def forward(self, x):
        return self.function(2 * x if self.doubled else x)


class Epsilon(nn.Module):
    """A norm that adds a number of its own, or one of an object."""

    def __init__(self, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(WIDTH)), eps

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


def test_what_differs_in_an_attribute_is_recognised_by_itself():
    given = (F.silu,), (F.relu,), (F.silu, True), (F.gelu,), (F.silu,)
    model = nn.ModuleList([Straight(Chosen(*each)) for each in given])
    model += [Epsilon(1e-6), Epsilon(1e-3), Epsilon(1e-6)]
    twin = copy.deepcopy(model)
    found = {row.path: row.ops for row in opfuse.convert(twin).converted}
    acts = [[op for op in found[str(n)] if op in ("SiLU", "ReLU", "GELU")] for n in range(5)]
    assert acts == [["SiLU"], ["ReLU"], [], ["GELU"], ["SiLU"]]
    for mine, theirs in zip(twin, model, strict=True):
        assert_same(mine, theirs, 1e-2 * an_input())


class StaysInItsMode(nn.Module):
    """Computes by its mode, which ``train()`` does not change."""

    def train(self, mode=True):
        return self

    def forward(self, x):
        return F.silu(x) if self.training else F.relu(x)


class Positive(nn.Module):
    """A linear layer where its bias is not negative."""

    def __init__(self, weight, sign):
        super().__init__()
        self.weight, self.bias = weight, nn.Parameter(sign * torch.ones(WIDTH))

    def forward(self, x):
        return x @ self.weight + self.bias.abs()


class After(nn.Module):
    """Another module, then an activation."""

    def __init__(self, first):
        super().__init__()
        self.first, self.act = first, nn.SiLU()

    def forward(self, x):
        return self.act(self.first(x))


@pytest.mark.parametrize("verify", [None, False])
@pytest.mark.parametrize("first", [0, 1])
def test_modules_that_look_alike_are_recognised_one_by_one(first, verify):
    """They have the same class, attributes and shapes, and compute different things."""
    modes = [StaysInItsMode(), StaysInItsMode()]
    vars(modes[1])["training"] = False
    weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
    for pair in (modes, [Positive(weight, 1), Positive(weight, -1)]):
        model = nn.ModuleList([After(pair[first]), After(pair[1 - first])])
        x = an_input()
        want = [each(x) for each in model]
        opfuse.convert(model, verify=verify)
        for each, expected in zip(model, want, strict=True):
            torch.testing.assert_close(each(x), expected)
