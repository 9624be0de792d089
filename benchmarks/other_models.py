"""What ``opfuse.convert`` makes of models that no test names, and whether a step stays the same.

python benchmarks/other_models.py
python benchmarks/other_models.py opt bart

Each model of transformers has random weights and two layers. A training step in fp32 of the model
as it is and of its converted copy, of the same random numbers: both losses, and the largest
difference of a parameter's gradient, as a share of the largest gradient of all. After each comes
the report.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import torch
import transformers as t

import opfuse

SIZES = {"vocab_size": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
DECODER = SIZES | {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2}
DECODER |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
ALIKE = {name: size for name, size in DECODER.items() if name != "num_key_value_heads"}
BOTH = SIZES | {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "dropout": 0.0}
BOTH |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "decoder_start_token_id": 1}
BOTH |= {"encoder_ffn_dim": 176, "decoder_ffn_dim": 176}
PLAIN = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2}
PLAIN |= {"num_attention_heads": 4}
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
IMAGE = {"image_size": 32, "patch_size": 8}


def text() -> dict[str, Any]:
    """Tokens, which are their own labels."""
    x = torch.randint(3, 128, (2, 16))
    return {"input_ids": x, "labels": x}


def images() -> dict[str, Any]:
    """Images of two classes."""
    return {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.tensor([0, 1])}


def opt() -> Any:
    """OPT."""
    sizes = {"hidden_size": 64, "ffn_dim": 176, "num_hidden_layers": 2, "num_attention_heads": 4}
    more = {"max_position_embeddings": 64, "word_embed_proj_dim": 64, "dropout": 0.0}
    return t.OPTForCausalLM(t.OPTConfig(**SIZES, **sizes, **more))


def clip() -> Any:
    """CLIP, both halves."""
    halves = {"text_config": SIZES | PLAIN | {"max_position_embeddings": 32}}
    halves["vision_config"] = PLAIN | IMAGE
    return t.CLIPModel(t.CLIPConfig(**halves, projection_dim=32))


def distilbert() -> Any:
    """DistilBERT."""
    sizes = {"dim": 64, "hidden_dim": 176, "n_layers": 2, "n_heads": 4}
    still = {"dropout": 0.0, "attention_dropout": 0.0}
    return t.DistilBertForMaskedLM(t.DistilBertConfig(vocab_size=128, **sizes, **still))


def whisper() -> Any:
    """Whisper."""
    few = {"num_mel_bins": 16, "max_source_positions": 20, "max_target_positions": 32}
    return t.WhisperForConditionalGeneration(t.WhisperConfig(**BOTH, **few))


MODELS: dict[str, tuple[Callable[[], Any], Callable[[], dict[str, Any]]]] = {
    "albert": (
        lambda: t.AlbertForMaskedLM(
            t.AlbertConfig(vocab_size=128, embedding_size=32, **PLAIN | {"num_hidden_layers": 6})
        ),
        text,
    ),
    "bart": (
        lambda: t.BartForConditionalGeneration(t.BartConfig(**BOTH, max_position_embeddings=64)),
        text,
    ),
    "clip": (
        clip,
        lambda: {
            "pixel_values": images()["pixel_values"],
            "input_ids": text()["input_ids"],
            "return_loss": True,
        },
    ),
    "deberta": (
        lambda: t.DebertaV2ForMaskedLM(t.DebertaV2Config(vocab_size=128, **PLAIN, **STILL)),
        text,
    ),
    "dinov2": (
        lambda: t.Dinov2ForImageClassification(
            t.Dinov2Config(
                hidden_size=64,
                num_hidden_layers=2,
                num_attention_heads=4,
                use_swiglu_ffn=True,
                **IMAGE,
            )
        ),
        images,
    ),
    "distilbert": (distilbert, text),
    "gpt_neox": (lambda: t.GPTNeoXForCausalLM(t.GPTNeoXConfig(**DECODER)), text),
    "mamba": (
        lambda: t.MambaForCausalLM(
            t.MambaConfig(**SIZES, hidden_size=64, num_hidden_layers=2, state_size=8)
        ),
        text,
    ),
    "nemotron": (lambda: t.NemotronForCausalLM(t.NemotronConfig(**DECODER)), text),
    "olmo2": (lambda: t.Olmo2ForCausalLM(t.Olmo2Config(**DECODER)), text),
    "opt": (opt, text),
    "persimmon": (lambda: t.PersimmonForCausalLM(t.PersimmonConfig(**ALIKE)), text),
    "starcoder2": (
        lambda: t.Starcoder2ForCausalLM(
            t.Starcoder2Config(**DECODER, residual_dropout=0.0, embedding_dropout=0.0)
        ),
        text,
    ),
    "whisper": (
        whisper,
        lambda: {"input_features": torch.randn(2, 16, 40), "labels": text()["labels"]},
    ),
}


def step(model: Any, inputs: dict[str, Any]) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss, and the gradient of each parameter."""
    torch.manual_seed(1)
    loss = model(**inputs).loss
    loss.backward()
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return loss.item(), found


def main() -> None:
    """Compare each model."""
    for name in sys.argv[1:] or MODELS:
        torch.manual_seed(0)
        make, inputs_of = MODELS[name]
        model, inputs = make(), inputs_of()
        twin = copy.deepcopy(model)
        report = opfuse.convert(twin)
        (loss, expected), (mine, got) = step(model, inputs), step(twin, inputs)
        assert expected.keys() == got.keys()
        largest = max(grad.abs().max() for grad in expected.values())
        worst = max((got[n] - grad).abs().max() / largest for n, grad in expected.items())
        print(f"{name}: loss {loss:.6f}, converted {mine:.6f}; gradients {worst:.1e}")
        for why in sorted(set(filter(None, opfuse.converted(twin).values()))):
            print(f"  ran its own forward: {why}")
        print("  " + str(report).replace("\n", "\n  "), flush=True)


if __name__ == "__main__":
    main()
