"""The log-probabilities of trl's trainers by a chain, beside trl's own and beside exact ones."""

import copy
import importlib.util
import os
import types
import warnings

import pytest
import torch
from opfuse_convert import converted, revert
from torch.nn import functional as F
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode

import opfuse
from opfuse.ops import BasicLinear, Bias, TokenLogProb
from opfuse.ops.token_log_prob import row_log_probs
from opfuse.report.calls import saved_bytes

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of the libraries among themselves
    trl = pytest.importorskip("trl", minversion="1.16", reason="trainers of trl are converted")
    peft = pytest.importorskip("peft")
    from datasets import Dataset, disable_progress_bars
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers import models as tokenizer_models
    from transformers import PreTrainedTokenizerFast
    from trl.trainer import utils

disable_progress_bars()
pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning"
)
NAME = "_ChunkedLogProbFunction"
ALL = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
CHAIN = "BasicLinear", "TokenLogProb"


class ByChunks(opfuse.FusedOperation):
    """What opfuse-plugin-loss does, where that is not installed: 16 rows at once, twice."""

    def _parts(self, ctx, params, x, tokens):
        numbers, rows = self.basic_ops[-1].numbers_of(), x.reshape(-1, x.shape[-1])
        for part, of_part in zip(rows.split(16), tokens.flatten().split(16), strict=True):
            given = [each.detach().requires_grad_() for each in (part, *params)]
            logits = F.linear(*[each.to(ctx.dtype or x.dtype) for each in given])
            yield given, row_log_probs(logits, of_part, numbers)

    def fuser_forward(self, basic_op_ctxs, input_, *, basic_op_extra_inputs, **unused):
        *linear, last = basic_op_ctxs
        ((tokens,),) = basic_op_extra_inputs[-1:]
        params = [param for ctx in linear for param in ctx.params]
        with torch.no_grad():
            found = [ys for _, ys in self._parts(linear[0], params, input_, tokens)]
        found = [torch.cat(each) for each in zip(*found, strict=True)]
        y, *extras = [each.view((*tokens.shape, *each.shape[1:])) for each in found]
        if last.requires_grad:
            last.to_save = (input_, tokens)
            for ctx in linear:
                ctx.to_save = ctx.params
        return y, [*[()] * len(linear), tuple(extras)]

    def fuser_backward(self, basic_op_ctxs, grad_output, *, basic_op_grad_extra_outputs, **unused):
        *linear, last = basic_op_ctxs
        params, (x, tokens) = [ctx.saved_tensors[0] for ctx in linear], last.saved_tensors
        dys, found, start = (grad_output, *basic_op_grad_extra_outputs[-1]), [], 0
        with torch.enable_grad():
            for given, ys in self._parts(linear[0], params, x, tokens):
                rows = slice(start, start := start + len(given[0]))
                pairs = [
                    (y, dy.flatten()[rows]) for y, dy in zip(ys, dys, strict=True) if dy is not None
                ]
                outputs, grads = zip(*pairs, strict=True)
                found.append(torch.autograd.grad(outputs, given, grads))
        dx, *of_params = zip(*found, strict=True)
        return (
            torch.cat(dx).view(x.shape),
            [*[(sum(each),) for each in of_params], ()],
            [*[()] * len(linear), (None,)],
        )


@pytest.fixture(autouse=True)
def a_fusion_without_logits():
    """That of opfuse-plugin-loss, or one that stands in for it; and no other."""
    if importlib.util.find_spec("opfuse_loss") is not None:
        with opfuse.plugins.using("transformers,loss"):
            yield
        return
    pattern = BasicLinear, opfuse.Optional(Bias), TokenLogProb
    made = opfuse.register_forward_backward_fusion(opfuse.Fusion(pattern, ByChunks))
    with opfuse.plugins.using("transformers"):
        yield
    made.unregister()


