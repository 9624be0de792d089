"""What one process of the tests of sharded heads does. In a module of its own, so that others can import it."""

import copy
import os
import warnings

import largest
import torch

import opfuse

TOKENS, CLASSES = 128, 32000
LOGITS = 2 * TOKENS * CLASSES * 4
WAYS = "model", "wrapped", "layers", "tail", "head", "tied"


def _model(tied=False):
    os.environ["HF_HUB_OFFLINE"] = "1"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # theirs, at import
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=CLASSES,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            tie_word_embeddings=tied,
            pad_token_id=0,
        )
        return LlamaForCausalLM(config)


class Wrapped(torch.nn.Module):
    """As peft wraps a model: FSDP2 knows this module, not the one with the head."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, **given):
        return self.model(**given)


def _shard(model, way, policy=None, **more):
    """What is to be called: the model, of which the parts that a way names are sharded.

    The policy is that of the whole.
    """
    from torch.distributed.fsdp import fully_shard

    if way == "layers":
        for layer in model.model.layers:
            fully_shard(layer, **more)
    elif way == "tail":
        fully_shard([model.model.norm, model.lm_head], **more)
    elif way == "tied":
        fully_shard([model.model.norm, model.model.embed_tokens, model.lm_head], **more)
    elif way == "head":
        fully_shard(model.lm_head, **more)
    model = Wrapped(model) if way == "wrapped" else model
    return fully_shard(model, **more, **({} if policy is None else {"mp_policy": policy}))


def _batch(rank):
    ids = torch.randint(3, CLASSES, (2, TOKENS), generator=torch.Generator().manual_seed(rank))
    return {"input_ids": ids, "labels": ids}


def _loss(out, of):
    return out.loss if of == "loss" else out.logits.square().mean()


def _gradients(model, of, world):
    """Those of the mean over all processes, and the output of each."""
    outs = [model(**_batch(rank)) for rank in range(world)]
    sum(_loss(out, of) for out in outs).div(world).backward()
    return {name: p.grad for name, p in model.named_parameters()}, outs


def _compare(twin, exact):
    named = dict(twin.named_parameters())
    assert named.keys() == exact.keys()
    for name, grad in exact.items():
        torch.testing.assert_close(named[name].grad.full_tensor(), grad, rtol=1e-4, atol=1e-6)


def train(rank, way, reshard, world, early=True):
    """The loss needs no logits, and those that are read are right, or an error without a hang.

    Returns the largest tensor of a step that reads none, and what reading them says in one process alone.
    """
    plain = _model(way == "tied")
    exact, outs = _gradients(plain, "loss", world)
    twin = copy.deepcopy(plain)
    twin.zero_grad()
    mesh = torch.distributed.init_device_mesh("cpu", (world,))
    if early:
        opfuse.convert(twin, skip="model")
    whole = _shard(twin, way, mesh=mesh, reshard_after_forward=reshard)
    if not early:
        opfuse.convert(twin, skip="model")
    whole(**_batch(rank)).loss.backward()
    _compare(twin, exact)
    whole.zero_grad()
    with largest.Largest() as found:
        out = whole(**_batch(rank))
        out.loss.backward()
    _compare(twin, exact)
    assert opfuse.converted(twin)[""] == "", opfuse.converted(twin)
    torch.testing.assert_close(out.loss, outs[rank].loss)
    whole.zero_grad()
    out, says = whole(**_batch(rank)), ""
    if rank == 0:  # the others read nothing
        try:
            torch.testing.assert_close(out.logits, outs[rank].logits)
        except RuntimeError as error:
            says = str(error)
    out.loss.backward()
    _compare(twin, exact)
    if not says and rank == 0:
        says = "right"
    return found.bytes, says


def of_logits(rank, way, reshard, world):
    """A loss of one's own, of logits that are read late: FSDP2 has not seen them, and adds up their gradients."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    plain = _model(way == "tied")
    exact, outs = _gradients(plain, "logits", world)
    twin = copy.deepcopy(plain)
    twin.zero_grad()
    opfuse.convert(twin, skip="model")
    mesh = torch.distributed.init_device_mesh("cpu", (world,))
    policy = MixedPrecisionPolicy(output_dtype=torch.float64)
    whole = _shard(twin, way, mesh=mesh, reshard_after_forward=reshard, policy=policy)
    out = whole(**_batch(rank))
    assert opfuse.converted(twin)[""] == "" and "value" not in vars(vars(out)["logits"])
    _loss(out, "logits").backward()
    assert out.logits.dtype is out.loss.dtype is torch.float64
    torch.testing.assert_close(out.logits.float(), outs[rank].logits)
    _compare(twin, exact)


def accelerated(rank, tied):
    """Steps of a model that accelerate shards by FSDP2, next to the library's own forward; see the test."""
    warnings.simplefilter("ignore")
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
    os.environ |= {"LOCAL_WORLD_SIZE": "2", "ACCELERATE_USE_CPU": "true"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    found = [_of_accelerate(rank, tied, convert) for convert in (False, True)]
    (losses, grads, most), (own, own_grads, own_most) = found
    torch.testing.assert_close(own, losses, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(own_grads, grads, rtol=1e-3, atol=1e-5)
    assert most >= LOGITS > own_most, (most, own_most)


def _of_accelerate(rank, tied, convert):
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState, DistributedType, PartialState

    AcceleratorState._reset_state(True)
    model = _model(tied)
    if convert:
        opfuse.convert(model, skip="model")
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=True,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
    )
    accelerator = Accelerator(cpu=True)
    # accelerate asks for a GPU before it says so; what follows is the same on a CPU
    for state in (PartialState, AcceleratorState):
        state._shared_state["distributed_type"] = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    assert accelerator.is_fsdp2
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    whole, optimizer = accelerator.prepare(model, optimizer)
    assert any(whole.lm_head._forward_hooks)
    losses, grads = [], None
    for step in range(4):
        with largest.Largest() as found:
            out = whole(**_batch(2 * step + rank))
            if step == 1 and rank:  # in one process alone
                losses.append(out.logits.detach().square().mean())
            accelerator.backward(out.loss)
        grads = [p.grad.full_tensor() for p in whole.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(out.loss.detach())
    if convert:
        assert opfuse.converted(accelerator.unwrap_model(whole))[""] == ""
    return losses, grads, found.bytes
