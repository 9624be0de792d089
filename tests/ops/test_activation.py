"""Activations: third-party ones, edges of the formulas, halves and interleaving, helpers for fusions."""

import copy
import math

import pytest
import torch
from activations import ELEMENTWISE, GATED, SCALED
from torch.nn import functional as F

import opfuse
from opfuse import ops
from opfuse.core import plugins


class Mish(ops.Activation):
    """What a third party writes: value and derivative."""

    number_names = ()

    def value(self, x):
        return x * torch.tanh(F.softplus(x))

    def derivative(self, x):
        t = torch.tanh(F.softplus(x))
        return t + x * (1 - t * t) * torch.sigmoid(x)


class MishGLU(ops.GatedActivation):
    value = Mish.value
    derivative = Mish.derivative


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str
)
def test_a_third_party_activation_may_be_gated_and_interleaved(compare, dtype):
    x = torch.randn(2, 3, 8, dtype=torch.float64).to(dtype).requires_grad_()
    compare(Mish(), lambda x, p: F.mish(x), x)
    compare(MishGLU(), lambda x, p: F.mish(x[..., :4]) * x[..., 4:], x)
    compare(MishGLU(glu_interleave_size=4), lambda x, p: F.mish(x[..., :4]) * x[..., 4:], x)


def test_a_third_party_activation_may_be_scaled(compare):
    x, scales = torch.randn(3, 8, requires_grad=True), torch.randn(3, requires_grad=True)
    compare(
        ops.ScaledActivation(MishGLU()),
        lambda x, p, s: F.mish(x[:, :4]) * x[:, 4:] * s[:, None],
        x,
        scales,
    )
    with pytest.raises(TypeError, match="ScaledActivation expected an Activation, got Identity"):
        ops.ScaledActivation(ops.Identity())


def test_third_party_in_a_chain_under_autocast():
    chain = opfuse.Sequential(ops.Linear(4, 8), Mish(), ops.Linear(8, 4), MishGLU())
    x = torch.randn(3, 4, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = chain(x)
    assert y.dtype is torch.bfloat16 and y.shape == (3, 2)
    y.sum().backward()
    assert x.grad.dtype is torch.float32


def test_the_base_is_abstract():
    with pytest.raises(TypeError, match="abstract"):
        ops.Activation()
    assert Mish().device_functions() is None
    assert not Mish.gated and MishGLU.gated and MishGLU.feature_ratio == 2


ERF = {"approximate": "none"}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "op", [*ELEMENTWISE, *GATED, Mish, lambda: ops.GELU(**ERF), lambda: ops.GEGLU(**ERF)]
)
def test_forward_value_and_backward_value_agree_with_the_op(near, op, dtype):
    """forward_value and backward_value are the op; derivative is the derivative of value."""
    act = op()
    x = torch.randn(3, 8, dtype=torch.float64).to(dtype)
    leaf = x.clone().requires_grad_()
    y = opfuse.Sequential(act)(leaf)
    assert torch.equal(act.forward_value(x), y)
    grad = torch.randn_like(y)
    y.backward(grad)
    assert torch.equal(act.backward_value(grad, x), leaf.grad)
    out = torch.full_like(x, 7.0)
    assert act.backward_value(grad, x, out=out) is out
    near(out, leaf.grad)
    if not act.gated:
        out = grad.clone()
        near(act.backward_value(out, x, out=out), leaf.grad)
    exact = x.double().requires_grad_()
    act.value(exact).sum().backward()
    torch.testing.assert_close(act.derivative(exact.detach()), exact.grad)


@pytest.mark.parametrize("op", [ops.GELU, ops.SiLU, ops.SReLU, Mish])
def test_an_owned_gradient_is_overwritten(call, op):
    x = torch.randn(3, 4)
    ran = call(op(), x, owns=True)
    grad = torch.ones(3, 4)
    dx, _, _ = ran.backward(grad)
    assert dx is grad
    torch.testing.assert_close(dx, op().derivative(x))


def test_only_an_activation_that_trains_saves(call):
    x = torch.randn(2, 3)
    assert call(ops.GELU(), x).saved == (x,)
    assert call(ops.GELU(), x, input_requires_grad=False).saved == (None,)
    assert call(ops.GELU(), x, requires_grad=False).saved is None
    assert call(ops.GELU(), x, input_requires_grad=False).backward(x)[0] is None


