"""What a forward reads may change after ``opfuse.convert``: a converted copy and the original go on giving the same."""

import argparse
import collections
import contextlib
import copy
import dataclasses
import enum
import functools
import os
import random
import sys
import types

import numpy as np
import pytest
import torch
import twins
from torch import nn
from torch.nn import functional as F

import opfuse

pytestmark = pytest.mark.alone

WIDTH = 8
ATTACKS = {}


def attack(change, setup=None, before=None, cls=None, name=None, **call):
    """Register a forward: ``change(model, patch)`` changes what it reads, and may give a context for what follows.

    Args:
        change: What happens to both models between two calls.
        setup: ``setup(model)`` prepares a model.
        before: Runs before each call of either model.
        cls: The class that the forward's derives from.
        name: The forward's, by default.
        **call: Keyword arguments of calls.
    """

    def register(forward):
        key, made = name or forward.__name__, forward
        if not isinstance(forward, type):
            made = type(key, (cls or Base,), {"forward": forward, "__module__": __name__})
        ATTACKS[key] = made, change, setup, before, call
        return forward

    return register


class Base(nn.Module):
    scale = 1.5

    def __init__(self):
        super().__init__()
        self.up, self.down, self.norm = linear(), linear(), nn.LayerNorm(WIDTH)
        self.layers = nn.ModuleList([linear(), nn.GELU(), linear()])
        self.table = nn.ModuleDict({"one": linear(), "two": nn.ReLU(), "three": linear()})
        self.extra, self.number, self.flag, self.calls = linear(), 1.5, True, 0

    def hidden(self, x):
        return self.down(F.gelu(self.up(x)))

    def scaled(self, x):
        return x * 1.5


def linear():
    return nn.Linear(WIDTH, WIDTH)


# Children


def more(m, patch):
    m.layers.append(linear())


def fewer(m, patch):
    m.layers = m.layers[:1]


def another(name):
    return lambda m, patch: setattr(m, name, linear())


def number(value):
    return lambda m, patch: setattr(m, "number", value)


@attack(more)
def layers_are_appended_to_a_list(self, x):
    for layer in self.layers:
        x = layer(x)
    return self.down(F.gelu(self.up(x)))


@attack(fewer)
def layers_of_a_list_are_dropped(self, x):
    for layer in self.layers:
        x = layer(x)
    return self.down(F.gelu(self.up(x)))


def strange(m):
    """Layers that no chain replaces."""
    m.layers = nn.ModuleList([nn.Tanh(), nn.Softmax(-1), nn.Tanh()])
    m.table = nn.ModuleDict({"one": nn.Tanh(), "two": nn.Softmax(-1)})
    m.extra = nn.Tanh()


@attack(lambda m, patch: m.layers.append(nn.Hardtanh(0.05, 0.1)) and None, strange)
def strange_layers_are_appended_to_a_list(self, x):
    for layer in self.layers:
        x = layer(x)
    return self.down(F.gelu(self.up(x)))


@attack(fewer, strange)
def strange_layers_of_a_list_are_dropped(self, x):
    for layer in self.layers:
        x = layer(x)
    return self.down(F.gelu(self.up(x)))


@attack(lambda m, patch: m.table.update({"three": nn.Hardtanh(0.05, 0.1)}), strange)
def strange_layers_are_added_to_a_dict(self, x):
    for layer in self.table.values():
        x = layer(x)
    return self.down(F.gelu(self.up(x)))


@attack(lambda m, patch: m.table.pop("two") and None, strange)
def a_strange_layer_of_a_dict_is_dropped(self, x):
    for name in self.table:
        x = self.table[name](x)
    return self.down(F.gelu(self.up(x)))


@attack(lambda m, patch: setattr(m, "extra", None), strange)
def a_strange_optional_child_becomes_none(self, x):
    if self.extra is not None:
        x = self.extra(x)
    return self.down(F.gelu(self.up(x)))


@attack(lambda m, patch: setattr(m, "extra", nn.Softmax(-1)), strange)
def a_strange_child_is_replaced(self, x):
    return self.down(F.gelu(self.up(self.extra(x))))


@attack(lambda m, patch: m.layers.__delitem__(1))
def a_layer_of_a_list_is_deleted(self, x):
    for layer in self.layers:
        x = layer(x)
    return self.down(F.gelu(self.up(x)))


@attack(lambda m, patch: m.layers.insert(1, nn.Tanh()))
def a_layer_is_inserted_into_a_list(self, x):
    for layer in self.layers:
        x = x + layer(x)
    return self.down(F.gelu(self.up(x)))


@attack(more)
def layers_are_counted(self, x):
    return self.down(F.gelu(self.up(x))) * len(self.layers)


