"""What runs a model beside its own calls leaves it as it was, whatever it may be made of."""

from __future__ import annotations

import collections
import copy
import random

import gloo
import numpy as np
import pytest
import torch
import tuning_ranks
from rounding import Rounding, RoundingPlugin
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from tuned import tables_in

import opfuse
from opfuse import ops
from opfuse.core.introspection import standing_for
from opfuse.report.isolation import isolated


@pytest.fixture(autouse=True)
def folder(tmp_path):
    """A folder of its own for the tables."""
    with tables_in(tmp_path / "tables"):
        yield


class Counting(nn.Module):
    """A model in training, whose forward leaves traces."""

    def __init__(self):
        super().__init__()
        self.up, self.norm = nn.Linear(16, 16), nn.BatchNorm1d(16)
        self.chain = opfuse.Sequential(ops.RMSNorm(16), ops.GELU())
        self.register_buffer("latest", torch.zeros(16))
        self.calls, self.seen, self.by_name = 0, [1], {"a": 1}

    def forward(self, x):
        self.calls += 1
        self.seen.append(x.shape)
        self.by_name["a"] = random.random() + float(np.random.rand())
        y = self.chain(self.norm(self.up(x)))
        self.latest = y.detach().mean(0)
        self.new = y
        return y


def test_a_model_in_the_middle_of_a_training_stays_as_it_is():
    model = Counting()
    model(torch.randn(8, 16)).sum().backward()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    grads = [p.grad.clone() for p in model.parameters()]
    latest, new = model.latest, model.new
    before = model.calls, [*model.seen], {**model.by_name}
    drawn = random.getstate(), str(np.random.get_state()), torch.get_rng_state()
    opfuse.tune(model, torch.randn(8, 16))
    torch.set_rng_state(drawn[2])
    assert (model.calls, model.seen, model.by_name) == before
    assert model.latest is latest and model.new is new
    assert (random.getstate(), str(np.random.get_state())) == drawn[:2]
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]), name
    for param, grad in zip(model.parameters(), grads, strict=True):
        assert torch.equal(param.grad, grad)


class Recorder:
    """An object of somebody's own, with a state that the forward changes."""

    def __init__(self):
        self.mean, self.count, self.seen = torch.zeros(16), 0, {"first": torch.zeros(2)}


class Slots:
    """One whose attributes are in slots, and in those of a class above."""

    __slots__ = ("count", "mean")

    def __init__(self):
        self.count, self.mean = 0, torch.zeros(4)


class MoreSlots(Slots):
    __slots__ = "late"


class Remembers(nn.Module):
    """A model whose forward writes into everything that it has."""

    def __init__(self):
        super().__init__()
        self.up, self.chain = nn.Linear(16, 16), opfuse.Sequential(ops.RMSNorm(16), ops.GELU())
        self.hidden = [nn.Linear(16, 16)]  # from optimizers, as a momentum encoder
        self.generator = torch.Generator().manual_seed(5)
        self.drawing = {"a": random.Random(3), "b": (np.random.default_rng(1),)}
        self.legacy, self.array = np.random.RandomState(2), np.zeros(3)
        self.mean, self.in_list = torch.zeros(16), [torch.zeros(3), (torch.zeros(4),)]
        self.row = torch.zeros(1).expand(5)
        self.tangled, self.recorder = torch.ones(2, 3), Recorder()
        self.recent, self.slots = collections.deque([1, 2], maxlen=2), MoreSlots()

    def everything(self):
        """All values, as what can be compared."""
        tensors = [*self.state_dict().values(), *self.hidden[0].parameters(), self.mean, self.row]
        tensors += [self.in_list[0], self.in_list[1][0], self.recorder.mean, self.tangled]
        tensors += [self.slots.mean, self.recorder.seen["first"], self.generator.get_state()]
        numpys = self.drawing["b"][0].bit_generator.state, self.legacy.get_state(), self.array
        in_slots = self.slots.count, hasattr(self.slots, "late")
        rest = (
            in_slots,
            self.recorder.count,
            [*self.recorder.seen],
            [*self.recent],
            len(self.in_list),
        )
        needs = [p.requires_grad for p in self.parameters()]
        kept = [t.tolist() for t in tensors], self.drawing["a"].getstate(), str(numpys)
        return *kept, rest, needs, [id(p) for p in self.parameters()]

    def forward(self, x):
        with torch.no_grad():
            self.up.weight.mul_(0.5)
            self.up.bias.data.add_(1)  # no version tells
            self.hidden[0].weight.lerp_(self.up.weight, 0.1)
            self.mean.lerp_(x.mean(0), 0.1)
            self.row._base.add_(1)
            self.tangled.data = torch.zeros(7)
            self.recorder.mean += 1
            self.recorder.seen["first"] += 1
            self.chain[0].weight.mul_(2)
        self.up.bias.requires_grad_(False)
        self.in_list[0] += 1
        self.in_list[1][0].add_(1)
        self.in_list.append(1)
        self.recorder.count += 1
        self.slots.mean += 1
        self.slots.count, self.slots.late = 1, 2
        self.recorder.seen["second"] = 1
        self.recent.append(3)
        self.array += self.drawing["a"].random() + self.drawing["b"][0].random()
        self.array += self.legacy.rand()
        noise = torch.randn(x.shape, generator=self.generator)
        return self.chain(self.up(x + noise))


