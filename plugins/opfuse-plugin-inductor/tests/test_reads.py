"""What ops of other packages read besides tensors: it is read at every call, or the op is left alone, with a sentence."""

import functools
import math
import os
import random
import types

import numpy as np
import pytest
import torch
from opfuse_inductor import conditions, kernels, reads
from torch import nn
from torch.nn import functional as F

import opfuse
from opfuse import ops
from opfuse.core.plugins import using

TRACED = {"inductor.min_elements": 0, "inductor.backend": "eager"}
SLOPE = 2.0
FACTORS = [2.0]
config = types.ModuleType("config")
config.slope, config.names, config.inner = 2.0, ["a"], types.ModuleType("config.inner")


@pytest.fixture(autouse=True)
def _alone():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with using("inductor"):
        yield
    torch.set_num_threads(threads)


class Times(ops.Activation):
    """``x`` times what ``slope`` gives."""

    def slope(self):
        return 1.0

    def value(self, x):
        return x * self.slope()

    def derivative(self, x):
        return torch.full_like(x, self.slope())


def chain_with(act):
    """Two norms around it: what it does is in the forward, in the backward, and computed again."""
    return opfuse.Sequential(ops.RMSNorm(8), act, ops.RMSNorm(8), ops.BasicLinear(8, 4))


def step(chain, x, between=lambda: None):
    """The output and all gradients, where something changes between the passes."""
    x = x.clone().requires_grad_()
    with opfuse.options(**TRACED):
        y = chain(x)
    between()
    weights = torch.linspace(-1, 1, y.numel()).view_as(y)
    return y.detach(), *torch.autograd.grad(y, [x, *chain.parameters()], weights)


def check(chain, x, between=lambda: None, back=lambda: None):
    """Compiled and one by one, the same."""
    results = []
    for selection in ("inductor", ""):
        with using(selection):
            torch.manual_seed(0)
            results.append(step(chain, x, between))
        back()
    torch.testing.assert_close(*results)


def state(chain):
    """How many plans there are, and whether the chain's run is compiled: True, or the sentence why not."""
    with opfuse.options(**TRACED):
        report = opfuse.explain(chain, torch.randn(3, 8, requires_grad=True))
    text = " ".join(report.details.split())
    compiled = "time spent tracing and compiling" in text and "forward 1 fused" in text
    return compiled or text


# Followed


class OfGlobal(Times):
    def slope(self):
        return SLOPE


def helper():
    return SLOPE + inner_helper()


def another_helper():
    return -SLOPE


def another_value(self, x):
    return x * 7.0 + 1


def inner_helper(factor=2.0):
    return factor * config.slope


class OfHelper(Times):
    def slope(self):
        return helper()


class OfClass(Times):
    factor = 2.0

    def slope(self):
        return self.factor


def of_closure(value):
    class OfClosure(Times):
        def slope(self):
            return value

    def change(other):
        nonlocal value
        value = other

    return OfClosure(), change


def in_globals(name):
    def change(value):
        globals()[name] = value

    return change


def on(target, name):
    return lambda value: setattr(target, name, value)


def made(cls):
    return cls, cls()


@pytest.fixture(autouse=True)
def _restored():
    yield
    globals()["SLOPE"] = config.slope = OfClass.factor = 2.0


def changing(name):
    """An activation, and a function that changes what it reads."""
    if name == "closure":
        return of_closure(2.0)
    cls, act = made(
        {"class": OfClass, "helper": OfHelper, "module": OfHelper}.get(name) or globals()[name]
    )
    if name == "class":
        return act, on(cls, "factor")
    return act, on(config, "slope") if name == "module" else in_globals("SLOPE")


@pytest.mark.parametrize("name", ["OfGlobal", "helper", "module", "class", "closure"])
def test_a_number_is_read_at_every_call(name):
    act, change = changing(name)
    chain, x = chain_with(act), torch.randn(3, 8)
    for value in (2.0, 3.0, 2.0, -1.0):
        change(value)
        check(chain, x)
    assert state(chain) is True


def test_an_attribute_that_shadows_one_of_the_class_and_is_deleted_again():
    chain, x = chain_with(OfClass()), torch.randn(3, 8)
    before = step(chain, x)
    for _ in range(2):
        check(chain, x)
        chain[1].factor = 5.0
        check(chain, x)
        vars(chain[1])["factor"] = 6.0  # behind the op's back
        check(chain, x)
        del chain[1].factor
        torch.testing.assert_close(step(chain, x), before)
    assert state(chain) is True


