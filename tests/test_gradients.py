"""What becomes of gradients: none is lost, none is invented, and what cannot be right is refused."""

import math

import pytest
import torch
import torch.nn.utils.prune
from fakes import registered
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional as F

import opfuse
from opfuse import ops

pytestmark = pytest.mark.usefixtures("no_plugins")


class ExtraOp(opfuse.BasicOperation):
    """Base of ops with extra tensors."""

    saved_names = ()
    kwarg_names = ()
    feature_ratio = 1
    keeps_rows = True

    def op_forward(self, ctx, input_, **unused):
        raise NotImplementedError

    def op_backward(self, ctx, grad_output):
        raise NotImplementedError


class Times(ExtraOp):
    """``x * extra``; as the contract allows, the gradient of an extra input that needs none is None."""

    num_extra_inputs = 1
    saved_names = ("input", "extra")

    def fuser_forward(self, ctxs, x, *, basic_op_extra_inputs, **unused):
        ((extra,),) = basic_op_extra_inputs
        self.told = extra.requires_grad
        ctxs[0].save_for_backward(x if extra.requires_grad else None, extra)
        return x * extra, [()]

    def fuser_backward(self, ctxs, dy, *, basic_op_grad_extra_outputs):
        x, extra = ctxs[0].saved_tensors
        return dy * extra, [()], [(None if x is None else dy * x,)]


class Twin(ExtraOp):
    """Gives ``x`` and ``2 x``."""

    num_extra_outputs = 1

    def fuser_forward(self, ctxs, x, **unused):
        return x * 1, [(2 * x,)]

    def fuser_backward(self, ctxs, dy, *, basic_op_grad_extra_outputs):
        ((extra,),) = basic_op_grad_extra_outputs
        return dy if extra is None else dy + 2 * extra, [()], [()]


class Plain(opfuse.BasicOperation):
    """The identity."""

    saved_names = ()
    feature_ratio = 1

    def op_forward(self, ctx, input_, **unused):
        return input_ * 1

    def op_backward(self, ctx, grad_output):
        return grad_output, ()


def fork(public=False):
    return ops.MakeExtraOutput().set_extra_output_channel(0, "a", output_to_caller=public)


def reading(op):
    return op.set_extra_input_channel(0, "a")


# Extra inputs out of a channel


@pytest.mark.parametrize("before", [[], [ops.GELU]], ids=["first", "second"])
@pytest.mark.parametrize(
    "make", [fork, lambda: Twin().set_extra_output_channel(0, "a", output_to_caller=False)]
)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_an_extra_input_out_of_a_channel_says_that_it_needs_a_gradient(before, make, compiled):
    chain = opfuse.Sequential(*[op() for op in before], make(), ops.SiLU(), reading(Times()))
    model = torch.compile(chain, backend="eager") if compiled else chain
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    (got,) = torch.autograd.grad(model(x).sum(), x)
    assert chain[-1].told
    h = F.gelu(x, approximate="tanh") if before else x
    factor = 1 if make is fork else 2
    (expected,) = torch.autograd.grad((F.silu(h) * factor * h).sum(), x)
    torch.testing.assert_close(got, expected)


def test_the_flag_of_a_tensor_that_the_caller_holds_stays():
    class Keeping(Times):
        def fuser_forward(self, ctxs, x, *, basic_op_extra_inputs, **unused):
            ((self.got,),) = basic_op_extra_inputs
            return super().fuser_forward(ctxs, x, basic_op_extra_inputs=basic_op_extra_inputs)

    chain = opfuse.Sequential(fork(public=True), reading(Keeping()))
    x = torch.randn(3, 4)
    weight = torch.randn(3, 4, requires_grad=True)
    with torch.no_grad():
        _y, extra = chain(x)
    assert not chain[1].got.requires_grad  # no gradient flows
    _y, extra = chain(x * weight)
    assert chain[1].got.requires_grad and chain[1].got is not extra and extra.grad_fn is not None


