"""GroupedLinear: biases that are scaled by row, and tensors of the caller that it writes into."""

import pytest
import torch
from torch import nn

import opfuse
from opfuse import ops
from opfuse.ops import grouped
from opfuse.ops.grouped_linear import GRAD_INPUT_BUFFER_KEY, OUTPUT_BUFFER_KEY

FP32, BF16, FP64 = torch.float32, torch.bfloat16, torch.float64
SIZES = [(4, 0, 3), (0, 0, 7), (1, 5, 1), (0, 0, 0)]


@pytest.fixture(params=["loop", "kernel"])
def way(request, monkeypatch):
    if request.param == "kernel":
        monkeypatch.setattr(grouped, "_takes", lambda x, features: x.dtype in (BF16, FP32))
    return request.param


def by_loop(x, sizes, scales, params):
    rows = zip(x.split(list(sizes)), scales.split(list(sizes)), strict=True)
    return torch.cat(
        [
            nn.functional.linear(part, params[f"weight{i}"]) + params[f"bias{i}"] * scale[..., None]
            for i, (part, scale) in enumerate(rows)
        ]
    )


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("dtype", [FP32, BF16, FP64], ids=str)
@pytest.mark.parametrize("of_scales", [None, FP32])
@pytest.mark.parametrize("inner", [(), (2,)])
def test_scaled_biases_match_a_loop_over_the_groups(way, sizes, dtype, of_scales, inner):
    op = ops.GroupedLinear(3, 8, 16, dtype=dtype, scale_bias=True)
    x = torch.randn(sum(sizes), *inner, 8).to(dtype).requires_grad_()
    scales = torch.rand(sum(sizes), *inner).to(of_scales or dtype).requires_grad_()
    tensors = {"x": x, "scales": scales, **dict(op.named_parameters())}
    exact = {name: t.detach().double().requires_grad_() for name, t in tensors.items()}
    y = op(x, torch.tensor(sizes), scales)
    expected = by_loop(exact["x"], sizes, exact["scales"], exact)
    grad = torch.randn(y.shape).to(dtype)
    y.backward(grad)
    expected.backward(grad.double())
    assert y.dtype is dtype
    near = dict(rtol=0, atol={BF16: 0.1, FP32: 1e-4, FP64: 1e-4 if of_scales else 1e-12}[dtype])
    torch.testing.assert_close(y.double(), expected, **near)
    for name, tensor in tensors.items():
        assert tensor.grad.dtype is tensor.dtype
        torch.testing.assert_close(tensor.grad.double(), exact[name].grad, **near)


@pytest.mark.parametrize("frozen", [("scales",), ("bias",), ("scales", "bias"), ("weight",)])
def test_frozen_scales_and_parameters_get_no_gradient(frozen):
    op, x = ops.GroupedLinear(2, 8, 8, scale_bias=True), torch.randn(5, 8, requires_grad=True)
    scales, sizes = torch.rand(5, requires_grad="scales" not in frozen), torch.tensor([2, 3])
    for name, param in op.named_parameters():
        param.requires_grad_(not name.startswith(frozen))
    op(x, sizes, scales).sum().backward()
    assert (scales.grad is None) == ("scales" in frozen)
    for name, param in op.named_parameters():
        assert (param.grad is None) == name.startswith(frozen)


def test_scaled_biases_under_autocast_and_second_derivatives_and_compile():
    op, sizes = ops.GroupedLinear(2, 8, 8, scale_bias=True), torch.tensor([2, 3])
    x, scales = torch.randn(5, 8, requires_grad=True), torch.rand(5, requires_grad=True)
    plain = op(x, sizes, scales)
    with torch.autocast("cpu", BF16):
        y = op(x, sizes, scales)
    assert y.dtype is BF16
    torch.testing.assert_close(y.float(), plain, atol=0.05, rtol=0.05)
    with opfuse.options(double_backward=True):
        (first,) = torch.autograd.grad(op(x, sizes, scales).square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), scales)
    expected = by_loop(x, (2, 3), scales, dict(op.named_parameters()))
    (first,) = torch.autograd.grad(expected.square().sum(), x, create_graph=True)
    torch.testing.assert_close(second, torch.autograd.grad(first.sum(), scales)[0])
    chain = opfuse.Sequential(op)
    compiled = torch.compile(chain, backend="aot_eager", fullgraph=True)
    grads = [
        torch.autograd.grad(f(x, sizes, scales).sum(), [x, scales, *op.parameters()])
        for f in (chain, compiled)
    ]
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other)


