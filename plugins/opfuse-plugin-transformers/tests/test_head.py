"""The head of a causal language model and its loss, in one chain."""

import copy
import dataclasses

import pytest
import torch
from torch import nn

import opfuse
from opfuse.authoring import saved_bytes

CAUSAL = "llama", "gpt2", "qwen3", "phi3", "mixtral"


def of(model):
    """Why the model itself ran its own forward, at its latest call."""
    return opfuse.converted(model)[""]


@pytest.mark.parametrize(
    "how",
    [
        "plain",
        "ignored",
        "items",
        "items as a number",
        "shifted",
        "positional",
        "tuple",
        "autocast",
    ],
)
@pytest.mark.parametrize("family", CAUSAL)
def test_a_training_step(models, family, how):
    model, twin, report = models.pair(family)
    assert report.converted[0].ops == ("BasicLinear", "CrossEntropy")
    ids = models.inputs(model)["input_ids"]
    target = ids.clone()
    target[0, 3:9] = -100
    args, given = (), {"input_ids": ids, "labels": target}
    if how == "plain":
        given["labels"] = ids
    elif how == "items":
        given["num_items_in_batch"] = torch.tensor(31)
    elif how == "items as a number":
        given["num_items_in_batch"] = 31
    elif how == "shifted":
        given["shift_labels"] = torch.roll(target, -1, 1)
    elif how == "positional" and family == "llama":
        args = ids, None, None, None, None, target
        given = {}
    elif how == "tuple":
        given["return_dict"] = False
    found = []
    for each in (model, twin):
        torch.manual_seed(2)
        with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
            out = each(*args, **given)
        out[0].backward()
        found.append((out, {n: p.grad for n, p in each.named_parameters()}))
    (expected, exact), (got, grads) = found
    tolerance = 0.02 if how == "autocast" else 1e-5
    assert got[0].dtype is expected[0].dtype is torch.float32
    torch.testing.assert_close(got[0], expected[0], rtol=tolerance, atol=0)
    for name, grad in exact.items():
        assert (grads[name] - grad).norm() <= tolerance * 3 * grad.norm(), name
    assert of(twin) == ""
    if how == "tuple":
        torch.testing.assert_close(got[1], expected[1], rtol=1e-4, atol=1e-4)
    else:
        assert type(got) is type(expected) and got.logits is None and "logits" not in got
        kept = {f.name for f in dataclasses.fields(expected)} - {"logits"}
        assert all((got[n] is None) == (expected[n] is None) for n in kept & {*expected, *got})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(models, dtype):
    """The loss is in fp32, as the library's, and near that in fp64."""
    model, twin, _ = models.pair("llama", dtype)
    exact = copy.deepcopy(model).double()
    losses = [each(**models.inputs(model)).loss for each in (model, twin, exact)]
    assert losses[1].dtype is losses[0].dtype is torch.float32
    assert abs(losses[1] - losses[2]) <= 2 * abs(losses[0] - losses[2]) + 1e-3
    grads = [torch.autograd.grad(loss, m.lm_head.weight)[0].double() for loss, m in zip(losses, (model, twin, exact), strict=True)]  # fmt: skip
    assert (grads[1] - grads[2]).norm() <= 1.5 * (grads[0] - grads[2]).norm() + 1e-3


def test_logits_are_given_wherever_the_loss_is_not_trained(models):
    model, twin, _ = models.pair("llama")
    given = models.inputs(model)

    def alike(**changed):
        expected, got = (each(**{**given, **changed}).logits for each in (model, twin))
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)

    alike(labels=None)
    assert of(twin) == "without labels it gives logits"
    alike(ignore_index=5)
    assert of(twin) == "it was called with ignore_index"
    with torch.no_grad():
        alike()
    assert of(twin) == "outside of training it gives logits"
    alike(labels=None, logits_to_keep=3)
    model.eval(), twin.eval()
    alike()
    assert of(twin) == "outside of training it gives logits"


def test_logits_to_keep(models):
    """Labels for what is kept, which are shifted already, are honoured; others are refused as ever."""
    model, twin, _ = models.pair("llama")
    given = models.inputs(model)
    with pytest.raises(ValueError, match=r"batch_size \(6\) to match target batch_size \(48\)"):
        twin(**given, logits_to_keep=3)
    given["labels"] = given["labels"][:, -3:]
    expected, got = (each(**given, logits_to_keep=3) for each in (model, twin))
    torch.testing.assert_close(got.loss, expected.loss)
    assert of(twin) == "" and got.logits is None