@attack(more)
def layers_are_enumerated(self, x):
    for i, layer in enumerate(self.layers):
        x = x + layer(x) if i else layer(x)
    return self.down(F.gelu(self.up(x)))


@attack(more)
def layers_are_reversed_and_sliced(self, x):
    for layer in reversed(self.layers[1:]):
        x = layer(x)
    return self.down(F.gelu(self.up(x)))


@attack(more)
def the_last_layer_is_indexed(self, x):
    return self.down(F.gelu(self.up(self.layers[-1](x))))


@attack(more)
def layers_are_zipped(self, x):
    for layer, factor in zip(self.layers, (1.0, 2.0, 3.0, 4.0), strict=False):
        x = layer(x) * factor
    return self.down(F.gelu(self.up(x)))


@attack(lambda m, patch: m.table.update({"four": linear()}))
def layers_are_added_to_a_dict(self, x):
    for layer in self.table.values():
        x = layer(x)
    return self.down(F.gelu(self.up(x)))


@attack(lambda m, patch: m.table.update({"four": linear()}))
def names_of_a_dict_are_looped_over(self, x):
    for name in self.table:
        x = self.table[name](x)
    return self.down(F.gelu(self.up(x)))


@attack(lambda m, patch: m.table.pop("two") and None)
def a_layer_of_a_dict_is_dropped(self, x):
    for _, layer in self.table.items():
        x = layer(x)
    return self.down(F.gelu(self.up(x)))


@attack(lambda m, patch: m.table.__setitem__("four", linear()))
def a_key_is_looked_for_in_a_dict(self, x):
    y = self.down(F.gelu(self.up(x)))
    return self.table["four"](y) if "four" in self.table else y


@attack(lambda m, patch: setattr(m, "extra", None))
def an_optional_child_becomes_none(self, x):
    if self.extra is not None:
        x = self.extra(x)
    return self.down(F.gelu(self.up(x)))


@attack(another("extra"), lambda m: setattr(m, "extra", None))
def an_optional_child_comes(self, x):
    if self.extra is not None:
        x = self.extra(x)
    return self.down(F.gelu(self.up(x)))


@attack(another("extra"), lambda m: delattr(m, "extra"))
def it_asks_whether_it_has_a_child(self, x):
    y = self.down(F.gelu(self.up(x)))
    return self.extra(y) if hasattr(self, "extra") else y


@attack(lambda m, patch: m.add_module("late", linear()))
def all_children_are_looped_over(self, x):
    for child in self.children():
        x = child(x) if isinstance(child, nn.Linear) else x
    return self.down(F.gelu(self.up(x)))


@attack(another("extra"), lambda m: m.__dict__.update(other=[m.extra]))
def a_child_in_a_plain_list(self, x):
    return self.down(F.gelu(self.up(self.other[0](x)))) + self.extra(x)


# Configurations


@dataclasses.dataclass(slots=True)
class Slots:
    scale: float = 1.5


class Plain:
    scale = 1.5

    def value(self):
        return self.scale


class Colour(enum.Enum):
    RED = 1.5
    BLUE = 4.0


Pair = collections.namedtuple("Pair", "scale other")


def reads_a_configuration(self, x):
    return self.down(F.gelu(self.up(x))) * self.config.scale


for kind, made in {
    "slots_dataclass": Slots,
    "simple_namespace": lambda: types.SimpleNamespace(scale=1.5),
    "argparse_namespace": lambda: argparse.Namespace(scale=1.5),
    "plain_object": Plain,
}.items():
    attack(
        lambda m, patch: setattr(m.config, "scale", 4.0),
        lambda m, made=made: setattr(m, "config", made()),
        name=f"number_of_a_{kind}",
    )(reads_a_configuration)


@attack(lambda m, patch: patch.setattr(Plain, "scale", 4.0), lambda m: setattr(m, "config", Plain))
def a_class_is_the_configuration(self, x):
    return self.down(F.gelu(self.up(x))) * self.config.scale


@attack(lambda m, patch: patch.setattr(Plain, "scale", 4.0))
def a_global_class_is_the_configuration(self, x):
    return self.down(F.gelu(self.up(x))) * Plain.scale


@attack(
    lambda m, patch: patch.setattr(Plain, "scale", 4.0), lambda m: setattr(m, "config", Plain())
)
def a_class_attribute_of_an_object(self, x):
    return self.down(F.gelu(self.up(x))) * self.config.scale


@attack(lambda m, patch: m.config.update(scale=4.0), lambda m: setattr(m, "config", {"scale": 1.5}))
def a_dict_of_its_own(self, x):
    return self.down(F.gelu(self.up(x))) * self.config["scale"]


