"""Activations as the kernels take them."""

from __future__ import annotations

from typing import Any

from opfuse_triton.elementwise import formulas
from opfuse_triton.elementwise.formulas import Formula

MOST_WOVEN = 64
"""How many features of each half may alternate: a tile holds whole runs of them."""


def formula_of(op: Any) -> Formula | None:
    """The form in which the kernels take an activation, or None; ask while planning.

    Args:
        op: The activation; None: the identity.
    """
    return formulas.IDENTITY if op is None else formulas.formula_of(op)


def why_not(op: Any) -> str:
    """Why the kernels do not take an activation, as a sentence; empty: they do."""
    name, formula = type(op).__name__, formula_of(op)
    if formula is None:
        return f"{name} has no device functions (Activation.device_functions)"
    size = formula.size
    if size > MOST_WOVEN or size & (size - 1):
        return (
            f"its kernels take a glu_interleave_size that is a power of two up to {MOST_WOVEN}, "
            f"and that of {name} is {size}"
        )
    return ""
