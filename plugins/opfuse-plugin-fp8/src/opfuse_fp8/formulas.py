"""Activations as the kernels take them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from opfuse_triton import DeviceFunctions, functions_of

from opfuse import has_same_math
from opfuse.ops import GEGLU, ReGLU, SReGLU, SwiGLU

MOST_WOVEN = 64
"""How many features of each half may alternate: a tile holds whole runs of them."""


class ActivationFormula(NamedTuple):
    """An activation, as the kernels take it.

    Attributes:
        functions: Its device functions; None: there is no activation.
        size: How many features of each half alternate; 0: the halves are contiguous.
        forward: The constants of the forward kernel.
        backward: Those of the backward kernel.
        gated: Whether it has two halves.
    """

    functions: DeviceFunctions | None
    size: int
    forward: Mapping[str, Any]
    backward: Mapping[str, Any]
    gated: bool

    def numbers(self, values: tuple[tuple[str, Any], ...]) -> tuple[float, ...]:
        """The numbers of a call, see :meth:`opfuse_triton.DeviceFunctions.numbers`."""
        return () if self.functions is None else self.functions.numbers(values)


def formula_of(op: Any) -> ActivationFormula | None:
    """The form in which the kernels take an activation, or None; ask while planning.

    Args:
        op: The activation; None: the identity.
    """
    functions = None if op is None else functions_of(op)
    if op is not None and functions is None:
        return None
    names = ("value", "linear_value", "derivative", "linear_derivative")
    given = {name.upper(): getattr(functions, name, None) for name in names}
    # torch's kernels for these gates give bfloat16, which is then multiplied
    rounds = any(has_same_math(op, cls) for cls in (SwiGLU, GEGLU, ReGLU, SReGLU)) if op else False
    size = getattr(op, "glu_interleave_size", None) or 0
    backward = {**given, "SIZE": size, "ROUNDS": rounds}
    forward = {name: value for name, value in backward.items() if "DERIVATIVE" not in name}
    gated = given["LINEAR_VALUE"] is not None
    return ActivationFormula(functions, size, forward, backward, gated)


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
