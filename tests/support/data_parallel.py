"""What one process of the data-parallel tests does. In a module of its own, so that the other process can import it."""

from __future__ import annotations

import copy
import warnings

import fusing
import torch
from torch import nn

import opfuse
from opfuse import ops
from opfuse.core.introspection import op_class

WIDTH = 16
WRAPPINGS = (
    *("ddp", "ddp compiled", "fsdp root", "fsdp each op", "fsdp compiled"),
    *("ddp reading", "fsdp reading", "fsdp reading compiled"),
)


class Reader(nn.Module):
    """Its chain reads the parameters of its layers."""

    def __init__(self, layers):
        super().__init__()
        self.layers, first, last = layers, layers[0], layers[2]
        self.chain = opfuse.Sequential(
            ops.BasicLinear.reading(first),
            ops.Bias.reading(first),
            ops.GELU(),
            ops.ParallelLinear.reading([last]),
        )

    def forward(self, x):
        return self.chain(x)


def models(how):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU("tanh"), nn.Linear(WIDTH, WIDTH))
    if "reading" in how:
        return Reader(copy.deepcopy(plain)), plain
    chain = opfuse.Sequential(ops.Linear(WIDTH, WIDTH), ops.GELU(), ops.Linear(WIDTH, WIDTH))
    chain.load_state_dict(plain.state_dict())
    return chain, plain


def wrap(chain, how):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    if how.startswith("ddp"):
        wrapped = DistributedDataParallel(chain)
    else:
        mesh = init_device_mesh("cpu", (2,))
        if how == "fsdp each op":
            for op in (chain[0], chain[2]):
                fully_shard(op, mesh=mesh)
            assert type(chain[0]) is not ops.Linear and op_class(chain[0]) is ops.Linear
        wrapped = fully_shard(chain, mesh=mesh)
    return torch.compile(wrapped, backend="aot_eager") if how.endswith("compiled") else wrapped


def worker(rank):
    warnings.simplefilter("ignore")
    for variant in fusing.VARIANTS:
        torch._dynamo.reset()
        with fusing.fusions(variant):
            for how in WRAPPINGS:
                train(rank, how, f"{variant}, {how}")


def train(rank, how, name):
    batch = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1))
    chain, plain = models(how)
    plain(batch).square().mean().backward()
    model = wrap(chain, how)
    optimizer = torch.optim.AdamW(chain.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        model(batch[rank * 4 : rank * 4 + 4]).square().mean().backward()
    for got, expected in zip(chain.parameters(), plain.parameters(), strict=True):
        grad = got.grad.full_tensor() if hasattr(got.grad, "full_tensor") else got.grad
        torch.testing.assert_close(grad, expected.grad, msg=lambda text: f"{name}: {text}")
    optimizer.step()
