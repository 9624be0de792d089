"""A loss outside of training: its logits are those of the library, bit by bit, for whoever reads them."""

import copy
import importlib.util
import io
import pickle

import largest
import numpy as np
import pytest
import torch
from opfuse_transformers import logits

import opfuse

FUSED = importlib.util.find_spec("opfuse_loss") is not None
needs_fusion = pytest.mark.skipif(not FUSED, reason="without opfuse-plugin-loss logits are there")


@pytest.fixture
def pair(models, monkeypatch):
    """A model and a twin whose head alone is converted; and what was computed late, in evaluation mode."""
    model = models.make("llama", vocab_size=512).eval()
    twin = copy.deepcopy(model)
    opfuse.convert(twin, skip="model")
    computed = []
    value = logits.Logits.value.func
    late = property(lambda self: computed.append(1) or value(self))
    monkeypatch.setattr(logits.Logits, "value", late)
    return model, twin, models.inputs(model), computed


MODES = {
    "no grad": torch.no_grad,
    "inference": torch.inference_mode,
    "with gradients": torch.enable_grad,
}


@needs_fusion
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_the_loss_needs_no_logits(models, mode, training):
    model = models.make("llama", vocab_size=32000)
    twin = copy.deepcopy(model)
    opfuse.convert(twin, skip="model")
    ids = torch.randint(3, 32000, (4, 128))
    found = []
    for each in (model, twin):
        each.train(training)
        with MODES[mode]():
            each(input_ids=ids, labels=ids)
            with largest.Largest() as most:
                out = each(input_ids=ids, labels=ids)
        found.append((most.bytes, out))
    (before, expected), (now, got) = found
    assert before == 4 * ids.numel() * 32000 and now < before / 3
    torch.testing.assert_close(got.loss, expected.loss, rtol=1e-5, atol=0)
    assert got.loss.requires_grad is expected.loss.requires_grad
    assert opfuse.converted(twin)[""] == ""
    assert torch.equal(got.logits, expected.logits)
    assert got.logits.requires_grad is expected.logits.requires_grad