@pytest.mark.parametrize("op", ELEMENTWISE)
def test_values_that_are_not_finite(op):
    values = torch.tensor([math.nan, math.inf, -math.inf], dtype=torch.float64)
    y = op()(values)
    assert y[0].isnan() and y[1] == math.inf
    assert (y[2] == 0) if op in (ops.ReLU, ops.SReLU) else y[2].isnan()  # -inf * sigmoid(-inf)


def test_relu_at_zero():
    x = torch.tensor([0.0, -0.0, 1.0, -1.0], requires_grad=True)
    for op, slopes in ((ops.ReLU, [0, 0, 1, 0]), (ops.SReLU, [0, 0, 2, 0])):
        x.grad = None
        op()(x).sum().backward()
        assert x.grad.tolist() == slopes


def test_the_first_half_is_the_gate():
    x = torch.tensor([[-1.0, 2.0, 3.0, 4.0]])
    assert ops.ReGLU()(x).tolist() == [[0.0, 8.0]]
    torch.testing.assert_close(ops.GLU()(x), F.glu(torch.cat((x[:, 2:], x[:, :2]), -1)))


def test_interleaved_gates_are_split_and_joined():
    """Features g0 g1 l0 l1 g2 g3 l2 l3 with size 2."""
    x = torch.randn(2, 3, 8)
    gates, linears = x[..., [0, 1, 4, 5]], x[..., [2, 3, 6, 7]]
    expected = F.silu(gates) * linears
    op = ops.SwiGLU(glu_interleave_size=2)
    torch.testing.assert_close(op(x), expected)
    assert torch.equal(op.join(*op.split(x)), x)
    assert torch.equal(
        torch.cat(op.split(x), -1), x.reshape(-1, 2, 2, 2).transpose(1, 2).reshape(x.shape)
    )
    torch.testing.assert_close(ops.SwiGLU(glu_interleave_size=4)(x), ops.SwiGLU()(x))


def test_features_that_do_not_split():
    with pytest.raises(
        ValueError, match=r"SwiGLU expected a multiple of 2 features .* got shape \(2, 3\)"
    ):
        ops.SwiGLU()(torch.ones(2, 3))
    with pytest.raises(
        ValueError, match=r"SwiGLU expected a multiple of 8 features .* got shape \(2, 12\)"
    ):
        ops.SwiGLU(glu_interleave_size=4)(torch.ones(2, 12))
    with pytest.raises(ValueError, match="GLU"):
        ops.GLU()(torch.ones(()))
    with pytest.raises(ValueError, match="splits its features into 2, but gets 5 of them"):
        opfuse.Sequential(ops.Linear(4, 5), ops.GLU())(torch.ones(1, 4))
    with pytest.raises(
        ValueError, match="SwiGLU expected a glu_interleave_size of at least 1, got 0"
    ):
        ops.SwiGLU(glu_interleave_size=0)
    with pytest.raises(TypeError, match="glu_interleave_size"):
        ops.GLU(glu_interleave_size=2)


def test_clamped_ends_pass_their_gradient():
    limit = 7.0
    below, above = limit - 1, limit + 1
    gates = [limit, above, -above, 1.0, 1.0, 1.0, 1.0, below]
    linears = [1.0, 1.0, 1.0, limit, -limit, above, -above, 1.0]
    x = torch.tensor([gates, linears], dtype=torch.float64).T.contiguous().requires_grad_()
    y = ops.ClampedSwiGLU()(x)
    y.sum().backward()
    gate, linear = x.grad.T
    assert gate[1] == 0 and gate[[0, 2, 7]].all()  # only the upper side of the gate is clamped
    assert linear[[3, 4]].all() and not linear[[5, 6]].any()
    sigmoid = 1 / (1 + math.exp(-1.702 * limit))
    assert y[0].item() == pytest.approx(limit * sigmoid * 2)  # the offset comes after the clamp
    assert y[1].item() == y[0].item()
    assert y[6].item() == pytest.approx(1 / (1 + math.exp(-1.702)) * (1 - limit))


