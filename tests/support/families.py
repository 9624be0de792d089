"""Tiny models of known families with random numbers in them. Imports no opfuse: a process without it loads them too."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import torch
import transformers as hf
from torch import nn
from transformers.modeling_outputs import MaskedLMOutput

VOCAB, WIDTH, INNER, HEADS, ROWS, TOKENS = 128, 64, 176, 4, 2, 16


class EncoderModel(nn.Module):
    """``torch.nn.TransformerEncoderLayer``, norm first and last, with the arguments of a language model."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                WIDTH, HEADS, INNER, dropout, "gelu", batch_first=True, norm_first=first
            )
            for first in (True, False)
        )
        self.head = nn.Linear(WIDTH, VOCAB)
        self.checkpointing = None

    def gradient_checkpointing_enable(self, kwargs):
        self.checkpointing = kwargs

    def forward(self, input_ids, labels=None):
        x = self.embed(input_ids)
        for layer in self.layers:
            if self.checkpointing and self.training:
                x = torch.utils.checkpoint.checkpoint(layer, x, **self.checkpointing)
            else:
                x = layer(x)
        logits = self.head(x)
        loss = None
        if labels is not None:
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return MaskedLMOutput(loss=loss, logits=logits)


@dataclasses.dataclass(frozen=True)
class Family:
    """How to make a model of a family.

    Attributes:
        config: The class of its configuration; None: :class:`EncoderModel`.
        model: The class of the model.
        layer: The name of the class of one layer.
        adapt: Names of the linear layers that LoRA is for.
        replaced: The dotted name, below a layer, of a linear layer in what is converted.
        written: Arguments of the configuration.
        dropouts: Those that are probabilities of dropout.
        images: Whether it takes images.
        generates: Whether it has ``generate``.
        zero: Endings of the names of parameters whose gradient is exactly zero but for rounding.
    """

    name: str
    config: Any
    model: Any
    layer: str
    adapt: tuple[str, ...]
    replaced: str
    written: dict[str, Any] = dataclasses.field(default_factory=dict)
    dropouts: tuple[str, ...] = ()
    images: bool = False
    generates: bool = False
    zero: tuple[str, ...] = ()

    def make(self, seed: int = 0, dropout: float = 0.0, **others: Any) -> Any:
        """A model, in training mode."""
        torch.manual_seed(seed)
        if self.config is None:
            return EncoderModel(dropout).train()
        config = self.config(**{**self.written, **dict.fromkeys(self.dropouts, dropout), **others})
        return self.model(config).train()

    def inputs(self, dtype: torch.dtype = torch.float32, rows: int = ROWS) -> dict[str, Any]:
        """What a step of training is given."""
        generator = torch.Generator().manual_seed(1)
        if self.images:
            images = torch.randn(rows, 3, 32, 32, generator=generator).to(dtype)
            return {"pixel_values": images, "labels": torch.arange(rows) % 2}
        ids = torch.randint(1, VOCAB, (rows, TOKENS), generator=generator)
        return {"input_ids": ids, "labels": ids.clone()}

    @property
    def pretrained(self) -> bool:
        """Whether its models are of transformers."""
        return self.config is not None

    def layers(self, model: nn.Module) -> list[nn.Module]:
        """The layers of a model, whatever is around them, by the name of their class."""
        return [m for m in model.modules() if type(m).__name__ == self.layer]


_TEXT = {"vocab_size": VOCAB, "hidden_size": WIDTH, "num_hidden_layers": 2}
_TEXT |= {"num_attention_heads": HEADS, "intermediate_size": INNER}
_GROUPED = {**_TEXT, "num_key_value_heads": 2, "max_position_embeddings": 64}
_GATED = ("q_proj", "gate_proj", "up_proj", "down_proj")
_HIDDEN = ("hidden_dropout_prob", "attention_probs_dropout_prob")

LLAMA = Family(
    *("llama", hf.LlamaConfig, hf.LlamaForCausalLM, "LlamaDecoderLayer", _GATED, "mlp.up_proj"),
    {**_GROUPED, "pad_token_id": 0},
    ("attention_dropout",),
    generates=True,
)
GPT2 = Family(
    *("gpt2", hf.GPT2Config, hf.GPT2LMHeadModel, "GPT2Block", ("c_attn", "c_fc"), "mlp.c_fc"),
    {"vocab_size": VOCAB, "n_embd": WIDTH, "n_layer": 2, "n_head": HEADS, "n_positions": 64}
    | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    ("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    generates=True,
)
BERT = Family(
    *("bert", hf.BertConfig, hf.BertForMaskedLM, "BertLayer", ("query", "dense")),
    "output.dense",
    {**_TEXT, "max_position_embeddings": 64},
    _HIDDEN,
    zero=("key.bias",),
)
VIT = Family(
    *("vit", hf.ViTConfig, hf.ViTForImageClassification, "ViTLayer", ("q_proj", "fc1", "fc2")),
    "mlp.fc1",
    {k: v for k, v in _TEXT.items() if k != "vocab_size"} | {"image_size": 32, "patch_size": 8},
    _HIDDEN,
    images=True,
    zero=("key.bias", "k_proj.bias"),
)
MIXTRAL = Family(
    *("mixtral", hf.MixtralConfig, hf.MixtralForCausalLM, "MixtralDecoderLayer"),
    *(("q_proj", "v_proj"), "self_attn.o_proj"),
    # its grouped product has no fp64
    {**_GROUPED, "num_local_experts": 4, "pad_token_id": 0, "experts_implementation": "eager"},
    ("attention_dropout",),
    generates=True,
)
ENCODER = Family(
    *("encoder", None, EncoderModel, "TransformerEncoderLayer", ("linear1", "linear2")), "linear1"
)
GEMMA = Family(
    *("gemma", hf.GemmaConfig, hf.GemmaForCausalLM, "GemmaDecoderLayer", _GATED, "mlp.up_proj"),
    {**_GROUPED, "head_dim": 16, "pad_token_id": 0},
    ("attention_dropout",),
    generates=True,
)
PHI3 = Family(
    *("phi3", hf.Phi3Config, hf.Phi3ForCausalLM, "Phi3DecoderLayer"),
    *(("qkv_proj", "gate_up_proj", "down_proj"), "mlp.gate_up_proj"),
    {**_GROUPED, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    ("resid_pdrop", "attention_dropout"),
    generates=True,
)
QWEN3 = Family(
    *("qwen3", hf.Qwen3Config, hf.Qwen3ForCausalLM, "Qwen3DecoderLayer", _GATED, "mlp.up_proj"),
    {**_GROUPED, "head_dim": 16, "pad_token_id": 0},
    ("attention_dropout",),
    generates=True,
)

QUICK = [LLAMA, GPT2, BERT, VIT, MIXTRAL, ENCODER]
ALL = os.environ.get("OPFUSE_MODELS", "") == "all"
"""Whether every order of everything is asked for, with more families: minutes."""
FEW = [*QUICK, GEMMA, PHI3, QWEN3] if ALL else [LLAMA, BERT, ENCODER]
"""Those for what hardly depends on the family; FAMILIES are for the rest."""
FAMILIES = {family.name: family for family in [*QUICK, *([GEMMA, PHI3, QWEN3] if ALL else [])]}
