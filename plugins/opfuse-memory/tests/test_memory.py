"""opfuse.plan_memory: the gradients stay, the bytes fit the budget, and what cannot be is refused."""

import contextlib
import copy
import functools
import io
import json
import os
import pickle
import random
import re
import types

import numpy as np
import pytest
import torch
from converting import WIDTH, Gated, an_input, assert_same
from families import BERT, GPT2, LLAMA, VIT
from opfuse_memory import MemoryPlan, costs, planning
from opfuse_memory.actions import offloading
from opfuse_memory.costs import Option, front, options_of, pareto
from opfuse_memory.units import units_of
from torch import nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from tuned import tables_in

import opfuse
from opfuse.report.calls import saved_bytes
from opfuse.report.replaced_forward import MEMORY
from opfuse.tuning.timing import MOST_NOISE, Timing

TEXT = LLAMA, GPT2


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Both ways run, and a step with actions is said to take longer the more it keeps less."""
    calls = []

    def in_rounds(ways, device):
        for way in ways:
            way()
        calls.extend(ways)
        return [Timing(1.0, 0.0, 1.0, 1.0)] + [Timing(0.8, 0.0, 1.0, 1.25)] * (len(ways) - 1)

    monkeypatch.setattr(costs, "in_rounds", in_rounds)
    return calls


def inputs_of(family, **more):
    given = family.inputs()
    return given | ({"use_cache": False} if family in TEXT else {}) | more


def kept(model, **given):
    return saved_bytes(lambda: model(**given), model.parameters())


def gradients(model, **given):
    torch.manual_seed(5)
    model.zero_grad()
    loss = model(**given).loss
    loss.backward()
    return [loss.detach(), *[None if p.grad is None else p.grad for p in model.parameters()]]


def assert_equal(mine, theirs, plan=None):
    """To the bit; other fusions, which ``prefer="memory"`` takes, may round otherwise."""
    exact = plan is None or not any("prefer" in choice.option for choice in plan.choices)
    for a, b in zip(mine, theirs, strict=True):
        assert (a is None) == (b is None)
        if a is not None and exact:
            assert torch.equal(a, b)
        elif a is not None:
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6 * float(b.detach().abs().max()))


def lowest(model, **given):
    with pytest.raises(ValueError, match="lowest possible number of bytes is") as caught:
        opfuse.plan_memory(model, budget="1", **given)
    return int(str(caught.value).split("bytes is ")[1].split()[0])


# The contract


@pytest.mark.parametrize("converted", [False, True])
@pytest.mark.parametrize("family", [LLAMA, GPT2, BERT, VIT], ids=lambda f: f.name)
def test_gradients_stay_and_bytes_fit(family, converted):
    model, given = family.make(dropout=0.1), inputs_of(family)
    if converted:
        opfuse.convert(model)
    twin = copy.deepcopy(model)
    expected, unfused = gradients(twin, **given), kept(family.make(dropout=0.1), **given)
    least = lowest(model, **given)
    assert least < 0.5 * unfused and not any(MEMORY in vars(m) for m in model.modules())
    for budget in (0.8, 0.5, f"{least} B"):
        plan = opfuse.plan_memory(model, budget=budget, **given)
        assert plan.unfused == unfused and plan.before == kept(twin, **given)
        assert plan.kept == kept(model, **given) <= plan.budget
        assert plan.kept < plan.before or plan.before <= plan.budget
        assert_equal(gradients(model, **given), expected, plan)
    plan.detach(model)
    assert kept(model, **given) == kept(twin, **given)
    assert [type(m) for m in model.modules()] == [type(m) for m in twin.modules()]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes(dtype):
    model, given = LLAMA.make().to(dtype), inputs_of(LLAMA)
    expected = gradients(copy.deepcopy(model), **given)
    opfuse.plan_memory(model, budget=0.4, **given)
    assert_equal(gradients(model, **given), expected)


def test_autocast():
    model, given = BERT.make(dropout=0.1), inputs_of(BERT)
    opfuse.convert(model)
    twin = copy.deepcopy(model)
    with torch.autocast("cpu", torch.bfloat16):
        plan = opfuse.plan_memory(model, budget=0.5, **given)
        assert plan.kept <= plan.budget
    grads = []
    for each in (model, twin):
        torch.manual_seed(5)
        with torch.autocast("cpu", torch.bfloat16):
            loss = each(**given).loss
        loss.backward()
        grads.append([p.grad for p in each.parameters()])
    assert_equal(*grads)


def test_nothing_is_done_without_grad_mode(quick):
    model, given = VIT.make(), inputs_of(VIT)
    opfuse.plan_memory(model, budget=0.3, **given)
    with torch.no_grad():
        assert model(**given).loss.grad_fn is None
    with torch.inference_mode():
        model(**given)


def test_no_default_changes():
    model = Gated()
    assert not any(MEMORY in vars(m) for m in model.modules())
    assert "memory plan" not in str(opfuse.explain(model, an_input()))


def test_a_frozen_model_with_adapters():
    model, given = LLAMA.make(dropout=0.1), inputs_of(LLAMA)
    for name, param in model.named_parameters():
        param.requires_grad_("q_proj" in name)
    expected = gradients(copy.deepcopy(model), **given)
    plan = opfuse.plan_memory(model, budget=0.5, **given)
    assert plan.kept <= plan.budget
    assert_equal(gradients(model, **given), expected)


class Pair(nn.Module):
    """Takes a tuple and keywords, gives a tuple, and draws random numbers."""

    def __init__(self):
        super().__init__()
        self.inner, self.drop = Gated(), nn.Dropout(0.2)

    def forward(self, pair, *, scale=1.0, extra=None):
        x, y = pair
        x = self.drop(self.inner(x)) * scale + (0 if extra is None else extra["bias"])
        return x, y + x


class Pairs(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Pair() for _ in range(3))

    def forward(self, x):
        pair, bias = (x, x), {"bias": x.mean()}
        for layer in self.layers:
            pair = layer(pair, scale=0.5, extra=bias)
        return pair[0] + pair[1]


def test_tuples_and_keywords():
    model, x = Pairs(), an_input()
    twin = copy.deepcopy(model)
    plan = opfuse.plan_memory(model, x, budget=0.6)
    assert plan.kept <= plan.budget < plan.before
    assert plan.kept == saved_bytes(lambda: model(x), model.parameters())

    def run(which):
        torch.manual_seed(3)
        y = which(x)
        return [y, *torch.autograd.grad(y.square().sum(), [x, *which.parameters()])]

    assert_equal(run(model), run(twin))


def test_what_is_moved_to_the_host_comes_back():
    model, x = Pairs(), an_input()
    results = []
    for block in (contextlib.nullcontext(), offloading("cpu")):
        torch.manual_seed(3)
        with block:
            y = model(x * 1)
        results.append([y, *torch.autograd.grad(y.square().sum(), [x, *model.parameters()])])
    assert_equal(*results)


def test_what_is_moved_is_copied_once_and_parameters_stay(monkeypatch):
    moved = []
    weight = nn.Parameter(torch.rand(4, 4))
    x = torch.rand(3, 4, requires_grad=True) * 1
    monkeypatch.setattr(
        torch, "empty", lambda *a, _of=torch.empty, **k: moved.append(a) or _of(*a, **k)
    )
    with offloading("cpu"):
        y = (x @ weight) * x * x.t().t()
    assert moved == [((3, 4),)] * 3  # x, its product with the weight, and with x
    y.sum().backward()


def test_what_is_kept_is_guarded_against_changes_in_place():
    model, x = Pairs(), an_input()
    opfuse.plan_memory(model, x, budget=0.6)
    moved = x * 1
    y = model(moved)
    with torch.no_grad():
        moved.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


class Noted(nn.Module):
    """A layer with a part that draws random numbers, and one that is called in a list."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([Gated(), nn.Dropout(0.3), Gated()])

    def forward(self, x):
        for part in self.parts:
            x = part(x)
        return x + 1