def test_clamped_half_precision_keeps_the_ends():
    x = torch.tensor([[7.0, 7.0]], dtype=torch.bfloat16, requires_grad=True)
    ops.ClampedSwiGLU()(x).sum().backward()
    assert x.grad.all()


@pytest.mark.parametrize("bad", [0.0, -1.0, math.inf, math.nan])
@pytest.mark.parametrize("name", ["beta1", "beta2"])
@pytest.mark.parametrize("op", [ops.SiTUGLU, ops.ScaledSiTUGLU])
def test_situglu_refuses_bounds_that_are_not_positive(op, name, bad):
    with pytest.raises(ValueError, match=f"SiTUGLU expected a finite {name} greater than 0"):
        op(**{name: bad})


def test_clamped_swiglu_refuses_a_negative_limit():
    for limit in (-1.0, math.nan):
        with pytest.raises(ValueError, match="ClampedSwiGLU expected a limit of at least 0"):
            ops.ClampedSwiGLU(limit=limit)


def test_situglu_is_bounded():
    x = torch.tensor([[100.0, 1000.0]])
    assert ops.SiTUGLU()(x).item() == pytest.approx(4 * 25)
    assert ops.SiTUGLU(beta1=2.0, beta2=3.0)(x).item() == pytest.approx(6)


@pytest.mark.parametrize("op", [*ELEMENTWISE, *GATED])
def test_an_input_is_kept_as_the_recipe_of_that_name_casts_it(register, op):
    rounding = pytest.importorskip("rounding")
    x = torch.randn(3, 8, requires_grad=True)
    cached = op(cache_quantized_input=True)
    assert cached.cache_quantized_input and not op().cache_quantized_input
    text = rf"{op.__name__}\(cache_quantized_input=True\): no plugin offers a recipe 'fp8-current'"
    with plugins.isolated(), pytest.raises(ValueError, match=text):
        cached(x)
    with pytest.raises(TypeError, match="a bool as cache_quantized_input, got 1"):
        op(cache_quantized_input=1)
    plugin = rounding.RoundingPlugin()
    offered = {"opfuse_recipes": lambda self: {"fp8-current": rounding.Rounding}}
    offering = type("Offering", (), {n: opfuse.hookimpl(f) for n, f in offered.items()})()
    register(plugin, name="rounding"), register(offering, name="offering")
    rounded = rounding.round_to(x.detach()).requires_grad_()
    for model in (cached, opfuse.Sequential(ops.Identity(), cached), copy.deepcopy(cached)):
        y = model(x)
        assert torch.equal(y, op()(x))
        dy = torch.randn_like(y)
        (got,) = torch.autograd.grad(y, x, dy)
        (right,) = torch.autograd.grad(op()(rounded), rounded, dy)
        assert torch.equal(got, right)
    with pytest.raises(RuntimeError, match="cache_quantized_input=True, which would not run"):
        ops.ScaledActivation(cached)
    with pytest.raises(AttributeError):
        cached.cache_quantized_input = False


def test_activation_recompute_in_mlp_changes_no_number():
    x, scales, results = torch.randn(3, 4), torch.randn(3), []
    for recompute in (False, True):
        scaled = ops.ScaledSReLU(activation_recompute_in_mlp=recompute)
        leaves = [x.clone().requires_grad_(), scales.clone()]
        assert scaled.activation_recompute_in_mlp is recompute
        y = scaled(*leaves)
        results.append((y.detach(), torch.autograd.grad(y.sum(), leaves[0])[0]))
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("op", SCALED)
def test_activation_recompute_in_mlp_where_te_refuses_it(op):
    assert op(activation_recompute_in_mlp=False).activation_recompute_in_mlp is False
    with pytest.raises(
        TypeError, match=f"{op.__name__} expected a bool as activation_recompute_in_mlp, got 1"
    ):
        op(activation_recompute_in_mlp=1)
    if op is not ops.ScaledSReLU:
        with pytest.raises(
            ValueError, match=f"{op.__name__} does not support activation recomputation: activation"
        ):
            op(activation_recompute_in_mlp=True)


