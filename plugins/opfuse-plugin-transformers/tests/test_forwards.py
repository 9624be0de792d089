"""What forwards do with their logits: scaled and capped ones are a chain too, and anything else is left alone."""

import copy
import importlib.util

import largest
import pytest
import torch
from opfuse_transformers import forwards
from opfuse_transformers.forwards import Form
from torch import nn

import opfuse

SIZES = {
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WIDE = {**SIZES, "head_dim": 16}
PER_LAYER = {
    "vocab_size_per_layer_input": 512,
    "hidden_size_per_layer_input": 8,
    "num_kv_shared_layers": 0,
    "layer_types": ["full_attention"],
}
FAMILIES = {
    "Gemma2": ("Gemma2Config", {**WIDE, "final_logit_softcapping": 5.0}),
    "Gemma3": ("Gemma3TextConfig", {**WIDE, "final_logit_softcapping": 5.0}),
    "Gemma3n": (
        "Gemma3nTextConfig",
        {
            **WIDE,
            **PER_LAYER,
            "laurel_rank": 4,
            "altup_num_inputs": 2,
            "activation_sparsity_pattern": [0.0],
            "final_logit_softcapping": 5.0,
        },
    ),
    "Gemma4": (
        "Gemma4TextConfig",
        {**WIDE, **PER_LAYER, "global_head_dim": 16, "final_logit_softcapping": 5.0},
    ),
    "RecurrentGemma": (
        "RecurrentGemmaConfig",
        {
            **WIDE,
            "logits_soft_cap": 5.0,
            "lru_width": 32,
            "block_types": ["attention"],
            "attention_window_size": 16,
        },
    ),
    "Granite": ("GraniteConfig", {**SIZES, "logits_scaling": 3.0}),
    "GraniteMoe": (
        "GraniteMoeConfig",
        {
            **SIZES,
            "logits_scaling": 3.0,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "experts_implementation": "eager",
        },
    ),
    "Cohere": ("CohereConfig", {**SIZES, "logit_scale": 0.3}),
    "Cohere2": ("Cohere2Config", {**WIDE, "logit_scale": 0.3}),  # of Command, too
}
CAPPED = "Gemma2", "Gemma3", "Gemma3n", "Gemma4", "RecurrentGemma"
IDS = torch.randint(3, 512, (4, 64), generator=torch.Generator().manual_seed(0))


def made(family, dtype=torch.float32, **more):
    """A model whose logits are large enough for a cap, and its twin with a converted head."""
    import transformers

    config, given = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, config)(**{**given, "tie_word_embeddings": False, **more})
    model = getattr(transformers, f"{family}ForCausalLM")(config).to(dtype).train()
    with torch.no_grad():
        model.lm_head.weight.mul_(20)
    twin = copy.deepcopy(model)
    return model, twin, opfuse.convert(twin, skip="model")


def step(model, **more):
    """The loss and its gradients."""
    model.zero_grad()
    out = model(input_ids=IDS, labels=IDS, **more)
    out.loss.backward()
    return out, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def far(grads, exact):
    """The largest relative error of a gradient."""
    return max(
        float((grads[name].double() - grad).norm() / (grad.norm() + 1e-12))
        for name, grad in exact.items()
    )


@pytest.mark.costly(9)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_step_is_as_near_fp64_as_the_librarys(family, dtype):
    model, twin, report = made(family, dtype)
    names = ("BasicLinear", "CrossEntropy")
    assert report.converted[0].ops == (names if family in CAPPED else ("ConstantScale", *names))
    exact, truth = step(copy.deepcopy(model).double())
    (expected, theirs), (got, ours) = step(model), step(twin)
    assert opfuse.converted(twin)[""] == ""
    assert got.loss.dtype is expected.loss.dtype and ours.keys() == theirs.keys() == truth.keys()
    small = 1e-5 if dtype is torch.float32 else 1e-2
    assert abs(got.loss - exact.loss) <= 2 * abs(expected.loss - exact.loss) + small
    assert far(ours, truth) <= 1.5 * far(theirs, truth) + small
    assert exact.logits.abs().max() > 2


