"""Forwards drawn at random, as the source of a module of their own, and what may change of what they read.

A part of them is "all grammar": it has only what the grammar of ``opfuse.convert`` names. The others have something
beyond it, for which the module may be left alone, but never frozen.

A drawn module has ``make()``, which gives a model with the attribute ``calls``, and the globals that its code reads.
A :class:`Change` is code to be run with ``m``, a model, ``g``, the drawn module, ``stack``, an ``ExitStack`` that takes
back what it does to the world, and ``mock``.
"""

import contextlib
import random
from typing import NamedTuple

WIDTH = 8

HEAD = """\
import abc
import argparse
import collections
import contextlib
import contextvars
import copy
import dataclasses
import enum
import functools
import itertools
import math
import operator
import os
import random
import types

import numpy as np
import torch
import torch.nn.functional
from torch import nn
from torch.nn import functional as F
"""


class Change(NamedTuple):
    """Something that may happen between two calls.

    Attributes:
        kind: What kind of thing changes.
        code: Python code.
        shared: Whether it changes the world, and is run once, or a model, and is run for each.
    """

    kind: str
    code: str
    shared: bool = False


class Draft:
    """A forward while it is drawn.

    Attributes:
        changes: What may change of what it reads.
        calls: Keyword arguments of calls, as code; the first has only defaults.
        state: Names of globals whose state calls change.
        beyond: What it has that is no grammar.
    """

    def __init__(self, number, grammar):
        self.rng = random.Random(number)
        self.grammar = grammar
        self.globals, self.init, self.attributes, self.methods, self.body = [], [], [], [], []
        self.bases = "nn.Module"
        self.decorators, self.late, self.late_arguments = [], [], []
        self.changes, self.calls, self.state, self.beyond = [], ["{}"], [], []
        self.arguments, self._depth, self._count = [], 0, 0
        self.x, self.inputs = "x", ["x"]
        self.children = []

    def new(self, stem):
        """A name that nothing else has."""
        self._count += 1
        return f"{stem}{self._count}"

    def line(self, text):
        """Lines of the forward."""
        self.body += ["    " * self._depth + each for each in text.splitlines()]

    @contextlib.contextmanager
    def block(self, head):
        """An indented block of the forward."""
        self.line(head)
        self._depth += 1
        yield
        self._depth -= 1

    def put(self, expression, keep=None):
        """The next value is that of an expression, in which ``{x}`` is the one now."""
        name = keep or ("x" if self.rng.random() < 0.5 else self.new("h"))
        self.line(f"{name} = {expression.replace('{x}', self.x)}")
        self.x = name

    def child(self, stem, made, other=None):
        """A child, as the name of the attribute that has it; ``other`` may take its place."""
        name = self.new(stem)
        self.init.append(f"self.{name} = {made}")
        self.children.append((name, made))
        if other:
            self.change("child replaced", f"m.{name} = {other}")
        return name

    def linear(self, stem="linear"):
        """A linear layer; what may happen to one may happen to it."""
        bias = self.rng.choice([True, True, False])
        name = self.child(stem, f"nn.Linear({WIDTH}, {WIDTH}, bias={bias})")
        often = ["parameter gone" if bias else "parameter registered"] * 3
        at, kind = f"m.{name}", self.rng.choice([*LINEAR, *often])
        self.change(kind, LINEAR[kind].format(at=at, name=name), weight=0.4)
        return name

    def change(self, kind, code, shared=False, weight=1.0):
        """Something that may change; of the less interesting only a part."""
        if self.rng.random() < weight:
            self.changes.append(Change(kind, code, shared))

    def source(self):
        """The drawn module, as text."""
        given = "".join(f", {argument}" for argument in [*self.arguments, *self.late_arguments])
        forward = [f"def forward(self, x{given}):", *[f"    {line}" for line in self.body]]
        forward.append(f"    return {self.x}")
        init = ["def __init__(self):", "    super().__init__()", "    self.calls = 0"]
        init += [f"    {line}" for text in self.init for line in text.splitlines()]
        parts = [*self.attributes, "\n".join(init), *self.methods]
        parts.append("\n".join([*self.decorators, *forward]))
        inner = "\n\n".join(parts)
        indented = "\n".join(f"    {line}" if line else "" for line in inner.splitlines())
        cls = f"class Block({self.bases}):\n{indented}"
        make = "def make():\n    return Block()"
        return "\n\n\n".join([HEAD.strip(), *self.globals, cls, *self.late, make]) + "\n"


LINEAR = {
    "child replaced": "{at} = nn.Linear(8, 8)",
    "parameter replaced": "{at}.weight = nn.Parameter(torch.randn(8, 8))",
    "parameter written": "{at}.weight.data.mul_(3)",
    "parameter frozen": "{at}.weight.requires_grad_(False)",
    "parameter gone": "{at}.bias = None",
    "parameter of a subclass": "{at}.weight = Twice({at}.weight.detach().clone())",
    "parameter registered": "{at}.register_parameter('bias', nn.Parameter(torch.ones(8)))",
    "hook on a child": "{at}.register_forward_hook(lambda module, args, y: y * 3)",
    "hook before a child": "{at}.register_forward_pre_hook(lambda module, args: (args[0] * 3,))",
    "hook on a child's gradient": (
        "{at}.register_full_backward_hook(lambda module, dx, dy: (dx[0] * 3,))"
    ),
    "forward of a child": "{at}.forward = lambda x: x * 3",
    "class of a child": "{at}.__class__ = type('Linear', (nn.Linear,), {{'forward': lambda s, x: x * 3}})",
    "child becomes None": "m.{name} = None",
    "child deleted": "del m.{name}",
    "parametrization": "parametrize.register_parametrization({at}, 'weight', Tripled())",
    "child of another kind": "{at} = nn.Tanh()",
}

# Activations: how code of an activation is written, and what may change of it

ACTIVATIONS = [
    ("F.gelu({v})", "F", "gelu"),
    ("F.silu({v})", "F", "silu"),
    ("F.relu({v})", "F", "relu"),
    ("torch.nn.functional.silu({v})", "F", "silu"),
    ("torch.relu({v})", "torch", "relu"),
    ("nn.functional.gelu({v}, approximate='tanh')", "F", "gelu"),
]
MODULES = ["nn.GELU()", "nn.SiLU()", "nn.ReLU()", "nn.GELU(approximate='tanh')"]


def activated(d, value):
    """An activation of a value, as code."""
    kind = d.rng.randrange(5)
    if kind < 2:
        text, where, name = d.rng.choice(ACTIVATIONS)
        d.change(
            "function of torch replaced",
            f"stack.enter_context(mock.patch.object({where}, {name!r}, lambda v, **kwargs: torch.sin(v)))",
            True,
            weight=0.3,
        )
        return text.format(v=value)
    if kind < 4:
        name = d.child("act", d.rng.choice(MODULES))
        d.change("child replaced", f"m.{name} = nn.Tanh()", weight=0.4)
        return f"self.{name}({value})"
    alias = d.new("ACT")
    d.globals.append(f"{alias} = {d.rng.choice(['F.silu', 'F.relu', 'F.gelu', 'torch.relu'])}")
    d.change("global function", f"g.{alias} = torch.sin", True)
    return f"{alias}({value})"


def normed(d, value):
    """A norm of a value, as code."""
    name = d.child(
        "norm", d.rng.choice([f"nn.LayerNorm({WIDTH})", f"nn.RMSNorm({WIDTH}, eps=1e-5)"])
    )
    d.change("number of a child", f"m.{name}.eps = 0.5", weight=0.5)
    d.change("child replaced", f"m.{name} = nn.LayerNorm({WIDTH}, eps=0.3)", weight=0.2)
    return f"self.{name}({value})"


# Stretches that a chain can replace


def two_linears(d):
    up, down = d.linear("up"), d.linear("down")
    d.put(f"self.{down}({activated(d, f'self.{up}({{x}})')})")


def in_steps(d):
    up, down = d.linear("up"), d.linear("down")
    d.put(f"self.{up}({{x}})")
    d.put(activated(d, "{x}"))
    d.put(f"self.{down}({{x}})")


def with_residual(d):
    up, down, before = d.linear("up"), d.linear("down"), d.x
    inner = normed(d, before)
    y = d.new("y")
    d.line(f"{y} = self.{down}({activated(d, f'self.{up}({inner})')})")
    d.put(d.rng.choice([f"{before} + {y}", f"{y} + {before}", f"torch.add({before}, {y})"]))


def gated(d):
    gate, up, down = d.linear("gate"), d.linear("up"), d.linear("down")
    act = d.rng.choice(["F.silu", "F.relu", "F.silu"])
    d.put(f"self.{down}({act}(self.{gate}({{x}})) * self.{up}({{x}}))")


