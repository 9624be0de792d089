"""Activations as the kernels take them: device functions, and how to name them in a graph."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from opfuse import has_same_math
from opfuse.ops import GEGLU, ReGLU, SReGLU, SwiGLU

from ..activations import DeviceFunctions, functions_of


class Formula(NamedTuple):
    """An activation, as the kernels take it.

    Attributes:
        functions: Its device functions.
        names: The same as ``"module:name"``, for graphs; empty: they are not found there.
        size: How many features of each half alternate; 0: the halves are contiguous.
        rounds: Whether bfloat16 is rounded after each factor, as it is where the op multiplies
            what PyTorch's kernel for the gate gives.
        forward: The constants of the forward kernel for this.
        backward: Those of the backward kernels.
        gated: Whether it has two halves.
    """

    functions: DeviceFunctions
    names: list[str]
    size: int
    rounds: bool
    forward: Mapping[str, Any]
    backward: Mapping[str, Any]
    gated: bool


def formula_of(op: Any, scaled: bool = False) -> Formula | None:
    """An activation as the kernels take it, or None; ask while planning.

    Args:
        op: The activation.
        scaled: A scale multiplies it, before anything is rounded.
    """
    functions = functions_of(op)
    if functions is None:
        return None
    given = [functions.value, functions.derivative]
    if functions.linear_value is not None:
        given += [functions.linear_value, functions.linear_derivative]
    names = [f"{fn.fn.__module__}:{fn.fn.__qualname__}" for fn in given]
    if any(_find(name) is not fn for name, fn in zip(names, given, strict=True)):
        names = []
    rounds = not scaled and any(has_same_math(op, cls) for cls in (SwiGLU, GEGLU, ReGLU, SReGLU))
    size = getattr(op, "glu_interleave_size", None) or 0
    return _formula(functions, names, size, rounds)


@functools.cache
def named_formula(names: tuple[str, ...], size: int, rounds: bool) -> Formula:
    """The formula of :attr:`Formula.names`, without the names of its numbers."""
    return _formula(DeviceFunctions(*map(_find, names)), list(names), size, rounds)


def _formula(functions: DeviceFunctions, names: list[str], size: int, rounds: bool) -> Formula:
    forward = {
        "VALUE": functions.value,
        "LINEAR_VALUE": functions.linear_value,
        "SIZE": size,
        "ROUNDS": rounds,
    }
    slopes = {"DERIVATIVE": functions.derivative, "LINEAR_DERIVATIVE": functions.linear_derivative}
    gated = functions.linear_value is not None
    return Formula(functions, names, size, rounds, forward, forward | slopes, gated)


IDENTITY = _formula(DeviceFunctions(None, None), [], 0, False)
"""No activation, for kernels that may have one."""


@functools.cache
def _find(name: str) -> Any:
    """The device function of a name; None: there is none under that name."""
    module, _, path = name.partition(":")
    try:
        return functools.reduce(getattr, path.split("."), importlib.import_module(module))
    except (ImportError, AttributeError):
        return None