@pytest.mark.parametrize("converted", [False, True])
def test_every_way_gives_the_same_gradients(converted):
    """Also those that are not chosen: each way of each unit by itself."""
    model, x = nn.Sequential(Noted(), nn.Linear(WIDTH, WIDTH), Noted()), an_input()
    if converted:
        opfuse.convert(model)
    known = costs.Costs(model, torch.device("cpu"), measure=False)
    units = units_of(model, lambda: model(x))
    assert [unit.place.path for unit in units] == ["0", "1", "2"]

    def run():
        torch.manual_seed(3)
        y = model(x)
        return [y, *torch.autograd.grad(y.square().sum(), [x, *model.parameters()])]

    expected, names = run(), set()
    for unit in units:
        for option in known.options(unit):
            names.add(option.name)
            with costs.acting(costs.placed(unit, option.actions)):
                assert_equal(run(), expected)
                kept_bytes = saved_bytes(lambda: model(x), model.parameters())
            whole = saved_bytes(lambda: model(x), model.parameters())
            assert (kept_bytes < whole) is bool(option.actions)
    parts = "recompute the chain" if converted else "recompute parts.0 and parts.2"
    assert {"as it is", "recompute", parts} <= names


# What must run once


def test_a_cache_is_not_written_twice():
    model, given = LLAMA.make(), LLAMA.inputs()
    twin = copy.deepcopy(model)
    with pytest.raises(ValueError, match="is called with a DynamicCache"):
        opfuse.plan_memory(model, budget=0.3, **given)
    opfuse.plan_memory(model, budget=0.3, **given, use_cache=False)
    assert_equal(gradients(model, **given), gradients(twin, **given))
    assert "it ran as it is: it is called with a DynamicCache" in str(
        opfuse.explain(model, **given)
    )
    mine, theirs = (m(**given).past_key_values.get_seq_length() for m in (model, twin))
    assert mine == theirs


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.GELU())
            for _ in range(2)
        )

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def test_statistics_are_tracked_once():
    model, x = Normed(), an_input(6)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="its forward changes 1.num_batches_tracked"):
        opfuse.plan_memory(model, x, budget=0.2)
    with pytest.raises(ValueError, match="BatchNorm1d tracks statistics"):  # it may train later
        opfuse.plan_memory(model.eval(), x, budget=0.2)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Gated()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls.add_(1)
        return self.inner(x)