def test_what_a_forward_writes_into_is_as_it_was():
    model = Remembers()
    before, versions = model.everything(), [p._version for p in model.hidden[0].parameters()]
    opfuse.tune(model, torch.randn(8, 16))
    for now, then in zip(model.everything(), before, strict=True):
        assert now == then
    weight, bias = model.hidden[0].parameters()
    assert weight._version > versions[0], "a cast of the weight is made again"
    assert bias._version == versions[1], "what did not change is not written"


def test_tensors_without_values_do_not_disturb():
    """On the meta device, not yet made, in parts, of inference, sparse."""
    model = nn.Module()
    model.meta, model.lazy = nn.Linear(4, 4, device="meta"), nn.LazyLinear(3)
    model.parts = nn.Parameter(TwoTensor(torch.zeros(3), torch.ones(3)))
    model.sparse = torch.eye(3).to_sparse()
    with torch.inference_mode():
        model.inference = torch.zeros(3)
    with isolated(model):
        with torch.no_grad():
            model.parts.add_(1)
        with torch.inference_mode():
            model.inference.add_(1)
    assert model.parts.a.tolist() == [0, 0, 0] and model.parts.b.tolist() == [1, 1, 1]
    assert model.inference.tolist() == [0, 0, 0]


@pytest.mark.parametrize("look", [opfuse.explain, opfuse.tune])
def test_what_a_first_call_makes_is_made_again_by_the_next_one(look):
    def lazy():
        return nn.Sequential(nn.LazyLinear(16), nn.LazyBatchNorm1d(), nn.GELU(), nn.LazyLinear(4))

    model, twin, x = lazy(), lazy(), torch.randn(8, 6)
    for _ in range(2):
        look(model, x)
    assert [*map(type, model.parameters())] == [*map(type, twin.parameters())]
    results = []
    for each in (model, twin):
        torch.manual_seed(3)
        results += [each(x), each.state_dict()]
    torch.testing.assert_close(results[:2], results[2:], rtol=0, atol=0)


def test_a_sharded_model_is_as_it_was(tmp_path):
    gloo.apart(tuning_ranks.sharded, tmp_path)


@pytest.fixture
def offered():
    """A recipe with state."""
    record = opfuse.plugins.register(RoundingPlugin(), name="rounding", distribution="rounding")
    with opfuse.plugins.using("rounding"):
        yield Rounding(levels=8)
    opfuse.plugins.remove(record)


@pytest.mark.parametrize("where", ["before", "inside"])
def test_the_state_of_quantizers_is_as_it_was(offered, where):
    """Explaining at any time, inside of a block too, changes no scale of a later step."""
    found = []
    for looked_at in (False, True):
        torch.manual_seed(0)
        chain = opfuse.Sequential(ops.Linear(16, 16), ops.GELU(), ops.Linear(16, 16))
        told = []
        for step in range(3):
            x = (1 + step) * torch.randn(8, 16)
            with opfuse.autocast(recipe=offered):
                if looked_at and where == "before":
                    opfuse.explain(chain, 100 * x)
                y = chain(x)
                if looked_at and where == "inside":
                    opfuse.explain(chain, 100 * x)
            y.square().mean().backward()
            told.append(y.detach())
        found.append((told, chain.state_dict()))
    torch.testing.assert_close(*found, rtol=0, atol=0)


class Noisy(nn.Module):
    """A parametrization that counts how often it runs."""

    runs = 0

    def forward(self, weight):
        type(self).runs += 1
        return weight + torch.rand(())


def test_looking_up_a_plan_runs_no_parametrization_for_good():
    chain, x = opfuse.Sequential(ops.Linear(16, 16), ops.GELU()), torch.randn(8, 16)
    nn.utils.parametrize.register_parametrization(chain[0], "weight", Noisy())
    Noisy.runs, before = 0, torch.get_rng_state()
    assert opfuse.report.calls.plan_of(chain, x) is not None
    assert standing_for(chain[0], "weight") is chain[0].parametrizations.weight.original
    assert Noisy.runs == 0 and torch.equal(torch.get_rng_state(), before)
    compiled = torch.compile(chain, backend="eager")
    compiled(x), compiled(x)
    assert Noisy.runs <= 2, "planning while it is traced runs it, too"


class Widening(nn.Module):
    """A parametrization of another shape, which counts how often it runs, and draws."""

    def __init__(self):
        super().__init__()
        self.runs, self.seen = 0, []

    def forward(self, weight):
        self.runs += 1
        self.seen.append(torch.rand(()))
        return torch.cat((weight, weight))


def test_a_parameter_of_another_shape_is_looked_at_by_a_copy_of_what_computes_it():
    module, widening = nn.Linear(4, 2, bias=False), Widening()
    nn.utils.parametrize.register_parametrization(module, "weight", widening, unsafe=True)
    runs, seen, before = widening.runs, [*widening.seen], torch.get_rng_state()
    with torch.no_grad():
        found = standing_for(module, "weight")
    assert found.shape == (4, 4) and found.dtype == torch.float32 and found.requires_grad
    assert (widening.runs, widening.seen) == (runs, seen)
    assert torch.equal(torch.get_rng_state(), before)


def test_spectral_norm_advances_once_in_a_call():
    chain = opfuse.Sequential(ops.Linear(16, 16), ops.GELU())
    nn.utils.parametrizations.spectral_norm(chain[0])
    twin, x = copy.deepcopy(chain), torch.randn(8, 16)
    assert standing_for(chain[0], "weight").requires_grad
    assert opfuse.report.calls.plan_of(chain, x).backward
    assert torch.equal(chain(x), twin(x))
