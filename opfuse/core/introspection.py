"""Finds what an op overrides, and so whether the known arithmetic of its class applies.

It also looks at parameters without running what computes them, see :func:`standing_for`.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import sys
from collections import ChainMap
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from .fused_op import FusedOperation
from .fusible import FusibleOperation
from .op import BasicOperation
from .op_context import QUANTIZERS, asks_for_quantizers
from .overwriting import without_modes

_LIBRARY = BasicOperation.forward, FusedOperation.forward
_CALL = "__call__", "_call_impl"
CONVERTED = "_opfuse_of"
"""The attribute with which ``opfuse.convert`` marks a derived class; its value is the original."""


def hook_dicts(module: nn.Module) -> tuple[Any, ...]:
    """The hooks of a module's call, by kind."""
    return (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )


def hook_kinds(module: nn.Module) -> str:
    """The kinds of hooks that a module's call runs, in words; ``""`` if there are none."""
    kinds = ("forward", "forward pre-", "backward", "backward pre-")
    pairs = zip(kinds, hook_dicts(module), strict=True)
    return " and ".join(kind for kind, hooks in pairs if hooks)


def why_apart(op: nn.Module) -> str:
    """Return why an op must run through its own ``__call__``; ``""`` if it need not.

    Reasons are hooks, and a ``forward`` or ``__call__`` that is not the library's: one of a
    subclass (an adapter, say), or one set on the instance or its class.
    """
    if hooks := hook_kinds(op):
        return f"has {hooks} hooks"
    return f"has a {name} of its own" if (name := own_call(op)) else ""


def own_call(op: nn.Module) -> str:
    """``"__call__"`` or ``"forward"``, whichever is not the library's; ``""`` if both are."""
    if any(getattr(type(op), name) is not getattr(nn.Module, name) for name in _CALL):
        return "__call__"
    return "" if "forward" not in vars(op) and type(op).forward in _LIBRARY else "forward"


def op_class(op: nn.Module) -> type[nn.Module]:
    """The class of an op as its author wrote it, without derived wrapper classes.

    ``torch.nn.utils.parametrize``, FSDP and ``opfuse.convert`` change a module's class in place; a
    fusion that names the original class still matches the op.
    """
    cls = type(op)
    while True:
        bases = cls.__bases__
        if CONVERTED in vars(cls):
            cls = vars(cls)[CONVERTED]
        elif cls.__name__.startswith("Parametrized") and parametrize.is_parametrized(op):
            cls = bases[0]
        elif len(bases) == 2 and any(base.__name__ == "FSDPModule" for base in bases[0].__mro__):
            cls = bases[1]
        else:
            return cls


PASS_METHODS = ("op_forward", "op_backward", "fuser_forward", "fuser_backward")
"""The methods through which the fuser runs ops."""


def has_same_math(op: nn.Module, cls: type, *methods: str) -> bool:
    """Return whether code for ``cls`` may replace an op.

    It may if the op is an instance of ``cls``, and ``cls`` still defines its arithmetic.

    Every shortcut checks this before it replaces an op of a known class: a kernel for GELU checks
    ``has_same_math(op, GELU)``. An op that overrides a method of ``cls``, in its class or on the
    instance, may compute something else. Check while planning: a change to the op or its class
    leads to a new plan.

    Abstract methods of ``cls`` may be implemented, and classes that torch derives for
    parametrization or FSDP override nothing. Methods of ``torch.nn.Module`` do not count: the fuser
    checks ``forward`` itself.

    Args:
        op: The op.
        cls: The class whose arithmetic is known.
        *methods: The methods that the shortcut replaces; default: all that ``cls`` has.
    """
    return isinstance(op, cls) and overridden(op, cls, *methods) is None


def overridden(op: nn.Module, cls: type, *methods: str) -> str | None:
    """Return the first method of ``cls`` that an op overrides; see :func:`has_same_math`."""
    own = type(op)
    if issubclass(BasicOperation, cls):  # such a class says nothing about the arithmetic
        return None
    names = methods or _methods_of(cls, FusibleOperation.changes)
    if replaced := [name for name in names if name in vars(op)]:
        return replaced[0]
    for name in names if own is not cls else ():
        given = _on_class(cls, name)
        if given is None or given is _on_class(own, name):
            continue
        if given is _on_class(BasicOperation, name):
            # a pass that is abstract may be given by either of its methods
            given = _on_class(cls, name.replace("fuser_", "op_"))
        if not getattr(given, "__isabstractmethod__", False):
            return name
    return None


def _on_class(cls: type, name: str) -> Any:
    """Return the attribute that a class has under this name, unbound; None if it has none."""
    for base in cls.__mro__:
        if name in vars(base):
            return vars(base)[name]
    return None


@functools.lru_cache(256)
def _methods_of(cls: type, changes: int) -> tuple[str, ...]:
    """The methods of a class that an op may override, as long as no op or class is changed."""
    values: dict[str, Any] = dict(ChainMap(*map(vars, cls.__mro__)))  # type: ignore[arg-type]
    return tuple(
        [
            name
            for name, value in values.items()
            if not hasattr(nn.Module, name) and name[:2] != "__"
            if callable(value) or hasattr(value, "__get__")
        ]
    )


def kwarg_names(op: FusibleOperation) -> tuple[str, ...] | None:
    """The keyword arguments an op takes; None if it takes any (``**kwargs``)."""
    if op.kwarg_names is not None:
        return op.kwarg_names
    if not isinstance(op, BasicOperation):
        return ()
    by_position, _ = asks_for_quantizers(op)
    parameters = list(inspect.signature(op.op_forward).parameters.values())[2 + len(by_position) :]
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    keyword = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(p.name for p in parameters if p.kind in keyword and p.name not in QUANTIZERS)


def standing_for(module: nn.Module, name: str) -> Any:
    """A tensor of the shape and dtype of a parameter, which requires a gradient if that does.

    Reading a parametrized one runs its parametrization, which may count, draw, or have a state, as
    spectral norm does. If that may give another shape than it gets, a copy of it runs; one that
    cannot be copied, such as one with a process group, runs itself.
    """
    if not parametrize.is_parametrized(module, name):
        return getattr(module, name)
    of: Any = module.parametrizations[name]  # type: ignore[index]
    if of.is_tensor and not of.unsafe and not any(hasattr(p, "right_inverse") for p in of):
        return of.original
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
    with without_modes(), torch.random.fork_rng(devices), torch.enable_grad():
        with contextlib.suppress(Exception):
            of = copy.deepcopy(of)
        return of()


def is_dtensor(value: Any) -> bool:
    """Whether a value is a ``DTensor``; the package is not imported for that."""
    if type(value) in (torch.Tensor, torch.nn.Parameter):
        return False
    package = sys.modules.get("torch.distributed.tensor")
    return package is not None and isinstance(value, package.DTensor)
