"""Conditions on the device of a value, keywords that are asked for, and names without a value."""

import copy

import pytest
import torch
from opfuse_convert import converted
from torch import nn
from torch.nn import functional as F

import opfuse

WIDTH = 8


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norm, self.kind, self.log = nn.LayerNorm(WIDTH), "modulated", []


def results(module, *given):
    """The output, and the gradients of inputs and parameters."""
    leaves = [t.detach().requires_grad_() for t in given]
    module.zero_grad()
    y = module(*leaves)
    y.square().sum().backward()
    return [y.detach(), *[t.grad for t in (*leaves, *module.parameters())]]


def drawn(*shapes):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def pair(cls, *args):
    """A converted module, and the same as it was."""
    torch.manual_seed(0)
    own = cls(*args).double()
    module = copy.deepcopy(own)
    opfuse.convert(module)
    return module, own


# The device of a value


def activated(x):
    """As in diffusers, for a device without a kernel."""
    if x.device.type == "mps" and not hasattr(torch, "later"):
        return F.gelu(x.float()).to(x.dtype)
    return F.gelu(x)


class ByHelper(Base):
    def forward(self, x):
        return self.fc2(activated(self.fc1(x)))


class ByOther(Base):
    def forward(self, x):
        h = self.fc1(x)
        if "cpu" != h.device.type:
            h = h[..., :3]
        return self.fc2(F.silu(h))


class ByList(Base):
    def forward(self, x):
        h = self.fc1(x)
        h = F.silu(h) if x.device.type in ["cuda", "cpu"] else F.gelu(h)[..., :3]
        return self.fc2(h) if h.device.type not in ("meta", "mps") else h


@pytest.mark.parametrize("cls", [ByHelper, ByOther, ByList])
def test_a_condition_on_the_device_goes_the_way_of_the_device(cls):
    module, own = pair(cls)
    (x,) = drawn((3, WIDTH))
    torch.testing.assert_close(results(module, x), results(own, x))
    assert converted(module)[""] == ""


@pytest.mark.parametrize("cls", [ByOther, ByList])
def test_on_another_device_the_module_s_own_forward_runs(cls):
    module, own = pair(cls)
    (x,) = drawn((3, WIDTH))
    module(x)
    for each in (module, own):
        each.to("meta")
        each.fc2 = (
            nn.Linear(3, 5, device="meta", dtype=torch.float64) if cls is ByOther else own.fc2
        )
    assert module(x.to("meta")).shape == own(x.to("meta")).shape
    assert converted(module)[""]


def test_a_chain_made_on_another_device_is_for_this_one():
    """A model may be built on the meta device, converted, and loaded then."""
    torch.manual_seed(0)
    own = ByHelper().double()
    module = copy.deepcopy(own).to("meta")
    opfuse.convert(module)
    module.to_empty(device="cpu").load_state_dict(own.state_dict())
    (x,) = drawn((3, WIDTH))
    torch.testing.assert_close(results(module, x), results(own, x))
    assert converted(module)[""] == ""


class ByAnother(Base):
    """It asks for the device of a value that the chain does not take."""

    def forward(self, x, other):
        h = self.fc1(x)
        if other.device.type == "meta":
            h = 2 * h
        return self.fc2(F.silu(h))


class Within(Base):
    def forward(self, x):
        h = self.fc1(x)
        if "c" in h.device.type:
            h = 2 * h
        kind = h.device.type
        h = F.silu(h) if kind == "cpu" else 2 * h
        return self.fc2(h)


def test_what_is_asked_in_other_ways_stays_the_author_s_code():
    (x,) = drawn((3, WIDTH))
    module, own = pair(ByAnother)
    for other in (x, x.to("meta")):
        torch.testing.assert_close(module(x, other), own(x, other))
    module, own = pair(Within)
    torch.testing.assert_close(results(module, x), results(own, x))


# Keywords


class Inner(Base):
    def forward(self, x, *args, **kwargs):
        if len(args) > 0 or kwargs.get("scale", None) is not None or "gain" in kwargs:
            self.log.append(args)
        for layer in (self.fc1, F.gelu, self.fc2):
            x = layer(x)
        return x * kwargs.get("times", 1.0) if kwargs else x


class Outer(Base):
    def __init__(self):
        super().__init__()
        self.inner, self.given = Inner(), {}

    def forward(self, x):
        return x + self.inner(self.norm(x))


class OuterWithKeywords(Outer):
    def forward(self, x):
        y = x + self.inner(self.norm(x), times=2.0)
        return y + self.inner(y, scale=1.0)


def test_keywords_that_are_not_given():
    module, own = pair(Outer)
    (x,) = drawn((3, WIDTH))
    torch.testing.assert_close(results(module, x), results(own, x))
    assert converted(module)[""] == ""
    ops = [type(op).__name__ for op in vars(module)["_opfuse"].chain]
    assert ops[1:] == ["LayerNorm", "BasicLinear", "Bias", "GELU", "BasicLinear", "Bias", ops[-1]]
    inner = module.inner
    for given in ({}, {"scale": 2.0}, {"times": 3.0}):
        torch.testing.assert_close(inner(x, **given), own.inner(x, **given))
    assert inner.log == own.inner.log == [()]
    inner(x, 1.0)
    assert inner.log[-1] == (1.0,)


def test_keywords_that_are_given():
    module, own = pair(OuterWithKeywords)
    (x,) = drawn((3, WIDTH))
    torch.testing.assert_close(results(module, x), results(own, x))
    assert module.inner.log == own.inner.log == [()]


# Names that only some branches set


class Sometimes(Base):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x, c):
        if self.kind == "modulated":
            scale, shift = self.linear(c).unbind_(-1) if x is None else self.split(c)
        y = self.norm(x)
        if self.kind == "modulated":
            y = y * (1 + scale[:, None]) + shift[:, None]
        return self.fc2(F.silu(self.fc1(y)))

    def split(self, c):
        self.seen = c.shape
        return self.linear(c).chunk(2, -1)


class InALoop(Sometimes):
    def forward(self, x, c):
        for number in range(2):
            if number:
                y = self.norm(x) * (1 + scale[:, None]) + shift[:, None]  # noqa: F821
                x = self.fc2(F.silu(self.fc1(y)))
            if self.kind == "modulated":
                scale, shift = self.split(c)  # noqa: RUF059
        return x


@pytest.mark.parametrize("cls", [Sometimes, InALoop])
def test_a_name_that_one_branch_sets(cls):
    module, own = pair(cls)
    given = drawn((2, 3, WIDTH), (2, WIDTH))
    torch.testing.assert_close(results(module, *given), results(own, *given))
    assert converted(module)[""] == ""


def test_a_name_without_a_value_lets_the_statements_run():
    module, own = pair(Sometimes)
    given = drawn((2, 3, WIDTH), (2, WIDTH))
    module(*given)
    module.kind = own.kind = "plain"
    torch.testing.assert_close(results(module, *given)[0], results(own, *given)[0])
    module, own = pair(InALoop)
    module.kind = own.kind = "plain"
    for each in (module, own):
        with pytest.raises(UnboundLocalError, match="scale"):
            each(*given)


def test_names_that_may_have_no_value_in_a_graph():
    module, own = pair(Sometimes)
    given = drawn((2, 3, WIDTH), (2, WIDTH))
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    with opfuse.options(chains_under_compile=True):
        torch.testing.assert_close(results(compiled, *given), results(own, *given))