def test_no_gated_activation_is_recomputed_in_an_mlp():
    with pytest.raises(ValueError, match="is for no gated activation"):
        ops.ScaledActivation(ops.GEGLU(), activation_recompute_in_mlp=True)
    ops.ScaledActivation(ops.GELU(), activation_recompute_in_mlp=True)


SCALED_NUMBERS = [("ScaledClampedQGeGLU", {"limit": 0.5, "alpha": 1.1, "glu_linear_offset": 0.3}),
                  ("ScaledSiTUGLU", {"beta1": 0.5, "beta2": 0.7})]  # fmt: skip


@pytest.mark.parametrize(("name", "numbers"), SCALED_NUMBERS)
@pytest.mark.parametrize("others", [0, 1])
def test_a_scaled_backward_uses_the_numbers_of_the_forward(name, numbers, others):
    op, results = getattr(ops, name)(**numbers), []
    chain = opfuse.Sequential(*[ops.SiLU()] * others, op)
    x, scales = torch.randn(5, 6, dtype=torch.float64), torch.randn(5, dtype=torch.float64)
    for change in (False, True):
        leaves = [x.clone().requires_grad_(), scales.clone().requires_grad_()]
        y = chain(*leaves)
        for number in numbers if change else ():
            setattr(op.activation, number, 2.0)
        results.append(torch.autograd.grad(y.sum(), leaves))
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize(
    "before", [ops.Identity, ops.SiLU, lambda: ops.Linear(4, 4, dtype=torch.float64)]
)
@pytest.mark.parametrize("trains", [True, False])
def test_the_gradient_of_scales_out_of_a_channel(near, before, trains):
    fork = ops.MakeExtraOutput().set_extra_output_channel(0, "scales", output_to_caller=False)
    scaled = ops.ScaledSReLU().set_extra_input_channel(0, "scales")
    first = before()
    chain = opfuse.Sequential(first, fork, ops.Reshape((3, 4, 1)), scaled)
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=trains)
    y = chain(x)
    z = first(x)
    expected = torch.relu(z) ** 2 * z
    near(y, expected.unsqueeze(-1))
    if y.requires_grad:
        wanted = [t for t in (x, *first.parameters()) if t.requires_grad]
        for got, grad in zip(
            *[torch.autograd.grad(t.sum(), wanted) for t in (y, expected)], strict=True
        ):
            near(got, grad)


@pytest.mark.parametrize("op", SCALED)
def test_scales_of_another_shape(op):
    x = torch.ones(2, 3, 4)
    for shape in [(2,), (3, 2), (2, 3, 1), (2, 3, 4), ()]:
        with pytest.raises(ValueError) as error:
            opfuse.Sequential(op())(x, torch.ones(shape))
        assert f"{op.__name__} expected scales of shape (2, 3)" in str(error.value)
        assert f"got {shape}" in str(error.value)


@pytest.mark.parametrize("op", SCALED)
def test_scaled_ops_run_in_a_fuser_only(op):
    ctx, x = opfuse.OperationContext(), torch.ones(1, 2)
    with pytest.raises(RuntimeError, match="call fuser_forward"):
        op().op_forward(ctx, x)
    with pytest.raises(RuntimeError, match="call fuser_backward"):
        op().op_backward(ctx, x)


@pytest.mark.parametrize(
    ("needs_x", "needs_scales"), [(True, True), (True, False), (False, True), (False, False)]
)
def test_what_a_scaled_op_saves(call, needs_x, needs_scales):
    x, scales = torch.randn(3, 4), torch.randn(3, requires_grad=needs_scales)
    ran = call(ops.ScaledSwiGLU(), x, scales, input_requires_grad=needs_x)
    assert [entry is not None for entry in ran.saved] == [needs_x or needs_scales, needs_x]
    dx, _, (dscales,) = ran.backward(torch.ones(3, 2))
    assert (dx is not None) == needs_x and (dscales is not None) == needs_scales


