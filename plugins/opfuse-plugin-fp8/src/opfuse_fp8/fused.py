"""The fused ops that end with a cast, and their conditions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any

from torch import Tensor

from opfuse import Environment, FusedOperation, Fusion, Optional, Subclasses
from opfuse.core.quantization import QuantizedTensor
from opfuse.ops import Activation, Bias, Cast

from . import conditions
from .twins import Into

Ctxs = list[Any]
"""Contexts: that of a cast has its quantizer and the usage."""


def activation_of(ops: Sequence[Any]) -> Any:
    """The activation among some ops, or None."""
    return next((op for op in ops if isinstance(op, Activation)), None)


def quantizer_of(ops: Sequence[Any]) -> Any:
    """The quantizer of the cast among some ops."""
    return next(op.quantizer for op in ops if isinstance(op, Cast))


class _Fused(FusedOperation):
    """The base of all: it has the functions that compute it."""

    _call = ""  # of the functions in twins, library and compiled
    _alone = False
    _run: Any

    def __init__(self, basic_ops: Sequence[Any]) -> None:
        super().__init__(basic_ops)
        # in a tuple, since looking up a module's attributes is slow
        self._act = (activation_of(basic_ops),)
        self._nothing = ((),) * len(basic_ops)
        self._has_bias = any(isinstance(op, Bias) for op in basic_ops)

    def planned(self, env: Environment) -> None:
        """See :meth:`opfuse.FusedOperation.planned`."""
        (act,) = self._act
        given = env, quantizer_of(self.basic_ops), act, self._alone
        module, self.fallback = conditions.chosen(*given)
        self._run = getattr(import_module(f".{module}", __package__), self._call)
        if module == "library" and self._call != "cast":
            from .formulas import formula_of

            self._run = partial(self._run, formula_of(act))


class CastAlone(_Fused):
    """A cast: its codes, their transpose and the largest magnitude, in one pass if it can be."""

    _call, _alone = "cast", True
    grad_input = "fresh"

    def fuser_forward(self, basic_op_ctxs: Ctxs, input_: Any, **unused: Any) -> tuple[Any, Any]:
        """See :meth:`opfuse.FusibleOperation.fuser_forward`."""
        cast = basic_op_ctxs[0]
        if isinstance(input_, QuantizedTensor):  # as it is, or refused
            return cast.quantizer(input_, cast.usage), self._nothing
        return self._run(input_, Into(cast.quantizer, cast.usage)), self._nothing

    def fuser_backward(
        self, basic_op_ctxs: Ctxs, grad_output: Any, **unused: Any
    ) -> tuple[Any, Any, Any]:
        """See :meth:`opfuse.FusibleOperation.fuser_backward`."""
        if grad_output is None:
            return None, self._nothing, self._nothing
        return *self.fuser_forward(basic_op_ctxs, grad_output), self._nothing


class ForwardActivationCast(_Fused):
    """[Bias +] activation + cast: the output is written as codes alone, where the scale is known.

    Under ``prefer="memory"``, and for an activation with ``cache_quantized_input``, the codes are
    computed again in the backward, from the activation's input as it was saved and the scale of the
    forward, if the activation gives the same again.
    """

    _call = "activation"

    def planned(self, env: Environment) -> None:
        """See :meth:`opfuse.FusedOperation.planned`."""
        super().planned(env)
        (act,) = self._act
        wanted = act.cache_quantized_input or env.options.get("prefer") == "memory"
        self.recomputes = wanted and act.deterministic and not env.compiling

    def fuser_forward(self, basic_op_ctxs: Ctxs, input_: Tensor, **unused: Any) -> tuple[Any, Any]:
        """See :meth:`opfuse.FusibleOperation.fuser_forward`."""
        *_, ctx, cast = basic_op_ctxs
        (op,) = self._act
        bias = basic_op_ctxs[0].params[0] if self._has_bias else None
        dtype = ctx.dtype or input_.dtype
        saves = ctx.requires_grad and ctx.input_requires_grad
        keep = saves and (bias is not None or dtype is not input_.dtype)
        into = Into(cast.quantizer, cast.usage)
        y, kept = self._run(op, input_, bias, dtype, keep, into)
        if ctx.requires_grad:  # it keeps its argument only if the op saves
            op.operand(ctx, kept if keep else input_ if saves else input_.new_empty(0, dtype=dtype))
        if self.recomputes and basic_op_ctxs[0].may_recompute and saves:
            basic_op_ctxs[0].recomputable_output = y
        return y, self._nothing

    def fuser_recompute(self, basic_op_ctxs: Sequence[Any]) -> Any:
        """See :meth:`opfuse.FusedOperation.fuser_recompute`."""
        *_, ctx, cast = basic_op_ctxs
        (op,) = self._act
        x = op.saved_input(ctx)
        op = op.with_numbers(getattr(ctx, "numbers", None) or op.numbers_of())
        into = Into(cast.quantizer, cast.usage, cast.saved_tensors[0])
        return self._run(op, x, None, x.dtype, False, into)[0]


class BackwardCast(_Fused):
    """Cast + [bias] + [activation], backward: gradient, its sum over rows and cast in one pass."""

    _call = "gradient"
    grad_input = "fresh"

    def fuser_backward(
        self, basic_op_ctxs: Ctxs, grad_output: Any, **given: Any
    ) -> tuple[Any, Any, Any]:
        """See :meth:`opfuse.FusibleOperation.fuser_backward`."""
        cast, first, ctx = basic_op_ctxs[0], basic_op_ctxs[1], basic_op_ctxs[-1]
        (op,), x, numbers = self._act, None, None
        if op is not None:
            x = op.saved_input(ctx)
            # a custom forward may have left none
            numbers = getattr(ctx, "numbers", None) or op.numbers_of()
            if x is None:
                return None, self._nothing, self._nothing
        needs_sums = self._has_bias and first.param_requires_grad[0]
        into = Into(cast.quantizer, cast.usage)
        dx, sums = self._run(op, numbers, grad_output, x, needs_sums, into)
        of_params = [(sums,) if isinstance(op, Bias) else () for op in self.basic_ops]
        return dx, of_params, self._nothing


def _runs(name: str, ops: Sequence[Any], env: Environment) -> bool | str:
    return conditions.runs(quantizer_of(ops), env, activation_of(ops), name)


def _runs_backward(name: str, ops: Sequence[Any], env: Environment) -> bool | str:
    quantizer, act = quantizer_of(ops), activation_of(ops)
    of_squares = getattr(quantizer, "block", (1, 1))[0] > 1
    if of_squares and act is not None and act.gated:
        return (
            "its programs hold one block of 128 x 128 values, and a gated gradient has two halves"
        )
    return _runs(name, ops, env)


# How many tensors as large as the input are not read or written any more, in half precision. A cast
# in PyTorch's operations goes over fp32 values several times
_CAST = 8.0


def _saved_forward(ops: Sequence[Any], env: Environment) -> float:
    """An activation's output is not written and read again; nor is the sum with a bias."""
    return _CAST + 2.0 * (len(ops) - 1) + (2.0 if activation_of(ops).gated else 0.0)


def _saved_backward(ops: Sequence[Any], env: Environment) -> float:
    """The gradient is not written, read for the sum over rows, and read to cast it."""
    act = activation_of(ops)
    return _CAST + 2.0 * (len(ops) - 1) + (3.0 if act is not None and act.gated else 0.0)


def _fusion(
    name: str, pattern: Any, cls: Any, benefit: Any, runs: Callable[..., bool | str] = _runs
) -> Fusion:
    return Fusion(pattern, cls, partial(runs, name), benefit, name=name)


_ACT = Subclasses(Activation)

FORWARD = [
    _fusion("cast", (Cast,), CastAlone, _CAST),
    _fusion("activation+cast", (Optional(Bias), _ACT, Cast), ForwardActivationCast, _saved_forward),
]

BACKWARD = [
    _fusion("cast", (Cast,), CastAlone, _CAST),
    _fusion("cast+bias", (Cast, Bias), BackwardCast, _saved_backward),
    _fusion(
        *("cast+activation", (Cast, Optional(Bias), _ACT), BackwardCast, _saved_backward),
        runs=_runs_backward,
    ),
]
