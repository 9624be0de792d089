"""What the processes of the tests of tensor parallelism run: chains beside whole layers."""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import os
import time

import pytest
import torch
import torch.distributed as dist
from fakes import registered
from opfuse_distributed import ranks as core
from tuned import tables_in

import opfuse
from opfuse import ops

FP64 = torch.float64


def saved_tensors(call):
    """The tensors that a call keeps for its backward."""
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        call()
    return kept


def whole(*sizes, bias=True, dtype=FP64):
    """Layers of torch, the same on every process."""
    torch.manual_seed(5)
    pairs = itertools.pairwise(sizes)
    return [torch.nn.Linear(i, o, bias=bias, dtype=dtype) for i, o in pairs]


def split(layer, mode, sequence, build=ops.Linear, **others):
    """This process's part of a layer."""
    given = dict(tensor_parallel_mode=mode, sequence_parallel=sequence, **others)
    given["dtype"] = layer.weight.dtype
    if build is ops.BasicLinear:
        op = build(layer.in_features, layer.out_features, **given)
        op.weight.data.copy_(part(layer.weight, 1 if mode == "row" else 0))
        return op
    op = build(layer.in_features, layer.out_features, bias=layer.bias is not None, **given)
    op.load_whole(layer.weight, layer.bias)
    return op


def part(tensor, dim):
    """This process's part of a tensor."""
    return tensor.chunk(dist.get_world_size(), dim)[dist.get_rank()]


def input_part(x, mode, sequence):
    """This process's part of what a layer takes, or of its gradient."""
    if mode == "row":
        return part(x, -1)
    return part(x, 0) if sequence else x


def output_part(y, mode, sequence):
    """This process's part of what a layer gives, or of its gradient."""
    if mode == "column":
        return part(y, -1)
    return part(y, 0) if sequence else y


def one_layer(rank, mode, sequence, bias, shape):
    """A layer by itself: the output and every gradient are those of the whole layer."""
    (layer,) = whole(6, 4, bias=bias)
    op = split(layer, mode, sequence)
    x = torch.randn(*shape, 6, dtype=FP64).requires_grad_()
    column = mode == "column"
    leaf = input_part(x, mode, sequence).detach().clone().requires_grad_()
    y, expected = op(leaf), layer(x)
    torch.testing.assert_close(y, output_part(expected, mode, sequence))
    dy = torch.randn(*expected.shape, dtype=FP64)
    expected.backward(dy)
    y.backward(output_part(dy, mode, sequence))
    torch.testing.assert_close(leaf.grad, input_part(x.grad, mode, sequence))
    torch.testing.assert_close(op.weight.grad, part(layer.weight.grad, 0 if column else 1))
    if bias:
        grad = part(layer.bias.grad, 0) if column else layer.bias.grad
        # the ops before a reduce-scatter see the gradient of every row
        torch.testing.assert_close(op.bias.grad, grad)


def mlp(rank, sequence, what):
    """Two layers with an activation, under one of the things that change how a chain runs."""
    first, second = whole(6, 8, 6)
    chain = opfuse.Sequential(
        split(first, "column", sequence), ops.GELU(), split(second, "row", sequence)
    )
    if what == "a copy":
        chain = copy.deepcopy(chain)
    if what == "a hook":
        chain[0].basic_ops[1].register_forward_hook(lambda module, given, y: None)
    x = torch.randn(8, 6, dtype=FP64)
    whole_x, leaf = (
        x.clone().requires_grad_(),
        (part(x, 0) if sequence else x).clone().requires_grad_(),
    )
    expected = second(torch.nn.functional.gelu(first(whole_x), approximate="tanh"))
    if what == "a checkpoint":
        y = torch.utils.checkpoint.checkpoint(chain, leaf, use_reentrant=False)
    else:
        y = chain(leaf)
    torch.testing.assert_close(y, part(expected, 0) if sequence else expected)
    expected.square().sum().backward()
    y.square().sum().backward()
    torch.testing.assert_close(leaf.grad, part(whole_x.grad, 0) if sequence else whole_x.grad)
    torch.testing.assert_close(chain[0].weight.grad, part(first.weight.grad, 0))
    torch.testing.assert_close(chain[2].weight.grad, part(second.weight.grad, 1))
    torch.testing.assert_close(chain[0].bias.grad, part(first.bias.grad, 0))
    torch.testing.assert_close(chain[2].bias.grad, second.bias.grad)
    assert chain.state_dict().keys() == {"0.weight", "0.bias", "2.weight", "2.bias"}


