"""What changes about a module before and after ``torch.compile`` has traced its chain."""

import copy
import types

import pytest
import torch
from rounding import Rounding, RoundingPlugin
from torch import nn
from torch.nn import functional as F

import opfuse

pytestmark = pytest.mark.alone

WIDTH = 16


class Scaled(nn.Module):
    k = 1.0

    def forward(self, x):
        return F.silu(x * self.k)


def model():
    """Of classes of its own, since what is written in them changes."""

    class Own(Scaled):
        pass

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.norm = (
                nn.Linear(WIDTH, WIDTH),
                nn.Linear(WIDTH, WIDTH),
                nn.LayerNorm(WIDTH),
            )
            self.act, self.own = F.silu, Own()

        def ffn(self, h):
            return self.b(self.act(self.a(h)))

        def forward(self, x):
            return self.own(self.ffn(self.norm(x)))

    torch.manual_seed(0)
    return Model()


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # raised inside torch
def test_a_recipe_with_state_breaks_the_graph_and_the_chain_is_quantized(chains):
    """It cannot be traced. In eager mode Dynamo then traces each function that is called by itself."""
    record = opfuse.plugins.register(RoundingPlugin(), name="rounding", distribution="rounding")
    recipe, x, found = Rounding(levels=8), torch.randn(4, WIDTH), []
    for compiled in (False, True):
        made = model()
        convert(made, chains)
        run = torch.compile(made, backend="eager") if compiled else made
        with opfuse.autocast(recipe):
            y = run(x)
        y.sum().backward()
        states = {k: v for k, v in made.state_dict().items() if k.endswith("updates")}
        assert states and all(map(bool, states.values()))
        found.append([y, *states.values()])
    opfuse.plugins.remove(record)
    torch.testing.assert_close(*found)
    assert not torch.allclose(found[0][0], model()(x), rtol=1e-3)


def another_forward(self, x):
    return self.own(self.norm(x))


def another_ffn(self, h):
    return self.b(h)


CHANGES = {
    "function attribute": lambda m: setattr(m, "act", F.relu),
    "method on the instance": lambda m: setattr(m, "ffn", lambda h: h),
    "instance over class attribute": lambda m: setattr(m.own, "k", 3.0),
    "class attribute": lambda m: setattr(type(m.own), "k", 3.0),
    "attribute of a base": lambda m: setattr(type(m.own).__mro__[-3], "k", 3.0),
    "method of the class": lambda m: setattr(author(m), "ffn", another_ffn),
    "code of a method": lambda m: setattr(author(m).ffn, "__code__", another_ffn.__code__),
    "forward of the class": lambda m: setattr(author(m), "forward", another_forward),
    "code of the forward": lambda m: setattr(
        author(m).forward, "__code__", another_forward.__code__
    ),
    "forward of the instance": lambda m: setattr(
        m, "forward", types.MethodType(another_forward, m)
    ),
    "forward of a part": lambda m: setattr(m.own, "forward", lambda x: x),
    "eps": lambda m: setattr(m.norm, "eps", 1.0),
    "a part": lambda m: setattr(m, "own", nn.Identity()),
    "a hook": lambda m: m.a.register_forward_hook(lambda module, args, output: output * 2),
    "the class of a part": lambda m: setattr(m.own, "__class__", nn.Identity),
}


def author(module):
    return type(module).__mro__[1 if "_opfuse" in vars(module) else 0]


@pytest.fixture
def chains(monkeypatch):
    """Chains are traced; how many were, in a list."""
    found, call = [], opfuse.Sequential.forward
    monkeypatch.setattr(
        opfuse.Sequential, "forward", lambda *given: found.append(1) or call(*given)
    )
    torch.compiler.reset()
    with opfuse.options(chains_under_compile=True):
        yield found
    torch.compiler.reset()


def convert(model, chains):
    assert opfuse.convert(model).converted
    chains.clear()  # some are compared with what they replace


@pytest.fixture
def put_back(monkeypatch):
    monkeypatch.setattr(Scaled, "k", 1.0)


@pytest.mark.costly(12)
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("how", CHANGES)
def test_a_graph_sees_what_the_guard_sees(chains, put_back, how, first):
    plain, converted = model(), model()
    convert(converted, chains)
    x = torch.randn(4, WIDTH)
    before = plain(x)
    compiled = torch.compile(converted, backend="eager", fullgraph=True)
    if first:
        torch.testing.assert_close(compiled(x), plain(x))
        assert chains
    for each in (plain, converted):
        CHANGES[how](each)
    chains.clear()
    assert not torch.allclose(plain(x), before)
    for _ in range(2):
        torch.testing.assert_close(compiled(x), plain(x))
    assert not chains


def test_a_graph_with_a_chain_is_back_when_its_module_is(chains):
    plain, converted = model(), model()
    convert(converted, chains)
    x = torch.randn(4, WIDTH)
    compiled = torch.compile(converted, backend="eager", fullgraph=True)
    for act in (F.silu, F.relu, F.silu, F.relu):
        plain.act = converted.act = act
        torch.testing.assert_close(compiled(x), plain(x))
    assert chains


class SetsItself(nn.Module):
    k = 1.0

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        self.k = 3.0
        h = self.a(x)
        h = F.silu(h * self.k)
        return self.b(h)


@torch.compiler.disable
def between(module):
    if module.turns:
        module.act = F.relu


class Breaks(nn.Module):
    turns = False

    def __init__(self):
        super().__init__()
        self.a, self.b, self.act = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), F.silu

    def forward(self, x):
        between(self)
        h = self.a(x)
        h = self.act(h)
        return self.b(h)


def test_what_a_forward_sets_before_its_chain(chains):
    plain, converted = SetsItself(), SetsItself()
    converted.load_state_dict(plain.state_dict())
    convert(converted, chains)
    x = torch.randn(4, WIDTH)
    compiled = torch.compile(converted, backend="eager")
    for _ in range(2):
        torch.testing.assert_close(compiled(x), plain(x))


def test_what_changes_where_the_graph_breaks(chains):
    plain = Breaks()
    converted = copy.deepcopy(plain)
    convert(converted, chains)
    x = torch.randn(4, WIDTH)
    compiled = torch.compile(converted, backend="eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), plain(x))
        assert chains
        plain.turns = converted.turns = True
        for _ in range(2):
            torch.testing.assert_close(compiled(x), plain(x))


def test_a_copy_gets_its_chain_while_it_is_traced(chains):
    plain, converted = model(), model()
    convert(converted, chains)
    twin = copy.deepcopy(converted)
    x = torch.randn(4, WIDTH)
    torch.testing.assert_close(torch.compile(twin, backend="eager", fullgraph=True)(x), plain(x))
    assert chains


def test_where_no_graph_can_ask_it_has_no_chain(chains, monkeypatch):
    monkeypatch.delattr("opfuse_convert.guard.Watch._is_set_in_trace")
    plain, converted = model(), model()
    convert(converted, chains)
    x = torch.randn(4, WIDTH)
    torch.testing.assert_close(torch.compile(converted, backend="eager")(x), plain(x))
    assert not chains and "cannot ask at each call" in opfuse.converted(converted)[""]
