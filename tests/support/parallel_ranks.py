"""What the processes of the tests of ``parallelize_module`` on ops run."""

from __future__ import annotations

import copy
import pathlib

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from opfuse_distributed.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel
from tensor_parallel import part
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

import opfuse
from opfuse import ops

FP64 = torch.float64


class Fused(opfuse.FusedOperation):
    """An op that replaces others."""


def mesh_of():
    return init_device_mesh("cpu", (dist.get_world_size(),))


def chain_of(bias=True, gate=False):
    """A norm, two layers and what is between them, the same on every process."""
    torch.manual_seed(5)
    given = dict(bias=bias, dtype=FP64)
    first, act = ops.Linear(6, 8, **given), ops.GELU()
    if gate:
        first = ops.ParallelLinear({"a": ops.Linear(6, 8, **given), "b": nn.Linear(6, 8, **given)})
        act = ops.SwiGLU()
    chain = opfuse.Sequential(ops.LayerNorm(6, dtype=FP64), first, act, ops.Linear(8, 6, **given))
    for param in chain.parameters():
        param.data += torch.randn_like(param) / 4
    return chain


def plan_of(sequence, local=True):
    """Styles for it."""
    if not sequence:
        return {"1": ColwiseParallel(), "3": RowwiseParallel(use_local_output=local)}
    rows = Shard(1)
    return {
        "0": SequenceParallel(),
        "1": ColwiseParallel(input_layouts=rows),
        "3": RowwiseParallel(output_layouts=rows, use_local_output=local),
    }


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def compare(chain, plain, sequence, called=True, given=None):
    """Output and gradients are those of the whole chain, on every process."""
    torch.manual_seed(7)
    x = torch.randn(2, 4, 6, dtype=FP64).requires_grad_()
    dy = torch.randn(2, 4, 6, dtype=FP64)
    mine = part(x, 1) if sequence else x
    leaf = mine.detach().clone().requires_grad_()
    y, expected = chain(leaf if given is None else given(leaf)), plain(x)
    torch.testing.assert_close(whole(y), expected if given or not sequence else part(expected, 1))
    expected.backward(dy)
    if isinstance(y, DTensor):
        y.backward(distribute_tensor(dy, y.device_mesh, y.placements))
    else:
        y.backward(part(dy, 1) if sequence else dy)
    torch.testing.assert_close(leaf.grad, part(x.grad, 1) if sequence else x.grad)
    for (name, param), theirs in zip(chain.named_parameters(), plain.parameters(), strict=True):
        if isinstance(param, DTensor):
            assert isinstance(param.grad, DTensor), name
            assert param.grad.placements == param.placements, name
        torch.testing.assert_close(whole(param.grad), theirs.grad, msg=name)


def a_chain(rank, sequence, bias, gate, called):
    """A chain in either plan, split before or after its first call."""
    plain, chain = chain_of(bias, gate), chain_of(bias, gate)
    if called:
        chain(torch.randn(2, 4, 6, dtype=FP64))
    parallelize_module(chain, mesh_of(), plan_of(sequence))
    compare(chain, plain, sequence)
    for module in (chain, plain):
        torch.optim.SGD(module.parameters(), lr=0.1).step()
        module.zero_grad()
    compare(copy.deepcopy(chain).requires_grad_(), copy.deepcopy(plain), sequence)


def dtensors_at_its_ends(rank, sequence):
    """The input may be a DTensor, and the output is one where the style says so."""
    plain, chain, mesh = chain_of(), chain_of(), mesh_of()
    rows = Shard(1) if sequence else Replicate()
    parallelize_module(chain, mesh, plan_of(sequence, local=False))
    if not sequence:
        chain = opfuse.Sequential(*chain[1:])
        plain = opfuse.Sequential(*plain[1:])
    compare(chain, plain, sequence, given=lambda x: DTensor.from_local(x, mesh, [rows]))
    y = chain(torch.randn(2, 4, 6, dtype=FP64))
    assert y.placements == (rows,) and y.shape == (2, 4 * (2 if sequence else 1), 6)


def as_torch_does(rank, sequence):
    """The same plan on modules of torch, by torch's styles, gives the same numbers."""
    from torch.distributed.tensor.parallel import style

    chain, mesh = chain_of(), mesh_of()
    theirs = nn.Sequential(
        nn.LayerNorm(6), nn.Linear(6, 8), nn.GELU(approximate="tanh"), nn.Linear(8, 6)
    ).double()
    theirs.load_state_dict(chain.state_dict())
    plan = {
        name: getattr(style, type(of).__name__)(
            **{
                key: getattr(of, key)[0] if key != "use_local_output" else of.use_local_output
                for key in ("input_layouts", "output_layouts", "use_local_output")
                if hasattr(of, key)
            }
        )
        for name, of in plan_of(sequence).items()
    }
    parallelize_module(theirs, mesh, plan)
    parallelize_module(chain, mesh, plan_of(sequence))
    torch.manual_seed(7)
    x = torch.randn(2, 4, 6, dtype=FP64)
    for module in (theirs, chain):
        module(part(x, 1) if sequence else x).square().sum().backward()
    for (name, param), other in zip(chain.named_parameters(), theirs.parameters(), strict=True):
        assert type(param) is type(other), name
        torch.testing.assert_close(whole(param.grad), whole(other.grad), msg=name)