def side_by_side(rank, sequence):
    """Linears of one input share its collective."""
    gate, up = whole(6, 8)[0], torch.nn.Linear(6, 4, dtype=FP64)
    op = ops.ParallelLinear([split(gate, "column", sequence), split(up, "column", sequence)])
    x = torch.randn(4, 6, dtype=FP64)
    whole_x, leaf = (
        x.clone().requires_grad_(),
        (part(x, 0) if sequence else x).clone().requires_grad_(),
    )
    expected = torch.cat([part(gate(whole_x), -1), part(up(whole_x), -1)], -1)
    y = op(leaf)
    torch.testing.assert_close(y, expected)
    # each process uses its part: the gradients of the input are those of all parts
    y.sum().backward()
    (gate(whole_x).sum() + up(whole_x).sum()).backward()
    torch.testing.assert_close(leaf.grad, part(whole_x.grad, 0) if sequence else whole_x.grad)
    text = str(opfuse.explain(op, leaf))
    assert text.count("AllGather" if sequence else "CopyToTensorParallelRegion") >= 1
    with pytest.raises(ValueError, match="by columns, all alike, or not at all"):
        ops.ParallelLinear([split(gate, "column", sequence), torch.nn.Linear(6, 4, dtype=FP64)])
    with pytest.raises(ValueError, match="by columns, all alike, or not at all"):
        ops.ParallelLinear([split(gate, "row", sequence)])


def kept(rank):
    """What is gathered is not kept: the part of this process is, and is gathered again."""
    op = ops.BasicLinear(64, 8, tensor_parallel_mode="column", sequence_parallel=True)
    x = torch.randn(16, 64, requires_grad=True)
    tensors = saved_tensors(lambda: op(x).sum())
    largest = max(t.numel() for t in tensors if t is not op.weight and t.shape != op.weight.shape)
    assert largest == x.numel(), [t.shape for t in tensors]
    frozen = ops.BasicLinear(64, 8, tensor_parallel_mode="column", sequence_parallel=True)
    frozen.weight.requires_grad_(False)
    tensors = saved_tensors(lambda: frozen(x).sum())
    assert not any(t.shape[-1:] == (64,) and t.shape != frozen.weight.shape for t in tensors)
    op(x.detach()).sum().backward()  # nothing before the weight takes part in the backward
    again = torch.autograd.grad(op(x).sum(), op.weight)
    torch.testing.assert_close(op.weight.grad, *again)


def sent(rank):
    """What reports say of the bytes that a process sends."""
    column = ops.Linear(64, 32, tensor_parallel_mode="column", sequence_parallel=True)
    row = ops.BasicLinear(32, 64, tensor_parallel_mode="row")
    chain = opfuse.Sequential(column, row)
    report = opfuse.explain(chain, torch.ones(8, 64, requires_grad=True))
    shard, whole_size = 8 * 64 * 4, 16 * 64 * 4
    (call,) = report.calls
    rows = [(each.op, each.forward, each.backward) for each in call.sent]
    # the gather is repeated in the backward, whose adjoint sends as much
    assert sum(f for op, f, _ in rows if op == "AllGather") == shard
    assert sum(b for op, _, b in rows if op == "AllGather") == 2 * shard
    assert ("AllReduce", whole_size, 0) in rows
    assert "sends 6.1 kB in the forward and 4.1 kB in the backward (AllReduce, AllGather)" in (
        str(report).replace("AllGather, AllReduce", "AllReduce, AllGather")
    )
    assert {"op", "forward", "backward", "overlapped", "path", "call"} == set(
        report.to_dict()["sent"][0]
    )
    with torch.no_grad():
        (call,) = opfuse.explain(chain, torch.ones(8, 64)).calls
    assert [each.backward for each in call.sent] == [0, 0]