def chunked(d):
    both, down = d.child("both", f"nn.Linear({WIDTH}, {2 * WIDTH})"), d.linear("down")
    a, b = d.new("a"), d.new("b")
    how = d.rng.choice([".chunk(2, dim=-1)", ".chunk(2, -1)"])
    d.line(f"{a}, {b} = self.{both}({d.x}){how}")
    d.put(f"self.{down}(F.silu({a}) * {b})")
    d.change("child replaced", f"m.{both} = nn.Linear({WIDTH}, {2 * WIDTH})", weight=0.3)


def norm_and_linear(d):
    d.put(f"self.{d.linear()}({normed(d, '{x}')})")


def a_drop(d):
    name = d.child("drop", "nn.Dropout(0.0)")
    d.put(f"self.{name}(self.{d.linear()}({normed(d, '{x}')}))")
    d.change("number of a child", f"m.{name}.p = 0.5")


LAYERS = [
    f"nn.Linear({WIDTH}, {WIDTH})",
    "nn.GELU()",
    f"nn.LayerNorm({WIDTH})",
    "nn.Tanh()",
    "nn.SiLU()",
]


def a_list(d):
    """A loop over the members of a list."""
    name, member = d.new("layers"), d.new("layer")
    inner = [LAYERS[0], d.rng.choice(LAYERS[1:]), d.rng.choice(LAYERS)]
    d.init.append(f"self.{name} = nn.ModuleList([{', '.join(inner)}])")
    if d.x != "x":
        d.line(f"x = {d.x}")
    how = d.rng.choice(["x = {m}(x)", "x = x + {m}(x)", "x = F.relu({m}(x))"])
    with d.block(f"for {member} in self.{name}:"):
        d.line(how.format(m=member))
    d.x = "x"
    for kind, code in MEMBERS:
        d.change(kind, code.format(at=f"m.{name}"), weight=0.5)


MEMBERS = [
    ("member appended", "{at}.append(nn.Linear(8, 8))"),
    ("member appended", "{at}.append(nn.Hardtanh(0.1, 0.2))"),
    ("members dropped", "{at} = {at}[:1]"),
    ("members dropped", "{at} = nn.ModuleList()"),
    ("member deleted", "del {at}[1]"),
    ("member inserted", "{at}.insert(1, nn.Softmax(-1))"),
    ("member replaced", "{at}[1] = nn.Softmax(-1)"),
    ("member replaced", "{at}[0] = nn.Linear(8, 8)"),
    ("hook on a member", "{at}[0].register_forward_hook(lambda module, args, y: y * 3)"),
    ("members swapped", "{at}[0], {at}[2] = {at}[2], {at}[0]"),
    ("list replaced", "{at} = nn.ModuleList([nn.Linear(8, 8)])"),
    ("order of members", "{at}._modules.move_to_end('0')"),
]


def nested(d):
    """A child with a forward of its own."""
    cls, name = d.new("Inner"), d.new("inner")
    number = round(d.rng.uniform(0.5, 3), 2)
    act = d.rng.choice(["F.gelu", "F.silu", "torch.relu"])
    uses = d.rng.choice(["", f" * {number}", " * self.factor"])
    d.globals.append(
        f"class {cls}(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        f"        self.up, self.down = nn.Linear({WIDTH}, {WIDTH}), nn.Linear({WIDTH}, {WIDTH})\n"
        f"        self.factor = {number}\n\n    def forward(self, x):\n"
        f"        return self.down({act}(self.up(x))){uses}"
    )
    d.init.append(f"self.{name} = {cls}()")
    d.put(
        d.rng.choice(
            [f"{{x}} + self.{name}({normed(d, '{x}')})", f"self.{name}({normed(d, '{x}')})"]
        )
    )
    d.change(
        "number of a nested module", f"m.{name}.factor = 5.0", weight=1.0 if "self" in uses else 0.1
    )
    d.change(
        "forward of a nested class", f"g.{cls}.forward = lambda self, x: x * 3", True, weight=0.4
    )
    d.change("child replaced", f"m.{name} = g.{cls}()", weight=0.4)
    d.change("forward of a child", f"m.{name}.forward = lambda x: x * 3", weight=0.3)
    d.change("child replaced", f"m.{name}.down = nn.Linear({WIDTH}, {WIDTH})", weight=0.4)
    d.change(
        "hook on a child", f"m.{name}.up.register_forward_hook(lambda mod, a, y: y * 3)", weight=0.3
    )


CHOSEN = {  # ways to look up which activation it is: code outside, what gives it, and what may happen to that
    "helper": (
        "def act{n}(v, soft=True, extra=None):\n    return F.silu(v) if soft else F.relu(v)",
        "act{n}({v})",
        [
            ("code of a helper", "g.act{n}.__code__ = (lambda v, soft=True, extra=None: torch.sin(v)).__code__"),
            ("defaults of a helper", "g.act{n}.__defaults__ = (False, None)"),
        ],
    ),
    "cell": (
        "def made{n}(soft):\n    def act(v):\n        return F.silu(v) if soft else F.relu(v)\n\n    return act\n\n\nACT{n} = made{n}(True)",
        "ACT{n}({v})",
        [
            ("variable of a closure", "g.ACT{n}.__closure__[0].cell_contents = False"),
            ("variable of a closure is gone", "del g.ACT{n}.__closure__[0].cell_contents"),
        ],
    ),
    "object": (
        "CHOSEN{n} = types.SimpleNamespace(soft=True) if {even} else Plain(1)\nCHOSEN{n}.soft = True",
        "(F.silu({v}) if CHOSEN{n}.soft else F.relu({v}))",
        [
            ("class of an object", "g.CHOSEN{n}.__class__ = type('New', (type(g.CHOSEN{n}),), {{'soft': property(lambda self: False)}})"),
            ("dictionary of an object", "g.CHOSEN{n}.__dict__ = {{'soft': False}}"),
        ],
    ),
    "partial": (
        "def act{n}(v, soft=True, hard=False):\n    return F.relu(v) if hard or not soft else F.silu(v)\n\n\nACT{n} = functools.partial(act{n}, soft=True)",
        "ACT{n}({v})",
        [
            ("keywords of a partial function", "g.ACT{n}.keywords['soft'] = False"),
            ("another keyword of a partial function", "g.ACT{n}.keywords['hard'] = True"),
        ],
    ),
    "argument": ("", "(F.silu({v}) if soft{n} else F.relu({v}))", []),
}  # fmt: skip


def chosen(d):
    """An activation that something says between two linears."""
    n, up, down = d.new(""), d.linear("up"), d.linear("down")
    kind = d.rng.choice([*CHOSEN, "argument"])
    outside, read, changes = CHOSEN[kind]
    d.globals.append(outside.format(n=n, even=d.rng.random() < 0.5))
    if kind == "argument":
        d.arguments.append(f"soft{n}=True")
        d.calls.append(f"{{'soft{n}': False}}")
    d.line(f"x = self.{up}({d.x})")
    d.line(f"x = {read.format(n=n, v='x')}")
    d.line(f"x = self.{down}(x)")
    d.x = "x"
    for kind, code in changes:
        d.change(kind, code.format(n=n), True)


def deleting(d):
    """Names that are deleted: in the middle of a stretch, at its end, far behind, or in a loop."""
    up, down = d.linear("up"), d.linear("down")
    before, h, y, z, kind = d.x, d.new("h"), d.new("y"), d.new("z"), d.rng.randrange(6)
    with d.block(f"for {d.new('i')} in range(2):") if kind == 5 else contextlib.nullcontext():
        d.line(f"{h} = self.{up}({before})")
        d.line(f"{y} = {activated(d, h)}")
        if kind < 2:
            d.line(d.rng.choice([f"del {h}", f"del {h}, {before}", f"del {before}"]))
        d.line(f"{z} = self.{down}({y})")
        if kind == 2:
            d.line(f"{z} = torch.sin({z})")
        if kind == 3:
            with d.block(f"if {z}.ndim > 1:"):
                d.line(f"del {h}")
        elif kind > 1:
            d.line(d.rng.choice([f"del {h}", f"del ({y}, {h})", f"del {y}\ndel {h}"]))
        if kind == 4:
            d.line(f"{h} = {z}")
    d.x = z


def in_front_of_writes(d):
    """A child that may be told to write into its input, which is read behind it."""
    made = d.rng.choice(["nn.SiLU()", "nn.ReLU()", "nn.Dropout(0.5)", "nn.Dropout(0.0)"])
    name, down, y = d.child("act", made), d.linear("down"), d.new("y")
    d.line(f"{y} = self.{d.linear()}({d.x})")
    d.put(f"{y} + self.{down}(self.{name}({y}))")
    d.change("child told to write", f"m.{name}.inplace = True")


