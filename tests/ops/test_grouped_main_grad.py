"""``GroupedLinear(accumulate_into_main_grad=True)``: the products add to ``main_grad``, or what follows them does."""

import copy

import pytest
import torch
from adding import Library, asked_again  # noqa: F401
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import opfuse
from opfuse import ops, testing
from opfuse.ops import grouped
from opfuse.testing.recipes import offered

FP64, FP32, BF16, FP16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
SIZES, IN, OUT = (5, 0, 3, 1), 8, 12


def made(layout, *, bias=False, dtype=FP32, main=FP32, fill=1.0, overwrite=False):
    """An op whose weights are a list of parameters or one, and its weights."""
    torch.manual_seed(0)
    if layout == "list":
        op = ops.GroupedLinear(4, IN, OUT, bias=bias, dtype=dtype, accumulate_into_main_grad=True)
        weights = [op.get_parameter(f"weight{i}") for i in range(4)]
    else:
        held = nn.Module()
        held.weight = nn.Parameter(torch.randn(4, OUT, IN).to(dtype))
        op = ops.GroupedLinear.reading(held, accumulate_into_main_grad=True)
        weights = [held.weight]
    for weight in weights:
        weight.main_grad = torch.full(weight.shape, fill, dtype=main)
        weight.overwrite_main_grad = overwrite
    return op, weights


def run(op, dtype=FP32, inner=(), **given):
    """A step, and the gradient of each matrix in fp64."""
    torch.manual_seed(1)
    x, dy = [torch.randn(sum(SIZES), *inner, width).to(dtype) for width in (IN, OUT)]
    op(x, torch.tensor(SIZES)).backward(dy, **given)
    each = zip(x.double().split(SIZES), dy.double().split(SIZES), strict=True)
    return torch.stack([dy.flatten(0, -2).T @ x.flatten(0, -2) for x, dy in each])


def sums(weights):
    found = [weight.main_grad for weight in weights]
    return found[0] if found[0].ndim == 3 else torch.stack(found)


def close(got, wanted, dtype):
    atol = 4 * torch.finfo(dtype).eps * wanted.abs().max().clamp(min=1).item()
    torch.testing.assert_close(got.double(), wanted, rtol=0, atol=atol)


class Passes(TorchDispatchMode):
    """Counts the operations that write into a ``main_grad``, by whether they are products."""

    keeps_no_tensors = True

    def __init__(self, weights):
        super().__init__()
        self.memory = {weight.main_grad.untyped_storage()._cdata for weight in weights}
        self.products = self.others = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        written = (kwargs or {}).get("out", args[0] if args else None)
        name = func.overloadpacket.__name__
        if isinstance(written, torch.Tensor) and written.untyped_storage()._cdata in self.memory:
            self.products += name.startswith("addmm")
            self.others += name in ("add_", "copy_", "mul_")
        return func(*args, **(kwargs or {}))


layouts = pytest.mark.parametrize("layout", ["list", "one parameter"])


@layouts
@pytest.mark.parametrize("overwrite", [False, True], ids=["accumulate", "overwrite"])
@pytest.mark.parametrize("inner", [(), (2, 3)], ids=str)
@pytest.mark.parametrize(
    ("dtype", "main", "adds"),
    [
        (FP32, FP32, True),
        (FP64, FP64, True),
        (BF16, FP32, True),
        (FP16, FP32, True),
        (BF16, FP32, False),  # the library refuses to
        (FP32, BF16, False),
        (FP32, FP64, False),
    ],
    ids=str,
)
def test_products_add_to_main_grad(layout, overwrite, inner, dtype, main, adds):
    fill = torch.nan if overwrite else 2.0
    op, weights = made(layout, dtype=dtype, main=main, fill=fill, overwrite=overwrite)
    with Library(adds), Passes(weights) as seen:
        wanted = run(op, dtype, inner)
    close(sums(weights), wanted if overwrite else wanted + 2, max(dtype, main, key=by_eps))
    touched = 4 if overwrite else 3  # a group without rows adds nothing
    passes = 4 if layout == "list" else 1
    assert (seen.products, seen.others) == ((touched, 0) if adds else (0, passes))
    assert all(weight.grad is None for weight in weights)


def by_eps(dtype):
    return torch.finfo(dtype).eps


@layouts
def test_a_group_without_rows_is_left_as_it_is(layout):
    op, weights = made(layout, fill=-0.0)
    run(op)
    assert sums(weights)[1].signbit().all()


@layouts
def test_sums_are_rounded_once_in_fp32(layout):
    """The product in bf16 would lose what this one keeps."""
    op, weights = made(layout, dtype=BF16, fill=0.0)
    with Library():
        wanted = run(op, BF16, (64,))
    close(sums(weights), wanted, FP32)
    assert not torch.equal(sums(weights), sums(weights).to(BF16).float())


@pytest.mark.parametrize("frozen", [(0,), (1, 3), (0, 1, 2, 3)], ids=str)
@pytest.mark.parametrize("overwrite", [False, True], ids=["accumulate", "overwrite"])
def test_frozen_weights_keep_their_sums(frozen, overwrite):
    op, weights = made("list", bias=True, overwrite=overwrite)
    for i in frozen:
        weights[i].requires_grad_(False)
        weights[i].main_grad = None if i == 3 else weights[i].main_grad
    wanted = run(op) + (not overwrite)
    for i, weight in enumerate(weights):
        if i not in frozen:
            close(weight.main_grad, wanted[i], FP32)
        elif i != 3:
            assert weight.main_grad.eq(1).all()