def arguments(rank):
    """What is refused, what a representation shows, and what one process clears."""
    with pytest.raises(
        ValueError, match=r"out_features to be a multiple of 2, the number of processes, got 3"
    ):
        ops.Linear(4, 3, tensor_parallel_mode="column")
    with pytest.raises(ValueError, match=r"BasicLinear expected in_features to be a multiple of 2"):
        ops.BasicLinear(3, 4, tensor_parallel_mode="row")
    with pytest.raises(ValueError, match="Bias expected size to be a multiple of 2"):
        ops.Bias(3, tensor_parallel=True)
    row = ops.Linear(4, 6, tensor_parallel_mode="row", sequence_parallel=True)
    assert (
        "in_features=2, out_features=6, bias=True, tensor_parallel_mode='row', tensor_parallel_size=2"
        in repr(row)
    )
    assert row.bias.any() != bool(rank) and len(row.basic_ops) == 2
    assert [type(op).__name__ for op in row.basic_ops[1].ops_as_run] == ["Bias", "ReduceScatter"]
    column = ops.BasicLinear(4, 6, tensor_parallel_mode="column")
    assert (column.local_out_features, column.tensor_parallel_size) == (3, 2)
    for group in [dist.new_group([each]) for each in range(2)]:
        if dist.get_rank(group) >= 0:
            alone = ops.Linear(
                3,
                5,
                tensor_parallel_mode="row",
                tensor_parallel_group=group,
                sequence_parallel=True,
            )
    assert alone.tensor_parallel_mode is None and not alone.sequence_parallel
    assert alone(torch.ones(3)).shape == (5,)
    with pytest.raises(
        ValueError, match=r"expected a weight of shape \(6, 4\) and a bias of shape \(6,\), got"
    ):
        row.load_whole(torch.ones(6, 2), torch.ones(6))
    with pytest.raises(ValueError, match="keyword arguments for 2 basic ops, got 3"):
        row(torch.ones(2, 2), basic_op_kwargs=[{}, {}, {}])
    row(torch.ones(2, 2), basic_op_kwargs=[{}, {}])
    named = ops.Linear(4, 4, tensor_parallel_group=dist.new_group(), tensor_parallel_mode="row")
    assert copy.deepcopy(named).tensor_parallel_group is named.tensor_parallel_group
    with pytest.raises(
        TypeError, match="holds a process group cannot be pickled: save its state_dict"
    ):
        torch.save(named, io.BytesIO())
    torch.save(row, io.BytesIO())


