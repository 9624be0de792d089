"""A model of spies: what opfuse does beside the calls themselves is seen by none of them.

Each entry point and each first call leaves everything as the model that was not converted would.
"""

import contextlib
import copy
import dataclasses
import importlib.util
import random
import types

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from tuned import tables_in

import opfuse
from opfuse.cli import doctor
from opfuse.tuning import job, trial, whole
from opfuse.tuning import table as tables
from opfuse.tuning.timing import Timing

WIDTH = 16
READS = []  # of a parametrization, counted where nothing is put back


@pytest.fixture
def table(tmp_path, monkeypatch):
    """A table of measurements with an entry, which is about something else; nothing is timed."""
    cpu, mode = torch.device("cpu"), [None, False, False]
    subject = {"plugin": None, "pass": "step", "fusion": "another", "mode": mode}
    found = dataclasses.asdict(tables.Measurement(1.0, 0.0, 1.0))
    subject |= {"dtype": [None], "options": []}
    row = {"setting": tables.setting(cpu), "subject": subject, "shape": [0, 0, True]}
    for module in (trial, whole):
        monkeypatch.setattr(module, "compare", lambda *given, **how: Timing(1.0, 0.0, 1.0, 1.0))
    with tables_in(tmp_path):
        job.add(tables.path_for(cpu), [row | {"found": found}])
        tables.reload()
        assert tables.table_for(cpu).entries
        yield


class Reads(nn.Module):
    """A parametrization that counts, draws and observes."""

    def __init__(self):
        super().__init__()
        self.register_buffer("largest", torch.zeros(()))
        self.count = 0

    def forward(self, weight):
        READS.append(1)
        self.count += 1
        torch.maximum(self.largest, weight.detach().abs().max() + self.count, out=self.largest)
        return weight * (1 + 0.01 * torch.rand(()))


class MLP(nn.Module):
    """A part whose forward a chain replaces, with a class that counts its calls."""

    calls, log = 0, []

    def __init__(self, spectral=False):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        parametrize.register_parametrization(self.up, "weight", Reads())
        if spectral:
            parametrizations.spectral_norm(self.down)

    def forward(self, x):
        self.__class__.calls += 1
        self.log.append(len(x))
        return self.down(nn.functional.gelu(self.up(x)))


class Spies(nn.Module):
    """A model whose forward leaves traces of every kind."""

    def __init__(self):
        super().__init__()
        self.norm, self.layers = nn.BatchNorm1d(WIDTH), nn.ModuleList([MLP(), MLP(spectral=True)])
        self.teacher = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.register_buffer("latest", torch.zeros(WIDTH))
        self.register_buffer("average", torch.zeros(WIDTH))
        self.generator = torch.Generator().manual_seed(5)
        self.calls, self.seen, self.deep = 0, [], {"a": [{"b": 0}]}
        self.held = types.SimpleNamespace(calls=0)

    def forward(self, x):
        self.calls += 1
        self.seen.append(tuple(x.shape))
        self.deep["a"][0]["b"] += 1
        self.held.calls += 1
        self.latest = x.detach().mean(0)
        self.average.data.lerp_(self.latest, 0.1)  # no version tells
        with torch.no_grad():
            self.teacher.weight.lerp_(self.layers[0].down.weight[:, :WIDTH], 0.1)
        noise = torch.randn(x.shape, generator=self.generator) * (
            random.random() + np.random.rand()
        )
        x = self.norm(x) + 0.1 * noise + 0.1 * self.teacher(x)
        for layer in self.layers:
            x = x + layer(x)
        return x + torch.randn(())


def made():
    torch.manual_seed(3)
    MLP.calls, MLP.log = 0, []
    return Spies()