@pytest.mark.parametrize("overwrite", [False, True], ids=["accumulate", "overwrite"])
def test_a_weight_of_two_groups_is_added_to_twice(overwrite):
    op, _ = made("list", overwrite=overwrite)
    op.weight2 = op.weight0
    for step in range(1, 3):
        wanted = run(op)
        asked = wanted[0] + wanted[2]
        close(op.weight0.main_grad, asked if overwrite else step * asked + 1, FP32)


@layouts
def test_weights_of_two_ops_in_a_chain(layout):
    """The first gradient of a backward replaces, and that of the other op is added."""
    op, weights = made(layout, overwrite=True, fill=torch.nan)
    other, others = made(layout)
    for one, weight in zip(others, weights, strict=True):
        one.main_grad = weight.main_grad
    if layout == "list":
        for i, weight in enumerate(weights):
            setattr(other, f"weight{i}", weight)
    else:
        other = ops.GroupedLinear.reading(held_by(weights[0]), accumulate_into_main_grad=True)
    x, sizes = torch.randn(9, IN), torch.tensor(SIZES)
    for _ in range(2):
        (op(x, sizes).sum() + other(2 * x, sizes).sum()).backward()
        each = [part.double().sum(0).expand(OUT, IN) * 3 for part in x.split(SIZES)]
        close(sums(weights), torch.stack(each), FP32)


def held_by(weight):
    held = nn.Module()
    held.weight = weight
    return held


def test_of_several_weights_only_some_are_replaced():
    op, weights = made("list")
    weights[2].overwrite_main_grad = True
    wanted = run(op)
    wanted[[0, 1, 3]] += 1
    close(sums(weights), wanted, FP32)


@layouts
def test_biases_are_left_to_autograd_and_hooks_run(layout):
    op, weights = made(layout, bias=layout == "list")
    for weight in weights:
        weight.grad_added_to_main_grad = False
    wanted = run(op)
    close(sums(weights), wanted + 1, FP32)
    assert all(w.grad_added_to_main_grad and not w.grad.any() for w in weights)
    for i in range(4 if op.has_bias else 0):
        assert op.get_parameter(f"bias{i}").grad.any() == bool(SIZES[i])


@pytest.mark.parametrize("asked", ["weight0", "bias2"])
def test_a_backward_to_some_parameters_adds_only_to_them(asked):
    op, weights = made("list", bias=True)
    wanted = run(op, inputs=[op.get_parameter(asked)])
    for i, weight in enumerate(weights):
        close(
            weight.main_grad,
            wanted[i] + 1 if asked == f"weight{i}" else torch.ones(OUT, IN).double(),
            FP32,
        )
    assert (op.bias2.grad is None) == (asked != "bias2")


@layouts
def test_autograd_grad_adds_nothing(layout):
    op, weights = made(layout)
    x = torch.randn(9, IN)
    found = torch.autograd.grad(op(x, torch.tensor(SIZES)).sum(), weights)
    assert torch.cat(found).any() and sums(weights).eq(1).all()


class Doubled(ops.GroupedLinear):
    def backward_in(self, groups_of, ctx, grad_output):
        dx, grads, of_extras = super().backward_in(groups_of, ctx, grad_output)
        return dx, tuple(2 * grad for grad in grads), of_extras


def test_a_backward_that_changes_the_gradients_gets_them_before_they_are_added():
    op = Doubled(4, IN, OUT, bias=False, accumulate_into_main_grad=True)
    for weight in op.parameters():
        weight.main_grad = torch.ones(OUT, IN)
    wanted = run(op)
    close(torch.stack([w.main_grad for w in op.parameters()]), 1 + 2 * wanted, FP32)


@layouts
def test_torchs_grouped_product_adds_afterwards(layout, monkeypatch):
    monkeypatch.setattr(grouped, "_takes", lambda x, features: True)
    op, weights = made(layout)
    with Passes(weights) as seen:
        wanted = run(op)
    close(sums(weights), wanted + 1, FP32)
    assert (seen.products, seen.others) == (0, 4 if layout == "list" else 1)


@layouts
@pytest.mark.parametrize(
    "recipe",
    [testing.PerTensor(), testing.PerTensor(backward_override="dequantized")],
    ids=["at once", "one by one"],
)
def test_under_a_recipe_the_gradients_are_the_same(layout, recipe):
    found = []
    for accumulates in (True, False):
        op, weights = made(layout, fill=0.0)
        op.accumulates_grads = accumulates
        with offered(), opfuse.plugins.using("opfuse-testing"), opfuse.autocast(recipe):
            run(op)
        grads = [w.main_grad if accumulates else w.grad for w in weights]
        assert accumulates == all(w.grad is None for w in weights)
        found.append(grads)
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
    assert torch.cat(found[0]).any()


@layouts
def test_a_main_grad_that_does_not_fit_is_refused(layout):
    op, weights = made(layout)
    weights[0].main_grad = torch.zeros(3)
    with pytest.raises(
        RuntimeError, match=r"GroupedLinear\(accumulate_into_main_grad=True\) expected"
    ):
        run(op)


def test_a_copy_adds_to_its_own():
    op, weights = made("list")
    other = copy.deepcopy(op)
    for i in range(4):
        other.get_parameter(f"weight{i}").main_grad = torch.zeros(OUT, IN)
    wanted = run(other)
    close(
        torch.stack([other.get_parameter(f"weight{i}").main_grad for i in range(4)]), wanted, FP32
    )
    assert sums(weights).eq(1).all()