def experts(rank, sizes, name):
    """A mixture of experts, each process with half of them, and the whole one on each process."""
    dtype = FP64
    torch.manual_seed(3)
    whole_layers = [
        ops.GroupedLinear(4, 6, 8, dtype=dtype),
        ops.GroupedLinear(4, 8, 6, dtype=dtype),
    ]
    mine = [ops.GroupedLinear(2, 6, 8, dtype=dtype), ops.GroupedLinear(2, 8, 6, dtype=dtype)]
    for of_all, of_part in zip(whole_layers, mine, strict=True):
        for i in range(2):
            for kind in ("weight", "bias"):
                getattr(of_part, f"{kind}{i}").data.copy_(getattr(of_all, f"{kind}{2 * rank + i}"))
    dispatch, combine = ops.TokenDispatch(4), ops.TokenCombine()
    dispatch.set_extra_output_channel(0, "sizes", output_to_caller=False)
    dispatch.set_extra_output_channel(1, "routes", output_to_caller=False)
    combine.set_extra_input_channel(0, "routes")
    for linear in mine:
        linear.set_extra_input_channel(0, "sizes")
    chain = opfuse.Sequential(dispatch, mine[0], ops.GELU(), mine[1], combine)
    for linear in whole_layers:
        linear.set_extra_input_name(0, "sizes")
    reference = opfuse.Sequential(whole_layers[0], ops.GELU(), whole_layers[1])

    here = torch.tensor(sizes[rank])
    xs = [torch.randn(sum(of_rank), 6, dtype=dtype) for of_rank in sizes]
    leaf = xs[rank].clone().requires_grad_()
    y = chain(leaf, here)
    y.square().sum().backward()
    # the parameters of an expert get gradients of the rows of all processes
    for other, x in enumerate(xs):
        x.requires_grad_()
        expected = reference(x, torch.tensor(sizes[other]))
        expected.square().sum().backward()
        if other == rank:
            torch.testing.assert_close(y, expected)
            torch.testing.assert_close(leaf.grad, x.grad)
    for of_all, of_part in zip(whole_layers, mine, strict=True):
        for i in range(2):
            for kind in ("weight", "bias"):
                wanted = getattr(of_all, f"{kind}{2 * rank + i}").grad
                torch.testing.assert_close(getattr(of_part, f"{kind}{i}").grad, wanted)
    with pytest.raises(ValueError, match="TokenDispatch expected 1 rows, as the split sizes say"):
        chain(leaf, torch.tensor([1, 0, 0, 0]))
    with torch.no_grad():
        torch.testing.assert_close(chain(leaf, here), y)


def refused_loss(rank, numbers):
    """What is raised for a loss that is not computed."""
    op = ops.VocabParallelCrossEntropy(**numbers)
    return raised(lambda: op(torch.randn(3, 5), torch.tensor([1, 7, 2])))


def loss(rank, numbers, dtype, sequence, bias, fused):
    """A head that is split by classes, and the loss, beside the whole one in fp64."""
    torch.manual_seed(2)
    head = torch.nn.Linear(6, 10, bias=bias, dtype=FP64)
    head.weight.data *= 8
    given = dict(tensor_parallel_mode="column", sequence_parallel=sequence, dtype=dtype)
    mine = ops.Linear(6, 10, bias=bias, **given)
    mine.load_whole(head.weight.to(dtype), None if head.bias is None else head.bias.to(dtype))
    head.weight.data.copy_(head.weight.to(dtype))
    x = torch.randn(2, 16, 6).to(dtype).to(FP64).requires_grad_()
    targets = torch.randint(10, (2, 16))
    targets[0, 3] = numbers.get("ignore_index", 9)
    chain = opfuse.Sequential(mine, ops.VocabParallelCrossEntropy(**numbers))
    leaf = (part(x, 0) if sequence else x).detach().to(dtype).requires_grad_()
    call = lambda: chain(leaf, targets)  # noqa: E731
    if fused:
        assert "linear+loss, split classes" in str(opfuse.explain(chain, leaf, targets))
    y = call()
    reference = ops.CrossEntropy(**numbers)
    expected = reference(head(x), targets)
    close = {FP64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.05}[dtype]
    torch.testing.assert_close(y.to(FP64), expected, atol=close, rtol=close)
    dy = torch.randn(expected.shape, dtype=FP64)
    expected.backward(dy)
    y.backward(dy.to(y.dtype))
    dx = part(x.grad, 0) if sequence else x.grad
    torch.testing.assert_close(leaf.grad.to(FP64), dx, atol=close, rtol=close)
    torch.testing.assert_close(
        mine.weight.grad.to(FP64), part(head.weight.grad, 0), atol=close, rtol=close
    )
    if bias:
        torch.testing.assert_close(
            mine.bias.grad.to(FP64), part(head.bias.grad, 0), atol=close, rtol=close
        )
    with torch.no_grad():
        torch.testing.assert_close(call(), y.detach(), atol=close, rtol=close)
    found = raised(lambda: chain(leaf, torch.full_like(targets, 10)))
    assert found[0] == "IndexError" and "target 10 is not one of 10 classes" in found[1]


