"""Converters for parts of Hugging Face models that :func:`opfuse.convert` cannot trace.

Neither transformers nor peft is imported: classes are known by their names.
"""

from __future__ import annotations

from typing import Any

from opfuse import hookimpl


@hookimpl
def opfuse_options() -> dict[str, Any]:
    """When ``convert`` is called: whether attention's projections are joined without a recipe."""
    return {"transformers.projections": ("auto", "joined")}


@hookimpl
def opfuse_converters() -> list[Any]:
    """Projections of attention, experts, LoRA, the loss of a causal language model, and chunks."""
    from opfuse_convert import ORDINARY, Converter

    from . import attention, chunks, experts, head, lora

    return [
        Converter(attention.is_attention, attention.build, "projections of attention"),
        Converter(experts.is_experts, experts.build, "experts"),
        Converter(head.is_causal, head.build, "loss; logits when they are read"),
        Converter(lora.LINEAR, lora.build, "linear layer with LoRA"),
        Converter(chunks.is_of_transformers, chunks.build, ORDINARY, -95),
    ]