@attack(lambda m, patch: m.config.update(scale=4.0), lambda m: setattr(m, "config", {}))
def a_dict_with_a_default(self, x):
    return self.down(F.gelu(self.up(x))) * self.config.get("scale", 1.5)


@attack(lambda m, patch: m.config.append(4.0), lambda m: setattr(m, "config", [1.5]))
def a_list_of_its_own(self, x):
    return self.down(F.gelu(self.up(x))) * self.config[-1]


@attack(lambda m, patch: setattr(m, "config", (4.0,)), lambda m: setattr(m, "config", (1.5,)))
def a_tuple_of_its_own(self, x):
    return self.down(F.gelu(self.up(x))) * self.config[0]


@attack(
    lambda m, patch: setattr(m, "config", Pair(4.0, 0)),
    lambda m: setattr(m, "config", Pair(1.5, 0)),
)
def a_named_tuple(self, x):
    return self.down(F.gelu(self.up(x))) * self.config.scale


@attack(
    lambda m, patch: setattr(m, "config", Colour.BLUE), lambda m: setattr(m, "config", Colour.RED)
)
def an_enum(self, x):
    return self.down(F.gelu(self.up(x))) * self.config.value


@attack(
    lambda m, patch: m.config.inner.__setattr__("scale", 4.0),
    lambda m: setattr(m, "config", types.SimpleNamespace(inner=types.SimpleNamespace(scale=1.5))),
)
def a_nested_configuration(self, x):
    return self.down(F.gelu(self.up(x))) * self.config.inner.scale


@attack(lambda m, patch: setattr(m.config, "step", 9), lambda m: setattr(m, "config", Schedule()))
def a_schedules_method(self, x):
    return self.down(F.gelu(self.up(x))) * self.config.now()


class Schedule:
    def __init__(self):
        self.step = 1

    def now(self):
        return 1.0 + self.step

    def __call__(self, x):
        return x * self.step


@attack(lambda m, patch: setattr(m.config, "step", 9), lambda m: setattr(m, "config", Schedule()))
def an_object_that_is_called(self, x):
    return self.config(self.down(F.gelu(self.up(x))))


@attack(lambda m, patch: m.config.fill(4.0), lambda m: setattr(m, "config", np.full(1, 1.5)))
def a_numpy_array_written_in_place(self, x):
    return self.down(F.gelu(self.up(x))) * float(self.config[0])


@attack(lambda m, patch: m.config.fill_(4.0), lambda m: setattr(m, "config", torch.tensor(1.5)))
def a_tensor_that_is_no_buffer(self, x):
    return self.down(F.gelu(self.up(x))) * self.config


@attack(
    lambda m, patch: setattr(m, "config", torch.tensor(4.0)),
    lambda m: m.register_buffer("config", torch.tensor(1.5)),
)
def a_buffer_replaced(self, x):
    return self.down(F.gelu(self.up(x))) * self.config


@attack(
    lambda m, patch: setattr(m, "config", nn.Parameter(torch.full((WIDTH,), 4.0))),
    lambda m: setattr(m, "config", nn.Parameter(torch.ones(WIDTH))),
)
def a_parameter_replaced(self, x):
    return self.down(F.gelu(self.up(x))) * self.config


@attack(
    lambda m, patch: m.config.fill_(4.0), lambda m: m.register_buffer("config", torch.tensor(1.5))
)
def a_buffer_taken_as_a_number(self, x):
    return self.down(F.gelu(self.up(x))) * float(self.config)


# Attributes of the module


@attack(number(4.0))
def a_number(self, x):
    return self.down(F.gelu(self.up(x))) * self.number


@attack(number(True), lambda m: setattr(m, "number", 1))
def one_becomes_true(self, x):
    y = self.down(F.gelu(self.up(x)))
    return y, str(self.number)


@attack(number(-0.0), lambda m: setattr(m, "number", 0.0))
def zero_becomes_negative(self, x):
    return torch.copysign(self.down(F.gelu(self.up(x))), torch.full((1,), self.number))


@attack(number(torch.tensor(4.0)))
def a_number_becomes_a_tensor(self, x):
    return self.down(F.gelu(self.up(x))) * self.number


@attack(number(np.float64(4.0)))
def a_number_becomes_one_of_numpy(self, x):
    return self.down(F.gelu(self.up(x))) * self.number


@attack(lambda m, patch: setattr(m, "flag", False))
def a_flag(self, x):
    return self.down(F.gelu(self.up(x))) if self.flag else self.down(self.up(x))


@attack(number("tanh"), lambda m: setattr(m, "number", "none"))
def a_name(self, x):
    return self.down(F.gelu(self.up(x), approximate=self.number))


@attack(number(None))
def a_number_becomes_none(self, x):
    y = self.down(F.gelu(self.up(x)))
    return y if self.number is None else y * self.number


