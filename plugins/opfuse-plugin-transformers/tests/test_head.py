"""The head of a causal language model and its loss, in one chain."""

import copy
import dataclasses
import importlib.util

import pytest
import torch
from torch import nn

import opfuse
from opfuse.report.calls import saved_bytes

CAUSAL = "llama", "gpt2", "qwen3", "phi3", "mixtral"


def of(model):
    """Why the model itself ran its own forward, at its latest call."""
    return opfuse.converted(model)[""]


@pytest.mark.costly(16)
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
def test_the_fused_head_gives_the_same_training_step(models, family, how):
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
        assert isinstance(got, type(expected)) and got.keys() == expected.keys()
        assert type(got).__name__ == type(expected).__name__
        kept = {f.name for f in dataclasses.fields(expected)} - {"logits"}
        assert all((getattr(got, n) is None) == (getattr(expected, n) is None) for n in kept)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_loss_in_half_precision_is_as_near_fp64_as_the_original(models, dtype):
    """The loss is in fp32, as the library's, and near that in fp64."""
    model, twin, _ = models.pair("llama", dtype)
    exact = copy.deepcopy(model).double()
    losses = [each(**models.inputs(model)).loss for each in (model, twin, exact)]
    assert losses[1].dtype is losses[0].dtype is torch.float32
    assert abs(losses[1] - losses[2]) <= 2 * abs(losses[0] - losses[2]) + 1e-3
    grads = [torch.autograd.grad(loss, m.lm_head.weight)[0].double() for loss, m in zip(losses, (model, twin, exact), strict=True)]  # fmt: skip
    assert (grads[1] - grads[2]).norm() <= 1.5 * (grads[0] - grads[2]).norm() + 1e-3


@pytest.mark.parametrize("ignored", ["some", "all"])
@pytest.mark.parametrize("default", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_the_default_dtype_changes_no_digit_of_the_loss(models, default, ignored):
    """An integer divided, or a choice between two numbers, would have it."""
    model, twin, _ = models.pair("llama", vocab_size=512)
    ids = torch.randint(3, 512, (20, 24))
    labels = torch.full_like(ids, -100) if ignored == "all" else ids.masked_fill(ids % 7 == 0, -100)
    torch.set_default_dtype(default)
    try:
        expected, got = (each(input_ids=ids, labels=labels).loss for each in (model, twin))
    finally:
        torch.set_default_dtype(torch.float32)
    assert of(twin) == "" and got.dtype is expected.dtype
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=0, equal_nan=True)


def test_logits_are_given_wherever_there_is_no_loss(models):
    model, twin, _ = models.pair("llama")
    given = models.inputs(model)

    def alike(**changed):
        expected, got = (each(**{**given, **changed}).logits for each in (model, twin))
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)

    alike(labels=None)
    assert of(twin) == "without labels it gives logits"
    alike(ignore_index=5)
    assert of(twin) == "it was called with ignore_index"
    alike(labels=None, logits_to_keep=3)
    model.eval(), twin.eval()
    ids = given["input_ids"][:1, :4]
    written = [each.generate(ids, max_new_tokens=6, do_sample=False) for each in (model, twin)]
    assert torch.equal(*written) and of(twin) == "without labels it gives logits"


def test_labels_match_the_logits_that_are_kept(models):
    """Labels for what is kept, which are shifted already, are honoured; others are refused as ever."""
    model, twin, _ = models.pair("llama")
    given = models.inputs(model)
    with pytest.raises(ValueError, match=r"batch_size \(6\) to match target batch_size \(48\)"):
        twin(**given, logits_to_keep=3)
    given["labels"] = given["labels"][:, -3:]
    expected, got = (each(**given, logits_to_keep=3) for each in (model, twin))
    torch.testing.assert_close(got.loss, expected.loss)
    assert of(twin) == ""
    torch.testing.assert_close(got.logits, expected.logits)


def test_logits_kept_by_skipping_the_head(models):
    model = models.make("llama")
    report = opfuse.convert(model, skip="lm_head")
    assert "" not in opfuse.converted(model)
    assert "lm_head is to be left alone" in str(report)
    assert model(**models.inputs(model)).logits.shape == (2, 24, 128)


def test_forwards_of_others_run_as_they_are(models):
    from transformers import LlamaForCausalLM

    class Mine(LlamaForCausalLM):
        def forward(self, input_ids, labels=None, **kwargs):
            hidden = self.model(input_ids, **kwargs).last_hidden_state
            logits = self.lm_head(hidden)
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=128)
            return {"loss": loss, "logits": logits}

    model = models.make("llama")
    model.__class__ = Mine
    report = opfuse.convert(model)
    assert "its forward is not that of a model of transformers" in str(report)
    assert model(**models.inputs(model))["logits"].shape == (2, 24, 128)


def test_a_loss_function_of_a_subclass(models):
    from transformers import LlamaForCausalLM
    from transformers.loss.loss_utils import ForCausalLMLoss

    class Own(LlamaForCausalLM):
        loss_function = property(lambda self: ForCausalLMLoss)

    model = models.make("llama")
    model.__class__ = Own
    assert "its loss_function is not that of transformers" in str(opfuse.convert(model))
    assert model(**models.inputs(model)).logits.shape == (2, 24, 128)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("rows", [2, 20])
def test_ignoring_every_label_gives_nan_and_zero_gradients(models, rows, frozen):
    """The loss is NaN and all gradients are zero, as in eager."""
    model, twin, _ = models.pair("llama", vocab_size=512)
    ids = torch.randint(3, 512, (rows, 24))
    for each in (model, twin):
        each.lm_head.weight.requires_grad_(not frozen)
        loss = each(input_ids=ids, labels=torch.full_like(ids, -100)).loss
        loss.backward()
        assert loss.isnan() and of_all(each) == {0.0}
    assert of(twin) == ""