def test_scales_that_cannot_be():
    op, x, sizes = (
        ops.GroupedLinear(2, 8, 8, scale_bias=True),
        torch.randn(5, 8),
        torch.tensor([2, 3]),
    )
    assert "scale_bias=True" in repr(op) and op.num_extra_inputs == 2
    with pytest.raises(ValueError, match=r"expected scales of shape \(5,\), a scale for each row"):
        op(x, sizes, torch.rand(5, 8))
    with pytest.raises(TypeError, match="expected a floating-point tensor, got torch.int64"):
        op(x, sizes, torch.ones(5, dtype=int))
    bare = ops.GroupedLinear(2, 8, 8, bias=False, scale_bias=True)  # as in Transformer Engine
    assert bare.num_extra_inputs == 1 and bare(x, sizes).shape == (5, 8)


# Buffers


def chain():
    torch.manual_seed(0)
    return opfuse.Sequential(ops.SiLU(), ops.GroupedLinear(2, 8, 16), ops.GroupedLinear(2, 16, 4))


def run(made, x, output=None, grad_input=None, at=(1, 2)):
    given = {made[at[0]]: {}, made[at[1]]: {}}
    if grad_input is not None:
        given[made[at[0]]][GRAD_INPUT_BUFFER_KEY] = grad_input
    if output is not None:
        given[made[at[1]]][OUTPUT_BUFFER_KEY] = output
    sizes = torch.tensor([2, 3])
    return made(x, sizes, sizes, op_kwargs=given)