@attack(lambda m, patch: delattr(m, "number"))
def an_attribute_is_deleted(self, x):
    return self.down(F.gelu(self.up(x))) * getattr(self, "number", 4.0)


@attack(lambda m, patch: setattr(m, "late", 1))
def it_asks_whether_it_has_an_attribute(self, x):
    y = self.down(F.gelu(self.up(x)))
    return 4 * y if hasattr(self, "late") else y


@attack(lambda m, patch: patch.setattr(Base, "scale", 4.0))
def a_class_attribute(self, x):
    return self.down(F.gelu(self.up(x))) * self.scale


@attack(lambda m, patch: setattr(m, "scale", 4.0))
def an_attribute_in_front_of_that_of_the_class(self, x):
    return self.down(F.gelu(self.up(x))) * self.scale


@attack(lambda m, patch: patch.setattr(Base, "number", property(lambda self: 4.0), raising=False))
def a_property_comes_in_front_of_a_number(self, x):
    return self.down(F.gelu(self.up(x))) * self.number


class WithProperty(Base):
    @property
    def rate(self):
        return self.number + 1

    def __getattr__(self, name):
        return 1.5 * self.number if name == "made_up" else super().__getattr__(name)


class Descriptor:
    def __get__(self, instance, owner):
        return instance.number * 2 if instance is not None else self


WithProperty.described = Descriptor()


@attack(number(4.0), cls=WithProperty)
def a_property_reads(self, x):
    return self.down(F.gelu(self.up(x))) * self.rate


@attack(
    lambda m, patch: patch.setattr(WithProperty, "rate", property(lambda self: 9.0)),
    cls=WithProperty,
)
def a_property_is_another_one(self, x):
    return self.down(F.gelu(self.up(x))) * self.rate


@attack(number(4.0), cls=WithProperty)
def a_descriptor_reads(self, x):
    return self.down(F.gelu(self.up(x))) * self.described


@attack(number(4.0), cls=WithProperty)
def getattr_makes_a_value_up(self, x):
    return self.down(F.gelu(self.up(x))) * self.made_up


@attack(
    lambda m, patch: patch.setattr(WithProperty, "__getattribute__", quadruple), cls=WithProperty
)
def getattribute_comes_later(self, x):
    return self.down(F.gelu(self.up(x))) * self.number


def quadruple(self, name):
    value = object.__getattribute__(self, name)
    return 4 * value if name == "number" else value


# Methods, functions, closures


@attack(lambda m, patch: patch.setattr(Base, "hidden", lambda self, x: 4 * x))
def a_method_is_replaced_on_the_class(self, x):
    return self.hidden(x) + self.extra(F.relu(x))


@attack(lambda m, patch: setattr(m, "hidden", lambda x: 4 * x))
def a_method_is_replaced_on_the_instance(self, x):
    return self.hidden(x) + self.extra(F.relu(x))


@attack(lambda m, patch: setattr(m, "forward", lambda x: 4 * m.up(x)))
def the_forward_is_replaced_on_the_instance(self, x):
    return self.down(F.gelu(self.up(x)))


@attack(lambda m, patch: setattr(m, "__class__", derived(type(m))))
def a_subclass_overrides_a_helper(self, x):
    return self.scaled(self.down(F.gelu(self.up(x))))


def derived(cls):
    return type(cls.__name__, (cls,), {"scaled": lambda self, x: 4 * x})


def helper(x, factor=1.5, *, shift=0.0):
    return x * factor + shift


@attack(lambda m, patch: patch.setattr(helper, "__defaults__", (4.0,)))
def defaults_of_a_helper(self, x):
    return helper(self.down(F.gelu(self.up(x))))


@attack(lambda m, patch: patch.setattr(helper, "__kwdefaults__", {"shift": 4.0}))
def keyword_defaults_of_a_helper(self, x):
    return helper(self.down(F.gelu(self.up(x))))


@attack(
    lambda m, patch: patch.setattr(helper, "__code__", (lambda x, factor=1, *, shift: x).__code__)
)
def code_of_a_helper(self, x):
    return helper(self.down(F.gelu(self.up(x))))


@attack(lambda m, patch: patch.setitem(globals(), "helper", lambda x: 4 * x))
def a_helper_is_replaced(self, x):
    return helper(self.down(F.gelu(self.up(x))))


@attack(lambda m, patch: default_list.__defaults__[0].__setitem__(0, 4.0))
def a_default_is_written_into(self, x):
    return default_list(self.down(F.gelu(self.up(x))))


def default_list(x, factors=[1.5]):  # noqa: B006
    return x * factors[0]


def function_attribute(x):
    return x * function_attribute.scale


function_attribute.scale = 1.5


