"""One of two ranks: parameters that live quantized under FSDP2 and DDP, against one process."""

import copy
import sys

import opfuse_fp8 as fp8
import torch
import torch.distributed as dist
from opfuse_quantized import QuantizedWeight
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel

import opfuse
from opfuse import ops

group, rank = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{group}", rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))
BLOCK, CURRENT = fp8.Float8BlockScaling(), fp8.Float8CurrentScaling()
MX, DELAYED = fp8.MXFP8BlockScaling(), fp8.DelayedScaling(amax_history_len=4)
CODES, VALUES = "FSDP2 gathers its codes", "FSDP2 gathers it in "
WHOLE = "has a scale for more than a shard"


def build(recipe, width):
    torch.manual_seed(0)
    with opfuse.quantized_model_init(recipe):
        return opfuse.Sequential(
            ops.Linear(64, width, bias=False), ops.SiLU(), ops.Linear(width, 256)
        )


def batch(seed, rank):
    return torch.randn(64, 64, generator=torch.Generator().manual_seed(10 * seed + rank))


def train(model, recipe, ranks):
    """Three steps on the mean loss over batches."""
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0)
    for seed in range(3):
        with opfuse.autocast(recipe):
            loss = sum(model(batch(seed, r)).square().mean() for r in ranks) / len(ranks)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def compare(where, mine, other, exactly=False, steps=1):
    """Every rank has the same, and that is what one process gets, up to steps of its codes."""
    gathered = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(gathered, mine)
    assert torch.equal(*gathered), where
    assert not exactly or torch.equal(mine, other), where
    allowed = 0.13 * steps * other.abs() + 0.004 * other.abs().max()
    assert ((mine - other).abs() <= allowed).all(), (where, ((mine - other).abs() - allowed).max())


def values(param):
    full = param.full_tensor() if hasattr(param, "full_tensor") else param
    return full.detach() + 0


def fsdp(recipe, width, notes, exactly=False, policy=None):
    where = f"{type(recipe).__name__} {width}"
    model = build(recipe, width)
    twin = copy.deepcopy(model)
    given = {"mesh": mesh} if policy is None else {"mesh": mesh, "mp_policy": policy}
    for part in (model[0], model[2], model):
        fully_shard(part, **given)
    for param in (model[0].weight, model[2].weight):
        assert isinstance(param._local_tensor, QuantizedWeight), where
    train(model, recipe, [0 if exactly else rank])
    train(twin, recipe, [0] if exactly else [0, 1])
    for part in (0, 2):
        # in bf16 a gradient is rounded, and a delayed scale is that of a shard: then the next code
        # may be nearer
        steps = 1 if policy is None and recipe is not DELAYED else 2
        compare(where, values(model[part].weight), values(twin[part].weight), exactly, steps)
    with opfuse.autocast(recipe):
        steps = opfuse.explain(model, batch(0, rank)).to_dict()["forward"]
    found = [step["note"] for step in steps if "lives quantized" in step["note"]]
    assert len(found) == 2, (where, found)
    for note, wanted in zip(found, notes, strict=True):
        assert all(words in note for words in wanted), (where, note)
    state = model.state_dict()
    assert type(state["0.weight"]._local_tensor) is torch.Tensor
    assert torch.equal(values(state["0.weight"]), values(model[0].weight))
    model.load_state_dict(state)
    with torch.no_grad(), opfuse.autocast(recipe):
        assert model(batch(0, rank)).isfinite().all()


def ddp(recipe):
    model = build(recipe, 64)
    twin = copy.deepcopy(model)
    wrapped = DistributedDataParallel(model)
    assert type(model[0].weight) is QuantizedWeight
    train(wrapped, recipe, [rank])
    train(twin, recipe, [0, 1])
    steps = 1 if recipe is not DELAYED else 2
    compare("DDP", values(model[0].weight), values(twin[0].weight), steps=steps)


fsdp(BLOCK, 256, [[CODES], [CODES]], True)
fsdp(fp8.Float8BlockScaling(w_block_scaling_dim=1), 256, [[CODES], [CODES]], True)
fsdp(MX, 64, [[CODES], [CODES]], True)
fsdp(MX, 96, [[VALUES + "float32", "96 rows over 2 ranks are not whole blocks of 32"], [CODES]])
fsdp(BLOCK, 67, [[VALUES + "float32", "67 rows"], [CODES]])
fsdp(BLOCK, 1, [[VALUES + "float32", "1 rows"], [CODES]])
bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
fsdp(CURRENT, 96, [[VALUES + "bfloat16", WHOLE]] * 2, policy=bf16)
fsdp(MX, 64, [[CODES], [CODES]], policy=bf16)
fsdp(DELAYED, 66, [[VALUES + "float32", WHOLE]] * 2)
for recipe in (BLOCK, DELAYED):
    ddp(recipe)
# what is gathered is cast with a scale that fits it: the first values, and those that grew
model = build(DELAYED, 66)
for part in (model[0], model[2], model):
    fully_shard(part, mesh=mesh)
for factor in (1, 1e5, 1e-8):
    with torch.no_grad():
        model[2].weight.mul_(factor)
        model[2].bias.zero_()
        hidden = torch.nn.functional.silu(batch(0, 0) @ values(model[0].weight).t())
        want = hidden @ values(model[2].weight).t()
        with opfuse.autocast(DELAYED):
            error = (model(batch(0, 0)) - want).norm() / want.norm()
    assert model[2].weight._local_tensor.quantizer.scale == 1
    assert error < 0.1, (factor, error)
# cut along another dimension it is not quantized any more
model = build(BLOCK, 256)
fully_shard(model, mesh=mesh, shard_placement_fn=lambda param: Shard(param.ndim - 1))
assert type(model[0].weight._local_tensor) is torch.Tensor
with opfuse.autocast(BLOCK):
    got = model(batch(0, 0))
with opfuse.autocast(BLOCK):
    want = build(BLOCK, 256)(batch(0, 0))
torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
dist.destroy_process_group()
