"""AddExtraInput and MakeExtraOutput: gradients wherever they stand, memory, channels."""

import pytest
import torch

import opfuse
from opfuse import ops


def randn(*shape, requires_grad=True):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=requires_grad)


def grads(outputs, weights, inputs):
    total = sum((output * weight).sum() for output, weight in zip(outputs, weights, strict=True))
    return torch.autograd.grad(total, inputs, allow_unused=True)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.parametrize("after", [0, 1])
@pytest.mark.parametrize("count", [1, 2])
def test_make_extra_output_anywhere(near, before, after, count, in_place):
    forks = [ops.MakeExtraOutput(in_place=in_place) for _ in range(count)]
    chain = [ops.GELU()] * before + forks + [ops.SiLU()] * after
    x = randn(3, 4)
    outputs = opfuse.Sequential(*chain)(x)
    assert len(outputs) == 1 + count
    assert len({id(output) for output in outputs}) == 1 + count
    middle = torch.nn.functional.gelu(x, approximate="tanh") if before else x * 1
    expected = [torch.nn.functional.silu(middle) if after else middle, *[middle] * count]
    for output, wanted in zip(outputs, expected, strict=True):
        near(output, wanted)
    weights = [torch.randn_like(output) for output in outputs]
    near(grads(outputs, weights, [x])[0], grads(expected, weights, [x])[0])


@pytest.mark.parametrize("used", [(True, False), (False, True)])
@pytest.mark.parametrize("in_place", [False, True])
def test_an_output_that_is_not_used_has_no_gradient(near, used, in_place):
    x = randn(3, 4)
    outputs = opfuse.Sequential(ops.GELU(), ops.MakeExtraOutput(in_place=in_place), ops.Identity())(
        x
    )
    sum(output.sum() for output, wanted in zip(outputs, used, strict=True) if wanted).backward()
    (expected,) = torch.autograd.grad(torch.nn.functional.gelu(x, approximate="tanh").sum(), x)
    near(x.grad, expected)


def test_the_engines_gradients_are_never_written():
    x = randn(3, 4)
    y, extra = opfuse.Sequential(ops.MakeExtraOutput(in_place=True))(x)
    grads = [torch.ones(3, 4, dtype=torch.float64), torch.ones(3, 4, dtype=torch.float64)]
    torch.autograd.backward([y, extra], grads)
    assert all(grad.eq(1).all() for grad in grads)
    assert x.grad.eq(2).all()


def test_in_place_adds_into_a_gradient_of_its_own(call):
    x, grad, extra = torch.randn(2, 3), torch.ones(2, 3), torch.ones(2, 3)
    for in_place in (True, False):
        for owns in (True, False):
            ran = call(ops.MakeExtraOutput(in_place=in_place), x, owns=owns)
            dy = grad.clone()
            dx, _, _ = ran.backward(dy, extra)
            assert (dx is dy) == (in_place and owns)
            assert dx.eq(2).all() and extra.eq(1).all()
            assert ran.backward(dy, None)[0] is dy


@pytest.mark.parametrize(
    "dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)], ids=str
)
@pytest.mark.parametrize("in_place", [True, False])
def test_gradients_of_two_dtypes_are_added_in_the_wider_one(call, in_place, dtypes):
    grad, extra = [torch.full((2, 3), 1 / 3).to(dtype) for dtype in dtypes]
    expected = grad + extra
    ran = call(ops.MakeExtraOutput(in_place=in_place), torch.randn(2, 3), owns=True)
    dx, _, _ = ran.backward(grad, extra)
    assert dx.dtype is torch.float32 and torch.equal(dx, expected)


def test_extra_output_shares_memory_without_grad():
    x = randn(2, 3, requires_grad=False)
    y, extra = opfuse.Sequential(ops.MakeExtraOutput())(x)
    assert y.data_ptr() == extra.data_ptr() == x.data_ptr()
    assert y is not extra