@attack(lambda m, patch: patch.setattr(function_attribute, "scale", 4.0))
def an_attribute_of_a_helper(self, x):
    return function_attribute(self.down(F.gelu(self.up(x))))


def closed_over():
    factor = 1.5

    def scaled(x):
        return x * factor

    def change(m, patch):
        nonlocal factor
        factor = 4.0

    return scaled, change


def over_a_cell():
    scaled, change = closed_over()

    @attack(change)
    def a_cell_of_a_helper(self, x):
        return scaled(self.down(F.gelu(self.up(x))))

    number = 1.5

    def also(m, patch):
        nonlocal number
        number = 4.0

    @attack(also)
    def a_cell_of_its_own(self, x):
        return self.down(F.gelu(self.up(x))) * number


over_a_cell()


@attack(
    lambda m, patch: m.config.keywords.update(factor=4.0),
    lambda m: setattr(m, "config", functools.partial(helper, factor=1.5)),
)
def a_partial(self, x):
    return self.config(self.down(F.gelu(self.up(x))))


@attack(lambda m, patch: setattr(m, "config", F.relu), lambda m: setattr(m, "config", F.silu))
def a_function_it_holds(self, x):
    return self.down(self.config(self.up(x)))


@attack(
    lambda m, patch: setattr(m, "number", 4.0),
    lambda m: vars(m).update(config=types.MethodType(lambda self, x: x * self.number, m)),
)
def a_bound_method_it_holds(self, x):
    return self.config(self.down(F.gelu(self.up(x))))


def decorated(function):
    @functools.wraps(function)
    def wrapper(self, x):
        return function(self, x) * self.number

    return wrapper


@attack(number(4.0))
@decorated
def the_forward_is_decorated(self, x):
    return self.down(F.gelu(self.up(x)))


@attack(number(4.0))
@torch.no_grad()
def the_forward_runs_without_gradients(self, x):
    return self.down(F.gelu(self.up(x))) * self.number


@attack(number(4.0))
class TheForwardOfTheParent(Base):
    def forward(self, x):
        return self.hidden(x) * self.number


@attack(lambda m, patch: patch.setattr(TheForwardOfTheParent, "forward", lambda self, x: 4 * x))
class SuperIsCalled(TheForwardOfTheParent):
    def forward(self, x):
        return super().forward(x) + self.extra(F.relu(self.up(x)))


# Globals, modules, the world

SCALE, ACTIVATION, LOG, TABLE = 1.5, F.silu, [], {"scale": 1.5}
FLAGS, SETTINGS = types.SimpleNamespace(on=True), types.ModuleType("settings")
SETTINGS.SCALE, SETTINGS.inner = 1.5, types.ModuleType("inner")
SETTINGS.inner.SCALE = 1.5
GENERATOR, DRAWN = np.random.default_rng(0), random.Random(0)


@attack(lambda m, patch: patch.setitem(globals(), "SCALE", 4.0))
def a_global_number(self, x):
    return self.down(F.gelu(self.up(x))) * SCALE


@attack(lambda m, patch: patch.setitem(globals(), "ACTIVATION", F.relu))
def a_global_function(self, x):
    return self.down(ACTIVATION(self.up(x)))


@attack(lambda m, patch: patch.setattr(F, "silu", lambda x: F.relu(x) * 2))
def a_function_of_torch_is_replaced(self, x):
    return self.down(F.silu(self.up(x)))


@attack(lambda m, patch: patch.setattr(torch, "tanh", torch.sin))
def a_function_of_torch_at_the_end_is_replaced(self, x):
    return torch.tanh(self.down(F.silu(self.up(x))))


@attack(lambda m, patch: patch.setitem(globals(), "F", types.SimpleNamespace(gelu=torch.relu)))
def a_module_is_replaced(self, x):
    return self.down(F.gelu(self.up(x)))


@attack(lambda m, patch: patch.setattr(nn, "functional", types.SimpleNamespace(gelu=torch.relu)))
def a_link_of_a_function_is_replaced(self, x):
    return self.down(torch.nn.functional.gelu(self.up(x)))


@attack(lambda m, patch: patch.setattr(torch.Tensor, "tanh", lambda self: self * 4))
def a_method_of_tensors_is_replaced(self, x):
    return self.down(F.silu(self.up(x))).tanh()


@attack(lambda m, patch: patch.setitem(globals(), "abs", lambda x: x * 4))
def a_builtin_is_hidden(self, x):
    return abs(self.down(F.silu(self.up(x))))


@attack(lambda m, patch: patch.setattr(SETTINGS, "SCALE", 4.0))
def a_constant_of_a_module(self, x):
    return self.down(F.gelu(self.up(x))) * SETTINGS.SCALE


