"""Names that a forward deletes, or seems to set: a chain leaves what it left, and holds no more."""

import copy
import weakref

import pytest
import torch
from converting import WIDTH, an_input, assert_same
from torch import nn
from torch.nn import functional as F

import opfuse

pytestmark = pytest.mark.alone

HELD = []


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.act, self.b = nn.Linear(WIDTH, 40), nn.GELU(), nn.Linear(40, WIDTH)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])
        self.flag = False


def inside(self, x):
    h = self.a(x)
    y = self.act(h)
    del h
    return self.b(y)


def several(self, x):
    h = self.a(x)
    y = self.act(h)
    del h, x
    return self.b(y)


def right_behind(self, x):
    h = self.a(x)
    y = self.b(self.act(h))
    del h
    return y


def later(self, x):
    h = self.a(x)
    y = self.b(self.act(h))
    print("between")
    y = torch.sin(y)
    del h
    return y


def in_a_loop(self, x):
    for layer in self.layers:
        h = layer(x)
        x = F.gelu(h)
        del h
    return self.b(self.act(self.a(x)))


def in_a_loop_with_more(self, x):
    for number in range(len(self.layers)):
        h = self.a(x)
        x = self.b(self.act(h))
        print(number)
        del h
    return x


def one_way(self, x):
    h = self.a(x)
    y = self.b(self.act(h))
    if x.sum() > 0:
        del h
    return y


def perhaps(self, x):
    h = self.a(x)
    if self.flag:
        del h
        h = self.a(x)
    y = self.b(self.act(h))
    return y + h.mean()


def at_last(self, x):
    try:
        h = self.a(x)
        y = self.b(self.act(h))
    finally:
        del h
    return y


def and_set_again(self, x):
    h = self.a(x)
    y = self.b(self.act(h))
    del h
    h = torch.sin(y)
    return h


def in_a_context(self, x):
    h = self.a(x)
    y = self.b(self.act(h))
    with torch.enable_grad():
        del h
    return y


def beside_one_of_a_comprehension(self, x):
    h = x
    h = self.layers[0](h)
    y = self.b(self.act(self.a(h)))
    count = len([0 for h in range(3)])
    return y * count + h


def beside_one_of_a_generator(self, x):
    h = x
    h = self.layers[0](h)
    y = self.b(self.act(self.a(h)))
    return y * any(True for h in range(3)) + h


def announced(self, x):
    h = x
    h = self.layers[0](h)
    y = self.b(self.act(self.a(h)))
    h: torch.Tensor
    return y + h


def set_where_it_is_not_reached(self, x):
    h = x
    h = self.layers[0](h)
    y = self.b(self.act(self.a(h)))
    count = 1 if x.ndim else (h := 2)
    return y * count + h


def set_in_no_round(self, x):
    h = x
    h = self.layers[0](h)
    y = self.b(self.act(self.a(h)))
    count = len([(h := 2) for _ in range(0)])
    return y * count + h


def until_a_context_goes_on(self, x):
    h = x
    for number in range(2):
        x = x + h.sum()
        h = self.act(self.a(x))
        y = self.b(h)
        with torch.enable_grad():
            if number == 0:
                continue
        h = x
    return y


def until_a_try_ends_the_loop(self, x):
    while True:
        h = self.act(self.a(x))
        y = self.b(h)
        try:
            if x.ndim:
                break
        finally:
            pass
        h = x
    return y + h.sum()


def until_the_else_of_a_loop_ends_another(self, x):
    while True:
        h = self.act(self.a(x))
        y = self.b(h)
        for _ in range(1):
            pass
        else:
            if x.ndim:
                break
        h = x
    return y + h.sum()


FORWARDS = [inside, several, right_behind, later, in_a_loop, in_a_loop_with_more, one_way, perhaps]
FORWARDS += [at_last, and_set_again, in_a_context]

KEPT = [beside_one_of_a_comprehension, beside_one_of_a_generator, announced]
KEPT += [set_where_it_is_not_reached, set_in_no_round]
KEPT += [until_a_context_goes_on, until_a_try_ends_the_loop]
KEPT += [until_the_else_of_a_loop_ends_another]


@pytest.mark.parametrize("forward", FORWARDS, ids=lambda forward: forward.__name__)
def test_a_name_may_be_deleted(forward):
    model = type("Model", (Base,), {"forward": forward})()
    twin = copy.deepcopy(model)
    opfuse.convert(model)
    assert_same(model, twin, an_input())
    if forward is not at_last:
        assert opfuse.converted(model)[""] == ""


@pytest.mark.parametrize("forward", KEPT, ids=lambda forward: forward.__name__)
def test_a_name_that_is_not_set_keeps_its_value(forward):
    model = type("Model", (Base,), {"forward": forward})()
    twin = copy.deepcopy(model)
    opfuse.convert(model)
    assert_same(model, twin, an_input())
    assert opfuse.converted(model)[""] == ""


def test_a_chain_goes_on_behind_a_name_that_is_deleted():
    model = type("Model", (Base,), {"forward": inside})()
    assert "BasicLinear Bias GELU BasicLinear Bias" in str(opfuse.convert(model))


def hold(x):
    HELD[:] = [weakref.ref(x)]
    return x


def look(y):
    HELD[:] = [HELD[0]() is None]
    return y


def lets_go(self, x):
    h = hold(torch.sin(x))
    y = self.b(self.act(self.a(h)))
    del h
    return look(y)


def test_what_is_deleted_is_free():
    model = type("Model", (Base,), {"forward": lets_go})()
    for converted in (False, True):
        if converted:
            opfuse.convert(model)
        with torch.no_grad():
            model(an_input())
        assert HELD == [True]
    assert opfuse.converted(model)[""] == ""
