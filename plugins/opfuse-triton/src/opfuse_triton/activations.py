"""What a kernel needs for an activation: device functions, and the op's numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from opfuse import ops
from opfuse.core.introspection import has_same_math, overridden

from . import functions as of


@dataclass(frozen=True)
class DeviceFunctions:
    """The device functions of an activation, for ``tl.constexpr`` parameters of a kernel.

    A kernel takes :meth:`numbers` as one argument, ``numbers``, and calls
    ``VALUE(x, *numbers)``. A gated one is ``VALUE(a, *numbers) * LINEAR_VALUE(b, *numbers)``.

    Attributes:
        value: The activation, or that of the gate.
        derivative: Its derivative.
        linear_value: The factor from the other half; None: the op is not gated.
        linear_derivative: Its derivative; None: the op is not gated.
        names: Which numbers of the op they take, in this order.
    """

    value: Any
    derivative: Any
    linear_value: Any = None
    linear_derivative: Any = None
    names: tuple[str, ...] = ()

    def numbers(self, values: tuple[tuple[str, Any], ...]) -> tuple[float, ...]:
        """The numbers for a call.

        Args:
            values: In a forward ``op.numbers_of()``; in a backward ``ctx.numbers``, which the
                forward left.
        """
        if not self.names:
            return ()
        given = dict(values)
        return tuple([float(given[name]) for name in self.names])


_GELU = {
    "tanh": (of.gelu_tanh, of.gelu_tanh_derivative),
    "none": (of.gelu_erf, of.gelu_erf_derivative),
}
_SILU = of.silu, of.silu_derivative
_QGELU = of.qgelu, of.qgelu_derivative
_RELU = of.relu, of.relu_derivative
_SRELU = of.srelu, of.srelu_derivative
_IDENTITY = of.identity, of.one
_MOST_NUMBERS = 8  # that these take besides the value, and ignore
_SITU = of.situ_gate, of.situ_gate_derivative, of.situ_linear, of.situ_linear_derivative
_CLAMPED = (
    of.clamped_gate, of.clamped_gate_derivative, of.clamped_linear, of.clamped_linear_derivative,
)  # fmt: skip
_KNOWN = (
    (ops.QGELU, DeviceFunctions(*_QGELU)),
    (ops.ReLU, DeviceFunctions(*_RELU)),
    (ops.SReLU, DeviceFunctions(*_SRELU)),
    (ops.SiLU, DeviceFunctions(*_SILU)),
    (ops.GLU, DeviceFunctions(of.sigmoid, of.sigmoid_derivative, *_IDENTITY)),
    (ops.QGEGLU, DeviceFunctions(*_QGELU, *_IDENTITY)),
    (ops.ReGLU, DeviceFunctions(*_RELU, *_IDENTITY)),
    (ops.SReGLU, DeviceFunctions(*_SRELU, *_IDENTITY)),
    (ops.SwiGLU, DeviceFunctions(*_SILU, *_IDENTITY)),
    (ops.SiTUGLU, DeviceFunctions(*_SITU, names=("beta1", "beta2"))),
    (ops.ClampedSwiGLU, DeviceFunctions(*_CLAMPED, names=("limit", "alpha", "glu_linear_offset"))),
)
_RUN = "op_forward", "op_backward", "operand"


def functions_of(op: Any) -> DeviceFunctions | None:
    """The device functions that compute an activation; None: there are none.

    Ask while planning, since it looks at every method. An op of your own class has functions if
    its ``device_functions`` returns them. They then get the numbers that its ``number_names``
    declare, in this order, as fp32.

    The answer is None for an op that is not an activation, that overrides a formula and brings no
    functions, or that has its own passes or its own split of the features; and for one of your
    classes that declares a value that is not a real number, such as a string.

    Args:
        op: An op.

    Raises:
        ValueError: ``device_functions`` gives neither two functions nor, for a gated op, four; or
            its class does not declare ``number_names``.
    """
    if not isinstance(op, ops.Activation):
        return None
    if (own := op.device_functions()) is not None:
        return _own(op, own)
    for cls in (ops.GELU, ops.GEGLU):
        if has_same_math(op, cls):
            return DeviceFunctions(*_GELU[op.approximate], *(_IDENTITY if op.gated else ()))
    return next((found for cls, found in _KNOWN if has_same_math(op, cls)), None)


def _own(op: ops.Activation, given: tuple[Any, ...]) -> DeviceFunctions | None:
    """The functions that an op brings."""
    gave = f"{type(op).__name__}.device_functions gave"
    if len(given) not in ((2, 4) if op.gated else (2,)):
        raise ValueError(
            f"{gave} {len(given)} functions: expected value and derivative, and for a gated op "
            "maybe those of the linear half"
        )
    if overridden(op, ops.Activation, *_RUN):
        return None
    if op.number_names is None:
        raise ValueError(f"{gave} functions: declare number_names, of the numbers that they take")
    numbers = op.numbers_of()
    if not all(isinstance(value, int | float) for _, value in numbers):
        return None
    for function in given:
        names = getattr(function, "arg_names", None)
        if names is None:
            raise ValueError(f"{gave} {function!r}: expected functions decorated with @triton.jit")
        if len(names) < 1 + len(numbers):
            takes = f"{function.__name__}, which takes {len(names)} arguments"
            expected = f"the value and its numbers, {', '.join(name for name, _ in numbers)}"
            raise ValueError(f"{gave} {takes}: expected {expected}")
    if op.gated and len(given) == 2:
        own = overridden(op, ops.GatedActivation, "linear_value", "linear_derivative")
        if own or len(numbers) > _MOST_NUMBERS:
            return None
        given = *given, *_IDENTITY
    if op.gated and overridden(op, ops.GatedActivation, "split", "join"):
        return None
    return replace(DeviceFunctions(*given), names=tuple([name for name, _ in numbers]))
