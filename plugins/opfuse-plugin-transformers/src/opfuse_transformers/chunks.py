"""Forwards that call what the grammar does not read: a helper of transformers, and adapters."""

from __future__ import annotations

import sys
from typing import Any

from opfuse_convert import by_reading
from opfuse_convert.grammar import Reader, Unreadable, function_places
from torch import nn

from opfuse.core.introspection import op_class

from . import lora, norms

_HOME, _CHUNKS = "transformers.pytorch_utils", "apply_chunking_to_forward"


def is_of_transformers(module: nn.Module) -> bool:
    """Return whether the class of a module is from transformers, or a part of it has adapters."""
    if op_class(module).__module__.startswith("transformers."):
        return True
    return not lora.is_linear(module) and any(map(lora.is_linear, module.modules()))


def build(module: nn.Module, env: Any) -> Any:
    """Convert the largest readable part of a forward; a feed-forward in chunks of 0 is readable."""
    chunks = getattr(sys.modules.get(_HOME), _CHUNKS, None)
    known = {} if chunks is None else {chunks: _chunked(chunks)}
    return norms.noting(by_reading(module, known=known, leaf_of=lora.leaf_of))


def _chunked(chunks: Any) -> Any:
    def read(reader: Reader, function: Any, chunk_size: Any, dim: Any, *inputs: Any) -> Any:
        if type(chunk_size) is not int or chunk_size:
            raise Unreadable("it computes in chunks")
        reader.places += function_places(chunks)
        return reader.call(function, inputs, {})

    return read
