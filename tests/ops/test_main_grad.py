"""``accumulate_into_main_grad``: where the gradient of a weight goes, and what autograd gets instead."""

import copy

import fusing
import pytest
import torch
import torch._dynamo.compiled_autograd
from adding import Library, asked_again  # noqa: F401
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import opfuse
from opfuse import ops


def with_main_grad(chain, dtype=torch.float32):
    """The chain, after giving every weight that accumulates a ``main_grad`` of its own."""
    for op in chain.modules():
        if isinstance(op, ops.BasicLinear):
            op.weight.main_grad = torch.zeros(op.weight.shape, dtype=dtype)
    return chain


def linear(*sizes, **kwargs):
    return ops.Linear(*sizes, accumulate_into_main_grad=True, **kwargs)


def close(got, expected, dtype):
    """Compare with fp64, with a few roundings of ``dtype`` for a sum of two gradients of a few rows."""
    if got.numel():
        atol = 4 * torch.finfo(dtype).eps * expected.abs().max().clamp(min=1).item()
        torch.testing.assert_close(got.double(), expected, rtol=0, atol=atol)


DTYPES = [
    (torch.float64, torch.float64, None),
    (torch.float32, torch.float32, None),
    (torch.bfloat16, torch.float32, None),
    (torch.float16, torch.float32, None),
    (torch.bfloat16, torch.bfloat16, None),
    (torch.float32, torch.bfloat16, None),
    (torch.float32, torch.float32, torch.bfloat16),
]


@pytest.mark.parametrize("build", [ops.Linear, ops.BasicLinear])
@pytest.mark.parametrize("shape", [(5,), (3, 5), (2, 3, 5), (0, 5)], ids=str)
@pytest.mark.parametrize(("dtype", "main", "autocast"), DTYPES, ids=str)
def test_the_gradient_goes_to_main_grad(build, shape, dtype, main, autocast):
    op = with_main_grad(build(5, 4, accumulate_into_main_grad=True, dtype=dtype), main)
    plain = nn.Linear(5, 4, bias=build is ops.Linear, dtype=torch.float64)
    plain.load_state_dict({name: value.double() for name, value in op.state_dict().items()})
    coarsest = max((dtype, main, autocast or main), key=lambda d: torch.finfo(d).eps)
    for _ in range(2):
        x = torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_()
        exact = x.detach().double().requires_grad_()
        with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
            y = opfuse.Sequential(op)(x)
        grad = torch.randn(y.shape, dtype=torch.float64).to(y.dtype)
        y.backward(grad)
        plain(exact).backward(grad.double())
        close(x.grad, exact.grad, coarsest)
    assert op.weight.grad is None and op.weight.main_grad.dtype is main
    close(op.weight.main_grad, plain.weight.grad, coarsest)
    if build is ops.Linear:
        close(op.bias.grad, plain.bias.grad, coarsest)


@pytest.mark.parametrize("variant", fusing.VARIANTS)
def test_whatever_fusion_computes_it(near, variant):
    chain = with_main_grad(
        opfuse.Sequential(linear(6, 5), ops.GELU(), linear(5, 5), ops.Linear(5, 4))
    )
    x, grads = torch.randn(3, 6), []
    with fusing.fusions(variant):
        for _ in range(2):
            chain(x).square().sum().backward()
            grads.append([chain[i].weight.main_grad.clone() for i in (0, 2)])
    plain = nn.Sequential(nn.Linear(6, 5), nn.GELU("tanh"), nn.Linear(5, 5), nn.Linear(5, 4))
    plain.load_state_dict(chain.state_dict())
    plain(x).square().sum().backward()
    for once, twice, i in zip(*grads, (0, 2), strict=True):
        near(once, plain[i].weight.grad, gemm=True)
        near(twice, 2 * plain[i].weight.grad, gemm=True)
        assert chain[i].weight.grad is None
    near(chain[3].weight.grad, 2 * plain[3].weight.grad, gemm=True)