@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("in_place", [False, True])
def test_add_extra_input_adds_and_passes_gradients(near, in_place, needs):
    x, leaf = randn(3, 4, requires_grad=needs[0]), randn(3, 4, requires_grad=needs[1])
    extra = leaf * 1
    y = opfuse.Sequential(ops.GELU(), ops.AddExtraInput(in_place=in_place), ops.SiLU())(x, extra)
    expected = torch.nn.functional.silu(torch.nn.functional.gelu(x, approximate="tanh") + leaf)
    near(y, expected)
    inputs = [tensor for tensor, wanted in zip((x, leaf), needs, strict=True) if wanted]
    weight = [torch.randn_like(y)]
    for got, wanted in zip(
        grads([y], weight, inputs), grads([expected], weight, inputs), strict=True
    ):
        near(got, wanted)


@pytest.mark.parametrize("alone", [True, False])
def test_in_place_writes_into_the_extra_input(alone):
    x, extra = torch.ones(2, 3), torch.full((2, 3), 2.0)
    chain = opfuse.Sequential(*[ops.Identity()] * (not alone), ops.AddExtraInput(in_place=True))
    y = chain(x, extra)
    assert y.data_ptr() == extra.data_ptr() and extra.eq(3).all()
    assert x.eq(1).all()
    x.requires_grad_()
    y = chain(x, extra)
    assert y.data_ptr() == extra.data_ptr() and extra.eq(4).all()
    y.sum().backward()
    assert x.grad.eq(1).all()


@pytest.mark.parametrize("view", [False, True])
def test_in_place_writes_into_a_leaf(view):
    chain, x = opfuse.Sequential(ops.AddExtraInput(in_place=True)), torch.ones(2, 3)
    leaf = torch.full((2, 3), 2.0, requires_grad=True)
    y = chain(x, leaf[:] if view else leaf)
    assert y.data_ptr() == leaf.data_ptr() and leaf.eq(3).all() and y.requires_grad
    y.mul(y).sum().backward()
    assert leaf.is_leaf and leaf.grad.eq(6).all()


def test_in_place_into_a_leaf_that_a_backward_needs_is_an_error():
    chain, x = opfuse.Sequential(ops.AddExtraInput(in_place=True)), torch.ones(2, 3)
    leaf = torch.ones(2, 3, requires_grad=True)
    used = leaf.square()
    y = chain(x, leaf)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (used + y).sum().backward()


@pytest.mark.parametrize("grad_mode", [True, False])
@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("view", [False, True])
def test_in_place_refuses_a_parameter(view, requires_grad, grad_mode):
    chain, x = opfuse.Sequential(ops.AddExtraInput(in_place=True)), torch.ones(2, 3)
    positions = torch.nn.Parameter(torch.ones(4, 3), requires_grad)
    if not view:
        positions = torch.nn.Parameter(torch.ones(2, 3), requires_grad)
    refused = pytest.raises(
        RuntimeError,
        match=r"AddExtraInput\(in_place=True\) got a Parameter, or a view of one, as extra input",
    )
    with torch.set_grad_enabled(grad_mode), refused:
        chain(x, positions[:2] if view else positions)
    assert positions.eq(1).all()


def test_in_place_on_a_tensor_that_was_saved_elsewhere_is_an_error():
    leaf = torch.ones(2, 3, requires_grad=True)
    extra = leaf.exp()  # saves its result
    y = opfuse.Sequential(ops.AddExtraInput(in_place=True))(torch.ones(2, 3), extra)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_in_place_leaves_channels_alone(near):
    linear = ops.BasicLinear(3, 3, dtype=torch.float64)
    make = ops.MakeExtraOutput().set_extra_output_channel(0, "residual", output_to_caller=False)
    add = ops.AddExtraInput(in_place=True).set_extra_input_channel(0, "residual")
    x = randn(2, 3)
    before = x.detach().clone()
    y = opfuse.Sequential(make, linear, add)(x)
    assert torch.equal(x, before)
    y.sum().backward()
    near(linear.weight.grad, torch.ones(3, 2, dtype=torch.float64) @ before)