def test_an_extra_input_that_is_given_on_is_no_trap():
    class Last(Times):
        def fuser_forward(self, ctxs, x, *, basic_op_extra_inputs, **unused):
            ((extra,),) = basic_op_extra_inputs
            return extra, [()]

        def fuser_backward(self, ctxs, dy, *, basic_op_grad_extra_outputs):
            return torch.zeros_like(dy), [()], [(dy,)]

        saved_names = ()

    chain = opfuse.Sequential(fork(), ops.GELU(), reading(Last()))
    x = torch.randn(3, 4, requires_grad=True)
    y = chain(x)
    y.sum().backward()
    torch.testing.assert_close(y, x)
    torch.testing.assert_close(x.grad, torch.ones_like(x))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_extra_inputs_are_refused(dtype):
    with pytest.raises(
        TypeError, match=r"extra input 0 of op 0 \(Times\) expected .* got torch.complex"
    ):
        Times()(torch.randn(2, 3), torch.randn(2, 3, dtype=dtype))


# A branch that the loss does not use


def three():
    """A chain with an extra output in the middle, and parameters on both sides."""
    return opfuse.Sequential(
        ops.BasicLinear(4, 4),
        fork(public=True),
        ops.Linear(4, 4),
        ops.GELU(),
        reading(ops.AddExtraInput()),
    ).double()