def test_gradients_in_evaluation_mode(pair):
    model, twin, given, _ = pair
    for each in (model, twin):
        each(**given).loss.backward()
    for one, other in zip(twin.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_without_a_fusion_the_library_computes_both(models):
    """The chain would hold all logits, and a reader would have them computed again."""
    model = models.make("llama").eval()
    twin = copy.deepcopy(model)
    opfuse.convert(twin, skip="model")
    given = models.inputs(model)
    with torch.no_grad(), opfuse.options(fusion_limit=0):
        expected, got = model(**given), twin(**given)
    assert "no plugin computes the loss without them" in opfuse.converted(twin)[""]
    assert torch.equal(got.loss, expected.loss) and torch.equal(got.logits, expected.logits)
    assert type(vars(got)["logits"]) is torch.Tensor


READING = {
    "attribute": lambda out: out.logits,
    "index": lambda out: out[1],
    "slice": lambda out: out[1:][0],
    "tuple": lambda out: out.to_tuple()[1],
    "name": lambda out: out["logits"],
    "copy": lambda out: copy.deepcopy(out).logits,
    "pickle": lambda out: pickle.loads(pickle.dumps(out)).logits,
    "detach": lambda out: dict(out.items())["logits"].detach(),
    "clone": lambda out: [*out.values()][1].clone(),
    "deep copy": lambda out: copy.deepcopy([*out.values()][1]),
    "numpy": lambda out: torch.from_numpy([*out.values()][1].numpy()),
    "array": lambda out: torch.from_numpy(np.asarray([*out.values()][1])),
    "list": lambda out: torch.tensor([*out.values()][1].tolist()),
    "rows": lambda out: torch.stack([*dict(out)["logits"]]),
    "joined": lambda out: torch.cat([[*out.values()][1]]),
    "file": lambda out: torch.load(saved([*out.values()][1])),
    "pickled": lambda out: pickle.loads(pickle.dumps([*out.values()][1])),
    "overwritten": lambda out: [*out.values()][1].add_(0),
    "written to": lambda out: torch.empty(2, 24, 512).copy_([*out.values()][1]),
    "compiled": lambda out: torch.compile(lambda x: x * 1, backend="eager")(out.logits),
}


def saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


@needs_fusion
@pytest.mark.parametrize("mode", ["no grad", "inference"])
@pytest.mark.parametrize("how", READING)
def test_every_reader_gets_the_librarys(pair, how, mode):
    model, twin, given, computed = pair
    with MODES[mode]():
        expected, got = model(**given), twin(**given)
    stands = [*got.values()][1]
    assert opfuse.converted(twin)[""] == "" and isinstance(stands, torch.Tensor)
    about = ("shape", "dtype", "device", "ndim", "requires_grad")
    assert [getattr(stands, name) for name in about] == [
        getattr(expected.logits, name) for name in about
    ]
    assert (
        stands.size(-1) == 512 and stands.numel() == expected.logits.numel() and stands.dim() == 3
    )
    assert not computed
    read = READING[how](got)
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    assert computed and type(read) is torch.Tensor and torch.equal(read, expected.logits)


@needs_fusion
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_casts_are_done_when_they_are_read(pair, dtype):
    """As accelerate asks for, of outputs under autocast; they are in the dtype of that."""
    model, twin, given, computed = pair
    with torch.no_grad(), torch.autocast("cpu", dtype):
        expected, got = model(**given), twin(**given)
    stands = [*got.values()][1]
    wide, other = stands.float(), stands.to(torch.float64)
    assert (stands.dtype, wide.dtype, other.dtype) == (dtype, torch.float32, torch.float64)
    assert not computed
    assert torch.equal(wide + 0, expected.logits.float())
    assert torch.equal(other + 0, expected.logits.double())
    assert torch.equal(got.logits, expected.logits)


@needs_fusion
def test_other_weights_give_no_logits(pair):
    """As those of an average, which is put in place for a while, and seen by no version."""
    _, twin, given, _ = pair
    weight = twin.lm_head.weight
    with torch.no_grad():
        first, second, third = (twin(**given) for _ in range(3))
    kept = weight.data.clone()
    weight.data.mul_(2)
    with pytest.raises(RuntimeError, match="other weights or an optimizer's step came between"):
        first.logits  # noqa: B018
    weight.data.copy_(kept)
    assert torch.equal(first.logits, second.logits)
    weight.data = kept * 2
    with pytest.raises(RuntimeError, match="its head may be another one now"):
        [*third.values()][1].argmax(-1)


@needs_fusion
@pytest.mark.parametrize("how", ["loss only", "metrics", "best"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_trainer_evaluates_alike(models, tmp_path, precision, how):
    from transformers import Trainer, TrainingArguments

    data = [{"input_ids": row, "labels": row} for row in torch.randint(3, 512, (6, 16))]
    model = models.make("llama", vocab_size=512)
    twin = copy.deepcopy(model)
    opfuse.convert(twin, skip="model")
    found = []
    for each in (model, twin):
        seen = []

        def metrics(predictions, seen=seen):
            seen.append(predictions)
            return {"sum": float(np.asarray(predictions.predictions, dtype=np.float64).sum())}

        arguments = TrainingArguments(
            output_dir=str(tmp_path),
            per_device_eval_batch_size=2,
            report_to=[],
            use_cpu=True,
            prediction_loss_only=how == "loss only",
            bf16=precision == "bf16",
        )
        best = {"preprocess_logits_for_metrics": lambda read, labels: read.argmax(-1)}
        trainer = Trainer(
            each,
            arguments,
            eval_dataset=data,
            compute_metrics=None if how == "loss only" else metrics,
            **(best if how == "best" else {}),
        )
        with largest.Largest() as most:
            result = trainer.evaluate()
        found.append((result, seen, most.bytes))
    (expected, theirs, _), (got, ours, _) = found
    assert opfuse.converted(twin)[""] == ""
    assert got["eval_loss"] == pytest.approx(
        expected["eval_loss"], rel=1e-5 if precision == "fp32" else 1e-2
    )
    assert len(ours) == len(theirs) == (how != "loss only")
    for mine, their in zip(ours, theirs, strict=True):
        assert np.array_equal(mine.predictions, their.predictions)
        assert np.array_equal(mine.label_ids, their.label_ids)


@needs_fusion
def test_the_trainer_reads_nothing_for_a_loss_alone(pair, tmp_path):
    from transformers import Trainer, TrainingArguments

    _, twin, given, computed = pair
    arguments = TrainingArguments(
        output_dir=str(tmp_path), report_to=[], use_cpu=True, prediction_loss_only=True
    )
    rows = [{"input_ids": row, "labels": row} for row in given["input_ids"]]
    assert Trainer(twin, arguments, eval_dataset=rows).evaluate()["eval_loss"] > 0
    assert opfuse.converted(twin)[""] == "" and not computed
