"""What the grammar reads, what it leaves, and that it tells when what it read has changed."""

import dataclasses
import functools
import importlib.util
import inspect
import math
import types

import pytest
import torch
from opfuse_convert.grammar import EveryWay, Held, Reader, Unreadable, compiled_like, table, tree_of
from torch import fx, nn
from torch.nn import functional as F

pytestmark = pytest.mark.alone

SCALE = 2.0
FLAG = types.SimpleNamespace(on=True)


def doubled(x, times=2):
    return x * times


@dataclasses.dataclass(slots=True)
class Slots:
    on: bool = True


class Base(nn.Module):
    width = 4

    def __init__(self):
        super().__init__()
        self.a, self.b, self.act = nn.Linear(4, 4), nn.Linear(4, 4), F.silu
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.number, self.config = 3.0, types.SimpleNamespace(on=True)
        self.slots, self.none, self.numbers = Slots(), None, [1]
        self.gain = nn.Parameter(torch.ones(4))

    def helper(self, x):
        return self.a(x) + self.number

    @property
    def computed(self):
        return self.number


def read(forward, module=None, leaf=(nn.Linear,)):
    """The reader, the node that comes in, and what the forward gives."""
    module = module or type("Module", (Base,), {"forward": forward})()
    reader = Reader(fx.Graph(), lambda child: isinstance(child, leaf))
    x = reader.graph.placeholder("x")
    return module, reader, reader.call(Held(module, ""), [x], {})


def straight(self, x):
    return self.b(F.silu(self.a(x)))


def loops(self, x):
    for i, layer in enumerate(self.layers):
        x = layer(x) * i
    for one, other in zip(self.layers, reversed(self.layers), strict=True):
        x = other(one(x))
    return self.layers[-1](x)


def helpers(self, x, **kwargs):
    x = self.helper(x)
    return doubled(x, **kwargs) * SCALE + math.sqrt(4.0)


def conditions(self, x, other=None):
    if self.none is None and other is None and not self.number > 5:
        x = self.a(x) if self.config.on else x
    if FLAG.on or x.missing:
        gate, up = x.chunk(2, -1)
        return gate * up
    return x


def deletes(self, x):
    y, z = self.a(x), x
    del x, z
    if self.number in (2.0, 3.0) and self.number not in [4.0]:
        x = F.silu(y)
    return x


def values(self, x):
    y = x[..., None, :] + -x.shape[-1]
    return self.act(y) * self.gain, self.width


def asks_whether_there_is_one(self, x):
    return self.a(x) if self.a and self.layers and self.act and self.config else x


READ = {
    asks_whether_there_is_one: ["a"],
    straight: ["a", "silu", "b"],
    loops: ["0", "mul", "1", "mul", *["0", "1"], *["1", "0"], "1"],
    helpers: ["a", "add", "mul", "mul", "add"],
    conditions: ["a", "chunk", "getitem", "getitem", "mul"],
    deletes: ["a", "silu"],
    values: ["getitem", "getattr", "getitem", "neg", "add", "silu", "gain", "mul"],
}


@pytest.mark.parametrize("forward", READ, ids=lambda forward: forward.__name__)
def test_it_reads_what_is_in_the_grammar(forward):
    module, reader, _ = read(forward)
    nodes = [node for node in reader.graph.nodes if node.op != "placeholder"]
    names = [getattr(n.target, "__name__", str(n.target)).rpartition(".")[2] for n in nodes]
    assert names == READ[forward]
    assert not any(place.change() for place in reader.places)
    result = module(torch.ones(2, 4))  # it is a forward that runs
    assert result is not None


def writes_into_its_input(self, x):
    return F.relu(x, True)


def writes_into_a_local(self, x):
    y = self.a(x)
    y += 1
    return y


def sets_an_attribute(self, x):
    self.number = 4.0
    return x


def catches(self, x):
    try:
        return self.a(x)
    except ValueError:
        return x


def asks_a_value(self, x):
    return x if x.sum() > 0 else -x


def asks_a_value_for_none(self, x):
    return x if self.a(x) is None else -x


def asks_a_shape(self, x):
    return x if x.shape[0] == 1 else -x


def calls_an_unknown_function(self, x):
    return functools.reduce(torch.add, [x, x])


def reads_a_property(self, x):
    return x * self.computed


