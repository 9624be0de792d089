"""By default a converted model keeps no more bytes for its backward than the model itself."""

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
