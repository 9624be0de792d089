"""GroupedLinear: a loop over groups in fp64 as reference, all three ways of multiplying, and a mixture of experts."""

import copy
import re

import pytest
import torch
from torch import nn

import opfuse
from opfuse import ops
from opfuse.ops import grouped

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def by_loop(x, sizes, params):
    """One ``torch.nn.functional.linear`` per group; ``params`` by name."""
    parts = []
    for i, part in enumerate(x.split(sizes.tolist())):
        parts.append(nn.functional.linear(part, params[f"weight{i}"], params.get(f"bias{i}")))
    return torch.cat(parts)


@pytest.fixture(params=["loop", "kernel"])
def way(request, monkeypatch):
    """Which way is taken; on the CPU torch's grouped product loops itself, but takes what the GPU takes."""
    if request.param == "kernel":
        monkeypatch.setattr(grouped, "_takes", takes)
    return request.param


def takes(x, features):
    whole = not any(size % 8 or not size for size in features)
    return whole and x.dtype in (BF16, FP16, FP32)


def assert_near_largest(pairs, dtype, roundings=4):
    """Both of each pair differ by no more than some roundings of the largest number of the second.

    In a wide dtype also the sums are rounded, of 100 numbers and more.
    """
    roundings *= 16 if dtype.itemsize > 2 else 1
    for got, wanted in pairs:
        assert (got is None) == (wanted is None)
        if wanted is not None:
            assert got.shape == wanted.shape
            largest = wanted.abs().max().item() if wanted.numel() else 0.0
            allowed = roundings * torch.finfo(dtype).eps * largest
            torch.testing.assert_close(got.double(), wanted.double(), atol=allowed, rtol=0)


def check(op, x, sizes, autocast=None):
    """Values and gradients against the reference in fp64, on the same rounded values."""
    dtype, given = autocast or x.dtype, x.detach().requires_grad_(x.requires_grad)
    tensors = {"x": given, **dict(op.named_parameters())}
    exact = {
        name: t.detach().to(dtype).double().requires_grad_(t.requires_grad)
        for name, t in tensors.items()
    }
    op.zero_grad()
    with torch.autocast("cpu", dtype=autocast or BF16, enabled=autocast is not None):
        y = opfuse.Sequential(op)(given, sizes)
    expected = by_loop(exact["x"], sizes, exact)
    assert y.dtype is dtype and y.requires_grad == expected.requires_grad
    assert_near_largest([(y, expected)], dtype)
    if y.requires_grad:
        grad = torch.randn(y.shape, dtype=FP64).to(dtype)
        y.backward(grad)
        expected.backward(grad.double())
        for name, tensor in tensors.items():
            assert tensor.grad is None or tensor.grad.dtype is tensor.dtype
            wider = max(dtype, tensor.dtype, key=lambda each: torch.finfo(each).eps)
            assert_near_largest([(tensor.grad, exact[name].grad)], wider)
    return y


SIZES = {
    "even": (2, 2, 2, 2),
    "ragged": (1, 5, 3, 118),
    "empty groups": (0, 7, 0, 2),
    "all in one": (0, 0, 9, 0),
    "one row": (0, 1, 0, 0),
    "nothing": (0, 0, 0, 0),
}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16, FP64], ids=str)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_values_and_gradients(way, sizes, dtype, bias):
    op = ops.GroupedLinear(4, 16, 24, bias=bias, dtype=dtype)
    x = torch.randn(sum(sizes), 16, dtype=dtype, requires_grad=True)
    check(op, x, torch.tensor(sizes))


@pytest.mark.parametrize("features", [(5, 3), (0, 3), (5, 0), (1, 1), (8, 12)])
@pytest.mark.parametrize("count", [1, 3])
def test_any_width_and_number_of_groups_works(way, features, count):
    with torch.random.fork_rng():
        op = ops.GroupedLinear(count, *features)
    check(op, torch.randn(3 * count, features[0], requires_grad=True), torch.full((count,), 3))


@pytest.mark.parametrize("shape", [(7, 2, 8), (7, 2, 3, 8), (7, 0, 8), (7, 1, 8)])
def test_groups_are_of_the_first_dimension(way, shape):
    check(
        ops.GroupedLinear(3, 8, 16), torch.randn(shape, requires_grad=True), torch.tensor([4, 0, 3])
    )