class Exact:
    """What trl's function computes, in fp64 and from all logits."""

    @staticmethod
    def apply(hidden, weight, bias, targets, temperature, chunk, softcap, scale, outputs):
        z = F.linear(hidden, weight, bias).double() * scale
        z = z if softcap is None else softcap * torch.tanh(z / softcap)
        log_p = (z / temperature).log_softmax(-1)
        found = {
            "log_probs": log_p.gather(-1, targets[:, None])[:, 0],
            "entropy": -(log_p.exp() * log_p).sum(-1),
            "log_sum_sq_probs": (2 * log_p).logsumexp(-1).detach(),
            "mean_logits": (z / temperature).mean(-1).detach(),
            "is_top1": log_p.argmax(-1) == targets,
        }
        return tuple([found[name] if name in outputs else None for name in ALL])


def run(model, outputs=ALL, exact=False, masked=True, **more):
    """The outputs of a forward for log-probabilities, and the gradients of a loss of them."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, model.config.vocab_size, (3, 17), generator=generator)
    labels, padding = ids.clone(), torch.ones_like(ids)
    if masked:
        padding[1, 12:] = 0
        labels[0, :5] = labels[1, 12:] = -100
    factors = torch.rand(2, 3, 16, generator=generator, dtype=torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        if exact:
            patch.setattr(utils, NAME, Exact)
        model.zero_grad()
        torch.manual_seed(2)
        found = model(
            input_ids=ids, attention_mask=padding, labels=labels, fused_lm_head=True, **more
        )
    if not torch.is_grad_enabled():
        return found, {}
    loss = (found.log_probs * factors[0]).sum() + found.loss
    if "entropy" in outputs:
        loss = loss + (found.entropy * factors[1]).sum()
    loss.backward()
    return found, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def compare(got, expected, tolerance):
    """All outputs and gradients of two forwards."""
    (mine, grads), (theirs, exact) = got, expected
    assert mine.keys() == theirs.keys() and grads.keys() == exact.keys()
    for name, value in theirs.items():
        close = {"rtol": tolerance, "atol": tolerance, "check_dtype": False}
        torch.testing.assert_close(
            mine[name], value, **close, msg=lambda text, n=name: f"{n}: {text}"
        )
    for name, grad in exact.items():
        assert (grads[name] - grad).norm() <= tolerance * grad.norm() + 1e-15, name


def fused(models, family="llama", dtype=torch.float64, frozen=(), config=None, **given):
    """A model with trl's forward, a converted copy, and the report."""
    found = [models.make(family, dtype, **(config or {})) for _ in "12"]
    for model in found:
        utils.add_fused_lm_head(model, **{"outputs": ALL, **given})
        for name in frozen:
            model.get_submodule(name).requires_grad_(False)
    # the library's norms of a body in fp64 are in fp32
    return *found, opfuse.convert(found[1], skip=found[1].base_model_prefix)


def of(model):
    """Why trl's function ran at the latest call of a model; ``""``: the chain did."""
    return converted(model)[""]


def why_left(report, path=""):
    return next(row.reason for row in report.left if row.path == path)


# A model that trl gave its forward


@pytest.mark.parametrize("frozen", [(), ("lm_head",), ("model",)], ids=["", "head", "body"])
@pytest.mark.parametrize(
    "outputs", [ALL, ("log_probs", "entropy"), ("log_probs",)], ids=["all", "grpo", "reference"]
)
def test_numbers_and_gradients_are_exact(models, outputs, frozen):
    """trl computes in fp32 what the chain, for a model in fp64, computes in fp64."""
    model, twin, report = fused(models, outputs=outputs, temperature=0.7, frozen=frozen)
    assert (report.converted[0].path, report.converted[0].ops) == ("", CHAIN)
    got = run(twin, outputs)
    assert of(twin) == ""
    compare(got, run(model, outputs, exact=True), 1e-12)
    compare(got, run(model, outputs), 1e-4)
    with torch.no_grad():
        compare(run(twin, outputs), run(model, outputs, exact=True), 1e-12)
    assert of(twin) == "" and got[0].log_probs.dtype is torch.float64