def test_a_layer_that_changes_its_buffer_runs_once():
    model, x = nn.Sequential(Counting(), Counting()), an_input()
    with pytest.raises(ValueError, match="its forward changes calls"):
        opfuse.plan_memory(model, x, budget="100 B")
    assert model[0].calls == 0


# What is around it


def planned(family=LLAMA, budget=0.4, **how):
    model, given = family.make(**how), inputs_of(family)
    twin = copy.deepcopy(model)
    return model, twin, given, opfuse.plan_memory(model, budget=budget, **given)


class Stateful(nn.Module):
    """A layer whose second run differs from its first, in one of several ways."""

    def __init__(self, way):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.way, self.calls, self.made = way, 0, []
        self.own = torch.Generator().manual_seed(3)
        self.held = types.SimpleNamespace(calls=0, hidden=types.SimpleNamespace(calls=0))

    def forward(self, x, generator=None):
        h = nn.functional.gelu(self.up(x))
        if self.way == "own generator":
            h = h * (torch.rand(h.shape, generator=self.own) > 0.5)
        elif self.way == "generator":
            h = h * (torch.rand(h.shape, generator=generator) > 0.5)
        elif self.way == "random":
            h = h * random.random()
        elif self.way == "numpy":
            h = h * np.random.rand()
        elif self.way == "count":
            self.calls += 1
        elif self.way == "list":
            self.made.append(h)
        elif self.way == "held":
            self.held.calls += 1
        elif self.way == "held deep":
            self.held.hidden.calls += 1
        elif self.way == "hidden":
            h = h * int.from_bytes(os.urandom(4), "little")
        return x + self.down(h)