def refusals(rank):
    """What the collectives do not match."""
    mesh = mesh_of()

    def split(style, op=None):
        parallelize_module(op or ops.Linear(6, 8), mesh, style)

    with pytest.raises(ValueError, match="expected input as Replicate"):
        split(ColwiseParallel(output_layouts=Replicate()))
    with pytest.raises(ValueError, match="expected input as Shard"):
        split(RowwiseParallel(input_layouts=Replicate()))
    with pytest.raises(ValueError, match="multiple of 2, the number of processes, got 5"):
        split(ColwiseParallel(), ops.Linear(6, 5))
    with pytest.raises(TypeError, match="GELU expected an op that can be split"):
        split(SequenceParallel(), ops.GELU())
    with pytest.raises(TypeError, match="BasicLinear expected an op that can be split"):
        split(SequenceParallel(), ops.Linear(6, 8))
    with pytest.raises(
        TypeError, match="BasicLinear expected to be Linear, or a basic op with par"
    ):
        split(ColwiseParallel(), ops.BasicLinear.reading(nn.Linear(6, 8)))
    with pytest.raises(TypeError, match="Fused expected to be Linear, or a basic op with par"):
        split(ColwiseParallel(), Fused([ops.GELU()]))
    op = ops.Linear(6, 8)
    split(ColwiseParallel(), op)
    with pytest.raises(ValueError, match="not split among processes, got one that is"):
        split(ColwiseParallel(), op)
    chain = chain_of()
    parallelize_module(chain, mesh, {"0": SequenceParallel(), "1": ColwiseParallel()})
    with pytest.raises(
        ValueError, match="LayerNorm gives S.*after it is said to take R: give both"
    ):
        chain(torch.randn(2, 4, 6, dtype=FP64))
    op = ops.BasicLinear(6, 8)
    split(ColwiseParallel(), op)
    op.weight = nn.Parameter(distribute_tensor(torch.randn(8, 6), mesh, [Shard(1)]))
    with pytest.raises(ValueError, match="BasicLinear.weight expected a DTensor split in dim"):
        op(torch.randn(3, 6))
    op.weight = nn.Parameter(torch.randn(8, 6))
    with pytest.raises(
        TypeError, match="BasicLinear.weight expected a DTensor split in dim.*0, got a P"
    ):
        op(torch.randn(3, 6))


def a_foreign_dtensor(rank, called):
    """A DTensor that no style placed is refused, before the first call and after it."""
    mesh, chain = mesh_of(), chain_of()
    x = torch.randn(2, 4, 6, dtype=FP64)
    if called:
        chain(x)
    chain[3].weight = nn.Parameter(distribute_tensor(chain[3].weight, mesh, [Replicate()]))
    for _ in range(2):
        with pytest.raises(TypeError, match="expected a plain weight, got a DTensor placed as"):
            chain(x)


def summed_norms(rank, build):
    """The option of norms: gradients are summed over the group, without any DTensor."""
    torch.manual_seed(3)
    plain, mine = (
        build(6, dtype=FP64),
        build(6, dtype=FP64, sequence_parallel_group=dist.group.WORLD),
    )
    x = torch.randn(4, 6, dtype=FP64)
    plain(x).pow(3).sum().backward()
    for _ in range(2):
        mine.zero_grad()
        mine(part(x, 0)).pow(3).sum().backward()
        for param, theirs in zip(mine.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(param.grad, theirs.grad)
    with opfuse.options(double_backward=True):
        y = mine(part(x, 0)).pow(3).sum()
        with pytest.raises(RuntimeError, match="second derivatives do not pass the sum"):
            torch.autograd.grad(y, mine.weight, create_graph=True)


def saved_by_two(rank, folder):
    """A checkpoint of two processes."""
    chain = chain_of(gate=True)
    parallelize_module(chain, mesh_of(), plan_of(False))
    dcp.save(chain.state_dict(), checkpoint_id=pathlib.Path(folder))
    return chain_of(gate=True).state_dict()


def loaded_by_two(rank, folder):
    """A checkpoint of one process, loaded by two."""
    chain = chain_of(gate=True)
    parallelize_module(chain, mesh_of(), plan_of(False))
    for param in chain.parameters():
        nn.init.zeros_(param)
    state = chain.state_dict()
    dcp.load(state, checkpoint_id=pathlib.Path(folder))
    chain.load_state_dict(state)
    plain = chain_of(gate=True)
    for name, value in chain.state_dict().items():
        torch.testing.assert_close(whole(value), plain.state_dict()[name] + 1, msg=name)


def keys_of_te(rank):
    """The keys and local shapes that Transformer Engine writes load into both kinds of split ops."""
    torch.manual_seed(2)
    weight, bias = torch.randn(8, 6), torch.randn(8)
    local = {"basic_ops.0.weight": part(weight, 0), "basic_ops.1.bias": part(bias, 0)}
    theirs, ours = ops.Linear(6, 8, tensor_parallel_mode="column"), ops.Linear(6, 8)
    parallelize_module(ours, mesh_of(), ColwiseParallel())
    for op in (theirs, ours):
        op.load_state_dict(dict(local))
        x = torch.randn(3, 6)
        torch.testing.assert_close(op(x), part(x @ weight.t() + bias, -1))
    assert torch.equal(ours.weight.full_tensor(), weight)


def fully_sharded(rank):
    """FSDP2 over it, two by two."""
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    plain, chain = chain_of(gate=True), chain_of(gate=True)
    parallelize_module(chain, mesh["tensor"], plan_of(False))
    for module in (chain[1], chain):
        fully_shard(module, mesh=mesh["data"])
    optimizers = [torch.optim.AdamW(of.parameters(), lr=1e-2) for of in (plain, chain)]
    for step in range(3):
        torch.manual_seed(step)
        x = torch.randn(2, 4, 6, dtype=FP64)
        plain(x).square().mean().backward()
        chain(x[rank // 2]).square().mean().backward()
        for (name, param), theirs in zip(chain.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(whole(param.grad), theirs.grad, msg=name)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