@pytest.mark.parametrize(
    "family, config",
    [
        ("llama", {"tie_word_embeddings": True}),
        ("gpt2", {}),
        ("qwen3", {}),
        ("mixtral", {"output_router_logits": True, "experts_implementation": "eager"}),
        ("cohere", {"logit_scale": 0.3}),
        ("granite", {"logits_scaling": 4.0}),
        ("gemma2", {"final_logit_softcapping": 2.0}),
        ("phi", {}),
    ],
)
def test_heads_of_other_models(models, monkeypatch, family, config):
    """Tied, scaled and capped ones, with a bias, and a loss of the experts beside it."""
    name = family.capitalize()
    more = {"head_dim": 16} if family == "gemma2" else {}
    entry = f"{name}ForCausalLM", f"{name}Config", {**models.decoder, **more}
    monkeypatch.setitem(models.families, family, models.families.get(family, entry))
    outputs = ALL if family != "gemma2" else ("log_probs", "entropy")
    model, twin, report = fused(models, family, config=config, outputs=outputs, temperature=1.3)
    bias = ("Bias",) if family == "phi" else ()
    assert report.converted[0].ops == (CHAIN[0], *bias, CHAIN[1])
    tolerance = 1e-12 if family != "mixtral" else 1e-6  # its router is in fp32
    compare(run(twin, outputs), run(model, outputs, exact=True), tolerance)
    assert of(twin) == ""
    found = run(twin, outputs)[0]
    assert (found.aux_loss is not None) == (family == "mixtral")


@pytest.mark.parametrize("outputs", [ALL[:4], ("log_probs",), ["log_probs", "entropy"]], ids=len)
def test_the_chain_and_trls_function_in_its_place_agree(models, outputs):
    """Which ``verify`` compares, and ``opfuse.tune`` chooses from; dtypes that differ ask for it."""
    model, twin = models.make("llama"), models.make("llama")
    for each in (model, twin):
        utils.add_fused_lm_head(each, outputs=outputs)
    assert [r.ops for r in opfuse.convert(twin, skip="model", verify=True).converted] == [CHAIN]
    compare(run(twin, outputs), run(model, outputs), 1e-4)
    assert of(twin) == ""
    for each in (model, twin):
        each.lm_head.to(torch.bfloat16)
    compare(run(twin, outputs), run(model, outputs), 0)
    assert of(twin) == "its input is of torch.float32, its parameters are of torch.bfloat16"


def test_what_no_op_gives_is_left_to_trl(models, monkeypatch):
    entry = "Gemma2ForCausalLM", "Gemma2Config", {**models.decoder, "head_dim": 16}
    monkeypatch.setitem(models.families, "gemma2", entry)
    model, twin, report = fused(models, "gemma2")
    assert why_left(report) == "trl asks for the mean of capped logits, which no op gives"
    compare(run(twin), run(model), 1e-6)
    _, _, report = fused(models, temperature=float("inf"))
    assert why_left(report) == "its temperature is inf, and a chain takes one above 0"


@pytest.mark.parametrize("how", ["half", "autocast", "head in fp32"])
def test_low_precision_is_as_near_fp64_as_trls(models, how):
    dtype = torch.float32 if how == "autocast" else torch.bfloat16
    model, twin, _ = fused(models, dtype=dtype, cast_lm_head_to_fp32=how == "head in fp32")
    if how == "head in fp32":
        for each in (model, twin):
            each.lm_head.float()
    found = []
    for each in (model, twin):
        with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
            found.append(run(each))
    assert of(twin) == ""
    (theirs, exact), (mine, grads) = found
    assert all(mine[n].dtype is theirs[n].dtype for n in theirs)
    for name in ("log_probs", "entropy", "mean_logits"):
        torch.testing.assert_close(mine[name], theirs[name], rtol=0.01, atol=0.01)
    assert torch.equal(mine.is_top1, theirs.is_top1)
    for name, grad in exact.items():
        assert (grads[name] - grad).norm() <= 0.03 * grad.norm(), name