UNKNOWN = [  # forwards of classes that nobody knows, with what they have
    ("return F.silu(x * self.k)", "self.k = 1.0"),
    ("x = x * self.k\nreturn x * torch.sigmoid(x)", "self.k = 1.0"),
    ("y = torch.sigmoid(x)\ny = x * y\nreturn y * self.k", "self.k = 1.0"),
    ("return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.k) * self.weight", "self.k = 1e-5"),
    ("y = x.pow(2).sum(-1, keepdim=True) / x.shape[-1]\nreturn x * torch.rsqrt(y + self.k) * self.weight", "self.k = 1e-5"),
    ("if self.weight.dtype in (torch.float64, torch.bfloat16):\n    x = x.to(self.weight.dtype)\nreturn F.rms_norm(x, self.weight.shape, self.weight, self.k)", "self.k = 1e-5"),
]  # fmt: skip
ASKED = [
    "x.ndim == 3", "x.shape[:-1] == (2, 3)", "x.shape[0] == 4", "x.numel() > 33", "x.dtype == torch.float64", "x.size(0) in (1, 4)",
    "x.dim() != 3", "not x.ndim - 4", "x.shape[0] < 2", "x.shape == (4, 8)", "x.dim() > 3 and x.shape[0] == 1",
]  # fmt: skip


def unknown(d):
    """A layer of a class that nobody knows, which may ask its input what it is like."""
    cls, name = d.new("Unknown"), d.new("unknown")
    body, init = d.rng.choice(UNKNOWN)
    if d.rng.random() < 0.5:
        d.beyond.append("class that asks for a shape")
        asked, way = d.rng.choice(ASKED), d.rng.randrange(4)
        head = [
            f"if {asked}:\n    return F.relu(x)",
            f"if {asked}:\n    x = x * 2",
            f"way = 1.0\nif {asked}:\n    way = self.other\nx = x * way",
            f"x = x * self.other if {asked} else x",
        ][way]
        body, init = f"{head}\n{body}", f"{init}\nself.other = 1.5"
        d.change("number of a class that asks", f"m.{name}.other = 3.0")
        d.change("shape", "g.ROWS = (4,)", True)
        d.change("shape", "g.ROWS = (1, 2, 3)", True)
    init, body = [text.replace("\n", "\n        ") for text in (init, body)]
    weight = f"self.weight = nn.Parameter(torch.linspace(0.5, 1.5, {WIDTH}))"
    d.globals.append(
        f"class {cls}(nn.Module):\n    def __init__(self):\n        super().__init__()\n        {init}\n"
        f"        {weight if 'weight' in body else ''}\n\n    def forward(self, x):\n        {body}"
    )
    d.init.append(f"self.{name} = {cls}()")
    d.put(f"self.{d.linear()}(self.{name}(self.{d.linear()}({{x}})))")
    d.change("number of an unknown class", f"m.{name}.k = 2.0")
    d.change("child replaced", f"m.{name} = nn.Tanh()", weight=0.3)


STRETCHES = [
    two_linears, in_steps, with_residual, gated, chunked, norm_and_linear, a_drop, a_list, nested,
    chosen, chosen, deleting, in_front_of_writes, unknown,
]  # fmt: skip


# Where a forward may get a number from


class Number(NamedTuple):
    """A number that a forward reads.

    Attributes:
        kind: The name of this way to read one.
        read: The expression that reads it; ``{n}``: a number that tells it from others.
        change: Code that makes it another one, ``{b}`` in place of ``{a}``.
        init: A line of ``__init__``.
        outside: Code of the module.
        inside: Code of the class.
        shared: Whether the change is one of the world.
    """

    kind: str
    read: str
    change: str
    init: str = ""
    outside: str = ""
    inside: str = ""
    shared: bool = False


GRAMMAR_NUMBERS = [
    Number("attribute", "self.k{n}", "m.k{n} = {b}", "self.k{n} = {a}"),
    Number("attribute", "self.k{n}", "m.k{n} = {b}", "self.k{n} = {a}"),
    Number("attribute becomes None", "self.k{n}", "m.k{n} = None", "self.k{n} = {a}"),
    Number("attribute becomes a tensor", "self.k{n}", "m.k{n} = torch.full((8,), {b})", "self.k{n} = {a}"),
    Number("attribute becomes a bool", "self.k{n}", "m.k{n} = True", "self.k{n} = {a}"),
    Number("attribute of the class", "self.k{n}", "g.Block.k{n} = {b}", inside="k{n} = {a}", shared=True),
    Number("attribute before that of the class", "self.k{n}", "m.k{n} = {b}", inside="k{n} = {a}"),
    Number("attribute deleted", "self.k{n}", "del m.k{n}", "self.k{n} = {a}", inside="k{n} = {b}"),
    Number(
        "attribute behind a property", "self.k{n}", "g.Block.k{n} = property(lambda self: {b})",
        "self.k{n} = {a}", shared=True,
    ),
    Number("global number", "K{n}", "g.K{n} = {b}", outside="K{n} = {a}", shared=True),
    Number("global number", "K{n}", "g.K{n} = {b}", outside="K{n} = {a}", shared=True),
    Number("global becomes a tensor", "K{n}", "g.K{n} = torch.full((8,), {b})", outside="K{n} = {a}", shared=True),
    Number("parameter", "self.k{n}", "m.k{n} = nn.Parameter(torch.full((8,), {b}))", "self.k{n} = nn.Parameter(torch.full((8,), {a}))"),
    Number("parameter written", "self.k{n}", "m.k{n}.data.fill_({b})", "self.k{n} = nn.Parameter(torch.full((8,), {a}))"),
    Number("buffer", "self.k{n}", "m.k{n} = torch.full((8,), {b})", "self.register_buffer('k{n}', torch.full((8,), {a}))"),
    Number("buffer written", "self.k{n}", "m.k{n}.fill_({b})", "self.register_buffer('k{n}', torch.full((8,), {a}))"),
    Number("literal", "{a}", "m.zero_grad()"),
]  # fmt: skip