@pytest.mark.parametrize("dead", [ops.Linear, ops.BasicLinear])
def test_what_the_loss_does_not_use_gets_no_gradient(dead):
    chain = opfuse.Sequential(
        ops.BasicLinear(4, 4), ops.MakeExtraOutput(), dead(4, 4), ops.GELU(), ops.AddExtraInput()
    )
    x, extra = torch.randn(3, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    _y, fork = chain(x, extra)
    fork.sum().backward()
    torch.testing.assert_close(x.grad, chain[0].weight.sum(0).expand(3, 4))
    assert chain[2].weight.grad is None and extra.grad is None
    assert chain[0].weight.grad is not None


def test_zero_times_infinity_is_not_computed_for_nobody():
    chain = opfuse.Sequential(ops.MakeExtraOutput(), ops.BasicLinear(4, 4))
    with torch.no_grad():
        chain[1].weight.fill_(math.inf)
    x = torch.randn(3, 4, requires_grad=True)
    _, fork = chain(x)
    fork.sum().backward()
    torch.testing.assert_close(x.grad, torch.ones_like(x))


@pytest.mark.parametrize("backward_fused", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_steps_that_only_give_a_shape_make_no_nan(register, backward_fused, inside):
    """A fused forward hides the shape behind the extra output: later ops run for it."""
    chain = opfuse.Sequential(
        ops.MakeExtraOutput(), ops.Bias(4), ops.AddExtraInput(), ops.LayerNorm(4), ops.SiLU()
    )
    if inside:
        chain[0].set_extra_output_channel(0, "kept", output_to_caller=True)
        chain[2].set_extra_input_channel(0, "kept")
    kinds = [type(op) for op in chain]
    register(
        forward_fusions=[opfuse.Fusion(kinds, OneByOne)],
        backward_fusions=[opfuse.Fusion(kinds[:3], OneByOne)] * backward_fused,
    )
    x = torch.tensor([[1.0, -torch.inf, torch.nan, 2.0]] * 2, requires_grad=True)
    _, extra = chain(x, *(() if inside else (torch.ones(2, 4, requires_grad=True),)))
    extra.sum().backward()
    assert torch.equal(x.grad, torch.ones(2, 4))
    assert [param.grad for param in chain.parameters()] == [None] * 3


@pytest.mark.parametrize("use", ["main", "extra", "both"])
def test_as_pytorch_does_it(use):
    chain = three()
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    tensors = [x, *chain.parameters()]
    y, extra = chain(x)
    h = x @ chain[0].weight.t()
    expected = F.gelu(F.linear(h, chain[2].weight, chain[2].bias), approximate="tanh") + h, h
    losses = [
        {"main": out.square().sum(), "extra": branch.square().sum(), "both": (out * branch).sum()}[
            use
        ]
        for out, branch in ((y, extra), expected)
    ]
    grads = [torch.autograd.grad(loss, tensors, allow_unused=True) for loss in losses]
    for got, true in zip(*grads, strict=True):
        assert (got is None) == (true is None)
        if got is not None:
            torch.testing.assert_close(got, true)


def test_a_joint_fusion_knows_which_of_its_ops_no_gradient_reaches(register):
    class Joint(OneByOne):
        def fuser_backward(self, ctxs, dy, **given):
            seen.append([ctx.is_reached for ctx in ctxs])
            return super().fuser_backward(ctxs, dy, **given)

    seen, pattern = [], (ops.BasicLinear, ops.MakeExtraOutput, ops.GELU)
    register(joint_fusions=[opfuse.Fusion(pattern, Joint)])
    chain = opfuse.Sequential(ops.BasicLinear(4, 4), ops.MakeExtraOutput(), ops.GELU())
    for _ in range(2):
        y, extra = chain(torch.randn(3, 4))
        (y + extra).sum().backward(retain_graph=True)
        extra.sum().backward()
    assert seen == [[True] * 3, [True, True, False]] * 2


@pytest.mark.parametrize("inside", [True, False])
def test_an_op_that_no_gradient_reaches_makes_no_nan_in_a_joint_fusion(register, inside):
    """Zeros times what is not finite would be NaN, also by way of a channel."""
    chain = opfuse.Sequential(ops.MakeExtraOutput(), ops.SiLU(), ops.AddExtraInput())
    if inside:
        chain[0].set_extra_output_channel(0, "kept", output_to_caller=True)
        chain[2].set_extra_input_channel(0, "kept")
    register(joint_fusions=[opfuse.Fusion([type(op) for op in chain], OneByOne)])
    x = torch.tensor([[1.0, -torch.inf, torch.nan]], requires_grad=True)
    _, extra = chain(x, *(() if inside else (torch.ones(1, 3),)))
    extra.sum().backward()
    assert torch.equal(x.grad, torch.ones(1, 3))


class OneByOne(opfuse.FusedOperation):
    """Runs its basic ops one after the other; refuses a gradient that is None."""

    def fuser_forward(self, ctxs, x, **given):
        return self.run_separately(ctxs, x, **given)

    def fuser_backward(self, ctxs, dy, **given):
        assert dy is not None
        self.zeros = not dy.any()
        for ctx in ctxs:
            if ctx.saved_tensors is None:
                ctx.saved_tensors = ctx.to_save
        return self.run_separately_backward(ctxs, dy, **given)


@pytest.mark.parametrize("kind", ["forward", "backward", "joint"])
@pytest.mark.parametrize("pattern", [(0, 2), (1, 2), (1, 3), (1, 4), (0, 4)], ids=str)
@pytest.mark.parametrize("make", [ops.MakeExtraOutput, Twin])
def test_fused_ops_and_a_branch_that_is_not_used(kind, pattern, make):
    def build():
        torch.manual_seed(0)
        return opfuse.Sequential(
            ops.BasicLinear(4, 4), make(), ops.BasicLinear(4, 4), ops.GELU()
        ).double()

    classes = [op_class for op_class in (ops.BasicLinear, make, ops.BasicLinear, ops.GELU)]
    built = []
    fusion = opfuse.Fusion(
        classes[slice(*pattern)], lambda basic: built.append(OneByOne(basic)) or built[-1]
    )
    register = {
        "forward": opfuse.register_forward_fusion,
        "backward": opfuse.register_backward_fusion,
        "joint": opfuse.register_forward_backward_fusion,
    }[kind]
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    plain, fused = build(), build()
    _y, extra = plain(x)
    expected = torch.autograd.grad(
        extra.square().sum(), [x, *plain.parameters()], allow_unused=True
    )
    assert [grad is None for grad in expected] == [False, False, True]
    handle = register(fusion)
    try:
        _y, extra = fused(x)
        got = torch.autograd.grad(extra.square().sum(), [x, *fused.parameters()], allow_unused=True)
        assert built
    finally:
        handle.unregister()
    for one, other in zip(got, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other)


def test_a_chain_whose_output_gets_no_gradient_gives_none():
    class Stop(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, y):
            return x + y

        @staticmethod
        def backward(ctx, grad):
            return None, grad

    linear = ops.Linear(3, 3)
    x, other = torch.randn(2, 3, requires_grad=True), torch.randn(2, 3, requires_grad=True)
    Stop.apply(linear(x), other).sum().backward()
    assert x.grad is None and linear.weight.grad is None and other.grad is not None


# Gradients that would be lost


def test_a_parameter_that_comes_late_is_refused():
    op = Plain()
    op.gain = nn.Parameter(torch.ones(3))
    with pytest.raises(
        TypeError,
        match=r"op 0 \(Plain\) of .* has a parameter gain that it does not take, or that it got after",
    ):
        opfuse.Sequential(op)(torch.randn(2, 3))


def test_a_parameter_that_comes_late_is_refused_in_a_call_alone_too():
    op = Plain()
    op.gain = nn.Parameter(torch.ones(3))
    with pytest.raises(TypeError, match="has a parameter gain that it does not take"):
        op(torch.randn(2, 3))


def test_also_in_an_op_that_is_in_use():
    chain = opfuse.Sequential(Plain(), ops.GELU())
    chain(torch.randn(2, 3))
    chain[0].gain = nn.Parameter(torch.ones(3))
    with pytest.raises(
        TypeError, match="has a parameter gain that it does not take, or that it got after"
    ):
        chain(torch.randn(2, 3))
    del chain[0].gain
    chain[0].inner = nn.Linear(3, 3)
    with pytest.raises(TypeError, match=r"has a parameter inner.weight that it does not take"):
        chain(torch.randn(2, 3))


@pytest.mark.parametrize(
    "derive", [nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.orthogonal]
)
def test_parametrizations_may_come_late(derive):
    chain = opfuse.Sequential(ops.GELU(), ops.BasicLinear(3, 3))
    chain(torch.randn(2, 3))
    derive(chain[1])
    chain(torch.randn(2, 3)).sum().backward()
    assert all(p.grad is not None for p in chain.parameters())


def test_pruning_may_come_late():
    chain = opfuse.Sequential(ops.GELU(), ops.BasicLinear(3, 3))
    nn.utils.prune.l1_unstructured(chain[1], "weight", amount=0.5)
    chain(torch.randn(2, 3)).sum().backward()
    assert chain[1].weight_orig.grad is not None


def test_gradients_of_no_parameter_are_refused():
    class Giving(Plain):
        def op_backward(self, ctx, grad_output):
            return grad_output, (grad_output,)

    with pytest.raises(
        RuntimeError, match=r"op 1 \(Giving\) has no parameters, but its backward gave 1 gradients"
    ):
        opfuse.Sequential(ops.GELU(), Giving())(torch.randn(2, requires_grad=True)).sum().backward()


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_saving_what_was_not_declared_is_refused(compiled):
    class Saving(Plain):
        saved_names = ()

        def op_forward(self, ctx, input_, **unused):
            ctx.save_for_backward(input_)
            return input_ * 1

    chain = opfuse.Sequential(ops.GELU(), Saving())
    model = torch.compile(chain, backend="eager") if compiled else chain
    with pytest.raises(
        Exception, match=r"Saving\)? declares saved_names = \(\), and its forward gave tensors"
    ):
        model(torch.randn(2, requires_grad=True))


@pytest.mark.parametrize("before", [[], [ops.GELU]], ids=["first", "second"])
def test_a_gradient_that_is_missing_is_refused(before):
    class Forgetting(Plain):
        def op_backward(self, ctx, grad_output):
            return None, ()

    chain = opfuse.Sequential(*[op() for op in before], Forgetting())
    needs = r"op 0 \(GELU\)" if before else "the input of the chain"
    with pytest.raises(
        RuntimeError, match=f"Forgetting: op_backward gave None .* which {needs} needs"
    ):
        chain(torch.randn(2, requires_grad=True)).sum().backward()


@pytest.mark.parametrize(
    ("result", "got"),
    [
        (None, "NoneType"),
        ((1, 2, 3), "int, int, int"),
        ((None, [()]), "NoneType, list"),
        ([1, 2], "list"),
    ],
)
def test_a_forward_that_gives_something_else_is_named(result, got):
    class Wrong(opfuse.FusedOperation):
        def fuser_forward(self, *args, **kwargs):
            return result

    with registered("forward", opfuse.Fusion([ops.GELU], Wrong)):
        with pytest.raises(
            TypeError, match=rf"Wrong \(registered in code\): fuser_forward must return .*{got}"
        ):
            opfuse.Sequential(ops.GELU(), ops.SiLU())(torch.randn(2))


@pytest.mark.parametrize(
    "result", [None, (torch.ones(2), [()]), (1, 2, 3, 4)], ids=["none", "two", "four"]
)
def test_a_backward_that_gives_something_else_is_named(result):
    class Wrong(opfuse.FusedOperation):
        def fuser_backward(self, *args, **kwargs):
            return result

    with registered("backward", opfuse.Fusion([ops.GELU], Wrong)):
        y = opfuse.Sequential(ops.SiLU(), ops.GELU())(torch.randn(2, requires_grad=True))
        with pytest.raises(
            TypeError, match=r"Wrong \(registered in code\): fuser_backward must return a tuple of"
        ):
            y.sum().backward()


def test_batched_gradients_of_an_extra_output_are_refused():
    x = torch.randn(3, requires_grad=True)
    _, extra = opfuse.Sequential(ops.GELU(), ops.MakeExtraOutput(), ops.GELU())(x)
    with pytest.raises(RuntimeError, match="nor batched"):
        torch.autograd.grad(extra, x, torch.eye(3), is_grads_batched=True)


def test_what_a_class_declares_is_not_said_of_a_subclass_with_passes_of_its_own():
    class Straight(ops.GELU):
        def op_forward(self, ctx, input_, **unused):
            return input_.round()

        def op_backward(self, ctx, grad_output):
            return grad_output, ()

    assert (Straight.grad_input, Straight.differentiable, Straight.saved_names) == (
        "shared",
        False,
        None,
    )
    chain, w = opfuse.Sequential(ops.SiLU(), Straight()), torch.randn(4, requires_grad=True)
    z = w.exp()
    ((chain(w) + z) * 2).sum().backward()
    x = w.detach().requires_grad_()
    torch.testing.assert_close(
        w.grad, torch.autograd.grad(F.silu(x).sum(), x)[0] * 2 + 2 * z.detach()
    )
    with (
        opfuse.options(double_backward=True),
        pytest.raises(RuntimeError, match="not declared to be differentiable"),
    ):
        chain(w)


def test_the_same_for_passes_that_one_op_carries():
    op = ops.GELU()
    op.op_forward, op.op_backward = (lambda ctx, x, **_: x.round()), (lambda ctx, grad: (grad, ()))
    g = torch.ones(4)
    opfuse.Sequential(ops.SiLU(), op)(torch.randn(4, requires_grad=True)).backward(g)
    assert torch.equal(g, torch.ones(4))


class Scaling(opfuse.BasicOperation):
    def op_forward(self, ctx, input_, *, scale, **unused):
        ctx.save_for_backward(scale)
        return input_ * scale

    def op_backward(self, ctx, grad_output):
        return grad_output * ctx.saved_tensors[0], ()


@pytest.mark.parametrize(
    "inside", [lambda scale: scale, lambda scale: [scale], lambda scale: {"a": (scale, 1)}]
)
@pytest.mark.parametrize("leaf", [True, False])
def test_a_tensor_as_keyword_argument_that_wants_a_gradient(leaf, inside):
    chain, scale = opfuse.Sequential(ops.SiLU(), Scaling()), torch.tensor(2.0, requires_grad=leaf)
    x = torch.randn(3, 4, requires_grad=not leaf)
    given = scale if leaf else scale + x.sum()
    with pytest.raises(
        TypeError, match=r"op 1 \(Scaling\) .* 'scale', and a keyword argument gets no gradient"
    ):
        chain(x, op_kwargs={1: {"scale": inside(given)}})
    with torch.no_grad():
        chain(x, op_kwargs={1: {"scale": given}})
    with (
        opfuse.options(double_backward=True),
        pytest.raises(RuntimeError, match="not declared to be differentiable"),
    ):
        chain(x, op_kwargs={1: {"scale": given}})


def test_a_tensor_on_an_op_that_wants_a_gradient():
    class Steep(ops.Activation):
        def __init__(self):
            super().__init__()
            self.slope = torch.tensor(2.0, requires_grad=True)

        def value(self, x):
            return x * self.slope

        def derivative(self, x):
            return self.slope.expand_as(x)

    x = torch.randn(3, 4, requires_grad=True)
    with pytest.raises(
        TypeError, match=r"op 0 \(Steep\) .* has the tensor 'slope', which requires grad"
    ):
        Steep()(x)
    late = OfBase()
    late(x)
    late.slope = torch.tensor(2.0, requires_grad=True)
    with pytest.raises(TypeError, match=r"has the tensor 'slope', which requires grad"):
        late(x)
    with opfuse.options(double_backward=True):
        act = Steep()
        act(x).sum().backward()
    torch.testing.assert_close(act.slope.grad, x.detach().sum())


class Base:
    slope = 2.0


class OfBase(Base, ops.Activation):
    def value(self, x):
        return x * x * self.slope

    def derivative(self, x):
        return 2 * x * self.slope


def test_a_number_of_a_class_that_is_no_op(monkeypatch):
    act, x = OfBase(), torch.randn(3, 4, requires_grad=True)
    act(x)
    monkeypatch.setattr(Base, "slope", 5.0)
    y = act(x)
    monkeypatch.setattr(OfBase, "other", 1, raising=False)  # which has nothing to do with it
    monkeypatch.setattr(Base, "slope", 3.0)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], 10 * x.detach())


