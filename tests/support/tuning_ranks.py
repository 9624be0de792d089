"""What one process of a test of tuning does. In a module of its own, to be imported."""

from __future__ import annotations

import os

import pytest
import torch
from fakes import OneByOne, make_plugin
from torch import nn
from torch.distributed.fsdp import fully_shard
from tuned import Prescribed

import opfuse
from opfuse import Fusion, ops
from opfuse.tuning import table as tables


def worker(rank, folder):
    os.environ["OPFUSE_TUNING"] = f"{folder}/{rank}"
    with opfuse.plugins.isolated():
        pair = type("Pair", (OneByOne,), {"calls": []})
        plugin = make_plugin(forward_fusions=[Fusion([ops.GELU, ops.SiLU], pair)])
        opfuse.plugins.register(plugin, name="test", distribution="opfuse-plugin-test")
        chain, x = opfuse.Sequential(ops.GELU(), ops.SiLU()), torch.randn(4, 8)
        chain(x)
        opfuse.check_ranks()
        if rank:
            with Prescribed(Pair=0.5):
                opfuse.tune(chain, x)
        with pytest.raises(RuntimeError, match="rank 0 and rank 1 differ in the tuning tables"):
            opfuse.check_ranks()
        os.environ["OPFUSE_TUNING"] = ""
        tables.reload()
        with opfuse.plugins.using("" if rank else None):
            chain(x)
            with pytest.raises(RuntimeError, match="rank 0 and rank 1 differ in the plugins: opf"):
                opfuse.check_ranks()
        opfuse.check_ranks()


def sharded(rank, folder):
    """A model in shards, which keeps whole parameters behind a forward, is tuned and trains on."""
    os.environ["OPFUSE_TUNING"] = f"{folder}/{rank}"
    model = nn.Sequential(nn.Linear(8, 16), opfuse.Sequential(ops.GELU()), nn.Linear(16, 8))
    fully_shard(model[0])
    fully_shard(model)
    x = torch.randn(4, 8)
    model(x).sum().backward()
    before = [p.to_local().clone() for p in model.parameters()]
    grads = [p.grad for p in model.parameters()]
    opfuse.tune(model, x)
    for param, was, grad in zip(model.parameters(), before, grads, strict=True):
        assert torch.equal(param.to_local(), was) and param.grad is grad
    model(x).sum().backward()