HELD = {  # objects with a number, by how they are made; {b} may be written by setattr
    "simple namespace": "types.SimpleNamespace(k={a})",
    "argparse namespace": "argparse.Namespace(k={a})",
    "dataclass": "Config({a})",
    "slots dataclass": "Slots({a})",
    "object": "Plain({a})",
    "recursive namespace": "types.SimpleNamespace(k={a}, inner=types.SimpleNamespace(k={a}))",
}
CLASSES = """\
@dataclasses.dataclass
class Config:
    k: float = 1.5

    def now(self, x=1):
        return self.k * x


@dataclasses.dataclass(slots=True)
class Slots:
    k: float = 1.5


class Plain:
    default = 0.5

    def __init__(self, k):
        self.k = k

    def __call__(self, x):
        return x * self.k

    def now(self):
        return self.k


class Descriptor:
    def __set_name__(self, owner, name):
        self.name = "_" + name

    def __get__(self, instance, owner):
        return instance.__dict__[self.name] * 2 if instance is not None else self


class Doubled(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        return result * 2 if function in (F.linear, F.silu, F.gelu, F.relu) else result


class Colour(enum.Enum):
    RED = 1.5
    BLUE = 3.5


class Turns:
    turn = 0

    def __next__(self):
        self.turn += 1
        return self.turn % 3 + 0.5


class Weird(float):
    def __mul__(self, other):
        return other * 3

    __rmul__ = __mul__


Pair = collections.namedtuple("Pair", "k other")"""
BEYOND_NUMBERS = [
    *[Number(kind, "self.c{n}.k", "m.c{n}.k = {b}", f"self.c{{n}} = {made}") for kind, made in HELD.items()],
    *[Number(f"global {kind}", "C{n}.k", "g.C{n}.k = {b}", outside=f"C{{n}} = {made}", shared=True) for kind, made in HELD.items()],
    Number("object replaced", "self.c{n}.k", "m.c{n} = g.Plain({b})", "self.c{n} = Plain({a})"),
    Number("attribute of an object's class", "self.c{n}.default", "g.Plain.default = {b}", "self.c{n} = Plain({a})", shared=True),
    Number("class as configuration", "self.c{n}.default", "g.Plain.default = {b}", "self.c{n} = Plain", shared=True),
    Number("global class", "Plain.default", "g.Plain.default = {b}", shared=True),
    Number("nested object", "self.c{n}.inner.k", "m.c{n}.inner.k = {b}", "self.c{n} = types.SimpleNamespace(inner=Plain({a}))"),
    Number("dict", "self.c{n}['k']", "m.c{n}['k'] = {b}", "self.c{n} = {{'k': {a}}}"),
    Number("dict with a default", "self.c{n}.get('k', {a})", "m.c{n}['k'] = {b}", "self.c{n} = {{}}"),
    Number("list", "self.c{n}[0]", "m.c{n}[0] = {b}", "self.c{n} = [{a}]"),
    Number("tuple", "self.c{n}[0]", "m.c{n} = ({b},)", "self.c{n} = ({a},)"),
    Number("named tuple", "self.c{n}.k", "m.c{n} = g.Pair({b}, 0)", "self.c{n} = Pair({a}, 0)"),
    Number("length of a list", "len(self.c{n})", "m.c{n}.append(1)", "self.c{n} = [1]"),
    Number("length of a ModuleList", "len(self.c{n})", "m.c{n}.append(nn.Identity())", "self.c{n} = nn.ModuleList([nn.Identity()])"),
    Number("global dict", "C{n}['k']", "g.C{n}['k'] = {b}", outside="C{n} = {{'k': {a}}}", shared=True),
    Number("global list", "C{n}[0]", "g.C{n}[0] = {b}", outside="C{n} = [{a}]", shared=True),
    Number("enum", "self.c{n}.value", "m.c{n} = g.Colour.BLUE", "self.c{n} = Colour.RED"),
    Number("enum compared", "(2.5 if self.c{n} is Colour.RED else {a})", "m.c{n} = g.Colour.BLUE", "self.c{n} = Colour.RED"),
    Number("constant of a module", "settings{n}.K", "g.settings{n}.K = {b}", outside="settings{n} = types.ModuleType('settings{n}')\nsettings{n}.K = {a}", shared=True),
    Number("constant of math", "math.tau", "stack.enter_context(mock.patch.object(math, 'tau', {b}))", shared=True),
    Number("environment", "float(os.environ['OPFUSE_FUZZ_{n}'])", "stack.enter_context(mock.patch.dict(os.environ, OPFUSE_FUZZ_{n}='{b}'))", outside="os.environ['OPFUSE_FUZZ_{n}'] = '{a}'", shared=True),
    Number("environment", "float(os.getenv('OPFUSE_FUZZ_NOT', {a}))", "stack.enter_context(mock.patch.dict(os.environ, OPFUSE_FUZZ_NOT='{b}'))", shared=True),
    Number("numpy array", "float(self.c{n}[0])", "m.c{n}[0] = {b}", "self.c{n} = np.array([{a}])"),
    Number("numpy array", "self.c{n}[0]", "m.c{n}[0] = {b}", "self.c{n} = np.array([{a}])"),
    Number("numpy number", "self.c{n}", "m.c{n} = np.float64({b})", "self.c{n} = np.float64({a})"),
    Number("tensor", "self.c{n}", "m.c{n}.fill_({b})", "self.c{n} = torch.tensor({a})"),
    Number("tensor replaced", "self.c{n}", "m.c{n} = torch.tensor({b})", "self.c{n} = torch.tensor({a})"),
    Number("tensor as a number", "self.c{n}.item()", "m.c{n}.fill_({b})", "self.register_buffer('c{n}', torch.tensor({a}))"),
    Number("tensor as a number", "float(self.c{n})", "m.c{n}.fill_({b})", "self.register_buffer('c{n}', torch.tensor({a}))"),
    Number("global tensor", "C{n}", "g.C{n}.fill_({b})", outside="C{n} = torch.tensor({a})", shared=True),
    Number("getattr", "getattr(self, 'k{n}', {a})", "m.k{n} = {b}"),
    Number("getattr", "getattr(self, 'k{n}')", "m.k{n} = {b}", "self.k{n} = {a}"),
    Number("hasattr", "(2.5 if hasattr(self, 'k{n}') else {a})", "m.k{n} = {b}"),
    Number("vars", "vars(self)['k{n}']", "m.k{n} = {b}", "self.k{n} = {a}"),
    Number("__dict__", "self.__dict__['k{n}']", "m.k{n} = {b}", "self.k{n} = {a}"),
    Number("property", "self.p{n}", "m.k{n} = {b}", "self.k{n} = {a}", inside="@property\ndef p{n}(self):\n    return self.k{n} * 2"),
    Number("property replaced", "self.p{n}", "g.Block.p{n} = property(lambda self: {b})", inside="@property\ndef p{n}(self):\n    return {a}", shared=True),
    Number("cached property", "self.p{n}", "m.p{n} = {b}", inside="@functools.cached_property\ndef p{n}(self):\n    return {a}"),
    Number("descriptor", "self.d{n}", "m._d{n} = {b}", "self._d{n} = {a}", inside="d{n} = Descriptor()"),
    Number("class of self", "type(self).k{n}", "g.Block.k{n} = {b}", inside="k{n} = {a}", shared=True),
    Number("class by name", "Block.k{n}", "g.Block.k{n} = {b}", inside="k{n} = {a}", shared=True),
    Number("static method", "self.s{n}()", "g.Block.s{n} = staticmethod(lambda: {b})", inside="@staticmethod\ndef s{n}():\n    return {a}", shared=True),
    Number("class method", "self.s{n}()", "g.Block.k{n} = {b}", inside="k{n} = {a}\n\n@classmethod\ndef s{n}(cls):\n    return cls.k{n}", shared=True),
    Number("method of an object", "self.c{n}.now()", "m.c{n}.k = {b}", "self.c{n} = Plain({a})"),
    Number("method of a dataclass", "self.c{n}.now()", "m.c{n}.k = {b}", "self.c{n} = Config({a})"),
    Number("method of a global", "C{n}.now()", "g.C{n}.k = {b}", outside="C{n} = Plain({a})", shared=True),
    Number("object called", "self.c{n}(1)", "m.c{n}.k = {b}", "self.c{n} = Plain({a})"),
    Number("lambda held", "self.c{n}(1)", "m.c{n} = lambda v: v * {b}", "self.c{n} = lambda v: v * {a}"),
    Number("lambda that reads", "self.c{n}(self)", "m.k{n} = {b}", "self.k{n} = {a}\nself.c{n} = lambda me: me.k{n}"),
    Number("partial held", "self.c{n}()", "m.c{n} = functools.partial(operator.mul, 1, {b})", "self.c{n} = functools.partial(operator.mul, 1, {a})"),
    Number("global function that reads", "read{n}()", "g.K{n} = {b}", outside="K{n} = {a}\n\n\ndef read{n}():\n    return K{n}", shared=True),
    Number("global function replaced", "read{n}()", "g.read{n} = lambda: {b}", outside="def read{n}():\n    return {a}", shared=True),
    Number("code of a function", "read{n}()", "g.read{n}.__code__ = (lambda: {b}).__code__", outside="def read{n}():\n    return {a}", shared=True),
    Number("default of a function", "read{n}()", "g.read{n}.__defaults__ = ({b},)", outside="def read{n}(k={a}):\n    return k", shared=True),
    Number("attribute of a function", "read{n}.k", "g.read{n}.k = {b}", outside="def read{n}():\n    return 1\n\n\nread{n}.k = {a}", shared=True),
    Number("closure", "read{n}()", "g.set{n}({b})", outside="def over{n}(k):\n    def read():\n        return k\n\n    def change(to):\n        nonlocal k\n        k = to\n\n    return read, change\n\n\nread{n}, set{n} = over{n}({a})", shared=True),
    Number("context variable", "C{n}.get()", "g.C{n}.set({b})", outside="C{n} = contextvars.ContextVar('C{n}', default={a})", shared=True),
    Number("int of a subclass", "self.k{n}", "m.k{n} = g.Weird({b})", "self.k{n} = {a}"),
    Number("attribute of a child", "self.up_k{n}.factor", "m.up_k{n}.factor = {b}", "self.up_k{n} = nn.Identity()\nself.up_k{n}.factor = {a}"),
    Number("width of a child", "self.up_k{n}.in_features", "m.up_k{n}.in_features = 3", "self.up_k{n} = nn.Linear(2, 2)"),
    Number("mode of a child", "(2.5 if self.up_k{n}.training else {a})", "m.up_k{n}.eval()", "self.up_k{n} = nn.Identity()"),
    Number("parameter's need", "(2.5 if self.up_k{n}.weight.requires_grad else {a})", "m.up_k{n}.weight.requires_grad = False", "self.up_k{n} = nn.Linear(2, 2)"),
    Number("default dtype", "(2.5 if torch.get_default_dtype() == torch.float32 else {a})", "stack.callback(torch.set_default_dtype, torch.get_default_dtype())\ntorch.set_default_dtype(torch.float64)", shared=True),
    Number("grad mode", "(2.5 if torch.is_grad_enabled() else {a})", "stack.enter_context(torch.no_grad())", shared=True),
    Number("inference mode", "(2.5 if torch.is_inference_mode_enabled() else {a})", "stack.enter_context(torch.inference_mode())", shared=True),
    Number("autocast", "(2.5 if torch.is_autocast_enabled('cpu') else {a})", "stack.enter_context(torch.autocast('cpu', torch.bfloat16))", shared=True),
    Number("autocast's dtype", "(2.5 if torch.get_autocast_dtype('cpu') == torch.bfloat16 else {a})", "stack.callback(torch.set_autocast_dtype, 'cpu', torch.get_autocast_dtype('cpu'))\ntorch.set_autocast_dtype('cpu', torch.float16)", shared=True),
    Number("type of x", "(2.5 if isinstance(x, nn.Parameter) else {a})", "g.AS_PARAMETER = True", shared=True),
    Number("x is contiguous", "(2.5 if x.is_contiguous() else {a})", "g.TRANSPOSED = True", shared=True),
    Number("x needs gradients", "(2.5 if x.requires_grad else {a})", "stack.enter_context(torch.no_grad())", shared=True),
    Number("module constant in a function", "(lambda: K{n})()", "g.K{n} = {b}", outside="K{n} = {a}", shared=True),
    Number("walrus", "(k{n} := self.k{n})", "m.k{n} = {b}", "self.k{n} = {a}"),
    Number("comprehension", "sum([k for k in self.c{n}])", "m.c{n}.append({b})", "self.c{n} = [{a}]"),
    Number("generator expression", "sum(k for k in self.c{n})", "m.c{n}.append({b})", "self.c{n} = [{a}]"),
    Number("max of a dict", "max(self.c{n}.values())", "m.c{n}['other'] = 9.5", "self.c{n} = {{'k': {a}}}"),
    Number("next", "next(iter(self.c{n}))", "m.c{n}.insert(0, {b})", "self.c{n} = [{a}]"),
    Number("text", "float(f'{{self.k{n}}}')", "m.k{n} = {b}", "self.k{n} = {a}"),
    Number("operator", "operator.attrgetter('k{n}')(self)", "m.k{n} = {b}", "self.k{n} = {a}"),
    Number("drawn", "(C{n}.random() + 0.5)", "g.C{n}.random()", outside="C{n} = random.Random({n})", shared=True),
    Number("drawn by numpy", "(C{n}.random() + 0.5)", "g.C{n}.random()", outside="C{n} = np.random.default_rng({n})", shared=True),
    Number("drawn of its own", "(self.c{n}.random() + 0.5)", "m.c{n}.random()", "self.c{n} = np.random.default_rng({n})"),
    Number("drawn of random", "(random.random() + 0.5)", "stack.enter_context(mock.patch.object(random, 'random', lambda: {b}))", shared=True),
    Number("counted", "next(C{n})", "next(g.C{n})", outside="C{n} = Turns()", shared=True),
    Number("builtin hidden", "abs(-{a})", "g.abs = lambda v: {b}", shared=True),
    Number("weird getattr", "self.late{n}", "m.k{n} = {b}", "self.k{n} = {a}", inside="def __getattr__(self, name):\n    return vars(self)['k{n}'] if name == 'late{n}' else super().__getattr__(name)"),
]  # fmt: skip
STATES = ("drawn", "counted", "drawn by numpy")