@attack(lambda m, patch: patch.setattr(SETTINGS.inner, "SCALE", 4.0))
def a_constant_of_a_module_of_a_module(self, x):
    return self.down(F.gelu(self.up(x))) * SETTINGS.inner.SCALE


@attack(lambda m, patch: patch.setattr(FLAGS, "on", False))
def a_global_flag_object(self, x):
    return self.down(F.gelu(self.up(x))) if FLAGS.on else self.down(self.up(x))


@attack(lambda m, patch: patch.setitem(TABLE, "scale", 4.0))
def a_global_dict(self, x):
    return self.down(F.gelu(self.up(x))) * TABLE["scale"]


@attack(lambda m, patch: patch.setenv("OPFUSE_TESTS_SCALE", "4"))
def the_environment(self, x):
    return self.down(F.gelu(self.up(x))) * float(os.environ.get("OPFUSE_TESTS_SCALE", "1.5"))


@attack(lambda m, patch: patch.setattr(sys, "argv", ["", "--fast"]))
def the_command_line(self, x):
    y = self.down(F.gelu(self.up(x)))
    return 4 * y if "--fast" in sys.argv else y


def reseeded():
    GENERATOR.bit_generator.state = np.random.default_rng(0).bit_generator.state
    DRAWN.seed(0)
    LOG.clear()


@attack(lambda m, patch: patch.setitem(globals(), "SCALE", 4.0), before=reseeded)
def stochastic_depth_of_a_numpy_generator(self, x):
    for _ in range(4):
        if GENERATOR.random() < 0.5:
            x = x + self.down(F.gelu(self.up(x)))
    return x * SCALE, GENERATOR.random()


@attack(lambda m, patch: patch.setitem(globals(), "SCALE", 4.0), before=reseeded)
def stochastic_depth_of_a_global_random(self, x):
    for _ in range(4):
        if DRAWN.random() < 0.5:
            x = x + self.down(F.gelu(self.up(x)))
    return x * SCALE, DRAWN.random()


@attack(
    lambda m, patch: [m.config.random() for _ in range(3)] and None,
    lambda m: setattr(m, "config", np.random.default_rng(1)),
)
def stochastic_depth_of_its_own_generator(self, x):
    for _ in range(4):
        if self.config.random() < 0.5:
            x = x + self.down(F.gelu(self.up(x)))
    return self.down(F.gelu(self.up(x))), self.config.random()


@attack(lambda m, patch: patch.setitem(globals(), "SCALE", 4.0))
def depth_drawn_of_torch(self, x):
    keep = torch.rand(x.shape[0], 1, 1) < 0.5
    return x + SCALE * keep * self.down(F.gelu(self.up(x)))


@attack(lambda m, patch: patch.setattr(random, "random", lambda: 0.0))
def depth_drawn_of_random(self, x):
    y = self.down(F.gelu(self.up(x)))
    return y if random.random() < 0.01 else x + y


# Modes and dtypes


@attack(lambda m, patch: torch.inference_mode())
def it_asks_for_inference_mode(self, x):
    y = self.down(F.gelu(self.up(x)))
    return 4 * y if torch.is_inference_mode_enabled() else y


@attack(lambda m, patch: torch.no_grad())
def it_asks_for_gradients(self, x):
    y = self.down(F.gelu(self.up(x)))
    return y if torch.is_grad_enabled() else 4 * y


@attack(lambda m, patch: torch.autocast("cpu", torch.bfloat16))
def it_asks_for_autocast(self, x):
    y = self.down(F.gelu(self.up(x)))
    return 4 * y if torch.is_autocast_enabled("cpu") else y


def half_if_asked(m, patch):
    """Autocast to bf16 for what follows, to fp16 inside."""
    return torch.autocast("cpu", torch.float16)


@attack(half_if_asked, lambda m: torch.set_autocast_dtype("cpu", torch.bfloat16))
def it_asks_for_the_dtype_of_autocast(self, x):
    y = self.down(F.gelu(self.up(x)))
    return y.float() * (4 if torch.get_autocast_dtype("cpu") is torch.float16 else 1)


class default_dtype(contextlib.AbstractContextManager):
    def __enter__(self):
        self.was = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)

    def __exit__(self, *error):
        torch.set_default_dtype(self.was if self.was is not torch.float64 else torch.float32)


@attack(lambda m, patch: default_dtype())
def it_asks_for_the_default_dtype(self, x):
    y = self.down(F.gelu(self.up(x)))
    return 4 * y if torch.get_default_dtype() is torch.float64 else y


@attack(lambda m, patch: default_dtype())
def it_makes_a_tensor(self, x):
    return self.down(F.gelu(self.up(x))) * torch.ones(WIDTH)


@attack(lambda m, patch: default_dtype())
def it_divides_integers(self, x):
    count = torch.tensor([3])
    return self.down(F.gelu(self.up(x))) * (1.0 / count)


