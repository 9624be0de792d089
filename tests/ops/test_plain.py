"""ConstantScale, Identity, Reshape, Dropout, Quantize."""

import pytest
import torch

import opfuse
from opfuse import ops


def test_constant_scale_keeps_the_dtype_and_refuses_other_than_numbers():
    x = torch.ones(2, 3, dtype=torch.bfloat16)
    assert ops.ConstantScale(2)(x).eq(2).all() and ops.ConstantScale(2)(x).dtype is torch.bfloat16
    assert repr(ops.ConstantScale(0.5)) == "ConstantScale(scale=0.5)"
    for bad in ("2", None, torch.ones(1), True):
        with pytest.raises(TypeError, match="ConstantScale expected a real number as scale"):
            ops.ConstantScale(bad)


@pytest.mark.parametrize(
    "op", [ops.ConstantScale(3.0), ops.Dropout(0.5), ops.Dropout(0.0), ops.Dropout(1.0)]
)
@pytest.mark.parametrize("others", [0, 2])
def test_the_backward_uses_the_number_of_the_forward(op, others):
    name = "scale" if isinstance(op, ops.ConstantScale) else "p"
    before, chain = getattr(op, name), opfuse.Sequential(*[ops.ReLU()] * others, op)
    for value in (before, 0.25):
        setattr(op, name, value)
        x = torch.rand(4, 8, requires_grad=True) + 1
        y = chain(x)
        setattr(op, name, 0.75)
        # all of them are linear
        torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], (y / x).detach())
    setattr(op, name, before)


def test_identity_passes_the_tensor_itself():
    x = torch.ones(2)
    assert ops.Identity()(x).data_ptr() == x.data_ptr()


@pytest.mark.parametrize("shape", [(6, 2), (-1,), (2, 3, 2), (1, 12), [3, -1]])
@pytest.mark.parametrize("alone", [True, False])
def test_reshape_matches_torch_alone_and_in_a_chain(shape, alone):
    x = torch.randn(4, 3, requires_grad=True)
    chain = [ops.Reshape(shape)] if alone else [ops.GELU(), ops.Reshape(shape), ops.GELU()]
    y = opfuse.Sequential(*chain)(x)
    gelu = torch.nn.functional.gelu
    expected = (
        x.reshape(*shape)
        if alone
        else gelu(gelu(x, approximate="tanh").reshape(*shape), approximate="tanh")
    )
    torch.testing.assert_close(y, expected)
    grad = torch.randn_like(y)
    y.backward(grad)
    torch.testing.assert_close(x.grad, torch.autograd.grad(expected, x, grad)[0])


def test_reshape_of_other_layouts():
    x = torch.randn(3, 4, requires_grad=True)
    y = opfuse.Sequential(ops.Reshape((12,)))(x.t())
    assert torch.equal(y, x.t().reshape(12))
    y.backward(torch.ones(()).expand(12))
    assert x.grad.eq(1).all()
    empty = opfuse.Sequential(ops.Reshape((0, 2)))(torch.empty(0, 4, requires_grad=True))
    empty.sum().backward()


def test_reshape_tells_the_chain_its_width():
    with pytest.raises(ValueError, match="takes 3 features"):
        opfuse.Sequential(ops.Reshape((2, 4)), ops.Linear(3, 3))(torch.ones(8))
    assert opfuse.Sequential(ops.Reshape((4, -1)), ops.Linear(2, 3))(torch.ones(8)).shape == (4, 3)
    with pytest.raises(ValueError, match="expected 3 features"):
        opfuse.Sequential(ops.Reshape((4, -1)), ops.Linear(3, 3))(torch.ones(8))


