"""Shared by several ops: argument checks, and the base of ops with extra tensors."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

from torch import Tensor

from ..core.op import BasicOperation
from ..core.op_context import Grads, OperationContext

OpGrads = tuple[Tensor | None, Grads]
"""The result of ``op_backward``: the gradients of the input and of the parameters."""


def rows_of(tensor: Tensor) -> Tensor:
    """The tensor with one row dimension."""
    return tensor if tensor.ndim == 2 else tensor.unsqueeze(0).flatten(0, -2)


def sum_rows(tensor: Tensor, dims: int) -> Tensor:
    """The sum over all but the last ``dims`` dimensions, as a new tensor."""
    rows = tuple(range(tensor.ndim - dims))
    # a sum over no dimension would be a sum over all
    return tensor.sum(rows) if rows else tensor.clone()


def expected(op: object, what: str, got: Any) -> str:
    """The text of a refusal: who expected what, and what came."""
    return f"{type(op).__name__} expected {what}, got {got}"


def whole(value: Any) -> int | None:
    """Return ``value`` as an int if it is a whole number, numpy's included.

    None: it is not a whole number, or it is a bool.
    """
    if isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool"):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def require(op: object, fits: bool, what: str, got: Any, error: type = ValueError) -> None:
    """Refuse an argument that does not fit, for constructors: the text is made in any case.

    Raises:
        ValueError: It does not fit; or another ``error``.
    """
    if not fits:
        raise error(expected(op, what, repr(got)))


def check_size(op: object, name: str, value: Any) -> int:
    """Return a tensor dimension as an int.

    Raises:
        TypeError: It is not a whole number.
        ValueError: It is negative.
    """
    size = whole(value)
    if size is None:
        raise TypeError(expected(op, f"a whole number as {name}", repr(value)))
    require(op, size >= 0, f"{name} of at least 0", size)
    return size


def check_bool(op: object, name: str, value: Any) -> None:
    """Refuse anything but True and False.

    Raises:
        TypeError: It is something else.
    """
    require(op, isinstance(value, bool), f"a bool as {name}", value, TypeError)


def check_shape(op: object, name: str, value: int | Iterable[int]) -> tuple[int, ...]:
    """Return the shape given by an int or an iterable of ints.

    Raises:
        TypeError: An item is not a whole number.
        ValueError: It is empty, or an item is negative.
    """
    shape = tuple(value) if isinstance(value, Iterable) and whole(value) is None else (value,)
    if not shape:
        raise ValueError(expected(op, f"at least one dimension as {name}", "none"))
    return tuple(check_size(op, name, size) for size in shape)


def shows(*names: str) -> Callable[[Any], str]:
    """Make an ``extra_repr`` of the attributes that are not None."""
    return lambda op: ", ".join(
        f"{name}={value}" for name in names if (value := getattr(op, name)) is not None
    )


class RowwiseOperation(BasicOperation):
    """An op of differentiable torch operations, whose output has a row for each row of its input.

    The gradient of its input is a new tensor, unless it declares otherwise.
    """

    keeps_rows = True
    differentiable = True
    grad_input = "fresh"


class ExtraTensorOperation(BasicOperation):
    """An op with extra inputs or outputs: only ``fuser_forward`` and ``fuser_backward`` run it."""

    kwarg_names: ClassVar[tuple[str, ...] | None] = ()

    def op_forward(self, ctx: OperationContext, input_: Tensor, **unused: Any) -> Tensor:
        """Refused.

        Raises:
            RuntimeError: Always: extra tensors pass through ``fuser_forward``.
        """
        who = f"{type(self).__name__} has extra tensors"
        raise RuntimeError(f"{who}: call fuser_forward, not op_forward")

    def op_backward(self, ctx: OperationContext, grad_output: Tensor) -> OpGrads:
        """Refused.

        Raises:
            RuntimeError: Always: gradients of extra tensors pass through ``fuser_backward``.
        """
        who = f"{type(self).__name__} has extra tensors"
        raise RuntimeError(f"{who}: call fuser_backward, not op_backward")