# What stands in a scaled activation


def test_a_scaled_activation_takes_formulas_alone():
    class Passes(ops.GELU):
        def op_forward(self, ctx, input_, **unused):
            return input_ * 100

    class Call(ops.GELU):
        def forward(self, input):
            return input * 100

    x, scales = torch.randn(3, 4), torch.rand(3)
    with pytest.raises(RuntimeError, match="Passes overrides op_forward, which would not run"):
        ops.ScaledActivation(Passes())
    with pytest.raises(RuntimeError, match="Call has a forward of its own, which would not run"):
        ops.ScaledActivation(Call())(x, scales)
    op = ops.ScaledSReLU()
    op(x, scales)
    op.activation.register_forward_hook(lambda *given: None)
    for chain in (op, opfuse.Sequential(ops.Identity(), op)):
        with pytest.raises(RuntimeError, match="SReLU has forward hooks, which would not run"):
            chain(x, scales)
    late = ops.ScaledSReLU()
    late(x, scales)
    late.activation.op_forward = lambda ctx, input_, **unused: input_ * 100
    with pytest.raises(RuntimeError, match="SReLU overrides op_forward, which would not run"):
        late(x, scales)
    with pytest.raises(RuntimeError, match="ScaledSReLU.activation is fixed"):
        op.activation = ops.GELU()


