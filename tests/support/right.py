"""Fused ops as they should be, with methods of which a wrong one overrides one."""

from __future__ import annotations

import torch
from torch.nn import functional as F

import opfuse
from opfuse.ops import BasicLinear

HALF = torch.float16, torch.bfloat16


def wide(x):
    """Half precision as fp32."""
    return x.float() if x.dtype in HALF else x


def flat(x):
    """A tensor as rows."""
    return x.reshape(-1, x.shape[-1])


class Forward(opfuse.FusedOperation):
    """Linear + bias."""

    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        x, weight = BasicLinear.operands(basic_op_ctxs[0], input_)
        y = self.product(x, weight, basic_op_ctxs[1].params[0].to(x.dtype))
        return self.spoil(y, x), [(), ()]

    def product(self, x, weight, bias):
        return F.linear(x, weight, bias)

    def spoil(self, y, x):
        return y


class Backward(opfuse.FusedOperation):
    """The backward of linear + bias."""

    grad_input = "fresh"

    def fuser_backward(self, basic_op_ctxs, grad_output, **unused):
        linear, bias = basic_op_ctxs
        x, weight = self.saved_operands(linear)
        dy = grad_output if linear.dtype is None else grad_output.to(linear.dtype)
        dw = None if x is None else self.grad_weight(flat(dy), flat(x))
        db = self.grad_bias(dy) if bias.param_requires_grad[0] else None
        dx = None if weight is None else self.grad_input_of(dy, weight)
        return dx, [(dw,), (db,)], [(), ()]

    def saved_operands(self, ctx):
        return BasicLinear.saved_operands(ctx)

    def grad_weight(self, dy, x):
        return dy.t() @ x

    def grad_bias(self, dy):
        return flat(dy).sum(0)

    def grad_input_of(self, dy, weight):
        return dy @ weight


class LinearGrad(opfuse.FusedOperation):
    """The backward of a linear without a bias."""

    def fuser_backward(self, basic_op_ctxs, grad_output, **unused):
        (ctx,) = basic_op_ctxs
        x, weight = BasicLinear.saved_operands(ctx)
        dy = grad_output if ctx.dtype is None else grad_output.to(ctx.dtype)
        dw = None if x is None else self.grad_weight(dy, x, weight)
        return None if weight is None else dy @ weight, [(dw,)], [()]

    def grad_weight(self, dy, x, weight):
        return flat(dy).t() @ flat(x)


class BiasGrad(opfuse.FusedOperation):
    """The backward of a bias."""

    def fuser_backward(self, basic_op_ctxs, grad_output, **unused):
        (ctx,) = basic_op_ctxs
        db = self.total(flat(grad_output)) if ctx.param_requires_grad[0] else None
        return self.passed(grad_output), [(db,)], [()]

    def total(self, dy):
        return dy.sum(0)

    def passed(self, dy):
        return dy


class Pointwise(opfuse.FusedOperation):
    """An activation."""

    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        (act,) = self.basic_ops
        return self.spoil(self.value(act.operand(basic_op_ctxs[0], input_))), [()]

    def value(self, x):
        return self.basic_ops[0].forward_value(x)

    def spoil(self, y):
        return y


class Recomputing(opfuse.FusedOperation):
    """An activation that lets go of its output."""

    recomputes = True

    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        (act,), (ctx,) = self.basic_ops, basic_op_ctxs
        y = act.forward_value(act.operand(ctx, input_))
        if ctx.may_recompute and ctx.input_requires_grad:
            ctx.recomputable_output = y
        return y, [()]

    def fuser_recompute(self, basic_op_ctxs):
        return self.again(*basic_op_ctxs[0].saved_tensors)

    def again(self, x):
        return self.basic_ops[0].forward_value(x)


class BiasActivationGrad(opfuse.FusedOperation):
    """The backward of bias + activation."""

    def fuser_backward(self, basic_op_ctxs, grad_output, **unused):
        dx = self.basic_ops[1].backward_value(self.grad(grad_output), self.kept(*basic_op_ctxs))
        db = self.total(flat(dx)) if basic_op_ctxs[0].param_requires_grad[0] else None
        return dx, [(db,), ()], [(), ()]

    def kept(self, bias, act):
        return act.saved_tensors[0]

    def grad(self, grad_output):
        return grad_output

    def total(self, dx):
        return dx.sum(0)


class BiasGelu(BiasActivationGrad):
    """Bias + GELU in both passes, but for where it keeps the bias's output."""

    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        hidden = input_ + basic_op_ctxs[0].params[0].to(input_.dtype)
        hidden = hidden.to(basic_op_ctxs[1].dtype or hidden.dtype)
        self.keep(*basic_op_ctxs, hidden)
        return F.gelu(hidden, approximate="tanh"), [(), ()]


class RMSNormForward(opfuse.FusedOperation):
    """An RMSNorm."""

    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        (ctx,), (norm,), x = basic_op_ctxs, self.basic_ops, wide(input_)
        rstd = self.rstd(self.mean_square(x, input_), norm.eps)
        if ctx.requires_grad:
            ctx.save_for_backward(input_, ctx.params[0] if ctx.input_requires_grad else None, rstd)
            ctx.zero_centered_gamma = norm.zero_centered_gamma
        scale = ctx.params[0].to(x.dtype) + norm.zero_centered_gamma
        return (x * rstd * scale).to(ctx.dtype or input_.dtype), [()]

    def mean_square(self, x, input_):
        return x.square().mean(self.basic_ops[0]._dims, keepdim=True)

    def rstd(self, square, eps):
        return torch.rsqrt(square + eps)


class LayerNormForward(opfuse.FusedOperation):
    """A LayerNorm."""

    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        (ctx,), (norm,), x = basic_op_ctxs, self.basic_ops, wide(input_)
        (weight, bias), dims = ctx.params, norm._dims
        mean = x.mean(dims, keepdim=True)
        rstd = torch.rsqrt(self.variance(x, mean, dims) + norm.eps)
        if ctx.requires_grad:
            needed = ctx.input_requires_grad or ctx.param_requires_grad[0]
            saved = input_, weight if ctx.input_requires_grad else None, mean, rstd
            ctx.save_for_backward(*(saved if needed else (None,) * 4))
            ctx.zero_centered_gamma = norm.zero_centered_gamma
        scale = weight.to(x.dtype) + norm.zero_centered_gamma
        return ((x - mean) * rstd * scale + bias.to(x.dtype)).to(ctx.dtype or input_.dtype), [()]

    def variance(self, x, mean, dims):
        return (x - mean).square().mean(dims, keepdim=True)


class L2Forward(opfuse.FusedOperation):
    """An L2Normalization."""

    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        (ctx,), x = basic_op_ctxs, wide(input_)
        rstd = self.rstd(x)
        if ctx.requires_grad:
            saved = (input_, self.stored(rstd)) if ctx.input_requires_grad else (None, None)
            ctx.save_for_backward(*saved)
        return (x * rstd).to(ctx.dtype or input_.dtype), [()]

    def rstd(self, x):
        return torch.rsqrt(x.square().sum(-1, keepdim=True) + self.basic_ops[0].eps)

    def stored(self, rstd):
        return rstd
