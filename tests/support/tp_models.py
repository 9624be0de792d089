"""What the processes of the tests of converted models under tensor parallelism run."""

from __future__ import annotations

import copy
import os
import warnings

import torch
import torch.distributed as dist
from opfuse_convert import leaf_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import opfuse
from opfuse.ops.authoring import op_class
from opfuse.report.calls import saved_bytes

WIDTH, INNER = 64, 176
JOINED = "its projections are joined under a recipe alone"


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def same_gradients(model, plain, most=1e-5):
    """Every gradient is that of one process."""
    for (name, param), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        if theirs.grad is not None:
            difference = (whole(param.grad) - theirs.grad).norm() / theirs.grad.norm()
            assert difference <= most, f"{name}: {difference}"


# Models of transformers under their tp_plan


def made(family, folder, count=2, **config):
    """A model of one process, and ``count`` of this process's part of it."""
    warnings.simplefilter("ignore")
    os.environ.update(HF_HUB_OFFLINE="1", WORLD_SIZE=str(dist.get_world_size()))
    os.environ.update(RANK=str(dist.get_rank()), LOCAL_RANK=str(dist.get_rank()))
    import transformers

    tokens = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
    heads = dict(num_attention_heads=4, num_key_value_heads=2)
    sizes = dict(vocab_size=128, hidden_size=WIDTH, intermediate_size=INNER, num_hidden_layers=2)
    if family == "Mixtral":
        sizes["num_local_experts"] = 4
    if family == "Qwen3":
        sizes["head_dim"] = 16
    torch.manual_seed(0)
    given = getattr(transformers, f"{family}Config")(**tokens, **heads, **sizes, **config)
    cls = getattr(transformers, f"{family}ForCausalLM")
    plain = cls(given).train()
    with torch.no_grad():
        for name, param in plain.named_parameters():
            if name.endswith("bias"):
                param.normal_(std=0.02)
    if dist.get_rank() == 0:
        plain.save_pretrained(folder)
    dist.barrier()
    size = min(dist.get_world_size(), 2)
    parts = [
        cls.from_pretrained(folder, tp_plan="auto", tp_size=size).train() for _ in range(count)
    ]
    return plain, *parts


def tokens(seed=1, rows=2):
    ids = torch.randint(3, 128, (rows, 24), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


def step(model, **given):
    model.zero_grad()
    loss = model(**given).loss
    loss.backward()
    return float(loss)


def mlps(model):
    """Of each layer what its MLP says."""
    found = opfuse.converted(model)
    return [
        found[
            f"model.layers.{i}.{'mlp.experts' if f'model.layers.{i}.mlp.experts' in found else 'mlp'}"
        ]
        for i in range(2)
    ]


def a_model(rank, family, folder, config, joined):
    """Loss, gradients, training and what is generated, of a model under its tp_plan, converted."""
    plain, eager, model = made(family, folder, **config)
    given = tokens()
    with opfuse.options(**{"transformers.projections": "joined" if joined else "auto"}):
        report = opfuse.convert(model, given)
    names = [row.path for row in report.converted]
    assert {f"model.layers.{i}.self_attn" for i in range(2)} <= set(names)
    losses = [step(each, **given) for each in (plain, model)]
    assert mlps(model) == ["", ""] and set(opfuse.converted(model).values()) <= {"", JOINED}
    assert abs(losses[1] - losses[0]) <= 1e-5
    same_gradients(model, plain)
    for again in (opfuse.revert, opfuse.convert):
        again(model)
        step(model, **given)
        same_gradients(model, plain)
        assert bool(opfuse.converted(model)) == (again is opfuse.convert)
    kept = [saved_bytes(lambda m=m: m(**given), m.parameters()) for m in (model, eager)]
    assert kept[0] <= kept[1], kept
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-3) for each in (plain, model)]
    for number in range(30):
        losses = [step(each, **tokens(number)) for each in (plain, model)]
        assert abs(losses[1] - losses[0]) <= 1e-5 * losses[0], number
        for optimizer in optimizers:
            optimizer.step()
    words = given["input_ids"][:, :5]
    found = [
        each.eval().generate(words, max_new_tokens=8, do_sample=False) for each in (plain, model)
    ]
    assert torch.equal(*found)
    assert mlps(model) == ["", ""]
    return str(report)