# Results that are no tensors


@pytest.mark.parametrize("behind", [(), (ops.Bias(4),)])
@pytest.mark.parametrize(
    "wrong, got", [(lambda x: (x, x), r"\(Tensor, Tensor\)"), (lambda x: [x], "list")]
)
def test_a_forward_that_gives_no_tensor(wrong, got, behind):
    class Wrong(opfuse.BasicOperation):
        def op_forward(self, ctx, input_, **unused):
            return wrong(input_)

        def op_backward(self, ctx, grad_output):
            return grad_output, ()

    with pytest.raises(
        TypeError, match=f"Wrong: op_forward must return its output, a tensor, got {got}"
    ):
        opfuse.Sequential(ops.SiLU(), Wrong(), *behind)(torch.randn(3, 4, requires_grad=True))


# Numbers of an op that change between the passes


class Slope(opfuse.BasicOperation):
    saved_names = ()
    context_names = ("slope",)
    feature_ratio = 1

    def __init__(self, slope):
        super().__init__()
        self.slope = slope

    def op_forward(self, ctx, input_, **unused):
        if ctx.requires_grad:
            ctx.slope = self.slope
        return input_ * self.slope

    def op_backward(self, ctx, grad_output):
        return grad_output * ctx.slope, ()


def test_a_context_attribute_goes_from_pass_to_pass():
    chain = opfuse.Sequential(Slope(2.0), ops.Identity(), Slope(3.0))
    x = torch.randn(2, 3, requires_grad=True)
    first = chain(x)
    chain[0].slope = 5.0
    second = chain(x)
    chain[2].slope = 7.0
    for y, expected in ((second, 15.0), (first, 6.0)):
        (grad,) = torch.autograd.grad(y.sum(), x)
        torch.testing.assert_close(grad, torch.full_like(x, expected))