def test_equal_logits_have_one_that_is_the_most_probable(models):
    """The first, as for trl, whatever the row."""
    model, twin, _ = fused(models, dtype=torch.float32)
    for each in (model, twin):
        with torch.no_grad():
            each.lm_head.weight.copy_(each.lm_head.weight[:2].repeat(64, 1))
    with torch.no_grad():
        (theirs, _), (mine, _) = run(model), run(twin)
    assert torch.equal(mine.is_top1, theirs.is_top1)


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that an operation gives."""

    keeps_no_tensors = True

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(each, torch.Tensor):
                self.most = max(self.most, each.numel())
        return result


def test_no_tensor_is_as_large_as_the_logits(models):
    """Neither in the forward nor in the backward, nor among what is kept in between."""
    _, twin, _ = fused(models, dtype=torch.float32, config={"vocab_size": 4096})
    ids = torch.randint(3, 4096, (4, 600))
    logits, kept, given = ids.numel() * 4096, [0], {"input_ids": ids, "labels": ids}

    def keep(tensor):
        kept[0] = max(kept[0], tensor.numel())
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        Largest() as largest,
    ):
        found = twin(**given, fused_lm_head=True)
        (found.loss + found.entropy.mean()).backward()
    assert of(twin) == "" and found.log_probs.shape == (4, 599)
    assert kept[0] < logits / 4 and largest.most < logits / 2
    bytes_kept = saved_bytes(lambda: twin(**given, fused_lm_head=True), twin.parameters())
    assert bytes_kept < logits * 4


def test_without_a_fusion_trls_function_runs(models):
    """It never holds all logits, which the chain would then."""
    model, twin, _ = fused(models)
    with opfuse.options(fusion_limit=0):
        got = run(twin)
    assert of(twin).startswith("its chain would hold all logits: ")
    for name, value in run(model)[0].items():
        assert torch.equal(got[0][name], value), name
    compare(run(twin), run(model, exact=True), 1e-12)
    assert of(twin) == ""
    twin.lm_head.register_forward_hook(lambda *unused: None)
    compare(run(twin), run(model), 1e-12)
    assert of(twin) == "lm_head has forward hooks"


# Trainers


@pytest.fixture(scope="module")
def tokenizer():
    words = {f"w{number}": number for number in range(125)} | {
        "<pad>": 125,
        "<bos>": 126,
        "<eos>": 127,
    }
    made = Tokenizer(tokenizer_models.WordLevel(words, "w0"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )


ARGUMENTS = {
    "max_steps": 2,
    "report_to": [],
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "save_strategy": "no",
    "logging_steps": 1,
    "disable_tqdm": True,
    "per_device_train_batch_size": 2,
}


def lora(model, **more):
    """A model with adapters in its body that compute something."""
    settings = {"r": 4, "target_modules": ["q_proj", "up_proj"], "init_lora_weights": False, **more}
    torch.manual_seed(3)
    return peft.get_peft_model(model, peft.LoraConfig(**settings))


def dpo(models, tokenizer, folder, adapters, cls=trl.DPOTrainer, dtype=torch.float64, **given):
    """A trainer with a policy, and a reference that is another model."""
    data = [{"prompt": "w1 w2", "chosen": " w4 w5", "rejected": " w7"}] * 2
    policy, reference = (
        models.make("llama", dtype),
        models.make("llama", dtype).requires_grad_(False),
    )
    with torch.no_grad():
        reference.lm_head.weight.mul_(0.9)
    return cls(
        model=lora(policy) if adapters else policy,
        ref_model=None if adapters else reference,
        args=trl.DPOConfig(output_dir=str(folder), **{**ARGUMENTS, **given}),
        train_dataset=Dataset.from_list(data),
        processing_class=tokenizer,
    )


def grpo(models, tokenizer, folder, adapters, cls=trl.GRPOTrainer, dtype=torch.float64, **given):
    """A trainer with a policy, and a reference that is loaded from a folder or without adapters."""
    policy = models.make("llama", dtype)
    if not adapters:
        policy.save_pretrained(folder / "model")
        policy = type(policy).from_pretrained(folder / "model", dtype=dtype).train()
        with torch.no_grad():
            policy.lm_head.weight.mul_(1.1)
    usual = {"beta": 0.1, "temperature": 0.7, "num_generations": 2, "max_completion_length": 5}
    trainer = cls(
        model=lora(policy) if adapters else policy,
        args=trl.GRPOConfig(output_dir=str(folder), **{**ARGUMENTS, **usual, **given}),
        train_dataset=Dataset.from_list([{"prompt": "w1 w2 w3"}, {"prompt": "w9"}]),
        processing_class=tokenizer,
        reward_funcs=lambda completions, **unused: [float(len(each)) for each in completions],
    )
    trainer.current_gradient_accumulation_steps = 1  # as train() sets it
    return trainer


def inputs_of(trainer):
    """A batch for the loss of a trainer: padded, with sequences of different lengths."""
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(3, 120, (4, 14), generator=generator)
    ends = torch.tensor([14, 10, 12, 6])[:, None]
    if isinstance(trainer, trl.DPOTrainer):
        places = torch.arange(14)
        padding, chosen = (places < ends).long(), ((places >= 4) & (places < ends)).long()
        return {"input_ids": ids, "attention_mask": padding, "completion_mask": chosen}
    starts, ends = torch.tensor([0, 2, 1, 3])[:, None], ends - 5
    left, right = (torch.arange(5) >= starts).long(), (torch.arange(9) < ends).long()
    drawn = torch.randn(4, 9, generator=generator, dtype=torch.float64)
    context = trainer.model.disable_adapter() if trainer.ref_model is None else torch.no_grad()
    with torch.no_grad(), context:
        theirs, *_ = trainer._get_per_token_logps_and_entropies(
            trainer.ref_model or trainer.model, ids, torch.cat([left, right], 1), 9, batch_size=3
        )
    return {
        "prompt_ids": ids[:, :5],
        "prompt_mask": left,
        "completion_ids": ids[:, 5:],
        "completion_mask": right,
        "advantages": torch.tensor([1.0, -1.0, 0.5, -0.5], dtype=torch.float64),
        "ref_per_token_logps": theirs,
        "old_per_token_logps": theirs + 0.1 * drawn,
        "num_items_in_batch": right.sum(),
    }


def step_of(trainer, exact=False):
    """The loss of a trainer, its gradients and metrics."""
    trainer.model.zero_grad()
    trainer._metrics["train"].clear()
    trainer.model.train()
    with pytest.MonkeyPatch.context() as patch:
        if exact:
            patch.setattr(utils, NAME, Exact)
        loss = trainer.compute_loss(trainer.model, inputs_of(trainer))
    loss.backward()
    grads = {n: p.grad for n, p in trainer.model.named_parameters() if p.grad is not None}
    return loss.detach(), grads, {n: v[-1] for n, v in trainer._metrics["train"].items()}


def bodies(trainer):
    """The names of what is below the heads: norms in fp64 are not exact in the library."""
    held = [name for name in ("model", "ref_model") if getattr(trainer, name) is not None]
    return [
        f"{name}.{inner}"
        for name in held
        for inner, module in getattr(trainer, name).named_modules()
        if type(module).__name__ == "LlamaModel"
    ]


def ran(trainer):
    """Why trl's function ran at the latest call of each model of a trainer."""
    return {n: why for n, why in converted(trainer).items() if n.endswith("model")}