def test_scales_through_a_channel(near):
    """The scale's gradient goes back to the channel's producer, though nobody marked it as requiring one."""
    make, scale = ops.MakeExtraOutput(), ops.ScaledSwiGLU()

    class FirstFeature(opfuse.BasicOperation):
        """Publishes the mean of each row as scales."""

        num_extra_outputs = 1

        def op_forward(self, ctx, input_, **_):
            raise NotImplementedError

        op_backward = op_forward

        def fuser_forward(self, basic_op_ctxs, input_, **_):
            return input_.clone(), [(input_.mean(-1),)]

        def fuser_backward(self, basic_op_ctxs, grad_output, *, basic_op_grad_extra_outputs):
            ((grad,),) = basic_op_grad_extra_outputs
            return grad_output + grad[..., None] / grad_output.shape[-1], [()], [()]

    make = FirstFeature().set_extra_output_channel(0, "scales", output_to_caller=False)
    scale.set_extra_input_channel(0, "scales")
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    opfuse.Sequential(make, scale)(x).sum().backward()
    exact = x.detach().clone().requires_grad_()
    (F.silu(exact[:, :2]) * exact[:, 2:] * exact.mean(-1, keepdim=True)).sum().backward()
    near(x.grad, exact.grad)


def test_repr_shows_the_options_that_are_set():
    assert repr(ops.GELU()) == "GELU()"
    assert repr(ops.SwiGLU(glu_interleave_size=2)) == "SwiGLU(glu_interleave_size=2)"
    assert "limit=7.0, alpha=1.702, glu_linear_offset=1.0" in repr(ops.ScaledClampedQGeGLU())
    assert repr(ops.SiTUGLU()) == "SiTUGLU(beta1=4.0, beta2=25.0)"


class Squares:
    """A mixin: another function for any activation."""

    def value(self, x):
        return x * x

    def derivative(self, x):
        return 2 * x


def with_formulas(base):
    """A subclass with a function of its own."""
    return type(
        f"Square{base.__name__}",
        (base,),
        {"value": Squares.value, "derivative": Squares.derivative},
    )


def mixed_in(base):
    """A subclass that gets its function from a mixin."""
    return type(f"Square{base.__name__}", (Squares, base), {})


def below(base):
    """A subclass of such a subclass."""
    return type("Below", (with_formulas(base),), {})


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("derive", [with_formulas, mixed_in, below])
@pytest.mark.parametrize("base", [*ELEMENTWISE, *GATED])
def test_a_subclass_computes_its_own_function(compare, base, derive, dtype):
    op = derive(base)()
    x = torch.randn(3, 8, dtype=torch.float64).to(dtype).requires_grad_()
    if not op.gated:
        compare(op, lambda x, p: x * x, x)
        return
    clamped = {
        ops.ClampedSwiGLU: lambda b: b.clamp(-7, 7) + 1,
        ops.SiTUGLU: lambda b: 25 * torch.tanh(b / 25),
    }
    linear = clamped.get(base, lambda b: b)
    compare(op, lambda x, p: x[:, :4] ** 2 * linear(x[:, 4:]), x)


def test_other_parts_of_a_gated_activation(compare):
    class Halved(ops.SwiGLU):
        def linear_value(self, b):
            return b / 2

        def linear_derivative(self, b):
            return torch.full_like(b, 0.5)

    class Swapped(ops.ReGLU):
        def split(self, x):
            b, a = super().split(x)
            return a, b

        def join(self, a, b):
            return super().join(b, a)

    x = torch.randn(3, 8, requires_grad=True)
    compare(Halved(), lambda x, p: F.silu(x[:, :4]) * x[:, 4:] / 2, x)
    compare(Swapped(), lambda x, p: torch.relu(x[:, 4:]) * x[:, :4], x)


def test_what_a_class_gives_for_speed_stands_for_its_own_function():
    called = []

    class Fast(Squares, ops.Activation):
        def forward_value(self, x):
            called.append("forward")
            return x.square()

        def backward_value(self, grad_output, x, *, out=None):
            called.append("backward")
            return torch.mul(grad_output, 2 * x, out=out)

        def device_functions(self):
            return "value", "derivative"

    class Same(Fast):
        """Adds nothing."""

    class Other(Fast):
        value, derivative = Mish.value, Mish.derivative

    class Template(ops.Activation):
        """Gives a way for whatever function its subclasses have."""

        def forward_value(self, x):
            called.append("template")
            return self.value(x)

    class Filled(Squares, Template):
        pass

    x = torch.randn(3, requires_grad=True)
    for op, expected in (
        (Fast, ["forward", "backward"]),
        (Same, ["forward", "backward"]),
        (Other, []),
    ):
        called.clear()
        op()(x).sum().backward()
        assert called == expected
    assert (
        Same().device_functions() == ("value", "derivative") and Other().device_functions() is None
    )
    torch.testing.assert_close(Other()(x), F.mish(x))
    called.clear()
    Filled()(x)
    assert called == ["template"]