def test_a_function_that_is_replaced(monkeypatch):
    chain, x = chain_with(OfHelper()), torch.randn(3, 8)
    check(chain, x)
    monkeypatch.setitem(globals(), "helper", another_helper)
    check(chain, x)
    check(chain, x)
    monkeypatch.setattr(OfHelper, "slope", inner_slope)
    check(chain, x)
    monkeypatch.setattr(Times, "value", another_value)
    check(chain, x)
    assert state(chain) is True
    inner_slope.__code__, code = (lambda self: 7.0).__code__, inner_slope.__code__
    try:
        check(chain, x)
    finally:
        inner_slope.__code__ = code
    monkeypatch.setattr(OfHelper, "slope", of_list)
    check(chain, x)
    assert "it indexes a value whose parts are unknown" in state(chain)


def tripled(x, k):
    return x * 0 + k * 3


BEHIND = {
    "defaults": lambda: setattr(inner_helper, "__defaults__", (5.0,)),
    "function of torch": lambda: setattr(torch, "full_like", tripled),
    "function without source": lambda: setattr(torch, "full_like", lambda x, k: x * 0 + k * 3),
}


@pytest.mark.parametrize("name", BEHIND)
def test_what_a_helper_reads_is_asked_at_every_call(name, monkeypatch):
    chain, x = chain_with(OfHelper()), torch.randn(3, 8)
    check(chain, x)
    full_like, defaults = torch.full_like, inner_helper.__defaults__
    try:
        BEHIND[name]()
        check(chain, x)
    finally:
        torch.full_like, inner_helper.__defaults__ = full_like, defaults
    check(chain, x)
    assert state(chain) is True


def test_the_numbers_of_the_forward_are_those_of_the_backward():
    """PyTorch keeps tensors; what a derivative reads from elsewhere it reads in the backward, if it is run one by one."""
    chain, x = chain_with(OfClass()), torch.randn(3, 8)
    chain[1].factor = 2.0
    check(
        chain, x, lambda: setattr(chain[1], "factor", 5.0), lambda: setattr(chain[1], "factor", 2.0)
    )


NUMBERS = {
    "scale": (lambda: ops.ConstantScale(2.0), "scale", 5.0),
    "dropout": (lambda: ops.Dropout(0.25), "p", 0.75),
    "limit": (lambda: ops.ScaledClampedQGeGLU(limit=0.5).activation, "limit", 3.0),
    "centered": (lambda: ops.RMSNorm(8, zero_centered_gamma=True), "zero_centered_gamma", False),
}


@pytest.mark.parametrize("one_by_one", [False, True])
@pytest.mark.parametrize("name", NUMBERS)
def test_what_is_set_between_the_passes_is_for_the_next_call(name, one_by_one):
    make, attribute, other = NUMBERS[name]
    op = make()
    known = getattr(op, attribute)
    last = ops.RMSNorm(4) if name == "limit" else ops.RMSNorm(8)
    chain, x = opfuse.Sequential(ops.RMSNorm(8), op, last), torch.randn(3, 8)
    x = x.t().contiguous().t() if name == "dropout" and one_by_one else x
    options = {**TRACED, "inductor.min_elements": 1000 if one_by_one else 0}
    results = []
    for between in (lambda: None, lambda: setattr(op, attribute, other)):
        torch.manual_seed(0)
        leaf = x.clone().requires_grad_()
        with opfuse.options(**options):
            y = chain(leaf)
        between()
        results.append((y, *torch.autograd.grad(y.square().sum(), [leaf, *chain.parameters()])))
        setattr(op, attribute, known)
    torch.testing.assert_close(*results)


def test_a_kernel_for_other_rows_is_made_of_what_was_traced(monkeypatch):
    """Nothing that an op reads meanwhile gets into it: Inductor gets the graph, not the functions."""
    seen = []
    monkeypatch.setattr(
        kernels, "trace", lambda function, *a, **k: seen.append(function) or real(function, *a, **k)
    )
    from opfuse_inductor.tracing import trace as real

    chain = opfuse.Sequential(OfGlobal(), ops.RMSNorm(8))
    with opfuse.options(**{**TRACED, "inductor.backend": "inductor"}), torch.no_grad():
        chain(torch.randn(3, 8))
    assert [isinstance(function, torch.fx.GraphModule) for function in seen] == [False, True]


# Left alone


class Passes(ops.RMSNorm):
    """Another norm."""

    def op_forward(self, ctx, input_, **unused):
        return 2 * super().op_forward(ctx, input_, **unused)

    def op_backward(self, ctx, grad_output):
        return super().op_backward(ctx, 2 * grad_output)