def planned(rank, family, folder):
    """A memory plan of the whole model on one that is split, before and after conversion."""
    plain, eager, model = made(family, folder, 2)
    given = tokens() | {"use_cache": False}
    plan = opfuse.plan_memory(copy.deepcopy(plain), budget=0.6, measure=False, **given)
    assert any("recompute" in choice.option for choice in plan.choices)
    try:
        opfuse.plan_memory(model, budget=0.6, **given)
    except RuntimeError as error:
        assert "Plan the whole model in one process" in str(error)
    else:
        raise AssertionError("a model that is split was planned")
    step(plain, **given)
    for each, convert in ((eager, False), (model, True)):
        before = saved_bytes(lambda m=each: m(**given), each.parameters())
        plan.attach(each)
        if convert:
            opfuse.convert(each)
        for _ in range(2):
            step(each, **given)
            same_gradients(each, plain)
        assert saved_bytes(lambda m=each: m(**given), each.parameters()) < before


def sharded(rank, family, folder):
    """FSDP2 over it, two by two, before and after conversion."""
    from torch.distributed.fsdp import fully_shard
    from transformers.distributed import DistributedConfig
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    plain, *_ = made(family, folder, 0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    for first in (True, False):
        model = copy.deepcopy(plain)
        plan, *_ = model._resolve_parallel_plans(DistributedConfig(tp_size=2))
        apply_tensor_parallelism(model, mesh["tensor"], plan)
        if first:
            opfuse.convert(model)
        for layer in [*model.model.layers, model]:
            fully_shard(layer, mesh=mesh["data"])
        if not first:
            opfuse.convert(model)
        given = tokens(rows=4)
        step(plain, **given)
        mine = {k: v[2 * (rank // 2) :][:2] for k, v in given.items()}
        for _ in range(2):
            step(model, **mine)
        assert mlps(model) == ["", ""], opfuse.converted(model)
        same_gradients(model, plain)


def split_after(rank, family, folder):
    """A plan that comes after conversion: chains are made again, those of experts by a second one."""
    from transformers.distributed import DistributedConfig
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    plain, *_ = made(family, folder, 0)
    model, given = copy.deepcopy(plain), tokens()
    opfuse.convert(model)
    step(model, **given)
    plan, *_ = model._resolve_parallel_plans(DistributedConfig(tp_size=2))
    apply_tensor_parallelism(model, init_device_mesh("cpu", (2,)), plan)
    step(plain, **given)
    for again in (False, True):
        if again:
            opfuse.convert(model)
        for _ in range(2):
            step(model, **given)
            same_gradients(model, plain)
    assert mlps(model) == ["", ""]


def changed_styles(rank, folder):
    """What a style computes changes after conversion: the layers run as they do then."""
    from transformers.distributed.tensor_parallel import ColwiseParallel

    _, model = made("Llama", folder, 1)
    opfuse.convert(model)
    given, found, seen = tokens(), [], []
    expected = step(model, **given)
    before = ColwiseParallel.transform_inputs_pre_forward

    def noting(self, module, *args):
        seen.append(module)
        return before(self, module, *args)

    ColwiseParallel.transform_inputs_pre_forward = noting
    try:
        assert abs(step(model, **given) - expected) <= 1e-5
        found.append(opfuse.converted(model)["model.layers.0.mlp"])
        assert model.model.layers[0].mlp.up_proj in seen
    finally:
        ColwiseParallel.transform_inputs_pre_forward = before
    own = model.model.layers[0].mlp.up_proj.forward
    model.model.layers[0].mlp.up_proj.forward = lambda x: own(2 * x)
    assert abs(step(model, **given) - expected) > 1e-4
    found.append(opfuse.converted(model)["model.layers.0.mlp"])
    return found


# Modules of torch under torch's styles


class MLP(nn.Module):
    """A gated layer, a norm and a residual."""

    def __init__(self, bias=True):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate, self.up = (nn.Linear(WIDTH, INNER, bias=bias) for _ in range(2))
        self.down = nn.Linear(INNER, WIDTH, bias=bias)

    def forward(self, x):
        y = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


def two_layers(bias=True):
    torch.manual_seed(0)
    return nn.Sequential(MLP(bias), MLP(bias))


def chains_ran(model):
    return opfuse.converted(model)[""] == ""  # the whole model is one


def plan_of(rows):
    """Torch's styles; with ``rows``, each process has some of these outside."""
    into = ColwiseParallel(input_layouts=Shard(1)) if rows else ColwiseParallel()
    out = RowwiseParallel(output_layouts=Shard(1)) if rows else RowwiseParallel()
    return {"*.gate": into, "*.up": into, "*.down": out}


def torch_styles(rank, bias, rows, order):
    """Torch's own styles, before conversion and after it."""
    plain, model = two_layers(bias), two_layers(bias)
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(3)
    x = torch.randn(2, 6, WIDTH)
    y = plain(x)
    y.square().mean().backward()
    mine = x.chunk(2, 1)[rank] if rows else x
    for what in order:
        if what == "convert":
            assert len(opfuse.convert(model).converted) >= 2
        elif what == "call":
            model(x)
        else:
            parallelize_module(model, mesh, plan_of(rows))
            model(mine)  # a chain for parameters that were split since is made after a call
    model.zero_grad()
    result = model(mine)
    torch.testing.assert_close(result, y.chunk(2, 1)[rank] if rows else y, rtol=1e-4, atol=1e-5)
    assert chains_ran(model)
    (result.square().sum() / y.numel()).backward()
    for (name, param), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        grad = whole(param.grad)
        if rows and "norm" in name:  # torch leaves the sum to the caller, too
            dist.all_reduce(grad)
        torch.testing.assert_close(grad, theirs.grad, rtol=1e-4, atol=1e-6, msg=name)


def left_alone(rank):
    """What is not exactly a style's is left alone, with a sentence."""
    mesh, found = init_device_mesh("cpu", (2,)), {}

    def why(change, name):
        """What the conversion says of a layer; the numbers stay those of eager."""
        models = [two_layers()[0] for _ in range(2)]
        for model in models:
            parallelize_module(model, mesh, {"gate": ColwiseParallel(), "up": ColwiseParallel()})
            change(model)
        opfuse.convert(models[0])
        x = torch.randn(2, 6, WIDTH)
        torch.testing.assert_close(whole(models[0](x)), whole(models[1](x)))
        return leaf_of(getattr(models[1], name))

    def another_hook(mlp):
        parallelize_module(mlp, mesh, {"down": RowwiseParallel()})
        mlp.up.register_forward_hook(lambda module, given, y: None)

    def gathered():
        style = RowwiseParallel(input_layouts=Replicate())
        return parallelize_module(nn.Linear(4, 4), mesh, style)

    def dtensor():
        style = RowwiseParallel(use_local_output=False)
        return parallelize_module(nn.Linear(4, 4), mesh, style)

    def placed(mlp):
        from torch.distributed.tensor import distribute_tensor

        parallelize_module(mlp, mesh, {"down": RowwiseParallel()})
        weight = distribute_tensor(mlp.up.weight.full_tensor().detach(), mesh, [Shard(1)])
        mlp.up.weight = nn.Parameter(weight)

    found |= {change.__name__: why(change, "up") for change in (another_hook, placed)}
    found |= {make.__name__: leaf_of(make()) for make in (gathered, dtensor)}
    model = two_layers()
    parallelize_module(model, mesh, plan_of(False))
    opfuse.convert(model[0])
    x = torch.randn(2, 6, WIDTH)
    model(x)
    assert opfuse.converted(model)["0"] == ""
    seen = []
    model[0].up.register_forward_hook(lambda module, given, y: seen.append(y))
    model(x)
    assert seen, "the hook did not run"
    found["later"] = opfuse.converted(model)["0"]
    assert op_class(model[0]) is MLP
    return found


def saved_by_two(rank, folder):
    """A checkpoint of a converted model of two processes."""
    import torch.distributed.checkpoint as dcp

    model = two_layers()
    parallelize_module(model, init_device_mesh("cpu", (2,)), plan_of(False))
    opfuse.convert(model)
    dcp.save(model.state_dict(), checkpoint_id=folder)
    return two_layers().state_dict()


def loaded_by_two(rank, folder, expected):
    """A checkpoint of one process, loaded by two."""
    import torch.distributed.checkpoint as dcp

    model = two_layers()
    parallelize_module(model, init_device_mesh("cpu", (2,)), plan_of(False))
    opfuse.convert(model)
    x = torch.randn(2, 6, WIDTH)
    model(x)
    state = model.state_dict()
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state)
    plain = two_layers()
    plain.load_state_dict(expected)
    torch.testing.assert_close(model(x), plain(x), rtol=1e-4, atol=1e-5)
    assert chains_ran(model)
