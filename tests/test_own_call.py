"""Ops that run through their own call, since it does more than the library's, and what changes on an op that is in use."""

import copy
import functools
from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import opfuse
from opfuse import ops

pytestmark = pytest.mark.usefixtures("no_plugins")


class LoRA(ops.Linear):
    """A linear layer with an adapter, written as for torch.nn."""

    def __init__(self, size):
        super().__init__(size, size)
        self.adapter = nn.Parameter(torch.randn(size, size))

    def forward(self, x):
        return super().forward(x) + x @ self.adapter


class Doubling(ops.GELU):
    def __call__(self, *args, **kwargs):
        return 2 * super().__call__(*args, **kwargs)


class BasicLoRA(ops.BasicLinear):
    def __init__(self, size):
        super().__init__(size, size)
        self.adapter = nn.Linear(size, size)

    def forward(self, x):
        return super().forward(x) + self.adapter(x)


class Gain(ops.RMSNorm):
    def __init__(self, size):
        super().__init__(size)
        self.gain = nn.Parameter(torch.randn(size))

    def forward(self, x):
        return super().forward(x) * self.gain


def reason(chain, x):
    return [call.cut for call in opfuse.explain(chain, x).calls]


def test_the_forward_of_a_subclass_runs():
    chain = opfuse.Sequential(ops.GELU(), LoRA(4), ops.GELU())
    x = torch.randn(3, 4, requires_grad=True)
    y = chain(x)
    linear = chain[1]
    h = F.gelu(x, approximate="tanh")
    expected = F.gelu(
        F.linear(h, linear.weight, linear.bias) + h @ linear.adapter, approximate="tanh"
    )
    torch.testing.assert_close(y, expected)
    wanted = [x, linear.weight, linear.bias, linear.adapter]
    got = torch.autograd.grad(y.sum(), wanted)
    for grad, true in zip(got, torch.autograd.grad(expected.sum(), wanted), strict=True):
        torch.testing.assert_close(grad, true)
    assert reason(chain, x) == [
        "cut at LoRA, which has a forward of its own",
        "on its own, for it has a forward of its own",
        "cut at LoRA, which has a forward of its own",
    ]


@pytest.mark.parametrize("make", [BasicLoRA, Gain])
def test_parameters_of_its_own_forward_get_gradients(make):
    op = make(4)
    chain = opfuse.Sequential(ops.GELU(), op, ops.GELU())
    x = torch.randn(3, 4)
    h = F.gelu(x, approximate="tanh")
    if make is Gain:
        plain = F.rms_norm(h, (4,), op.weight, 1e-5) * op.gain
    else:
        plain = h @ op.weight.t() + op.adapter(h)
    expected = torch.autograd.grad(F.gelu(plain, approximate="tanh").sum(), list(op.parameters()))
    for got, true in zip(
        torch.autograd.grad(chain(x).sum(), list(op.parameters())), expected, strict=True
    ):
        torch.testing.assert_close(got, true)


def test_a_subclass_alone_in_a_chain_runs_its_own_forward():
    linear = LoRA(4)
    x = torch.randn(3, 4)
    torch.testing.assert_close(opfuse.Sequential(linear)(x), linear(x))


def patch(op):  # as accelerate does it
    old = op.forward

    @functools.wraps(old)
    def forward(*args, **kwargs):
        return 2 * old(*args, **kwargs)

    op.forward = forward


def swap(op):
    op.__class__ = Doubling


def patch_class(op):
    def forward(self, x):
        return 2 * old(self, x)

    old = type(op).forward
    type(op).forward = forward


@pytest.mark.parametrize("change", [patch, swap, patch_class])
@pytest.mark.parametrize("warm", [False, True], ids=["before the first call", "after"])
def test_a_call_that_was_replaced_runs(change, warm):
    class Own(ops.GELU):
        pass

    chain = opfuse.Sequential(ops.Identity(), Own(), ops.ConstantScale(3.0))
    x = torch.randn(3, 4)
    plain = 3 * F.gelu(x, approximate="tanh")
    if warm:
        torch.testing.assert_close(chain(x), plain)
    change(chain[1])
    torch.testing.assert_close(chain(x), 2 * plain)
    if change is patch:
        del chain[1].forward
        torch.testing.assert_close(chain(x), plain)


def test_kwargs_and_extras_reach_a_call_of_its_own():
    class Adding(ops.AddExtraInput):
        def forward(self, x, extra, *, times=1):
            return super().forward(x, times * extra)

    chain = opfuse.Sequential(ops.Identity(), Adding(), ops.Identity())
    x, extra = torch.randn(2, 3), torch.randn(2, 3)
    torch.testing.assert_close(chain(x, extra), x + extra)


def test_what_a_call_of_its_own_gives_is_counted():
    class Two(ops.GELU):
        def forward(self, x):
            return super().forward(x), x

    chain = opfuse.Sequential(ops.Identity(), Two(), ops.Identity())
    with pytest.raises(RuntimeError, match="Two must give its output and 0 extra outputs, gave 1"):
        chain(torch.randn(2, 3))


