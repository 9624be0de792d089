"""What a forward changes outside of its chain: a memory plan does not do it twice."""

import copy
import types
import weakref

import pytest
import torch
from torch import nn

import opfuse

WIDTH = 16


def given():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(6, WIDTH, generator=generator).requires_grad_()


WHERE = {"count": 0}  # what is changed outside of any module
DRAWS = torch.Generator()
HELD = 0


def helper():
    WHERE["count"] += 1
    return 0.1 * WHERE["count"]


def outer():
    count = 0

    def inner():
        nonlocal count
        count += 1
        return 0.1 * count

    return inner


class Slots:
    __slots__ = ("count",)

    def __init__(self):
        self.count = 0


class Later(nn.Module):
    """A layer that begins to change something after some calls."""

    def __init__(self, way):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.register_buffer("average", torch.zeros(()))
        self.teacher = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
        self.way, self.begun, self.made, self.deep = way, False, [], {"a": [{"b": 0}]}
        self.inner, self.slots, self.weak = outer(), Slots(), weakref.WeakKeyDictionary()
        self.object = types.SimpleNamespace(inner=types.SimpleNamespace(count=0))

    def outside(self):
        global HELD
        if self.way == "global":
            HELD += 1
            return 0.1 * HELD
        if self.way == "global generator":
            return torch.rand(1, generator=DRAWS).item()
        if self.way in ("helper", "variable of a function"):
            return helper() if self.way == "helper" else self.inner()
        if self.way == "slots":
            self.slots.count += 1
        elif self.way == "object in an object":
            self.object.inner.count += 1
        elif self.way == "weak":
            self.weak[self.up] = self.weak.get(self.up, 0) + 1
        return 0.1 * (self.slots.count + self.object.inner.count + self.weak.get(self.up, 0))

    def forward(self, x):
        h = torch.nn.functional.gelu(self.up(x))
        if self.begun:
            if self.way == "buffer":
                self.average.add_(h.detach().mean())
            elif self.way == "no version":
                self.average.data.add_(h.detach().mean())
            elif self.way == "another buffer":
                self.average = self.average + h.detach().mean()
            elif self.way == "teacher":
                with torch.no_grad():
                    self.teacher.weight.lerp_(self.up.weight[:WIDTH], 0.5)
            elif self.way == "class":
                self.__class__.calls += 1
            elif self.way == "list":
                self.made.append(1)
            elif self.way in OUTSIDE:
                h = h * (1 + self.outside())
            else:
                self.deep["a"][0]["b"] += 1
        return x + self.down(h) + self.average + self.teacher(x)

    calls = 0

    def told(self):
        numbers = self.average.item(), self.teacher.weight.sum().item()
        return *numbers, type(self).calls, len(self.made), repr(self.deep)


class Layers(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.layers = nn.ModuleList([Later(way) for _ in range(3)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


OUTSIDE = [*("global", "global generator", "helper", "variable of a function")]
OUTSIDE += ["slots", "object in an object", "weak"]
WAYS = *OUTSIDE, "buffer", "no version", "another buffer", "teacher", "class", "list", "deep"


@pytest.mark.costly(8)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("after", ["the plan", "a step", "the forward"])
def test_what_changes_something_later_runs_once_from_then_on(way, after):
    torch.manual_seed(0)
    model = Layers(way)
    plain, x = copy.deepcopy(model), given()
    opfuse.plan_memory(model, x, budget=0.4, measure=False)
    assert "recompute" in str(opfuse.explain(model, x))
    found = []
    for each in (plain, model):
        globals().update(HELD=0), WHERE.update(count=0), DRAWS.manual_seed(0)
        Later.calls, told = 0, []
        for layer in each.layers:
            layer.inner = outer()  # a copy has the same
        for step in range(4):
            each.layers[1].begun = step > 0 or after == "the plan"
            loss = each(x).square().mean()
            grads = torch.autograd.grad(loss, [p for p in each.parameters() if p.requires_grad])
            told.append((loss.detach(), grads, [layer.told() for layer in each.layers]))
        found.append(told)
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one[:2], other[:2])
        assert str(one[2]) == str(other[2])
    said = str(opfuse.explain(model, x))
    assert "it ran as it is: its forward changes" in said and said.count("its forward changes") == 1


def test_what_may_take_the_next_of_an_iterator_runs_once():
    class Numbers(Later):
        def __init__(self):
            super().__init__("")
            self.numbers = iter(range(100))

        def forward(self, x):
            return super().forward(x * next(self.numbers))

    model = nn.Sequential(Numbers(), Numbers())
    with pytest.raises(ValueError, match="its forward changes numbers"):
        opfuse.plan_memory(model, given(), budget=0.4, measure=False)


def test_what_changes_nothing_keeps_no_more_under_a_plan():
    model, x = Layers("list"), given()
    plan = opfuse.plan_memory(model, x, budget=0.4, measure=False)
    trained = [*model.parameters()]
    for _ in range(3):
        assert opfuse.report.calls.saved_bytes(lambda: model(x), trained) == plan.kept


class Forwards(nn.Module):
    """A wrapper that looks in its module for what it lacks itself, and counts that."""

    def __init__(self):
        super().__init__()
        self.inner, self.asked = Later(""), 0

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            vars(self)["asked"] += 1
            return getattr(super().__getattr__("inner"), name)

    def forward(self, x):
        return self.inner(x) + x


def test_a_plan_asks_a_module_for_no_attribute_that_it_lacks():
    model, x = nn.ModuleList([Forwards()])[0], given()
    opfuse.plan_memory(model, x, measure=False, budget=1.0)
    for look in (opfuse.convert, lambda m: opfuse.explain(m, x), lambda m: m(x), opfuse.revert):
        look(model)
        assert model.asked == 0