class Layers(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x, *more):
        for layer in self.layers:
            x = layer(x, *more)
        return x


@pytest.mark.parametrize(
    ("way", "why"),
    [
        ("own generator", "its forward changes own"),
        ("generator", "it is called with a Generator"),
        ("random", "its forward changes Python's random numbers"),
        ("numpy", "its forward changes NumPy's random numbers"),
        ("count", "its forward changes calls"),
        ("list", "its forward changes made"),
        ("held", "its forward changes held.calls"),
        ("held deep", "its forward changes held.hidden.calls"),
        ("hidden", "its forward gives other numbers when it runs again"),
    ],
)
def test_what_would_not_repeat_is_not_computed_again(way, why):
    model = Layers(Stateful(way), Stateful(way), Stateful("none"), Stateful("none"))
    given = [torch.Generator()] if way == "generator" else []
    with pytest.raises(ValueError, match=f"(?s)lowest possible.*computed again: {why}"):
        opfuse.plan_memory(model, torch.randn(32, WIDTH), *given, budget="1")


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("parameter", "up.weight"),
        ("another parameter", "up.weight"),
        ("buffer", "norm.shift"),
        ("functional", "norm.weight"),
        ("mode", "training"),
        ("dropout", "drop.p"),
        ("eps", "norm.eps"),
        ("hook", "norm._forward_hooks"),
    ],
)
def test_nothing_may_change_before_the_backward(what, named):
    model, x = Layers(*[DropsOut() for _ in range(4)]), torch.randn(32, WIDTH)
    for layer in model.layers:
        layer.norm.register_buffer("shift", torch.zeros(1))
    opfuse.plan_memory(model, x, budget=0.25, measure=False)
    first, params = model.layers[0], {k: 1.5 * p for k, p in model.named_parameters()}
    loss = (functional_call(model, params, x) if what == "functional" else model(x)).sum()
    if what == "mode":
        model.eval()
    elif what == "dropout":
        first.drop.p = 0.2
    elif what == "eps":
        first.norm.eps = 0.1
    elif what == "hook":
        first.norm.register_forward_hook(lambda module, args, output: 2 * output)
    elif what == "another parameter":
        first.up.weight = nn.Parameter(2 * first.up.weight)
    elif what == "buffer":
        first.norm.shift.add_(1)
    elif what == "parameter":
        with torch.no_grad():
            first.up.weight.mul_(2)
    with pytest.raises(RuntimeError, match=f"DropsOut: {named} was changed between the forward"):
        loss.backward()