def reads_slots(self, x):
    return x if self.slots.on else -x


def reads_a_list(self, x):
    return x * self.numbers[0]


def takes_apart(self, x):
    a, b = x
    return a + b


def draws(self, x):
    return x + torch.rand(4)


def comprehends(self, x):
    return sum([layer(x) for layer in self.layers])


def calls_the_parent(self, x):
    return super(Base, self).forward(x)


def drops_in_place(self, x):
    return F.dropout(x, 0.5, self.training, True)


def normalizes_into(self, x):
    y = self.a(x)
    return F.normalize(x, 2.0, 1, 1e-12, y)


def reads_what_is_gone(self, x):
    y = self.a(x)
    if self.config.on:
        del y
    return x + y


def deletes_an_attribute(self, x):
    del self.number
    return x


def asks_a_list(self, x):
    return x if self.number in self.numbers else -x


def asks_whether_a_list_is_empty(self, x):
    return x if self.numbers else -x


def goes_too_deep(self, x):
    return goes_too_deep(self, x)


LEFT = [
    writes_into_its_input,
    writes_into_a_local,
    drops_in_place,
    normalizes_into,
    reads_what_is_gone,
    deletes_an_attribute,
    asks_a_list,
    asks_whether_a_list_is_empty,
    sets_an_attribute,
    catches,
    asks_a_value,
    asks_a_value_for_none,
    asks_a_shape,
    calls_an_unknown_function,
    reads_a_property,
    reads_slots,
    reads_a_list,
    takes_apart,
    draws,
    comprehends,
    calls_the_parent,
    goes_too_deep,
]


@pytest.mark.parametrize("forward", LEFT, ids=lambda forward: forward.__name__)
def test_what_is_beyond_it_is_left_with_a_sentence(forward):
    with pytest.raises(Unreadable, match=r"^[^\n]+$"):
        read(forward)


def differs_by_a_name(self, x):
    mode = "one"
    if x.ndim == 3:
        mode = "two"
    return x * self.number if mode == "one" else x * self.width


def returns_early(self, x):
    if x.ndim > 3:
        return self.a(x)
    for layer in self.layers:
        x = layer(x)
        if not x.numel():
            break_off = self.number
            return x * break_off
    return x * self.width


@pytest.mark.parametrize("forward", [differs_by_a_name, returns_early])
def test_each_way_is_read_to_its_end(forward):
    module = type("Module", (Base,), {"forward": forward})()
    reader = EveryWay(fx.Graph(), lambda child: isinstance(child, nn.Linear))
    x = reader.graph.placeholder("x")
    reader.each_way(lambda: reader.call(Held(module, ""), [x], {}))
    assert {"number", "width"} <= {place.name for place in reader.places}
    assert len({place.key for place in reader.places}) == len(reader.places)
    if forward is returns_early:
        assert reader.called.count("a") == 1 and {"layers.0", "layers.1"} <= {*reader.called}


def branches_often(self, x):
    for number in range(7):
        if x.ndim == number:
            x = x + number
    return x


def test_too_many_ways_are_left():
    module = type("Module", (Base,), {"forward": branches_often})()
    reader = EveryWay(fx.Graph(), lambda child: False)
    x = reader.graph.placeholder("x")
    with pytest.raises(Unreadable, match="too many branches"):
        reader.each_way(lambda: reader.call(Held(module, ""), [x], {}))


def test_no_function_of_the_table_writes_where_nothing_tells_it_to():
    for function in (*table.FUNCTIONS, *table.RANDOM):
        if isinstance(function, types.FunctionType):
            named = inspect.signature(function).parameters.values()
            assert all(p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) for p in named)
    built_in = [f.__name__ for f in table.FUNCTIONS if not isinstance(f, types.FunctionType)]
    for name in (*built_in, *table.METHODS):
        for schema in torch._C._jit_get_schemas_for_operator(f"aten::{name}"):
            for argument in schema.arguments:
                writes = argument.alias_info is not None and argument.alias_info.is_write
                assert not writes or argument.kwarg_only, schema


@pytest.mark.parametrize("name", ["__call__", "__getattr__", "__getattribute__"])
def test_a_class_that_answers_by_itself_is_left(name):
    body = {name: lambda self, *args: getattr(super(nn.Module, self), name)(*args)}
    cls = type("Answers", (Base,), {"forward": straight, **body})
    module = Base()
    module.__class__ = cls
    with pytest.raises(Unreadable, match="of its own"):
        read(straight, module)