@pytest.mark.costly(12)
@pytest.mark.parametrize("how", ["training", "evaluation", "autocast"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_logits_are_those_of_the_library(family, how):
    model, twin, _ = made(family)
    model.train(how != "evaluation"), twin.train(how != "evaluation")
    grad = torch.set_grad_enabled(how != "evaluation")
    with grad, torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        expected, got = (each(input_ids=IDS, labels=IDS) for each in (model, twin))
    if opfuse.converted(twin)[""]:
        assert how == "evaluation" and importlib.util.find_spec("opfuse_loss") is None
    read = got.logits
    assert read.dtype is expected.logits.dtype and torch.equal(read, expected.logits)
    if how == "training":  # a loss of one's own has its gradient through scale and cap
        for out in (expected, got):
            (out.loss + out.logits.square().mean()).backward()
        for one, other in zip(twin.parameters(), model.parameters(), strict=True):
            if other.grad is not None:
                torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(importlib.util.find_spec("opfuse_loss") is None, reason="no fusion holds fewer")
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("family", ["Gemma2", "Granite", "Cohere"])
def test_no_logits_are_made(family, training):
    model, twin, _ = made(family, vocab_size=32000)
    ids = IDS.repeat(2, 1)
    found = []
    for each in (model, twin):
        each.train(training)
        with torch.set_grad_enabled(training):
            each(input_ids=ids, labels=ids)
            with largest.Largest() as most:
                out = each(input_ids=ids, labels=ids)
                if training:
                    out.loss.backward()
        found.append(most.bytes)
    assert found[0] >= 4 * ids.numel() * 32000 > 2 * found[1]


@pytest.mark.parametrize("family", ["Gemma2", "Granite", "Cohere"])
def test_other_numbers_than_when_it_was_converted(family):
    model, twin, _ = made(family)
    for each in (model, twin):
        if family == "Gemma2":
            each.config.final_logit_softcapping = 3.0
        elif family == "Granite":
            each.config.logits_scaling = 7.0
        else:
            each.logit_scale = torch.tensor(0.5)
    (expected, theirs), (got, ours) = step(model), step(twin)
    torch.testing.assert_close(got.loss, expected.loss, rtol=1e-6, atol=0)
    assert far(ours, theirs) < 1e-5 and torch.equal(got.logits, expected.logits)
    if family != "Cohere":
        why = "its logits are scaled or capped otherwise than when it was converted"
        assert opfuse.converted(twin)[""] == why


def test_a_cap_that_is_switched_off():
    model, twin, report = made("Gemma2", final_logit_softcapping=None)
    assert report.converted[0].ops == ("BasicLinear", "CrossEntropy")
    assert "softcap" not in repr(report)
    (expected, _), (got, _) = step(model), step(twin)
    assert opfuse.converted(twin)[""] == ""
    torch.testing.assert_close(got.loss, expected.loss)


def test_what_no_chain_computes_is_left_alone_and_named():
    model, *_ = made("Cohere")
    model.logit_scale = torch.tensor(0.3)
    report = str(opfuse.convert(copy.deepcopy(model), skip="model"))
    assert "its forward scales or caps the logits by self.logit_scale, a Tensor" in report
    model.logit_scale = 0
    assert "in a way that is not known" in str(opfuse.convert(copy.deepcopy(model), skip="model"))
    del model.logit_scale
    assert "by what is not known" in str(opfuse.convert(copy.deepcopy(model), skip="model"))
    model.logit_scale, model.lm_head = 0.3, nn.Linear(32, 512)
    report = str(opfuse.convert(copy.deepcopy(model), skip="model"))
    assert "its head has a bias, and its logits are scaled" in report


def test_a_head_that_does_something_else():
    import transformers

    config = transformers.OPTConfig(
        vocab_size=128,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        ffn_dim=64,
        word_embed_proj_dim=32,
        pad_token_id=0,
    )
    model = transformers.OPTForCausalLM(config).train()
    report = str(opfuse.convert(model, skip="model"))
    assert "does more with the logits than to scale or cap them: logits = self.lm_head(" in report
    ids = torch.randint(3, 128, (2, 8))
    assert model(input_ids=ids, labels=ids).logits.shape == (2, 8, 128)


THEIRS = ("if labels is not None:", "logits, labels", "return Out(loss=loss, logits=logits)")
DONE = {  # what is done to the logits, and their form or what is said
    "": Form(),
    "logits = logits.float()": Form(),
    "logits = logits * self.scale": Form(0.25),
    "logits = logits / self.config.scaling": Form(0.125),
    "logits = logits * 4 / self.config.get_text_config().cap": Form(2.0),
    "cap = self.cap\n    logits = F.tanh(logits / cap) * cap": Form(1.0, 2.0),
    "logits = torch.tanh(logits * self.scale / self.cap) * self.cap": Form(0.25, 2.0),
    "if self.cap is not None:\n        logits = logits / self.cap\n        logits = torch.tanh(logits)\n        logits = logits * self.cap": Form(1.0, 2.0),
    "if (cap := getattr(self, 'cap', None)) is not None:\n        logits = torch.tanh(logits / cap) * cap": Form(1.0, 2.0),
    "if self.nothing is not None:\n        logits = logits * self.nothing": Form(),
    "logits = torch.tanh(logits / self.cap) * self.scale": "in a way that is not known",
    "logits = torch.tanh(logits)": "in a way that is not known",
    "logits = logits * self.cap\n    logits = torch.tanh(logits)": "in a way that is not known",
    "logits = logits * flag": "by what is not known: flag",
    "logits = logits * self.compute()": "by what is not known: self.compute()",
    "logits = logits * True": "by True, a bool",
    "logits = logits.tanh()": "than to scale or cap them: logits = logits.tanh()",
    "logits = logits + 1": "than to scale or cap them: logits = logits + 1",
    "logits = 2 / logits": "than to scale or cap them: logits = 2 / logits",
    "logits *= 2": "than to scale or cap them: logits *= 2",
    "logits = logits * logits": "than to scale or cap them: logits = logits * logits",
    "other = logits * 2": "than to scale or cap them: other = logits * 2",
    "if flag:\n        logits = logits * 2": "than to scale or cap them: if flag:",
    "if self.cap is not None:\n        logits = logits * 2\n    else:\n        logits = logits * 3": "than to scale or cap them",
    "for each in (1, 2):\n        logits = logits * 2": "than to scale or cap them",
    "best = logits.argmax(-1)": "than to scale or cap them: best = logits.argmax(-1)",
    "self.last = logits": "than to scale or cap them: self.last = logits",
    "if flag: return logits": "than to scale or cap them",
    "same = isinstance(self.lm_head, int)": "than to compute the loss of them",
    "if flag: return None": "than to compute the loss of them",
}  # fmt: skip
ENDING = {  # how the loss and the output take them, where that is not as usual
    "sometimes": ("if flag:", *THEIRS[1:]),
    "ignoring": (THEIRS[0], "logits, labels, ignore_index=3", THEIRS[2]),
    "giving twice": (*THEIRS[:2], "return Out(loss=loss, logits=logits, hidden=logits)"),
    "a tuple": (*THEIRS[:2], "return loss, logits"),
}


def written(tmp_path, done, ending):
    """A forward, in a file since its source is read."""
    guard, given, last = ending
    path = tmp_path / "forward.py"
    lines = [
        "def forward(self, ids, labels=None, flag=False, **kwargs):",
        "    hidden = self.model(ids)",
        "    logits = self.lm_head(hidden)",
        f"    {done}",
        "    loss = None",
        f"    {guard}",
        f"        loss = self.loss_function({given}, vocab_size=7, **kwargs)",
        f"    {last}",
    ]
    path.write_text("\n".join(lines) + "\n")
    names = {}
    exec(compile(path.read_text(), str(path), "exec"), names)
    return names["forward"]


class Numbers:
    """What the forwards read."""

    scale, cap, scaling, nothing = 0.25, 2.0, 8, None
    config = property(lambda self: self)
    compute = get_text_config = lambda self: self


@pytest.mark.parametrize("done", DONE)
def test_what_a_forward_does_with_the_logits(tmp_path, done):
    """Its source is read: whatever else it does with them, it runs as it is."""
    expected, found = DONE[done], forwards.read(written(tmp_path, done, THEIRS))
    if not isinstance(found, str):
        found = found.form(Numbers())
    assert found == expected if isinstance(expected, Form) else expected in found


@pytest.mark.parametrize("name", ENDING)
def test_how_the_loss_takes_the_logits(tmp_path, name):
    found = forwards.read(written(tmp_path, "", ENDING[name]))
    assert found == "its forward does more with the logits than to compute the loss of them"


def test_a_forward_without_its_source():
    names = {}
    exec("def forward(self):\n    pass\n", names)
    assert forwards.read(names["forward"]) == "the source of its forward is not there"


@pytest.mark.parametrize("plugins", [None, ""])
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("family", ["Gemma2", "Granite"])
def test_in_every_mode_loss_and_logits_are_those_of_the_model(family, train, grad, plugins):
    model, twin, _ = made(family)
    found = []
    for each in (model, twin):
        each.train(train)
        with torch.set_grad_enabled(grad), opfuse.plugins.using(plugins):
            out = each(input_ids=IDS, labels=IDS)
            found.append((out.loss, out.logits.as_subclass(torch.Tensor)))
    torch.testing.assert_close(*found)
