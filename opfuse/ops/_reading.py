"""Checks for ops that read parameters of other modules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from torch import Tensor, nn

from ..core.fusible import ParamSource
from ..core.introspection import hook_kinds, standing_for
from ..core.op import BasicOperation

OpT = TypeVar("OpT", bound=BasicOperation)


def reader(op: OpT, sources: Mapping[str, ParamSource], name: str) -> OpT:
    """The op, which from now on reads its parameters from other modules.

    Args:
        op: The op, on the meta device.
        sources: The module and attribute of each parameter.
        name: Its name.
    """
    op.read_parameters(sources)
    op.name = name
    return op


def tensor_of(cls: type, module: Any, name: str, dims: int | None = None) -> Tensor:
    """Return the tensor that an op will read.

    Args:
        cls: The op's class.
        module: The module that holds it.
        name: The attribute of that module.
        dims: Number of dimensions it must have; None: any.

    Raises:
        TypeError: ``module`` is not a module, or the attribute is not a floating-point tensor.
        AttributeError: There is no such attribute.
        ValueError: It has another number of dimensions.
    """
    who = f"{cls.__name__}.reading"
    if not isinstance(module, nn.Module):
        raise TypeError(f"{who} expected a torch.nn.Module, got {module!r}")
    what = f"{type(module).__name__}.{name}"
    try:
        value = standing_for(module, name)
    except (AttributeError, TypeError):
        wanted = "the name of an attribute of the module"
        raise AttributeError(f"{who} expected {wanted}, got {what}") from None
    if not isinstance(value, Tensor) or not value.is_floating_point():
        got = value.dtype if isinstance(value, Tensor) else repr(value)
        raise TypeError(f"{who} expected a floating-point tensor as {what}, got {got}")
    if dims is not None and value.ndim != dims:
        got = f"shape {tuple(value.shape)}"
        raise ValueError(f"{who} expected {dims} dimensions of {what}, got {got}")
    return value


def eps_of(cls: type, module: nn.Module, eps: float | None) -> float:
    """Return the epsilon of a norm: the given one, or the module's own.

    Args:
        cls: The op's class.
        module: The module, with an attribute ``eps`` or ``variance_epsilon``.
        eps: The caller's value, or None.

    Raises:
        ValueError: The module has none, or two that differ.
    """
    if eps is not None:
        return eps
    names = ("eps", "variance_epsilon")
    found = {name: getattr(module, name) for name in names if hasattr(module, name)}
    theirs = ", ".join(f"{name}={value}" for name, value in found.items())
    if len(set(found.values())) != 1 or None in found.values():
        wanted = f"{cls.__name__} expected one number as eps or variance_epsilon of the module"
        got = f"got {theirs or 'neither'} from {type(module).__name__}"
        raise ValueError(f"{wanted}, {got}: pass eps")
    return next(iter(found.values()))  # type: ignore[no-any-return]


def check_stock(cls: type, module: Any, wanted: type[nn.Module]) -> None:
    """Refuse a module that does not compute exactly what its class in ``torch.nn`` does.

    Args:
        cls: The op's class.
        module: The argument of ``cls.of``.
        wanted: The class in ``torch.nn``.

    Raises:
        TypeError: It is not of this class, or it has its own ``forward``, hooks or computed
            parameters, which the op would ignore.
    """
    who = f"{cls.__name__}.of expected a torch.nn.{wanted.__name__}"
    if not isinstance(module, wanted):
        raise TypeError(f"{who}, got {type(module).__name__}")
    extra = f"{hooks} hooks" if (hooks := hook_kinds(module)) else ""
    if type(module).forward is not wanted.forward or "forward" in vars(module):
        extra = "a forward of its own"
    if nn.utils.parametrize.is_parametrized(module):
        extra = "a parametrization"
    if extra:
        remedy = f"{cls.__name__}.of would lose it; reading takes the parameters alone"
        raise TypeError(f"{who} as it is, got a {type(module).__name__} with {extra}: {remedy}")
