"""What one process of the test of the option ``prefer`` does. In a module of its own, to be imported."""

from __future__ import annotations

import torch
from torch import nn

import opfuse
from opfuse import ops


def worker(rank):
    """FSDP2 frees the weight that was saved, and gathers it again before the backward."""
    from torch.distributed.fsdp import fully_shard

    with opfuse.plugins.using(""):
        for each_op in (False, True):
            torch.manual_seed(0)
            plain, sharded = (
                opfuse.Sequential(ops.Linear(8, 8), ops.GELU(), ops.Linear(8, 8)) for _ in range(2)
            )
            sharded.load_state_dict(plain.state_dict())
            for module in (*((sharded[0], sharded[2]) if each_op else ()), sharded):
                fully_shard(module, reshard_after_forward=True)
            optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (plain, sharded)]
            x = torch.randn(4, 8)
            for _ in range(3):
                step(plain, x, "speed")
                kept = step(sharded, x.clone().requires_grad_(), "memory")
                # both weights are saved as they are, not yet freed
                assert kept.count((torch.float32, nn.Parameter)) == 2, kept
                for got, expected in zip(sharded.parameters(), plain.parameters(), strict=True):
                    assert torch.equal(got.grad.full_tensor(), expected.grad)
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()


def step(model, x, prefer):
    """A forward and a backward; gives dtype and class of what was saved."""
    kept = []

    def keep(tensor):
        kept.append((tensor.dtype, type(tensor)))
        return tensor

    with opfuse.options(prefer=prefer), torch.autocast("cpu", torch.bfloat16):
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            y = model(x)
    y.float().square().sum().backward()
    return kept
