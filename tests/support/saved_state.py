"""Models under recipes with state, the ways to save them, and what a process of two does with both."""

import pathlib
import shutil
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as api

import opfuse
from opfuse import ops

WIDTH, ROWS = 32, 32
RECIPES = "fp8-delayed", "nvfp4"


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


def build(kind, seed=0, prepare=None):
    """A model of a kind: ``"chain"``, ``"converted"``, or ``"quantized"``, whose weights are."""
    torch.manual_seed(seed)
    if kind == "converted":
        model = nn.Sequential(Gated(), Gated())
        opfuse.convert(model)
    else:
        with opfuse.quantized_model_init(kind == "quantized" and "fp8-delayed"):
            first = ops.Linear(WIDTH, WIDTH)
            model = opfuse.Sequential(first, ops.GELU(), ops.Linear(WIDTH, WIDTH, bias=False))
    return opfuse.assign_names(model, prepare)


def batch(seed, rank=0):
    generator = torch.Generator().manual_seed(10 * seed + rank)
    return (1 + rank + seed % 3) * torch.randn(ROWS, WIDTH, generator=generator)


def train(model, recipe, seeds, rank=0, **given):
    """Steps of SGD; the outputs, and the parameters after them."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    outputs = []
    for seed in seeds:
        with opfuse.autocast(recipe, **given):
            y = model(batch(seed, rank))
        y.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        outputs.append(y.detach())
    return [*outputs, *[whole(p) for p in model.parameters()]]


def whole(tensor):
    full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.detach().clone() + 0


def same(some, others):
    return all(map(torch.equal, some, others))


def state_of(model):
    return {key: value for key, value in model.state_dict().items() if "quantizers." in key}


# Ways to save and to load


def by_torch(model, path):
    torch.save(model.state_dict(), path)
    return lambda other: other.load_state_dict(torch.load(path, weights_only=True))


def by_safetensors(model, path):
    from safetensors.torch import load_file, save_file

    save_file(model.state_dict(), path)
    return lambda other: other.load_state_dict(load_file(path))


def by_safetensors_of_models(model, path):
    from safetensors.torch import load_model, save_model

    save_model(model, str(path))
    return lambda other: load_model(other, str(path))


def by_accelerate(model, path):
    from accelerate import Accelerator

    def started(model):
        accelerator = Accelerator(cpu=True)
        accelerator.prepare(model)
        return accelerator

    started(model).save_state(str(path))
    return lambda other: started(other).load_state(str(path))


def by_state_dict_functions(model, path):
    torch.save(api.get_model_state_dict(model), path)
    return lambda other: api.set_model_state_dict(other, torch.load(path, weights_only=True))


def by_dcp(model, path):
    dcp.save({"model": api.get_model_state_dict(model)}, checkpoint_id=path)

    def load(other):
        state = {"model": api.get_model_state_dict(other)}
        dcp.load(state, checkpoint_id=path)
        api.set_model_state_dict(other, state["model"])

    return load


def by_dcp_in_place(model, path):
    """Nothing is told to the model: what it loads into are the tensors that the model has."""
    dcp.save(model.state_dict(), checkpoint_id=path)
    return lambda other: dcp.load(other.state_dict(), checkpoint_id=path)


def by_dcp_of_modules(model, path):
    dcp.save({"model": model}, checkpoint_id=path)
    return lambda other: dcp.load({"model": other}, checkpoint_id=path)


WAYS = {name.removeprefix("by_"): way for name, way in list(globals().items()) if name[:3] == "by_"}

# On two processes


def sharded(kind, seed=0, prepare=None):
    from torch.distributed.fsdp import fully_shard

    model = build(kind, seed)
    parts = model if kind == "converted" else [model[0], model[2]]
    for part in (*parts, model):
        fully_shard(part)
    return opfuse.assign_names(model, prepare)


def resumed(rank, folder, kind, recipe, group):
    """Train with FSDP2, save, load into a fresh and into a used model, and go on; and on one process."""
    given = {"amax_reduction_group": dist.group.WORLD} if group else {}
    model = sharded(kind)
    train(model, recipe, range(3), rank, **given)
    saved = pathlib.Path(folder) / "dcp"
    load = by_dcp(model, saved)
    state = {key: value.clone() for key, value in state_of(model).items()}
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, state)
    assert state and all(same(state.values(), other.values()) for other in every)
    fresh, used = sharded(kind, 5, recipe), sharded(kind, 6)
    train(used, recipe, range(7, 9), rank, **given)
    wanted = train(model, recipe, range(3, 6), rank, **given)
    for other in (fresh, used):
        load(other)
        found = state_of(other)
        assert found.keys() == state.keys() and same(found.values(), [state[k] for k in found])
        assert same(train(other, recipe, range(3, 6), rank, **given), wanted)
    dist.barrier()
    return saved


def loaded_alone(saved, kind, recipe):
    """The state on one process that two saved."""
    alone = build(kind, 5, recipe)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*torch.distributed is")
        state = {"model": api.get_model_state_dict(alone)}
        dcp.load(state, checkpoint_id=saved)
    api.set_model_state_dict(alone, state["model"])
    shutil.rmtree(saved)
    return alone


def other_models(rank):
    """Prepared models that differ, as stages of a pipeline do: an error, in which nobody waits."""
    model = build("chain") if rank else opfuse.assign_names(nn.Sequential(build("chain")))
    try:
        train(model, "fp8-delayed", range(1))
    except RuntimeError as error:
        return str(error)
    return "no error"


def not_prepared(rank):
    """A model without names warns once; its parts that are split among processes agree all the same."""
    torch.manual_seed(0)
    model = opfuse.Sequential(ops.Linear(WIDTH, WIDTH))
    split = ops.BasicLinear(WIDTH, WIDTH, tensor_parallel_mode="column")
    x, dy = batch(0), (1 + rank) * torch.ones(ROWS, WIDTH // 2)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        train(model, "fp8-delayed", range(2), rank)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with opfuse.autocast("fp8-delayed"):
            y = split(x)
        y.backward(dy)
    scale = split.get_quantizer("backward", 0).scale
    return [str(each.message) for each in seen], scale.item()
