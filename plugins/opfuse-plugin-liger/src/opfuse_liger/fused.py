"""The fused ops, and their conditions.

Each leaves and reads what the ops declare. If a kernel does not take a call, the ops run one after
the other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from opfuse import Environment, FusedOperation, Fusion, Optional
from opfuse.ops import GEGLU, AddExtraInput, LayerNorm, MakeExtraOutput, RMSNorm, SwiGLU

from . import kernels


class LigerNorm(FusedOperation):
    """RMSNorm or LayerNorm, and before it a residual add, with or without an extra output."""

    def fuser_forward(self, basic_op_ctxs: Any, input_: Tensor, **given: Any) -> tuple[Tensor, Any]:
        """See :meth:`opfuse.FusibleOperation.fuser_forward`."""
        ctx, norm, count = basic_op_ctxs[-1], self.basic_ops[-1], len(basic_op_ctxs)
        extras = given["basic_op_extra_inputs"][0] if count > 1 else ()
        if (
            any(getattr(op, "in_place", False) for op in self.basic_ops)
            or ctx.dtype is not None
            or (isinstance(norm, LayerNorm) and norm.zero_centered_gamma)
            or (extras and not ctx.params)  # Liger's has a weight
            or not kernels.takes(input_, *extras, params=ctx.params)
        ):
            return self.run_separately(basic_op_ctxs, input_, **given)
        x, weight, offset = input_, next(iter(ctx.params), None), float(norm.zero_centered_gamma)
        if isinstance(norm, LayerNorm):
            y, *statistics = kernels.layer_norm(x, *ctx.params, norm.eps)
        elif extras:
            self.basic_ops[0].check_extra(basic_op_ctxs[0], extras[0], x.shape)
            y, x, *statistics = kernels.add_rms_norm(x, extras[0], weight, norm.eps, offset)
        else:
            y, *statistics = kernels.rms_norm(x, weight, norm.eps, offset)
        if ctx.requires_grad:
            ctx.zero_centered_gamma = norm.zero_centered_gamma
            with_weight = weight is not None and (
                isinstance(norm, RMSNorm) or ctx.param_requires_grad[0]
            )
            kept = (x, weight if ctx.input_requires_grad else None, *statistics)
            needed = ctx.input_requires_grad or with_weight
            ctx.save_for_backward(*(kept if needed else (None,) * len(kept)))
        # not the tensor that is saved, as with the op
        return y, [(x.view_as(x),) * op.num_extra_outputs for op in self.basic_ops]


class LigerGrad(FusedOperation):
    """The backward of RMSNorm or LayerNorm, and of an extra output before it."""

    grad_input = "fresh"

    def fuser_backward(self, basic_op_ctxs: Any, grad_output: Tensor, **given: Any) -> Any:
        """See :meth:`opfuse.FusibleOperation.fuser_backward`."""
        ctx, norm = basic_op_ctxs[-1], self.basic_ops[-1]
        x, weight, *statistics = ctx.saved_tensors
        extras = given["basic_op_grad_extra_outputs"][0] if len(basic_op_ctxs) > 1 else ()
        affine = bool(ctx.param_requires_grad)
        if not (
            ctx.input_requires_grad
            and not (isinstance(norm, LayerNorm) and ctx.zero_centered_gamma)
            and (affine or not extras)
            and (weight is not None) == affine
            and kernels.takes(grad_output, x, *extras, params=(weight,) * affine)
        ):
            return self.run_separately_backward(basic_op_ctxs, grad_output, **given)
        if isinstance(norm, LayerNorm):
            given = x, weight, *statistics, ctx.param_requires_grad
            dx, *grads = kernels.layer_norm_grads(grad_output, *given)
        else:
            given = x, weight, *statistics, float(ctx.zero_centered_gamma), ctx.param_requires_grad
            dx, *grads = kernels.rms_norm_grads(grad_output, *extras, *given)
        of_params = [()] * (len(basic_op_ctxs) - 1) + [tuple(grads) if affine else ()]
        return dx, of_params, [(None,) * op.num_extra_inputs for op in self.basic_ops]


class ForwardGLU(FusedOperation):
    """SwiGLU or GEGLU."""

    def fuser_forward(self, basic_op_ctxs: Any, input_: Tensor, **given: Any) -> tuple[Tensor, Any]:
        """See :meth:`opfuse.FusibleOperation.fuser_forward`."""
        (ctx,), op = basic_op_ctxs, self.basic_ops[0]
        if input_.ndim < 1 or input_.shape[-1] % 2 or not kernels.takes(input_):
            return self.run_separately(basic_op_ctxs, input_, **given)
        x = op.operand(ctx, input_)
        return (kernels.swiglu if isinstance(op, SwiGLU) else kernels.geglu)(x), [()]


class BackwardGLU(FusedOperation):
    """The backward of SwiGLU or GEGLU."""

    grad_input = "fresh"

    def fuser_backward(self, basic_op_ctxs: Any, grad_output: Tensor, **given: Any) -> Any:
        """See :meth:`opfuse.FusibleOperation.fuser_backward`."""
        (ctx,), op = basic_op_ctxs, self.basic_ops[0]
        x = op.saved_input(ctx)
        if x is None or not kernels.takes(grad_output, x):
            return self.run_separately_backward(basic_op_ctxs, grad_output, **given)
        grads = kernels.swiglu_grads if isinstance(op, SwiGLU) else kernels.geglu_grads
        return grads(grad_output, x), [()], [()]


def _can(ops: Any, env: Environment) -> bool | str:
    if why := kernels.unavailable(env.device):
        return why
    if env.compiling:
        return "Liger's kernels are not registered for torch.compile"
    if env.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"Liger's kernels do not compute in {env.dtype}"
    return True


def _rms_norm_can(ops: Any, env: Environment) -> bool | str:
    if len(ops[-1].normalized_shape) > 1:
        return "Liger's kernels normalize one dimension"
    return _can(ops, env)


def _layer_norm_can(ops: Any, env: Environment) -> bool | str:
    (norm,) = ops
    if len(norm.param_names) < 2 or norm.zero_centered_gamma:
        return "Liger's LayerNorm has a weight, not centered at zero, and a bias"
    return _rms_norm_can(ops, env)


def _glu_can(ops: Any, env: Environment) -> bool | str:
    if ops[0].glu_interleave_size:
        return "Liger's kernels take halves that are contiguous"
    if isinstance(ops[0], GEGLU) and ops[0].approximate != "tanh":
        return "Liger's GEGLU has the tanh form of GELU"
    if isinstance(ops[0], GEGLU) and env.dtype is torch.float16:
        return "Liger's gradient of GEGLU multiplies in fp16, where it may overflow"
    return _can(ops, env)


_ALONE = (
    (RMSNorm, "rmsnorm", _rms_norm_can, LigerNorm, LigerGrad),
    (LayerNorm, "layernorm", _layer_norm_can, LigerNorm, LigerGrad),
    (SwiGLU, "swiglu", _glu_can, ForwardGLU, BackwardGLU),
    (GEGLU, "geglu", _glu_can, ForwardGLU, BackwardGLU),
)
_ADD = AddExtraInput, Optional(MakeExtraOutput), RMSNorm

FORWARD = [Fusion((cls,), to, can, 1, name=name) for cls, name, can, to, _ in _ALONE]
FORWARD.append(Fusion(_ADD, LigerNorm, _rms_norm_can, name="add+rmsnorm"))
BACKWARD = [Fusion((cls,), to, can, 1, name=name) for cls, name, can, _, to in _ALONE]
BACKWARD.append(Fusion((MakeExtraOutput, RMSNorm), LigerGrad, _rms_norm_can, name="add+rmsnorm"))