class Short(opfuse.FusedOperation):
    def fuser_forward(self, ctxs, x, **unused):
        return x * self.basic_ops[0].slope, [()]


class Remembering(Slope):
    """It leaves what is no number of the op, too, and its backward reads it."""

    saved_names = ()
    context_names = ("slope", "seen")

    def op_forward(self, ctx, input_, **unused):
        if ctx.requires_grad:
            ctx.slope, ctx.seen = self.slope, input_.shape
        return input_ * self.slope

    def op_backward(self, ctx, grad_output):
        return grad_output.reshape(ctx.seen) * ctx.slope, ()


def test_a_fused_forward_finds_the_number_of_its_op_in_the_context():
    with registered("forward", opfuse.Fusion([Slope], Short)):
        x = torch.randn(2, requires_grad=True)
        chain = opfuse.Sequential(Slope(2.0))
        y = chain(x)
        chain[0].slope = 5.0
        assert torch.equal(torch.autograd.grad(y.sum(), x)[0], torch.full_like(x, 2.0))


def test_a_forward_that_leaves_no_attribute_is_named():
    with registered("forward", opfuse.Fusion([Remembering], Short)):
        with pytest.raises(
            RuntimeError,
            match=r"op 0 \(Remembering\) declares the context attribute 'seen', but .* Short",
        ):
            opfuse.Sequential(Remembering(2.0))(torch.randn(2, requires_grad=True))


