"""Ops over other modules' parameters: ``reading`` (at every call) and ``of`` (the same Parameters)."""

import copy
import pickle

import fusing
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize

import opfuse
from opfuse import ops

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(6,), (1, 6), (3, 6), (127, 6), (0, 6), (2, 3, 6), (2, 3, 2, 6)]


class Conv1D(nn.Module):
    """GPT-2's linear layer: its weight is (in, out)."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) / 3)
        self.bias = nn.Parameter(torch.randn(outputs))

    def forward(self, x):
        return x @ self.weight + self.bias


class LlamaNorm(nn.Module):
    """A norm as transformers has it."""

    def __init__(self, size, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size))
        self.variance_epsilon = eps

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 0.1)


class GemmaNorm(LlamaNorm):
    """One whose weight is centered around zero."""

    def forward(self, x):
        return (1 + self.weight) * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 0.1)


def linear(module, **given):
    return [ops.BasicLinear.reading(module, **given), ops.Bias.reading(module)]


# name: (the module, the ops that read it)
READERS = {
    "linear": (lambda: nn.Linear(6, 5), linear),
    "linear without bias": (
        lambda: nn.Linear(6, 5, bias=False),
        lambda m: [ops.BasicLinear.reading(m)],
    ),
    "conv1d": (lambda: Conv1D(6, 5), lambda m: linear(m, transposed=True)),
    "linear of opfuse": (lambda: ops.Linear(6, 5), linear),
    "bias": (lambda: ops.Bias(6), lambda m: [ops.Bias.reading(m)]),
    "layernorm": (lambda: nn.LayerNorm(6), lambda m: [ops.LayerNorm.reading(m)]),
    "layernorm without bias": (
        lambda: nn.LayerNorm(6, bias=False, eps=0.1),
        lambda m: [ops.LayerNorm.reading(m)],
    ),
    "rmsnorm": (lambda: nn.RMSNorm(6, eps=0.1), lambda m: [ops.RMSNorm.reading(m)]),
    "llama": (lambda: LlamaNorm(6, 0.1), lambda m: [ops.RMSNorm.reading(m)]),
    "gemma": (
        lambda: GemmaNorm(6, 0.1),
        lambda m: [ops.RMSNorm.reading(m, zero_centered_gamma=True)],
    ),
}


class Model(nn.Module):
    """Holds both, the chain first or last."""

    def __init__(self, name, chain_first=False):
        super().__init__()
        build, read = READERS[name]
        module = build()
        for param in module.parameters():
            nn.init.normal_(param, std=0.5)
        chain = opfuse.Sequential(*read(module))
        for key in ("chain", "module") if chain_first else ("module", "chain"):
            self.add_module(key, {"chain": chain, "module": module}[key])

    def forward(self, x):
        return self.chain(x)


def run(model, x, module=None):
    """Output and gradients, those of the parameters by name; the incoming gradient is never rounded."""
    x, module = x.detach().requires_grad_(), module or model.module
    module.zero_grad()
    y = model(x)
    y.backward((torch.arange(y.numel()) % 5 - 2.0).reshape(y.shape).to(y.dtype))
    grads = {name: param.grad for name, param in module.named_parameters()}
    return {"output": y.detach(), "input": x.grad, **grads}


def compare(got, wanted, dtype=torch.float32):
    """Hold against the wanted values, with a few roundings of ``dtype`` at their size."""
    assert got.keys() == wanted.keys()
    for name, expected in wanted.items():
        if expected is None or got[name] is None:
            assert expected is got[name], name
            continue
        assert got[name].shape == expected.shape, name
        size = expected.abs().max().clamp(min=1).item() if expected.numel() else 1
        torch.testing.assert_close(
            got[name].double(), expected.double(), rtol=0, atol=8 * torch.finfo(dtype).eps * size
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", READERS)
def test_values_and_gradients_match_the_module(name, dtype):
    model = Model(name).to(dtype)
    exact = copy.deepcopy(model.module).double()
    for shape in SHAPES:
        x = torch.randn(shape, dtype=torch.float64).to(dtype)
        wanted = run(exact, x.double(), exact)
        got = run(model, x)
        assert {value.dtype for value in got.values()} == {dtype}
        compare(got, wanted, dtype)


@pytest.mark.parametrize("name", READERS)
def test_inputs_that_are_not_contiguous(name):
    model = Model(name).double()
    x = torch.randn(6, 4, 3, dtype=torch.float64).transpose(0, 2)
    compare(run(model, x), run(model.module, x, model.module))


@pytest.mark.parametrize("name", READERS)
def test_nothing_is_registered_twice(name):
    model = Model(name)
    assert not list(model.chain.parameters()) and not model.chain.state_dict()
    assert not any(name.startswith("chain") for name in model.state_dict())
    assert model.module not in list(model.chain.modules())
    expected = list(model.module.parameters())
    assert [id(p) for p in model.parameters()] == [id(p) for p in expected]


@pytest.mark.parametrize("name", READERS)
def test_autocast_matches_the_module(name):
    model = Model(name)
    x = torch.randn(3, 6)
    with torch.autocast("cpu", torch.bfloat16):
        got = run(model, x)
        module = run(model.module, x, model.module)
    assert (got["output"].dtype is torch.bfloat16) == ("linear" in name or "conv" in name)
    compare(got, module, torch.bfloat16)


@pytest.mark.parametrize("name", READERS)
def test_frozen_and_no_grad(name):
    model, x = Model(name), torch.randn(3, 6)
    with torch.no_grad():
        assert not model(x).requires_grad
    model.module.requires_grad_(False)
    assert not model(x).requires_grad
    for param in model.module.parameters():  # one alone needs a gradient
        param.requires_grad_(True)
        model(x).sum().backward()
        assert [p.grad is not None for p in model.module.parameters()] == [
            p is param for p in model.module.parameters()
        ]
        param.grad = None
        param.requires_grad_(False)


# The value of the moment


@pytest.mark.parametrize("name", READERS)
def test_new_parameters_are_seen(name):
    model, x = Model(name), torch.randn(3, 6, dtype=torch.float64)
    model(x.float())
    other = {key: torch.randn_like(value) for key, value in model.module.state_dict().items()}
    model.module.load_state_dict(other, assign=True)
    compare(run(model, x.float()), run(model.module, x.float(), model.module))
    model.to(torch.float64)
    compare(run(model, x), run(model.module, x, model.module))
    for key in dict(model.module.named_parameters()):
        setattr(model.module, key, nn.Parameter(torch.randn_like(getattr(model.module, key))))
    compare(run(model, x), run(model.module, x, model.module))


@pytest.mark.parametrize("name", ["linear", "conv1d"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_parametrization_of_the_module_is_followed(name, when):
    module, x = READERS[name][0](), torch.randn(3, 6)
    if when == "before":
        parametrizations.weight_norm(module)
    chain = opfuse.Sequential(*READERS[name][1](module))
    chain(x)
    if when == "after":
        parametrizations.weight_norm(module)
    got = run(chain, x, module)
    assert "parametrizations.weight.original1" in got
    compare(got, run(module, x, module))
    parametrize.remove_parametrizations(module, "weight")
    compare(run(chain, x, module), run(module, x, module))


def test_a_parameter_that_is_gone():
    model = Model("linear")
    model(torch.ones(1, 6))
    model.module.bias = None
    with pytest.raises(TypeError, match="expected a tensor as Linear.bias, got None"):
        model(torch.ones(1, 6))


def test_a_tied_weight_gets_both_gradients(near):
    embedding = nn.Embedding(7, 6)
    head = opfuse.Sequential(ops.BasicLinear.reading(embedding))
    tokens = torch.tensor([1, 2, 2])
    head(embedding(tokens)).square().sum().backward()
    weight = embedding.weight.detach().requires_grad_()
    F.linear(F.embedding(tokens, weight), weight).square().sum().backward()
    near(embedding.weight.grad, weight.grad, gemm=True)


def test_a_parameter_of_any_name_may_be_read():
    module = nn.MultiheadAttention(6, 2)
    chain = opfuse.Sequential(
        ops.BasicLinear.reading(module, "in_proj_weight"), ops.Bias.reading(module, "in_proj_bias")
    )
    x = torch.randn(3, 6)
    torch.testing.assert_close(chain(x), F.linear(x, module.in_proj_weight, module.in_proj_bias))


def test_a_buffer_is_read_and_gets_no_gradient():
    module = nn.Module()
    module.register_buffer("weight", torch.randn(5, 6))
    chain, x = opfuse.Sequential(ops.BasicLinear.reading(module)), torch.randn(3, 6)
    torch.testing.assert_close(chain(x), x @ module.weight.T)
    module.weight = torch.ones(5, 6)
    torch.testing.assert_close(chain(x), x @ module.weight.T)


# Copies


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda model: pickle.loads(pickle.dumps(model))}


@pytest.mark.parametrize("chain_first", [False, True])
@pytest.mark.parametrize("copies", COPIES)
@pytest.mark.parametrize("name", READERS)
def test_a_copy_reads_the_copied_module(name, copies, chain_first):
    model, x = Model(name, chain_first), torch.randn(3, 6)
    before = run(model, x)
    twin = COPIES[copies](model)
    assert {id(op.param_source(key)[0]) for op in twin.chain for key in op.param_names} == {
        id(twin.module)
    }
    compare(run(twin, x), before)
    with torch.no_grad():
        for param in twin.module.parameters():
            param.zero_()
    compare(run(twin, x), run(twin.module, x, twin.module))
    compare(run(model, x), before)


def test_a_shallow_copy_reads_the_same_module():
    model, x = Model("linear"), torch.randn(3, 6)
    twin = opfuse.Sequential(*[copy.copy(op) for op in model.chain])
    model.module.weight = nn.Parameter(torch.ones(5, 6))
    assert torch.equal(twin(x), model(x))


def test_a_chain_inside_the_module_that_it_reads():
    class Own(nn.Linear):
        def __init__(self):
            super().__init__(6, 5)
            self.chain = opfuse.Sequential(*linear(self))

        def forward(self, x):
            return self.chain(x)

    model, x = Own(), torch.randn(3, 6)
    twin = copy.deepcopy(model)
    model.weight = nn.Parameter(torch.zeros(5, 6))
    assert torch.equal(model(x), model.bias.expand(3, 5)) and not torch.equal(twin(x), model(x))
    assert list(twin.state_dict()) == ["weight", "bias"]


# The rest of torch


@pytest.mark.costly(4)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", READERS)
def test_a_compiled_chain_reads_the_current_parameters(name):
    model, x = Model(name), torch.randn(3, 6)
    wanted = run(model, x)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    compare(run(compiled, x, model.module), wanted)
    for param in model.module.parameters():
        param.data = param.data * 2
    compare(run(compiled, x, model.module), run(model, x))
    model.module.load_state_dict(
        {key: torch.ones_like(value) for key, value in model.module.state_dict().items()},
        assign=True,
    )
    compare(run(compiled, x, model.module), run(model, x))


@pytest.mark.parametrize("name", READERS)
def test_second_derivatives_and_functorch(name):
    model = Model(name).double()
    x = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    with opfuse.options(double_backward=True):
        assert torch.autograd.gradgradcheck(model, x)
    params = dict(model.named_parameters())

    def loss(params):
        return torch.func.functional_call(model, params, x.detach()).square().sum()

    grads = torch.func.grad(loss)(params)
    loss(params).backward()
    for key, param in params.items():
        torch.testing.assert_close(grads[key], param.grad)


@pytest.mark.parametrize("variant", ["fused", "joint"])
@pytest.mark.parametrize("name", ["linear", "conv1d"])
def test_fusions_take_them_as_any_op(name, variant):
    model, x = Model(name), torch.randn(3, 6)
    model.chain.append(ops.GELU())
    wanted = run(model, x)
    with fusing.fusions(variant):
        compare(run(model, x), wanted)
        (fuser,) = model.chain._module_groups
        assert len(fuser._forward_ops) < 3 and len(fuser._backward_ops) < 3


def test_main_grad_of_the_module_is_accumulated(near):
    module, x = nn.Linear(6, 5, bias=False), torch.randn(3, 6)
    module.weight.main_grad = torch.ones(5, 6)
    op = ops.BasicLinear.reading(module, accumulate_into_main_grad=True)
    op(x).sum().backward()
    near(module.weight.main_grad, 1 + torch.ones(5, 3) @ x, gemm=True)
    assert module.weight.grad is None
    with pytest.raises(ValueError, match="main_grad has the shape of a Parameter"):
        ops.BasicLinear.reading(Conv1D(6, 5), transposed=True, accumulate_into_main_grad=True)


@pytest.mark.parametrize("name", READERS)
def test_resetting_it_leaves_the_module_alone(name):
    model = Model(name)
    before = copy.deepcopy(model.module.state_dict())
    for op in model.chain:
        op.reset_parameters()
    for key, value in model.module.state_dict().items():
        assert torch.equal(value, before[key])


def test_devices_and_dtypes_are_checked():
    model = Model("linear")
    with pytest.raises(TypeError, match=r"expected torch.float32, the dtype of its weight"):
        model(torch.randn(3, 6, dtype=torch.float64))
    model.module.to("meta")
    with pytest.raises(ValueError, match="has its weight on meta, the input is on cpu"):
        model(torch.randn(3, 6))


# What is refused


def test_a_parameter_is_set_on_its_module():
    op = ops.BasicLinear.reading(nn.Linear(6, 5))
    with pytest.raises(RuntimeError, match="the parameter of its Linear: set it there"):
        op.weight = nn.Parameter(torch.ones(5, 6))


def test_a_parameter_that_it_does_not_take_is_refused():
    op = ops.BasicLinear.reading(nn.Linear(6, 5))
    op.lora = nn.Parameter(torch.ones(5))
    with pytest.raises(TypeError, match="has a parameter lora that it does not take"):
        op(torch.ones(1, 6))


def with_attribute(**values):
    module = nn.Module()
    for name, value in values.items():
        setattr(module, name, value)
    return module


REFUSED = {
    "no module": (lambda cls: cls.reading("fc"), TypeError, "expected a torch.nn.Module, got 'fc'"),
    "no attribute": (
        lambda cls: cls.reading(nn.ReLU(), **_eps(cls)),
        AttributeError,
        r"expected the name of an attribute of the module, got ReLU\.(weight|bias)",
    ),
    "none": (
        lambda cls: cls.reading(with_attribute(weight=None, bias=None), **_eps(cls)),
        TypeError,
        r"floating-point tensor as Module.(weight|bias), got None",
    ),
    "a number": (
        lambda cls: cls.reading(with_attribute(weight=1.0, bias=1.0), **_eps(cls)),
        TypeError,
        "got 1.0",
    ),
    "integers": (
        lambda cls: cls.reading(
            with_attribute(weight=torch.ones(2, 2, dtype=torch.int8), bias=torch.ones(2).int()),
            **_eps(cls),
        ),
        TypeError,
        "got torch.int(8|32)",
    ),
}


def _eps(cls):
    return {"eps": 0.1} if "Norm" in cls.__name__ else {}


@pytest.mark.parametrize("cls", [ops.BasicLinear, ops.Bias, ops.RMSNorm, ops.LayerNorm])
@pytest.mark.parametrize("name", REFUSED)
def test_other_things_are_refused(cls, name):
    call, error, message = REFUSED[name]
    with pytest.raises(error, match=f"{cls.__name__}.reading.*{message}"):
        call(cls)


def test_other_shapes_are_refused():
    for cls, module, dims in (
        (ops.BasicLinear, nn.Conv2d(2, 2, 2), 2),
        (ops.Bias, with_attribute(bias=torch.ones(2, 2)), 1),
    ):
        with pytest.raises(ValueError, match=f"reading expected {dims} dimensions of .*, got"):
            cls.reading(module)
    module = with_attribute(weight=torch.ones(3), bias=torch.ones(2))
    with pytest.raises(ValueError, match=r"Module.bias of shape \(3,\), that of weight, got \(2,"):
        ops.LayerNorm.reading(module, eps=0.1)
    with pytest.raises(ValueError, match="at least one dimension"):
        ops.RMSNorm.reading(with_attribute(weight=torch.ones(())), eps=0.1)


NO_EPS = {
    "none": (nn.RMSNorm(6), "got eps=None from RMSNorm"),
    "neither": (with_attribute(weight=torch.ones(6)), "got neither from Module"),
    "two": (
        with_attribute(weight=torch.ones(6), eps=0.1, variance_epsilon=0.2),
        "got eps=0.1, variance_epsilon=0.2 from Module",
    ),
}


@pytest.mark.parametrize("name", NO_EPS)
def test_eps_is_not_guessed(name):
    module, message = NO_EPS[name]
    with pytest.raises(ValueError, match=f"{message}: pass eps"):
        ops.RMSNorm.reading(module)
    assert ops.RMSNorm.reading(module, eps=0.25).eps == 0.25


def test_eps_of_the_module():
    both = with_attribute(weight=torch.ones(6), eps=0.1, variance_epsilon=0.1)
    for module in (LlamaNorm(6, 0.1), nn.RMSNorm(6, eps=0.1), both):
        assert ops.RMSNorm.reading(module).eps == 0.1
    with pytest.raises(TypeError, match="expected a real number as eps"):
        ops.RMSNorm.reading(LlamaNorm(6, torch.tensor(0.1)))


# The same Parameters


OF = {
    "linear": (lambda: nn.Linear(6, 5), ops.Linear),
    "linear without bias": (lambda: nn.Linear(6, 5, bias=False), ops.Linear),
    "layernorm": (lambda: nn.LayerNorm(6, eps=0.1), ops.LayerNorm),
    "layernorm without bias": (lambda: nn.LayerNorm((3, 6), bias=False), ops.LayerNorm),
    "layernorm without parameters": (
        lambda: nn.LayerNorm(6, elementwise_affine=False),
        ops.LayerNorm,
    ),
    "rmsnorm": (lambda: nn.RMSNorm(6, eps=0.1), ops.RMSNorm),
    "rmsnorm without parameters": (
        lambda: nn.RMSNorm((3, 6), eps=0.1, elementwise_affine=False),
        ops.RMSNorm,
    ),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OF)
def test_of_shares_the_parameters(name, dtype):
    build, cls = OF[name]
    module, x = build().to(dtype).eval(), torch.randn(2, 3, 6, dtype=torch.float64).to(dtype)
    op = cls.of(module)
    assert type(op) is cls and not op.training
    assert list(op.state_dict()) == list(module.state_dict())
    for key, param in module.named_parameters():
        assert getattr(op, key) is param
    exact = copy.deepcopy(module).double()
    compare(run(opfuse.Sequential(op), x, module), run(exact, x.double(), exact), dtype)


def test_linear_of_a_module_accumulates_into_its_main_grad():
    module = nn.Linear(6, 5)
    module.weight.main_grad = torch.zeros(5, 6)
    ops.Linear.of(module, accumulate_into_main_grad=True)(torch.ones(3, 6)).sum().backward()
    assert module.weight.main_grad.eq(3).all() and module.bias.grad.eq(3).all()


def hooked():
    module = nn.Linear(6, 5)
    module.register_forward_hook(lambda *args: None)
    return module


def patched():
    module = nn.Linear(6, 5)
    module.forward = lambda x: x
    return module


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


NOT_STOCK = {
    "another class": (lambda: nn.Bilinear(2, 2, 2), "got Bilinear"),
    "hooks": (hooked, "with forward hooks: .*reading takes the parameters alone"),
    "forward": (patched, "a Linear with a forward of its own"),
    "subclass": (lambda: Doubled(6, 5), "a Doubled with a forward of its own"),
    "parametrization": (
        lambda: parametrizations.weight_norm(nn.Linear(6, 5)),
        "with a parametrization",
    ),
}


@pytest.mark.parametrize("name", NOT_STOCK)
def test_of_refuses_what_computes_something_else(name):
    build, message = NOT_STOCK[name]
    with pytest.raises(TypeError, match=f"Linear.of expected a torch.nn.Linear.*{message}"):
        ops.Linear.of(build())


def test_of_takes_a_subclass_that_computes_the_same():
    module, x = nn.MultiheadAttention(6, 2).out_proj, torch.randn(3, 6)
    assert type(module) is not nn.Linear
    torch.testing.assert_close(ops.Linear.of(module)(x), module(x))


def test_of_does_not_guess_eps():
    with pytest.raises(ValueError, match="got eps=None from RMSNorm: pass eps"):
        ops.RMSNorm.of(nn.RMSNorm(6))
    assert ops.RMSNorm.of(nn.RMSNorm(6), eps=0.5).eps == 0.5


@pytest.mark.parametrize("given", [{}, {"bias": None}])
def test_a_bias_that_a_norm_gets_later_is_refused_if_it_would_be_read(given):
    module = nn.LayerNorm(4, bias=False)
    chain, x = opfuse.Sequential(ops.LayerNorm.reading(module, **given)), torch.randn(3, 4)
    wanted = chain(x)
    module.bias = nn.Parameter(torch.ones(4))
    if given:
        assert torch.equal(chain(x), wanted)
        return
    with pytest.raises(ValueError, match="LayerNorm reads a LayerNorm that had no bias when the"):
        chain(x)


NAMED = {
    "BasicLinear.reading": lambda **given: ops.BasicLinear.reading(nn.Linear(4, 4), **given),
    "Bias.reading": lambda **given: ops.Bias.reading(nn.Linear(4, 4), **given),
    "LayerNorm.reading": lambda **given: ops.LayerNorm.reading(nn.LayerNorm(4), **given),
    "RMSNorm.reading": lambda **given: ops.RMSNorm.reading(nn.RMSNorm(4, eps=1e-5), **given),
    "ParallelLinear.reading": lambda **given: ops.ParallelLinear.reading(
        [nn.Linear(4, 4)], **given
    ),
    "Linear.of": lambda **given: ops.Linear.of(nn.Linear(4, 4), **given),
    "LayerNorm.of": lambda **given: ops.LayerNorm.of(nn.LayerNorm(4), **given),
    "RMSNorm.of": lambda **given: ops.RMSNorm.of(nn.RMSNorm(4, eps=1e-5), **given),
}


@pytest.mark.parametrize("way", NAMED)
def test_they_take_a_name_as_constructors_do(way):
    op = NAMED[way](name="mine")
    assert op.name == "mine" and all(part.name == "mine" for part in getattr(op, "basic_ops", ()))
    assert opfuse.assign_names(nn.ModuleDict({"path": op}))["path"].name == "mine"
    assert opfuse.assign_names(nn.ModuleDict({"path": NAMED[way]()}))["path"].name == "path"
    with pytest.raises(TypeError, match="expected a string as name, got 3"):
        NAMED[way](name=3)


@pytest.mark.costly(4)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(  # every pair of two of them
    ("backend", "autocast", "frozen"),
    [
        ("eager", "", False),
        ("aot_eager", "", True),
        ("aot_eager", "speed", False),
        ("eager", "speed", True),
        ("aot_eager", "memory", False),
        ("eager", "memory", True),
    ],
)
def test_compile_takes_a_parameter_twice(backend, autocast, frozen):
    module, x = nn.Linear(4, 4), torch.randn(3, 4, requires_grad=True)
    read = ops.BasicLinear.reading
    chain = opfuse.Sequential(
        ops.ParallelLinear.reading([module, module]), ops.SwiGLU(), read(module), read(module)
    )
    module.weight.requires_grad_(not frozen)

    def run(function):
        module.zero_grad()
        x.grad = None
        with (
            torch.autocast("cpu", torch.bfloat16, enabled=bool(autocast)),
            opfuse.options(prefer=autocast or "speed"),
        ):
            y = function(x)
        y.float().square().sum().backward()
        return y.detach(), x.grad, module.weight.grad, module.bias.grad

    wanted = run(chain)
    compiled = torch.compile(chain, fullgraph=True, backend=backend)
    close = {"rtol": 0.02, "atol": 0.02} if autocast else {}
    for _ in range(2):
        for got, expected in zip(run(compiled), wanted, strict=True):
            assert (got is None) == (expected is None)
            if got is not None:
                torch.testing.assert_close(got, expected, **close)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compile_sees_when_a_parameter_is_shared_no_more():
    one, other, x = nn.Linear(4, 4), nn.Linear(4, 4), torch.randn(3, 4)
    other.weight = one.weight
    chain = opfuse.Sequential(ops.BasicLinear.reading(one), ops.BasicLinear.reading(other))
    compiled = torch.compile(chain, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), chain(x))
    other.weight = nn.Parameter(torch.randn(4, 4))
    compiled(x).sum().backward()
    torch.testing.assert_close(compiled(x), chain(x))
    assert one.weight.grad is not None and other.weight.grad is not None
    got = [one.weight.grad.clone(), other.weight.grad.clone()]
    one.weight.grad = other.weight.grad = None
    chain(x).sum().backward()
    torch.testing.assert_close(got, [one.weight.grad, other.weight.grad])
    other.weight = one.weight
    torch.testing.assert_close(compiled(x), chain(x))
