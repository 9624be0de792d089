"""ParallelLinear: values, gradients, names, and what it refuses."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.nn.utils import parametrizations

import opfuse
from opfuse import ops

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(6,), (1, 6), (3, 6), (127, 6), (0, 6), (2, 3, 6), (2, 0, 6), (2, 3, 2, 6)]


class Conv1D(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) / 3)
        self.bias = nn.Parameter(torch.randn(outputs))


class Attention(nn.Module):
    """Holds modules, and a chain that reads them."""

    def __init__(self, make=nn.Linear, **given):
        super().__init__()
        self.q, self.k, self.v = make(6, 4), make(6, 2), make(6, 2)
        linears = {name: getattr(self, name) for name in "qkv"}
        self.chain = opfuse.Sequential(ops.ParallelLinear.reading(linears, **given))

    def forward(self, x):
        return self.chain(x)


LINEARS = {
    "no bias": lambda: {"gate": ops.BasicLinear(6, 4), "up": ops.Linear(6, 4, bias=False)},
    "bias": lambda: {"gate": nn.Linear(6, 4), "up": ops.Linear(6, 3)},
    "some": lambda: [nn.Linear(6, 4), nn.Linear(6, 2, bias=False), ops.Linear(6, 1)],
    "one": lambda: nn.ModuleList([nn.Linear(6, 4)]),
    "empty": lambda: nn.ModuleDict({"a": ops.Linear(6, 0), "b": nn.Linear(6, 3)}),
}


def reference(op):
    """The same in plain torch, by the op's parameters in fp64."""

    def run(x, params):
        names = list(dict.fromkeys(name.partition(".")[0] for name in op.param_names))
        parts = [F.linear(x, params[f"{n}.weight"], params.get(f"{n}.bias")) for n in names]
        return torch.cat(parts, -1)

    return run