class PassesOfSiLU(ops.SiLU):
    def op_forward(self, ctx, input_, **unused):
        return 2 * super().op_forward(ctx, input_, **unused)

    def op_backward(self, ctx, grad_output):
        return super().op_backward(ctx, 2 * grad_output)


def carrying(op):
    known, known_backward = op.op_forward, op.op_backward
    op.op_forward = lambda *args, **kwargs: -known(*args, **kwargs)
    op.op_backward = lambda ctx, dy: known_backward(ctx, -dy)
    return op


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Passes(8), None),  # an exact class is in the pattern
        (PassesOfSiLU, "PassesOfSiLU overrides op_forward"),
        (lambda: carrying(ops.RMSNorm(8)), "this RMSNorm has its own op_forward"),
        (lambda: carrying(ops.SiLU()), "this SiLU has its own op_forward"),
        (lambda: carrying(ops.Bias(8)), "this Bias has its own op_forward"),
    ],
)
def test_an_op_that_overrides_its_passes_keeps_them(make, reason):
    chain, x = chain_with(make()), torch.randn(3, 8)
    check(chain, x)
    text = state(chain)
    assert "forward 2 fused" in text and "backward 2 fused" in text
    assert reason is None or reason in text


def test_an_op_that_gets_a_method_after_the_first_call():
    chain, x = chain_with(ops.SiLU()), torch.randn(3, 8)
    check(chain, x)
    assert state(chain) is True
    carrying(chain[1])
    check(chain, x)
    assert "this SiLU has its own op_forward" in state(chain)
    del chain[1].op_forward, chain[1].op_backward
    check(chain, x)
    assert state(chain) is True


class Double(ops.SiLU):
    def value(self, x):
        return 2 * F.silu(x)

    def derivative(self, x):
        return 2 * ops.SiLU.derivative(self, x)


class DoubleGate(ops.SwiGLU):
    value, derivative = Double.value, Double.derivative


class Turned(ops.SwiGLU):
    def split(self, x):
        return super().split(x)[::-1]

    def join(self, a, b):
        return super().join(b, a)


class Backwards(ops.SwiGLU):
    """Its backward at once."""

    def backward_value(self, grad_output, x, *, out=None):
        a, b = x.chunk(2, -1)
        s = torch.sigmoid(a)
        return torch.cat([grad_output * b * (s + a * s * (1 - s)), grad_output * a * s], -1) * 0.5


@pytest.mark.parametrize("cls", [Double, DoubleGate, Turned, Backwards])
def test_a_subclass_with_its_own_formulas_computes_them(cls):
    chain, x = opfuse.Sequential(ops.RMSNorm(8), cls(), ops.ConstantScale(2.0)), torch.randn(3, 8)
    check(chain, x)
    with using("inductor"):
        y, dx, _ = step(chain, x)
    leaf = x.clone().requires_grad_()
    normed = leaf * torch.rsqrt(leaf.square().mean(-1, keepdim=True) + 1e-5)
    a, b = normed.chunk(2, -1)
    of = {
        Double: lambda: 2 * F.silu(normed),
        DoubleGate: lambda: 2 * F.silu(a) * b,
        Turned: lambda: F.silu(b) * a,
    }
    wanted = 2 * of.get(cls, lambda: F.silu(a) * b)()
    torch.testing.assert_close(y, wanted.detach())
    (expected,) = torch.autograd.grad(wanted, leaf, torch.linspace(-1, 1, y.numel()).view_as(y))
    torch.testing.assert_close(dx, expected * (0.5 if cls is Backwards else 1))


def refusal(*chain):
    env = opfuse.Environment(torch.device("cpu"), None, torch.float32, requires_grad=True)
    return conditions.pays(chain, env)


def of(slope, **attributes):
    """An activation whose slope a function gives."""
    return type("Mine", (Times,), {"slope": slope, **attributes})()


def inner_slope(self):
    return 2.0


def with_empty_cell():
    def slope(self):
        return later

    act = of(slope)
    return act
    later = 1.0


def writing():
    count = 0

    def slope(self):
        nonlocal count
        count += 1
        return count

    return of(slope)


def storing(self):
    self.calls = 1
    return 2.0


def declaring(self):
    global SLOPE
    SLOPE = 3.0
    return 2.0


def importing(self):
    import sys

    return len(sys.argv)


def with_default(self, factors=[1.0]):  # noqa: B006  # that is the point
    return factors[0]


def with_module():
    act = of(inner_slope)
    act.inner = nn.SiLU()
    return act


def with_buffer():
    act = of(inner_slope)
    act.register_buffer("table", torch.ones(2))
    return act


called = functools.partial(lambda factors: factors[0], FACTORS)
cached_slope = functools.lru_cache(lambda: SLOPE)


