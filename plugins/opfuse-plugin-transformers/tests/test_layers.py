"""Layers: what they are called with, what is recorded of them, and gradient checkpointing."""

import copy

import pytest
import torch

import opfuse
from opfuse.report.calls import saved_bytes

LAYERS = {"llama": "LlamaDecoderLayer", "gpt2": "GPT2Block", "bert": "BertLayer"}


def rows(report, cls):
    return [row for row in report.converted if row.cls == cls]


def reasons(model):
    """Why what is below a model ran its own forward; the model itself does outside of training."""
    found = opfuse.converted(model).items()
    # positions are added to the words of each row; there is no recipe
    return {n: why for n, why in found if why and n and not n.endswith(("embeddings", "o_proj"))}


@pytest.mark.parametrize("family", LAYERS)
def test_a_layer_takes_what_it_only_passes_on(models, family):
    model, twin, report = models.pair(family)
    found = rows(report, LAYERS[family])
    assert len(found) == 2
    assert {row.converter for row in found} == {"what its forward computes"}
    ids = models.inputs(model)["input_ids"]
    given = {
        "input_ids": ids,
        "labels": ids,
        "attention_mask": torch.ones_like(ids),
        "output_attentions": True,
        "output_hidden_states": True,
    }
    if family != "bert":
        given |= {"num_items_in_batch": torch.tensor(46), "use_cache": False}
    for each in (model, twin):
        each.eval().set_attn_implementation("eager")
    expected, got = model(**given), twin(**given)
    assert len(got.attentions) == 2 and len(got.hidden_states) == 3
    pairs = zip(
        (got.loss, got.logits, *got.attentions, *got.hidden_states),
        (expected.loss, expected.logits, *expected.attentions, *expected.hidden_states),
        strict=True,
    )
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert not reasons(twin)


def enable(model, reentrant=False):
    name = "activation_checkpointing_enable"  # its name as of transformers 5.20
    enable = getattr(model, name, None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": reentrant})


@pytest.mark.costly(4)
@pytest.mark.parametrize("reentrant", [False, True], ids=["", "reentrant"])
@pytest.mark.parametrize("first", ["convert", "enable"])
@pytest.mark.parametrize("family", LAYERS)
def test_checkpointing_may_be_enabled_before_or_after_converting(models, family, first, reentrant):
    model = models.make(family)
    twin, plain = copy.deepcopy(model), copy.deepcopy(model)
    opfuse.convert(plain)

    enable(model, reentrant)
    if first == "enable":
        enable(twin, reentrant)
    report = opfuse.convert(twin)
    if first == "convert":
        enable(twin, reentrant)
    assert len(rows(report, LAYERS[family])) == 2
    expected, got = [models.step(each) for each in (model, twin)]
    assert models.worst(got, expected)[0] <= 1e-5
    assert models.worst(got, models.step(plain))[0] <= 1e-5
    given = models.inputs(model)
    saved, whole = [
        saved_bytes(lambda each=each: each(**given), each.parameters()) for each in (twin, plain)
    ]
    assert saved < whole / 3
    assert not opfuse.converted(twin)[rows(report, LAYERS[family])[0].path]


@pytest.mark.costly(2)
@pytest.mark.parametrize("copied", [False, True], ids=["", "copied"])
@pytest.mark.parametrize("family", ["gpt_bigcode", "marian", "mbart", "pegasus", "blenderbot"])
def test_a_chain_may_be_made_inside_of_a_checkpoint(models, family, copied):
    """For the arguments of the first call, or for a copy; the checkpoint sees nothing of that."""
    model = models.make(family)
    twin = copy.deepcopy(model)
    opfuse.convert(twin)
    twin = copy.deepcopy(twin) if copied else twin
    for each in (model, twin):
        enable(each)
    expected, got = [models.step(each) for each in (model, twin)]
    assert models.worst(got, expected)[0] <= 1e-5
    assert not all(opfuse.converted(twin).values())


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3", "mixtral"])
def test_generate_gives_the_same_tokens(models, family):
    model, twin, _ = models.pair(family)
    model.eval(), twin.eval()
    ids = models.inputs(model)["input_ids"][:, :8]
    given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 12, "do_sample": False}
    assert torch.equal(twin.generate(ids, **given), model.generate(ids, **given))
    assert not reasons(twin)


def test_a_replaced_part_runs(models):
    _, twin, _ = models.pair("llama")
    layer = twin.model.layers[0]
    layer.mlp.register_forward_hook(lambda module, args, output: output * 0)
    models.step(twin)
    why = opfuse.converted(twin)
    assert why["model.layers.0"] == "mlp has forward hooks"
    assert why["model.layers.0.mlp"] == "" and why["model.layers.1"] == ""


def test_neither_library_is_imported():
    import subprocess
    import sys

    code = (
        "import sys, torch, opfuse; opfuse.convert(torch.nn.Linear(2, 2)); "
        "print([n for n in ('transformers', 'peft') if n in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.stdout == "[]\n", found.stderr
