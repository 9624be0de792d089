"""What the processes of the tests run: tensor-parallel layers beside whole ones."""

from __future__ import annotations

import contextlib
import copy
import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from clock import watching
from opfuse_distributed import ranks as core
from opfuse_overlap import kernels
from tensor_parallel import FP64, input_part, output_part, part, raised, split, whole
from tuned import Prescribed, tables_in

import opfuse
from opfuse import ops
from opfuse.report.calls import saved_bytes
from opfuse.tuning import table as tables
from opfuse.tuning import timing
from opfuse.tuning.table import Measurement


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
    leaf = input_part(x, mode, sequence).detach().clone().requires_grad_()
    expected = layer(x)
    dy = torch.randn(*expected.shape, dtype=dtype)
    expected.backward(dy)
    with overlapped(provider, pieces):
        forward, backward = fused_steps(op, leaf)
        assert len(forward) == len(backward) == 1 and forward[0] and backward == forward
        y = op(leaf)
        y.backward(output_part(dy, mode, sequence))
        with torch.no_grad():
            assert torch.equal(op(leaf), y)
    mine = output_part(expected, mode, sequence)
    close(y, mine, dtype)
    close(leaf.grad, input_part(x.grad, mode, sequence), dtype)
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


def turns(rank, provider):
    """How many turns of the group a forward and a backward take."""
    (layer,), found = whole(6, 4), []
    talk = core.Group(None).talk
    for mode in ("column", "row"):
        op = split(layer, mode, True)
        x = torch.randn(4, op.in_features, dtype=FP64, requires_grad=True)
        with overlapped(provider, pieces=1):
            before = talk.turn
            y = op(x)
            found.append(talk.turn - before)
            y.sum().backward()
            found.append(talk.turn - before - found[-1])
    return found


def fails(rank, mode, way, backward):
    """The second process fails in a product, once pieces are on their way; what each raised."""
    if way == "dies":
        core._ANSWER = 1.0  # of a process of its own
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
        # all that the first one needed may have come before
        return raised(lambda: [op(x).sum().backward() for _ in range(2)])


# A whole MLP


def an_mlp(rank, sequence, what, provider="c10d"):
    """Two layers under one of the things that change how a chain runs."""
    dtype = torch.float32 if what == "autocast" else FP64
    chain, first, second = mlp(6, 8, sequence, dtype=dtype)
    if what == "a copy":
        chain = copy.deepcopy(chain)
    if what == "a bias that is frozen":
        for layer in (first, second, chain[0], chain[2]):
            layer.bias.requires_grad_(False)
    if what == "weights that are frozen":
        for layer in (first, second, chain[0], chain[2]):
            layer.weight.requires_grad_(False)
    if what == "a weight's sum":
        chain, *_ = mlp(6, 8, sequence)
        into_sums(chain, first, second, sequence)
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=what == "autocast")
    for rows in (8, 2, 8):  # of another size, and as before
        x = torch.randn(rows, 3, 6, dtype=dtype)
        mine = part(x, 0) if sequence else x
        leaf, whole_x = (
            t.clone().requires_grad_(what != "an input that is data") for t in (mine, x)
        )
        for module in (chain, first, second):
            module.zero_grad()
        with overlapped(provider, 2), autocast:
            given = {"use_reentrant": False, "context_fn": opfuse.checkpoint_contexts}
            if what == "a checkpoint":
                y = torch.utils.checkpoint.checkpoint(chain, leaf, **given)
            else:
                y = chain(leaf)
        with autocast:
            expected = second(torch.nn.functional.gelu(first(whole_x), approximate="tanh"))
        rule = torch.bfloat16 if what == "autocast" else dtype
        close(y, part(expected, 0) if sequence else expected, rule)
        expected.sum().backward()
        y.sum().backward()
        if leaf.requires_grad:
            close(leaf.grad, part(whole_x.grad, 0) if sequence else whole_x.grad, rule)
        pairs = [
            (chain[0].weight, first.weight, lambda grad: part(grad, 0)),
            (chain[2].weight, second.weight, lambda grad: part(grad, 1)),
            (chain[0].bias, first.bias, lambda grad: part(grad, 0)),
            (chain[2].bias, second.bias, lambda grad: grad),
        ]
        for ours, theirs, of in pairs:
            grad = getattr(ours, "main_grad", ours.grad)
            assert (grad is None) == (theirs.grad is None)
            if grad is not None:
                close(grad, of(theirs.grad), rule)
            if hasattr(ours, "main_grad"):
                assert ours.grad is None
                ours.main_grad.zero_()


def into_sums(chain, first, second, sequence):
    """Layers whose weights' gradients are added to a sum of their own."""
    for place, layer, mode in ((0, first, "column"), (2, second, "row")):
        op = split(layer, mode, sequence, accumulate_into_main_grad=True)
        op.weight.main_grad = torch.zeros_like(op.weight)
        chain[place] = op


def extra_input_on_one(rank):
    """Where only one process needs the gradient that is added up, none starts, and none waits."""
    column = ops.BasicLinear(6, 4, tensor_parallel_mode="column")
    chain = opfuse.Sequential(ops.AddExtraInput(), column)
    x, extra = torch.randn(4, 6), torch.randn(4, 6, requires_grad=not rank)
    with overlapped(), pytest.raises(RuntimeError, match="differ in .* gradients of: the input of"):
        chain(x, extra)