@pytest.mark.parametrize("adapters", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize(
    "make, given",
    [
        (dpo, {"loss_type": ["sigmoid", "sft"], "loss_weights": [0.8, 0.2]}),
        (dpo, {"use_weighting": True, "ld_alpha": 0.5}),
        (grpo, {"entropy_coef": 0.01, "top_entropy_quantile": 0.5}),
        (grpo, {"loss_type": "grpo", "importance_sampling_level": "sequence"}),
    ],
    ids=["dpo, sft", "wpo", "grpo, entropy", "gspo"],
)
def test_a_training_step_is_that_of_the_trainer(models, tokenizer, tmp_path, make, given, adapters):
    """Loss, gradients and metrics, in fp64 and to 1e-12; both models of it are converted."""
    before, after = (
        make(models, tokenizer, tmp_path / name, adapters, **given) for name in ("before", "after")
    )
    report = opfuse.convert(after, skip=bodies(after))
    assert {row.ops for row in report.converted} == {CHAIN}
    assert len(report.converted) == (1 if adapters else 2)
    (loss, grads, metrics), (exact, expected, numbers) = step_of(after), step_of(before, exact=True)
    assert set(ran(after).values()) == {""}
    torch.testing.assert_close(loss, exact, rtol=1e-12, atol=1e-12)
    assert grads.keys() == expected.keys() and grads
    for name, grad in expected.items():
        assert (grads[name] - grad).norm() <= 1e-12 * grad.norm() + 1e-15, name
    assert metrics == pytest.approx(numbers, rel=1e-9, abs=1e-12)
    theirs = step_of(before)
    torch.testing.assert_close(loss, theirs[0].to(loss), rtol=1e-5, atol=1e-6)
    revert(after)
    assert torch.equal(step_of(after)[0], theirs[0]) and not converted(after)


def test_a_trainer_trains_through_chains(models, tokenizer, tmp_path):
    """Draws responses, computes both models' log-probabilities, and takes steps."""
    losses = []
    for convert in (False, True):
        trainer = grpo(
            models, tokenizer, tmp_path / str(convert), False, dtype=torch.float32, seed=0
        )
        if convert:
            report = opfuse.convert(trainer)
            assert [row.path for row in report.converted if row.ops == CHAIN] == [
                "model",
                "ref_model",
            ]
            assert (
                "LlamaForCausalLM x 2 -> BasicLinear TokenLogProb (log-probabilities for trl)"
                in str(report)
            )
            assert "trainer" not in str(report).lower()
        torch.manual_seed(5)
        trainer.train()
        losses.append([row["loss"] for row in trainer.state.log_history if "loss" in row])
        assert not convert or set(ran(trainer).values()) == {""}
    assert losses[1] == pytest.approx(losses[0], rel=1e-3, abs=1e-5) and len(losses[0]) == 2


def test_each_model_has_its_own_chain(models):
    """Two at once, one frozen and without grad mode, and a copy of a converted one."""
    policy, reference = fused(models)[1], fused(models, outputs=("log_probs",))[1]
    reference.requires_grad_(False)
    twin = copy.deepcopy(policy)
    with torch.no_grad():
        for each in (reference, twin):
            each.lm_head.weight.mul_(0.5)
        theirs, copied = run(reference)[0].log_probs, run(twin)[0].log_probs
    mine = run(policy)[0].log_probs
    assert of(policy) == of(reference) == of(twin) == "" and not theirs.requires_grad
    torch.testing.assert_close(copied, theirs, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(mine, theirs)


def test_a_model_may_be_converted_before_its_trainer_and_again_after(models):
    """The loss of its own forward is converted first; the other forward hides that."""
    model, twin = models.make("llama", torch.float64), models.make("llama", torch.float64)
    assert opfuse.convert(twin, skip="model").converted[0].ops == ("BasicLinear", "CrossEntropy")
    for each in (model, twin):
        utils.add_fused_lm_head(each, outputs=ALL)
    compare(run(twin), run(model), 1e-12)
    assert [row.ops for row in opfuse.convert(twin, skip="model").converted] == [CHAIN]
    compare(run(twin), run(model, exact=True), 1e-12)
    assert of(twin) == "" and not opfuse.convert(twin, skip="model").converted
    for each in (model, twin):
        each.eval()
    given = models.inputs(model)
    torch.testing.assert_close(twin(**given).logits, model(**given).logits)
    assert of(twin) == "it was called for logits, not for log-probabilities"
    ids = [
        each.generate(given["input_ids"], max_new_tokens=4, do_sample=False)
        for each in (model, twin)
    ]
    assert torch.equal(*ids)
    method = twin.forward.__func__.__wrapped__
    assert revert(twin).forward.__func__ is method and type(twin) is type(model)
    compare(run(twin), run(model), 0)


def test_adapters_of_the_body_and_a_head_of_their_own(models):
    """``modules_to_save``: with the adapters the head is a copy, without them the original."""
    found = []
    for _ in "12":
        model = models.make("llama", torch.float64)
        utils.add_fused_lm_head(model, outputs=ALL)
        found.append(lora(model, modules_to_save=["lm_head"]))
        with torch.no_grad():
            model.lm_head.modules_to_save.default.weight.mul_(1.2)
    model, twin = found
    (row,) = opfuse.convert(twin, skip="base_model.model.model").converted
    assert (row.path, row.ops) == ("base_model.model", CHAIN)
    compare(run(twin), run(model, exact=True), 1e-12)
    assert converted(twin) == {row.path: ""}
    with model.disable_adapter(), twin.disable_adapter(), torch.no_grad():
        compare(run(twin), run(model), 0)
    assert converted(twin) == {row.path: "trl reads other weights than those of the head"}


# What is left alone, and why


def test_a_change_of_trls_code_is_seen(models, monkeypatch):
    """Before a conversion it is refused; after it, trl's own code runs as it is then."""
    known = getattr(utils, NAME)
    model, twin, _ = fused(models)

    class Other(known):
        """The same, with twice the entropy."""

        @staticmethod
        def forward(ctx, hidden, weight, bias, targets, temperature, chunk_size,
                    final_logit_softcapping=None, logit_scale=1.0, outputs=()):  # fmt: skip
            y, entropy, *others = known.forward(
                ctx, hidden, weight, bias, targets, temperature, chunk_size,
                final_logit_softcapping, logit_scale, outputs,
            )  # fmt: skip
            return y, None if entropy is None else 2 * entropy, *others

    class Renamed(known):
        @staticmethod
        def forward(ctx, hidden, weight, labels):
            raise AssertionError

    monkeypatch.setattr(utils, NAME, Other)
    compare(run(twin), run(model), 1e-12)
    assert of(twin).startswith(f"trl's {NAME} was replaced by ")
    assert why_left(fused(models)[2]) == f"trl's {NAME} computes something else than is known"
    monkeypatch.setattr(utils, NAME, Renamed)
    unknown = f"trl's add_fused_lm_head does not call the {NAME} that is known"
    assert why_left(fused(models)[2]) == unknown
    monkeypatch.setattr(utils, NAME, known)
    compare(run(twin), run(model, exact=True), 1e-12)
    assert of(twin) == ""


def as_accelerate(model):
    """Put around a forward what accelerate does for mixed precision."""
    from accelerate.utils import convert_outputs_to_fp32

    mixed = torch.autocast("cpu", torch.bfloat16)(model.forward.__func__)
    model.forward = types.MethodType(convert_outputs_to_fp32(mixed), model)


@pytest.mark.parametrize("first", ["convert", "accelerate"])
def test_mixed_precision_may_be_put_around_it(models, first):
    """A policy gets it when training begins, a reference before the trainer is there to convert."""
    model, twin = models.make("llama"), models.make("llama")
    for each in (model, twin):
        utils.add_fused_lm_head(each, outputs=ALL)
    if first == "convert":
        opfuse.convert(twin, skip="model")
    for each in (model, twin):
        as_accelerate(each)
    around = twin.forward
    report = opfuse.convert(twin, skip="model")
    assert [row.ops for row in report.converted] == [CHAIN] * (first == "accelerate")
    (mine, grads), (theirs, expected) = run(twin), run(model)
    assert of(twin) == "" and mine.log_probs.dtype is theirs.log_probs.dtype is torch.float32
    torch.testing.assert_close(mine.log_probs, theirs.log_probs, rtol=1e-4, atol=1e-4)
    assert all((grads[n] - g).norm() <= 0.01 * g.norm() for n, g in expected.items())
    assert twin.forward == around == revert(twin).forward
    compare(run(twin), run(model), 0)


def test_what_calls_it_in_another_way_is_left(models):
    model, twin, _ = fused(models)
    inner = revert(twin).forward

    def around(self, *args, **kwargs):
        return inner(*args, **kwargs)

    around.__wrapped__ = inner
    twin.forward = types.MethodType(around, twin)
    reason = "what is around the forward that trl gave it calls that in an unknown way"
    assert why_left(opfuse.convert(twin, skip="model")) == reason
    compare(run(twin), run(model), 0)


class Twice(torch.nn.Module):
    def forward(self, x):
        return 2 * x


def test_weights_that_are_not_those_of_a_linear_layer(models):
    model, twin, _ = fused(models)
    for each in (model, twin):
        parametrize.register_parametrization(each.lm_head, "weight", Twice())
    compare(run(twin), run(model), 0)
    assert of(twin) == "trl reads other weights than those of the head"
    left = models.make("llama", torch.float64)
    left.lm_head = torch.nn.Bilinear(64, 64, 128)
    utils.add_fused_lm_head(left, outputs=ALL)
    assert why_left(opfuse.convert(left)) == "its head is a Bilinear, and not a torch.nn.Linear"


class Elsewhere(torch.Tensor):
    """Says that it is on a GPU."""

    is_cpu = False


def test_where_trl_has_a_kernel_the_chain_runs_if_it_is_asked_for(models):
    calls = []
    for options in ({}, {"transformers.log_probs": "chain"}):
        model = models.make("llama")
        utils.add_fused_lm_head(model, outputs=ALL)
        with opfuse.options(**options):
            opfuse.convert(model)
        call = model._opfuse._conversion.call
        hidden, targets = (
            torch.zeros(5, 64).as_subclass(Elsewhere),
            torch.zeros(5, dtype=torch.long),
        )
        head = model.lm_head.weight, model.lm_head.bias
        with opfuse.options(prefer="memory"):
            calls.append(call._refusal(hidden, *head, targets, 1.0, 1 << 15, None, 1.0, ALL))
    assert (
        calls[0]
        == "no chain was compared with trl's kernel there; transformers.log_probs='chain' has it run"
    )
    assert calls[1] == ""
    other = call._refusal(hidden, *head, targets, 0.5, 1 << 15, None, 1.0, ALL)
    assert other == "trl asks for other numbers than when it was converted"


def test_a_trainer_of_ones_own_is_said_to_be_unknown(models, tokenizer, tmp_path):
    class Mine(trl.DPOTrainer):
        def _compute_loss(self, model, inputs, return_outputs):
            logits = model(input_ids=inputs["input_ids"]).logits[:, :-1]
            log_p = utils.selective_log_softmax(logits, inputs["input_ids"][:, 1:])
            return -(log_p * inputs["completion_mask"][:, 1:]).sum()

    before, after = (dpo(models, tokenizer, tmp_path / name, False, Mine) for name in "ab")
    report = opfuse.convert(after, skip=bodies(after))
    reason = "its _compute_loss is not trl's, and what that asks its models for is not known"
    assert ("", "Mine", reason) in report.left and f"Mine x 1: {reason}" in str(report)
    (loss, grads, _), (exact, expected, _) = step_of(after), step_of(before)
    assert torch.equal(loss, exact) and all(torch.equal(grads[n], g) for n, g in expected.items())
    assert ran(after)["model"] == "it was called for logits, not for log-probabilities"
    revert(after)
    after._compute_loss = types.MethodType(trl.DPOTrainer._compute_loss, after)
    assert why_left(opfuse.convert(after, skip=bodies(after))) == reason


def test_a_trainer_that_takes_logits_is_said_to(models):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from trl.experimental.orpo import ORPOTrainer
    trainer = object.__new__(ORPOTrainer)
    trainer.model = models.make("llama")
    report = opfuse.convert(trainer, skip="model.model")
    reason = (
        "its log-probabilities come from logits, and not from a model with trl's add_fused_lm_head"
    )
    assert why_left(report) == reason
    assert [row.ops for row in report.converted] == [("BasicLinear", "CrossEntropy")]
