"""The fused op of a norm and what modulates it, which keeps the norm's input and its statistics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from opfuse_triton.norms import LAYER, RMS, Norm, modulation
from torch import Tensor

from opfuse import Environment, FusedOperation, Fusion, OneOf
from opfuse.ops import LayerNorm, Modulate, RMSNorm
from opfuse.ops.authoring import cast, wide
from opfuse.ops.modulate import summed_like

from . import fused
from .fused import PREDICTED, Ctxs, Extras


class ModulatedNorm(FusedOperation):
    """A LayerNorm or RMSNorm without a weight + Modulate: ``normalized(x) * factor + summand``.

    The context of ``Modulate`` has all that is kept: the input, the statistics of its rows, and the
    scale. One pass of the backward gives the gradients of the input, the scale and the shift.
    """

    grad_input = "fresh"

    def __init__(self, basic_ops: Sequence[Any]) -> None:
        super().__init__(basic_ops)
        # in a tuple, since looking up a module's attributes is slow
        self._of: tuple[Any, Any] = basic_ops[0], basic_ops[1]
        kind = LAYER if isinstance(basic_ops[0], LayerNorm) else RMS
        self._norm, self._kernels = Norm(kind, 1, False), None

    def planned(self, env: Environment) -> None:
        """See :meth:`opfuse.FusedOperation.planned`."""
        self.fallback = fused.why_no_kernel(env.device, env.capability)
        self.recomputes = env.options.get("prefer") == "memory"
        if not self.fallback:
            from opfuse_triton.norms import modulated

            self._kernels: Any = modulated

    def _run(self, x: Tensor, factor: Tensor, *others: Any) -> Any:
        """What computes with these: the kernels, or PyTorch's operations."""
        takes = self._kernels is not None and self._kernels.takes(x, factor, *others)
        return self._kernels if takes else modulation

    def fuser_forward(
        self, basic_op_ctxs: Ctxs, input_: Tensor, *, basic_op_extra_inputs: Extras, **given: Any
    ) -> tuple[Tensor, Any]:
        """See :meth:`opfuse.FusibleOperation.fuser_forward`."""
        norm, ctx = basic_op_ctxs
        if ctx.requires_grad and not norm.requires_grad:  # the output of the norm alone is kept
            return self.run_separately(
                basic_op_ctxs, input_, basic_op_extra_inputs=basic_op_extra_inputs, **given
            )
        (op, modulate), (_, (scale, shift)) = self._of, basic_op_extra_inputs
        assert scale is not None and shift is not None
        modulate.check_extras(input_.shape, scale, shift)
        dtype = _dtype_of(norm, input_, scale, shift)
        factor, summand = _factor(scale, wide(dtype)), cast(shift, wide(dtype))
        modulate.keeps_input(ctx, scale, shift)
        run = self._run(input_, factor, summand.shape)
        y, *statistics = run.forward(
            input_, factor, summand, op.eps, self._norm, dtype, ctx.requires_grad
        )
        y = y.contiguous() if getattr(op, "dense", True) else y
        if ctx.requires_grad:
            again = norm.may_recompute
            ctx.to_save = (input_, *statistics, scale, shift if again else None)
            norm.recomputable_output = y if again else None
        return y, ((), ())

    def fuser_recompute(self, basic_op_ctxs: Sequence[Any]) -> Tensor:
        """See :meth:`opfuse.FusedOperation.fuser_recompute`."""
        norm, ctx = basic_op_ctxs
        x, mean, rstd, scale, shift = ctx.saved_tensors
        factor, summand = _factor(scale, rstd.dtype), cast(shift, rstd.dtype)
        run = self._run(x, factor, summand.shape)
        y: Tensor = run.again(x, factor, summand, mean, rstd, _dtype_of(norm, x, scale, shift))
        return y

    def fuser_backward(
        self, basic_op_ctxs: Ctxs, grad_output: Tensor, **given: Any
    ) -> tuple[Tensor | None, Any, Any]:
        """See :meth:`opfuse.FusibleOperation.fuser_backward`."""
        norm, ctx = basic_op_ctxs
        if not norm.requires_grad:
            return self.run_separately_backward(basic_op_ctxs, grad_output, **given)
        saved: Any = ctx.saved_tensors
        x, mean, rstd, scale, _ = saved
        of_scale, of_shift = ctx.wanted  # type: ignore[attr-defined]
        factor = _factor(scale, rstd.dtype)
        shapes = [None if wanted is None else wanted[0] for wanted in (of_scale, of_shift)]
        dy = grad_output.contiguous()  # autograd gives expanded ones, from a sum
        run = self._run(x, factor, dy, *shapes)
        own = dy, x, factor, mean, rstd, self._norm, *shapes
        dx, dscale, dshift = run.backward(*own, owns=ctx.owns_grad_output)
        grads = summed_like(dscale, of_scale), summed_like(dshift, of_shift)
        return dx, ((), ()), ((), grads)


def _dtype_of(norm: Any, x: Tensor, scale: Tensor, shift: Tensor) -> torch.dtype:
    """The dtype of the output, as of the separate ops."""
    dtype = torch.promote_types(norm.dtype or x.dtype, scale.dtype)
    return torch.promote_types(dtype, shift.dtype)


def _factor(scale: Tensor, dtype: torch.dtype) -> Tensor:
    return cast(scale, dtype) + 1


def _why_not(ops: Sequence[Any], env: Environment) -> str:
    if ops[0].param_names:
        return "the norm has a weight of its own, whose gradient would take sums of its own"
    if len(ops[0].normalized_shape) > 1:
        return "it normalizes along the last dimension, and the norm has several"
    if env.compiling:
        return "torch.compile makes a kernel of a norm and its modulation itself"
    return ""


def _runs(ops: Sequence[Any], env: Environment) -> bool | str:
    refused = _why_not(ops, env) or fused.why_not(ops[:1], env)
    return refused or PREDICTED.why_not("norm+modulate", env) or True


def _keeps_less(ops: Sequence[Any], env: Environment) -> bool | str:
    """Asked where no kernel runs."""
    if not fused.why_no_kernel(env.device, env.capability):
        return "its kernels keep as little, and take less time"
    if not env.requires_grad:
        return "no backward follows, for which something would be kept"
    return _why_not(ops, env) or True


_PATTERN = OneOf(RMSNorm, LayerNorm), Modulate

JOINT = [
    Fusion(_PATTERN, ModulatedNorm, _runs, benefit=16, name="norm+modulate"),
    Fusion(
        _PATTERN,
        ModulatedNorm,
        _keeps_less,
        benefit=1,
        name="norm+modulate, without a kernel",
        declares=("trades_time",),
    ),
]
