"""The fused ops, and their patterns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from opfuse_triton.elementwise import passes
from torch import Tensor

from opfuse import Environment, FusedOperation, Fusion, OperationContext, Subclasses
from opfuse.ops import Activation, Bias, ScaledActivation

from . import conditions

Ctxs = list[OperationContext]
Extras = Sequence[Sequence[Tensor | None]]


class _Fused(FusedOperation):
    """The base of all: it has the activation, and the functions that compute it."""

    _call = ""  # one of the passes of opfuse_triton.elementwise
    _run: Any

    def __init__(self, basic_ops: Sequence[Any]) -> None:
        super().__init__(basic_ops)
        # in tuples, since looking up a module's attributes is slow
        self._last = (basic_ops[-1], passes.activation_of(basic_ops[-1]))
        self._has_bias, self._nothing = len(basic_ops) > 1, ((),) * len(basic_ops)

    def planned(self, env: Environment) -> None:
        """See :meth:`opfuse.FusedOperation.planned`."""
        op, _ = self._last
        self.fallback = passes.why_not(op, env)
        found = passes.passes_of(op, env, env.configuration)
        self._run = getattr(found, self._call)

    def configurations(self, env: Environment) -> Sequence[Mapping[str, Any]]:
        """See :meth:`opfuse.FusedOperation.configurations`."""
        op, activation = self._last
        if env.features is None or env.compiling or passes.why_not(op, env):
            return ()
        from opfuse_triton import current_target
        from opfuse_triton.elementwise import formulas, kernels

        formula: Any = formulas.formula_of(activation)
        target = current_target(env.device)
        return kernels.candidates(self._call, formula, env.features, target)


class ForwardActivation(_Fused):
    """[Bias +] activation: the sum is written only if the activation's backward reads it."""

    _call = "forward"

    def fuser_forward(
        self, basic_op_ctxs: Ctxs, input_: Tensor, **unused: Any
    ) -> tuple[Tensor, Any]:
        """See :meth:`opfuse.FusibleOperation.fuser_forward`."""
        ctx, (op, _) = basic_op_ctxs[-1], self._last
        bias = basic_op_ctxs[0].params[0] if self._has_bias else None
        dtype = ctx.dtype or input_.dtype
        saves = ctx.requires_grad and ctx.input_requires_grad and not op.saves_output
        keep = saves and (bias is not None or dtype is not input_.dtype)
        y, kept = self._run(input_, bias, None, dtype, keep)
        if ctx.requires_grad:  # it keeps its argument only if the op saves
            op.operand(ctx, kept if keep else input_ if saves else y)
        return y, self._nothing


class BackwardActivation(_Fused):
    """The backward of [bias +] activation: the gradient, and its sum over rows, in one pass."""

    _call = "backward"
    grad_input = "fresh"

    def fuser_backward(
        self, basic_op_ctxs: Ctxs, grad_output: Tensor, **unused: Any
    ) -> tuple[Tensor | None, Any, Any]:
        """See :meth:`opfuse.FusibleOperation.fuser_backward`."""
        first, ctx, (op, _) = basic_op_ctxs[0], basic_op_ctxs[-1], self._last
        x = op.saved_input(ctx)
        if x is None:
            return None, self._nothing, self._nothing
        needs_sums = self._has_bias and first.param_requires_grad[0]
        # a custom forward may have left none
        numbers = getattr(ctx, "numbers", None) or op.numbers_of()
        needs = first.input_requires_grad, needs_sums
        dx, sums, _ = self._run(numbers, grad_output, x, *needs, owns=ctx.owns_grad_output)
        return dx, ((sums,), ()) if self._has_bias else ((),), self._nothing


class ForwardScaledActivation(_Fused):
    """An activation times a scale per row."""

    _call = "forward"

    def fuser_forward(
        self, basic_op_ctxs: Ctxs, input_: Tensor, *, basic_op_extra_inputs: Extras, **given: Any
    ) -> tuple[Tensor, Any]:
        """See :meth:`opfuse.FusibleOperation.fuser_forward`."""
        ctx: Any = basic_op_ctxs[0]
        op, activation = self._last
        scales: Any = basic_op_extra_inputs[0][0]
        if scales.shape != input_.shape[:-1]:  # the op says what is wrong
            given["basic_op_extra_inputs"] = basic_op_extra_inputs
            return self.run_separately(basic_op_ctxs, input_, **given)
        dtype = ctx.dtype or input_.dtype
        needs_scales = ctx.requires_grad and op.wants_gradient(scales)
        saves = needs_scales or (ctx.requires_grad and ctx.input_requires_grad)
        keep = saves and dtype is not input_.dtype
        y, kept = self._run(input_, None, scales, dtype, keep)
        if ctx.requires_grad:
            ctx.numbers, ctx.scales_requires_grad = activation.numbers_of(), needs_scales
            x = kept if keep else input_
            ctx.save_for_backward(x if saves else None, scales if ctx.input_requires_grad else None)
        return y, self._nothing


class BackwardScaledActivation(_Fused):
    """The backward of an activation times a scale per row, in one pass."""

    _call = "scaled_backward"
    grad_input = "fresh"

    def fuser_backward(
        self, basic_op_ctxs: Ctxs, grad_output: Tensor, **unused: Any
    ) -> tuple[Tensor | None, Any, Any]:
        """See :meth:`opfuse.FusibleOperation.fuser_backward`."""
        ctx: Any = basic_op_ctxs[0]
        x, scales = ctx.saved_tensors
        if x is None:
            return None, self._nothing, ((None,),)
        needs_scales = ctx.scales_requires_grad
        dx, dscales = self._run(ctx.numbers, grad_output, x, scales, needs_scales)
        return dx, self._nothing, ((dscales,),)


_ACT, _SCALED = Subclasses(Activation), Subclasses(ScaledActivation)


def _fusions(
    fused: Any, benefit: Any, scaled: Any, benefit_of_scaled: float, passes: str = ""
) -> list[Fusion]:
    def fusion(pattern: tuple[Any, ...], name: str, of: Any, benefit: Any) -> Fusion:
        when, alone = conditions.runs(f"{name}{passes}"), not passes  # each value by itself
        return Fusion(
            pattern, of, when, benefit, name=name, declares=("batch_invariant",) if alone else ()
        )

    return [
        fusion((Bias, _ACT), "bias+activation", fused, benefit),
        fusion((_ACT,), "activation", fused, benefit),
        fusion((_SCALED,), "scaled activation", scaled, benefit_of_scaled),
    ]


FORWARD = _fusions(ForwardActivation, conditions.saved_forward, ForwardScaledActivation, 2.0)
BACKWARD = _fusions(
    BackwardActivation, conditions.saved_backward, BackwardScaledActivation, 4.0, " backward"
)
