"""By default a converted model keeps no more bytes for its backward than the model itself."""

import copy
import importlib

import pytest
import torch

import opfuse
from opfuse.report.calls import saved_bytes

EAGER_EXPERTS = {"experts_implementation": "eager"}  # torch has no grouped product in fp64
MORE = {
    "albert": ("AlbertForMaskedLM", "AlbertConfig", {"embedding_size": 32, "num_hidden_layers": 4}),
    "gpt_bigcode": ("GPTBigCodeForCausalLM", "GPTBigCodeConfig", {}),
    "gpt_oss": ("GptOssForCausalLM", "GptOssConfig", {"head_dim": 16, "num_local_experts": 4}),
    "nemotron": ("NemotronForCausalLM", "NemotronConfig", {}),
    "persimmon": ("PersimmonForCausalLM", "PersimmonConfig", {}),
    "starcoder2": ("Starcoder2ForCausalLM", "Starcoder2Config", {}),
}


@pytest.fixture
def families(models, monkeypatch):
    """The families of the other tests, and those whose losses and norms differ from them."""
    usual = {"gpt_bigcode": models.families["gpt2"][2]}
    for name, (cls, config, more) in MORE.items():
        sizes = {**usual.get(name, models.decoder), **more}
        monkeypatch.setitem(models.families, name, (cls, config, sizes))
    return models


@pytest.mark.costly(12)
@pytest.mark.parametrize("how", ["fp64", "fp32", "bf16", "autocast"])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gpt2", "bert", "vit", "t5", *MORE])
def test_a_converted_model_keeps_no_more_than_the_model(families, family, how):
    dtype = {"fp64": torch.float64, "bf16": torch.bfloat16}.get(how, torch.float32)
    model = families.make(family, dtype, **EAGER_EXPERTS)
    given = families.inputs(model)
    norms = sum("Norm" in type(each).__name__ for each in model.modules())
    rows = next(iter(given.values())).shape[:2].numel() if family != "vit" else 2 * 17

    def kept():
        with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
            return saved_bytes(lambda: model(**given), [*model.parameters(), *model.buffers()])

    of_model = kept()
    opfuse.convert(model)
    kept()  # the first call plans
    # A norm's one or two numbers of a row have the precision that it computes in. In bf16 torch's
    # LayerNorm keeps them in bf16 on a CPU; in fp64 the library's RMSNorm keeps them in fp32.
    more = {"bf16": 2 * 2, "fp64": 4}.get(how, 0) * rows * norms
    assert kept() <= of_model + more


LAYERS = {
    "bert": "BertLayer",
    "roberta": "RobertaLayer",
    "electra": "ElectraLayer",
    "wav2vec2": "Wav2Vec2EncoderLayer",
}


@pytest.mark.parametrize("family", LAYERS)
def test_a_layer_keeps_the_output_of_its_first_norm(families, family):
    """So it keeps one tensor less, and the numbers are those of fp64."""
    pytest.importorskip("opfuse_norm")
    home = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    drops = "hidden_dropout_prob", "attention_probs_dropout_prob", "hidden_dropout"
    drops += "attention_dropout", "activation_dropout"
    sizes = {**families.families["bert"][2], **dict.fromkeys(drops, 0.0)}
    title = LAYERS[family].replace("EncoderLayer", "").replace("Layer", "")
    config = getattr(importlib.import_module("transformers"), f"{title}Config")(**sizes)
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    layer = getattr(home, LAYERS[family])(config)
    twin = copy.deepcopy(layer)
    opfuse.convert(twin)
    x, results = torch.randn(2, 24, 64), []
    for each, dtype in ((layer.double(), torch.float64), (twin, torch.float32)):
        given = x.to(dtype).requires_grad_()
        y = each(given)
        y = y[0] if isinstance(y, tuple) else y
        y.backward(x.to(dtype).flip(1))
        results.append([y, given.grad, *[param.grad for param in each.parameters()]])
    names = ["y", "x", *[name for name, _ in layer.named_parameters()]]
    for exact, mine, name in zip(*results, names, strict=True):
        if not name.endswith(("key.bias", "k_proj.bias")):  # nothing but rounding
            assert (mine - exact).abs().max() <= 1e-4 * exact.abs().max(), name
    found = []
    for where in ("inside", "never"):
        with opfuse.options(**{"norm.by_output": where}):
            twin(x.requires_grad_())
            found.append(saved_bytes(lambda: twin(x), twin.parameters()))
    assert found[1] - found[0] >= x.nbytes / 2