@attack(lambda m, patch: m.eval() and None)
def it_asks_for_its_mode(self, x):
    y = self.down(F.gelu(self.up(x)))
    return 4 * y if self.training else y


@attack(lambda m, patch: m.up.eval() and None)
def it_asks_for_the_mode_of_a_child(self, x):
    y = self.down(F.gelu(self.up(x)))
    return 4 * y if self.up.training else y


@attack(lambda m, patch: m.double() and None)
def it_asks_for_a_dtype(self, x):
    y = self.down(F.gelu(self.up(x)))
    return 4 * y if x.dtype == torch.float64 else y


@attack(lambda m, patch: setattr(m.up.weight, "requires_grad", False))
def it_asks_whether_a_parameter_learns(self, x):
    y = self.down(F.gelu(self.up(x)))
    return 4 * y if self.up.weight.requires_grad else y


# Side effects, and code that is no straight line


@attack(lambda m, patch: setattr(m, "calls", 5))
def it_counts_its_calls(self, x):
    self.calls += 1
    return self.down(F.gelu(self.up(x))) * self.calls


def count():
    global CALLS
    CALLS += 1
    return CALLS


CALLS = 0


@attack(
    lambda m, patch: patch.setitem(globals(), "SCALE", 4.0),
    before=lambda: globals().update(CALLS=0),
)
def a_helper_counts(self, x):
    count()
    return self.down(F.gelu(self.up(x))) * SCALE, count()


@attack(number(4.0), before=reseeded)
def it_logs(self, x):
    LOG.append(float(self.number))
    return self.down(F.gelu(self.up(x))), list(LOG)


@attack(number(4.0))
def it_prints(self, x):
    print(self.number)
    return self.down(F.gelu(self.up(x))) * self.number


@attack(lambda m, patch: setattr(m, "config", None), lambda m: setattr(m, "config", Plain()))
def it_catches(self, x):
    y = self.down(F.gelu(self.up(x)))
    try:
        return y * self.config.scale
    except AttributeError:
        return 4 * y


@attack(number(4.0))
def it_assigns_in_an_expression(self, x):
    return (y := self.down(F.gelu(self.up(x)))) + (k := self.number) * y * k


@attack(lambda m, patch: setattr(m, "config", [1, 2]), lambda m: setattr(m, "config", [1]))
def it_comprehends(self, x):
    return sum([self.down(F.gelu(self.up(x))) * k for k in self.config])


@attack(lambda m, patch: more(m, patch))
def it_sums_over_layers(self, x):
    return sum(layer(x) for layer in self.layers) + self.down(F.gelu(self.up(x)))


@attack(number("silu"), lambda m: setattr(m, "number", "gelu"))
def it_matches(self, x):
    match self.number:
        case "gelu":
            return self.down(F.gelu(self.up(x)))
        case other:
            return self.down(getattr(F, other)(self.up(x)))


@attack(number(4.0))
def it_enters_a_context(self, x):
    with contextlib.nullcontext(self.number) as factor:
        return self.down(F.gelu(self.up(x))) * factor


@attack(number(0.0))
def it_asserts(self, x):
    assert self.number, "none"
    return self.down(F.gelu(self.up(x)))


@attack(number(4.0))
def it_loops_while(self, x):
    k = 0
    while k < self.number:
        x, k = self.down(F.gelu(self.up(x))), k + 1
    return x


@attack(number(4.0))
def it_has_a_function_inside(self, x):
    def scaled(y):
        return y * self.number

    return scaled(self.down(F.gelu(self.up(x))))


def opaque(self):
    """Changes what is read next; no grammar knows it."""
    vars(self).update(number=self.number + 1)


@attack(number(4.0))
def a_call_changes_what_is_read_next(self, x):
    y = self.down(F.gelu(self.up(x)))
    opaque(self)
    return self.down(F.gelu(self.up(y))) * self.number, self.number


class Swaps(nn.Module):
    """Replaces a child of its parent."""

    def forward(self, x):
        vars(self)["parent"]._modules["down"] = vars(self)["other"]
        return x + 1


def with_a_swapping_child(m):
    m.extra = Swaps()
    vars(m.extra).update(parent=m, other=m.layers[0])


@attack(another("up"), with_a_swapping_child)
def a_child_replaces_another_one(self, x):
    return self.down(F.gelu(self.up(self.extra(x))))


@attack(lambda m, patch: setattr(m.norm, "eps", 0.5))
def a_number_of_a_child(self, x):
    return self.down(F.gelu(self.up(self.norm(x)))) * self.norm.eps


@attack(lambda m, patch: m.up.register_forward_hook(lambda mod, args, y: 4 * y) and None)
def a_hook(self, x):
    return self.down(F.gelu(self.up(x)))