def scalar(d, kinds):
    """A number that the forward reads, as an expression."""
    number = d.rng.choice(kinds)
    n = d.new("")
    a = round(d.rng.uniform(0.6, 1.9), 2)
    given = {"n": n, "a": a, "b": round(a + d.rng.uniform(1, 3), 2)}
    for lines, text in (
        (d.init, number.init),
        (d.globals, number.outside),
        (d.attributes, number.inside),
    ):
        if text:
            lines += (
                text.format(**given).splitlines() if lines is d.init else [text.format(**given)]
            )
    d.change(number.kind, number.change.format(**given), number.shared)
    if number.kind in STATES:
        d.state.append(f"C{n}")
    if number in BEYOND_NUMBERS:
        d.beyond.append(number.kind)
    return number.read.format(**given)


# What a forward may do with a number

USES = [
    "{x} * {k}",
    "{x} * {k}",
    "{x} + {k}",
    "torch.tanh({x}) * {k}",
    "{k} * {x} - {x}",
    "({x} - {k}).tanh()",
    "{x} / (1 + {k} * {k})",
    "torch.mul({x}, {k})",
]


def a_use(d, kinds):
    """A statement that uses a number."""
    number = scalar(d, kinds)
    use = d.rng.choice(USES).replace("{k}", number)
    kind = d.rng.randrange(7)
    if kind < 4:
        d.put(use)
    elif kind == 4:
        name = d.new("helper")
        d.globals.append(f"def {name}(x, k, shift=0.25):\n    return x * k + shift")
        d.put(f"{name}({{x}}, {number})")
        d.change("helper replaced", f"g.{name} = lambda x, k: x * k * 3", True, weight=0.3)
        d.change("defaults of a helper", f"g.{name}.__defaults__ = (4.0,)", True, weight=0.3)
        d.change(
            "code of a helper",
            f"g.{name}.__code__ = (lambda x, k, shift=0: x * 7).__code__",
            True,
            weight=0.3,
        )
    elif kind == 5:
        name = d.new("_helped")
        d.methods.append(f"def {name}(self, x, k=2.0):\n    return x * k")
        d.put(f"self.{name}({{x}}, {number})")
        d.change(
            "method replaced", f"g.Block.{name} = lambda self, x, k=2: x * k * 3", True, weight=0.3
        )
        d.change("method of the instance", f"m.{name} = lambda x, k=2: x * k * 3", weight=0.3)
        d.change(
            "subclass", f"m.__class__ = type('Block', (type(m),), {{'{name}': lambda s, x, k=2: x * 7}})",
            weight=0.3,
        )  # fmt: skip
    else:
        local = d.new("k")
        d.line(f"{local} = {number}")
        d.put(use.replace(number, local))


# Conditions


def a_branch(d):
    """A condition on something that guards know."""
    name, kind = d.new("flag"), d.rng.randrange(9)
    other = d.rng.choice(["{x} * 3.5", "torch.tanh({x}) + 1", "{x} - 2"])
    if kind == 0:
        d.init.append(f"self.{name} = {d.rng.choice([True, False])}")
        d.change("flag", f"m.{name} = not m.{name}")
        test = f"self.{name}"
    elif kind == 1:
        d.init.append(f"self.{name} = 'one'")
        d.change("string", f"m.{name} = 'two' if m.{name} == 'one' else 'one'")
        test = d.rng.choice([f"self.{name} == 'one'", f"self.{name} != 'one'"])
    elif kind == 2:
        d.init.append(f"self.{name} = {d.rng.choice(['None', '0.75'])}")
        d.change("None", f"m.{name} = 0.75 if m.{name} is None else None")
        test = d.rng.choice([f"self.{name} is None", f"self.{name} is not None"])
    elif kind == 3:
        argument = d.new("mask")
        d.arguments.append(f"{argument}=None")
        d.calls.append(f"{{'{argument}': torch.linspace(0, 1, {WIDTH})}}")
        d.put(f"{{x}} if {argument} is None else {{x}} + {argument}")
        return
    elif kind == 4:
        d.change("shape", "g.ROWS = (4,)", True)
        test = d.rng.choice([f"{d.x}.dim() == 3", f"{d.x}.shape[0] > 3", f"{d.x}.ndim != 3"])
    elif kind == 5:
        d.change("dtype", "m.double()")
        test = d.rng.choice([f"{d.x}.dtype == torch.float64", f"{d.x}.dtype != torch.float32"])
    elif kind == 6:
        d.change("mode", "m.train(not m.training)")
        test = "self.training"
    elif kind == 7:
        argument = d.new("flag")
        d.arguments.append(f"{argument}=False")
        d.calls.append(f"{{'{argument}': True}}")
        test = argument
    else:
        d.globals.append(f"{name.upper()} = {d.rng.choice([True, False, 0, 2.5])}")
        d.change("global flag", f"g.{name.upper()} = not g.{name.upper()}", True)
        test = name.upper()
    if d.rng.random() < 0.4:
        d.put(f"({other}) if {test} else {{x}}")
        return
    before, y = d.x, d.new("y")
    with d.block(f"if {test}:"):
        d.line(f"{y} = {other.format(x=before)}")
    with d.block("else:"):
        d.line(f"{y} = {before}")
    d.x = y


def an_optional_child(d):
    """A child that may be None."""
    name = d.new("maybe")
    made = d.rng.choice(["None", f"nn.Linear({WIDTH}, {WIDTH})", "nn.Tanh()", "nn.Softmax(-1)"])
    d.init.append(f"self.{name} = {made}")
    before = d.x
    with d.block(f"if self.{name} is not None:"):
        d.line(f"{before} = self.{name}({before})")
    other = "nn.Softmax(-1)" if made == "None" else "None"
    d.change("optional child", f"m.{name} = {other}")
    d.change("optional child", f"m.{name} = {other}", weight=0.5)


def an_argument(d):
    """A number or a tensor that is given."""
    name = d.new("given")
    if d.rng.random() < 0.5:
        d.arguments.append(f"{name}=1.5")
        d.calls += [
            f"{{'{name}': 0.25}}",
            f"{{'{name}': torch.tensor(2.5)}}",
            f"{{'{name}': True}}",
        ]
    else:
        d.arguments.append(f"{name}=None")
        d.calls += [f"{{'{name}': 0.25}}", f"{{'{name}': torch.linspace(1, 2, {WIDTH})}}"]
        d.line(f"{name} = 1.5 if {name} is None else {name}")
    d.put(f"{{x}} * {name}")


def passed_on(d):
    """Keyword arguments that go to a child."""
    cls, name = d.new("Takes"), d.new("takes")
    d.globals.append(
        f"class {cls}(nn.Module):\n    def forward(self, x, bias=None, factor=1.0, **kwargs):\n"
        f"        if bias is not None:\n            x = x + bias\n        return x * factor"
    )
    d.init.append(f"self.{name} = {cls}()")
    d.late_arguments = ["**kwargs"]
    d.put(f"self.{name}({{x}}, **kwargs)")
    d.calls += [f"{{'bias': torch.linspace(0, 1, {WIDTH})}}", "{'factor': 3.0}", "{'other': 1}"]
    d.change("forward of a nested class", f"g.{cls}.forward = lambda self, x, **kw: x * 3", True)


