"""Three linears of one input: the gradients of the input are added up by the products, in place."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import opfuse
from opfuse import ops
from opfuse.testing import recipes
from opfuse.testing.machine import is_interpreting

pytestmark = pytest.mark.skipif(
    is_interpreting(), reason="TRITON_INTERPRET is set, and it launches no kernel"
)
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
FUSED = "linear"


def a_chain(dtype, *, biased=True, sizes=(12, 6, 6), channels=("x", "again")):
    torch.manual_seed(0)
    made = []
    for number, size in enumerate(sizes):
        fork, swap = ops.MakeExtraOutput(), ops.SwapExtraInput()
        is_last = number == len(sizes) - 1
        if not is_last:
            fork.set_extra_output_channel(0, channels[number], output_to_caller=False)
            swap.set_extra_input_channel(0, channels[number])
            made.append(fork)
        made.append(ops.Linear(8, size, bias=biased and number != 1))
        made += [] if is_last else [swap]
    chain = opfuse.Sequential(*made).double()
    for param in chain.parameters():
        torch.nn.init.normal_(param, std=0.3)
    return chain.to(dtype)


def step(chain, x, plugins, *, grads=(), autocast=None):
    """The outputs, and the gradients of the input and of the parameters."""
    x = x.detach().requires_grad_()
    chain.zero_grad()
    with opfuse.plugins.using(plugins):
        with torch.autocast("cpu", autocast, enabled=autocast is not None):
            outputs = chain(x)
        given = [y if g is None else g.to(y.dtype) for y, g in zip(outputs, grads, strict=True)]
        torch.autograd.backward(outputs, given)
    return [*outputs, x.grad, *[param.grad for param in chain.parameters()]]


def gradients(shape):
    draw = torch.Generator().manual_seed(3)
    made = [(6, 1.0), (12, 2.0), (6, 0.5)]
    return [torch.randn(*shape, n, generator=draw, dtype=torch.float64) * by for n, by in made]


def furthest(found, exact):
    """How far each tensor is from the exact one, relative to its norm."""
    return [
        float((a.detach().double() - b.detach()).norm() / b.detach().norm())
        for a, b in zip(found, exact, strict=True)
    ]


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("shape", [(5,), (2, 7), (1, 3, 33)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_gradients_are_as_near_to_exact_ones_as_those_of_the_separate_ops(dtype, shape, biased):
    x = torch.randn(*shape, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    chain, grads = a_chain(dtype, biased=biased), gradients(shape)
    rounded = a_chain(dtype, biased=biased).double(), x.to(dtype).double()
    exact = step(*rounded, "", grads=[g.to(dtype).double() for g in grads])
    apart, fused = (step(chain, x.to(dtype), plugins, grads=grads) for plugins in ("", FUSED))
    for a, b, name in zip(furthest(fused, exact), furthest(apart, exact), range(99), strict=False):
        # of sums in another order; in half precision the sum of products is rounded less often
        slack = 1e-14 if dtype is torch.float64 else 1e-7
        assert a <= 1.1 * b + slack, name
    with opfuse.plugins.using(FUSED):
        report = opfuse.explain(chain, x.to(dtype).requires_grad_()).to_dict()
    assert [row["fusion"] for row in report["backward"]] == ["linears of one input"]


class Called(TorchDispatchMode):
    """The operations that run, and where their results are."""

    keeps_no_tensors = True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.names.append((func.overloadpacket.__name__, result.data_ptr()))
        return result


def test_the_sum_is_one_tensor_that_products_add_to():
    chain = a_chain(torch.bfloat16, biased=False)
    x = torch.randn(2, 7, 8).bfloat16().requires_grad_()
    with opfuse.plugins.using(FUSED):
        outputs = chain(x)
        with Called() as mode:
            mode.names = []
            torch.autograd.backward(outputs, [torch.ones_like(y) for y in outputs])
    names = [name for name, _ in mode.names]
    assert names.count("addmm") == 2 and names.count("mm") == 4 and "add" not in names
    memory = [place for name, place in mode.names if name == "addmm"]
    assert memory == [x.grad.data_ptr()] * 2


@pytest.mark.parametrize(
    "frozen", [("x",), ("weights",), ("1.weight", "4.weight"), ("6.bias",), ("x", "weights")]
)
def test_what_needs_no_gradient_gets_none(frozen):
    chain, grads = a_chain(torch.float64), gradients((5,))
    x = torch.randn(5, 8, dtype=torch.float64)
    for name, param in chain.named_parameters():
        param.requires_grad_(not (name in frozen or ("weights" in frozen and "weight" in name)))
    found = []
    for plugins in ("", FUSED):
        leaf = x.clone().requires_grad_("x" not in frozen)
        chain.zero_grad()
        with opfuse.plugins.using(plugins):
            outputs = chain(leaf)
            torch.autograd.backward(outputs, grads)
        found.append([leaf.grad, *[param.grad for param in chain.parameters()]])
    for a, b in zip(*found, strict=True):
        assert (a is None) == (b is None)
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("channels", [("x", "again"), ("x", None), (None, None)])
@pytest.mark.parametrize("unused", [(), (0,), (1,), (2,), (0, 1)])
def test_tensors_of_any_origin_and_outputs_that_are_not_used(channels, unused):
    """The caller swaps tensors in, and gets forks, where there is no channel."""
    torch.manual_seed(1)
    chain = a_chain(torch.float64)
    forks = [op for op in chain if isinstance(op, ops.MakeExtraOutput)]
    swaps = [op for op in chain if isinstance(op, ops.SwapExtraInput)]
    for fork, swap, name in zip(forks, swaps, channels, strict=True):
        fork.set_extra_output_channel(0, name, output_to_caller=name is None)
        swap.set_extra_input_channel(0, name)
    found = []
    given = [torch.randn(5, 8, dtype=torch.float64) for _ in range(1 + channels.count(None))]
    for plugins in ("", FUSED):
        leaves = [x.clone().requires_grad_() for x in given]
        chain.zero_grad()
        with opfuse.plugins.using(plugins):
            outputs = chain(*leaves)
            used = [y for number, y in enumerate(outputs) if number not in unused]
            sum((y * y.detach().cos()).sum() for y in used).backward()
        found.append([leaf.grad for leaf in (*leaves, *chain.parameters())])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


def test_two_swaps_may_bring_back_one_tensor():
    torch.manual_seed(1)
    chain = a_chain(torch.float64)
    [*swaps] = [op for op in chain if isinstance(op, ops.SwapExtraInput)]
    swaps[1].set_extra_input_channel(0, "x")
    x, grads = torch.randn(5, 8, dtype=torch.float64), gradients((5,))
    for a, b in zip(*(step(chain, x, each, grads=grads) for each in ("", FUSED)), strict=True):
        torch.testing.assert_close(a, b)


def test_under_autocast_and_for_strided_gradients():
    chain = a_chain(torch.float32)
    x = torch.randn(8, 7).t()
    grads = [g.t().contiguous().t() for g in gradients((7,))]
    exact = step(a_chain(torch.float64), x.double(), "", grads=grads)
    one, other = (
        step(chain, x, plugins, grads=grads, autocast=torch.bfloat16) for plugins in ("", FUSED)
    )
    for a, b, c in zip(furthest(other, exact), furthest(one, exact), one, strict=True):
        assert a <= 1.2 * b and c.isfinite().all()


def test_a_recipe_quantizes_the_linears():
    chain, x = a_chain(torch.float32), torch.randn(5, 8, requires_grad=True)

    def quantized(x):
        with opfuse.autocast(recipes.PerTensor()):
            return chain(x)

    with recipes.offered(), opfuse.plugins.using(f"{FUSED},{recipes.NAME}"):
        report = opfuse.explain(quantized, x).to_dict()
    assert report["backward"] and not any(row["fusion"] for row in report["backward"])