@attack(number(4.0), lambda m: setattr(m, "number", 1.5))
def its_own_dict(self, x):
    return self.down(F.gelu(self.up(x))) * vars(self)["number"]


@attack(number(4.0), lambda m: setattr(m, "number", 1.5))
def an_attribute_by_name(self, x):
    return self.down(F.gelu(self.up(x))) * getattr(self, "num" + "ber")


@attack(number(4.0))
def an_attribute_of_the_class_of_self(self, x):
    type(self).last = self.number
    return self.down(F.gelu(self.up(x))) * type(self).last


# What a child is told to do with its input, and what hides one


def writes_into_its_input(self, x):
    y = self.up(x)
    return y + self.down(self.act(y))


def with_an(act):
    return lambda m: setattr(m, "act", act())


for each in (nn.ReLU, nn.SiLU, nn.Dropout):
    attack(
        lambda m, patch: setattr(m.act, "inplace", True),
        with_an(each),
        name=f"{each.__name__} writes into its input",
    )(writes_into_its_input)


@attack(lambda m, patch: m.append(linear()) and None)
class AChildIsCalledKeys(nn.Sequential):
    calls = 0

    def __init__(self):
        layers = {"keys": linear(), "act": nn.SiLU(), "out": linear()}
        super().__init__(collections.OrderedDict(layers))


@attack(lambda m, patch: vars(m.down).update(weight=torch.zeros(WIDTH, WIDTH)))
def a_parameter_is_hidden(self, x):
    return self.down(F.gelu(self.up(x)))


@attack(lambda m, patch: vars(m.norm).update(bias=torch.ones(WIDTH)))
def a_parameter_of_a_norm_is_hidden(self, x):
    return self.down(F.gelu(self.up(self.norm(x))))


@attack(lambda m, patch: setattr(m.norm, "normalized_shape", (WIDTH, WIDTH)))
def the_shape_of_a_norm(self, x):
    return self.down(F.gelu(self.up(self.norm(x))))


class ByRank(nn.Module):
    """An activation that reads one number or another, by a name that two ways set."""

    def __init__(self):
        super().__init__()
        self.of_tokens = self.of_sequences = 1.0

    def forward(self, x):
        mode = "token"
        if x.ndim == 5:
            mode = "sequence"
        if mode == "token":
            return F.silu(x * self.of_tokens)
        return F.silu(x * self.of_sequences)


@attack(lambda m, patch: setattr(m.act, "of_tokens", 3.0), with_an(ByRank))
def what_the_first_way_of_an_activation_reads(self, x):
    return self.down(self.act(self.up(x)))


@pytest.mark.parametrize("called", [True, False], ids=["called", "not called"])
@pytest.mark.parametrize("name", ATTACKS)
def test_it_follows_what_its_forward_reads(name, called, monkeypatch):
    cls, change, setup, before, call = ATTACKS[name]
    torch.manual_seed(0)
    model = cls()
    if setup is not None:
        setup(model)
    twin = copy.deepcopy(model)
    opfuse.convert(twin)
    x = torch.randn(2, 3, WIDTH)

    def both():
        found = []
        for each in (twin, model):
            if before is not None:
                before()
            grad = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
            given = x.to(next(each.parameters()).dtype).requires_grad_(grad)
            found.append(twins.outcome(each, [given], dict(call), lambda m: m.calls))
        return found

    first = both() if called else None
    if first:
        assert twins.difference(*first) == ""
    with contextlib.ExitStack() as stack:
        for each in (twin, model):
            torch.manual_seed(5)
            context = change(each, monkeypatch)
            if hasattr(context, "__exit__"):
                stack.callback(context.__exit__, None, None, None)
                context.__enter__()
        second = both()
        assert twins.difference(*second) == ""
        if first:
            assert twins.difference(first[1], second[1]), "the change makes no difference"


def test_a_source_file_that_was_edited_is_not_what_runs(tmp_path, monkeypatch):
    text = (
        "import torch\nfrom torch import nn\nfrom torch.nn import functional as F\n\n\n"
        "class Model(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)\n        self.calls = 0\n\n"
        "    def forward(self, x):\n        return self.down(F.gelu(self.up(x))) * 1.5\n"
    )
    (tmp_path / "edited_model.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    import edited_model

    (tmp_path / "edited_model.py").write_text(text.replace("1.5", "2.5").replace("gelu", "silu"))
    model = edited_model.Model()
    twin = copy.deepcopy(model)
    opfuse.convert(twin)
    x = torch.randn(2, 3, WIDTH, requires_grad=True)
    found = [twins.outcome(each, [x], {}) for each in (twin, model)]
    assert twins.difference(*found) == ""