def log_probs(rank, numbers, dtype, sequence, bias, frozen, fused):
    """A head that is split by classes, and log-probabilities, beside the whole one in fp64."""
    torch.manual_seed(2)
    head = torch.nn.Linear(6, 10, bias=bias, dtype=FP64).requires_grad_(not frozen)
    given = dict(tensor_parallel_mode="column", sequence_parallel=sequence, dtype=dtype)
    mine = ops.Linear(6, 10, bias=bias, **given).requires_grad_(not frozen)
    mine.load_whole(head.weight.to(dtype), None if head.bias is None else head.bias.to(dtype))
    for param in head.parameters():
        param.data.copy_(param.to(dtype))
    x = torch.randn(2, 16, 6).to(dtype).to(FP64).requires_grad_()
    tokens = torch.randint(10, (2, 16))
    tokens[0, 3] = numbers.get("ignore_index", -100)
    chain = opfuse.Sequential(mine, ops.VocabParallelTokenLogProb(**numbers))
    leaf = (part(x, 0) if sequence else x).detach().to(dtype).requires_grad_()
    # the log-probability alone, all outputs, and the extra ones alone
    many = chain[1].num_extra_outputs > 0
    for places in (slice(None), slice(0, 1), *([slice(1, None)] if many else [])):
        with opfuse.options(prefer="memory" if fused else "speed"):
            if fused:
                kept = frozen and not many
                name = "" if kept else ", computed again"
                text = " ".join(str(opfuse.explain(chain, leaf, tokens)).split())
                assert f"linear+log-probability, split classes{name}" in text
            y = chain(leaf, tokens)
        expected = ops.TokenLogProb(**numbers)(head(x), tokens)
        y, expected = [given if many else (given,) for given in (y, expected)]
        for got, wanted in zip(y, expected, strict=True):
            assert got.shape == wanted.shape
            if got.is_floating_point():
                close(got, wanted, dtype)
            elif dtype is FP64:
                assert torch.equal(got, wanted)
        y, expected = [
            [t for t in given[places] if t.is_floating_point()] for given in (y, expected)
        ]
        if not y:
            continue
        steps = [torch.linspace(-1, 1, t.numel(), dtype=FP64).view(t.shape) for t in y]
        leaves = [x, *head.parameters()][: 1 if frozen else None]
        dx, *of_params = torch.autograd.grad(expected, leaves, steps)
        leaves = [leaf, *mine.parameters()][: 1 if frozen else None]
        steps = [step.to(t.dtype) for step, t in zip(steps, y, strict=True)]
        got = torch.autograd.grad(y, leaves, steps)
        close(got[0], part(dx, 0) if sequence else dx, dtype)
        for mine_, wanted in zip(got[1:], of_params, strict=True):
            close(mine_, part(wanted, 0), dtype)
    with torch.no_grad():
        again = chain(leaf, tokens)
        for got, wanted in zip(again if many else (again,), ops.TokenLogProb(**numbers)(head(x), tokens) if many else expected, strict=True):  # fmt: skip
            close(got, wanted, dtype)
    found = raised(lambda: chain(leaf, torch.full_like(tokens, 10)))
    assert found[0] == "IndexError" and "token 10 is not one of 10 classes" in found[1]


def close(got, wanted, dtype):
    """As near as the dtype of the products allows."""
    limit = {FP64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.06}[dtype]
    torch.testing.assert_close(got.to(FP64), wanted.to(FP64), atol=limit, rtol=limit)


