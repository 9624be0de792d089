"""Finds the ops that compute a module without children of interest."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from opfuse import ops
from opfuse.core.introspection import op_class, standing_for
from opfuse.core.op import BasicOperation

from . import probing
from .grammar import Place, behind_places
from .layers import is_patched
from .parallel import Splits, split_by_torch
from .probing import Leaf, linear_ops


def leaf_of(module: nn.Module, splits: Splits = split_by_torch) -> Leaf | str:
    """The ops that compute a module, or a sentence that says why there are none.

    A class of ``torch.nn`` is known. Any other is recognised by what it computes: see
    :mod:`opfuse_convert.probing`.

    Args:
        module: The module; nothing of it is changed.
        splits: Says how a linear layer is split among processes.
    """
    cls = op_class(module)
    if (found := splits(module)) is not None:
        how, places = found if type(found) is tuple else (found, ())
        return how if isinstance(how, str) else _split_leaf(module, how, places)
    if "forward" in vars(module):
        return f"the forward of this {cls.__name__} was replaced"
    if inspect.getattr_static(module, "inplace", False):
        return f"{cls.__name__} writes into its input"
    if cls in _KNOWN:
        return _known(module)
    if next(module.children(), None) is not None:
        return f"{cls.__name__} has modules of its own"
    if cls.__module__.startswith("torch.nn."):
        return f"no op computes what {cls.__name__} does"
    return probing.recognised(module)


def _known(module: nn.Module) -> Leaf | str:
    """The ops of a module of a class of ``torch.nn``, as the forward of the class computes it."""
    cls: Any = op_class(module)
    if is_patched(cls):
        return f"{cls.__name__} got another forward"
    known: Leaf | str = _KNOWN[cls](module)
    if isinstance(known, str):
        return known
    return known._replace(constants=_constants(cls, module), places=_behind(cls.forward))


def _split_leaf(module: Any, how: Any, places: Sequence[Place]) -> Leaf | str:
    """The ops of a linear layer that is split among processes, with the collectives around them."""
    from opfuse_distributed.parallel import split

    made = _known(module)
    if isinstance(made, Leaf):
        for op in made.ops:
            split(op, how)
        made = made._replace(split=how, places=[*made.places, *places])
    return made


def _constants(cls: Any, module: nn.Module) -> Sequence[str]:
    """The attributes that a forward of torch.nn reads, apart from parameters and the mode."""
    read = cls.forward.__code__.co_names
    return [name for name in read if name in vars(module) and name != "training"]


@functools.cache
def _behind(forward: Any) -> Sequence[Place]:
    """The functions that a forward of torch.nn calls."""
    names = [n for n in forward.__code__.co_names if n in vars(F)]
    places = [Place(vars(F), n, getattr(F, n), f"torch.nn.functional.{n}") for n in names]
    called = [getattr(F, n) for n in names]
    behind = [p for f in called if isinstance(f, types.FunctionType) for p in behind_places(f)]
    return [Place(forward.__globals__, "F", F, "torch.nn.functional"), *places, *behind]


def _linear(module: Any) -> Leaf | str:
    weight = standing_for(module, "weight")
    if not isinstance(weight, Tensor) or not weight.is_floating_point():
        return "its weight is not a floating-point tensor"
    return Leaf(linear_ops(module))


def _norm(module: Any) -> Leaf | str:
    if module.eps is None:
        return "it has no eps"
    cls: Any = ops.LayerNorm if isinstance(module, nn.LayerNorm) else ops.RMSNorm
    if standing_for(module, "weight") is not None:
        return Leaf([cls.reading(module)])
    if getattr(module, "bias", None) is not None:
        return "it has a bias, and no weight"
    return Leaf([cls(module.normalized_shape, eps=module.eps, elementwise_affine=False)])


_KNOWN: dict[type, Any] = {
    nn.Linear: _linear,
    nn.LayerNorm: _norm,
    nn.RMSNorm: _norm,
    nn.GELU: lambda module: Leaf([ops.GELU(approximate=module.approximate)]),
    nn.SiLU: lambda module: Leaf([ops.SiLU()]),
    nn.ReLU: lambda module: Leaf([ops.ReLU()]),
    # one that drops nothing would only stand between ops that are fused
    nn.Dropout: lambda module: Leaf([ops.Dropout(module.p)] if module.p else ()),
    nn.Identity: lambda module: Leaf(()),
}

FUNCTIONS: dict[Any, Any] = {
    torch.nn.functional.silu: ops.SiLU,
    torch.nn.functional.relu: ops.ReLU,
    torch.relu: ops.ReLU,
    torch.nn.functional.gelu: ops.GELU,
}
"""Functions of one tensor, by the op that computes them."""

GATED: dict[type, type] = {
    ops.SiLU: ops.SwiGLU,
    ops.QGELU: ops.QGEGLU,
    ops.ReLU: ops.ReGLU,
    ops.SReLU: ops.SReGLU,
}
"""By the activation of its gate, the op that multiplies it with the other half."""


def gated(act: Any) -> BasicOperation | None:
    """The op that computes ``act(a) * b`` of both halves, or None."""
    if type(act) is ops.GELU:
        return ops.GEGLU(approximate=act.approximate)
    cls = GATED.get(type(act))
    return None if cls is None else cls()


class _GateLast(ops.GatedActivation):
    """A gated activation whose gate is the second half, as in diffusers."""

    deterministic = True

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The gate and the linear half."""
        linear, gate = super().split(x)
        return gate, linear

    def join(self, a: Tensor, b: Tensor) -> Tensor:
        """The inverse of that."""
        return super().join(b, a)


@functools.cache
def _class_with_gate_last(cls: Any) -> Any:
    return type(f"{cls.__name__}GateLast", (_GateLast, cls), {"__module__": __name__})


def gate_last(op: Any) -> Any:
    """The op that does the same where the second half of the features is the gate."""
    more = {"approximate": op.approximate} if isinstance(op, ops.GEGLU) else {}
    cls: Any = type(op)
    return _class_with_gate_last(cls)(**more)


def function_op(function: Any, kwargs: dict[str, Any]) -> BasicOperation | None:
    """The op of a function of one tensor, or None."""
    cls = FUNCTIONS.get(function)
    kwargs = {key: value for key, value in kwargs.items() if key != "inplace" or value}
    if cls is ops.GELU:
        return ops.GELU(approximate=kwargs.get("approximate", "none"))
    return None if cls is None or kwargs else cls()