def digest(model):
    """All that a call may change, to be compared."""
    found = {name: value.clone() for name, value in model.state_dict(keep_vars=True).items()}
    found |= {
        f"{n}.grad": None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()
    }
    found |= {"own": model.generator.get_state(), "torch": torch.get_rng_state()}
    plain = model.calls, [*model.seen], copy.deepcopy(model.deep), model.held.calls
    counts = [m.count for m in model.modules() if isinstance(m, Reads)]
    flags = [m.training for m in model.modules()], [p.requires_grad for p in model.parameters()]
    drawn = random.getstate(), str(np.random.get_state())
    return found | {"rest": repr((plain, counts, flags, drawn, MLP.calls, MLP.log))}


def assert_alike(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        same = torch.equal if isinstance(value, torch.Tensor) else lambda a, b: a == b
        assert same(value, other[name]), name


class Dispatched(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen += 1
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    seen = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen += 1
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def watched():
    """A block whose spies count what they see: operations, functions, saved tensors."""
    seen, saved = {}, []
    dispatched, functions = Dispatched(), Functions()

    def pack(tensor):
        saved.append(1)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        with dispatched, functions:
            yield seen
    seen |= {"dispatched": dispatched.seen, "functions": functions.seen, "saved": len(saved)}


def given():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(6, WIDTH, generator=generator).requires_grad_()


def picture(model, x, tmp_path):
    opfuse.explain(model, x).save(tmp_path / "plan.svg")


ENTRIES = {
    "convert": lambda model, x, path: opfuse.convert(model),
    "convert and verify": lambda model, x, path: opfuse.convert(model, verify=True),
    "convert with inputs": lambda model, x, path: opfuse.convert(model, x),
    "explain": lambda model, x, path: opfuse.explain(model, x),
    "explain a function": lambda model, x, path: opfuse.explain(lambda x: model(x), x),
    "explain a method": lambda model, x, path: opfuse.explain(model.forward, x),
    "picture": picture,
    "tune": lambda model, x, path: opfuse.tune(model, x),
    "names": lambda model, x, path: opfuse.assign_names(model),
    "freeze": lambda model, x, path: opfuse.freeze(),
    "doctor": lambda model, x, path: doctor.examine(),
    "copy": lambda model, x, path: copy.deepcopy(model),
}
if importlib.util.find_spec("opfuse_memory"):  # which needs this package, and not the other way
    ENTRIES["plan"] = lambda model, x, path: opfuse.plan_memory(model, x, measure=False)


@pytest.mark.costly(10)
@pytest.mark.parametrize("converted", [False, True], ids=["plain", "converted"])
@pytest.mark.parametrize("name", ENTRIES)
def test_an_entry_point_leaves_a_model_as_it_is(name, converted, table, tmp_path):
    model, x = made(), given()
    model(x).sum().backward()
    if converted:
        opfuse.convert(model)
        assert opfuse.converted(model).keys() >= {"layers.0", "layers.1"}
    latest, grads = model.latest, [p.grad for p in model.parameters()]
    before, threads, reads = digest(model), torch.get_num_threads(), len(READS)
    with watched() as seen:
        ENTRIES[name](model, x, tmp_path)
    assert not any(seen.values()) or name in ("copy", "doctor", "freeze"), seen
    assert_alike(digest(model), before)
    assert model.latest is latest and torch.get_num_threads() == threads
    assert all(a is b for a, b in zip([p.grad for p in model.parameters()], grads, strict=True))
    if name in ("names", "freeze", "doctor", "copy"):
        assert len(READS) == reads


def test_an_entry_point_inside_of_a_graph_of_others(table):
    """A checkpoint around it neither keeps nor misses anything."""
    model, x = made(), given()

    def called(x):
        opfuse.explain(model, x)
        return model.layers[0](x)

    checkpoint(called, x, use_reentrant=False, preserve_rng_state=True).sum().backward()
    assert x.grad is not None


CALLS = {
    "train": lambda model, x: model(x).sum().backward(),
    "evaluation": lambda model, x: model.eval()(x).sum().backward(),
    "no grad": lambda model, x: torch.no_grad()(model)(x),
    "inference": lambda model, x: torch.inference_mode()(model)(x),
    "autocast": lambda model, x: torch.autocast("cpu", torch.bfloat16)(model)(x),
    "checkpoint": lambda model, x: checkpoint(model, x, use_reentrant=False).sum().backward(),
    "in a cache": lambda model, x: in_a_cache(model, x),
}
FIRST = {
    "converted": lambda: converted(made()),
    "copied": lambda: copy.deepcopy(converted(made())),
    "tuned": lambda: tuned(converted(made())),
}


def in_a_cache(model, x):
    with parametrize.cached():
        model(x).sum().backward()


def converted(model):
    opfuse.convert(model)
    return model


def tuned(model):
    opfuse.tune(model, given())
    return model


@pytest.mark.costly(8)
@pytest.mark.parametrize("how", CALLS)
@pytest.mark.parametrize("first", FIRST)
def test_a_first_call_changes_what_the_model_changes(first, how, table):
    counts = []
    ends = []
    for make in (made, FIRST[first]):
        model, x = make(), given()
        MLP.calls, MLP.log = 0, []
        random.seed(0), np.random.seed(0), torch.manual_seed(0)
        before = len(READS)
        CALLS[how](model, x)
        ends.append(digest(model))
        counts.append(len(READS) - before)
        random.seed(1), np.random.seed(1), torch.manual_seed(1)
        CALLS[how](model, x)  # of a copy the chain is made by now
    if first == "converted" or how != "checkpoint":
        assert set(opfuse.converted(model).values()) <= {"", *opfuse.converted(model).values()}
    for name, value in ends[0].items():
        other = ends[1][name]
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            torch.testing.assert_close(other, value, msg=name, rtol=1e-3, atol=1e-4)
        else:
            assert (
                torch.equal(value, other) if isinstance(value, torch.Tensor) else value == other
            ), name
    assert counts[0] == counts[1] or first == "copied"


@pytest.mark.parametrize("first", FIRST)
def test_a_first_call_shows_nothing_more_than_a_second(first, table):
    """Operations, functions and saved tensors that others see are those of the call alone."""
    model, x = FIRST[first](), given()
    found = []
    for _ in range(2):
        with watched() as seen:
            model(x)
        found.append(seen)
    assert found[0] == found[1]


def test_a_chain_reads_a_parameter_once(table):
    """With a table, by rows, and where an op runs by itself."""
    chain = opfuse.Sequential(opfuse.ops.Linear(WIDTH, WIDTH), opfuse.ops.GELU())
    parametrize.register_parametrization(chain[0], "weight", Reads())
    for around in (contextlib.nullcontext(), opfuse.options(invariant="batch")):
        before = len(READS)
        with around, torch.no_grad():
            chain(torch.randn(200, WIDTH))
        assert len(READS) == before + 1
    chain[1].forward = lambda x: opfuse.ops.GELU.forward(chain[1], x)
    before = len(READS)
    chain(torch.randn(2, WIDTH))
    assert len(READS) == before + 1


class Drops(nn.Module):
    """A parameter is read behind a dropout, which draws random numbers first."""

    def __init__(self, parametrization):
        super().__init__()
        self.up, self.drop, self.down = MLP(), nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH)
        parametrize.register_parametrization(self.up.down, "weight", Reads())
        if parametrization is Reads:
            parametrize.register_parametrization(self.down, "weight", Reads())
        else:
            parametrization(self.down)

    def forward(self, x):
        return self.down(self.drop(nn.functional.silu(self.up(x))))


@pytest.mark.parametrize(
    "parametrization", [Reads, parametrizations.weight_norm, parametrizations.spectral_norm]
)
def test_random_numbers_are_drawn_in_the_order_of_the_model(parametrization):
    model, x = Drops(parametrization), torch.randn(8, WIDTH)
    twin, found = copy.deepcopy(model), []
    opfuse.convert(model)
    for each in (model, twin):
        torch.manual_seed(3)
        for _ in range(2):
            y = each(x)
            y.square().sum().backward()
            found.append([y, *[p.grad for p in each.parameters()], torch.get_rng_state()])
    torch.testing.assert_close(found[:2], found[2:])
    assert opfuse.converted(model)["up"] == ""
    assert (opfuse.converted(model).get("") == "") == (parametrization is not Reads)


class Forwards(nn.Module):
    """A wrapper that looks in its module for what it lacks itself, and counts that."""

    def __init__(self):
        super().__init__()
        self.inner, self.asked = MLP(), 0

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            vars(self)["asked"] += 1
            return getattr(super().__getattr__("inner"), name)

    def forward(self, x):
        return self.inner(x) + x


def test_a_conversion_asks_a_module_for_no_attribute_that_it_lacks(table):
    model, x = nn.ModuleList([Forwards()])[0], torch.randn(8, WIDTH)
    for look in (opfuse.convert, lambda m: opfuse.explain(m, x), lambda m: m(x), opfuse.revert):
        look(model)
        assert model.asked == 0


class Setting(nn.Module):
    """A layer that counts each attribute that is set, and draws its weight, outside of itself."""

    def __init__(self):
        super().__init__()
        vars(self)["set"] = 0
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        parametrize.register_parametrization(self.up, "weight", Drawn(), unsafe=True)

    def __setattr__(self, name, value):
        vars(self)["set"] += 1
        super().__setattr__(name, value)

    def forward(self, x):
        return self.down(torch.nn.functional.gelu(self.up(x)))


DRAWS = torch.Generator()


class Drawn(nn.Module):
    def forward(self, weight):
        return weight + torch.rand(1, generator=DRAWS)


@pytest.mark.parametrize("inputs", [(), (torch.ones(2, WIDTH),)])
def test_what_a_conversion_does_is_not_seen_outside_of_the_model(inputs):
    model = Setting()
    before = model.set, DRAWS.get_state().tolist()
    opfuse.convert(model, *inputs)
    opfuse.revert(model)
    assert (model.set, DRAWS.get_state().tolist()) == before


# Classes


class Counted(nn.Module):
    calls = 0

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        self.__class__.calls += 1
        return self.down(nn.functional.gelu(self.up(x)))


def counted():
    torch.manual_seed(0)
    return nn.ModuleList([type("Counted", (Counted,), {"forward": Counted.forward})()])[0]


def test_what_is_set_on_the_class_of_a_converted_module_is_set_on_its_class():
    model, x = Counted(), given()
    Counted.calls = 0
    opfuse.convert(model)
    model(x)
    assert opfuse.converted(model) == {"": ""} and Counted.calls == Counted().calls == 1
    type(model).mark = 3
    assert Counted.mark == 3 == model.mark
    del type(model).mark
    assert not hasattr(Counted, "mark") and not hasattr(model, "mark")


@pytest.mark.parametrize("through", ["the module", "the class"])
def test_a_patch_of_a_class_is_as_without_a_conversion(through):
    torch.manual_seed(0)
    model, late, plain = Counted(), Counted(), Counted()
    late.load_state_dict(model.state_dict()), plain.load_state_dict(model.state_dict())
    x, own = given(), Counted.forward
    expected = model(x)
    opfuse.convert(model)
    cls = type(model) if through == "the module" else Counted
    before = cls.forward

    def patched(self, x):
        return -before(self, x)

    cls.forward = patched
    try:
        for _ in range(2):
            assert Counted.forward is patched is cls.forward
            for each in (model, late, plain, copy.deepcopy(model)):
                torch.testing.assert_close(each(x), -expected)
            opfuse.convert(late)
        cls.forward = before
        assert Counted.forward is own
        for each in (model, late, plain):
            torch.testing.assert_close(each(x), expected)
        assert opfuse.converted(model) == {"": ""}
        opfuse.revert(model), opfuse.revert(late)
        assert type(model) is type(late) is Counted
    finally:
        Counted.forward = own