def of_torch(d):
    """Functions of torch and methods of tensors."""
    d.put(
        d.rng.choice(
            [
                "torch.tanh({x})", "{x}.sigmoid() * 2", "F.softplus({x})", "{x}.clamp(min=-1.0, max=2.0)",
                "F.softmax({x}, dim=-1)", "torch.add({x}, 1.0, alpha=0.5)", "{x}.transpose(0, 1).transpose(0, 1)",
                "{x}.reshape({x}.shape)", "-{x}", "{x} ** 2 - 1",
                "F.dropout({x}, p=0.0, training=self.training)",
                "{x}.mean(dim=-1, keepdim=True) + {x}", "{x}.float().to({x}.dtype)", "{x}.contiguous()",
                "{x}.unsqueeze(0).squeeze(0)", "{x} - {x}.detach()", "F.layer_norm({x}, (8,))", "torch.sin({x})",
            ]
        )
    )  # fmt: skip
    d.change(
        "method of tensors",
        "stack.enter_context(mock.patch.object(torch.Tensor, 'tanh', torch.sin))",
        True,
        weight=0.05,
    )
    d.change(
        "function of torch replaced",
        "stack.enter_context(mock.patch.object(torch, 'tanh', torch.cos))",
        True,
        weight=0.2 if "torch.tanh" in d.body[-1] else 0,
    )


def unpacked(d):
    """Names for several values at once."""
    a, b = d.new("a"), d.new("b")
    d.line(
        d.rng.choice(
            [
                f"{a}, {b} = {d.x}, torch.tanh({d.x})",
                f"({a}, {b}) = torch.sin({d.x}), {d.x}",
                f"{a} = {b} = torch.sin({d.x})",
                f"{a}, {b} = torch.cat([{d.x}, {d.x}], -1).chunk(2, -1)",
            ]
        )
    )
    d.x = b
    d.put(f"{a} + {{x}}")


def own_method(d):
    """A method with layers in it."""
    name, up, down = d.new("_part"), d.linear("up"), d.linear("down")
    act = activated(d, f"self.{up}(x)")
    d.methods.append(f"def {name}(self, x):\n    return self.{down}({act})")
    d.put(d.rng.choice([f"self.{name}({{x}})", f"{{x}} + self.{name}({normed(d, '{x}')})"]))
    d.change("method replaced", f"g.Block.{name} = lambda self, x: x * 3", True, weight=0.5)
    d.change("method of the instance", f"m.{name} = lambda x: x * 3", weight=0.5)
    d.change(
        "subclass",
        f"m.__class__ = type('Block', (type(m),), {{'{name}': lambda s, x: x * 7}})",
        weight=0.3,
    )


def of_functionals(d):
    """A linear layer and a norm that are functions of parameters."""
    w = d.new("w")
    d.init.append(f"self.{w} = nn.Parameter(torch.randn({WIDTH}, {WIDTH}) / 3)")
    d.put(
        d.rng.choice(
            [
                f"F.linear({{x}}, self.{w})",
                f"{{x}} @ self.{w}",
                f"torch.matmul({{x}}, self.{w}.t())",
            ]
        )
    )
    d.change("parameter", f"m.{w} = nn.Parameter(torch.randn({WIDTH}, {WIDTH}))")


GRAMMAR = [a_use, a_use, a_use, a_branch, a_branch, an_optional_child, an_argument, passed_on, of_torch, of_torch, unpacked, own_method, of_functionals, a_list]  # fmt: skip


# Beyond the grammar


def beyond(name):
    """Note that a feature is none of the grammar."""

    def register(function):
        def feature(d):
            d.beyond.append(name)
            function(d)

        BEYOND.append(feature)
        return function

    return register


BEYOND = []


def a_use_beyond(d):
    a_use(d, BEYOND_NUMBERS)


@beyond("dict of modules")
def a_dict(d):
    name, key, before = d.new("table"), d.new("key"), d.x
    first = d.rng.choice(["nn.Tanh()", f"nn.Linear({WIDTH}, {WIDTH})"])
    d.init.append(f"self.{name} = nn.ModuleDict({{'a': {first}, 'b': nn.SiLU()}})")
    kind = d.rng.randrange(3)
    if kind == 0:
        with d.block(f"for {key} in self.{name}.values():"):
            d.line(f"{before} = {key}({before})")
    elif kind == 1:
        with d.block(f"for {key} in self.{name}:"):
            d.line(f"{before} = self.{name}[{key}]({before})")
    else:
        d.put(f"self.{name}['c']({{x}}) if 'c' in self.{name} else {{x}}")
    d.change("module added to a dict", f"m.{name}['c'] = nn.Softmax(-1)")
    d.change("module added to a dict", f"m.{name}.update({{'c': nn.Softmax(-1)}})", weight=0.5)
    d.change("module of a dict dropped", f"del m.{name}['b']", weight=0.5 if kind < 2 else 0)


LOOPS = [
    ("for {i}, {m} in enumerate(self.{l}):", "x = {m}(x) + {i}"),
    ("for {m} in reversed(self.{l}):", "x = {m}(x)"),
    ("for {m} in self.{l}[1:]:", "x = {m}(x)"),
    ("for {m}, {i} in zip(self.{l}, (1, 2, 3, 4, 5)):", "x = {m}(x) * {i}"),
    ("for {i} in range(len(self.{l})):", "x = self.{l}[{i}](x)"),
    ("for {m} in list(self.{l}):", "x = {m}(x)"),
    ("for {m} in [*self.{l}, torch.tanh]:", "x = {m}(x)"),
    ("for {m} in filter(None, self.{l}):", "x = {m}(x)"),
    ("for {m} in self.{l}.children():", "x = {m}(x)"),
    ("for {m} in self.{l}:", "x = {m}(x) if isinstance({m}, nn.Linear) else torch.sin({m}(x))"),
    ("for {m} in self.{l}:", "x = F.relu({m}(x)) if {m} is self.{l}[0] else {m}(x)"),
]


@beyond("loop")
def a_loop(d):
    name, i, member = d.new("layers"), d.new("i"), d.new("layer")
    inner = [d.rng.choice([LAYERS[0], "nn.Tanh()"]), *d.rng.sample(LAYERS, 2)]
    d.init.append(f"self.{name} = nn.ModuleList([{', '.join(inner)}])")
    head, step = d.rng.choice(LOOPS)
    d.line(f"x = {d.x}")
    with d.block(head.format(i=i, m=member, l=name)):
        d.line(step.format(i=i, m=member, l=name))
    d.x = "x"
    for kind, code in MEMBERS:
        d.change(kind, code.format(at=f"m.{name}"), weight=0.4)


@beyond("comprehension")
def comprehended(d):
    name = d.new("layers")
    d.init.append(f"self.{name} = nn.ModuleList([{LAYERS[0]}, nn.Tanh()])")
    d.put(
        d.rng.choice(
            [
                f"sum(layer({{x}}) for layer in self.{name})",
                f"torch.stack([layer({{x}}) for layer in self.{name}]).sum(0)",
                f"functools.reduce(lambda v, layer: layer(v), self.{name}, {{x}})",
                f"torch.cat([*map(lambda layer: layer({{x}}), self.{name})], -1)[..., :{WIDTH}]",
                f"self.{name}[-1]({{x}})",
                f"[layer({{x}}) for layer in self.{name}][-1]",
            ]
        )
    )
    for kind, code in MEMBERS[:2] + MEMBERS[5:7]:
        d.change(kind, code.format(at=f"m.{name}"))


@beyond("super")
def of_the_parent(d):
    if d.bases != "nn.Module":
        return
    act = d.rng.choice(["F.gelu", "F.silu"])
    number = d.rng.choice(["1.5", "self.of_base"])
    d.globals.append(
        f"class Base(nn.Module):\n    of_base = 1.25\n\n    def __init__(self):\n        super().__init__()\n"
        f"        self.base_up, self.base_down = nn.Linear({WIDTH}, {WIDTH}), nn.Linear({WIDTH}, {WIDTH})\n\n"
        f"    def forward(self, x):\n        return self.base_down({act}(self.base_up(x))) * {number}\n\n"
        f"    def helped(self, x):\n        return x * self.of_base"
    )
    d.bases = "Base"
    call = d.rng.choice(
        [
            "super().forward({x})",
            "Base.forward(self, {x})",
            "super(Block, self).forward({x})",
            "self.helped({x})",
            "super().helped({x})",
        ]
    )
    d.put(call)
    d.change("attribute of the parent", "g.Base.of_base = 4.0", True)
    d.change("forward of the parent", "g.Base.forward = lambda self, x: x * 3", True)
    d.change("method of the parent", "g.Base.helped = lambda self, x: x * 3", True, weight=0.5)
    d.change(
        "method comes before the parent's",
        "g.Block.helped = lambda self, x: x * 3",
        True,
        weight=0.5,
    )
    d.change(
        "parents",
        "g.Block.__bases__ = (type('New', (g.Base,), {'forward': lambda s, x: x * 3, 'helped': lambda s, x: x * 5}),)",
        True,
        weight=0.5,
    )