# Forward-mode AD


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_tangents_are_not_lost(frozen, autocast):
    class Blind(opfuse.FusedOperation):  # as a kernel is
        def fuser_forward(self, ctxs, x, **unused):
            return self.basic_ops[0].op_forward(ctxs[0], x.detach()), [()]

    chain = opfuse.Sequential(ops.Linear(4, 4), ops.GELU()).requires_grad_(not frozen)
    x, tangent = torch.randn(3, 4), torch.randn(3, 4)
    with registered("forward", opfuse.Fusion([ops.GELU], Blind)):
        chain(x)
        with forward_ad.dual_level(), torch.autocast("cpu", enabled=autocast):
            y = chain(forward_ad.make_dual(x, tangent))
            got = forward_ad.unpack_dual(y).tangent
        assert [step.fusion for step in opfuse.explain(chain, x).calls[0].plan.forward][
            -1
        ] == "Blind"
    plain = lambda x: F.gelu(F.linear(x, chain[0].weight, chain[0].bias), approximate="tanh")  # noqa: E731
    _, expected = torch.func.jvp(plain, (x,), (tangent,))
    torch.testing.assert_close(
        got.float(), expected, rtol=0.1 if autocast else 1e-5, atol=0.1 if autocast else 1e-6
    )


# Writing where nobody may


