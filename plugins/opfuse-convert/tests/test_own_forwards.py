"""Objects that hold models, and forwards that modules have in place of those of their classes."""

import copy
import functools
import types

import opfuse_convert
import pytest
import torch
from torch import nn

import opfuse
from opfuse import ops


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


class Trainer:
    """Holds two models, one of them twice."""

    def __init__(self):
        self.steps, self.model, self.reference = 3, MLP(), nn.ModuleList([MLP()])
        self.model_wrapped = self.model


def test_what_an_object_holds_is_converted_under_its_names():
    trainer, x = Trainer(), torch.randn(3, 8)
    expected = trainer.model(x), trainer.reference[0](x)
    report = opfuse.convert(trainer)
    assert {row.path for row in report.converted} == {"model", "reference.0"}
    torch.testing.assert_close((trainer.model(x), trainer.reference[0](x)), expected)
    assert opfuse.converted(trainer) == {"model": "", "reference.0": ""}
    assert not opfuse.convert(trainer).converted
    assert opfuse_convert.revert(trainer) is trainer and not opfuse.converted(trainer)
    assert [row.path for row in opfuse.convert(trainer, skip="reference").converted] == ["model"]


def test_an_object_without_modules_is_refused():
    holder = types.SimpleNamespace(model=3)
    expected = "expected a torch.nn.Module, or an object that has some as attributes, got"
    for function in (opfuse.convert, opfuse.converted, opfuse_convert.revert):
        with pytest.raises(TypeError, match=f"{function.__name__} {expected} SimpleNamespace"):
            function(holder)
        with pytest.raises(TypeError, match=f"{expected} int"):
            function(3)
    with pytest.raises(TypeError, match=r"convert\(Trainer\) takes no inputs: convert a module"):
        opfuse.convert(Trainer(), torch.ones(3, 8))


# A method of a module itself


def doubled(model):
    """Give a module a forward of its own, as a library may do; return the function."""
    original = model.forward

    def forward(self, x, twice=True):
        return 2 * self.down(torch.relu(self.up(x))) if twice else original(x)

    model.forward = types.MethodType(functools.wraps(type(model).forward)(forward), model)
    return forward


def wrapped(model):
    """Put a function around it that calls it, as accelerate does."""
    inner = model.forward.__func__

    @functools.wraps(inner)
    def around(*args, **kwargs):
        return inner(*args, **kwargs)

    model.forward = types.MethodType(around, model)


class Call:
    """The known function by way of a chain."""

    why = ""

    def __call__(self, module, chain, x, twice=True):
        self.why = "" if twice else "it was not to be doubled"
        return chain(x) * 2 if twice else NotImplemented


@pytest.fixture
def known():
    """Functions that a converter knows."""
    functions = []

    def build(module, env):
        (function,) = [f for f in opfuse_convert.functions_of(module) if f in functions]
        if not opfuse_convert.reaches(module, function):
            return "it is called in an unknown way"
        up, down = [
            (ops.BasicLinear.reading(m), ops.Bias.reading(m)) for m in (module.up, module.down)
        ]
        chain = opfuse.Sequential(*up, ops.ReLU(), *down)
        return opfuse_convert.Conversion(chain, ["up", "down"], Call(), function=function)

    def fits(module):
        return any(each in functions for each in opfuse_convert.functions_of(module))

    plugin = types.ModuleType("mine")
    plugin.opfuse_converters = opfuse.hookimpl(lambda: [opfuse_convert.Converter(fits, build)])
    plugin.opfuse_converters.__name__ = "opfuse_converters"
    with opfuse.plugins.isolated():
        opfuse.plugins.register(plugin, name="mine")
        yield functions


@pytest.mark.parametrize("around", ["", "before", "after", "before and after"])
def test_a_known_function_runs_through_a_chain(known, around):
    model, x = MLP(), torch.randn(3, 8)
    known.append(doubled(model))
    if "before" in around:
        wrapped(model)
    expected, own = model(x), vars(model)["forward"]
    report = opfuse.convert(model)
    assert [row.ops[2] for row in report.converted] == ["ReLU"]
    if "after" in around:
        wrapped(model)
    torch.testing.assert_close(model(x), expected)
    assert opfuse.converted(model) == {"": ""} and not opfuse.convert(model).converted
    torch.testing.assert_close(model(x, twice=False), expected / 2)
    assert opfuse.converted(model) == {"": "it was not to be doubled"}
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.down.weight.zero_()
        twin.down.bias.fill_(1)
    assert torch.equal(twin(x), torch.full((3, 8), 2.0)) and opfuse.converted(twin) == {"": ""}
    torch.testing.assert_close(model(x), expected)
    opfuse_convert.revert(model)
    assert type(model) is MLP and torch.equal(model(x), expected)
    assert "after" in around or vars(model)["forward"] == own


def test_a_function_that_is_called_otherwise_is_left(known):
    model = MLP()
    known.append(doubled(model))
    inner = model.forward
    model.forward = functools.wraps(inner)(lambda *args: inner(*args) + 1)
    expected = model(x := torch.randn(3, 8))
    report = opfuse.convert(model)
    assert [row.reason for row in report.left] == ["it is called in an unknown way"]
    assert not report.converted and torch.equal(model(x), expected)


def test_a_forward_that_hides_a_chain_has_the_module_converted_again(known):
    model, x = MLP(), torch.randn(3, 8)
    assert len(opfuse.convert(model).converted) == 1
    known.append(doubled(model))
    expected = model(x)
    assert [row.path for row in opfuse.convert(model).converted] == [""]
    torch.testing.assert_close(model(x), expected)
    assert opfuse.converted(model) == {"": ""}


class Residual(nn.Module):
    """Sequence-first code around a residual."""

    def __init__(self, order):
        super().__init__()
        self.order = order
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        y = self.down(nn.functional.gelu(self.up(x)))
        if self.order == "input first":
            return x + y
        return y + x


@pytest.mark.parametrize("order", ["input first", "branch first"])
def test_a_residual_has_the_strides_of_its_first_operand(order):
    model = Residual(order)
    twin = copy.deepcopy(model)
    opfuse.convert(twin)
    x = torch.randn(3, 2, 8).transpose(0, 1)
    found = []
    for each in (model, twin):
        y = each(x)
        with torch.no_grad():
            y.transpose(0, 1).reshape(-1, 8)[:2] = 0  # writes through where this is a view
        found.append(y)
    assert opfuse.converted(twin)[""] == ""
    assert found[0].stride() == found[1].stride()
    assert found[0].transpose(0, 1).is_contiguous() == (order == "input first")
    torch.testing.assert_close(*found)


class PointwiseNorm(nn.Module):
    """As models write it: the result has the strides of the input."""

    def __init__(self):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.randn(8)), 1e-5

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class Normed(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.norm, self.act = norm, nn.GELU()

    def forward(self, x):
        return self.act(self.norm(x))


@pytest.mark.parametrize(
    "norm", [PointwiseNorm, lambda: nn.RMSNorm(8, eps=1e-5)], ids=["own", "of torch"]
)
def test_a_norm_has_the_strides_that_it_had(norm):
    model = Normed(norm())
    twin = copy.deepcopy(model)
    opfuse.convert(twin)
    x = torch.randn(3, 2, 8).transpose(0, 1)
    y, z = model(x), twin(x)
    assert opfuse.converted(twin)[""] == "" and y.stride() == z.stride()
    torch.testing.assert_close(y, z)