@beyond("decorator")
def decorated(d):
    name, n = d.new("decorator"), d.new("")
    kind = d.rng.randrange(3)
    wraps = "    @functools.wraps(function)\n" if kind else ""
    d.globals.append(
        f"FACTOR{n} = 1.5\n\n\ndef {name}(function):\n{wraps}    def wrapper(self, *args, **kwargs):\n"
        f"        return function(self, *args, **kwargs) * FACTOR{n}\n\n    return wrapper"
    )
    d.decorators.append(f"@{name}")
    d.change("what a decorator reads", f"g.FACTOR{n} = 4.0", True)


@beyond("decorator of torch")
def decorated_by_torch(d):
    d.decorators.append(
        d.rng.choice(
            ["@torch.no_grad()", "@torch.enable_grad()", "@torch.autocast('cpu', torch.bfloat16)"]
        )
    )


@beyond("opaque call that changes attributes")
def mutating(d):
    n, number = d.new(""), round(d.rng.uniform(0.6, 1.9), 2)
    d.init.append(f"self.moves{n} = {number}")
    d.methods.append(f"def _move{n}(self):\n    vars(self)['moves{n}'] += 0.5")
    way = d.rng.randrange(3)
    if way == 0:
        d.line(f"self._move{n}()")
    elif way == 1:
        d.globals.append(f"def move{n}(m):\n    m.moves{n} = m.moves{n} + 0.5")
        d.line(f"move{n}(self)")
    else:
        d.globals.append(
            f"class Moves{n}(nn.Module):\n    def forward(self, x):\n"
            f"        vars(self)['parent'].moves{n} += 0.5\n        return x + 1"
        )
        d.init.append(f"self.mover{n} = Moves{n}()\nvars(self.mover{n})['parent'] = self")
        d.put(f"self.mover{n}({{x}})")
    up, down = d.linear("up"), d.linear("down")
    d.put(f"self.{down}(F.silu(self.{up}({{x}}))) * self.moves{n}")
    d.change("attribute that calls change", f"m.moves{n} = 4.0")


@beyond("opaque call that replaces a child")
def swapping(d):
    n = d.new("")
    d.init.append(
        f"self.one{n}, self.two{n} = nn.Linear({WIDTH}, {WIDTH}), nn.Linear({WIDTH}, {WIDTH})"
    )
    d.globals.append(
        f"def swap{n}(m):\n    parts = m._modules\n    parts['one{n}'], parts['two{n}'] = parts['two{n}'], parts['one{n}']"
    )
    d.line(f"swap{n}(self)")
    d.put(f"self.two{n}(F.gelu(self.one{n}({{x}})))")
    d.change("child replaced", f"m.one{n} = nn.Linear({WIDTH}, {WIDTH})")


@beyond("counter")
def counting(d):
    d.line(
        d.rng.choice(
            [
                "self.calls += 1",
                "self.calls = self.calls + 1",
                "setattr(self, 'calls', self.calls + 1)",
            ]
        )
    )
    d.put("{x} * (self.calls + 1)")
    d.change("counter", "m.calls = 7")


@beyond("global counter")
def counting_outside(d):
    n = d.new("")
    d.globals.append(f"COUNT{n} = [0]")
    d.state.append(f"COUNT{n}")
    d.line(
        d.rng.choice(
            [
                f"COUNT{n}[0] += 1",
                f"COUNT{n}[0] = COUNT{n}[0] + 1",
                f"COUNT{n}.append(COUNT{n}.pop() + 1)",
            ]
        )
    )
    d.put(f"{{x}} * COUNT{n}[0]")
    d.change("global counter", f"g.COUNT{n}[0] = 7", True)


@beyond("printing")
def printing(d):
    n = d.new("")
    d.init.append(f"self.said{n} = 1.5")
    d.line(f"print('said', self.said{n})")
    d.change("printed number", f"m.said{n} = 2.5")


@beyond("writes into a tensor")
def in_place(d):
    y = d.new("y")
    d.line(f"{y} = torch.tanh({d.x})")
    d.line(
        d.rng.choice(
            [
                f"{y} += 1.5",
                f"{y}.mul_(2)",
                f"{y}[..., 0] = 3.0",
                f"{y}.clamp_(-0.5, 0.5)",
                f"F.relu({y}, inplace=True)",
                f"{y} *= {d.x}",
            ]
        )
    )
    d.put(f"{{x}} + {y}")


@beyond("told to write by place")
def told_by_place(d):
    y = d.new("y")
    d.line(f"{y} = self.{d.linear()}({normed(d, d.x)})")
    told = d.rng.choice(
        [
            "F.relu({y}, True)",
            "F.silu({y}, True)",
            "F.dropout({y}, 0.5, self.training, True)",
            "F.hardtanh({y}, -0.5, 0.5, True)",
            "F.leaky_relu({y}, 0.1, self.training)",
            "F.normalize({y}.detach(), 2.0, -1, 1e-12, {y}.detach())",
        ]
    ).format(y=y)
    if d.rng.random() < 0.5:
        d.line(told)
        d.put(f"F.silu({y})")
    else:
        d.put(f"{told} + self.{d.linear()}({y})")
    d.change("mode", "m.train(not m.training)", weight=0.5)


@beyond("branch on values")
def by_value(d):
    before = d.x
    limit = scalar(d, GRAMMAR_NUMBERS[:2])
    with d.block(
        d.rng.choice(
            [
                f"if {before}.sum() > {limit}:",
                f"if bool(({before} > {limit}).any()):",
                f"if {before}.max().item() > {limit}:",
            ]
        )
    ):
        d.line(f"{before} = {before} * 3")


@beyond("try")
def trying(d):
    n, before = d.new(""), d.x
    d.init.append(f"self.tried{n} = Plain(1.5)")
    with d.block("try:"):
        d.line(f"{before} = {before} * self.tried{n}.k")
    with d.block(d.rng.choice(["except AttributeError:", "except Exception:"])):
        d.line(f"{before} = {before} - 1")
    d.change("what a try reads", f"m.tried{n}.k = 4.0")
    d.change("what a try catches", f"m.tried{n} = None")


@beyond("with")
def entering(d):
    before = d.x
    context = d.rng.choice(
        [
            "contextlib.nullcontext()",
            "torch.no_grad()",
            "torch.enable_grad()",
            "torch.autocast('cpu', enabled=False)",
            "torch.autograd.set_grad_enabled(self.training)",
        ]
    )
    number = scalar(d, GRAMMAR_NUMBERS[:2])
    with d.block(f"with {context}:"):
        d.line(f"{before} = {before} * {number}")
    d.change("grad mode", "stack.enter_context(torch.no_grad())", True, weight=0.5)
    d.change("mode", "m.eval()", weight=0.5)


@beyond("match")
def matching(d):
    n, before = d.new(""), d.x
    d.init.append(f"self.matched{n} = 'one'")
    with d.block(f"match self.matched{n}:"):
        with d.block("case 'one':"):
            d.line(f"{before} = {before} * 2")
        with d.block("case _:"):
            d.line(f"{before} = {before} - 2")
    d.change("what is matched", f"m.matched{n} = 'two'")


@beyond("while")
def repeating(d):
    n, before = d.new(""), d.x
    number = scalar(d, GRAMMAR_NUMBERS[:2])
    d.line(f"k{n} = 0")
    with d.block(f"while k{n} < {number}:"):
        d.line(f"{before} = {before} * 1.5")
        d.line(f"k{n} += 1")


@beyond("range")
def ranging(d):
    n, before, name = d.new(""), d.x, d.linear()
    d.init.append(f"self.times{n} = 2")
    with d.block(f"for _ in range(self.times{n}):"):
        d.line(f"{before} = F.silu(self.{name}({before}))")
    d.change("number of turns", f"m.times{n} = 3")


@beyond("function inside")
def inside(d):
    n = d.new("")
    number = scalar(d, GRAMMAR_NUMBERS)
    if d.rng.random() < 0.5:
        with d.block(f"def inner{n}(v):"):
            d.line(f"return v * {number}")
    else:
        d.line(f"inner{n} = lambda v: v * {number}")
    d.put(f"inner{n}({{x}})")


@beyond("walrus")
def walrus(d):
    y, name = d.new("y"), d.linear()
    d.put(f"({y} := F.silu(self.{name}({{x}}))) * torch.tanh({y})")