def test_deterministic_is_known_only_of_unchanged_math():
    class Said(Squares, ops.GELU):
        deterministic = True

    class Drawing(ops.ReLU):
        def op_forward(self, ctx, input_, **quantizers):
            return super().op_forward(ctx, input_ + torch.rand_like(input_), **quantizers)

    class Renamed(ops.GELU):
        pass

    class Again(Said):
        value = Mish.value

    assert all(op.deterministic for op in (*ELEMENTWISE, *GATED, Said, Renamed))
    unknown = (Mish, MishGLU, Drawing, Again, mixed_in(ops.SwiGLU), below(ops.SiLU))
    assert not any(op.deterministic for op in unknown)


@pytest.mark.parametrize("op", [ops.GELU, ops.SwiGLU, Mish])
@pytest.mark.parametrize("name", ["value", "derivative", "forward_value", "backward_value"])
def test_a_formula_is_replaced_by_a_subclass_only(op, name):
    with pytest.raises(
        RuntimeError,
        match=rf"{op.__name__}\.{name} cannot be replaced on one op, .* write a subclass",
    ):
        setattr(op(), name, torch.relu)


class Leaky(ops.Activation):
    """Has a number of its own."""

    def __init__(self, slope=0.1):
        super().__init__()
        self.slope = slope

    def value(self, x):
        return torch.where(x > 0, x, self.slope * x)

    def derivative(self, x):
        return torch.where(x > 0, 1.0, self.slope).to(x.dtype)


class LeakyByClass(Squares, ops.Activation):
    """Has it on its class."""

    slope = 0.1
    value, derivative = Leaky.value, Leaky.derivative


class LeakyGLU(ops.GatedActivation):
    value, derivative = Leaky.value, Leaky.derivative
    slope = 0.1


class Declared(LeakyByClass):
    number_names = ("slope",)


class DeclaredGLU(LeakyGLU):
    number_names = ("slope",)


NUMBERS = [
    (Leaky, {"slope": 0.5}),
    (LeakyByClass, {"slope": 0.5}),
    (LeakyGLU, {"slope": 0.5}),
    (Declared, {"slope": 0.5}),
    (DeclaredGLU, {"slope": 0.5}),
    (ops.ClampedSwiGLU, {"limit": 0.1}),
    (ops.ClampedSwiGLU, {"alpha": 0.1}),
    (ops.ClampedSwiGLU, {"glu_linear_offset": 0.1}),
    (lambda: ops.ClampedSwiGLU(glu_interleave_size=2), {"limit": 0.1, "alpha": 3.0}),
    (ops.SiTUGLU, {"beta1": 0.1}),
    (ops.SiTUGLU, {"beta2": 0.1}),
]


def test_numbers_are_those_that_a_class_declares_for_its_formulas():
    class Same(DeclaredGLU):
        scale = 3.0

    class Other(DeclaredGLU):
        value, derivative = ops.SiLU.value, ops.SiLU.derivative

    assert Declared().numbers_of() == Same().numbers_of() == (("slope", 0.1),)
    assert DeclaredGLU.context_names == ("numbers",) and ops.SwiGLU().numbers_of() == ()
    assert Other.number_names is None and LeakyGLU.number_names is None
    assert {"slope", "training"} <= dict(Other().numbers_of()).keys()
    with pytest.raises(TypeError, match="Wrong.number_names has the property 'slope'"):

        class Wrong(Mish):
            number_names = ("slope",)
            slope = property(lambda self: 0.1)


