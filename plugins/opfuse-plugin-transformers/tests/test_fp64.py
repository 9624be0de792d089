"""Families trained in fp64 against the original: there a wrong number is no rounding."""

import copy

import pytest
import torch

import opfuse

SIZES = {"vocab_size": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
BERT = {
    **SIZES,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
BART = {
    **SIZES,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "max_position_embeddings": 64,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}
T5 = {
    **SIZES,
    "d_model": 64,
    "d_ff": 128,
    "num_layers": 2,
    "num_heads": 4,
    "d_kv": 16,
    "decoder_start_token_id": 0,
}
GEMMA = {**BERT, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 8}
OPT = {
    **SIZES,
    "hidden_size": 64,
    "ffn_dim": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "word_embed_proj_dim": 64,
    "max_position_embeddings": 64,
}
FAMILIES = {  # class, configuration, what it has, how near: a norm in fp32 is computed in fp64
    "bert": ("BertForMaskedLM", "BertConfig", BERT, 1e-12),
    "bert classifies": ("BertForSequenceClassification", "BertConfig", {**BERT, "num_labels": 3}, 1e-12),
    "bart": ("BartForConditionalGeneration", "BartConfig", BART, 1e-12),
    "t5": ("T5ForConditionalGeneration", "T5Config", T5, 1e-6),
    "t5, gated": ("T5ForConditionalGeneration", "T5Config", {**T5, "feed_forward_proj": "gated-gelu"}, 1e-6),
    "gemma 3": ("Gemma3ForCausalLM", "Gemma3TextConfig", GEMMA, 1e-6),
    "opt": ("OPTForCausalLM", "OPTConfig", OPT, 1e-6),
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_three_training_steps_match_the_original_in_fp64(family):
    """The dropouts of each draw the same."""
    import transformers

    cls, config, sizes, tolerance = FAMILIES[family]
    torch.manual_seed(0)
    model = getattr(transformers, cls)(getattr(transformers, config)(**sizes)).double().train()
    twin = copy.deepcopy(model)
    report = opfuse.convert(twin)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 128, (2, 24), generator=generator)
    labels = torch.tensor([0, 2]) if "classifies" in family else ids
    for step in range(3):
        losses = []
        for each in (model, twin):
            torch.manual_seed(step)
            each.zero_grad()
            losses.append(each(input_ids=ids, labels=labels).loss)
            losses[-1].backward()
        assert losses[0].dtype is losses[1].dtype
        torch.testing.assert_close(losses[1], losses[0], rtol=tolerance, atol=0)
        for (name, one), other in zip(twin.named_parameters(), model.parameters(), strict=True):
            scale = max(float(other.grad.abs().max()), 1e-3)
            assert (one.grad - other.grad).abs().max() <= tolerance * scale, name
        with torch.no_grad():
            for one, other in zip(twin.parameters(), model.parameters(), strict=True):
                other.sub_(other.grad, alpha=0.01)
                one.copy_(other)
    assert family == "bart" or "" in opfuse.converted(twin).values(), str(report)