@beyond("list of values")
def collecting(d):
    n, name = d.new(""), d.linear()
    d.line(f"found{n} = [{d.x}]")
    d.line(
        d.rng.choice(
            [
                f"found{n}.append(F.gelu(self.{name}({d.x})))",
                f"found{n} += [F.gelu(self.{name}({d.x}))]",
                f"found{n}[0] = self.{name}({d.x})",
            ]
        )
    )
    d.put(f"found{n}[-1] + found{n}[0]")


@beyond("child by name")
def by_name(d):
    name = d.linear()
    d.put(
        d.rng.choice(
            [
                f"getattr(self, '{name}')({{x}})",
                f"self._modules['{name}']({{x}})",
                f"self.get_submodule('{name}')({{x}})",
                f"dict(self.named_children())['{name}']({{x}})",
            ]
        )
    )
    d.change("child replaced", f"m.{name} = nn.Linear({WIDTH}, {WIDTH})")


@beyond("forward called by name")
def forward_by_name(d):
    name = d.linear()
    d.put(
        d.rng.choice(
            [
                f"self.{name}.forward({{x}})",
                f"nn.Linear.forward(self.{name}, {{x}})",
                f"F.linear({{x}}, self.{name}.weight, self.{name}.bias)",
                f"{{x}} @ self.{name}.weight.t()",
            ]
        )
    )
    d.change("child replaced", f"m.{name} = nn.Linear({WIDTH}, {WIDTH})")
    d.change("parameter replaced", f"m.{name}.weight = nn.Parameter(torch.randn({WIDTH}, {WIDTH}))")


@beyond("sequential indexed")
def indexed(d):
    name = d.new("seq")
    d.init.append(
        f"self.{name} = nn.Sequential(nn.Linear({WIDTH}, {WIDTH}), nn.GELU(), nn.Linear({WIDTH}, {WIDTH}))"
    )
    d.put(
        d.rng.choice(
            [f"self.{name}[:2]({{x}})", f"self.{name}[0]({{x}})", f"self.{name}[-1](F.silu({{x}}))"]
        )
    )
    d.change("member appended", f"m.{name}.append(nn.Linear({WIDTH}, {WIDTH}))")
    d.change("member replaced", f"m.{name}[0] = nn.Linear({WIDTH}, {WIDTH})")


@beyond("stochastic depth")
def stochastic(d):
    n, name, before = d.new(""), d.linear(), d.x
    draw = d.rng.choice(
        [
            "DRAWN{n}.random()",
            "self.drawn{n}.random()",
            "random.random()",
            "float(torch.rand(()))",
            "np.random.rand()",
        ]
    ).format(n=n)
    d.globals.append(f"DRAWN{n} = {d.rng.choice(['random.Random(1)', 'np.random.default_rng(1)'])}")
    d.init.append(
        f"self.drawn{n} = {d.rng.choice(['random.Random(1)', 'np.random.default_rng(1)'])}"
    )
    d.state.append(f"DRAWN{n}")
    with d.block(f"if {draw} < 0.5:"):
        d.line(f"{before} = {before} + F.silu(self.{name}({before}))")


@beyond("starred")
def starred(d):
    n = d.new("")
    d.globals.append(f"def spread{n}(*values, factor=1.5):\n    return sum(values) * factor")
    d.put(
        d.rng.choice(
            [
                f"spread{n}({{x}}, {{x}})",
                f"spread{n}(*[{{x}}, 1.5], **{{'factor': 2}})",
                f"spread{n}(*{{x}}.chunk(1))",
            ]
        )
    )
    d.change("defaults of a helper", f"g.spread{n}.__kwdefaults__ = {{'factor': 4.0}}", True)


@beyond("checkpoint")
def checkpointed(d):
    n, up, down = d.new(""), d.linear("up"), d.linear("down")
    d.methods.append(f"def _inner{n}(self, x):\n    return self.{down}(F.silu(self.{up}(x)))")
    d.put(f"torch.utils.checkpoint.checkpoint(self._inner{n}, {{x}}, use_reentrant=False)")
    d.change("method replaced", f"g.Block._inner{n} = lambda self, x: x * 3", True)


@beyond("assert")
def asserting(d):
    n = d.new("")
    d.init.append(f"self.sure{n} = True")
    d.line(
        d.rng.choice(
            [
                f"assert self.sure{n}, 'not sure'",
                f"if not self.sure{n}:\n    raise ValueError('not sure')",
            ]
        )
    )
    d.change("what is asserted", f"m.sure{n} = False")


@beyond("early return")
def returning(d):
    n = d.new("")
    d.init.append(f"self.early{n} = False")
    with d.block(f"if self.early{n}:"):
        d.line(f"return {d.x} * 3, 'early'")
    d.change("early return", f"m.early{n} = True")


@beyond("__call__")
def called(d):
    if any("def __call__" in each for each in d.methods):
        return
    n = d.new("")
    d.globals.append(f"CALLED{n} = 1.5")
    d.methods.append(
        f"def __call__(self, *args, **kwargs):\n    y = super().__call__(*args, **kwargs)\n    return y * CALLED{n} if isinstance(y, torch.Tensor) else y"
    )
    d.change("what __call__ reads", f"g.CALLED{n} = 4.0", True)
    d.change("__call__ of the class", "g.Block.__call__ = lambda self, x, **kw: x * 3", True)


@beyond("own autograd function")
def own_gradient(d):
    n = d.new("")
    d.globals.append(
        f"GRAD{n} = 2.0\n\n\nclass Own{n}(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, x):\n"
        f"        return x.clone()\n\n    @staticmethod\n    def backward(ctx, dy):\n        return dy * GRAD{n}"
    )
    d.put(f"Own{n}.apply({{x}})")
    d.change("what a backward reads", f"g.GRAD{n} = 5.0", True)


@beyond("hook on a value")
def hooked_value(d):
    n, name = d.new(""), d.linear()
    d.globals.append(f"HOOKED{n} = 2.0")
    d.put(f"self.{name}({{x}})")
    d.put("F.silu({x})")
    with d.block(f"if {d.x}.requires_grad:"):
        d.line(f"{d.x}.register_hook(lambda grad: grad * HOOKED{n})")
    d.change("what a hook reads", f"g.HOOKED{n} = 5.0", True)


ANY = [  # what may happen to any model
    Change("forward of the instance", "m.forward = lambda x, **kwargs: x * 3"),
    Change("forward of the class", "g.Block.forward = lambda self, x, **kwargs: x * 3", True),
    Change("hook", "m.register_forward_hook(lambda module, args, y: None)"),
    Change("hook on every module", "handle = torch.nn.modules.module.register_module_forward_hook(lambda module, args, y: y * 1.5 if isinstance(module, nn.Linear) else None)\nstack.callback(handle.remove)", True),
    Change("forward of nn.Linear", "stack.enter_context(mock.patch.object(nn.Linear, 'forward', lambda self, x: x * 3))", True),
    Change("forward of nn.GELU", "stack.enter_context(mock.patch.object(nn.GELU, 'forward', lambda self, x: x * 3))", True),
    Change("dtype of the model", "m.double()"),
    Change("dtype of the model", "m.bfloat16()"),
    Change("mode", "m.train(not m.training)"),
    Change("all frozen", "m.requires_grad_(False)"),
    Change("parameters assigned", "m.load_state_dict({k: v * 2 if v.is_floating_point() else v for k, v in m.state_dict().items()}, assign=True)"),
    Change("parameters loaded", "m.load_state_dict({k: v * 2 if v.is_floating_point() else v for k, v in m.state_dict().items()})"),
    Change("grad mode", "stack.enter_context(torch.no_grad())", True),
    Change("inference mode", "stack.enter_context(torch.inference_mode())", True),
    Change("autocast", "stack.enter_context(torch.autocast('cpu', torch.bfloat16))", True),
    Change("default dtype", "stack.callback(torch.set_default_dtype, torch.get_default_dtype())\ntorch.set_default_dtype(torch.float64)", True),
    Change("mode of functions", "stack.enter_context(g.Doubled())", True),
    Change("shape", "g.ROWS = (4,)", True),
    Change("shape", "g.ROWS = (1, 2, 3)", True),
    Change("type of x", "g.AS_PARAMETER = True", True),
]  # fmt: skip


def drawn(seed, index):
    """The draft of one forward."""
    rng = random.Random(f"{seed}:{index}")
    d = Draft(rng.random(), rng.random() < 0.5)
    d.globals.append(CLASSES)
    d.globals.append("ROWS, AS_PARAMETER, TRANSPOSED = (2, 3), False, False")
    pieces = [d.rng.choice(STRETCHES) for _ in range(d.rng.choice([1, 1, 2]))]
    pieces += [d.rng.choice(GRAMMAR) for _ in range(d.rng.choice([1, 2, 3]))]
    if not d.grammar:
        count = d.rng.choice([1, 1, 2, 3])
        pieces += [
            a_use_beyond if d.rng.random() < 0.5 else d.rng.choice(BEYOND) for _ in range(count)
        ]
    d.rng.shuffle(pieces)
    for piece in pieces:
        if piece is a_use:
            a_use(d, GRAMMAR_NUMBERS)
        else:
            piece(d)
    return d