def test_a_class_with_passes_of_its_own_leaves_the_numbers_or_declares_all():
    class Through(Declared):
        saved_names = ("input",)

        def op_forward(self, ctx, input_, **unused):
            return super().op_forward(ctx, input_)

    class Without(Declared):
        saved_names = ("input",)

        def op_forward(self, ctx, input_, **unused):
            ctx.save_for_backward(input_)
            return self.value(input_)

    class Both(Squares, ops.Activation):
        saved_names = ("input",)
        op_forward = Without.op_forward

        def op_backward(self, ctx, grad_output):
            return grad_output * self.derivative(*ctx.saved_tensors), ()

    x, results = torch.randn(3, 8, requires_grad=True), []
    for slope in (0.1, 0.5):
        op = Through()
        y = op(x)
        op.slope = slope
        results.append(torch.autograd.grad(y.sum(), x)[0])
    assert torch.equal(*results)
    with pytest.raises(RuntimeError, match="attribute 'numbers', but the forward .* did not leave"):
        Without()(x)
    assert Both.context_names == Both.number_names == ()
    assert torch.equal(torch.autograd.grad(Both()(x).sum(), x)[0], 2 * x)


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize(("build", "numbers"), NUMBERS)
def test_a_backward_uses_the_numbers_of_its_forward(build, numbers, alone):
    op = build()
    run = op if alone else opfuse.Sequential(ops.ConstantScale(1.0), op)
    x = torch.randn(3, 8, requires_grad=True)
    grads = []

    def backward(y):
        x.grad = None
        y.sum().backward()
        grads.append(x.grad)

    backward(run(x))
    first = run(x)
    for name, number in numbers.items():
        setattr(op, name, number)
    second = run(x)
    backward(second)
    backward(first)
    assert torch.equal(grads[2], grads[0]) and not torch.equal(grads[1], grads[0])
    backward(run(x))
    assert torch.equal(grads[3], grads[1])


def test_numbers_for_other_ops():
    op = ops.ClampedSwiGLU()
    before = op.numbers_of()
    assert dict(before) == {"limit": 7.0, "alpha": 1.702, "glu_linear_offset": 1.0}
    assert op.with_numbers(before) is op
    op.limit = 0.5
    old = op.with_numbers(before)
    assert (op.limit, old.limit, type(old)) == (0.5, 7.0, ops.ClampedSwiGLU)
    op.limit = 7.0
    assert op.with_numbers(before) is op


def test_what_has_no_numbers_pays_nothing():
    op = ops.SwiGLU(glu_interleave_size=2)
    op.layer = 3  # a mark that somebody puts on a module is no number of its function
    assert op.numbers_of() == () and op.context_names == ()
    assert all(op().context_names == () for op in (*ELEMENTWISE, Mish))


def test_setting_an_option_of_a_built_op_is_refused():
    for op, name in ((ops.GELU(), "approximate"), (ops.SwiGLU(), "glu_interleave_size")):
        text = rf"{type(op).__name__}\.{name} is fixed, and is .*: make another {type(op).__name__}"
        with pytest.raises(RuntimeError, match=text):
            setattr(op, name, None)


@pytest.mark.parametrize("calls_super", [False, True])
def test_a_class_that_runs_itself(calls_super):
    class Own(ops.ClampedSwiGLU):
        def op_forward(self, ctx, input_, **quantizers):
            if calls_super:
                return super().op_forward(ctx, input_, **quantizers)
            ctx.save_for_backward(input_)
            return self.forward_value(input_)

    chain = opfuse.Sequential(ops.Linear(4, 8), Own(limit=0.5)).double()
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(ops.ClampedSwiGLU(limit=0.5)(chain[0](x)).sum(), x)
    torch.testing.assert_close(torch.autograd.grad(chain(x).sum(), x)[0], expected)


class Modes(ops.Activation):
    scale = 2.0

    def __init__(self, mode=None):
        super().__init__()
        self.mode, self.factors = mode, (1.0, 3.0)

    def factor(self):
        return self.scale * self.factors[self.mode == "big"] * (
            5 if self.training else 1
        ) + getattr(self, "late", 0.0)

    def value(self, x):
        return x * self.factor()

    def derivative(self, x):
        return torch.full_like(x, self.factor())


