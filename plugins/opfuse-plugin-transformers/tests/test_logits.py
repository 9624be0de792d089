"""Logits that the loss did not need: they are those of eager where they are read, and computed nowhere else."""

import copy
import io
import pickle

import pytest
import torch
from opfuse_transformers import logits
from torch.nn.utils import parametrize
from torch.utils import _pytree as pytree

import opfuse


@pytest.fixture
def pair(models, monkeypatch):
    """A model and its converted twin; ``computed`` has an item for each time that logits were computed late."""
    model, twin, _ = models.pair("llama")
    computed = []
    value = logits.Logits.value.func
    late = property(lambda self: computed.append(1) or value(self))
    monkeypatch.setattr(logits.Logits, "value", late)
    return model, twin, models.inputs(model), computed


READING = {
    "attribute": lambda out: out.logits,
    "name": lambda out: out["logits"],
    "index": lambda out: out[1],
    "from the end": lambda out: out[1 - len(out)],
    "slice": lambda out: out[:2][1],
    "tuple": lambda out: out.to_tuple()[1],
    "get": lambda out: out.get("logits"),
    "as a dict": lambda out: dict(out)["logits"],
    "by keywords": lambda out: (lambda **given: given["logits"])(**out),
    "getattr": lambda out: getattr(out, "logits", None),
    "copy": lambda out: copy.copy(out).logits,
    "no grad": lambda out: torch.no_grad()(lambda: out.logits)(),
    "inference mode": lambda out: torch.inference_mode()(lambda: out.logits)(),
}


