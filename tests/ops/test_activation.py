"""Activations: third-party ones, edges of the formulas, halves and interleaving, helpers for fusions."""

import math

import pytest
import torch
from torch.nn import functional as F

import opfuse
from opfuse import ops

ELEMENTWISE = [ops.GELU, ops.QGELU, ops.ReLU, ops.SReLU, ops.SiLU]
GATED = [ops.GLU, ops.GEGLU, ops.QGEGLU, ops.ReGLU, ops.SReGLU, ops.SwiGLU, ops.SiTUGLU, ops.ClampedSwiGLU]
SCALED = [ops.ScaledSwiGLU, ops.ScaledSiTUGLU, ops.ScaledClampedQGeGLU, ops.ScaledSReLU]


class Mish(ops.Activation):
    """What a third party writes: value and derivative."""

    def value(self, x):
        return x * torch.tanh(F.softplus(x))

    def derivative(self, x):
        t = torch.tanh(F.softplus(x))
        return t + x * (1 - t * t) * torch.sigmoid(x)


class MishGLU(ops.GatedActivation):
    value = Mish.value
    derivative = Mish.derivative


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_third_party(compare, dtype):
    x = torch.randn(2, 3, 8, dtype=torch.float64).to(dtype).requires_grad_()
    compare(Mish(), lambda x, p: F.mish(x), x)
    compare(MishGLU(), lambda x, p: F.mish(x[..., :4]) * x[..., 4:], x)
    compare(MishGLU(glu_interleave_size=4), lambda x, p: F.mish(x[..., :4]) * x[..., 4:], x)


def test_third_party_scaled(compare):
    x, scales = torch.randn(3, 8, requires_grad=True), torch.randn(3, requires_grad=True)
    compare(ops.ScaledActivation(MishGLU()), lambda x, p, s: F.mish(x[:, :4]) * x[:, 4:] * s[:, None], x, scales)
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


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("op", [*ELEMENTWISE, *GATED, Mish])
def test_helpers_for_fusions(near, op, dtype):
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


def test_interleaving():
    """Features g0 g1 l0 l1 g2 g3 l2 l3 with size 2."""
    x = torch.randn(2, 3, 8)
    gates, linears = x[..., [0, 1, 4, 5]], x[..., [2, 3, 6, 7]]
    expected = F.silu(gates) * linears
    op = ops.SwiGLU(glu_interleave_size=2)
    torch.testing.assert_close(op(x), expected)
    assert torch.equal(op.join(*op.split(x)), x)
    assert torch.equal(torch.cat(op.split(x), -1), x.reshape(-1, 2, 2, 2).transpose(1, 2).reshape(x.shape))
    torch.testing.assert_close(ops.SwiGLU(glu_interleave_size=4)(x), ops.SwiGLU()(x))


def test_features_that_do_not_split():
    with pytest.raises(ValueError, match=r"SwiGLU expected a multiple of 2 features .* got shape \(2, 3\)"):
        ops.SwiGLU()(torch.ones(2, 3))
    with pytest.raises(ValueError, match=r"SwiGLU expected a multiple of 8 features .* got shape \(2, 12\)"):
        ops.SwiGLU(glu_interleave_size=4)(torch.ones(2, 12))
    with pytest.raises(ValueError, match="GLU"):
        ops.GLU()(torch.ones(()))
    with pytest.raises(ValueError, match="splits its features into 2, but gets 5 of them"):
        opfuse.Sequential(ops.Linear(4, 5), ops.GLU())(torch.ones(1, 4))
    with pytest.raises(ValueError, match="SwiGLU expected a glu_interleave_size of at least 1, got 0"):
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
def test_bounds_of_situglu(op, name, bad):
    with pytest.raises(ValueError, match=f"SiTUGLU expected a finite {name} greater than 0"):
        op(**{name: bad})


def test_bad_limit():
    for limit in (-1.0, math.nan):
        with pytest.raises(ValueError, match="ClampedSwiGLU expected a limit of at least 0"):
            ops.ClampedSwiGLU(limit=limit)


def test_situglu_is_bounded():
    x = torch.tensor([[100.0, 1000.0]])
    assert ops.SiTUGLU()(x).item() == pytest.approx(4 * 25)
    assert ops.SiTUGLU(beta1=2.0, beta2=3.0)(x).item() == pytest.approx(6)


@pytest.mark.parametrize("op", [*ELEMENTWISE, *GATED])
def test_arguments_of_later_releases(op):
    op(cache_quantized_input=False)
    text = rf"{op.__name__}: cache_quantized_input=True .* comes with a later release"
    with pytest.raises(NotImplementedError, match=text):
        op(cache_quantized_input=True)


@pytest.mark.parametrize("op", SCALED)
def test_scaled_arguments_of_later_releases(op):
    op(activation_recompute_in_mlp=False)
    with pytest.raises(NotImplementedError, match=f"{op.__name__}: activation_recompute_in_mlp=True"):
        op(activation_recompute_in_mlp=True)


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
        op().op_forward(ctx, x, prev_op_grad_output_quantizer=None, next_op_input_quantizer=None)
    with pytest.raises(RuntimeError, match="call fuser_backward"):
        op().op_backward(ctx, x)


@pytest.mark.parametrize(("needs_x", "needs_scales"), [(True, True), (True, False), (False, True), (False, False)])
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


def test_repr():
    assert repr(ops.GELU()) == "GELU()"
    assert repr(ops.SwiGLU(glu_interleave_size=2)) == "SwiGLU(glu_interleave_size=2)"
    assert "limit=7.0, alpha=1.702, glu_linear_offset=1.0" in repr(ops.ScaledClampedQGeGLU())
    assert repr(ops.SiTUGLU()) == "SiTUGLU(beta1=4.0, beta2=25.0)"