@pytest.mark.parametrize(
    "change",
    [
        lambda op: setattr(op, "mode", "big"),
        lambda op: setattr(op, "factors", (7.0, 7.0)),
        lambda op: op.eval(),
        lambda op: setattr(op, "late", 3.0),
        lambda op: setattr(op, "scale", 4.0),
        lambda op: setattr(type(op), "scale", 4.0),
    ],
    ids=["string", "tuple", "eval", "late", "instance", "class"],
)
def test_what_is_no_number_may_change_too(change):
    class Own(Modes):
        value, derivative = Modes.value, Modes.derivative

    op, x = Own("small"), torch.randn(3, requires_grad=True)
    y = op(x)
    change(op)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], torch.full_like(x, 10.0))
    y = op(x)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], torch.full_like(x, op.factor()))


def test_the_two_forms_of_gelu(compare):
    x = torch.linspace(-9, 9, 41, dtype=torch.float64, requires_grad=True)
    for form in ("none", "tanh"):
        compare(ops.GELU(approximate=form), lambda x, p, form=form: F.gelu(x, approximate=form), x)
    assert repr(ops.GELU(approximate="none")) == "GELU(approximate='none')"
    with pytest.raises(
        ValueError, match="GELU expected approximate to be 'tanh' or 'none', got 'erf'"
    ):
        ops.GELU(approximate="erf")


def test_gelu_for_another_gate(compare):
    class Gate(ops.GatedActivation):
        value, derivative, gate_gradient = (
            ops.GELU.value,
            ops.GELU.derivative,
            ops.GELU.backward_value,
        )

    x = torch.randn(3, 8, requires_grad=True)
    compare(Gate(), lambda x, p: F.gelu(x[:, :4], approximate="tanh") * x[:, 4:], x)


@pytest.mark.parametrize("name", ["value", "derivative", "forward_value"])
def test_the_formulas_of_a_class_stay(name):
    with pytest.raises(RuntimeError, match=f"GELU.{name} cannot be replaced, .*: write a subclass"):
        setattr(ops.GELU, name, lambda self, x: -x)


def test_the_formulas_of_a_class_of_your_own_may_change():
    class Own(ops.Activation):
        def value(self, x):
            return x

        def derivative(self, x):
            return torch.ones_like(x)

    op, x = Own(), torch.randn(3, requires_grad=True)
    op(x)
    Own.value, Own.derivative = lambda self, x: 2 * x, lambda self, x: torch.full_like(x, 2)
    y = op(x)
    torch.testing.assert_close(y, 2 * x)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], torch.full_like(x, 2))


class Clip(ops.Activation):
    """Between 0 and 6, where no gradient passes the ends."""

    saves_output = True

    def value(self, x):
        return x.clamp(0, 6)

    def derivative(self, x):
        return ((x > 0) & (x < 6)).to(x.dtype)


class Sigmoid(ops.Activation):
    saves_output = True  # it tells the derivative, but by another formula

    def value(self, x):
        return torch.sigmoid(x)

    def derivative(self, x):
        return torch.sigmoid(x) * torch.sigmoid(-x)


class Leaky(ops.ReLU):
    def value(self, x):
        return torch.where(x > 0, x, 0.1 * x)

    def derivative(self, x):
        return torch.where(x > 0, 1.0, 0.1)


@pytest.mark.parametrize(
    "op, saved", [(Clip, "y"), (ops.ReLU, "y"), (Leaky, "x"), (ops.SReLU, "x")]
)
def test_an_output_is_saved_where_it_tells_as_much(op, saved):
    chain, x = opfuse.Sequential(op()), torch.randn(5, 7, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = chain(3 * x)
    assert any(torch.equal(each, y) for each in kept) == (saved == "y")
    y.sum().backward()
    z = (3 * x.detach().double()).requires_grad_()
    exact = op().value(z) if op is not ops.SReLU else torch.relu(z).square()
    (expected,) = torch.autograd.grad(exact.sum(), z)
    torch.testing.assert_close(x.grad.double(), 3 * expected)


def test_an_output_that_tells_less_is_refused():
    with pytest.raises(
        ValueError, match="Sigmoid declares saves_output, but its output is no input"
    ):
        Sigmoid()
    assert not ops.ReLU(cache_quantized_input=True).saves_output