def compiled(rank, mode, sequence, own):
    """The first call of a chain of a group may be traced: of all processes, or of the test's ``own``."""
    torch._dynamo.reset()
    (layer,) = whole(6, 4)
    op = split(layer, mode, sequence, tensor_parallel_group=dist.new_group() if own else None)
    x = torch.randn(4, 6, dtype=FP64)
    chain = torch.compile(opfuse.Sequential(op, ops.GELU()), backend="aot_eager")
    expected = torch.nn.functional.gelu(layer(x), approximate="tanh")
    y = chain(input_part(x, mode, sequence))
    torch.testing.assert_close(y, output_part(expected, mode, sequence))


def strangers(rank):
    """A group without this process, and what is no group."""
    groups = [dist.new_group([each]) for each in range(2)]
    for build in (ops.AllReduce, ops.VocabParallelCrossEntropy, ops.TokenCombine):
        for other in (groups[1 - rank], "world"):
            with pytest.raises((TypeError, ValueError), match="expected a process group that has"):
                build(other)
    with pytest.raises((TypeError, ValueError), match="expected a process group that has"):
        ops.Linear(4, 4, tensor_parallel_mode="column", tensor_parallel_group=groups[1 - rank])


class Tracker:
    """As those of Megatron-LM: a generator state of its own."""

    def __init__(self, seed):
        self._seed = seed

    @contextlib.contextmanager
    def fork(self):
        """Draw in the block from this process's own state."""
        with torch.random.fork_rng():
            torch.manual_seed(self._seed)
            yield


def trackers(rank):
    """Weights are drawn by the tracker, within the bound of the whole layer."""
    drawn = {}
    for build in (ops.Linear, ops.BasicLinear):
        op = build(
            64, 32, tensor_parallel_mode="row", rng_state_tracker_function=lambda: Tracker(rank)
        )
        drawn[build] = op.weight
        assert op.weight.abs().max() <= 64**-0.5 and op.weight.abs().max() > 0.9 * 64**-0.5
    x, drop = torch.ones(64), ops.TrackedDropout(0.5, lambda: Tracker(rank))
    masks = [torch.empty(64) for _ in range(2)]
    dist.all_gather(masks, drop(x))
    assert not torch.equal(*masks) and torch.equal(drop(x), masks[rank])
    torch.manual_seed(1)
    before = torch.rand(1)
    torch.manual_seed(1)
    drop(x)
    assert torch.equal(torch.rand(1), before)
    others = [torch.empty_like(drawn[ops.BasicLinear]) for _ in range(2)]
    dist.all_gather(others, drawn[ops.BasicLinear].detach())
    assert not torch.equal(*others)


class SlowGather(opfuse.FusedOperation):
    """A gather and a linear; wrong on the second process where it is told so."""

    wrong = False

    def fuser_forward(self, ctxs, input_, **given):
        y, extras = self.run_separately(ctxs, input_, **given)
        return (y + 1 if self.wrong and dist.get_rank() else y), extras

    def fuser_backward(self, ctxs, grad_output, **given):
        return self.run_separately_backward(ctxs, grad_output, **given)


def tuned(rank, folder, wrong):
    """Processes tune together: as often, and with the same entries."""
    SlowGather.wrong = wrong
    fusion = opfuse.Fusion((ops.AllGather, ops.BasicLinear), SlowGather, name="slow gather")
    alone = opfuse.plugins.using("")  # an installed plugin would be measured too
    with tables_in(f"{folder}/{rank}"), registered("joint", fusion), alone:
        op = ops.BasicLinear(16, 8, tensor_parallel_mode="column", sequence_parallel=True)
        x = torch.ones(8, 16, requires_grad=True)
        # one process counts more calls in a turn if it may
        report = opfuse.tune(op, x)
        found = next(r.found for r in report.results if r.fusion == "slow gather")
        assert op(x).shape == (16, 4)
        return found.speed, found.noise, found.wrong