def of_list(self):
    return FACTORS[0]


def of_environment(self):
    return len(os.environ)


def of_random(self):
    return random.random()


def of_numpy(self):
    return np.random.rand()


def of_vars(self):
    return len(vars(config))


def of_module(self):
    return len(str(config))


def of_inner_module(self):
    return config.inner.x


def of_object(self):
    return len(config.names)


def of_nothing(self):
    return nowhere  # noqa: F821


def of_partial(self):
    return called()


def of_cache(self):
    return cached_slope()


def of_comprehension(self):
    return sum([SLOPE * k for k in (1, 2)])


def of_property(self):
    return self.doubled


def of_parent(self):
    return super(Times, self).slope()


def of_generator(self):
    return float(torch.rand(()))


def of_setting(self):
    return torch.get_num_threads()


def of_environment_variable(self):
    return float(os.environ.get("SLOPE", 2))


UNKNOWN = "it calls an unknown function"
NOT_FOLLOWED = {
    "list": (lambda: of(of_list), "it indexes a value whose parts are unknown"),
    "environment": (lambda: of(of_environment), "it calls len() of what is not a number"),
    "variable": (lambda: of(of_environment_variable), "it calls os.environ.get()"),
    "random": (lambda: of(of_random), UNKNOWN),
    "numpy": (lambda: of(of_numpy), UNKNOWN),
    "generator": (lambda: of(of_generator), "it calls rand"),
    "setting": (lambda: of(of_setting), "it calls get_num_threads"),
    "module": (lambda: of(of_vars), UNKNOWN),
    "whole module": (lambda: of(of_module), UNKNOWN),
    "inner module": (lambda: of(of_inner_module), "config.inner.x is not found"),
    "object in a module": (lambda: of(of_object), "it calls len() of what is not a number"),
    "missing": (lambda: of(of_nothing), "there is no nowhere"),
    "empty": (with_empty_cell, "later has no value yet"),
    "nonlocal": (writing, "it has a statement beyond the grammar (Nonlocal)"),
    "attribute": (lambda: of(storing), "it sets something other than a local name"),
    "global": (lambda: of(declaring), "it has a statement beyond the grammar (Global)"),
    "import": (lambda: of(importing), "it has a statement beyond the grammar (Import)"),
    "default": (lambda: of(with_default), "the default of factors is not a plain value"),
    "partial": (lambda: of(of_partial), "called has arguments that are not plain values"),
    "cache": (lambda: of(of_cache), UNKNOWN),
    "comprehension": (lambda: of(of_comprehension), "beyond the grammar (ListComp)"),
    "property": (
        lambda: of(of_property, doubled=property(lambda self: 2 * SLOPE)),
        "is a property",
    ),
    "parent": (lambda: of(of_parent), UNKNOWN),
    "no source": (lambda: of(eval("lambda self: FACTORS[0]")), "<lambda> has no source"),
    "getattr": (
        lambda: of(inner_slope, __getattr__=lambda self, n: 1.0),
        "Mine computes its attributes",
    ),
    "module inside": (with_module, "has a SiLU in it, which is not an op of opfuse"),
    "buffer": (with_buffer, "has tensors of its own"),
    "inside another": (lambda: ops.ScaledActivation(of(of_list)), "it indexes a value"),
}


@pytest.mark.parametrize("name", NOT_FOLLOWED)
def test_what_cannot_be_followed_is_refused(name):
    make, sentence = NOT_FOLLOWED[name]
    assert sentence in refusal(ops.RMSNorm(8), make())


def of_numbers(self):
    return math.sqrt(2.0) * abs(SLOPE) * torch.tensor(2.0)


def test_functions_of_numbers_are_known():
    act = of(of_numbers)
    assert refusal(act) is True
    assert {place.name for place in reads.Reads([act]).numbers} >= {"SLOPE", "training"}


class Noisy(ops.Activation):
    """Draws by an operation of torch's."""

    def value(self, x):
        return x * torch.rand_like(x)

    def derivative(self, x):
        return torch.ones_like(x)


class NoisyByNumpy(Noisy):
    """Draws by a generator."""

    def value(self, x):
        return x * generate()


generate = np.random.rand.__self__.rand


class Untidy(Noisy):
    """Decides by the number of rows."""

    def value(self, x):
        return x if len(x) > 100 else 2 * x


@pytest.mark.parametrize(
    ("cls", "sentence"),
    [
        (
            Noisy,
            "aten.rand_like.default draws random numbers, and a compiled function would draw others",
        ),
        (Untidy, "it depends on the number of rows"),
    ],
)
def test_what_the_graph_shows_runs_one_by_one_without_a_warning(cls, sentence):
    chain = chain_with(cls())
    with opfuse.options(**TRACED):
        chain(torch.randn(200, 8))
        assert "the ops ran one by one: " + sentence in state(chain)
    check(chain, torch.randn(3, 8))
    check(chain, torch.randn(200, 8))


