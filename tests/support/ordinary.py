"""Six sound fusions with conditions as authors write them, which the conformance suite must find nothing wrong with."""

from __future__ import annotations

import torch
from faulty_casts import GeluCast
from right import Forward, Pointwise
from torch.nn import functional as F

import opfuse
from opfuse.ops import GELU, BasicLinear, Bias, Cast, LayerNorm, ReLU, SwiGLU


class NormOnce(opfuse.FusedOperation):
    """Both passes of a norm, from what it normalized."""

    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        (norm,), (ctx,) = self.basic_ops, basic_op_ctxs
        dtype = ctx.dtype or input_.dtype
        wide = torch.promote_types(dtype, torch.float32)
        x = input_.to(dtype).to(wide)
        centred = x - x.mean(-1, keepdim=True)
        rstd = (centred.square().mean(-1, keepdim=True) + norm.eps).rsqrt()
        if ctx.requires_grad:
            ctx.save_for_backward(input_, rstd)
            ctx.wide = wide
        return (centred * rstd).to(dtype), [()]

    def fuser_backward(self, basic_op_ctxs, grad_output, **unused):
        (ctx,) = basic_op_ctxs
        (x, rstd), dy = ctx.saved_tensors, grad_output.to(ctx.wide)
        x = x.to(ctx.wide)
        normed = (x - x.mean(-1, keepdim=True)) * rstd
        dx = dy - dy.mean(-1, keepdim=True) - normed * (dy * normed).mean(-1, keepdim=True)
        return (dx * rstd).to(grad_output.dtype), [(None,) * len(ctx.param_requires_grad)], [()]


class BiasReLU(opfuse.FusedOperation):
    """The sum, rounded once, and its sign: a bias in half precision would be another one."""

    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        bias, relu = basic_op_ctxs
        total = (input_ + bias.params[0]).to(input_.dtype)
        x = self.basic_ops[1].operand(relu, total)
        return x.clamp(min=0), [(), ()]


class GeluGrad(opfuse.FusedOperation):
    """The backward of the activation, as PyTorch has it."""

    def fuser_backward(self, basic_op_ctxs, grad_output, **unused):
        x = self.basic_ops[0].saved_input(basic_op_ctxs[0])
        form = self.basic_ops[0].approximate
        return (
            torch.ops.aten.gelu_backward(grad_output.to(x.dtype), x, approximate=form),
            [()],
            [()],
        )


class Gated(Pointwise):
    """Gate and value in one expression."""

    def value(self, x):
        gate, value = x.chunk(2, dim=-1)
        return F.silu(gate) * value


def casts_by_tensor(ops, env):
    if type(ops[1].quantizer).__name__ == "_PerBlock":
        return "it knows no blocks"
    return True


def without_weight(ops, env):
    if ops[0].weight is not None:
        return "it has no place for a weight"
    if env.recipe is not None:
        return "what it saves is not quantized"
    return True


def keeps_its_input(ops, env):
    if ops[0].cache_quantized_input:
        return "it needs its input as it is"
    if env.dtype is torch.float16:
        return "it has no fp16"
    return True


def where_it_was_measured(ops, env):
    if env.device.type not in ("cpu", "cuda"):
        return f"it was never measured on {env.device.type}"
    if env.capability is not None and env.capability < (8, 0):
        return "it needs an Ampere GPU or a later one"
    if env.recipe is not None:
        return "it does not quantize"
    return True


def whole_vectors(ops, env):
    if env.features is not None and env.features % 4:
        return "it loads four features at a time"
    if env.deterministic:
        return "it adds in any order"
    return True


def not_interleaved(ops, env):
    if ops[0].glu_interleave_size is not None:
        return "it takes gate and value apart, not interleaved"
    if env.features is None:
        return "it has a kernel for each number of features"
    return True if env.dtype.itemsize <= 4 else "it has no fp64"


FUSIONS = {
    "quantizer": ("forward", opfuse.Fusion((GELU, Cast), GeluCast, casts_by_tensor)),
    "affine": ("joint", opfuse.Fusion((LayerNorm,), NormOnce, without_weight)),
    "cached": ("backward", opfuse.Fusion((GELU,), GeluGrad, keeps_its_input)),
    "device": ("forward", opfuse.Fusion((BasicLinear, Bias), Forward, where_it_was_measured)),
    "features": ("forward", opfuse.Fusion((Bias, ReLU), BiasReLU, whole_vectors)),
    "interleaved": ("forward", opfuse.Fusion((SwiGLU,), Gated, not_interleaved)),
}
