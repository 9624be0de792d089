"""What one process of the collectives' test does. In a module of its own, so that the other process can import it."""

import gloo
import pytest
import torch
import torch.distributed as dist

import opfuse
from opfuse import ops


def run(rank):
    size = gloo.RANKS
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        _check_all(rank, size, dtype)
    _check_layouts(rank, size)
    _check_inside_a_chain(rank, size)
    _check_errors()


def _inputs(size, rows, dtype):
    """Small whole numbers, the same list on every process: sums are exact in any dtype."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(-8, 8, (rows, 3), generator=generator).to(dtype) for _ in range(size)]


def _check(op, x, expected, grad, expected_grad):
    leaf, before = x.clone().requires_grad_(), x.clone()
    given = grad.clone()
    y = opfuse.Sequential(op)(leaf)
    assert torch.equal(y, expected), (type(op).__name__, y, expected)
    assert torch.equal(leaf, before)
    y.backward(given)
    assert torch.equal(leaf.grad, expected_grad), (type(op).__name__, leaf.grad, expected_grad)
    assert torch.equal(given, grad)
    with torch.no_grad():
        assert torch.equal(op(x), expected) and torch.equal(x, before)


def _check_all(rank, size, dtype):
    small, large = _inputs(size, 2, dtype), _inputs(size, 2 * size, dtype)
    part = slice(2 * rank, 2 * rank + 2)
    _check(ops.AllGather(), small[rank], torch.cat(small), large[rank], sum(large)[part])
    _check(ops.ReduceScatter(), large[rank], sum(large)[part], small[rank], torch.cat(small))
    for flag in (True, False):
        op = ops.AllReduce(reduce_in_backward=flag)
        _check(op, small[rank], sum(small), small[1 - rank], small[1 - rank])


def _check_layouts(rank, size):
    xs = [torch.arange(6.0).reshape(3, 2) + r for r in range(size)]
    gathered = ops.AllGather(dist.group.WORLD)(xs[rank].t())
    assert torch.equal(gathered, torch.cat([x.t() for x in xs]))
    assert torch.equal(ops.AllReduce()(xs[rank].t()), sum(xs).t())
    assert torch.equal(ops.AllGather()(xs[rank][0]), torch.cat([x[0] for x in xs]))
    x = torch.ones(1, requires_grad=True)
    ops.AllGather()(x).sum().backward()  # an expanded gradient
    assert x.grad.item() == size
    alone = dist.new_group([rank], use_local_synchronization=True)
    for op in (ops.AllGather, ops.ReduceScatter, ops.AllReduce):
        assert torch.equal(op(alone)(xs[rank]), xs[rank])


def _check_inside_a_chain(rank, size):
    """A sequence-parallel linear: gather, multiply, scatter; every weight sees the whole sequence."""
    torch.manual_seed(0)
    linear = ops.Linear(3, 4, dtype=torch.float64)
    xs = [torch.randn(2, 3, dtype=torch.float64, requires_grad=True) for _ in range(size)]
    y = opfuse.Sequential(ops.AllGather(), linear, ops.ReduceScatter(), ops.ConstantScale(0.5))(
        xs[rank]
    )
    y.sum().backward()
    full = torch.cat([x.detach() for x in xs]).requires_grad_()
    expected = (full @ linear.weight.T + linear.bias) * size * 0.5
    torch.testing.assert_close(y, expected[2 * rank : 2 * rank + 2])
    (expected,) = torch.autograd.grad(expected.sum(), full)
    torch.testing.assert_close(xs[rank].grad, expected[2 * rank : 2 * rank + 2])


def _check_errors():
    with pytest.raises(
        ValueError, match=r"ReduceScatter expected a multiple of 2, .* got shape \(3, 2\)"
    ):
        ops.ReduceScatter()(torch.ones(3, 2))
    with pytest.raises(ValueError, match="AllGather expected a tensor with at least one dimension"):
        ops.AllGather()(torch.ones(()))
    with opfuse.options(double_backward=True), pytest.raises(RuntimeError, match="AllGather"):
        ops.AllGather()(torch.ones(2, requires_grad=True))
    assert repr(ops.AllReduce()) == "AllReduce(process_group_size=2)"
