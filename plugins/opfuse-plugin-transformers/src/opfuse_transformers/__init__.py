"""What :func:`opfuse.convert` cannot trace in the models of Hugging Face: converters, no fusions.

Neither transformers nor peft is imported: classes are known by their names.
"""

from __future__ import annotations

from opfuse import Converter, hookimpl


@hookimpl
def opfuse_converters() -> list[Converter]:
    """Decoder and encoder layers, and the projections of attention."""
    from . import attention, layers

    return [
        Converter(layers.is_layer, layers.build, "layer of transformers"),
        Converter(attention.is_attention, attention.build, "projections of attention"),
    ]