@pytest.fixture
def make():
    def build(name, dtype=torch.float32):
        torch.manual_seed(0)
        return ops.ParallelLinear(LINEARS[name]()).to(dtype)

    return build


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", LINEARS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients(make, compare, name, dtype, shape):
    op = make(name, dtype)
    x = (torch.randint(-4, 5, shape) / 4).to(dtype).requires_grad_()
    for param in op.parameters():  # products without rounding in half precision
        param.data = (torch.randint(-4, 5, param.shape) / 4).to(dtype)
    grad = (torch.randint(-4, 5, (*shape[:-1], op.out_features)) / 4).to(dtype)
    compare(op, reference(op), x, grad=grad, gemm=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rounding_is_that_of_separate_linears(dtype):
    linears = [nn.Linear(32, 24, dtype=dtype), nn.Linear(32, 8, bias=False, dtype=dtype)]
    x = torch.randn(16, 32).to(dtype).requires_grad_()
    y, wanted = ops.ParallelLinear(linears)(x), torch.cat([linear(x) for linear in linears], -1)
    tolerance = {"rtol": 0, "atol": 4 * torch.finfo(dtype).eps}
    torch.testing.assert_close(y, wanted, **tolerance)
    inputs = [x, *[p for linear in linears for p in linear.parameters()]]
    grad = torch.randn_like(y)
    for got, expected in zip(
        torch.autograd.grad(y, inputs, grad), torch.autograd.grad(wanted, inputs, grad), strict=True
    ):
        size = expected.abs().max().item()
        torch.testing.assert_close(got, expected, rtol=0, atol=tolerance["atol"] * max(1, size))


@pytest.mark.parametrize("layout", ["strided", "transposed", "expanded"])
@pytest.mark.parametrize("shape", [(5, 6), (2, 5, 6)], ids=str)
def test_inputs_and_gradients_that_are_not_contiguous(make, compare, layout, shape):
    from opfuse.testing import lay_out

    op = make("some", torch.float64)
    x = lay_out(torch.randn(shape, dtype=torch.float64), layout).requires_grad_()
    grad = lay_out(torch.randn(*shape[:-1], op.out_features, dtype=torch.float64), layout)
    compare(op, reference(op), x, grad=grad)
    compare(op, reference(op), x, grad=torch.ones((), dtype=torch.float64).expand(grad.shape))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_matches_separate_linear_layers(dtype):
    linears = [nn.Linear(6, 4), nn.Linear(6, 2, bias=False)]
    op, x = ops.ParallelLinear(linears), torch.randn(3, 6).to(dtype).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y, wanted = op(x), torch.cat([linear(x) for linear in linears], -1)
    assert y.dtype is torch.bfloat16
    torch.testing.assert_close(y, wanted)
    inputs = [x, *op.parameters()]
    for got, expected, tensor in zip(
        torch.autograd.grad(y.sum(), inputs),
        torch.autograd.grad(wanted.sum(), inputs),
        inputs,
        strict=True,
    ):
        assert got.dtype is tensor.dtype
        torch.testing.assert_close(got, expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("name", ["bias", "some"])
def test_every_frozen_subset_matches_the_reference(make, compare, name):
    op = make(name, torch.float64)
    leaves = [torch.randn(3, 6, dtype=torch.float64), *op.parameters()]
    for subset in range(2 ** len(leaves)):
        for number, tensor in enumerate(leaves):
            tensor.requires_grad_(bool(subset >> number & 1))
        compare(op, reference(op), leaves[0])


@pytest.mark.parametrize(
    ("wants_x", "wants_params", "saved"),
    [
        (True, (True, True, True), ("input", "a", "b")),
        (False, (True, True, True), ("input",)),
        (True, (False, False, True), ("a", "b")),
        (False, (False, False, True), ()),
        (False, (False, True, False), ("input",)),
    ],
)
def test_only_what_the_backward_reads_is_saved(call, wants_x, wants_params, saved):
    op = ops.ParallelLinear({"a": nn.Linear(6, 4), "b": nn.Linear(6, 2, bias=False)})
    assert op.saved_names == ("input", "a.weight", "b.weight")
    x = torch.randn(3, 6)
    ran = call(op, x, input_requires_grad=wants_x, param_requires_grad=wants_params)
    values = dict(zip(("input", "a", "b"), ran.saved, strict=True))
    assert {name for name, value in values.items() if value is not None} == set(saved)
    assert values["input"] is None or values["input"].data_ptr() == x.data_ptr()
    assert values["a"] is None or values["a"].data_ptr() == op.a.weight.data_ptr()
    dx, grads, _ = ran.backward(torch.randn(3, 6))
    assert (dx is not None) == wants_x
    assert tuple(grad is not None for grad in grads) == wants_params


def test_the_products_are_written_to_their_places():
    """One buffer of the output's size, and no copy behind it."""
    op, x = ops.ParallelLinear([ops.BasicLinear(64, 64) for _ in "ab"]), torch.randn(128, 64)
    with torch.no_grad(), torch.profiler.profile(profile_memory=True) as profile:
        op(x)
    names = {event.key for event in profile.key_averages()}
    assert "aten::mm" in names and not names & {"aten::cat", "aten::copy_", "aten::resize_"}
    allocated = sum(max(event.self_cpu_memory_usage, 0) for event in profile.key_averages())
    assert 128 * 128 * 4 <= allocated < 1.5 * 128 * 128 * 4


def test_a_gated_activation_behind_it(near):
    gate, up, down = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 6)
    chain = opfuse.Sequential(
        ops.ParallelLinear({"gate_proj": gate, "up_proj": up}), ops.SwiGLU(), ops.Linear.of(down)
    )
    x = torch.randn(3, 6)
    chain(x).sum().backward()
    got = [param.grad.clone() for param in chain.parameters()]
    chain.zero_grad()
    wanted = down(F.silu(gate(x)) * up(x))
    near(chain(x), wanted, gemm=True)
    wanted.sum().backward()
    for mine, theirs in zip(got, chain.parameters(), strict=True):
        near(mine, theirs.grad, gemm=True)
    assert [name for name, _ in chain.named_parameters()][:3] == [
        "0.gate_proj.weight",
        "0.gate_proj.bias",
        "0.up_proj.weight",
    ]


def test_state_dict_exchanges_with_torch():
    theirs = nn.ModuleDict({"gate_proj": nn.Linear(6, 4), "up_proj": nn.Linear(6, 4, bias=False)})
    ours = ops.ParallelLinear({"gate_proj": ops.Linear(6, 4), "up_proj": ops.BasicLinear(6, 4)})
    assert list(ours.state_dict()) == list(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(3, 6)
    torch.testing.assert_close(ours(x), torch.cat([linear(x) for linear in theirs.values()], -1))
    theirs.load_state_dict(ours.state_dict())


def test_it_holds_the_linears_it_is_given():
    linears = [nn.Linear(6, 4), ops.Linear(6, 2)]
    op = ops.ParallelLinear(linears)
    assert list(op.children()) == linears and op.in_features == 6 and op.out_features == 6
    assert op.sizes == (4, 2) and op.biased == (True, True)
    assert [id(p) for p in op.parameters()] == [id(p) for m in linears for p in m.parameters()]
    before = op.state_dict()["0.weight"].clone()
    op.reset_parameters()
    assert not torch.equal(before, linears[0].weight)


def test_new_parameters_are_seen(make):
    op, x = make("bias"), torch.randn(3, 6)
    op(x)
    for change in (
        lambda: op.load_state_dict(
            {key: torch.randn_like(value) for key, value in op.state_dict().items()}, assign=True
        ),
        lambda: setattr(op.gate, "weight", nn.Parameter(torch.ones(4, 6))),
        lambda: setattr(op, "up", nn.Linear(6, 3)),
        lambda: parametrizations.weight_norm(op.gate),
    ):
        change()
        wanted = torch.cat([op.gate(x), op.up(x)], -1)
        for call in range(2):
            torch.testing.assert_close(op(x), wanted, msg=f"call {call}")
    op(x).sum().backward()
    assert op.gate.parametrizations.weight.original1.grad is not None


@pytest.mark.parametrize(
    "copies", [copy.deepcopy, lambda op: pickle.loads(pickle.dumps(op))], ids=["deepcopy", "pickle"]
)
def test_copies_are_independent(make, copies):
    op, x = make("some"), torch.randn(3, 6)
    y = op(x)
    twin = copies(op)
    assert torch.equal(twin(x), y)
    with torch.no_grad():
        for param in twin.parameters():
            param.zero_()
    assert not twin(x).any() and torch.equal(op(x), y)


# Reading


@pytest.mark.parametrize(
    ("linear", "given"),
    [(nn.Linear, {}), (Conv1D, {"transposed": True}), (ops.BasicLinear, {})],
    ids=["linear", "conv1d", "basic"],
)
def test_weights_that_are_read_stay_with_their_module(linear, given, near):
    model, x = Attention(linear, **given), torch.randn(2, 3, 6, requires_grad=True)
    assert next(iter(model.state_dict())) == "q.weight" and not model.chain.state_dict()
    twin = copy.deepcopy(model)
    for one in (model, twin):
        for param in one.parameters():
            param.data = torch.randn_like(param)
        x.grad = None
        one(x).square().sum().backward()
        got = {name: param.grad.clone() for name, param in one.named_parameters()} | {"x": x.grad}
        one.zero_grad()
        x.grad = None
        parts = []
        for part in (one.q, one.k, one.v):
            weight = part.weight.T if given else part.weight
            parts.append(F.linear(x, weight, getattr(part, "bias", None)))
        near(one(x), torch.cat(parts, -1), gemm=True)
        torch.cat(parts, -1).square().sum().backward()
        for name, grad in {**dict(one.named_parameters()), "x": x}.items():
            torch.testing.assert_close(got[name], grad.grad, rtol=1e-4, atol=1e-4)
    model.q.load_state_dict(
        {key: torch.zeros_like(value) for key, value in model.q.state_dict().items()}, assign=True
    )
    assert not model(x)[..., :4].any()


def test_reading_leaves_the_modules_alone():
    model = Attention()
    before = copy.deepcopy(model.state_dict())
    model.chain[0].reset_parameters()
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


# The rest of torch


@pytest.mark.costly(2)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", [*LINEARS, "reading"])
def test_a_compiled_op_gives_the_same_gradients(make, name):
    op = Attention() if name == "reading" else make(name)
    x = torch.randn(3, 6)

    def run(function):
        leaf = x.clone().requires_grad_()
        op.zero_grad()
        function(leaf).square().sum().backward()
        return [leaf.grad, *[param.grad for param in op.parameters()]]

    wanted = run(op)
    for got, expected in zip(
        run(torch.compile(op, fullgraph=True, backend="aot_eager")), wanted, strict=True
    ):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("name", LINEARS)
def test_what_autograd_and_functorch_do(make, name):
    op = make(name, torch.float64)
    x = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    with opfuse.options(double_backward=True):
        assert torch.autograd.gradcheck(op, x) and torch.autograd.gradgradcheck(op, x)
    torch.testing.assert_close(torch.func.vmap(op)(x), op(x))
    jacobian = torch.func.jacrev(op)(x)
    torch.testing.assert_close(torch.func.jacfwd(op)(x), jacobian)
    with torch.no_grad(), forward_ad.dual_level():
        dual = forward_ad.make_dual(x.detach(), torch.ones_like(x))
        tangent = forward_ad.unpack_dual(op(dual)).tangent
        assert tangent is not None or not op.out_features
        torch.testing.assert_close(tangent, jacobian.sum((-1, -2)))


def test_without_gradients_no_graph_is_recorded(make):
    op, x = make("some"), torch.randn(3, 6)
    wanted = op(x).detach()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            y = op(x)
        assert not y.requires_grad and torch.equal(y, wanted)
    op.requires_grad_(False)
    assert torch.equal(op(x), wanted) and not op(x).requires_grad


def test_an_op_built_on_meta_may_be_filled_later():
    op = ops.ParallelLinear([nn.Linear(6, 4, device="meta"), nn.Linear(6, 2, device="meta")])
    assert op(torch.empty(3, 6, device="meta")).shape == (3, 6)
    op.to_empty(device="cpu").reset_parameters()
    assert op(torch.ones(1, 6)).isfinite().all()


# What is refused


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def hooked():
    linear = nn.Linear(6, 4)
    linear.register_forward_pre_hook(lambda *args: None)
    return linear


def patched():
    linear = nn.Linear(6, 4)
    linear.forward = lambda x: x
    return linear


REFUSED = {
    "nothing": (lambda: [], ValueError, "expected at least one linear, got none"),
    "widths": (
        lambda: {"a": nn.Linear(6, 4), "b": nn.Linear(5, 4)},
        ValueError,
        "expected linears of 6 features, got 5 for b",
    ),
    "class": (lambda: [nn.Bilinear(6, 6, 4)], TypeError, "as 0, got Bilinear"),
    "subclass": (lambda: [Doubled(6, 4)], TypeError, "as 0, got Doubled"),
    "no module": (lambda: ["x"], TypeError, "as 0, got str"),
    "hooks": (lambda: {"a": hooked()}, ValueError, "linear a and does not call it, which has forw"),
    "forward": (lambda: {"a": patched()}, ValueError, "which has a forward of its own"),
    "reading": (
        lambda: [ops.BasicLinear.reading(nn.Linear(6, 4))],
        ValueError,
        "0 reads its weight from another module: ParallelLinear.reading takes that module",
    ),
    "main_grad": (
        lambda: [ops.Linear(6, 4, accumulate_into_main_grad=True)],
        ValueError,
        "0 has accumulate_into_main_grad=True, which ParallelLinear does not do",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_linears_are_refused(name):
    build, error, message = REFUSED[name]
    with pytest.raises(error, match=f"ParallelLinear.*{message}"):
        ops.ParallelLinear(build())


def test_hooks_that_come_later_are_not_lost(make):
    op, x = make("bias"), torch.randn(3, 6)
    op(x)
    handle = op.gate.register_forward_hook(lambda *args: None)
    with pytest.raises(ValueError, match="its linear gate and does not call it, which has forward"):
        op(x)
    handle.remove()
    op(x)


def test_another_class_in_its_place_is_refused(make):
    op, x = make("bias"), torch.randn(3, 6)
    op(x)
    op.gate = Doubled(6, 4)
    with pytest.raises(TypeError, match="as gate, got Doubled"):
        op(x)


def test_a_parameter_that_it_does_not_take_is_refused(make):
    op = make("no bias")
    op.up.lora = nn.Parameter(torch.ones(4))
    with pytest.raises(TypeError, match=r"has a parameter up\.lora that it does not take"):
        op(torch.randn(3, 6))


def test_dtypes_and_widths_of_a_call_are_checked(make):
    op = make("bias")
    with pytest.raises(TypeError, match="expected torch.float32, the dtype of its weight"):
        op(torch.randn(3, 6, dtype=torch.float64))
    with pytest.raises(ValueError, match="6 features in the last dimension, got shape"):
        op(torch.randn(3, 5))
    op.up.bias.data = op.up.bias.data.double()
    with pytest.raises(TypeError, match="expected torch.float64, the dtype of its bias"):
        op(torch.randn(3, 6))


def test_shapes_that_do_not_fit_are_refused_in_reading():
    module = nn.Linear(6, 4)
    module.bias = nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match=r"expected Linear.bias of shape \(4,\), got \(3,\)"):
        ops.ParallelLinear.reading([module])
    with pytest.raises(ValueError, match="expected 2 dimensions of Conv2d.weight"):
        ops.ParallelLinear.reading([nn.Conv2d(2, 2, 2)])
    with pytest.raises(AttributeError, match=r"got ReLU\.weight"):
        ops.ParallelLinear.reading({"a": nn.ReLU()})


@pytest.mark.parametrize("override", [None, "high_precision", "dequantized"])
@pytest.mark.parametrize("kind", LINEARS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_recipe_rounds_input_weights_and_gradient(register, make, kind, shape, override):
    """Input, each weight and the gradient are quantized; a bias and its gradient are not."""
    rounding = pytest.importorskip("rounding")
    register(rounding.RoundingPlugin())
    op, cast = make(kind), rounding.round_to
    x, dy = torch.randn(shape, requires_grad=True), torch.randn(*shape[:-1], op.out_features)
    with opfuse.autocast(recipe=rounding.Rounding(step=0.25, backward_override=override)):
        y = opfuse.Sequential(op)(x)
    params = dict(op.named_parameters())
    got = torch.autograd.grad(y, [x, *params.values()], dy)
    names = list(dict.fromkeys(name.partition(".")[0] for name in params))
    weights = [params[f"{name}.weight"].detach().double() for name in names]
    biases = [params.get(f"{name}.bias") for name in names]
    rows, of_y = x.detach().double().view(-1, 6), dy.double().view(-1, op.out_features)
    cast_x, cast_weights = cast(rows), [cast(weight) for weight in weights]
    parts = [cast_x @ weight.T for weight in cast_weights]
    sums = [p if b is None else p + b.double() for p, b in zip(parts, biases, strict=True)]
    torch.testing.assert_close(y.double(), torch.cat(sums, -1).view(y.shape), rtol=1e-5, atol=1e-5)
    if override != "high_precision":
        rows, weights = cast_x, cast_weights
    of_parts = (cast(of_y) if override is None else of_y).split(op.sizes, -1)
    expected = {f"{n}.weight": d.T @ rows for n, d in zip(names, of_parts, strict=True)}
    plain = of_y.split(op.sizes, -1)
    expected |= {f"{n}.bias": d.sum(0) for n, d in zip(names, plain, strict=True)}
    dx = sum(d @ weight for d, weight in zip(of_parts, weights, strict=True)).view(x.shape)
    for mine, right in zip(got, [dx, *[expected[name] for name in params]], strict=True):
        torch.testing.assert_close(mine.double(), right, rtol=1e-5, atol=1e-5)


def test_quantizers_have_a_name_for_each_weight(register, make):
    rounding = pytest.importorskip("rounding")
    register(rounding.RoundingPlugin())
    op, x = make("some"), torch.randn(3, 6, requires_grad=True)
    for frozen in ("0.weight", "1.weight"):
        dict(op.named_parameters())[frozen].requires_grad_(False)
        with opfuse.autocast(recipe=rounding.Rounding(levels=8)):
            y = op(x)
        wanted = [param for param in op.parameters() if param.requires_grad]
        grads = torch.autograd.grad(y.sum(), [x, *wanted])
        assert [grad.shape for grad in grads] == [t.shape for t in (x, *wanted)]
    states = [key for key in op.state_dict() if key.endswith(".updates")]
    names = [key.split(".")[-2] for key in states]
    assert names == ["input", "weight0", "weight1", "weight2", "grad_output"]
    assert [op.state_dict()[key].item() for key in states[:4]] == [2] * 4


@pytest.fixture
def sharing(register):
    """A recipe that gives tensors of one role one quantizer; and what it was asked."""
    rounding, asked = pytest.importorskip("rounding"), []

    class Sharing(rounding.RoundingPlugin):
        @opfuse.hookimpl
        def opfuse_quantizer(self, recipe, role, siblings):
            asked.append((role.tensor_type, len(siblings)))
            return siblings[0] if siblings else rounding.RoundingQuantizer(recipe, role)

    register(Sharing())
    return rounding, asked


@pytest.mark.parametrize("override", [None, "high_precision", "dequantized"])
@pytest.mark.parametrize("kind", LINEARS)
@pytest.mark.parametrize("shape", SHAPES)
def test_weights_that_have_one_quantizer_are_cast_as_one(sharing, make, kind, shape, override):
    """As the weight of one linear with all outputs; each keeps its parameters and their gradients."""
    rounding, asked = sharing
    op = make(kind)
    params, names = dict(op.named_parameters()), [f"weight{i}" for i in range(len(op.sizes))]
    weights = [param for name, param in params.items() if name.endswith("weight")]
    together = ops.BasicLinear(6, op.out_features)
    with torch.no_grad():
        together.weight.copy_(torch.cat(weights))
    x, dy = torch.randn(shape), torch.randn(*shape[:-1], op.out_features)
    recipe, found = rounding.Rounding(levels=8, backward_override=override), []
    for model in (op, together):
        for _ in range(2):  # with a scale that follows from all of them
            leaf = x.clone().requires_grad_()
            with opfuse.autocast(recipe=recipe):
                y = model(leaf)
            wanted = weights if model is op else [together.weight]
            dx, *dw = torch.autograd.grad(y, [leaf, *wanted], dy)
        found.append((y.detach(), dx, torch.cat(dw)))
    biases = [params.get(f"{name.rpartition('.')[0]}.bias") for name in params if "weight" in name]
    sums = [torch.zeros(n) if b is None else b for b, n in zip(biases, op.sizes, strict=True)]
    found[1] = found[1][0] + torch.cat(sums).detach(), *found[1][1:]
    for mine, right in zip(*found, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-5, atol=1e-5)
    assert asked[: len(names) + 2] == [
        ("input", 0), *[("weight", i) for i in range(len(names))], ("grad_output", 0)
    ]  # fmt: skip
    if len(names) > 1:
        made = op._quantizers.of(recipe)
        assert all(made[name] is made["weight0"] for name in names)
        assert made["weight0"].amax == max(
            w.abs().max() for w in (*weights, torch.ones(1)) if w.numel()
        )


def test_weights_that_have_one_quantizer_are_cast_anew_together(sharing, make, monkeypatch):
    """Otherwise they would have two scales, and one cast."""
    rounding, _ = sharing
    op, x, casts = make("some"), torch.randn(3, 6, requires_grad=True), []
    plain = rounding.RoundingQuantizer.quantize

    def quantize(quantizer, tensor, usage, out=None):
        if quantizer.role.tensor_type == "weight":
            casts.append((len(tensor), tuple(usage)))
        return plain(quantizer, tensor, usage, out)

    monkeypatch.setattr(rounding.RoundingQuantizer, "quantize", quantize)
    second = dict(op.named_parameters())["1.weight"]
    with opfuse.autocast(rounding.Rounding(), weights="cached"):
        first = [op(x), op(x)]
        assert len(casts) == 1 and torch.equal(*first)
        with torch.no_grad():
            second.mul_(2)
        y = op(x)
        assert len(casts) == 2 and {size for size, _ in casts} == {7}
        assert torch.equal(op(x), y) and not torch.equal(y, first[0])
        op.get_submodule("1").weight = nn.Parameter(second.detach() / 2)
        assert torch.equal(op(x), first[0]) and len(casts) == 3
    with opfuse.autocast(rounding.Rounding()):
        assert torch.equal(op(x), first[0]) and len(casts) == 4
    with opfuse.autocast(rounding.Rounding()), torch.no_grad():
        assert torch.equal(op(x), first[0]) and casts[-1] == (7, (True, False))


@pytest.mark.parametrize("way", ["held", "reading"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("outputs", [2, 8])
@pytest.mark.parametrize("grad", [True, False])
def test_a_linear_that_got_another_size_is_refused(way, bias, outputs, grad):
    linears = nn.ModuleDict({"q": nn.Linear(6, 4, bias=bias), "k": nn.Linear(6, 4, bias=bias)})
    op = ops.ParallelLinear(linears) if way == "held" else ops.ParallelLinear.reading(linears)
    op(torch.randn(3, 6))
    linears.q.weight = nn.Parameter(torch.randn(outputs, 6))
    if bias:
        linears.q.bias = nn.Parameter(torch.randn(outputs))
    says = rf"expected q\.weight of shape \(4, 6\), as when it was made, got \({outputs}, 6\)"
    with torch.set_grad_enabled(grad), pytest.raises(ValueError, match=f"ParallelLinear {says}"):
        op(torch.randn(3, 6))


def test_a_bias_that_would_be_broadcast_is_refused(make):
    op = make("bias")
    op.up.bias = nn.Parameter(torch.ones(1))
    with pytest.raises(ValueError, match=r"expected up\.bias of shape \(3,\), as when .* \(1,\)"):
        op(torch.randn(3, 6))


@pytest.mark.parametrize("way", ["held", "reading", "compiled"])
@pytest.mark.parametrize("grad", [True, False])
def test_a_bias_that_comes_later_is_refused(way, grad):
    linears = nn.ModuleDict({"a": nn.Linear(6, 4), "b": nn.Linear(6, 2, bias=False)})
    op = ops.ParallelLinear(linears) if way == "held" else ops.ParallelLinear.reading(linears)
    run = torch.compile(op, backend="eager") if way == "compiled" else op
    with torch.set_grad_enabled(grad):
        run(torch.randn(3, 6))
        linears.b.bias = nn.Parameter(torch.ones(2))
        says = "got b without a bias, and" if way == "held" else "Linear that had no bias when the"
        with pytest.raises(ValueError, match=f"ParallelLinear .*{says}.* make the op again"):
            run(torch.randn(3, 6))
        linears.b.bias = None
        run(torch.randn(3, 6))


def test_a_copy_watches_its_own_modules():
    model = Attention(ops.BasicLinear)
    twin = copy.deepcopy(model)
    model.q.bias = nn.Parameter(torch.ones(4))
    twin(torch.randn(3, 6))
    with pytest.raises(ValueError, match="reads a BasicLinear that had no bias"):
        model(torch.randn(3, 6))


@pytest.mark.parametrize("make", [ops.ParallelLinear, ops.ParallelLinear.reading])
@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        (lambda a: {1: a, "1": a}, ValueError, "names that differ, got '1' twice"),
        (lambda a: {"": a}, ValueError, "not empty and without a dot, got ''"),
        (lambda a: {"q.k": a}, ValueError, "not empty and without a dot, got 'q.k'"),
        (lambda a: {"split": a}, ValueError, "has an attribute split already: give that"),
        (lambda a: {"sizes": a}, ValueError, "has an attribute sizes already: give that"),
        (lambda a: {"_params": a, "_cache": a}, ValueError, "has an attribute _cache already"),
        (lambda a: a, TypeError, "by name or in a sequence, got Linear: put it in a list"),
        (lambda a: ops.Linear(6, 4), TypeError, "got Linear: put it in a list"),
        (lambda a: 3, TypeError, "by name or in a sequence, got int"),
    ],
)
def test_names_that_would_lose_a_linear_are_refused(make, given, error, says):
    with pytest.raises(error, match=f"ParallelLinear.*{says}"):
        make(given(nn.Linear(6, 4)))


def test_no_name_takes_the_place_of_an_attribute():
    for name in sorted(vars(ops.ParallelLinear([nn.Linear(6, 4)])).keys() | dir(nn.Module())):
        with pytest.raises(ValueError, match=f"has an attribute {name} already"):
            ops.ParallelLinear({name: nn.Linear(6, 4)})


def test_which_bias_is_read():
    linears, x = [nn.Linear(6, 4), nn.Linear(6, 2, bias=False)], torch.randn(3, 6)
    with pytest.raises(AttributeError, match="name of a bias of one of the modules, got 'bais'"):
        ops.ParallelLinear.reading(linears, bias="bais")
    op = ops.ParallelLinear.reading(linears, bias=None)
    assert op.biased == (False, False)
    torch.testing.assert_close(op(x)[:, :4], F.linear(x, linears[0].weight))
    linears[1].shift = nn.Parameter(torch.ones(2))
    assert ops.ParallelLinear.reading(linears, bias="shift").biased == (False, True)
