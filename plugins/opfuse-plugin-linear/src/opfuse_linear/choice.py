"""Where the Triton product replaces a library's. Triton is imported only where it can run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from opfuse_triton import Predicted, why_no_kernel

from opfuse import Environment
from opfuse.ops import ParallelLinear

from . import by_quack
from .kernels import DTYPES

MANY_ROWS = 8192
"""Rows for which configurations are ordered."""

PREDICTED = Predicted(
    "linear", {"linear+bias+activation": (1.07, ["linear + GELU", "linear + GELU, kept"])}
)
"""The speed of the fusion by the model. A product is taken to be as fast as the library's."""


def refusal(ops: Sequence[Any], env: Environment, *, measured: bool = True) -> str:
    """Why the Triton product does not replace these ops, as a sentence; empty: it does.

    Args:
        ops: Linear or linears side by side, then a bias or not, then an activation.
        env: The environment.
        measured: Whether it also has to be the fastest that was measured on this GPU.
    """
    if said := _cannot_run(env) or _does_not_compute(ops):
        return said
    if env.device.type == "cpu" or not measured or env.measured == math.inf:
        return ""
    if env.measured is None:
        return PREDICTED.why_not("linear+bias+activation", env)
    return "" if found(env) else "opfuse tune found no Triton product faster than the library's"


def found(env: Environment) -> Mapping[str, Any] | None:
    """The configuration that ``opfuse tune`` found the fastest; None: it is the library."""
    given = env.configuration
    if given == by_quack.CONFIGURATION:
        return given if by_quack.is_installed() else None
    return given if given is not None and "constants" in given else None


def _cannot_run(env: Environment) -> str:
    """Why no Triton product can run, as a sentence; empty: one can."""
    if env.compiling:
        return "under torch.compile no Triton product was measured"
    if env.recipe is not None:
        return f"{type(env.recipe).__name__} quantizes the linear, and a Triton product does not"
    if env.dtype not in DTYPES:
        return f"a Triton product takes no {str(env.dtype)[6:]}"
    return why_no_kernel(env.device, env.capability)


def _does_not_compute(ops: Sequence[Any]) -> str:
    from opfuse_triton import functions_of

    act = ops[-1]
    if act.gated or isinstance(ops[0], ParallelLinear):
        return "a Triton product takes one linear, and an activation that is not gated"
    if functions_of(act) is None:
        return f"{type(act).__name__} has no device functions for a Triton product"
    return ""


def product(ops: Sequence[Any], env: Environment) -> Any:
    """The Triton product of these ops; None: the library has it.

    It is called with the activation's context, the input, the weight and the bias, and gives the
    output, or None for tensors that the kernel does not take.
    """
    tuned = env.device.type != "cpu" and env.measured is not None
    if refusal(ops, env) or (tuned and found(env) is None):
        return None
    if found(env) == by_quack.CONFIGURATION:
        return by_quack.Product(ops[-1])
    from .gemm import Product

    return Product(ops[-1], found(env))


def configurations(ops: Sequence[Any], env: Environment) -> Sequence[Mapping[str, Any]]:
    """Those of the Triton product on a GPU, and quack's; without one the library is used."""
    if env.device.type == "cpu" or refusal(ops, env, measured=False):
        return ()
    from . import gemm

    offered = gemm.configurations(env.device, env.dtype, MANY_ROWS, ops[0].out_features)
    return offered if by_quack.why_not(ops[-1], env) else [*offered[:7], by_quack.CONFIGURATION]
