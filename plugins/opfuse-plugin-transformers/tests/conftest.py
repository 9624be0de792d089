"""Small models of the families, with random weights, and one training step of each."""

import copy
import os
import warnings

import pytest
import torch

import opfuse

os.environ["HF_HUB_OFFLINE"] = "1"
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # theirs, at import
    transformers = pytest.importorskip("transformers", minversion="5")

SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
DECODER = {**SIZES, **TOKENS, "num_key_value_heads": 2}
GPT2 = {"vocab_size": 128, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, **TOKENS}
VIT = {**SIZES, "image_size": 32, "patch_size": 8, "num_labels": 3}
T5 = {
    "vocab_size": 128,
    "d_model": 64,
    "d_ff": 176,
    "num_layers": 2,
    "num_heads": 4,
    "d_kv": 16,
    "decoder_start_token_id": 0,
    **TOKENS,
}
BART = {
    "vocab_size": 128,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 176,
    "decoder_ffn_dim": 176,
    "max_position_embeddings": 64,
    "decoder_start_token_id": 0,
    "eos_token_id": 2,
    "forced_eos_token_id": None,
    "pad_token_id": 0,
    "dropout": 0.0,
    "attention_dropout": 0.0,
}
FAMILIES = {
    "gpt_bigcode": ("GPTBigCodeForCausalLM", "GPTBigCodeConfig", GPT2),
    "marian": ("MarianMTModel", "MarianConfig", BART),
    "mbart": ("MBartForConditionalGeneration", "MBartConfig", BART),
    "pegasus": ("PegasusForConditionalGeneration", "PegasusConfig", BART),
    "blenderbot": ("BlenderbotForConditionalGeneration", "BlenderbotConfig", BART),
    "llama": ("LlamaForCausalLM", "LlamaConfig", DECODER),
    "mistral": ("MistralForCausalLM", "MistralConfig", DECODER),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", DECODER),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**DECODER, "head_dim": 16}),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", {**DECODER, "head_dim": 16}),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", DECODER),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**DECODER, "num_local_experts": 4}),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {**DECODER, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 4},
    ),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT2),
    "bert": ("BertForMaskedLM", "BertConfig", {**SIZES, "pad_token_id": 0}),
    "vit": ("ViTForImageClassification", "ViTConfig", VIT),
    "t5": ("T5ForConditionalGeneration", "T5Config", T5),
}


def make(family, dtype=torch.float32, **config):
    """A model of a family in training mode; ``config`` goes before what is usual here."""
    model, settings, usual = FAMILIES[family]
    torch.manual_seed(0)
    made = getattr(transformers, settings)(**{**usual, **config})
    return getattr(transformers, model)(made).to(dtype).train()


def inputs(model):
    """What a training step of a model takes."""
    generator = torch.Generator().manual_seed(1)
    if model.config.model_type == "vit":
        pixels = torch.randn(2, 3, 32, 32, generator=generator)
        return {"pixel_values": pixels.to(model.dtype), "labels": torch.tensor([0, 2])}
    ids = torch.randint(3, 128, (2, 24), generator=generator)
    return {"input_ids": ids, "labels": ids}


def step(model, autocast=False, **more):
    """The loss of a training step and the gradients by name."""
    model.zero_grad()
    torch.manual_seed(2)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(**inputs(model), **more).loss
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def worst(got, expected):
    """The largest relative difference of a gradient, and of which parameter.

    Those of a key's bias are left out: a softmax does not see it, they are nothing but rounding.
    """
    (loss, grads), (expected_loss, exact) = got, expected
    assert grads.keys() == exact.keys()
    of_keys = "k_proj.bias", "k_proj.base_layer.bias", "key.bias"
    exact = {n: g for n, g in exact.items() if not n.endswith(of_keys)}
    found = {n: float((grads[n] - g).norm() / g.norm()) for n, g in exact.items()}
    found["loss"] = float((loss - expected_loss).abs() / expected_loss.abs())
    name = max(found, key=found.get)
    return found[name], name


def pair(family, dtype=torch.float32, **config):
    """A model, a converted copy, and the report."""
    model = make(family, dtype, **config)
    twin = copy.deepcopy(model)
    with opfuse.options(**{"transformers.projections": "joined"}):
        return model, twin, opfuse.convert(twin)


@pytest.fixture
def models():
    """The helpers of this file."""
    from types import SimpleNamespace

    return SimpleNamespace(
        make=make,
        inputs=inputs,
        step=step,
        worst=worst,
        pair=pair,
        families=FAMILIES,
        decoder=DECODER,
    )
