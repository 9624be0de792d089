"""The fused ops, and their patterns. Triton is imported only where a plan takes one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from opfuse import Environment, FusedOperation, Fusion, OperationContext, Subclasses
from opfuse.ops import GroupedLinear, ScaledActivation

from . import by_torch, conditions

Ctxs = list[OperationContext]
Extras = Sequence[Sequence[Any]]
MANY_ROWS = 8192
"""Rows for which configurations are ordered."""


class _Grouped(FusedOperation):
    """The base: it has the grouped linear, and makes the groups that the kernels multiply."""

    grad_input = "fresh"
    _kernel = "PRODUCT"
    _linear = 0

    def __init__(self, basic_ops: Sequence[Any]) -> None:
        super().__init__(basic_ops)
        self._ops = tuple(basic_ops)  # looking up a module's attributes is slow

    def planned(self, env: Environment) -> None:
        """See :meth:`opfuse.FusedOperation.planned`."""
        from . import groups

        self._groups = groups
        how = groups.configured(env.configuration)
        self._how = {"config": how, "by_torch": env.configuration == by_torch.CONFIGURATION}

    def configurations(self, env: Environment) -> Sequence[Mapping[str, Any]]:
        """See :meth:`opfuse.FusedOperation.configurations`."""
        if env.device.type == "cpu":
            return ()
        from opfuse_triton import current_target

        from .kernels import library

        groups = self._ops[self._linear].num_groups
        facts = {"x": env.dtype, "rows": MANY_ROWS, "groups": groups}
        kernel = getattr(library, self._kernel)
        offered: list[Any] = kernel.candidates(current_target(env.device), facts)
        codes = self._kernel == "PRODUCT" and by_torch.may_take(env)
        return [*offered[:7], by_torch.CONFIGURATION] if codes else offered


class ForwardGrouped(_Grouped):
    """A grouped linear: one kernel for the products of all groups."""

    def fuser_forward(
        self,
        basic_op_ctxs: Ctxs,
        input_: Tensor,
        *,
        basic_op_extra_inputs: Extras,
        basic_op_kwargs: Sequence[dict[str, Any]] = ({},),
        **unused: Any,
    ) -> tuple[Tensor, Any]:
        """See :meth:`opfuse.FusibleOperation.fuser_forward`."""
        (op,), (ctx,), (extras,), (given,) = (
            self._ops,
            basic_op_ctxs,
            basic_op_extra_inputs,
            basic_op_kwargs or ({},),
        )
        made = self._groups.DeviceGroups, ctx.params, bool(ctx.quantizers)
        maker = self._groups.Maker(*made, **self._how)
        return op.forward_in(maker, ctx, input_, extras, given), ((),)


class BackwardGrouped(_Grouped):
    """The backward of a grouped linear: a kernel for each kind of gradient."""

    adds_to_sum = True

    def fuser_backward(
        self, basic_op_ctxs: Ctxs, grad_output: Tensor, **unused: Any
    ) -> tuple[Tensor | None, Any, Any]:
        """See :meth:`opfuse.FusibleOperation.fuser_backward`."""
        (op,), (ctx,) = self._ops, basic_op_ctxs
        plain = [t for t in ctx.saved_tensors or () if isinstance(t, Tensor)]
        floating = [t for t in plain if t.is_floating_point()]
        made = self._groups.DeviceGroups, floating, bool(ctx.quantizers)
        maker = self._groups.Maker(*made, **self._how)
        dx, grads, of_extras = op.backward_in(maker, ctx, grad_output)
        return dx, (grads,), (of_extras,)


class _WithActivation(_Grouped):
    """The base of those with an activation."""

    _kernel = "ACTIVATED"

    def planned(self, env: Environment) -> None:
        """See :meth:`opfuse.FusedOperation.planned`."""
        super().planned(env)
        from opfuse_triton import functions_of

        activation = self._ops[1 - self._linear].activation
        self._functions: Any = functions_of(activation)
        self._interleaved = getattr(activation, "glu_interleave_size", None) or 0

    def _activation(self, numbers: Any, scales: Tensor) -> Any:
        given = self._functions, self._functions.numbers(numbers), self._interleaved
        return self._groups.library.Activation(*given, scales.reshape(-1).contiguous())


class ForwardActivated(_WithActivation):
    """A grouped linear and a scaled activation: the product ends with the activation."""

    def fuser_forward(
        self,
        basic_op_ctxs: Ctxs,
        input_: Tensor,
        *,
        basic_op_extra_inputs: Extras,
        basic_op_kwargs: Sequence[dict[str, Any]] | None = None,
        **given: Any,
    ) -> tuple[Tensor, Any]:
        """See :meth:`opfuse.FusibleOperation.fuser_forward`."""
        linear, scaled = self._ops
        of_linear, ctx = basic_op_ctxs
        extras, (scales,) = basic_op_extra_inputs
        if any(basic_op_kwargs or ()) or scales.shape != input_.shape[:-1]:
            return self.run_separately(  # the ops write where they were told, or say what is wrong
                *(basic_op_ctxs, input_),
                basic_op_extra_inputs=basic_op_extra_inputs,
                basic_op_kwargs=basic_op_kwargs,
                **given,
            )
        keep = scaled.keeps_input(ctx, scales)
        activation = self._activation(scaled.numbers_of(), scales)
        maker = self._groups.Maker(
            *(self._groups.Activated, (*of_linear.params, scales)),
            **{"activation": activation, "keep": keep, **self._how},
        )
        hidden = linear.forward_in(maker, of_linear, input_, extras)
        if maker.made is None:
            y, _ = scaled.fuser_forward([ctx], hidden, basic_op_extra_inputs=[(scales,)])
            return y, ((), ())
        if keep:
            ctx.to_save = (hidden, *ctx.to_save[1:])
        return maker.made.result, ((), ())


class BackwardActivated(_WithActivation):
    """The backward of a scaled activation and a grouped linear.

    The product that gives the gradient of the activation's output ends with that of its input.
    """

    adds_to_sum = True
    _linear = 1
    _kernel = "GRADIENTS"

    def fuser_backward(
        self, basic_op_ctxs: Ctxs, grad_output: Tensor, **given: Any
    ) -> tuple[Tensor | None, Any, Any]:
        """See :meth:`opfuse.FusibleOperation.fuser_backward`."""
        (_, linear), (ctx, of_linear) = self._ops, basic_op_ctxs
        hidden, scales = ctx.saved_tensors if ctx.requires_grad else (None, None)
        buffer = getattr(of_linear, "grad_input_buffer", None)
        if hidden is None or scales is None or buffer is not None:
            return self.run_separately_backward(basic_op_ctxs, grad_output, **given)
        maker = self._groups.Maker(
            *(self._groups.Gradients, (hidden, scales)),
            activation=self._activation(ctx.numbers, scales),
            **{"hidden": hidden, "with_scales": ctx.scales_requires_grad, **self._how},
        )
        dx, grads, of_extras = linear.backward_in(maker, of_linear, grad_output)
        if maker.made is None:
            dx, _, (of_scales,) = self._ops[0].fuser_backward(
                [ctx], dx, basic_op_grad_extra_outputs=[()]
            )
        else:
            found = maker.made.of_scales
            of_scales = (None if found is None else found.to(scales.dtype),)
        return dx, ((), grads), (of_scales, of_extras)


_SCALED = Subclasses(ScaledActivation)
_PRODUCT, _ACTIVATION = 1, 12
"""Passes over memory that are saved: a product's copies, and those of a scaled activation."""

FORWARD = [
    Fusion(
        (GroupedLinear,), ForwardGrouped, conditions.alone, benefit=_PRODUCT, name="grouped linear"
    ),
    Fusion(
        (GroupedLinear, _SCALED),
        ForwardActivated,
        conditions.activated,
        benefit=_PRODUCT + _ACTIVATION,
        name="grouped linear+activation",
    ),
]

BACKWARD = [
    Fusion(
        (GroupedLinear,),
        BackwardGrouped,
        conditions.backward_alone,
        benefit=_PRODUCT,
        name="grouped gradients",
    ),
    Fusion(
        (_SCALED, GroupedLinear),
        BackwardActivated,
        conditions.gradients,
        benefit=_PRODUCT + _ACTIVATION,
        name="activation+grouped gradients",
    ),
]