@pytest.mark.parametrize("adds_zeros", [True, False])
def test_hooks_of_megatron_run_and_count_nothing_twice(near, adds_zeros):
    op = with_main_grad(linear(6, 5))
    op.weight.grad_added_to_main_grad, op.weight.zero_out_wgrad, ran = False, adds_zeros, []

    def hook(param):
        ran.append(param)
        assert param.grad is not None
        if not param.grad_added_to_main_grad or param.zero_out_wgrad:
            param.main_grad.add_(param.grad)
        param.grad = None

    op.weight.register_post_accumulate_grad_hook(hook)
    x = torch.randn(3, 6)
    op(x).sum().backward()
    assert ran == [op.weight] and op.weight.grad_added_to_main_grad
    near(op.weight.main_grad, torch.ones(5, 3) @ x, gemm=True)


def test_what_autograd_gets_is_zeros():
    op = with_main_grad(linear(6, 5, dtype=torch.bfloat16))
    op.weight.grad_added_to_main_grad = False
    for _ in range(2):
        op(torch.randn(3, 6, dtype=torch.bfloat16)).sum().backward()
    assert op.weight.grad.dtype is torch.bfloat16 and not op.weight.grad.any()
    assert op.weight.main_grad.any()


def test_main_grad_can_be_overwritten(near):
    op, x = with_main_grad(linear(6, 5)), torch.randn(3, 6)
    op.weight.main_grad.fill_(7.0)
    op.weight.overwrite_main_grad = True
    op(x).sum().backward()
    near(op.weight.main_grad, torch.ones(5, 3) @ x, gemm=True)
    assert op.weight.grad is None


class Declining(ops.BasicLinear):
    """A linear whose product adds to no sum."""

    def grad_sum(self, params):
        return None


