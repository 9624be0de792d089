"""Normalizations: exchange with torch.nn, shapes, precision of what they compute and save."""

import pytest
import torch
from torch import nn

import opfuse
from opfuse import ops

NORMS = [(ops.LayerNorm, nn.LayerNorm), (ops.RMSNorm, nn.RMSNorm)]


@pytest.mark.parametrize(("ours", "theirs"), NORMS)
def test_state_dict_exchanges_with_torch(ours, theirs):
    ours, theirs = ours(6, eps=1e-5), theirs(6, eps=1e-5)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for name, value in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value)  # they start the same
    with torch.no_grad():
        for param in theirs.parameters():
            param.normal_()
    x = torch.randn(3, 6)
    ours.load_state_dict(theirs.state_dict())
    torch.testing.assert_close(ours(x), theirs(x))
    with torch.no_grad():
        ours.weight.mul_(2)
    theirs.load_state_dict(ours.state_dict())
    torch.testing.assert_close(ours(x), theirs(x))


@pytest.mark.parametrize(("ours", "theirs"), NORMS)
def test_norms_over_several_dimensions_match_the_reference(compare, ours, theirs):
    x = torch.randn(5, 2, 3, dtype=torch.float64, requires_grad=True)
    op = ours((2, 3), dtype=torch.float64)
    with torch.no_grad():
        for param in op.parameters():
            param.normal_()
    dims = [-2, -1]

    def reference(x, params):
        centered = x - x.mean(dims, keepdim=True) if "bias" in params else x
        y = centered / torch.sqrt(centered.square().mean(dims, keepdim=True) + 1e-5)
        return y * params["weight"] + params.get("bias", 0)

    compare(op, reference, x)
    compare(op, reference, x.detach()[0].requires_grad_())
    with pytest.raises(
        ValueError, match=rf"{ours.__name__} expected .* \(2, 3\), got shape \(5, 3, 3\)"
    ):
        op(torch.ones(5, 3, 3, dtype=torch.float64))


@pytest.mark.parametrize("weight", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("op", [ops.LayerNorm, ops.RMSNorm])
def test_weights_of_another_dtype(op, dtype, weight):
    norm = op(16, dtype=weight)
    x = torch.randn(4, 16).to(dtype).requires_grad_()
    y = opfuse.Sequential(norm)(x)
    assert y.dtype is dtype
    y.sum().backward()
    assert x.grad.dtype is dtype
    assert all(param.grad.dtype is weight for param in norm.parameters())


@pytest.mark.parametrize("op", [ops.LayerNorm, ops.RMSNorm])
def test_statistics_are_in_fp32(call, op):
    ran = call(op(8), torch.randn(3, 8, dtype=torch.bfloat16))
    assert {entry.dtype for entry in ran.saved[2:]} == {torch.float32}
    assert ran.saved[0].dtype is torch.bfloat16
    assert ran.saved[-1].shape == (3, 1)
    assert {
        entry.dtype for entry in call(ops.L2Normalization(), torch.randn(2, 3).half()).saved[1:]
    } == {torch.float32}


@pytest.mark.parametrize("op", [ops.LayerNorm, ops.RMSNorm, lambda size: ops.L2Normalization()])
def test_autocast_does_not_round_the_input(op):
    """Rows that differ from a large mean by less than bfloat16 can tell apart."""
    x = 1000 + torch.randn(2, 64)
    with torch.autocast("cpu", torch.bfloat16):
        y = op(64)(x)
    torch.testing.assert_close(y, op(64)(x))


def test_large_weights_gradient_sums_in_fp32(near):
    norm = ops.LayerNorm(8)
    x, grad = torch.randn(2048, 8).bfloat16(), torch.randn(2048, 8).bfloat16()
    norm(x).backward(grad)
    exact = nn.LayerNorm(8, dtype=torch.float64)
    exact(x.double()).backward(grad.double())
    torch.testing.assert_close(norm.weight.grad.double(), exact.weight.grad, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(norm.bias.grad.double(), exact.bias.grad, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("op", [ops.LayerNorm, ops.RMSNorm])
def test_zero_centered_gamma_adds_one_in_fp32(op):
    plain, centered = op(4), op(4, zero_centered_gamma=True)
    assert not centered.weight.any() and plain.weight.eq(1).all()
    x = torch.randn(2, 4)
    torch.testing.assert_close(plain(x), centered(x))
    with torch.no_grad():
        centered.weight.fill_(5.0)
    centered.reset_parameters()
    assert not centered.weight.any()
    small = op(4, zero_centered_gamma=True, dtype=torch.bfloat16)
    with torch.no_grad():
        small.weight.fill_(2**-12)  # lost in bfloat16 if 1 were added there
    y = small(x.bfloat16().float())
    assert not torch.equal(y, plain(x.bfloat16().float()))


@pytest.mark.parametrize("op", [ops.LayerNorm, ops.RMSNorm])
def test_bad_arguments_and_inputs_are_refused(op):
    for margin in (0, 4, {"forward": 1, "backward": 2}):
        assert op(4, sm_margin=margin).sm_margin == margin
    with pytest.raises(
        TypeError, match=f"{op.__name__} expected an int or a dict of ints as sm_margin, got 'x'"
    ):
        op(4, sm_margin="x")
    with pytest.raises(
        ValueError, match=f"{op.__name__} expected normalized_shape of at least 0, got -4"
    ):
        op(-4)
    with pytest.raises(ValueError, match="at least one dimension as normalized_shape"):
        op([])
    with pytest.raises(ValueError, match="expected 4 features"):
        op(4)(torch.ones(2, 3))
    assert f"{op.__name__}((4,), eps=0.5" in repr(op([4], eps=0.5))


def test_l2_normalization_takes_the_arguments_of_te():
    op = ops.L2Normalization(eps=0.5, seq_length=3, micro_batch_size=2)
    x = torch.tensor([[3.0, 4.0]])
    torch.testing.assert_close(op(x), x / (25.5**0.5))
    assert repr(op) == "L2Normalization(eps=0.5)"


@pytest.mark.parametrize(
    "needs",
    [(True, True, True), (True, False, False), (False, True, False), (False, False, True)],
    ids=str,
)
def test_what_layer_norm_saves(call, needs):
    norm = ops.LayerNorm(4)
    ran = call(norm, torch.randn(3, 4), input_requires_grad=needs[0], param_requires_grad=needs[1:])
    saved = dict(zip(norm.saved_names, ran.saved, strict=True))
    assert (saved["weight"] is not None) == needs[0]
    for name in ("input", "mean", "rstd"):
        assert (saved[name] is not None) == (needs[0] or needs[1])
    dx, grads, _ = ran.backward(torch.ones(3, 4))
    assert tuple(grad is not None for grad in (dx, *grads)) == needs


@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True)])
def test_what_rms_norm_saves(call, needs):
    norm = ops.RMSNorm(4)
    ran = call(norm, torch.randn(3, 4), input_requires_grad=needs[0], param_requires_grad=needs[1])
    assert [entry is not None for entry in ran.saved] == [True, needs[0], True]
    dx, (dw,), _ = ran.backward(torch.ones(3, 4))
    assert ((dx is not None), (dw is not None)) == needs


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("op", [ops.LayerNorm, ops.RMSNorm])
def test_a_backward_uses_the_scale_of_its_forward(op, alone):
    norm = op(8, zero_centered_gamma=True)
    run = norm if alone else opfuse.Sequential(ops.ConstantScale(1.0), norm)
    with torch.no_grad():
        norm.weight.normal_()
    x = torch.randn(3, 8, requires_grad=True)
    weights = torch.randn(3, 8)
    grads = []
    for changed in (False, True):
        norm.zero_centered_gamma = True
        y = run(x)
        norm.zero_centered_gamma = not changed
        grads.append(torch.autograd.grad((y * weights).sum(), x)[0])
    assert torch.equal(*grads)