def of_all(model):
    return {float(p.grad.abs().max()) for p in model.parameters() if p.grad is not None}


def test_losses_that_look_like_the_librarys(models, monkeypatch):
    import functools

    from transformers.loss import loss_utils

    model, twin, _ = models.pair("llama")
    original = loss_utils.ForCausalLMLoss

    @functools.wraps(original)
    def twice(*args, **kwargs):
        return 2 * original(*args, **kwargs)

    model.loss_function = twin.loss_function = twice
    assert models.worst(models.step(twin), models.step(model))[0] <= 1e-5
    assert of(twin) == "its loss is ForCausalLMLoss"
    for each in (model, twin):
        del each._loss_function
    for home, name in ((loss_utils, "fixed_cross_entropy"), (nn.functional, "cross_entropy")):
        real = getattr(home, name)
        with monkeypatch.context() as patch:
            patch.setattr(home, name, lambda *args, real=real, **kwargs: 3 * real(*args, **kwargs))
            assert models.worst(models.step(twin), models.step(model))[0] <= 1e-5
            assert of(twin) == "the library's loss was replaced"
    models.step(twin)
    assert of(twin) == ""


def test_what_hooks_write_to_the_model_stays(models):
    model, twin, _ = models.pair("llama")
    for each in (model, twin):
        each.steps, each.once = 0, True

        def hook(module, args, output, each=each):
            each.steps += 1
            vars(each).pop("once", None)
            each.training = False

        each.model.norm.register_forward_hook(hook)
        for _ in range(2):
            each.training = True
            each(**models.inputs(model))
        assert each.steps == 2 and not hasattr(each, "once") and not each.training


def test_verify_accepts_the_fused_head(models):
    model = models.make("llama")
    assert opfuse.convert(model, verify=True).converted[0].ops == ("BasicLinear", "CrossEntropy")


class Coded(torch.Tensor):
    """As torchao's are, which a chain cannot read."""


@pytest.mark.parametrize(
    "change",
    ["hook", "loss", "loss_type", "mapping", "replaced", "resized", "frozen", "code", "kind"],
)
def test_a_changed_head_or_loss_falls_back(models, change, monkeypatch):
    from transformers.loss import loss_utils

    model, twin, _ = models.pair("llama")
    for each in (model, twin):
        if change == "hook":
            each.lm_head.register_forward_hook(lambda module, args, output: output * 2)
        elif change == "loss":
            each.loss_function = lambda logits, labels, **unused: logits.square().mean()
        elif change == "loss_type":
            each.loss_type = "ForMaskedLM"
        elif change == "code":
            other = lambda logits, labels, *unused, **options: logits.square().mean()  # noqa: E731
            monkeypatch.setattr(loss_utils.ForCausalLMLoss, "__code__", other.__code__)
        elif change == "mapping":
            monkeypatch.setitem(
                loss_utils.LOSS_MAPPING,
                "ForCausalLM",
                lambda logits, labels, **unused: logits.mean(),
            )
        elif change == "kind":
            weight = each.lm_head.weight.data.as_subclass(Coded)
            each.lm_head.weight = nn.Parameter(weight)
        elif change == "resized":
            torch.manual_seed(5)
            each.resize_token_embeddings(140, mean_resizing=False)
        elif change == "replaced":
            torch.manual_seed(5)
            each.lm_head = nn.Sequential(nn.Linear(64, 128))
        else:
            each.lm_head.weight.requires_grad_(False)
    assert models.worst(models.step(twin), models.step(model))[0] <= 1e-5
    expected = {
        "hook": "lm_head has forward hooks",
        "loss": "its loss is test_a_changed_head_or_loss_falls_back.<locals>.<lambda>",
        "loss_type": "its loss is ForMaskedLMLoss",
        "mapping": "its loss is test_a_changed_head_or_loss_falls_back.<locals>.<lambda>",
        "replaced": "lm_head was replaced by Sequential",
        "resized": "lm_head was replaced by Linear",
        "code": "the code of ForCausalLMLoss was replaced by code",
        "kind": "lm_head.weight is a Coded",
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


def test_the_report_says_when_there_are_logits(models):
    report = str(opfuse.convert(models.make("llama")))
    assert (
        "LlamaForCausalLM x 1 -> BasicLinear CrossEntropy (loss; logits when they are read)"
        in report
    )


@pytest.mark.parametrize("name", ["labels", "shift_labels"])
def test_soft_targets_are_refused_as_by_the_library(models, name):
    model, twin, _ = models.pair("llama")
    given = {**models.inputs(model), name: torch.rand(2, 24, 128)}
    for each in (model, twin):
        with pytest.raises(ValueError, match=r"input batch_size \(48\) to match target batch_size"):
            each(**given)
    with pytest.raises(TypeError, match="expected an integer tensor, got torch.float32"):
        twin(**{**models.inputs(model), name: torch.rand(2, 24)})


def test_the_fused_head_keeps_fewer_bytes(models):
    """Eager keeps what the softmax gives; the fused head keeps the gradients of its input and weight."""
    model, twin, _ = models.pair("llama", vocab_size=4096)
    ids = torch.randint(3, 4096, (4, 128))
    given = {"input_ids": ids, "labels": ids}
    before, now = (saved_bytes(lambda m=m: m(**given), m.parameters()) for m in (model, twin))
    installed = importlib.util.find_spec("opfuse_loss") is not None  # its fusion holds no logits
    assert now < (before / 2 if installed else before)


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