@pytest.mark.parametrize("where", ["input", "parameter", "saved", "gradient"])
def test_the_option_debug_finds_a_step_that_writes(where):
    class Writing(ops.BasicLinear):
        def op_forward(self, ctx, input_, **unused):
            with torch.no_grad():
                y = input_ @ ctx.params[0].t()
                ctx.save_for_backward(input_, ctx.params[0])
                {"input": input_, "parameter": ctx.params[0]}.get(where, y).mul_(1.5)
            return y

        def op_backward(self, ctx, grad_output):
            x, weight = ctx.saved_tensors
            result = grad_output @ weight, (grad_output.t() @ x,)
            {"saved": x.detach(), "gradient": grad_output}.get(where, result[0]).mul_(1.5)
            return result

    chain = opfuse.Sequential(ops.ConstantScale(1.0), Writing(3, 3))
    what = {
        "input": "its input",
        "parameter": "a parameter",
        "saved": "a tensor saved",
        "gradient": "the gradient of",
    }
    with (
        opfuse.options(debug=True),
        pytest.raises(RuntimeError, match=rf"Writing \[Writing\] wrote into {what[where]}"),
    ):
        chain(torch.randn(2, 3, requires_grad=True)).square().sum().backward()


def test_the_option_debug_lets_the_library_be():
    chain = opfuse.Sequential(
        fork(),
        ops.RMSNorm(8),
        ops.Linear(8, 16),
        ops.SwiGLU(),
        ops.Dropout(0.5),
        reading(ops.AddExtraInput()),
    )
    with opfuse.options(debug=True):
        chain(torch.randn(2, 8, requires_grad=True)).sum().backward()


@pytest.mark.parametrize("act", [ops.GELU, ops.SiLU, ops.ReLU, ops.SwiGLU, ops.QGELU])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saved_tensors_may_be_mutated_where_torch_allows_it(act, dtype):
    chain = opfuse.Sequential(ops.Linear(4, 4), act(), ops.ConstantScale(3.0)).to(dtype)
    x = torch.randn(3, 4, dtype=dtype, requires_grad=True)
    (expected,) = torch.autograd.grad(chain(x).sum(), x)
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        (got,) = torch.autograd.grad(chain(x).sum(), x)
    tolerance = dict(rtol=0.1, atol=0.01) if dtype is torch.bfloat16 else {}
    torch.testing.assert_close(got, expected, **tolerance)


# Rows


def test_rows_are_told_only_where_they_are_known():
    told = []

    def when(basic, env):
        told.append((env.row_alignment, env.rows))
        return True

    class Fused(opfuse.FusedOperation):
        def fuser_forward(self, ctxs, x, **unused):
            return self.basic_ops[0].op_forward(ctxs[0], x), [()]

    fusion = opfuse.Fusion([ops.GELU], Fused, when, needs=("row_alignment", "rows"))
    with registered("forward", fusion):
        opfuse.Sequential(ops.SiLU(), ops.GELU())(torch.randn(16, 4))
        assert told[-1] == (16, 16)
        told.clear()
        opfuse.Sequential(ops.Reshape((-1, 64)), ops.GELU())(torch.randn(16, 4))
        assert set(told) == {(1, None)}
        told.clear()
        # Plain does not say that it keeps them
        opfuse.Sequential(Plain(), ops.GELU())(torch.randn(16, 4))
        assert set(told) == {(1, None)}


@pytest.mark.parametrize("names", [(), ("input",)])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_saved_tensors_written_by_a_forward(names, compiled, grad):
    class Square(opfuse.BasicOperation):
        saved_names = names

        def op_forward(self, ctx, x, **unused):
            ctx.saved_tensors = (x,)
            return x * x

        def op_backward(self, ctx, grad_output):
            return grad_output * 2 * ctx.saved_tensors[0], ()

    op = opfuse.Sequential(Square())
    torch.compiler.reset()  # else its limit of recompilations may be reached
    call = torch.compile(op, backend="aot_eager", fullgraph=True) if compiled else op
    with (
        pytest.raises(Exception, match="wrote saved_tensors on its context"),
        torch.set_grad_enabled(grad),
    ):
        call(torch.ones(3, requires_grad=True))