def kept_bytes(rank):
    """What is gathered is not kept: the part of this process is."""
    op = ops.BasicLinear(64, 8, tensor_parallel_mode="column", sequence_parallel=True)
    x = torch.randn(16, 64, requires_grad=True)
    with overlapped():
        op(x)
        kept = saved_bytes(lambda: op(x), [op.weight])
    assert kept == x.nbytes


# Conditions


def reasons(model, x, name):
    """Why fusions of this plugin were refused, by name."""
    refused = opfuse.explain(model, x).calls[0].plan.refused
    return [each.reason for each in refused if each.fusion == name]


def is_declined(rank):
    """By default nothing changes on a CPU; each refusal has its sentence."""
    column = ops.BasicLinear(6, 4, tensor_parallel_mode="column", sequence_parallel=True)
    x = torch.randn(4, 6, requires_grad=True)
    with opfuse.plugins.using("overlap"):
        (why,) = reasons(column, x, "gather+linear")
        assert why.startswith("on cpu products and collectives share the processor")
        assert "opfuse tune measures it" in why and "overlap.use='always'" in why
        with opfuse.options(**{"overlap.use": "never"}):
            assert reasons(column, x, "gather+linear") == ["the option overlap.use says never"]
        for alone in [dist.new_group([each]) for each in range(2)]:
            if dist.get_rank(alone) >= 0:
                chain = opfuse.Sequential(ops.AllGather(alone), ops.BasicLinear(6, 4))
        assert "one process, which sends" in reasons(chain, x, "gather+linear")[0]
        copies = ops.BasicLinear(6, 4, tensor_parallel_mode="column")
        with torch.no_grad():
            (why,) = reasons(copies, x, "copy+linear")
        assert why == "nothing is sent in the forward, and no backward follows"
    with overlapped():
        chain = opfuse.Sequential(ops.AllGather(dim=1), ops.BasicLinear(6, 4))
        (why,) = reasons(chain, torch.randn(2, 3, 6), "gather+linear")
        assert why == "the AllGather is of dimension 1, and pieces are of dimension 0"
        chain = opfuse.Sequential(Doubled(6, 4), ops.AllReduce())
        assert fused_steps(chain, x)[0] == [None, None]
    with overlapped("symm_mem"):
        (why,) = reasons(copies, x, "copy+linear")
        assert why.startswith("symm_mem has no product with a CopyToTensorParallelRegion")
    with overlapped(pieces=-1), pytest.warns(opfuse.PluginWarning, match="at least 0, got -1"):
        column(x)


class Doubled(ops.BasicLinear):
    """Another product."""

    def op_forward(self, ctx, input_, *unread):
        return 2 * super().op_forward(ctx, input_)


def as_measured(rank, folder):
    """What ``opfuse tune`` found decides: whether, and in how many pieces."""
    with tables_in(f"{folder}/{rank}"):
        column = ops.BasicLinear(6, 4, tensor_parallel_mode="column", sequence_parallel=True)
        x = torch.randn(16, 6, requires_grad=True)
        with opfuse.plugins.using("overlap"):
            for speed, pieces in ((0.5, 8), (2.0, 8)):
                found = Measurement(speed, 0.0, 1e-3, configuration={"pieces": pieces})
                with Prescribed(**{"gather+linear": found}):
                    opfuse.tune(column, x)
                (step, *_), _ = fused_steps(column, x)
                assert (step is None) == (speed < 1)
                if speed < 1:
                    (why,) = reasons(column, x, "gather+linear")
                    assert why == "measured here, it has 0.50x the speed of the separate ops"
            with watching() as clock:
                column(x)
            assert clock.count == {"gather": pieces}


def is_tuned(rank, folder):
    """All processes find the same, in the pieces that were the fastest on the slowest of them."""
    with tables_in(f"{folder}/{rank}"):
        chain, *_ = mlp(16, 32, True, dtype=torch.float32)
        x = torch.randn(64, 16, requires_grad=True)
        briefly = mock.patch.object(timing, "_LONGEST", 0.5)  # which of them is faster is open
        with opfuse.plugins.using("overlap"), briefly:
            report = opfuse.tune(chain, x)
            chain(x).sum().backward()
            (table,) = [tables.table_for(x.device)]
        found = [each for shapes in table.entries.values() for each in shapes.values()]
        assert len(found) == 3 and not any(each.wrong for each in found), report
        return [(each.speed, each.configuration) for each in found]


def what_reports_say(rank):
    """What is sent is in the report, whether the ops run by themselves or beside their products."""
    chain, *_ = mlp(16, 32, True, dtype=torch.float32)
    x = torch.randn(8, 16, requires_grad=True)
    sent = {}
    for use in ("never", "always"):
        with opfuse.plugins.using("overlap"), opfuse.options(**{"overlap.use": use}):
            sent[use] = opfuse.explain(chain, x).to_dict()["sent"]
            text = str(opfuse.explain(chain, x))
    assert {each["overlapped"] for each in sent["always"]} == {True}
    assert {each["overlapped"] for each in sent["never"]} == {False}
    totals = [sum(each["forward"] for each in sent[use]) for use in sent]
    assert totals[0] == totals[1]
    assert [(each["forward"], each["backward"]) for each in sent["always"]] == [
        (8 * 16 * 4, 2 * 8 * 16 * 4),
        (8 * 16 * 4, 8 * 16 * 4),
    ]
    assert "of it beside other work" in " ".join(text.split())