def test_a_parametrized_op_is_the_librarys():
    chain = opfuse.Sequential(ops.GELU(), ops.Linear(4, 4))
    nn.utils.parametrizations.weight_norm(chain[1])
    assert reason(chain, torch.randn(3, 4)) == [""]


def test_a_compiled_chain_runs_the_forward_of_a_subclass():
    chain = opfuse.Sequential(ops.GELU(), LoRA(4), ops.GELU())
    x = torch.randn(3, 4)
    compiled = torch.compile(chain, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), chain(x))


# What is in use may change


@pytest.mark.parametrize(
    "name", ["_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"]
)
def test_a_dictionary_of_hooks_that_was_replaced_is_seen(name):
    chain = opfuse.Sequential(ops.Identity(), ops.GELU())
    x = torch.randn(2, 3, requires_grad=True)
    chain(x).sum().backward()
    setattr(chain[1], name, OrderedDict())
    register = {
        "_forward_hooks": chain[1].register_forward_hook,
        "_forward_pre_hooks": chain[1].register_forward_pre_hook,
        "_backward_hooks": chain[1].register_full_backward_hook,
        "_backward_pre_hooks": chain[1].register_full_backward_pre_hook,
    }[name]
    calls = []
    register(lambda *args: calls.append(args) and None)
    chain(x).sum().backward()
    assert len(calls) == 1


@pytest.mark.parametrize("how", ["__setstate__", "__dict__.update"])
def test_hooks_and_weights_of_another_state_are_used(how):
    chain = opfuse.Sequential(ops.Identity(), ops.BasicLinear(3, 3))
    x = torch.randn(2, 3)
    chain(x)
    other = ops.BasicLinear(3, 3)
    state = copy.copy(vars(other))
    if how == "__setstate__":
        chain[1].__setstate__(state)
    else:
        vars(chain[1]).update(state)
    torch.testing.assert_close(chain(x), x @ other.weight.t())
    chain[1].register_forward_hook(lambda module, args, y: 2 * y)
    torch.testing.assert_close(chain(x), 2 * x @ other.weight.t())


def test_parameters_in_another_dictionary_are_used():
    chain = opfuse.Sequential(ops.Identity(), ops.BasicLinear(3, 3))
    x = torch.randn(2, 3)
    chain(x)
    chain[1]._parameters = {"weight": nn.Parameter(torch.eye(3))}
    torch.testing.assert_close(chain(x), x)


def test_a_module_inside_an_op_that_was_replaced_is_used():
    class Inner(ops.Activation):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(1, 1)

        def value(self, x):
            return x

        def derivative(self, x):
            return torch.ones_like(x)

        def op_forward(self, ctx, input_, **unused):
            return input_ * ctx.params[0]

        def op_backward(self, ctx, grad_output):
            return grad_output, (None, None)

    chain = opfuse.Sequential(Inner())
    x = torch.randn(2, 3)
    with torch.no_grad():
        chain(x)
        chain[0].inner = nn.Linear(1, 1)
        torch.testing.assert_close(chain(x), x * chain[0].inner.weight)


def test_a_method_that_was_replaced_runs():
    chain = opfuse.Sequential(ops.Identity(), ops.ConstantScale(2.0))
    x = torch.randn(2, 3)
    chain(x)
    old = chain[1].op_forward
    chain[1].op_forward = lambda *args, **kwargs: -old(*args, **kwargs)
    torch.testing.assert_close(chain(x), -2 * x)
    del chain[1].op_forward
    torch.testing.assert_close(chain(x), 2 * x)


def test_a_pass_that_was_replaced_runs():
    chain = opfuse.Sequential(ops.Identity(), ops.ConstantScale(2.0))
    x = torch.randn(2, 3)
    old = chain[1].fuser_forward

    def fuser_forward(*args, **kwargs):
        y, extras = old(*args, **kwargs)
        return -y, extras

    chain[1].fuser_forward = fuser_forward
    torch.testing.assert_close(chain(x), -2 * x)


def test_a_declaration_that_was_replaced_counts():
    chain = opfuse.Sequential(ops.Identity(), ops.GELU())
    x = torch.randn(2, 3)
    chain(x)
    chain[1].differentiable = False
    with (
        opfuse.options(double_backward=True),
        pytest.raises(RuntimeError, match="not declared to be differentiable"),
    ):
        chain(x)


def test_numbers_that_are_counted_in_a_call_do_not_plan_anew():
    class Counting(ops.GELU):
        calls = 0

        def op_forward(self, ctx, input_, **unused):
            self.calls += 1
            return super().op_forward(ctx, input_, **unused)

    chain = opfuse.Sequential(Counting())
    x = torch.randn(2, 3)
    for _ in range(3):
        chain(x)
    before = ops.GELU.changes
    chain(x)
    assert (ops.GELU.changes, chain[0].calls) == (before, 4)


def test_the_attributes_of_an_op_in_use_stay_its():
    op = ops.GELU()
    opfuse.Sequential(op)(torch.randn(2))
    with pytest.raises(RuntimeError, match="the attributes of this GELU are in use"):
        op.__dict__ = {}