def test_reshape_refuses_bad_shapes():
    with pytest.raises(ValueError, match="Reshape expected sizes of at least 0 and one -1 at most"):
        ops.Reshape((-1, -1))
    with pytest.raises(ValueError, match="Reshape expected"):
        ops.Reshape((-2, 3))
    for bad in ((1.5,), (2, "2"), (True, 4)):
        with pytest.raises(TypeError, match="Reshape expected whole numbers"):
            ops.Reshape(bad)
    with pytest.raises(RuntimeError, match="shape"):
        ops.Reshape((5,))(torch.ones(4))
    assert repr(ops.Reshape([2, -1])) == "Reshape(shape=(2, -1))"


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str
)
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout(near, p, dtype):
    x = torch.randn(1000, 8, dtype=torch.float64).to(dtype).requires_grad_()
    y = opfuse.Sequential(ops.Dropout(p))(x)
    kept = y != 0
    assert kept.double().mean().item() == pytest.approx(1 - p, abs=0.03)
    near(y, (x.detach().double() * kept) / (1 - p))
    grad = torch.randn_like(y)
    y.backward(grad)
    near(x.grad, grad.double() * kept / (1 - p))


def test_dropout_draws_from_torchs_generator():
    op, x = ops.Dropout(0.5), torch.ones(100)
    torch.manual_seed(1)
    first, second = op(x), op(x)
    torch.manual_seed(1)
    assert torch.equal(op(x), first) and not torch.equal(first, second)


def test_dropout_of_0_keeps_all_and_of_1_zeroes_all():
    x = torch.tensor([1.0, torch.finfo(torch.float32).max], requires_grad=True)
    y = ops.Dropout(1.0)(x)
    y.sum().backward()
    assert not y.any() and not x.grad.any()
    assert torch.equal(ops.Dropout(0.0)(x), x)


def test_dropout_follows_the_mode():
    chain, x = opfuse.Sequential(ops.Linear(4, 4), ops.Dropout(0.5)), torch.randn(64, 4)
    assert (chain(x) == 0).any()
    chain.eval()
    assert torch.equal(chain(x), chain[0](x))
    chain.train()
    assert (chain(x) == 0).any()


def test_dropout_saves_a_bool_mask(call):
    x = torch.ones(10)
    assert call(ops.Dropout(0.5), x).saved[0].dtype is torch.bool
    assert call(ops.Dropout(0.5).eval(), x).saved == (None,)
    assert call(ops.Dropout(0.5), x, input_requires_grad=False).saved == (None,)
    assert call(ops.Dropout(0.5), x, requires_grad=False).saved is None


@pytest.mark.parametrize("p", [-0.1, 1.1, float("nan")])
def test_dropout_refuses_a_bad_probability(p):
    with pytest.raises(ValueError, match="Dropout expected a probability p between 0 and 1"):
        ops.Dropout(p)
    with pytest.raises(TypeError, match="Dropout expected a real number as p, got '0.5'"):
        ops.Dropout("0.5")
    assert repr(ops.Dropout(0.25)) == "Dropout(p=0.25)"


def test_quantize_declares_a_quantizer_for_each_pass(register):
    for forward, backward in [(True, False), (False, True), (True, True), (False, False)]:
        op = ops.Quantize(forward=forward, backward=backward)
        for mode, enabled in (("forward", forward), ("backward", backward)):
            assert op.num_quantizers(mode) == enabled
            assert len(op.get_quantizer_roles(mode)) == enabled
    assert repr(ops.Quantize()) == "Quantize(forward=True, backward=False)"
    assert ops.Quantize().get_input_quantizer() is None


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize(
    ("forward", "backward"), [(True, False), (False, True), (True, True), (False, False)]
)
def test_quantize_rounds_the_passes_that_it_is_asked_to(register, forward, backward, alone):
    rounding = pytest.importorskip("rounding")
    register(rounding.RoundingPlugin())
    op = ops.Quantize(forward, backward)
    chain = (
        opfuse.Sequential(op)
        if alone
        else opfuse.Sequential(ops.Identity(), op, ops.ConstantScale(1.0))
    )
    x, grad = torch.randn(3, 4, requires_grad=True), torch.randn(3, 4)
    with opfuse.autocast(recipe=rounding.Rounding()):
        y = chain(x)
    y.backward(grad)
    torch.testing.assert_close(y.detach(), rounding.round_to(x.detach()) if forward else x.detach())
    torch.testing.assert_close(x.grad, rounding.round_to(grad) if backward else grad)