class DropsOut(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(0.1)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.drop(self.down(nn.functional.gelu(self.up(self.norm(x)))))


@pytest.mark.parametrize("converted", [False, True])
def test_another_forward_may_come_before_the_backward(converted):
    """In another mode, and with other shares dropped out, if both are back before the backward."""
    model, x = nn.Sequential(DropsOut(), DropsOut()), an_input(6)
    if converted:
        opfuse.convert(model)
    planned = copy.deepcopy(model)
    plan = opfuse.plan_memory(planned, x, budget=0.4, measure=False)
    assert ("chain of" in str(plan)) is converted
    found = []
    for each in (model, planned):
        torch.manual_seed(0)
        loss = each(x).square().sum()
        each.eval()(x)
        for layer in each.train():
            layer.drop.p = 0.5
        each(x)
        for layer in each:
            layer.drop.p = 0.1
        loss.backward()
        found.append([param.grad for param in each.parameters()])
    torch.testing.assert_close(*found)


def test_a_list_among_the_arguments_is_the_callers():
    class Appending(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Stateful("none")

        def forward(self, x, seen):
            x = self.inner(x)
            seen.append(x)
            return x

    model = Layers(*[Appending() for _ in range(3)])
    x = torch.randn(32, WIDTH)
    plan, found = opfuse.plan_memory(model, x, [], budget=0.5), []
    assert any("recompute" in choice.option for choice in plan.choices)
    for attached in (True, False):
        seen = []
        model.zero_grad()
        (model(x, seen).sum() + sum(each.square().sum() for each in seen)).backward()
        assert len(seen) == 3
        found.append([p.grad.clone() for p in model.parameters()])
        if attached:
            plan.detach(model)
    assert_equal(*found, plan)


def test_a_user_checkpoints_a_layer_himself():
    model, x = Pairs(), an_input()
    twin = copy.deepcopy(model)
    opfuse.plan_memory(model, x, budget=0.6)
    for reentrant in (False, True):
        grads = []
        for each in (model, twin):
            torch.manual_seed(3)
            y = checkpoint(each, x, use_reentrant=reentrant)
            each.zero_grad()
            y.square().sum().backward()
            grads.append([p.grad for p in each.parameters()])
        assert_equal(*grads)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_of_transformers_comes_first(reentrant):
    model, twin, given, _ = planned(dropout=0.1)
    for each in (model, twin):
        each.gradient_checkpointing_enable({"use_reentrant": reentrant})
        each.get_input_embeddings().weight.requires_grad_()
    assert_equal(gradients(model, **given), gradients(twin, **given))
    with pytest.raises(ValueError, match="gradient checkpointing is on"):
        opfuse.plan_memory(model, budget=0.5, **given)


@pytest.mark.costly(1)
@pytest.mark.parametrize("budget", [0.3, 0.6])
def test_torch_compile(budget):
    torch._dynamo.reset()
    model, twin, given, _ = planned(budget=budget)
    expected = gradients(twin, **given)
    graph = torch.compile(model, backend="aot_eager", fullgraph=True)
    model.zero_grad()
    loss = graph(**given).loss
    loss.backward()
    for param, grad in zip(model.parameters(), expected[1:], strict=True):
        torch.testing.assert_close(param.grad, grad, rtol=1e-4, atol=1e-6)
    torch._dynamo.reset()


def test_convert_and_revert_after_the_plan():
    model, twin, given, plan = planned(BERT, 0.5, dropout=0.1)
    report = opfuse.convert(model)
    assert len(report.converted) == len(opfuse.convert(copy.deepcopy(twin)).converted)
    other = copy.deepcopy(twin)
    opfuse.convert(other)
    assert_equal(gradients(model, **given), gradients(other, **given))
    opfuse.revert(model)
    assert kept(model, **given) == plan.kept
    assert_equal(gradients(model, **given), gradients(twin, **given))
    plan.detach(model)
    assert [type(m) for m in model.modules()] == [type(m) for m in twin.modules()]


def test_revert_before_detach_and_the_other_way_round():
    for first in ("revert", "detach"):
        model, given = BERT.make(), inputs_of(BERT)
        twin = copy.deepcopy(model)
        opfuse.convert(model)
        plan = opfuse.plan_memory(model, budget=0.5, **given)
        plan.detach(model) if first == "detach" else opfuse.revert(model)
        gradients(model, **given)
        plan.detach(model) if first == "revert" else opfuse.revert(model)
        assert [type(m) for m in model.modules()] == [type(m) for m in twin.modules()]
        assert_equal(gradients(model, **given), gradients(twin, **given))


def test_copies_pickles_and_states():
    model, twin, given, plan = planned(VIT, 0.5, dropout=0.1)
    copied = copy.deepcopy(model)
    assert kept(copied, **given) == plan.kept
    assert_equal(gradients(copied, **given), gradients(twin, **given))
    loaded = pickle.loads(pickle.dumps(model))
    assert not any(MEMORY in vars(m) for m in loaded.modules())
    assert type(loaded.vit.layers[0]) is type(twin.vit.layers[0])
    assert model.state_dict().keys() == twin.state_dict().keys()
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    plan.detach(copied)
    assert kept(model, **given) == plan.kept < kept(copied, **given)


def test_a_plan_is_data():
    _, twin, given, plan = planned(LLAMA, 0.5)
    again = MemoryPlan.from_dict(json.loads(json.dumps(plan.to_dict())))
    assert again == plan and str(again) == str(plan)
    again.attach(twin)
    assert kept(twin, **given) == plan.kept
    with pytest.raises(ValueError, match="a module 'model.layers"):
        again.attach(Gated())


def test_a_plan_for_chains_needs_them():
    model, given = BERT.make(), inputs_of(BERT)
    twin = copy.deepcopy(model)
    opfuse.convert(model)
    plan = opfuse.plan_memory(model, budget=f"{lowest(model, **given)}", **given)
    assert any(chain for c in plan.choices for _, chain, _ in c.actions)
    with pytest.raises(ValueError, match="is converted"):
        plan.attach(twin)
    assert not any(MEMORY in vars(m) for m in twin.modules())


def test_a_later_plan_replaces_an_earlier_one():
    model, twin, given, plan = planned(budget=0.4)
    loose = opfuse.plan_memory(model, budget=1.0, **given)
    assert loose.kept == kept(model, **given) == kept(twin, **given)
    assert loose.added == 0 and loose.before == plan.before
    tight = opfuse.plan_memory(model, budget=0.4, **given)
    lowest(model, **given)  # what is refused leaves the plan
    assert kept(model, **given) == tight.kept == plan.kept


# The choice


def test_the_choice_is_the_least_time():
    torch.manual_seed(0)
    for trial in range(20):
        draw = torch.rand(4, 3, 2, generator=torch.Generator().manual_seed(trial))
        units = [
            pareto(Option(int(b * 100), round(float(s), 3)) for b, s in rows.tolist())
            for rows in draw
        ]
        every = [(0, 0.0)]
        for options in units:
            every = [(b + o.nbytes, s + o.seconds) for b, s in every for o in options]
        points = front(units)
        for most in range(0, 400, 7):
            least = min([round(s * 1e6) for b, s in every if b <= most], default=None)
            fitting = [p for p in points if p.nbytes <= most]
            assert (fitting[-1].ticks if fitting else None) == least


class Casts(TorchDispatchMode):
    """Counts what is cast to bf16."""

    keeps_no_tensors = True

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += (kwargs or {}).get("dtype") is torch.bfloat16
        return func(*args, **(kwargs or {}))


def test_each_step_under_autocast_casts_its_weights():
    """As in a training step, whose autocast block ends. Within one block PyTorch keeps the casts."""
    linear, x, found = nn.Linear(8, 8, bias=False), torch.randn(4, 8), []
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16), Casts() as casts:
            for _ in range(1 + len(found)):
                costs.step(lambda: linear(x).float().sum(), [linear.weight])
        found.append(casts.count)
    assert found[0] >= 2 and found == [found[0], 2 * found[0], 3 * found[0]]


@pytest.mark.parametrize("extra", [1e-4, 0.1])
def test_of_choices_as_fast_it_is_the_one_that_keeps_less(monkeypatch, extra):
    """A step takes a second, and each action makes it so much longer."""

    def in_rounds(ways, device):
        found = Timing(1 / (1 + extra), 0.0, 1.0, 1 + extra)
        return [Timing(1.0, 0.0, 1.0, 1.0)] + [found] * (len(ways) - 1)

    monkeypatch.setattr(costs, "in_rounds", in_rounds)
    model, given = LLAMA.make(), inputs_of(LLAMA)
    least = lowest(model, **given)
    assert least < 0.7 * opfuse.plan_memory(model, **given).unfused
    plan = opfuse.plan_memory(model, budget=0.95, **given)
    assert (plan.kept == least) == (extra < MOST_NOISE) and plan.kept <= plan.budget


def test_earlier_layers_keep_less():
    units = [[Option(1, 2.0), Option(5, 0.0)]] * 4
    (point,) = [p for p in front(units) if p.nbytes == 12]
    assert options_of(point, units, ["a"] * 4) == [0, 0, 1, 1]


def test_the_same_table_gives_the_same_choice(tmp_path, quick):
    with tables_in(tmp_path):
        model, given = LLAMA.make(), inputs_of(LLAMA)
        first = opfuse.plan_memory(model, budget=0.5, **given)
        measured = len(quick)
        assert measured > 3
        second = opfuse.plan_memory(copy.deepcopy(model), budget=0.5, **given)
        assert second == first and len(quick) == measured
        opfuse.plan_memory(model, budget=0.9, **given)
        assert len(quick) <= measured + 4  # steps of the whole model
        with opfuse.plugins.using(""):
            opfuse.plan_memory(model, budget=0.5, **given)
        assert len(quick) > measured + 6  # other times


class Configured(nn.Module):
    """Layers that differ in what a dict of theirs holds."""

    def __init__(self, times, holder=dict):
        super().__init__()
        self.config, self.up = holder(times=times), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        h, config = self.up(x), self.config
        for _ in range(config["times"] if isinstance(config, dict) else config.times):
            h = torch.tanh(h) * torch.sigmoid(h)
        return x + h


@pytest.mark.parametrize("holder", [dict, types.SimpleNamespace])
def test_layers_that_differ_in_a_dict_or_an_object_are_not_alike(holder, quick):
    model = nn.Sequential(*[Configured(times, holder) for times in (1, 0, 6, 6)])
    units = units_of(model, lambda: model(an_input()))
    assert len({unit.kind for unit in units}) == 3 and units[2].kind == units[3].kind
    plan = opfuse.plan_memory(model, an_input(), budget=0.4)
    assert plan.kept <= plan.budget
    assert [choice.option != "as it is" for choice in plan.choices][2:] == [True, True]


class Acting(nn.Module):
    def __init__(self, act):
        super().__init__()
        self.up, self.act = nn.Linear(WIDTH, WIDTH), act

    def forward(self, x):
        return self.act(self.up(x))


@pytest.mark.parametrize(
    "acts, kinds",
    [
        ((nn.functional.silu, nn.functional.silu, nn.functional.relu), 2),
        ((torch.relu, torch.relu, torch.tanh), 2),
        ((lambda x: x.relu(), lambda x: x.tanh()), 2),
        ([functools.partial(torch.pow, exponent=number) for number in (2, 3)], 2),
    ],
    ids=["functions", "builtins", "lambdas", "partials"],
)
def test_layers_that_differ_in_a_function_are_not_alike(acts, kinds):
    model = nn.Sequential(*map(Acting, acts))
    assert len({unit.kind for unit in units_of(model, lambda: model(an_input()))}) == kinds


def test_layers_that_are_alike_are_measured_once(quick):
    counts = []
    for layers in (2, 5):
        model = LLAMA.make(num_hidden_layers=layers)
        quick.clear()
        opfuse.plan_memory(model, budget=0.6, **inputs_of(LLAMA))
        counts.append(len(quick))
    assert counts[0] == counts[1]


def test_times_are_estimated_without_measuring(quick):
    model, given = LLAMA.make(), inputs_of(LLAMA)
    plan = opfuse.plan_memory(model, budget=0.5, measure=False, **given)
    assert not quick and plan.estimated and plan.kept <= plan.budget and "estimated" in str(plan)
    assert plan.added > 0
    again = opfuse.plan_memory(copy.deepcopy(model), budget=0.5, measure=False, **given)
    assert again == plan


# What is said


def test_what_is_said():
    model, _, given, plan = planned(LLAMA, 0.5)
    said = str(plan)
    assert said.startswith("memory plan: keeps ") and "the budget is" in said
    assert "LlamaDecoderLayer x" in said and len(said.splitlines()) < 20
    assert " less would cost " in plan.next
    report = opfuse.explain(model, **given)
    text = " ".join(str(report).split())
    assert "memory plan: keeps" in text and "model.layers.0" in text
    rows = report.to_dict()["memory"]
    assert {"path": "model.layers.0", "class": "LlamaDecoderLayer", "action": "recompute"} in rows


def test_the_curve(tmp_path):
    model, given = VIT.make(), inputs_of(VIT)
    plan = opfuse.plan_memory(model, **given)
    assert not any(MEMORY in vars(m) for m in model.modules())
    sizes, times = zip(*plan.curve, strict=True)
    assert list(sizes) == sorted(sizes) and list(times) == sorted(times, reverse=True)
    assert sizes[-1] == plan.before == plan.kept
    assert "kept for the backward against the time of a step" in str(plan)
    plan.save(tmp_path / "curve.svg")
    assert (tmp_path / "curve.svg").read_text().startswith("<svg")
    with pytest.raises(ValueError, match="ends with .svg"):
        plan.save(tmp_path / "curve.png")


# What is refused


@pytest.mark.parametrize(
    "budget",
    ["0", 1.5, "12 apples", -1, 0, 1, True, "", [1], float("nan"), "MB", "0.0 GB", "1.0", "0.5"],
)
def test_budgets_that_are_none(budget):
    with pytest.raises(ValueError, match="expected as budget a share above 0 and at most 1"):
        opfuse.plan_memory(Gated(), an_input(), budget=budget)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("200MB", 200e6),
        ("1.5 GiB", 1.5 * 2**30),
        ("10", 10),
        ("7 kb", 7e3),
        ("2 TB", 2e12),
        (38400, 38400),
    ],
)
def test_budgets_in_bytes(text, nbytes):
    assert planning._parsed(text)(1) == int(nbytes)


