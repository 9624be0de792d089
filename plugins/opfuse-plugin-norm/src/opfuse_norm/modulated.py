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
    """LayerNorm or RMSNorm + Modulate: ``normalized(x) * factor + summand`` in one pass.

    With the norm's own weight and bias, the factor is ``weight (1 + scale)`` and the summand ``bias
    (1 + scale) + shift``. These are small as long as many rows share a scale. One pass of the
    backward gives their gradients, from which those of the four follow. The context of
    ``Modulate`` has all that is kept: the input, the statistics of its rows, and what is small.
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
        (op, modulate), (_, extras) = self._of, basic_op_extra_inputs
        if any([param.shape != op.normalized_shape for param in norm.params]):
            return self.run_separately(  # the op says what is wrong
                basic_op_ctxs, input_, basic_op_extra_inputs=basic_op_extra_inputs, **given
            )
        scale, shift = extras
        modulate.check_extras(input_.shape, scale, shift)
        dtype = _dtype_of(norm, input_, scale, shift)
        weight, bias = _own(op, norm.params, wide(dtype))
        factor, summand = _combined(scale, shift, weight, bias, wide(dtype))
        wants_scale = modulate.keeps_input(ctx, scale, shift)
        save = ctx.requires_grad and (norm.requires_grad or wants_scale)
        run = self._run(input_, factor, summand.shape)
        y, *statistics = run.forward(input_, factor, summand, op.eps, self._norm, dtype, save)
        y = y.contiguous() if getattr(op, "dense", True) else y
        if ctx.requires_grad:
            again = save and norm.may_recompute
            small = scale, shift if again else None, weight, bias
            ctx.to_save = input_ if save else None, *statistics, *small
            norm.recomputable_output = y if again else None
        return y, ((), ())

    def fuser_recompute(self, basic_op_ctxs: Sequence[Any]) -> Tensor:
        """See :meth:`opfuse.FusedOperation.fuser_recompute`."""
        norm, ctx = basic_op_ctxs
        x, mean, rstd, scale, shift, weight, bias = ctx.saved_tensors
        factor, summand = _combined(scale, shift, weight, bias, rstd.dtype)
        run = self._run(x, factor, summand.shape)
        dtype = _dtype_of(norm, x, scale, shift)
        return run.again(x, factor, summand, mean, rstd, dtype)  # type: ignore[no-any-return]

    def fuser_backward(
        self, basic_op_ctxs: Ctxs, grad_output: Tensor, **_: Any
    ) -> tuple[Tensor | None, Any, Any]:
        """See :meth:`opfuse.FusibleOperation.fuser_backward`."""
        norm, ctx = basic_op_ctxs
        saved: Any = ctx.saved_tensors
        x, mean, rstd, scale, _, weight, bias = saved
        of_scale, of_shift = ctx.wanted  # type: ignore[attr-defined]
        of_norm = [norm.requires_grad and each for each in norm.param_requires_grad]
        if x is None:
            grads = (None,) * len(of_norm), ()
            return None, grads, ((), (None, summed_like(grad_output, of_shift)))
        of_weight, of_bias = (*of_norm, False, False)[:2]
        factor, _ = _combined(scale, None, weight, None, rstd.dtype)
        shapes: list[Any] = [None, None]
        if of_weight or of_scale is not None:
            shapes[0] = factor.shape
        if bias is not None and (of_bias or of_scale is not None):
            shapes[1] = torch.broadcast_shapes(bias.shape, scale.shape)
        if of_shift is not None:
            shapes[1] = torch.broadcast_shapes(shapes[1] or (), of_shift[0])
        needs_x = norm.requires_grad and norm.input_requires_grad
        dy = grad_output.contiguous()  # autograd gives expanded ones, from a sum
        run = self._run(x, factor, dy, *shapes)
        given = dy, x, factor, mean, rstd, self._norm, needs_x, *shapes
        dx, dfactor, dsummand = run.backward(*given, owns=ctx.owns_grad_output)
        dw = db = dscale = None
        if of_weight:
            dw = _product(dfactor, scale).sum_to_size(weight.shape)
        if of_bias:
            db = _product(dsummand, scale).sum_to_size(bias.shape)
        if of_scale is not None:
            dscale = dfactor if weight is None else dfactor * weight
            if bias is not None:  # the two may have been broadcast to different shapes
                dscale = dscale.sum_to_size(of_scale[0])
                dscale = dscale + (dsummand * bias).sum_to_size(of_scale[0])
            dscale = summed_like(dscale, of_scale)
        of_extras = (), (dscale, summed_like(dsummand, of_shift))
        return dx, ((dw, db)[: len(of_norm)], ()), of_extras


def _dtype_of(norm: Any, x: Tensor, scale: Tensor, shift: Tensor) -> torch.dtype:
    """The dtype of the output, as of the separate ops."""
    dtype = torch.promote_types(norm.dtype or x.dtype, scale.dtype)
    return torch.promote_types(dtype, shift.dtype)


def _own(op: Any, params: Sequence[Tensor], dtype: torch.dtype) -> Sequence[Tensor | None]:
    """The factor and the summand of a norm without the modulation; None: it has none."""
    weight, bias = (*[cast(param, dtype) for param in params], None, None)[:2]
    return weight + 1 if weight is not None and op.zero_centered_gamma else weight, bias


def _combined(
    scale: Tensor,
    shift: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Any]:
    """The factor of the normalized values, and the summand, if there is a shift."""
    factor = cast(scale, dtype) + 1
    summand = None if shift is None else cast(shift, dtype)
    if summand is not None and bias is not None:
        summand = bias * factor + summand
    return factor if weight is None else factor * weight, summand


def _product(grad: Tensor, scale: Tensor) -> Tensor:
    """A gradient times ``1 + scale``."""
    return grad * (cast(scale, grad.dtype) + 1)


def _why_not(ops: Sequence[Any], env: Environment) -> str:
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