@pytest.mark.parametrize("adds", [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize("chains", [1, 2])
def test_the_first_gradient_of_a_backward_replaces_and_further_ones_are_added(near, chains, adds):
    kinds = [ops.BasicLinear if each else Declining for each in adds]
    one, two = (kind(4, 4, accumulate_into_main_grad=True) for kind in kinds)
    two.weight = one.weight
    with_main_grad(one).weight.main_grad.fill_(torch.nan)
    one.weight.overwrite_main_grad = True
    models = [opfuse.Sequential(one, two)] if chains == 1 else [*map(opfuse.Sequential, (one, two))]
    for grad_added in (False, True):  # whether hooks run or not
        if grad_added:
            one.weight.grad_added_to_main_grad = False
        x = torch.randn(3, 4)
        weight = one.weight.detach().clone().requires_grad_()
        nn.Sequential(*models)(x).square().sum().backward()
        (x @ weight.T @ weight.T).square().sum().backward()
        near(one.weight.main_grad, weight.grad, gemm=True)


def test_a_weight_of_several_groups_is_replaced_once(near):
    op = ops.GroupedLinear(2, 4, 4, bias=False, accumulate_into_main_grad=True)
    op.weight1 = op.weight0
    op.weight0.main_grad, op.weight0.overwrite_main_grad = torch.full((4, 4), torch.nan), True
    x, dy = torch.randn(5, 4), torch.randn(5, 4)
    for _ in range(2):
        op(x, torch.tensor([2, 3])).backward(dy)
        near(op.weight0.main_grad, dy.T @ x, gemm=True)


def test_a_copy_of_a_weight_is_replaced_in_its_own_backward(near):
    op, x = with_main_grad(linear(4, 4, bias=False)), torch.randn(3, 4)
    op.weight.overwrite_main_grad = True
    other = copy.deepcopy(op)
    other.weight.main_grad, other.weight.overwrite_main_grad = torch.full((4, 4), 7.0), True
    op(other(x)).sum().backward()
    near(other.weight.main_grad, (torch.ones(3, 4) @ op.weight.detach()).T @ x, gemm=True)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_autograd_replaces_main_grad_once_in_a_backward(near):
    op, x = with_main_grad(linear(4, 4, bias=False)), torch.randn(3, 4)
    op.weight.overwrite_main_grad, op.weight.grad_added_to_main_grad = True, False
    weight = op.weight.detach().requires_grad_()
    (x @ weight.T @ weight.T).sum().backward()
    for _ in range(3):
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
            op(op(x)).sum().backward()
        near(op.weight.main_grad, weight.grad, gemm=True)


def test_megatron_fsdp_tells_where_main_grad_is(near):
    op, x, buffer = linear(6, 5), torch.randn(3, 6), torch.zeros(5, 6)
    op.weight.__fsdp_param__, op.weight.get_main_grad = True, lambda: buffer
    op(x).sum().backward()
    near(buffer, torch.ones(5, 3) @ x, gemm=True)
    assert op.weight.main_grad is buffer


@pytest.mark.parametrize("case", ["frozen", "no_grad", "inference"])
def test_nothing_is_accumulated_without_a_gradient(case):
    op, x = linear(6, 5), torch.randn(3, 6, requires_grad=True)  # not even main_grad is needed
    if case == "frozen":
        op.weight.requires_grad_(False)
        op(x).sum().backward()
        assert x.grad is not None
    else:
        with torch.no_grad() if case == "no_grad" else torch.inference_mode():
            assert not op(x).requires_grad


def test_a_weight_used_twice_accumulates_twice(near):
    chain, x = (
        opfuse.Sequential(linear(4, 4, bias=False), linear(4, 4, bias=False)),
        torch.randn(3, 4),
    )
    chain[1].weight = chain[0].weight
    with_main_grad(chain)
    chain(x).square().sum().backward()
    weight = chain[0].weight.detach().requires_grad_()
    (x @ weight.T @ weight.T).square().sum().backward()
    near(chain[0].weight.main_grad, weight.grad, gemm=True)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_counts_once(near, reentrant):
    chain, x = (
        with_main_grad(opfuse.Sequential(linear(6, 5), ops.GELU())),
        torch.randn(3, 6, requires_grad=True),
    )
    checkpoint(chain, x, use_reentrant=reentrant).sum().backward()
    other = with_main_grad(copy.deepcopy(chain))
    other(x).sum().backward()
    near(chain[0].weight.main_grad, other[0].weight.main_grad, gemm=True)
    assert chain[0].weight.grad is None


def test_the_weight_of_the_forward_gets_it():
    op = with_main_grad(linear(6, 5))
    before, y = op.weight, op(torch.randn(3, 6))
    op.weight = nn.Parameter(torch.ones(5, 6))
    with_main_grad(op)
    y.sum().backward()
    assert before.main_grad.any() and not op.weight.main_grad.any()


def test_only_a_backward_that_adds_up_gradients_does():
    op, x = with_main_grad(linear(6, 5)), torch.randn(3, 6, requires_grad=True)
    op.weight.grad_added_to_main_grad = False
    for inputs in ([x], [op.weight], [op.bias, op.weight], [x, op.weight]):
        grads = torch.autograd.grad(op(x).sum(), inputs)
        for tensor, grad in zip(inputs, grads, strict=True):
            wanted = {id(x): op.weight.sum(0).expand(3, 6), id(op.weight): x.sum(0).expand(5, 6)}
            torch.testing.assert_close(grad, wanted.get(id(tensor), torch.full((5,), 3.0)))
    op(x).sum().backward(inputs=[x])
    assert (
        not op.weight.main_grad.any()
        and op.weight.grad is None
        and not op.weight.grad_added_to_main_grad
    )
    op(x).sum().backward(inputs=[op.weight])
    torch.testing.assert_close(op.weight.main_grad, x.detach().sum(0).expand(5, 6))
    assert op.weight.grad_added_to_main_grad


def test_a_frozen_bias_and_input_in_front_of_it(near):
    chain, x = (
        with_main_grad(opfuse.Sequential(ops.Bias(6), ops.LayerNorm(6), linear(6, 5))),
        torch.randn(3, 6),
    )
    for op in chain[:2]:
        op.requires_grad_(False)
    chain(x).sum().backward()
    near(chain[2].weight.main_grad, chain[:2](x).sum(0).expand(5, 6), gemm=True)


BAD = {
    "none": (None, "got None: set it before the backward"),
    "shape": (torch.zeros(6, 5), r"got torch.float32 of shape \(6, 5\) on cpu"),
    "device": (torch.zeros(5, 6, device="meta"), r"got torch.float32 of shape \(5, 6\) on meta"),
    "dtype": (torch.zeros(5, 6, dtype=torch.int32), "got torch.int32"),
}


@pytest.mark.parametrize("name", BAD)
def test_another_main_grad_is_refused(name):
    op, (main_grad, got) = linear(6, 5), BAD[name]
    if main_grad is not None:
        op.weight.main_grad = main_grad
    y = op(torch.randn(3, 6))
    with pytest.raises(
        RuntimeError, match=rf"BasicLinear\(accumulate_into_main_grad=True\) expected .*{got}"
    ):
        y.sum().backward()


def test_a_parametrized_weight_is_refused():
    op = with_main_grad(linear(6, 5))
    parametrizations.weight_norm(op)
    y = op(torch.randn(3, 6))
    with pytest.raises(
        RuntimeError, match="expected a Parameter as its weight, got a tensor that is computed"
    ):
        y.sum().backward()


def test_what_does_not_go_through_the_chains_backward_is_refused():
    op, x = with_main_grad(linear(6, 5)), torch.randn(3, 6)
    with pytest.raises(RuntimeError, match=r"\(BasicLinear\) is not declared to be differentiable"):
        with opfuse.options(double_backward=True):
            op(x)
    with pytest.raises(RuntimeError, match=r"\(BasicLinear\) is not declared to be differentiable"):
        torch.func.grad(lambda x: op(x).sum())(x)


def test_torch_compile_is_refused():
    op, x = with_main_grad(linear(6, 5)), torch.randn(3, 6)
    with torch.no_grad():
        torch.compile(op, fullgraph=True, backend="eager")(x)
    with pytest.raises(
        RuntimeError,
        match=r"\(BasicLinear\) puts gradients away itself .* torch.compile does not see",
    ):
        torch.compile(op, fullgraph=True, backend="eager")(x)


@pytest.mark.costly(1)
@pytest.mark.parametrize("hooked", [False, True])
def test_compiled_autograd_accumulates_into_main_grad(near, hooked):
    op, x = with_main_grad(linear(6, 5)), torch.randn(3, 6)
    if hooked:
        op.weight.grad_added_to_main_grad = False
    for _ in range(2):
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
            op(x).sum().backward()
    near(op.weight.main_grad, 2 * torch.ones(5, 3) @ x, gemm=True)
    assert (op.weight.grad is None) != hooked and not (hooked and op.weight.grad.any())
    assert getattr(op.weight, "grad_added_to_main_grad", hooked) is hooked


def test_a_branch_that_the_loss_does_not_use_accumulates_nothing(near):
    chain = with_main_grad(opfuse.Sequential(ops.MakeExtraOutput(), linear(6, 5)))
    _, extra = chain(torch.randn(3, 6, requires_grad=True))
    extra.sum().backward()
    assert not chain[1].weight.main_grad.any() and chain[1].weight.grad is None


@pytest.mark.parametrize("override", [None, "high_precision", "dequantized"])
def test_under_a_recipe_main_grad_gets_the_same_gradient(register, near, override):
    rounding = pytest.importorskip("rounding")
    register(rounding.RoundingPlugin())
    op, x = with_main_grad(linear(6, 5)), torch.randn(3, 6)
    plain, results = copy.deepcopy(op), []
    plain.basic_ops[0].accumulates_grads = False
    for model in (op, plain):
        with opfuse.autocast(recipe=rounding.Rounding(step=0.25, backward_override=override)):
            y = model(x)
        y.square().sum().backward()
        results.append(model.weight.main_grad if model is op else model.weight.grad)
    near(*results)


class Additions(TorchDispatchMode):
    """Counts the passes over a ``main_grad``, and the products that add to it."""

    keeps_no_tensors = True

    def __init__(self, main_grad):
        super().__init__()
        self.main_grad, self.passes, self.products = main_grad, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        written = (kwargs or {}).get("out", args[0] if args else None)
        if isinstance(written, torch.Tensor) and written.data_ptr() == self.main_grad.data_ptr():
            name = func.overloadpacket.__name__
            self.products += name.startswith("addmm")
            self.passes += name in ("add_", "copy_", "mul_")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_product_adds_to_main_grad_itself_where_the_library_can(dtype, overwrite):
    op = with_main_grad(linear(6, 5, bias=False, dtype=dtype))
    main_grad = op.weight.main_grad.fill_(torch.nan if overwrite else 7.0)
    op.weight.overwrite_main_grad, op.weight.grad_added_to_main_grad = overwrite, False
    x = torch.randn(2, 3, 6).to(dtype)
    for adds, products in ((True, 1), (False, dtype is torch.float32)):
        with Library(adds), Additions(main_grad) as seen:
            op(x).backward(torch.ones(2, 3, 5, dtype=dtype))
        asked = torch.ones(5, 6, dtype=torch.float64) * x.double().sum((0, 1))
        close(main_grad, asked + (0 if overwrite else 7), dtype)
        assert (seen.products, seen.passes) == (products, not products)
        assert op.weight.grad_added_to_main_grad and not op.weight.grad.any()
        op.weight.grad = None
        main_grad.fill_(torch.nan if overwrite else 7.0)
        opfuse.ops.arithmetic._library_adds.cache_clear()


class Doubled(ops.BasicLinear):
    def op_backward(self, ctx, grad_output):
        dx, (dw,) = super().op_backward(ctx, grad_output)
        return dx, (2 * dw,)


def test_a_backward_that_changes_the_gradient_gets_it_before_it_is_added(near):
    op = with_main_grad(Doubled(6, 5, accumulate_into_main_grad=True))
    op.weight.main_grad.fill_(1.0)
    x = torch.randn(3, 6)
    op(x).sum().backward()
    near(op.weight.main_grad, 1 + 2 * torch.ones(5, 3) @ x, gemm=True)


class Halving(ops.BasicLinear):
    """A linear that adds half of its gradient."""

    def accumulate_grads(self, params, grads):
        params[0].main_grad.add_(grads[0], alpha=0.5)
        return (None,)


def test_no_product_adds_where_an_op_accumulates_in_its_own_way():
    x, dy = torch.randn(3, 4), torch.randn(3, 2)
    op = with_main_grad(Halving(4, 2, accumulate_into_main_grad=True))
    opfuse.Sequential(op)(x).backward(dy)
    torch.testing.assert_close(op.weight.main_grad, dy.t() @ x / 2)


def test_no_product_adds_where_a_fused_op_may_change_the_gradient(register):
    class Doubled(opfuse.FusedOperation):
        def fuser_backward(self, basic_op_ctxs, grad_output, *, basic_op_grad_extra_outputs):
            dx, (dw,) = self.basic_ops[0].op_backward(basic_op_ctxs[0], grad_output)
            return dx, [(2 * dw,)], [()]

    x, dy = torch.randn(3, 4), torch.randn(3, 2)
    op = with_main_grad(ops.BasicLinear(4, 2, accumulate_into_main_grad=True))
    register(backward_fusions=[opfuse.Fusion((ops.BasicLinear,), Doubled, name="doubled")])
    opfuse.Sequential(op)(x).backward(dy)
    torch.testing.assert_close(op.weight.main_grad, 2 * dy.t() @ x)


def test_two_linears_share_a_sum_that_is_another_view_each_time():
    buffer, x, dy = torch.zeros(16), torch.randn(3, 4), torch.randn(3, 4)
    one, two = (ops.BasicLinear(4, 4, accumulate_into_main_grad=True) for _ in range(2))
    two.weight = one.weight
    one.weight.__fsdp_param__ = True
    one.weight.get_main_grad = lambda: buffer.view(4, 4)
    weight = one.weight.detach().clone().requires_grad_()
    (x @ weight.t() @ weight.t()).backward(dy)
    opfuse.Sequential(one, two)(x).backward(dy)
    torch.testing.assert_close(buffer.view(4, 4), weight.grad)