LAYOUTS = {
    "transposed": lambda: torch.randn(8, 6).t(),
    "sliced": lambda: torch.randn(8, 11)[1:7, 2:10],
    "expanded": lambda: torch.randn(1, 8).expand(6, 8),
    "a row of another stride": lambda: torch.randn(1, 11)[:, 1:9].expand(6, 8),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_inputs_and_gradients_of_any_layout_work(way, layout):
    op, x = ops.GroupedLinear(2, 8, 8), LAYOUTS[layout]().requires_grad_()
    check(op, x, torch.tensor([4, 2]))
    opfuse.Sequential(op)(x, torch.tensor([4, 2])).sum().backward()  # an expanded gradient


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_split_sizes_of_every_integer_dtype(way, dtype):
    x = torch.randn(100, 8, requires_grad=True)
    check(ops.GroupedLinear(2, 8, 8), x, torch.tensor([60, 40], dtype=dtype))


@pytest.mark.parametrize(
    "frozen", [(), ("weight0",), ("weight0", "weight1"), ("bias1",), ("bias0", "bias1")]
)
@pytest.mark.parametrize("needs_input", [True, False])
def test_frozen_parameters_get_no_gradient(way, frozen, needs_input):
    op = ops.GroupedLinear(2, 8, 8)
    for name in frozen:
        op.get_parameter(name).requires_grad_(False)
    check(op, torch.randn(5, 8, requires_grad=needs_input), torch.tensor([2, 3]))
    op.requires_grad_(False)
    check(op, torch.randn(5, 8, requires_grad=needs_input), torch.tensor([2, 3]))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_no_graph_is_recorded(way, mode):
    with mode():
        y = check(ops.GroupedLinear(2, 8, 8), torch.randn(5, 8), torch.tensor([2, 3]))
    assert y.grad_fn is None


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("of_input", [FP32, BF16])
def test_autocast_gives_the_dtype_of_a_linear_layer(way, dtype, of_input):
    x = torch.randn(5, 8, dtype=of_input, requires_grad=True)
    check(ops.GroupedLinear(2, 8, 16), x, torch.tensor([2, 3]), autocast=dtype)


def test_only_what_the_backward_reads_is_saved(call, way):
    op, x, sizes = ops.GroupedLinear(2, 8, 8), torch.randn(5, 8), torch.tensor([2, 3])
    quantized = "input0", "input1"  # under a recipe, in place of the input
    assert op.saved_names == ("input", "split_sizes", "weight0", "weight1", *quantized)
    params = [p.detach().data_ptr() for p in op.parameters()]
    saved = call(op, x, sizes).saved
    assert saved[0] is x and saved[1] is sizes
    assert [w.data_ptr() for w in saved[2:4]] == params[:2]  # no copies
    saved = call(op, x, sizes, input_requires_grad=False).saved
    assert saved[0] is x and saved[1] is sizes and saved[2:] == (None,) * 4
    saved = call(op, x, sizes, param_requires_grad=(False, False, True, False)).saved
    assert saved[0] is None and saved[2] is not None
    ran = call(op, x, sizes, param_requires_grad=(False, True, True, False))
    dx, grads, (of_sizes,) = ran.backward(torch.ones(5, 8))
    assert dx.shape == (5, 8) and of_sizes is None
    assert [grad is None for grad in grads] == [True, False, False, True]


def test_changes_between_forward_and_backward_are_seen():
    x, sizes = torch.randn(5, 8, requires_grad=True), torch.tensor([2, 3])
    op = ops.GroupedLinear(2, 8, 8)
    for change in (sizes, op.weight0.data):
        y = op(x, sizes)
        with torch.no_grad():
            (op.weight0 if change is not sizes else sizes).add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
        sizes.copy_(torch.tensor([2, 3]))


# What is refused


@pytest.mark.parametrize("sizes", [(2, 2), (3, 3), (6, -1), (0, 0)])
@pytest.mark.parametrize("compiled", [False, True])
def test_sizes_that_do_not_sum_up(sizes, compiled):
    op, x = ops.GroupedLinear(2, 4, 4), torch.randn(5, 4, requires_grad=True)
    run = torch.compile(op, fullgraph=True, backend="aot_eager") if compiled else op
    message = (
        "GroupedLinear expected split_sizes of at least 0 that sum up to the rows of its input, "
        f"5, got {list(sizes)}"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        run(x, torch.tensor(sizes))


@pytest.mark.parametrize("sizes", [(2, 2), (3, 3), (6, -1)])
def test_sizes_that_the_device_looks_at(sizes, monkeypatch):
    monkeypatch.setattr(grouped, "_takes", takes)
    with pytest.raises(RuntimeError, match="expected split_sizes of at least 0 that sum up"):
        ops.GroupedLinear(2, 8, 8)(torch.randn(5, 8), torch.tensor(sizes))


def test_the_kernel_never_reads_sizes_on_the_host(monkeypatch):
    monkeypatch.setattr(grouped, "_takes", takes)

    class Unread(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            assert func is not torch.ops.aten._local_scalar_dense.default
            return func(*args, **(kwargs or {}))

    for bias in (True, False):
        op, x = ops.GroupedLinear(2, 8, 8, bias=bias), torch.randn(5, 8, requires_grad=True)
        chain = opfuse.Sequential(op)
        monkeypatch.setattr(torch.Tensor, "tolist", lambda self: pytest.fail("read on the host"))
        with Unread():
            chain(x, torch.tensor([2, 3])).sum().backward()


@pytest.mark.parametrize(
    ("sizes", "error", "message"),
    [
        (torch.tensor([5.0, 0.0]), TypeError, "expected an integer tensor, got torch.float32"),
        (torch.tensor([True, False]), TypeError, "expected an integer tensor, got torch.bool"),
        (torch.tensor([5]), ValueError, "expected split_sizes of shape (2,), got (1,)"),
        (torch.tensor([[5, 0]]), ValueError, "expected split_sizes of shape (2,), got (1, 2)"),
        (torch.tensor(5), ValueError, "expected split_sizes of shape (2,), got ()"),
        (torch.zeros(2, dtype=int, device="meta"), ValueError, "is on meta, the input is on cpu"),
        ([2, 3], TypeError, "expected tensors as extra inputs, got list"),
    ],
)
def test_split_sizes_that_cannot_be(sizes, error, message):
    op, x = ops.GroupedLinear(2, 4, 4), torch.randn(5, 4)
    with pytest.raises(error, match=re.escape(message)):
        op(x, sizes)


def test_inputs_that_cannot_be(call):
    op, sizes = ops.GroupedLinear(2, 4, 4), torch.tensor([2, 3])
    with pytest.raises(ValueError, match="expected 4 features in the last dimension, got shape"):
        op(torch.randn(5, 3), sizes)
    with pytest.raises(ValueError, match=r"at least 2 dimensions, got shape \(4,\)"):
        op(torch.randn(4), sizes)
    with pytest.raises(TypeError, match="expected torch.float32, the dtype of its weight0"):
        op(torch.randn(5, 4, dtype=FP64), sizes)
    with pytest.raises(TypeError, match="split_sizes of GroupedLinear expected an integer tensor"):
        call(op, torch.randn(5, 4), sizes.float())


@pytest.mark.parametrize(
    "name", ["single_grouped_weight", "single_grouped_bias", "delay_wgrad_compute"]
)
def test_arguments_that_come_later(name):
    with pytest.raises(
        NotImplementedError, match=f"{name}=True is not supported, .* later release"
    ):
        ops.GroupedLinear(2, 4, 4, **{name: True})
    ops.GroupedLinear(2, 4, 4, **{name: False})
    with pytest.raises(TypeError, match="expected a function as rng_state_tracker_function, got 3"):
        ops.GroupedLinear(2, 4, 4, rng_state_tracker_function=3)


def test_numbers_that_cannot_be():
    with pytest.raises(ValueError, match="expected num_groups of at least 1, got 0"):
        ops.GroupedLinear(0, 4, 4)
    with pytest.raises(TypeError, match="expected a whole number as num_groups, got 2.0"):
        ops.GroupedLinear(2.0, 4, 4)
    with pytest.raises(ValueError, match="expected out_features of at least 0, got -1"):
        ops.GroupedLinear(2, 4, -1)


# The module


def test_parameters_and_checkpoints_have_te_names():
    op = ops.GroupedLinear(2, 4, 3, dtype=FP64)
    names = ["weight0", "weight1", "bias0", "bias1"]
    assert [*op.state_dict()] == names == list(op.param_names)
    assert repr(op) == "GroupedLinear(num_groups=2, in_features=4, out_features=3, has_bias=True)"
    assert {p.dtype for p in op.parameters()} == {FP64}
    bare = ops.GroupedLinear(2, 4, 3, bias=False)
    assert bare.bias0 is None and not bare.has_bias and list(bare.state_dict()) == names[:2]
    saved = {**op.state_dict(), "_extra_state": torch.empty(0, dtype=torch.uint8)}
    ops.GroupedLinear(2, 4, 3, dtype=FP64).load_state_dict(saved)  # as Transformer Engine writes it
    assert ops.GroupedLinear(2, 4, 3, device="meta").weight0.is_meta
    twin = copy.deepcopy(op)
    assert twin.weight0 is not op.weight0 and torch.equal(twin.weight0, op.weight0)


def test_initial_values_are_those_of_a_linear_layer():
    torch.manual_seed(0)
    op = ops.GroupedLinear(2, 64, 128)
    for param in op.parameters():
        assert 0.9 / 8 < param.abs().max() <= 1 / 8
    before = op.weight1.clone()
    op.reset_parameters()
    assert not torch.equal(op.weight1, before)


def test_main_grad_accumulates_for_each_group():
    op = ops.GroupedLinear(2, 4, 3, accumulate_into_main_grad=True)
    plain = copy.deepcopy(op)
    plain.accumulates_grads = False
    x, sizes = torch.randn(5, 4), torch.tensor([2, 3])
    with pytest.raises(
        RuntimeError, match=r"GroupedLinear\(accumulate_into_main_grad=True\) expected"
    ):
        op(x, sizes).sum().backward()
    for weight in (op.weight0, op.weight1):
        weight.main_grad = torch.ones_like(weight)
    op.zero_grad()
    op(x, sizes).sum().backward()
    plain(x, sizes).sum().backward()
    for i in range(2):
        weight = op.get_parameter(f"weight{i}")
        assert weight.grad is None
        torch.testing.assert_close(weight.main_grad, 1 + plain.get_parameter(f"weight{i}").grad)
        torch.testing.assert_close(
            op.get_parameter(f"bias{i}").grad, plain.get_parameter(f"bias{i}").grad
        )


def test_a_parametrized_weight_trains_its_originals():
    op = ops.GroupedLinear(2, 4, 4)
    nn.utils.parametrizations.weight_norm(op, "weight1")
    x = torch.randn(5, 4, requires_grad=True)
    op(x, torch.tensor([2, 3])).square().sum().backward()
    expected = by_loop(x, torch.tensor([2, 3]), {n: getattr(op, n) for n in op.param_names})
    originals = [p for name, p in op.named_parameters() if "original" in name]
    wanted = torch.autograd.grad(expected.square().sum(), originals)
    for param, grad in zip(originals, wanted, strict=True):
        torch.testing.assert_close(param.grad, grad)


def test_second_derivatives_and_transforms(near, way):
    op = ops.GroupedLinear(2, 8, 8)
    x, sizes = torch.randn(5, 8, requires_grad=True), torch.tensor([2, 3])
    params = dict(op.named_parameters())
    results = []
    for call in (lambda: op(x, sizes), lambda: by_loop(x, sizes, params)):
        with opfuse.options(double_backward=True):
            y = call()
        (first,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        results.append(torch.autograd.grad(first.square().sum(), [x, op.weight0]))
    for one, other in zip(*results, strict=True):
        near(one, other, gemm=True)
    got = torch.func.grad(lambda x: op(x, sizes).sum())(x.detach())
    near(got, torch.autograd.grad(by_loop(x, sizes, params).sum(), x)[0], gemm=True)


def test_meta_and_fake_tensors_give_the_shapes():
    from torch._subclasses.fake_tensor import FakeTensorMode

    op = ops.GroupedLinear(2, 4, 3, device="meta")
    x = torch.empty(5, 4, device="meta", requires_grad=True)
    y = op(x, torch.empty(2, device="meta", dtype=int))
    y.sum().backward()
    assert y.shape == (5, 3) and x.grad.shape == (5, 4) and op.weight1.grad.shape == (3, 4)
    with FakeTensorMode():
        op, x = ops.GroupedLinear(2, 4, 3), torch.empty(5, 4)
        op(x, torch.tensor([2, 3])).sum().backward()
        assert op.weight1.grad.shape == (3, 4) and op.bias0.grad.shape == (3,)


def test_the_custom_operators_are_as_torch_wants_them():
    x, dy, sizes = torch.randn(5, 4), torch.randn(5, 3), torch.tensor([2, 3])
    weights, biases = [torch.randn(3, 4)] * 2, [torch.randn(3)] * 2
    space = torch.ops.opfuse
    torch.library.opcheck(space.grouped_products.default, (sizes, x, weights, biases))
    torch.library.opcheck(space.grouped_products.default, (sizes, x, weights, []))
    torch.library.opcheck(space.grouped_weight_grads.default, (sizes, dy, x, [True, False]))
    torch.library.opcheck(space.grouped_row_sums.default, (sizes, dy, [False, True]))


@pytest.mark.costly(3)
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_a_compiled_chain_takes_any_split(way, dtype, autocast, monkeypatch):
    if way == "kernel":  # torch traces it for bf16 alone
        monkeypatch.setattr(grouped, "_takes", lambda x, features: x.dtype is BF16)
    chain = opfuse.Sequential(ops.SiLU(), ops.GroupedLinear(3, 8, 16, dtype=dtype))
    compiled = torch.compile(chain, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in ([2, 3, 4], [0, 5, 2], [2, 1, 1]):
        x, sizes = torch.randn(sum(rows), 8, dtype=dtype), torch.tensor(rows)
        results = []
        for function in (chain, compiled):
            given = x.clone().requires_grad_()
            with torch.autocast("cpu", BF16, enabled=autocast):
                y = function(given, sizes)
            grad = torch.autograd.grad(y.sum(), [given, *chain.parameters()])
            results.append((y, *grad))
        for one, other in zip(*results, strict=True):
            assert one.dtype is other.dtype
            torch.testing.assert_close(one, other)


# A mixture of experts


def experts(*, named=True, **options):
    first = ops.GroupedLinear(3, 8, 32, **options)
    second = ops.GroupedLinear(3, 16, 8, **options)
    for op in (first, second) if named else ():
        op.set_extra_input_name(0, "split_sizes")
    return opfuse.Sequential(first, ops.ScaledSwiGLU(), second)


def experts_by_loop(x, sizes, probs, params):
    first, second = (
        {n.partition(".")[2]: p for n, p in params.items() if n.startswith(f"{k}.")} for k in (0, 2)
    )
    gate, up = by_loop(x, sizes, first).chunk(2, -1)
    return by_loop(nn.functional.silu(gate) * up * probs.unsqueeze(-1), sizes, second)


@pytest.mark.parametrize("sizes", [(4, 0, 3), (1, 5, 1), (0, 0, 7), (0, 0, 0)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("dtype", "hooked"), [(FP64, None), (FP64, 1), (FP64, 2), (FP32, None), (BF16, None)]
)
def test_experts_are_one_chain(way, sizes, bias, dtype, hooked):
    chain, split_sizes = experts(bias=bias, dtype=dtype), torch.tensor(sizes)
    x = torch.randn(sum(sizes), 8, dtype=dtype, requires_grad=True)
    probs = torch.rand(sum(sizes), dtype=dtype, requires_grad=True)
    (fuser,) = chain._module_groups
    assert fuser.num_extra_inputs == 2
    if hooked is not None:
        chain[hooked].register_forward_hook(lambda *args: None)
    y = chain(x, split_sizes, probs)
    grad = torch.randn(y.shape, dtype=FP64).to(dtype)
    y.backward(grad)
    exact = [t.detach().double().requires_grad_() for t in (x, probs, *chain.parameters())]
    params = dict(zip(dict(chain.named_parameters()), exact[2:], strict=True))
    expected = experts_by_loop(exact[0], split_sizes, exact[1], params)
    expected.backward(grad.double())
    pairs = [(y, expected)]
    pairs += [
        (got.grad, wanted.grad)
        for got, wanted in zip((x, probs, *chain.parameters()), exact, strict=True)
    ]
    assert_near_largest(pairs, dtype, roundings=8)


def test_experts_with_two_tensors_of_split_sizes(near):
    """Without names each has its own."""
    chain = experts(named=False)
    x, probs, sizes = torch.randn(7, 8), torch.rand(7), torch.tensor([4, 0, 3])
    named = experts()
    named.load_state_dict(chain.state_dict())
    near(chain(x, sizes, probs, sizes), named(x, sizes, probs))


def test_the_kit_tells_a_fusion_that_takes_one_for_the_other():
    """A fusion over experts that reads the first split sizes only is right where they are shared."""
    from opfuse import testing
    from opfuse.testing.checks.values import gradients
    from opfuse.testing.running import Failure

    class First(opfuse.FusedOperation):
        def fuser_forward(self, basic_op_ctxs, input_, *, basic_op_extra_inputs, **given):
            (first,), scales, _ = basic_op_extra_inputs
            extras = [(first,), scales, (first,)]
            return self.run_separately(basic_op_ctxs, input_, basic_op_extra_inputs=extras, **given)

    def share(matched, env):
        names = {op.extra_input_names[0] for op in matched[::2]}
        return "two split sizes" if len(names) > 1 or None in names else True

    pattern = ops.GroupedLinear, ops.ScaledSwiGLU, ops.GroupedLinear
    for when in (share, None):
        fusion = opfuse.Fusion(pattern, First, when, name="experts")
        made = testing.make_chains(testing.Subject("test", "forward", fusion))
        gradients(made.plain[0])
        apart = [case for case in made.all if not case.shared]
        assert bool(apart) == (when is None)
        for case in apart:
            with pytest.raises(Failure, match="is wrong by|raised"):
                gradients(case)


@pytest.mark.parametrize(("name", "shape"), [("weight1", (1, 4)), ("bias0", (1,))])
def test_a_parameter_that_got_another_shape_is_refused(name, shape):
    op = ops.GroupedLinear(2, 4, 4)
    setattr(op, name, torch.nn.Parameter(torch.ones(shape)))
    with pytest.raises(ValueError, match=f"GroupedLinear expected {name} of shape .* as when it"):
        op(torch.randn(3, 4), torch.tensor([1, 2]))


class Experts(nn.Module):
    def __init__(self, dtype=FP32, count=4):
        super().__init__()
        self.matrices = nn.Parameter(torch.randn(count, 16, 8, dtype=dtype))
        self.turned = nn.Parameter(torch.randn(count, 8, 16, dtype=dtype))
        self.biases = nn.Parameter(torch.randn(count, 16, dtype=dtype))


@pytest.mark.parametrize("dtype", [FP32, BF16, FP64], ids=str)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_reading_one_parameter_of_all_groups(way, sizes, dtype):
    module = Experts(dtype)
    op = ops.GroupedLinear.reading(module, "matrices", name="experts")
    assert not dict(op.named_parameters()) and not op.state_dict() and not op.has_bias
    assert (op.num_groups, op.in_features, op.out_features, op.name) == (4, 8, 16, "experts")
    x = torch.randn(sum(sizes), 8, dtype=dtype, requires_grad=True)
    y = opfuse.Sequential(op)(x, torch.tensor(sizes))
    grad = torch.randn(y.shape, dtype=FP64).to(dtype)
    y.backward(grad)
    exact = [t.detach().double().requires_grad_() for t in (x, module.matrices)]
    expected = by_loop(
        exact[0], torch.tensor(sizes), {f"weight{i}": w for i, w in enumerate(exact[1])}
    )
    expected.backward(grad.double())
    pairs = [(y, expected), (x.grad, exact[0].grad), (module.matrices.grad, exact[1].grad)]
    assert_near_largest(pairs, dtype)
    module.matrices.requires_grad_(False)
    (opfuse.Sequential(op)(x, torch.tensor(sizes))).sum().backward()


@pytest.mark.parametrize("scales_bias", [False, True])
@pytest.mark.parametrize("frozen", ["", "turned", "biases"])
@pytest.mark.parametrize("dtype", [FP32, BF16, FP64], ids=str)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_reading_transposed_matrices_and_biases(way, sizes, dtype, frozen, scales_bias):
    module = Experts(dtype)
    given = {"transposed": True, "scale_bias": scales_bias}
    op = ops.GroupedLinear.reading(module, "turned", "biases", **given)
    assert op.has_bias and op.scales_bias == scales_bias and not op.state_dict()
    assert (op.num_groups, op.in_features, op.out_features) == (4, 8, 16)
    if frozen:
        getattr(module, frozen).requires_grad_(False)
    x = torch.randn(sum(sizes), 8, dtype=dtype, requires_grad=True)
    scales = torch.rand(len(x), dtype=dtype, requires_grad=True)
    extras = [scales] if scales_bias else []
    y = opfuse.Sequential(op)(x, torch.tensor(sizes), *extras)
    grad = torch.randn(y.shape, dtype=FP64).to(dtype)
    y.backward(grad)
    leaves = x, module.turned, module.biases, *extras
    exact = [t.detach().double().requires_grad_(t.requires_grad) for t in leaves]
    params = {f"weight{i}": w.t() for i, w in enumerate(exact[1])}
    expected = by_loop(exact[0], torch.tensor(sizes), params)
    of_rows = exact[2].repeat_interleave(torch.tensor(sizes), 0)
    expected = expected + (of_rows * exact[3][:, None] if scales_bias else of_rows)
    expected.backward(grad.double())
    pairs = [(y, expected), *[(a.grad, b.grad) for a, b in zip(leaves, exact, strict=True)]]
    assert_near_largest(pairs, dtype)


def test_reading_follows_the_module(way):
    module, sizes = Experts(), torch.tensor([1, 2, 0, 3])
    chain = opfuse.Sequential(ops.GroupedLinear.reading(module, "matrices"))
    both = copy.deepcopy(nn.ModuleList([module, chain]))
    x = torch.randn(6, 8)
    before = both[1](x, sizes)
    module.matrices = nn.Parameter(2 * module.matrices.detach())
    torch.testing.assert_close(chain(x, sizes), 2 * before)
    torch.testing.assert_close(both[1](x, sizes), before)
    with torch.autocast("cpu", BF16):
        assert chain(x, sizes).dtype is BF16
    module.matrices = nn.Parameter(torch.randn(4, 8, 8))
    with pytest.raises(ValueError, match="shape"):
        chain(x, sizes)


def test_second_derivatives_reach_a_weight_that_is_read():
    module, sizes = Experts(FP64), torch.tensor([1, 2, 0, 3])
    chain = opfuse.Sequential(ops.GroupedLinear.reading(module, "matrices"))
    x = torch.randn(6, 8, dtype=FP64, requires_grad=True)

    with opfuse.options(double_backward=True):
        y = chain(x, sizes)
    (dx,) = torch.autograd.grad(y.pow(2).sum(), x, create_graph=True)
    dx.pow(2).sum().backward()
    assert module.matrices.grad is not None and module.matrices.grad[2].abs().sum() == 0


@pytest.mark.parametrize(
    ("name", "error"), [("nothing", AttributeError), ("flat", ValueError), ("__doc__", TypeError)]
)
def test_what_cannot_be_read(name, error):
    module = Experts()
    module.flat = nn.Parameter(torch.randn(4, 4))
    with pytest.raises(error, match="GroupedLinear.reading expected"):
        ops.GroupedLinear.reading(module, name)
    with pytest.raises(error, match="GroupedLinear.reading expected"):
        ops.GroupedLinear.reading(module, "matrices", name)
    with pytest.raises(ValueError, match="leave out accumulate_into_main_grad"):
        flags = {"transposed": True, "accumulate_into_main_grad": True}
        ops.GroupedLinear.reading(module, "turned", **flags)


def test_ends_that_32_bits_do_not_hold_are_not_used(monkeypatch):
    monkeypatch.setattr(ops.grouped, "_takes", lambda x, features: True)
    sizes = torch.empty(2, dtype=torch.int64, device="meta")
    monkeypatch.setattr(torch, "_assert_async", lambda *_: None)
    for rows in (2**31 - 1, 2**31):
        x = torch.empty(rows, 16, dtype=torch.bfloat16, device="meta")
        found = ops.grouped.groups_of(x, sizes, (16, 16))
        assert (found.ends is not None) == (rows < 2**31)