def change_global(monkeypatch, module):
    monkeypatch.setitem(globals(), "SCALE", 3.0)


def change_function(monkeypatch, module):
    monkeypatch.setattr(F, "silu", F.relu)


def change_link(monkeypatch, module):
    monkeypatch.setitem(globals(), "F", types.SimpleNamespace(silu=F.silu))


def change_code(monkeypatch, module):
    monkeypatch.setattr(doubled, "__code__", (lambda x, times=2: x).__code__)


def change_default(monkeypatch, module):
    monkeypatch.setattr(doubled, "__defaults__", (3,))


def change_number(monkeypatch, module):
    module.number = 4.0


def change_type(monkeypatch, module):
    module.number = 3


def change_method(monkeypatch, module):
    monkeypatch.setattr(Base, "helper", lambda self, x: x)


def change_method_of_one(monkeypatch, module):
    module.helper = lambda x: x


def change_child(monkeypatch, module):
    module.a = nn.Linear(4, 4)


def hide_child(monkeypatch, module):
    vars(module)["a"] = module.b


def hide_child_in_the_class(monkeypatch, module):
    type(module).a = property(lambda self: self.b)


def append_layer(monkeypatch, module):
    module.layers.append(nn.Linear(4, 4))


def drop_layer(monkeypatch, module):
    del module.layers[1]


def change_field(monkeypatch, module):
    module.config.on = False


def change_class_number(monkeypatch, module):
    type(module).width = 5


def hide_built_in(monkeypatch, module):
    monkeypatch.setitem(globals(), "enumerate", zip)


def own_call(monkeypatch, module):
    type(module).__call__ = lambda self, x: x


def get_attribute(monkeypatch, module):
    type(module).__getattribute__ = lambda self, name: object.__getattribute__(self, name)


def everything(self, x):
    for _, layer in enumerate(self.layers):
        x = layer(x)
    x = F.silu(self.helper(x)) if self.config.on else x
    return doubled(x) * SCALE * self.width


CHANGES = [
    value for name, value in list(globals().items()) if name.startswith(("change_", "hide_"))
]
CHANGES += [append_layer, drop_layer, own_call, get_attribute]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_it_tells_when_what_it_read_has_changed(change, monkeypatch):
    module, reader, _ = read(everything)
    assert not any(place.change() for place in reader.places)
    change(monkeypatch, module)
    assert any(place.change() for place in reader.places)


def test_a_source_counts_only_if_it_was_compiled(tmp_path):
    path = tmp_path / "edited.py"
    path.write_text("def f(x):\n    return x + 1\n\n\ndef g(x):\n    return f(x)\n")
    spec = importlib.util.spec_from_file_location("edited", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert tree_of(module.f).name == "f"
    path.write_text("def f(x):\n    return x + 2\n\n\ndef g(x):\n    return f(x)\n")
    tree_of.__globals__["_read"].cache_clear()
    with pytest.raises(Unreadable, match="not what was compiled"):
        tree_of(module.f)
    assert tree_of(module.g).name == "g"


def test_a_decorated_function_is_the_one_that_the_decorator_gave():
    def decorator(function):
        @functools.wraps(function)
        def around(x):
            return 2 * function(x)

        return around

    @decorator
    def f(x):
        return x

    assert tree_of(f).name == "around"
    with pytest.raises(Unreadable, match="no source"):
        tree_of(lambda x: x)
    with pytest.raises(Unreadable, match="not a function"):
        tree_of(torch.add)


class Parent:
    def value(self):
        return 1


class Child(Parent):
    def value(self, more=10, *, most=100):
        return super().value() + more + most + self.__own + LATER

    __own = 1000


LATER = 0


def test_a_function_of_another_tree_reads_what_the_first_one_reads(monkeypatch):
    tree = tree_of(Child.value)
    twin = compiled_like(Child.value, tree, unused=1)
    assert twin(Child()) == Child().value() == 1111
    monkeypatch.setitem(globals(), "LATER", 10000)
    assert twin(Child(), 20) == Child().value(20) == 11121
    assert (twin.__qualname__, twin.__module__) == (Child.value.__qualname__, __name__)