@pytest.mark.parametrize("how", READING)
def test_they_are_what_eager_gives(pair, how):
    model, twin, given, computed = pair
    expected, got = model(**given), twin(**given)
    assert opfuse.converted(twin)[""] == "" and not computed
    read = READING[how](got)
    assert isinstance(read, torch.Tensor) and len(computed) == 1
    torch.testing.assert_close(read, expected.logits)
    assert type(got) is type(expected) and got.logits is READING["attribute"](got)
    for out in (expected, got):  # a loss of the user's own
        (out.loss + out.logits.square().mean()).backward()
    assert len(computed) == 1
    for one, other in zip(twin.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_what_reads_no_logits_computes_none(pair):
    *_, twin, given, computed = pair
    out = twin(**given)
    out.loss, out["loss"], out[0], out[:1], out.get("loss"), out.get("nothing")
    assert "logits" in out and [*out][:2] == ["loss", "logits"] and len(out) == 3
    assert out.past_key_values is out["past_key_values"] is out[-1]
    leaves, spec = pytree.tree_flatten(out)  # as DDP does
    again = pytree.tree_unflatten(leaves, spec)
    assert again.loss is out.loss and not computed
    out.loss.backward()
    assert not computed


def test_what_was_taken_apart_and_put_together_has_them_still(pair):
    model, twin, given, _ = pair
    leaves, spec = pytree.tree_flatten(twin(**given))
    torch.testing.assert_close(pytree.tree_unflatten(leaves, spec).logits, model(**given).logits)


@pytest.fixture
def one_rank():
    """A group of this process alone."""
    if not torch.distributed.is_available():
        pytest.skip("this PyTorch has no torch.distributed")
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


class Wrapped(torch.nn.Module):
    """As peft wraps a model: FSDP2 knows this module, not the one with the head."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, **given):
        return self.model(**given)


@pytest.mark.parametrize("loss", ["its own", "of the logits"])
@pytest.mark.parametrize("wrap", [lambda model: model, Wrapped], ids=["model", "wrapped"])
@pytest.mark.parametrize("reshard", [None, False, True], ids=str)
def test_fsdp2_makes_no_logits(pair, one_rank, reshard, wrap, loss):
    """It looks for tensors in the output, and gives each that has a gradient a hook: those read late have it too."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model, twin, given, computed = pair
    policy = MixedPrecisionPolicy(output_dtype=torch.float64)
    sharded = wrap(twin)
    fully_shard(sharded, mesh=one_rank, reshard_after_forward=reshard, mp_policy=policy)
    expected, got = model(**given), sharded(**given)
    assert opfuse.converted(twin)[""] == "" and not computed
    assert got.loss.dtype is torch.float64
    if reshard and loss == "of the logits":
        with pytest.raises(RuntimeError, match="FSDP2 has sharded its head again since: .*reshard_after_forward=False"):  # fmt: skip
            got.logits  # noqa: B018
        return
    for out in (expected, got):
        (out.loss if loss == "its own" else out.logits.square().mean()).backward()
    if loss == "of the logits":
        assert got.logits.dtype is torch.float64 and len(computed) == 1
        torch.testing.assert_close(got.logits.float(), expected.logits)
    else:
        assert not computed
    for one, other in zip(twin.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one.grad.full_tensor(), other.grad)


@pytest.mark.parametrize("parts", ["the model", "the head too", "the norm and the head too"])
@pytest.mark.parametrize("output", [None, torch.float32], ids=str)
@pytest.mark.parametrize("grad", [True, False])
def test_fsdp2_casts_what_is_read_late_as_ever(models, one_rank, output, parts, grad):
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    if not grad:
        pytest.importorskip("opfuse_loss", reason="else an evaluation computes the logits at once")
    read = []
    for convert in (False, True):
        model = models.make("llama")
        if convert:
            opfuse.convert(model, skip="model")
        how = {"mesh": one_rank, "reshard_after_forward": False}
        how["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=output)
        if parts != "the model":
            both = [model.model.norm, model.lm_head]
            fully_shard(both if "norm" in parts else both[1], **how)
        fully_shard(model, **how)
        with torch.set_grad_enabled(grad):
            out = model(**models.inputs(model))
        stands = logits.Logits if grad else logits.Unread
        assert (type(vars(out)["logits"]) is stands) is convert
        read.append((out.logits, out.loss))
    (expected, loss), (got, own) = read
    assert got.dtype is expected.dtype and torch.equal(got, expected)
    assert own.dtype is loss.dtype
    torch.testing.assert_close(own, loss, rtol=1e-2, atol=0)


def test_fsdp2_finds_the_logits_of_a_tuple(pair, one_rank):
    from torch.distributed.fsdp import fully_shard

    model, twin, given, _ = pair
    fully_shard(twin, mesh=one_rank, reshard_after_forward=True)
    for each in (model, twin):
        loss, read, *_ = each(**given, return_dict=False)
        (loss + read.square().mean()).backward()
    for one, other in zip(twin.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one.grad.full_tensor(), other.grad)


def test_what_fsdp2_looks_at_has_no_logits(pair):
    import dataclasses

    from torch.distributed.fsdp._common_utils import collect_grad_tensors
    from torch.distributed.utils import _apply_to_tensors

    model, twin, given, computed = pair
    out = twin(**given)
    assert [*collect_grad_tensors(out)] == [out.loss]
    leaves, _ = pytree.tree_flatten(out)
    assert [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad] == [
        out.loss
    ]
    seen = []
    again = _apply_to_tensors(lambda x: seen.append(x) or x, dataclasses.replace(out))
    assert not computed and any(x is out.loss for x in seen)
    assert [field.name for field in dataclasses.fields(out)] == [
        field.name for field in dataclasses.fields(type(out).__mro__[1])
    ]
    torch.testing.assert_close(again.logits, model(**given).logits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_autocast_is_that_of_the_forward(pair, dtype):
    model, twin, given, _ = pair
    with torch.autocast("cpu", dtype):
        expected, got = model(**given), twin(**given)
    assert got.logits.dtype is expected.logits.dtype is dtype
    outside = twin(**given)
    with torch.autocast("cpu", dtype):
        assert outside.logits.dtype is torch.float32


def sgd(params, grad=True):
    for param in params:
        param.data.add_(param.grad, alpha=-0.1)  # this changes no version
        param.grad = None


def stepping(optimizer, **options):
    def step(params):
        made = optimizer(params, **options)
        made.step()
        made.zero_grad()

    return step


STEPS = {
    "a backward": lambda params: None,
    "by hand": sgd,
    "plain": stepping(torch.optim.SGD, lr=0.1),
    "fused": stepping(torch.optim.AdamW, lr=0.1, fused=True),
}


@pytest.mark.parametrize("step", STEPS)
def test_a_head_that_may_have_learned_since_is_not_asked(pair, step):
    _, twin, given, computed = pair
    out = twin(**given)
    out.loss.backward()
    STEPS[step]([*twin.parameters()])
    with pytest.raises(RuntimeError, match=r'read them before, or keep them with opfuse.convert\(model, skip="lm_head"\)'):  # fmt: skip
        out.logits  # noqa: B018
    assert out.loss.isfinite() and len(computed) == 1


@pytest.mark.parametrize("step", [name for name in STEPS if name not in ("a backward", "by hand")])
def test_nor_where_another_output_had_the_backward(pair, step):
    _, twin, given, _ = pair
    first, second = twin(**given), twin(**given)
    second.loss.backward()
    STEPS[step]([*twin.parameters()])
    with pytest.raises(RuntimeError, match="an optimizer's step came between"):
        first["logits"]


def test_a_frozen_head_learns_nothing(pair):
    model, twin, given, _ = pair
    expected = model(**given).logits
    twin.lm_head.weight.requires_grad_(False)
    out = twin(**given)
    out.loss.backward()
    stepping(torch.optim.SGD, lr=0.1)([p for p in twin.parameters() if p.requires_grad])
    torch.testing.assert_close(out.logits, expected)
    out = twin(**given)
    with torch.no_grad():
        twin.lm_head.weight.mul_(2)
    with pytest.raises(RuntimeError, match="its head may be another one now"):
        out.logits  # noqa: B018


def test_they_are_those_of_the_weights_of_their_call(pair):
    model, twin, given, computed = pair
    weights = {name: param.detach() * 1.1 for name, param in model.named_parameters()}
    expected, got = [torch.func.functional_call(each, weights, (), given) for each in (model, twin)]
    torch.testing.assert_close(got.loss, expected.loss)
    assert not computed
    torch.testing.assert_close(got.logits, expected.logits)
    got = twin(**given)
    before = model(**given).logits
    twin.load_state_dict(weights, assign=True)
    torch.testing.assert_close(got.logits, before)


class _Double(torch.nn.Module):
    def forward(self, weight):
        return 2 * weight


def _with_bias_first(head):
    weight = head.weight
    del head._parameters["weight"], head._parameters["bias"]
    head.bias = torch.nn.Parameter(torch.linspace(-1, 1, len(weight)))
    head.weight = weight


def test_the_weight_of_the_head_is_no_matter_of_order(pair):
    model, twin, given, computed = pair
    for each in (model, twin):
        _with_bias_first(each.lm_head)
    expected, got = model(**given), twin(**given)
    assert not computed
    torch.testing.assert_close(got.logits, expected.logits)
    torch.testing.assert_close(got.loss, expected.loss)


class _Noisy(torch.nn.Module):
    def forward(self, weight):
        return weight + 0.1 * torch.rand_like(weight)


@pytest.mark.parametrize(
    "change",
    [
        lambda head: parametrize.register_parametrization(head, "weight", _Noisy()),
        torch.nn.utils.parametrizations.spectral_norm,
        torch.nn.utils.parametrizations.weight_norm,
    ],
    ids=["noise", "spectral norm", "weight norm"],
)
def test_computed_weights_of_the_head_are_read_once(change, pair):
    """What they are may be another each time, so logits that are read later would be others."""
    model, twin, given, _ = pair
    change(model.lm_head)
    change(twin.lm_head)
    twin.lm_head.load_state_dict(model.lm_head.state_dict())
    for _ in range(2):
        found = []
        for each in (model, twin):
            torch.manual_seed(0)
            output = each(**given)
            found.append((output.loss, output.logits))
        torch.testing.assert_close(*found)


def test_what_stands_for_them_is_used_as_they_are(pair):
    """By way of items, say."""
    model, twin, given, computed = pair
    expected, got = model(**given).logits, dict(twin(**given).items())["logits"]
    assert got.dtype is expected.dtype and not computed and not hasattr(got, "nothing")
    torch.testing.assert_close(got.argmax(-1), expected.argmax(-1))
    torch.testing.assert_close(torch.softmax(got, -1), torch.softmax(expected, -1))
    assert got.shape == expected.shape and computed
    torch.testing.assert_close(got[:, -1] + 1, expected[:, -1] + 1)
    torch.testing.assert_close(1 - got, 1 - expected)
    assert torch.equal(got > 0, expected > 0) and len([*got]) == len(expected)
    assert got.to("cpu").dtype is expected.dtype
    assert got.to(torch.float64, copy=True).dtype is torch.float64


@pytest.mark.parametrize("items", [False, True])
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_accelerate_trains_a_converted_model_alike(models, precision, items):
    """It accumulates gradients, and casts the outputs."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    rows = torch.randint(3, 128, (12, 16))
    found = []
    for convert in (False, True):
        AcceleratorState._reset_state(True)
        accelerator = Accelerator(
            cpu=True, gradient_accumulation_steps=3, mixed_precision=precision
        )
        model, losses = models.make("llama"), []
        if convert:
            opfuse.convert(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        loader = torch.utils.data.DataLoader([*rows], batch_size=2)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for batch in loader:
            with accelerator.accumulate(model):
                given = {"num_items_in_batch": torch.tensor(90)} if items else {}
                out = model(input_ids=batch, labels=batch, **given)
                raw = vars(out)["logits"]
                assert (type(raw) is logits.Logits) is convert
                assert "value" not in vars(raw) or not convert
                if len(losses) % 2:
                    losses.append(out.logits.detach().square().mean())
                    assert out.logits.dtype is torch.float32
                losses.append(out.loss.detach())
                accelerator.backward(out.loss)
                optimizer.step()
                optimizer.zero_grad()
        assert not convert or opfuse.converted(accelerator.unwrap_model(model))[""] == ""
        found.append(losses)
    AcceleratorState._reset_state(True)
    tolerance = 1e-5 if precision == "no" else 1e-2
    torch.testing.assert_close(found[1], found[0], rtol=tolerance, atol=0)


def test_logits_of_ones_own(pair):
    *_, twin, given, computed = pair
    out = twin(**given)
    mine = torch.ones(2)
    out.logits = mine
    assert out.logits is mine and out["logits"] is mine and not computed


def test_a_file_has_the_librarys_class(pair):
    model, twin, given, _ = pair
    for each in (model, twin):
        each.config.use_cache = False
    expected, out = model(**given), twin(**given)
    with torch.no_grad():
        out.loss, expected.loss = out.loss.detach(), expected.loss.detach()
    out["logits"], expected["logits"] = out.logits.detach(), expected.logits.detach()
    file = io.BytesIO(pickle.dumps(out))
    loaded = pickle.load(file)
    assert type(loaded) is type(expected)
    torch.testing.assert_close(loaded.logits, expected.logits)


OWN_GRADIENT = {
    "a hook": lambda out: out.logits.register_hook(lambda grad: grad * 0),
    "retain_grad": lambda out: out.logits.retain_grad(),
    "autograd.grad": lambda out: torch.autograd.grad(out.loss, out.logits),
    "unused": lambda out: torch.autograd.grad(out.loss, [out.logits], allow_unused=True),
    "a sum": lambda out: torch.autograd.grad(out.loss + out.logits.sum(), out.logits),
    "by items": lambda out: dict(out.items())["logits"].retain_grad(),
}


@pytest.mark.parametrize("how", OWN_GRADIENT)
def test_what_asks_for_their_own_gradient_raises(pair, how):
    model, twin, given, _ = pair
    OWN_GRADIENT[how](model(**given))
    with pytest.raises(RuntimeError, match=r'keep them with opfuse.convert\(model, skip="lm_head"\)'):  # fmt: skip
        OWN_GRADIENT[how](twin(**given))


def test_their_own_gradient_in_a_tuple(pair):
    _, twin, given, _ = pair
    with pytest.raises(RuntimeError, match="they have no gradient of it"):
        twin(**given, return_dict=False)[1].retain_grad()


def test_what_is_computed_from_them_is_plain(pair):
    model, twin, given, _ = pair
    expected, out = model(**given), twin(**given)
    further = out.logits * 2
    assert type(further) is type(out.logits.detach()) is type(out.logits[0]) is torch.Tensor
    of_mine, wanted = [], []
    further.register_hook(of_mine.append)  # the loss has no part in it, in eager either
    twice = expected.logits * 2
    twice.register_hook(wanted.append)
    (out.loss + further.square().mean()).backward()
    (expected.loss + twice.square().mean()).backward()
    torch.testing.assert_close(of_mine, wanted)


def test_a_file_has_no_class_of_ours(pair):
    *_, twin, given, _ = pair
    read = twin(**given).logits
    written = pickle.dumps(read)
    assert b"opfuse" not in written
    torch.testing.assert_close(pickle.loads(written), read)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # Dynamo looks at it
def test_what_is_compiled_takes_them(pair):
    *_, twin, given, _ = pair
    best = torch.compile(lambda logits: logits.detach().argmax(-1), backend="eager", fullgraph=True)
    out = twin(**given)
    assert torch.equal(best(out.logits), out.logits.argmax(-1))
