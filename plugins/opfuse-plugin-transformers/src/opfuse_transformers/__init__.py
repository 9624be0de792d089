"""Converters for parts of Hugging Face models that :func:`opfuse.convert` cannot trace.

Neither transformers nor peft is imported: classes are known by their names.
"""

from __future__ import annotations

from typing import Any

from opfuse import hookimpl


@hookimpl
def opfuse_options() -> dict[str, Any]:
    """When ``convert`` is called.

    Whether attention's projections are joined without a recipe, and whether the log-probabilities
    of a trainer run through a chain where trl has a kernel.
    """
    return {
        "transformers.projections": ("auto", "joined", "chained"),
        "transformers.log_probs": ("auto", "chain"),
    }


@hookimpl(optionalhook=True)  # of opfuse-convert
def opfuse_converters() -> list[Any]:
    """For attention, experts, LoRA, losses and log-probabilities, and forwards with chunks."""
    from opfuse_convert import ORDINARY, Converter

    from . import attention, chunks, experts, head, lora, rotations, trl

    return [
        Converter(attention.is_attention, attention.build, "projections and rotation of attention"),
        Converter(experts.is_experts, experts.build, "experts"),
        Converter(trl.is_fused, trl.build, "log-probabilities for trl"),
        Converter(trl.is_trainer, trl.about, "trainer"),
        Converter(head.is_causal, head.build, "loss; logits when they are read"),
        Converter(lora.LINEAR, lora.build, "linear layer with LoRA"),
        Converter(rotations.rotates, rotations.build, "rotation of queries and keys", -90),
        Converter(chunks.is_of_transformers, chunks.build, ORDINARY, -95),
    ]