# Faults: each returns what it raised


def raised(call):
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def uneven(rank):
    """Rows that differ are refused on both, and the group goes on."""
    chain = opfuse.Sequential(ops.AllGather(), ops.GELU())
    chain(torch.ones(2, 3))
    first = raised(lambda: chain(torch.ones(5 + rank, 3)))
    second = raised(lambda: chain(torch.ones(4 - rank, 3)))
    assert chain(torch.ones(3, 3)).shape == (6, 3)
    return first, second


def other_options(rank):
    op = ops.AllReduce()
    with opfuse.options(prefer="memory" if rank else "speed"):
        return raised(lambda: op(torch.ones(2)))


class Nothing:
    """A plugin."""

    @opfuse.hookimpl
    def opfuse_options(self):
        return {"nothing.at_all": False}


def other_version(rank):
    """The same plugin in two versions."""
    given = dict(name="nothing", distribution="opfuse-plugin-nothing", version=f"0.{rank}")
    record = opfuse.plugins.register(Nothing(), **given)
    try:
        return raised(lambda: ops.AllReduce()(torch.ones(2)))
    finally:
        opfuse.plugins.remove(record)


def other_table(rank, folder):
    """A tuning table on one of them."""
    with tables_in(f"{folder}/{rank}"):
        if rank:
            fusion = opfuse.Fusion((ops.Bias, ops.GELU), SlowGather, name="bias and gelu")
            with registered("joint", fusion):
                opfuse.tune(opfuse.Sequential(ops.Bias(4), ops.GELU()), torch.ones(2, 4))
        return raised(lambda: ops.AllReduce()(torch.ones(2)))


def other_ops(rank):
    more = [ops.GELU()] if rank else []
    return raised(lambda: opfuse.Sequential(ops.AllReduce(), *more)(torch.ones(2)))


def frozen_on_one(rank):
    op = ops.BasicLinear(4, 4, tensor_parallel_mode="column")
    op.weight.requires_grad_(not rank)
    return raised(lambda: op(torch.ones(2, 4)))


def extra_input_on_one(rank):
    """Only on one process an extra input needs a gradient, and with it the input of a collective."""
    chain = opfuse.Sequential(
        ops.AddExtraInput(), ops.BasicLinear(4, 4, tensor_parallel_mode="column")
    )
    extra = torch.ones(2, 4, requires_grad=not rank)
    return raised(lambda: chain(torch.ones(2, 4), extra))


def other_width(rank):
    """More features on one process: over gloo the other one ended, or the sum was wrong."""
    chain = opfuse.Sequential(ops.BasicLinear(4, 4 + 2 * rank), ops.ReduceScatter())
    return raised(lambda: chain(torch.ones(2, 4)))


def other_dim(rank):
    """As many numbers on both processes, which each would put elsewhere."""
    return raised(lambda: opfuse.Sequential(ops.AllGather(dim=rank))(torch.ones(2, 4)))


def same_error(rank):
    """An error that all raise is their own, and the group goes on."""
    op = ops.BasicLinear(4, 4, tensor_parallel_mode="column")
    found = raised(lambda: op(torch.ones(2, 3)))
    assert op(torch.ones(2, 4)).shape == (2, 2)
    return found


class Late:
    """A collective that ends here long after it does elsewhere."""

    def __init__(self, work):
        self._work, self._end = work, time.monotonic() + 1

    def is_completed(self):
        return time.monotonic() > self._end and self._work.is_completed()

    def wait(self, timeout=None):
        if timeout is not None and not self.is_completed():
            raise RuntimeError("not yet")
        self._work.wait()


class RaisesEverywhere(ops.Identity):
    """Raises on all processes."""

    def op_forward(self, ctx, input_, *unread):
        raise ArithmeticError("no luck")


