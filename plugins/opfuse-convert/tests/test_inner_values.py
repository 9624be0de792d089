"""Values between the operations of a forward: their gradients, and writes to them in place."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import opfuse

WIDTH = 16


class Parts(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.norm = (
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.LayerNorm(WIDTH),
        )
        self.act, self.drop = nn.SiLU(), nn.Dropout(0.1)


class GivesAnInnerValue(Parts):
    def forward(self, x):
        h = self.norm(self.a(x))
        return self.b(self.act(h)), h


class GivesASum(Parts):
    def forward(self, x):
        h = x + self.a(x)
        return h + self.b(self.act(self.norm(h))), h


class GivesAll(Parts):
    def forward(self, x):
        h = self.drop(self.a(x))
        k = self.norm(h)
        return x + self.b(self.act(k)), (h, k)


class Keeps(Parts):
    kept = None

    def forward(self, x):
        self.kept = self.norm(self.a(x))
        return self.b(self.act(self.kept)), self.kept


def pair(cls):
    torch.manual_seed(0)
    model = cls().eval()
    twin = copy.deepcopy(model)
    opfuse.convert(twin)
    return model, twin


def of_inner(model, x):
    """What a hook, ``retain_grad`` and ``autograd.grad`` see of the gradients of inner values."""
    found = []
    y, inner = model(x)
    inner = inner if isinstance(inner, tuple) else (inner,)
    found += torch.autograd.grad(y.square().sum(), inner, retain_graph=True)
    for each in inner:
        each.retain_grad()
    (y.square().sum() + sum(0.1 * each.square().sum() for each in inner)).backward()
    found += [each.grad for each in inner]
    model.zero_grad()
    y, inner = model(x)
    (inner[0] if isinstance(inner, tuple) else inner).register_hook(lambda grad: 3 * grad)
    y.square().sum().backward()
    return [*found, *[p.grad for p in model.parameters() if p.grad is not None]]


@pytest.mark.parametrize("cls", [GivesAnInnerValue, GivesASum, GivesAll, Keeps])
def test_gradients_of_inner_values(cls):
    model, twin = pair(cls)
    x = torch.randn(4, WIDTH)
    assert not set(opfuse.converted(twin).values()) - {""}
    for expected, got in zip(of_inner(model, x), of_inner(twin, x), strict=True):
        torch.testing.assert_close(got, expected)


def test_what_remains_of_a_forward_that_gives_an_inner_value():
    for cls, ops in {
        GivesAnInnerValue: "BasicLinear Bias LayerNorm",
        GivesASum: "LayerNorm SiLU BasicLinear Bias AddExtraInput",
        GivesAll: "SiLU BasicLinear Bias AddExtraInput",
    }.items():
        assert f"{cls.__name__} x 1 -> {ops}" in str(opfuse.convert(cls())).replace(
            "MakeExtraOutput ", ""
        )


WRITES = {
    "iadd": lambda h, y: h.__iadd__(y),
    "add_": lambda h, y: h.add_(1),
    "clamp_": lambda h, y: h.clamp_(-0.1, 0.1),
    "relu_": lambda h, y: F.relu_(h),
    "detach_": lambda h, y: h.detach_(),
    "setitem": lambda h, y: h.__setitem__(0, 1.0),
    "view": lambda h, y: h.view(-1).mul_(2),
}


class WritesAnInnerValue(Parts):
    def forward(self, x, write):
        h = self.a(x)
        y = self.b(F.relu(h))
        write(h, y)
        return h if h.requires_grad else h + y


class WritesWhatDropoutGave(Parts):
    def forward(self, x, write):
        h = self.norm(self.a(x))
        y = self.drop(h)  # in evaluation it is h
        write(y, x)
        return y + self.b(x) + h


class WritesTheLast(Parts):
    def forward(self, x, write):
        y = self.b(self.act(self.norm(self.a(x))))
        write(y, x)
        return y + self.a(x)


class WritesASum(Parts):
    def forward(self, x, write):
        y = x + self.drop(self.b(self.norm(x)))
        write(y, x)
        return y + self.a(x)


class WritesANorm(Parts):
    def forward(self, x, write):
        y = self.drop(self.norm(self.b(x)))
        write(y, x)
        return y + self.a(x)


class WritesWhatCameIn(Parts):
    def forward(self, x, write):
        h = x * 2
        y = self.b(self.drop(F.relu(h)))
        write(h, y)
        return y + h


WRITERS = [
    WritesAnInnerValue, WritesWhatDropoutGave, WritesTheLast, WritesASum, WritesANorm, WritesWhatCameIn,
]  # fmt: skip


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("how", WRITES)
@pytest.mark.parametrize("cls", WRITERS)
def test_what_may_be_written_to_may_be_written_to(cls, how, training):
    model, twin = pair(cls)
    results = []
    for each in (model, twin):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1), requires_grad=True)
        torch.manual_seed(2)
        each.train(training).drop.p = 0.0  # chains draw other numbers
        y = each(x, WRITES[how])
        y.square().sum().backward()
        results.append((y, x.grad, *[p.grad for p in each.parameters() if p.grad is not None]))
    assert not set(opfuse.converted(twin).values()) - {""}
    for expected, got in zip(*results, strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("how", WRITES)
def test_what_a_converted_module_gave_may_be_written_to(how):
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Dropout(0.0))
    twin = copy.deepcopy(model)
    opfuse.convert(twin)
    for training in (True, False):
        for each in (model.train(training), twin.train(training)):
            y = each(torch.ones(4, WIDTH))
            WRITES[how](y, torch.ones(4, WIDTH))
            if y.requires_grad:
                y.sum().backward()
        for expected, got in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(got.grad, expected.grad)
    assert opfuse.converted(twin)[""] == ""


class BeginsWithReLU(Parts):
    def forward(self, x):
        x = F.relu(x)
        x = self.a(x)
        return F.relu(x)


def test_a_chain_does_not_begin_with_what_keeps_its_result():
    """ReLU's op keeps what it got, which others may write to; behind another op nobody can."""
    assert "-> BasicLinear Bias ReLU" in str(opfuse.convert(BeginsWithReLU()))
    assert not opfuse.convert(nn.Sequential(nn.Dropout(0.1), nn.ReLU(), nn.Linear(4, 4))).converted