@pytest.mark.parametrize(("ours", "theirs"), NORMS)
def test_norms_without_parameters_match_torch(ours, theirs):
    ours, theirs = (
        ours(6, elementwise_affine=False, eps=1e-5),
        theirs(6, elementwise_affine=False, eps=1e-5),
    )
    assert not ours.state_dict() and not ours.param_names and ours.weight is None
    ours.load_state_dict(theirs.state_dict())
    ours.reset_parameters()
    x = torch.randn(3, 6)
    torch.testing.assert_close(ours(x), theirs(x))
    assert "elementwise_affine=False" in repr(ours)
    with pytest.raises(
        ValueError, match="expected elementwise_affine=True for zero_centered_gamma=True, got False"
    ):
        type(ours)(6, elementwise_affine=False, zero_centered_gamma=True)


def test_layer_norm_without_bias():
    ours, theirs = ops.LayerNorm(6, bias=False), nn.LayerNorm(6, bias=False)
    assert list(ours.state_dict()) == list(theirs.state_dict()) == ["weight"]
    assert ours.bias is None and "bias=False" in repr(ours)
    ours.reset_parameters()
    x = torch.randn(3, 6)
    torch.testing.assert_close(ours(x), theirs(x))
    ours.weight.requires_grad_(False)
    x.requires_grad_()
    torch.testing.assert_close(
        *(torch.autograd.grad(norm(x).square().sum(), x)[0] for norm in (ours, theirs))
    )


@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True)])
def test_what_norms_save_without_a_bias(call, needs):
    ran = call(
        ops.LayerNorm(4, bias=False),
        torch.randn(3, 4),
        input_requires_grad=needs[0],
        param_requires_grad=needs[1],
    )
    assert [entry is not None for entry in ran.saved] == [True, needs[0], True, True]
    dx, (dw,), _ = ran.backward(torch.ones(3, 4))
    assert ((dx is not None), (dw is not None)) == needs
    for op in (ops.LayerNorm, ops.RMSNorm):
        ran = call(op(4, elementwise_affine=False), torch.randn(3, 4))
        assert [entry is None for entry in ran.saved[:2]] == [False, True]
        dx, grads, _ = ran.backward(torch.ones(3, 4))
        assert dx is not None and grads == ()
