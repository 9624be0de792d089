"""For each call: the kernel, launched or as a torch operation in a graph, or the twin.

``torch.compile`` sees one operation per kernel: ``opfuse_triton::activation_forward``,
``::activation_backward`` and ``::activation_scaled_backward``. Eager calls launch the kernels
themselves, which takes less time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ..calls import DTYPES, are_plain, define, placed, there
from ..configs import Config
from . import formulas, kernels, twins
from .formulas import Formula
from .twins import Three, Two


class LibraryActivation:
    """The functions of :mod:`opfuse_triton.elementwise.twins` for one activation, by kernels.

    Args:
        op: The activation.
        formula: How the kernels take it.
        config: The configuration of the kernel, or None.
    """

    def __init__(self, op: Any, formula: Formula, config: Config | None = None) -> None:
        self._op, self._formula, self._config = op, formula, config

    def forward(
        self, x: Tensor, bias: Tensor | None, scales: Tensor | None, dtype: torch.dtype, keep: bool
    ) -> tuple[Tensor, Tensor | None]:
        """:func:`opfuse_triton.elementwise.twins.forward`, by the kernel if it takes the call."""
        given = x, bias, scales, dtype, keep
        fits = bias is None or bias.shape == x.shape[-1:]
        if not (fits and dtype in DTYPES and self._takes(x, bias, scales)):
            return twins.forward(self._op, *given)
        numbers = self._formula.functions.numbers(self._op.numbers_of())
        if is_compiling():
            y, *kept = torch.ops.opfuse_triton.activation_forward(*given, *self._in_graph(numbers))
            return y, kept[0] if keep else None
        return kernels.forward(self._formula, numbers, *given, self._config)

    def backward(
        self,
        numbers: Any,
        dy: Tensor,
        x: Tensor,
        needs_x: bool,
        needs_sums: bool,
        needs_y: bool = False,
        owns: bool = False,
    ) -> Three:
        """:func:`opfuse_triton.elementwise.twins.backward`, by the kernels if they can."""
        # autograd gives expanded ones, from a sum
        dy = dy.to(x.dtype).contiguous()
        needs = needs_x, needs_sums, needs_y
        if not self._takes(x, dy):
            return twins.backward(self._op, numbers, dy, x, *needs, owns)
        values = self._formula.functions.numbers(numbers)
        if is_compiling():
            what = self._in_graph(values)
            made = torch.ops.opfuse_triton.activation_backward(dy, x, *needs, *what)
            return placed(made, *needs)  # type: ignore[no-any-return]
        return kernels.backward(self._formula, values, dy, x, *needs, owns, self._config)

    def scaled_backward(
        self, numbers: Any, dy: Tensor, x: Tensor, scales: Tensor | None, needs_scales: bool
    ) -> Two:
        """:func:`opfuse_triton.elementwise.twins.scaled_backward`, by the kernel if it can."""
        dy = dy.contiguous()
        given = dy, x, scales, needs_scales
        if not self._takes(x, dy, scales):
            return twins.scaled_backward(self._op, numbers, *given)
        values = self._formula.functions.numbers(numbers)
        if is_compiling():
            made = torch.ops.opfuse_triton.activation_scaled_backward(
                *given, *self._in_graph(values)
            )
            return placed(made, scales is not None, needs_scales)  # type: ignore[no-any-return]
        return kernels.scaled_backward(self._formula, values, *given, self._config)

    def _in_graph(self, numbers: tuple[float, ...]) -> tuple[Any, ...]:
        """The arguments by which an operation in a graph names the computation."""
        return self._formula.names, list(numbers), self._formula.size, self._formula.rounds

    def _takes(self, x: Tensor, *others: Tensor | None) -> bool:
        """Return whether the kernels take these tensors."""
        if self._formula.gated and x.ndim and x.shape[-1] % (2 * (self._formula.size or 1)):
            return False
        return x.ndim > 0 and are_plain(x, *others)


def _launching(launch: Callable[..., Any]) -> Callable[..., list[Tensor]]:
    """A function of :mod:`.kernels` as an operation in a graph calls it."""

    def run(*given: Any) -> list[Tensor]:
        *tensors, functions, numbers, size, rounds = given
        formula = formulas.named_formula(tuple(functions), size, rounds)
        return there(launch(formula, tuple(numbers), *tensors))

    return run


def _fake_forward(
    x: Tensor, bias: Any, scales: Any, dtype: torch.dtype, keep: bool, functions: list[str], *_: Any
) -> list[Tensor]:
    y = x.new_empty((*x.shape[:-1], x.shape[-1] // (len(functions) // 2)), dtype=dtype)
    return [y, torch.empty_like(x, dtype=dtype)] if keep else [y]


def _fake_backward(
    dy: Tensor, x: Tensor, needs_x: bool, needs_sums: bool, needs_y: bool, *_: Any
) -> list[Tensor]:
    dx = torch.empty_like(x) if needs_x else None
    sums = x.new_empty(x.shape[-1:]) if needs_sums else None
    return there((dx, sums, torch.empty_like(dy) if needs_y else None))


def _fake_scaled_backward(
    dy: Tensor, x: Tensor, scales: Tensor | None, needs_scales: bool, *_: Any
) -> list[Tensor]:
    dtype = torch.float32 if scales is None else scales.dtype
    dscales = x.new_empty(x.shape[:-1], dtype=dtype) if needs_scales else None
    return there((None if scales is None else torch.empty_like(x), dscales))


_FORWARD = "Tensor x, Tensor? bias, Tensor? scales, ScalarType dtype, bool keep"
_WHAT = "str[] functions, float[] numbers, int size, bool rounds"
for _kernel, _takes, _fake in (
    (kernels.forward, _FORWARD, _fake_forward),
    (
        kernels.backward,
        "Tensor dy, Tensor x, bool needs_x, bool needs_sums, bool needs_y",
        _fake_backward,
    ),
    (
        kernels.scaled_backward,
        "Tensor dy, Tensor x, Tensor? scales, bool needs_scales",
        _fake_scaled_backward,
    ),
):
    define(f"activation_{_kernel.__name__}", f"{_takes}, {_WHAT}", _launching(_kernel), _fake)