def same_error_behind_a_collective(rank):
    """All raise it, one of them while the other has yet to see the end of the collective before."""
    chain = opfuse.Sequential(ops.AllReduce(), RaisesEverywhere())
    reduce = dist.all_reduce
    if rank:
        dist.all_reduce = lambda *given, **more: Late(reduce(*given, **more))
    try:
        found = raised(lambda: chain(torch.ones(2)))
    finally:
        dist.all_reduce = reduce
    assert ops.AllReduce()(torch.ones(2)).tolist() == [2, 2]
    return found


class Raises(ops.Identity):
    """Raises on the second process, where it is asked to."""

    asked = False

    def op_forward(self, ctx, input_, *unread):
        if self.asked and dist.get_rank():
            raise ArithmeticError("no luck")
        return input_


class RaisesBackward(ops.Identity):
    """Raises in the backward, on the second process."""

    saved_names, grad_input = (), "same"

    def op_backward(self, ctx, grad_output):
        if dist.get_rank():
            raise ArithmeticError("no luck")
        return grad_output, ()


def one_raises(rank):
    chain = opfuse.Sequential(Raises(), ops.AllReduce())
    chain(torch.ones(2))  # the collective is known, so that one process is in it
    chain[0].asked = True
    found = raised(lambda: chain(torch.ones(2)))
    return found, raised(lambda: chain(torch.ones(2)))


def one_raises_backward(rank):
    chain = opfuse.Sequential(ops.CopyToTensorParallelRegion(), RaisesBackward())
    y = chain(torch.ones(2, requires_grad=True))
    return raised(lambda: y.sum().backward())


def another_call(rank):
    """One process calls with a shape that it knows, the other with a new one."""
    op = ops.AllReduce()
    op(torch.ones(2))
    return raised(lambda: op(torch.ones(3) if rank else torch.ones(2)))


class RaisesOnce(ops.Identity):
    """Raises on the first process, where it is asked to."""

    asked = False

    def op_forward(self, ctx, input_, *unread):
        if self.asked and not dist.get_rank():
            raise ArithmeticError("no luck")
        return input_


class RaisesTheSame(ops.Identity):
    """Raises one and the same error in each call."""

    error = ArithmeticError("no luck")

    def op_forward(self, ctx, input_, *unread):
        raise self.error


def the_same_error_twice(rank):
    """Each time the other process learns of it, and both go on."""
    chain = opfuse.Sequential(RaisesTheSame(), ops.AllReduce())
    found = [raised(lambda: chain(torch.ones(2))) for _ in range(2)]
    assert ops.AllReduce()(torch.ones(2)).tolist() == [2, 2]
    return found


def one_fails_while_the_other_compares(rank, how):
    """One fails before it compares a call, or in a call that it knows; then all call the same."""
    op = RaisesOnce()
    chain = opfuse.Sequential(op, ops.Linear(3, 3, bias=False), ops.AllReduce())
    for _ in range(3):  # then all expect this call again, whatever these processes ran before
        chain(torch.ones(2, 3))
    op.asked = how == "in an op"
    wrong = torch.ones(2, 3) if op.asked else torch.ones(5, 7)
    found = raised(lambda: chain(torch.ones(5, 3) if rank else wrong))
    op.asked = False
    return found, [chain(torch.ones(rows, 3)).shape[0] for rows in (6, 5, 2, 7)]


def one_plans_again(rank):
    """A process may plan what it runs again, and the others need not."""
    op = ops.AllReduce()
    op(torch.ones(2))
    if rank:
        opfuse.Sequential(ops.GELU()).append(ops.ReLU())(torch.ones(2))
        opfuse.FusibleOperation._count_change()
    return op(torch.ones(2)).tolist()


def one_dies(rank, cls):
    core._ANSWER = 1.0  # of a process of its own
    op = cls()
    op(torch.ones(2))
    if rank:
        os._exit(1)
    return raised(lambda: op(torch.ones(2)))