def test_the_number_that_a_refusal_names_is_taken():
    model, x = nn.Sequential(Gated(), Gated()), an_input()
    with pytest.raises(ValueError, match="the lowest possible number of bytes is") as refusal:
        opfuse.plan_memory(model, x, budget=2, measure=False)
    named = int(re.search(r"bytes is (\d+)", str(refusal.value))[1])
    assert opfuse.plan_memory(model, x, budget=named, measure=False).kept == named


class HeadOfNorms(nn.Module):
    """A chain beside layers and a norm that tracks statistics."""

    def __init__(self):
        super().__init__()
        self.norm, self.layers = nn.BatchNorm1d(WIDTH), nn.ModuleList([nn.Tanh()])
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        x = self.layers[0](self.norm(x))
        return self.down(nn.functional.gelu(self.up(x)))


def test_a_chain_is_computed_again_beside_a_norm_that_is_not():
    model, x = HeadOfNorms(), an_input(6)
    opfuse.convert(model)
    plan = opfuse.plan_memory(model, x, measure=False)
    assert "chain of" not in str(plan) and "BatchNorm1d is not computed again" in str(plan)
    assert plan.curve[0][0] < plan.before


def test_other_refusals():
    with pytest.raises(TypeError, match=r"expected a torch.nn.Module, got function"):
        opfuse.plan_memory(lambda x: x, an_input(), budget=0.5)
    with pytest.raises(TypeError, match="not compiled"):
        opfuse.plan_memory(torch.compile(Gated()), an_input(), budget=0.5)
    model = Gated().requires_grad_(False)
    with pytest.raises(ValueError, match="keeps nothing"):
        opfuse.plan_memory(model, an_input().detach(), budget=0.5)


def test_parameters_buffers_and_random_numbers_stay():
    model, given = BERT.make(dropout=0.3), inputs_of(BERT)
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    opfuse.plan_memory(model, budget=0.5, **given)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_a_model_without_lists():
    model, x = Gated(), an_input()
    twin = copy.deepcopy(model)
    plan = opfuse.plan_memory(model, x, budget=0.5)
    assert plan.kept <= plan.budget
    assert_same(model, twin, x)
