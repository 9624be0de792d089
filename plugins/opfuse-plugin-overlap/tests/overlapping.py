"""What the processes of the tests run: tensor-parallel layers beside whole ones."""

from __future__ import annotations

import contextlib
import itertools
import os

import pytest
import torch
import torch.distributed as dist
from clock import watching
from opfuse_overlap import kernels

import opfuse
from opfuse import ops

FP64 = torch.float64


def part(tensor, dim):
    """This process's part of a tensor."""
    return tensor.chunk(dist.get_world_size(), dim)[dist.get_rank()]


def whole(*sizes, bias=True, dtype=FP64):
    """Layers of torch, the same on every process."""
    torch.manual_seed(5)
    pairs = itertools.pairwise(sizes)
    return [torch.nn.Linear(i, o, bias=bias, dtype=dtype) for i, o in pairs]


def split(layer, mode, sequence):
    """This process's part of a layer."""
    given = dict(tensor_parallel_mode=mode, sequence_parallel=sequence, dtype=layer.weight.dtype)
    op = ops.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None, **given)
    op.load_whole(layer.weight, layer.bias)
    return op


@contextlib.contextmanager
def overlapped(provider="c10d", pieces=0):
    """Every fusion of this plugin is used, and no other plugin's."""
    given = {"overlap.use": "always", "overlap.provider": provider, "overlap.pieces": pieces}
    with opfuse.plugins.using("overlap"), opfuse.options(**given):
        if provider == "symm_mem":
            fallbacks()
        yield


_kept = []


def fallbacks():
    """Let the CPU run what torch falls back to where symmetric memory is missing."""
    import torch.distributed._symmetric_memory as symm_mem

    if not _kept:
        library = torch.library.Library("symm_mem", "IMPL")
        library.impl("fused_all_gather_matmul", symm_mem._fused_all_gather_matmul_fallback, "CPU")
        library.impl(
            "fused_matmul_reduce_scatter", symm_mem._fused_matmul_reduce_scatter_fallback, "CPU"
        )
        _kept.append(library)


def fused_steps(model, x):
    """The names of the fusions of each pass."""
    plan = opfuse.explain(model, x).calls[0].plan
    return [step.fusion for step in plan.forward], [step.fusion for step in plan.backward]


def close(mine, expected, dtype):
    """Equal up to the rounding of a dtype: sums are added up in another order."""
    rule = dict(rtol=3e-2, atol=3e-2) if dtype is torch.bfloat16 else {}
    torch.testing.assert_close(mine, expected.to(mine.dtype), **rule)


def one_layer(rank, mode, sequence, bias, shape, provider, pieces, dtype):
    """A layer by itself: the output and every gradient are those of the whole layer."""
    (layer,) = whole(6, 4, bias=bias, dtype=dtype)
    op = split(layer, mode, sequence)
    x = torch.randn(*shape, 6, dtype=dtype).requires_grad_()
    column = mode == "column"
    given = part(x, 0) if column and sequence else x if column else part(x, -1)
    leaf = given.detach().clone().requires_grad_()
    expected = layer(x)
    dy = torch.randn(*expected.shape, dtype=dtype)
    of_part = part(dy, -1) if column else part(dy, 0) if sequence else dy
    expected.backward(dy)
    with overlapped(provider, pieces):
        forward, backward = fused_steps(op, leaf)
        assert len(forward) == len(backward) == 1 and forward[0] and backward == forward
        y = op(leaf)
        y.backward(of_part)
        with torch.no_grad():
            assert torch.equal(op(leaf), y)
    mine = part(expected, -1) if column else part(expected, 0) if sequence else expected
    close(y, mine, dtype)
    dx = part(x.grad, 0) if column and sequence else x.grad if column else part(x.grad, -1)
    close(leaf.grad, dx, dtype)
    close(op.weight.grad, part(layer.weight.grad, 0 if column else 1), dtype)
    if bias:
        grad = part(layer.bias.grad, 0) if column else layer.bias.grad
        close(op.bias.grad, grad, dtype)
    assert (y.shape, y.dtype) == (mine.shape, dtype) and leaf.grad.shape == leaf.shape


def mlp(width, hidden, sequence, *, bias=True, dtype=FP64):
    """A column and a row layer with an activation between them, and the layers they are parts of."""
    first, second = whole(width, hidden, width, bias=bias, dtype=dtype)
    chain = opfuse.Sequential(
        split(first, "column", sequence), ops.GELU(), split(second, "row", sequence)
    )
    return chain, first, second


def a_step_on_the_clock(rank, sequence, pieces, share):
    """The time of a step of an MLP, relative to its parts one after the other.

    ``share`` is the time of its collectives, relative to that of its products.
    """
    rows, width, hidden = 64, 16, 64
    chain, *_ = mlp(width, hidden, sequence, dtype=torch.float32)
    x = torch.randn(rows // 2 if sequence else rows, width, requires_grad=True)
    with overlapped(pieces=pieces):
        chain(x)  # the processes compare what they run
        with watching() as measured:
            chain(x).sum().backward()
        byte = share * measured.computed / measured.sent
        with watching(byte=byte) as clock:
            chain(x).sum().backward()
    assert clock.sent == pytest.approx(share * clock.computed)
    assert clock.computed == 6 * rows * width * hidden // 2
    return clock.now / clock.serial, clock.events, clock.count, clock.bytes


def fails(rank, mode, way, backward):
    """The second process fails in a product, once pieces are on their way; what each raised."""
    (layer,) = whole(6, 4)
    op = split(layer, mode, True)
    x = torch.randn(4 if mode == "column" else 8, op.in_features, dtype=FP64, requires_grad=True)
    name = "grad_of_input" if backward else "product"
    original, calls = getattr(kernels, name), []

    def product(*given):
        calls.append(name)
        if rank and len(calls) == 2:
            if way == "dies":
                os._exit(1)
            raise ArithmeticError("no luck")
        return original(*given)

    with overlapped(pieces=4):
        op(x).sum().backward()
        setattr(kernels, name, product)
        try:
            op(x).sum().backward()
        except Exception as error:
            return type(error).__name__, str(error)
    return None
