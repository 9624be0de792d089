"""A weight that is used several times under autocast is cast once in a block, as PyTorch casts it."""

import contextlib
import gc
import threading
import weakref

import pytest
import torch
from torch.nn import functional as F

import opfuse
from opfuse.ops import BasicLinear, Linear, LowRankLinear, ParallelLinear, ReLU
from opfuse.report.calls import saved_bytes

BF16 = torch.bfloat16
WIDTH, ROWS, USES = 32, 16, 6
OPS = {
    "linear": lambda: opfuse.Sequential(Linear(WIDTH, WIDTH)),
    "mlp": lambda: opfuse.Sequential(Linear(WIDTH, WIDTH), ReLU(), Linear(WIDTH, WIDTH)),
    "parallel": lambda: opfuse.Sequential(
        ParallelLinear([Linear(WIDTH, WIDTH), Linear(WIDTH, WIDTH)]), Linear(2 * WIDTH, WIDTH)
    ),
    "low rank": lambda: opfuse.Sequential(LowRankLinear(WIDTH, WIDTH, rank=4)),
}


def autocast(**how):
    return torch.autocast("cpu", BF16, **how)


def used(chain, x, uses=USES):
    for _ in range(uses):
        x = chain(x)
    return x


def weights(chain):
    return [p for p in chain.parameters() if p.ndim == 2]


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("plugins", [None, ""], ids=["plugins", "none"])
def test_a_weight_is_kept_once(name, plugins):
    chain, x = OPS[name](), torch.randn(ROWS, WIDTH, requires_grad=True)
    with opfuse.plugins.using(plugins), autocast():
        one = saved_bytes(lambda: chain(x), chain.parameters())
        torch.clear_autocast_cache()
        many = saved_bytes(lambda: used(chain, x), chain.parameters())
    casts = 2 * sum(weight.numel() for weight in weights(chain))
    assert many <= USES * one - (USES - 1) * casts


def test_a_model_keeps_no_more_than_eager():
    linear, x = Linear(WIDTH, WIDTH), torch.randn(ROWS, WIDTH, requires_grad=True)
    with autocast():
        got = saved_bytes(lambda: used(linear, x), linear.parameters())
        expected = saved_bytes(
            lambda: used(lambda x: F.linear(x, linear.weight, linear.bias), x), linear.parameters()
        )
    assert got <= expected


@pytest.mark.parametrize("name", OPS)
def test_gradients_are_those_of_single_casts(name):
    chain, x = OPS[name](), torch.randn(ROWS, WIDTH, requires_grad=True)
    found = []
    for cached in (True, False):
        chain.zero_grad()
        with autocast(cache_enabled=cached):
            y = used(chain, x, 3)
        y.float().square().mean().backward()
        found.append([y, *[p.grad for p in chain.parameters()]])
        assert all(p.grad.dtype is p.dtype for p in chain.parameters())
    torch.testing.assert_close(*found, rtol=0, atol=0)


def change(weight):
    with torch.no_grad():
        weight.mul_(2)


def change_unseen(weight):
    weight.data.mul_(2)


@pytest.mark.parametrize("how", [change, change_unseen])
def test_another_block_casts_again(how):
    linear, x = BasicLinear(WIDTH, WIDTH), torch.randn(ROWS, WIDTH)
    with autocast():
        first = linear(x)  # whose graph lives on
    how(linear.weight)
    with autocast():
        torch.testing.assert_close(linear(x), 2 * first)


def test_a_weight_that_was_written_to_in_the_block_is_cast_again():
    linear, x = BasicLinear(WIDTH, WIDTH), torch.randn(ROWS, WIDTH)
    with autocast():
        first = linear(x)
        change(linear.weight)
        torch.testing.assert_close(linear(x), 2 * first)
        torch.clear_autocast_cache()
        change_unseen(linear.weight)
        torch.testing.assert_close(linear(x), 4 * first)


@pytest.mark.parametrize("grad", [torch.no_grad, torch.inference_mode, contextlib.nullcontext])
def test_a_cast_made_in_another_mode_does_not_lose_gradients(grad):
    chain, x = OPS["mlp"](), torch.randn(ROWS, WIDTH)
    with autocast():
        with grad():
            before = chain(x).clone()
        y = chain(x)
    assert torch.equal(before, y)
    y.float().sum().backward()
    assert all(p.grad is not None for p in chain.parameters())


def test_nested_blocks_have_their_own_dtypes():
    linear, x = BasicLinear(WIDTH, WIDTH), torch.randn(ROWS, WIDTH)
    with autocast():
        assert linear(x).dtype is BF16
        with torch.autocast("cpu", torch.float16):
            assert linear(x).dtype is torch.float16
        with autocast(enabled=False):
            assert linear(x).dtype is torch.float32
        assert linear(x).dtype is BF16


def test_second_derivatives():
    linear, x = BasicLinear(WIDTH, WIDTH), torch.randn(ROWS, WIDTH, requires_grad=True)
    with autocast(), opfuse.options(double_backward=True):
        y = used(linear, x, 2).float().square().sum()
    (grad,) = torch.autograd.grad(y, x, create_graph=True)
    grad.square().sum().backward()
    assert linear.weight.grad.any()


def test_nothing_is_held_behind_a_block():
    chain, x = OPS["linear"](), torch.randn(ROWS, WIDTH)
    made = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: made.append(weakref.ref(t)) or t, lambda t: t
    ):
        with autocast():
            y = chain(x)
    del y
    gc.collect()
    assert made and not [ref for ref in made if ref() is not None and ref().dtype is BF16]


def test_each_thread_has_its_own():
    linear, x = BasicLinear(WIDTH, WIDTH), torch.randn(ROWS, WIDTH)
    found = []

    def run():
        with autocast():
            found.append(linear(x))

    with autocast():
        first = linear(x)
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()  # its block cleared the cache of all threads
        change_unseen(linear.weight)
        assert torch.equal(found[0], first)
        torch.testing.assert_close(linear(x), 2 * first)
