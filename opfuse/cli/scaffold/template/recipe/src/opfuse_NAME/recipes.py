"""The recipe: a frozen value that says what is quantized."""

from __future__ import annotations

import dataclasses

from opfuse import Recipe


@dataclasses.dataclass(frozen=True)
class Int8(Recipe):
    """One scale for each tensor, from its own largest magnitude."""