@pytest.mark.parametrize("recipe", [None, "quantized"])
def test_buffers_get_the_numbers(recipe):
    from opfuse import testing
    from opfuse.testing.recipes import offered

    made, results = chain(), []
    output, grad_input = torch.full((5, 4), 7.0), torch.full((5, 8), 7.0)
    with offered(), opfuse.plugins.using("opfuse-testing"):
        for given in ((), (output, grad_input), (output, grad_input)):
            x = torch.randn(5, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
            made.zero_grad()
            with opfuse.autocast(bool(recipe), recipe=testing.PerTensor()):
                y = run(made, x, *given)
            if given:
                assert y.data_ptr() == output.data_ptr() and y.requires_grad
                assert not output.requires_grad  # so that it serves again
            numbers = y.detach().clone()
            y.square().sum().backward()
            results.append([numbers, x.grad.clone(), *[p.grad.clone() for p in made.parameters()]])
    for other in results[1:]:
        for one, two in zip(results[0], other, strict=True):
            assert torch.equal(one, two)


def test_the_gradient_in_the_buffer_is_that_of_the_op():
    """The op before does not write into it, though it may into gradients that are the chain's."""
    op, x = ops.GroupedLinear(2, 8, 8), torch.randn(5, 8, requires_grad=True)
    sizes, buffer = torch.tensor([2, 3]), torch.empty(5, 8)

    class Scale(ops.Identity):
        grad_input = "fresh"

        def op_forward(self, ctx, input_):
            return input_ * 3

        def op_backward(self, ctx, grad_output):
            return grad_output.mul_(3) if ctx.owns_grad_output else grad_output * 3, ()

    Scale.saved_names = ()

    class Both(opfuse.FusedOperation):
        kwarg_names = (GRAD_INPUT_BUFFER_KEY,)

        def fuser_forward(self, *args, **given):
            return self.run_separately(*args, **given)

        def fuser_backward(self, *args, **given):
            return self.run_separately_backward(*args, **given)

    both = opfuse.Sequential(Scale(), op)
    fusion = opfuse.Fusion([Scale, ops.GroupedLinear], Both, name="both")
    for fused in (False, True):
        x.grad = None
        handle = opfuse.register_forward_backward_fusion(fusion) if fused else None
        both(x, sizes, op_kwargs={op: {GRAD_INPUT_BUFFER_KEY: buffer}}).sum().backward()
        torch.testing.assert_close(x.grad, 3 * buffer)
        if handle is not None:
            handle.unregister()
    kept = x.grad.clone()
    alone = torch.randn(5, 8, requires_grad=True)
    op(alone, sizes, grad_input=buffer).sum().backward()
    buffer.zero_()
    assert alone.grad.any() and torch.equal(x.grad, kept)  # no gradient is the buffer itself


def test_what_overwrites_the_output_is_found():
    made, output = chain(), torch.empty(5, 4)
    made.append(ops.SiLU())
    y = run(made, torch.randn(5, 8, requires_grad=True), output)
    output.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("key", [OUTPUT_BUFFER_KEY, GRAD_INPUT_BUFFER_KEY])
@pytest.mark.parametrize(
    ("buffer", "error", "message"),
    [
        (torch.empty(6, 8), ValueError, r"float32 of shape \(5, 8\) on cpu, got .*\(6, 8\)"),
        (torch.empty(5, 8, dtype=BF16), ValueError, "got torch.bfloat16 of shape"),
        (torch.empty(5, 8, device="meta"), ValueError, "on meta"),
        (torch.empty(8, 5).t(), ValueError, "that is contiguous, got strides"),
        (torch.empty(5, 8, requires_grad=True), ValueError, "does not require grad"),
        ([0.0], TypeError, "expected a tensor as .*, got list"),
    ],
)
def test_buffers_that_do_not_fit(key, buffer, error, message):
    op = ops.GroupedLinear(2, 8, 8)
    with torch.no_grad(), pytest.raises(error, match=message):
        op(torch.randn(5, 8), torch.tensor([2, 3]), **{key: buffer})


def test_an_output_over_what_is_read_is_refused():
    op, sizes = ops.GroupedLinear(2, 8, 8), torch.tensor([2, 3])
    memory = torch.randn(10, 8)
    with pytest.raises(ValueError, match="shares no memory with what the op reads"):
        op(memory[:5], sizes, output=memory[4:9])
    with torch.no_grad():
        before = op(memory[:5], sizes)
        assert torch.equal(op(memory[:5], sizes, output=memory[5:]), before)
    x = memory[:5].clone().requires_grad_()
    wanted = torch.autograd.grad(op(x, sizes).square().sum(), [x, *op.parameters()])
    given = memory[:5].clone()
    leaf = given.detach().requires_grad_()  # the input's memory may take its gradient
    op(leaf, sizes, grad_input=given).square().sum().backward()
    for got, want in zip([given, *[p.grad for p in op.parameters()]], wanted, strict=True):
        torch.testing.assert_close(got, want)


def test_where_there_are_no_buffers():
    op, sizes, buffer = ops.GroupedLinear(2, 8, 8), torch.tensor([2, 3]), torch.empty(5, 8)
    x = torch.randn(5, 8, requires_grad=True)
    with opfuse.options(double_backward=True), pytest.raises(RuntimeError, match="double_backward"):
        op(x, sizes, output=buffer)
    with pytest.raises(TypeError, match="does not take the keyword argument 'out'"):
        op(x, sizes, out=buffer)


def test_a_compiled_call_with_buffers():
    """It runs with the graph broken, and is refused where it must not break."""
    op, sizes, buffer = ops.GroupedLinear(2, 8, 8), torch.tensor([2, 3]), torch.zeros(5, 8)
    x = torch.randn(5, 8)

    def run(x):
        return op(x, sizes, output=buffer)

    y = torch.compile(run, backend="aot_eager")(x)
    assert torch.equal(y, op(x, sizes)) and torch.equal(buffer, y)
    torch._dynamo.reset()
    with pytest.raises(Exception, match="writes into no tensor of the caller|Unsupported|break"):
        torch.compile(run, backend="aot_eager", fullgraph=True)(x)
