"""Where a Triton product replaces a library's. Triton is imported only where it can run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from opfuse_triton import Predicted, why_no_kernel

from opfuse import Environment
from opfuse.ops import AddExtraInput, ConstantScale, ParallelLinear

from .kernels import DTYPES

MANY_ROWS = 8192
"""Rows for which configurations are ordered."""

PREDICTED = Predicted(
    "linear",
    {
        "linear+bias+activation": (
            1.07,
            ["linear + GELU", "linear + GELU, kept", "linear + GELU (tanh), wide, kept"],
        ),
        "parallel linear+activation": (
            1.09,
            ["gate and up + SwiGLU", "gate and up + SwiGLU, kept"],
        ),
        "linear+bias+add": (1.03, ["linear + add"]),
        "linear+scale+add": (1.05, ["linear + scale + add"]),
        "activation+linear": (
            1.05,
            [
                "gradient of GELU before a linear",
                "gradient of GELU (erf) before a linear",
                "gradient of SwiGLU before a linear",
            ],
        ),
    },
)
"""The speed of each fusion by the model. A product is taken to be as fast as the library's."""


def refusal(ops: Sequence[Any], env: Environment, *, measured: bool = True) -> str:
    """Why no Triton product replaces these ops, as a sentence; empty: one does.

    Args:
        ops: Linear or linears side by side, then a bias or not, then the op in the epilogue.
        env: The environment.
        measured: Whether it also has to be the fastest that was measured on this GPU.
    """
    if said := _cannot_run(env) or _does_not_compute(ops):
        return said
    if env.device.type == "cpu" or not measured or env.measured == math.inf:
        return ""
    if env.measured is None:
        return PREDICTED.why_not(_fusion(ops), env)
    return "" if found(env) else "opfuse tune found no Triton product faster than the library's"


def _fusion(ops: Sequence[Any]) -> str:
    """The name of the forward fusion of these ops."""
    if isinstance(ops[-1], AddExtraInput):
        return "linear+scale+add" if isinstance(ops[1], ConstantScale) else "linear+bias+add"
    parallel = isinstance(ops[0], ParallelLinear)
    return "parallel linear+activation" if parallel else "linear+bias+activation"


def found(env: Environment) -> Mapping[str, Any] | None:
    """The configuration that ``opfuse tune`` found the fastest; None: it is the library."""
    given = env.configuration
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

    linear, last = ops[0], ops[-1]
    gated = getattr(last, "gated", None)
    if gated is not None and functions_of(last) is None:
        return f"{type(last).__name__} has no device functions for a Triton product"
    if gated and last.glu_interleave_size is not None:
        return "a Triton product takes the halves of a gated activation one after the other"
    if gated and linear.out_features % 2:
        return "the features do not split into two halves"
    if isinstance(linear, ParallelLinear) and not (
        gated and len(linear.sizes) == 2 and linear.sizes[0] == linear.sizes[1]
    ):
        return "of linears side by side a Triton product takes a gate and what it multiplies"
    return ""


def product(ops: Sequence[Any], env: Environment) -> Any:
    """The :class:`opfuse_linear.products.Product` for these ops; None: the library has it."""
    tuned = env.device.type != "cpu" and env.measured is not None
    if refusal(ops, env) or (tuned and found(env) is None):
        return None
    from .products import Product

    return Product(ops[-1], found(env))


def activation_gradient_refusal(ops: Sequence[Any], env: Environment) -> str:
    """Why no Triton product gives the gradient of an activation before a linear; empty: one does.

    Args:
        ops: A bias or not, the activation, the linear.
        env: The environment.
    """
    if said := _cannot_run(env):
        return said
    from opfuse_triton import functions_of

    act = ops[-2]
    if act.gated and act.glu_interleave_size is not None:
        return "a Triton product takes the halves of a gated activation one after the other"
    if functions_of(act) is None:
        return f"{type(act).__name__} has no device functions for a Triton product"
    return PREDICTED.why_not("activation+linear", env)


def gradient_configurations(ops: Sequence[Any], env: Environment) -> Sequence[Mapping[str, Any]]:
    """The configurations of the Triton product for an activation and a linear, on a GPU."""
    refused = activation_gradient_refusal(ops, env._replace(measured=1.0))
    if env.device.type == "cpu" or refused:
        return ()
    from opfuse_triton import functions_of

    from . import products

    sizes = MANY_ROWS, ops[-1].in_features, ops[-1].out_features
    functions = functions_of(ops[-2])
    return products.configurations(
        env.device, env.dtype, sizes, gated=False, functions=functions, turned=True
    )


def configurations(ops: Sequence[Any], env: Environment) -> Sequence[Mapping[str, Any]]:
    """The configurations of the Triton product on a GPU; without one the library is used."""
    if env.device.type == "cpu" or refusal(ops, env, measured=False):
        return ()
    from opfuse_triton import functions_of

    from . import products

    linear, gated = ops[0], getattr(ops[-1], "gated", False)
    functions = functions_of(ops[-1])
    keep = functions is not None and env.requires_grad
    features = linear.out_features // (2 if gated else 1)
    sizes = MANY_ROWS, features, linear.in_features
    return products.configurations(
        env.device, env.dtype, sizes, gated=gated, functions=functions, keep=keep
    )