def test_logits_kept_by_skipping_the_head(models):
    model = models.make("llama")
    report = opfuse.convert(model, skip="lm_head")
    assert "" not in opfuse.converted(model)
    assert "lm_head is to be left alone" in str(report)
    assert model(**models.inputs(model)).logits.shape == (2, 24, 128)


def test_a_forward_that_computes_with_the_logits(models):
    """Then they are computed, the loss is the library's, and from the next call on the forward is the model's own."""
    from transformers import LlamaForCausalLM

    class Capped(LlamaForCausalLM):
        def forward(self, input_ids, labels=None, **kwargs):
            hidden = self.model(input_ids, **kwargs).last_hidden_state
            logits = 5 * torch.tanh(self.lm_head(hidden) / 5)
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=logits.shape[-1])
            return {"loss": loss, "logits": logits}

    class Looked(LlamaForCausalLM):
        def forward(self, input_ids, labels=None, **kwargs):
            hidden = self.model(input_ids, **kwargs).last_hidden_state
            logits = self.lm_head(hidden)
            best = logits.argmax(-1)
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=logits.shape[-1])
            return {"loss": loss, "logits": logits, "best": best}

    for cls in (Capped, Looked):
        model = models.make("llama")
        model.__class__ = cls
        twin = copy.deepcopy(model)
        report = opfuse.convert(twin)
        assert report.converted[0].ops == ("BasicLinear", "CrossEntropy")
        for reason in ("", "the loss it computes is not that of what lm_head gives"):
            expected, got = (each(**models.inputs(model)) for each in (model, twin))
            torch.testing.assert_close(got["loss"], expected["loss"])
            assert type(got["logits"]) is torch.Tensor
            torch.testing.assert_close(got["logits"], expected["logits"], rtol=1e-4, atol=1e-4)
            assert of(twin) == reason


@pytest.mark.parametrize("change", ["hook", "loss", "replaced", "frozen"])
def test_changes(models, change):
    model, twin, _ = models.pair("llama")
    for each in (model, twin):
        if change == "hook":
            each.lm_head.register_forward_hook(lambda module, args, output: output * 2)
        elif change == "loss":
            each.loss_function = lambda logits, labels, **unused: logits.square().mean()
        elif change == "replaced":
            torch.manual_seed(5)
            each.lm_head = nn.Sequential(nn.Linear(64, 128))
        else:
            each.lm_head.weight.requires_grad_(False)
    assert models.worst(models.step(twin), models.step(model))[0] <= 1e-5
    expected = {
        "hook": "lm_head has forward hooks",
        "loss": "its loss is test_changes.<locals>.<lambda>",
        "replaced": "lm_head was replaced by Sequential",
    }
    assert of(twin) == expected.get(change, "")


def test_a_head_with_a_bias_and_tied_weights(models):
    model = models.make("llama", tie_word_embeddings=True)
    torch.manual_seed(4)
    model.lm_head.bias = nn.Parameter(torch.randn(128))
    twin = copy.deepcopy(model)
    assert opfuse.convert(twin).converted[0].ops == ("BasicLinear", "Bias", "CrossEntropy")
    assert twin.lm_head.weight is twin.model.embed_tokens.weight
    assert models.worst(models.step(twin), models.step(model))[0] <= 1e-5


def test_it_keeps_less(models):
    """Eager keeps what the softmax gives; the fused head keeps the gradients of its input and weight."""
    model, twin, _ = models.pair("llama", vocab_size=4096)
    ids = torch.randint(3, 4096, (4, 128))
    given = {"input_ids": ids, "labels": ids}
    before, now = (saved_bytes(lambda m=m: m(**given), m.parameters()) for m in (model, twin))
    assert now < before / 2


def test_the_trainer_divides_by_its_number_of_items(models, tmp_path):
    from transformers import Trainer, TrainingArguments

    data = [{"input_ids": row, "labels": row} for row in torch.randint(3, 128, (12, 16))]
    losses = []
    for convert in (False, True):
        model = models.make("llama")
        if convert:
            opfuse.convert(model)
        arguments = TrainingArguments(
            output_dir=str(tmp_path / str(convert)),
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            max_steps=3,
            logging_steps=1,
            report_to=[],
            use_cpu=True,
            save_strategy="no",
            seed=0,
        )
        trainer = Trainer(model, arguments, train_dataset=data)
        trainer.train()
        losses.append([row["loss"] for row in trainer.state.log_history if "loss" in row])
        assert not convert or of(model) == ""
    assert losses[1] == pytest.approx(losses[0], rel=1e-4) and len(losses[0]) == 3
