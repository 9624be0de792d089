"""What one process of the recipe's distributed tests does. In a module of its own, to be imported."""

from __future__ import annotations

import torch
import torch.distributed as dist
from rounding import Rounding, RoundingPlugin
from torch import nn

import opfuse
from opfuse import ops

RECIPE = Rounding(levels=8)


def worker(rank):
    opfuse.plugins.register(RoundingPlugin(), name="rounding", distribution="rounding")
    with opfuse.plugins.using("rounding"):
        _one_rank_skips_an_op(rank)
        _sharded(rank)


def _one_rank_skips_an_op(rank):
    torch.manual_seed(0)
    model = nn.ModuleDict({"one": ops.BasicLinear(4, 4), "two": ops.BasicLinear(4, 4)})
    opfuse.assign_names(model)
    x = torch.full((2, 4), 3.0 + rank)
    for number in range(2):
        with opfuse.autocast(RECIPE, amax_reduction_group=dist.group.WORLD):
            y = model["one"](x)
            if rank == 0:
                y = model["two"](y)
        y.mul(number + 1 + rank).sum().backward()
    with opfuse.autocast(RECIPE, amax_reduction_group=dist.group.WORLD):
        model["one"](x)
    found = [
        float(getattr(q, name))
        for op in model.values()
        for q in op._quantizers.of(RECIPE).values()
        for name in ("amax", "updates")
    ]
    both = [torch.empty(len(found)) for _ in range(2)]
    dist.all_gather(both, torch.tensor(found))
    assert torch.equal(*both), both
    # the input of `one`, the larger of both ranks; its gradient after two backwards
    assert found[:2] == [4, 3] and found[5] == 2
    # the gradient of `two` arrived on one rank only, and moves the scale on both
    assert found[10:] == [2, 2], found


def other_than_the_update(rank):
    """One process calls a chain, and the other one takes maxima as in the step before."""
    opfuse.plugins.register(RoundingPlugin(), name="rounding", distribution="rounding")
    with opfuse.plugins.using("rounding"):
        group, x, told = dist.new_group(), torch.ones(2, 4), []
        model = opfuse.Sequential(ops.BasicLinear(4, 4))
        other = opfuse.Sequential(ops.AllReduce(group))
        opfuse.assign_names(model)
        for number in range(4):
            try:
                if rank and number == 3:
                    other(x)
                with opfuse.autocast(RECIPE, amax_reduction_group=group):
                    model(x)
            except RuntimeError as error:
                told.append(str(error))
    return told


def one_block_or_two(rank):
    """One process takes the maxima of two chains at once, and the other one by one."""
    opfuse.plugins.register(RoundingPlugin(), name="rounding", distribution="rounding")
    with opfuse.plugins.using("rounding"):
        layers, x = [ops.BasicLinear(4, 4), ops.AllReduce(dist.new_group())], torch.ones(2, 4)
        one, other = opfuse.Sequential(*layers), opfuse.Sequential(ops.GELU(), *layers)
        try:
            for chains in [(one,), (other,)] if rank else [(one, other)]:
                with opfuse.autocast(RECIPE):
                    [chain(x) for chain in chains]
        except RuntimeError as error:
            return str(error)


def _sharded(rank):
    """FSDP2 writes new values at an old address, without a new version."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    plain = opfuse.Sequential(ops.Linear(8, 8, bias=False))
    sharded = opfuse.Sequential(ops.Linear(8, 8, bias=False))
    sharded.load_state_dict(plain.state_dict())
    fully_shard(sharded)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (plain, sharded)]
    x = torch.randn(4, 8)
    for _ in range(3):
        for weights in ("fresh", "cached"):
            results = []
            for model in (plain, sharded):
                with opfuse.autocast(Rounding(), weights=weights):
                    y = model(x)
                y.square().sum().backward()
                results.append(y.detach())
            assert torch.equal(*results)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