def test_the_linear_behind_gets_the_same_sample(monkeypatch):
    chain = opfuse.Sequential(ops.RMSNorm(8), Noisy(), ops.BasicLinear(8, 8))
    with torch.no_grad():
        chain[2].weight.copy_(torch.eye(8))
    with opfuse.options(**TRACED):
        y = chain(torch.randn(5, 8))
    (dw,) = torch.autograd.grad(y[:, 0].sum(), chain[2].weight)
    torch.testing.assert_close(dw[0], y.detach().sum(0))  # the sum of what came into the linear


def test_random_numbers_of_others():
    assert UNKNOWN in refusal(NoisyByNumpy())


def test_the_default_dtype_is_part_of_it():
    class Ranged(Times):
        def slope(self):
            return torch.tensor(0.1)

    chain, x = chain_with(Ranged()), torch.randn(3, 8)
    check(chain, x)
    torch.set_default_dtype(torch.float64)
    try:
        check(chain, x)
    finally:
        torch.set_default_dtype(torch.float32)


# Activations made of torch's functions


class Erf(ops.Activation):
    """The form of GELU that PyTorch has by default."""

    def value(self, x):
        return F.gelu(x)

    def derivative(self, x):
        return 0.5 * (1 + torch.erf(x / math.sqrt(2))) + x * torch.exp(-x * x / 2) / math.sqrt(
            2 * math.pi
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "make", [Erf, lambda: ops.GELU(approximate="none")], ids=["foreign", "GELU"]
)
def test_gelu_by_erf_compiles(make, dtype):
    chain, results = opfuse.Sequential(ops.Bias(8), make(), ops.ConstantScale(2.0)).to(dtype), []
    for selection in ("inductor", ""):
        x = torch.linspace(-5, 5, 24, dtype=dtype).view(3, 8).requires_grad_()
        with using(selection), opfuse.options(**{"inductor.min_elements": 0} if selection else {}):
            y = chain(x)
            results.append((y.float(), torch.autograd.grad(y.sum(), x)[0].float()))
            if selection:
                assert "does not compile" not in opfuse.explain(chain, x).details
    torch.testing.assert_close(*results, rtol=2e-2 if dtype is torch.bfloat16 else 1e-5, atol=1e-5)


# Forward-mode AD


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "make", [lambda: [ops.RMSNorm(8), ops.SiLU()], lambda: [ops.GELU(), ops.ConstantScale(2.0)]]
)
def test_forward_mode_tangents_match_the_unfused_chain(make, dtype):
    chain = opfuse.Sequential(*make()).to(dtype).requires_grad_(False)
    x, t = torch.randn(3, 8, dtype=dtype), torch.randn(3, 8, dtype=dtype)
    found = []
    for selection in ("inductor", ""):
        with using(selection), opfuse.options(**TRACED), torch.autograd.forward_ad.dual_level():
            y = chain(torch.autograd.forward_ad.make_dual(x, t))
            found.append(torch.autograd.forward_ad.unpack_dual(y))
    assert found[0].tangent is not None
    torch.testing.assert_close(found[0].tangent, found[1].tangent)


LAYOUTS = {
    "contiguous": torch.randn,
    "rows swapped": lambda a, b, c: torch.randn(b, a, c).transpose(0, 1),
    "features first": lambda a, b, c: torch.randn(c, a, b).movedim(0, -1),
    "expanded": lambda a, b, c: torch.randn(1, b, c).expand(a, b, c),
    "half": lambda a, b, c: torch.randn(a, b, 2 * c)[..., :c],
}


@pytest.mark.parametrize("of_extra", LAYOUTS)
@pytest.mark.parametrize("of_x", LAYOUTS)
@pytest.mark.parametrize("input_first", [False, True])
def test_results_have_the_strides_of_the_separate_ops(input_first, of_x, of_extra):
    add = ops.AddExtraInput()
    add.input_first = input_first
    chain = opfuse.Sequential(ops.Bias(8), ops.GELU(), add, ops.MakeExtraOutput(), ops.SiLU())
    given = [LAYOUTS[each](4, 3, 8).requires_grad_() for each in (of_x, of_extra)]
    found = []
    for selection in ("", "inductor"):
        with using(selection), opfuse.options(**TRACED if selection else {}):
            found.append([y.stride() for y in chain(*given)])
    assert found[0] == found[1]
