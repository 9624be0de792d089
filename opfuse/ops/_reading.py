"""Ops over parameters of other modules: what is looked at before an op takes them."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..core.introspection import hook_kinds


def tensor_of(cls: type, module: Any, name: str, dims: int | None = None) -> Tensor:
    """The tensor that an op is going to read.

    Args:
        cls: The op's class.
        module: The module that holds it.
        name: Its attribute there.
        dims: How many dimensions it must have; None: any.

    Raises:
        TypeError: ``module`` is no module, or the attribute no floating-point tensor.
        AttributeError: There is no such attribute.
        ValueError: It has another number of dimensions.
    """
    who = f"{cls.__name__}.reading"
    if not isinstance(module, nn.Module):
        raise TypeError(f"{who} expected a torch.nn.Module, got {module!r}")
    what = f"{type(module).__name__}.{name}"
    if not isinstance(name, str) or not hasattr(module, name):
        raise AttributeError(f"{who} expected the name of an attribute of the module, got {what}")
    value = getattr(module, name)
    if not isinstance(value, Tensor) or not value.is_floating_point():
        got = value.dtype if isinstance(value, Tensor) else repr(value)
        raise TypeError(f"{who} expected a floating-point tensor as {what}, got {got}")
    if dims is not None and value.ndim != dims:
        got = f"shape {tuple(value.shape)}"
        raise ValueError(f"{who} expected {dims} dimensions of {what}, got {got}")
    return value


def eps_of(cls: type, module: nn.Module, eps: float | None) -> float:
    """The number that a norm adds: the one given, or else the module's own.

    Args:
        cls: The op's class.
        module: The module, which has it as ``eps`` or as ``variance_epsilon``.
        eps: What the caller gave, or None.

    Raises:
        ValueError: The module tells none, or two that differ.
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
    number: float = next(iter(found.values()))
    return number


def check_stock(cls: type, module: Any, wanted: type[nn.Module]) -> None:
    """Refuse a module that computes more than its class in ``torch.nn``, or something else.

    Args:
        cls: The op's class.
        module: What ``cls.of`` was given.
        wanted: The class in ``torch.nn``.

    Raises:
        TypeError: It is not of this class, or it has a ``forward``, hooks or computed parameters of
            its own, which the op would not know.
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