def test_residual_through_channels(near):
    """Two nested residual branches inside one chain, one of them given to the caller too."""
    chain = opfuse.Sequential(
        ops.MakeExtraOutput().set_extra_output_channel(0, "outer"),
        ops.GELU(),
        ops.MakeExtraOutput(in_place=True).set_extra_output_channel(
            0, "inner", output_to_caller=False
        ),
        ops.Linear(4, 4, dtype=torch.float64),
        ops.AddExtraInput().set_extra_input_channel(0, "inner"),
        ops.SiLU(),
        ops.AddExtraInput().set_extra_input_channel(0, "outer"),
        ops.AddExtraInput(),
    )
    x, extra = randn(3, 4), randn(3, 4)
    outputs = chain(x, extra)
    hidden = torch.nn.functional.gelu(x, approximate="tanh")
    linear = chain[3]
    hidden = torch.nn.functional.silu(hidden @ linear.weight.T + linear.bias + hidden)
    expected = (hidden + x + extra, x * 1)
    weights = [torch.randn_like(output) for output in outputs]
    inputs = [x, extra, *chain.parameters()]
    for got, wanted in zip(
        grads(outputs, weights, inputs), grads(expected, weights, inputs), strict=True
    ):
        near(got, wanted)


def test_one_channel_read_twice(near):
    chain = opfuse.Sequential(
        ops.MakeExtraOutput().set_extra_output_channel(0, "x", output_to_caller=False),
        ops.GELU(),
        ops.AddExtraInput().set_extra_input_channel(0, "x"),
        ops.SiLU(),
        ops.AddExtraInput().set_extra_input_channel(0, "x"),
    )
    x = randn(3, 4)
    y = chain(x)
    expected = torch.nn.functional.silu(torch.nn.functional.gelu(x, approximate="tanh") + x) + x
    weight = [torch.randn_like(y)]
    near(grads([y], weight, [x])[0], grads([expected], weight, [x])[0])


def test_second_derivatives_pass_through_extra_tensors(near):
    x = randn(2, 3)
    with opfuse.options(double_backward=True):
        y, extra = opfuse.Sequential(ops.MakeExtraOutput(), ops.GELU(), ops.AddExtraInput())(x, x)
        (first,) = torch.autograd.grad((y * extra).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
        with pytest.raises(RuntimeError, match="AddExtraInput"):
            opfuse.Sequential(ops.AddExtraInput(in_place=True))(x, randn(2, 3, requires_grad=False))
    expected = ((torch.nn.functional.gelu(x, approximate="tanh") + x) * x).sum()
    (first,) = torch.autograd.grad(expected, x, create_graph=True)
    near(second, torch.autograd.grad(first.sum(), x)[0])


def test_an_extra_input_of_another_shape_is_refused():
    for shape in [(3,), (1, 3), (2, 3, 1)]:
        with pytest.raises(ValueError) as error:
            opfuse.Sequential(ops.AddExtraInput())(torch.ones(2, 3), torch.ones(shape))
        assert "AddExtraInput expected an extra input of shape (2, 3)" in str(error.value)
        assert f"got {shape}" in str(error.value)


@pytest.mark.parametrize("op", [ops.AddExtraInput, ops.MakeExtraOutput])
def test_ops_with_extras_run_in_a_fuser_only(op):
    ctx, x = opfuse.OperationContext(), torch.ones(1, 2)
    with pytest.raises(RuntimeError, match=f"{op.__name__} has extra tensors: call fuser_forward"):
        op().op_forward(ctx, x)
    with pytest.raises(RuntimeError, match=f"{op.__name__} has extra tensors: call fuser_backward"):
        op().op_backward(ctx, x)
    with pytest.raises(
        TypeError,
        match=rf"{op.__name__} expected in_place as a keyword: {op.__name__}\(in_place=True\)",
    ):
        op(True)
    assert repr(op(in_place=True)) == f"{op.__name__}(in_place=True)"
    with pytest.raises(TypeError, match="does not take the keyword argument 'unknown'"):
        op()(x, *[x] * op.num_extra_inputs, unknown=1)
