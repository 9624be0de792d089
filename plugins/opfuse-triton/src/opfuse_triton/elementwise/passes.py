"""Which functions compute the passes of an activation. Importing this imports no Triton."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from opfuse import Environment
from opfuse.ops import ScaledActivation

from ..calls import DTYPES
from ..machine import why_no_kernel

_PASSES = "forward", "backward", "scaled_backward"


def activation_of(op: Any) -> Any:
    """The activation that an op is, or that it scales."""
    return op.activation if isinstance(op, ScaledActivation) else op


def why_not(op: Any, env: Environment) -> str:
    """Why no kernel can run for an activation, as a sentence; empty: one can.

    Args:
        op: The activation, or the op that scales it.
        env: The environment.
    """
    if why := why_no_kernel(env.device, env.capability):
        return why
    if env.dtype not in DTYPES:
        return (
            f"its kernels compute in fp32, and the ops in {str(env.dtype).removeprefix('torch.')}"
        )
    from . import formulas

    activation = activation_of(op)
    name, formula = type(activation).__name__, formulas.formula_of(activation)
    if formula is None:
        return f"{name} has no device functions (Activation.device_functions)"
    if env.compiling and not formula.names:
        return f"a graph cannot name the device functions of {name}: define them in a module"
    return ""


def passes_of(op: Any, env: Environment, configuration: Mapping[str, Any] | None = None) -> Any:
    """The passes of an activation: by kernels where :func:`why_not` says nothing, or by twins.

    Args:
        op: The activation, or the op that scales it.
        env: The environment.
        configuration: That of the kernels; None: the first for each call.

    Returns:
        An object with the functions of :mod:`opfuse_triton.elementwise.twins` as methods, without
        their first argument.
    """
    activation = activation_of(op)
    if why_not(op, env):
        from . import twins

        made = {name: functools.partial(getattr(twins, name), activation) for name in _PASSES}
        return SimpleNamespace(**made)
    from ..configs import Config
    from . import formulas, library

    formula = formulas.formula_of(activation, scaled=op is not activation)
    assert formula is not None  # why_not has looked
    config = Config(**configuration) if configuration else None
    return library.LibraryActivation(activation, formula, config)
