"""A plugin written for the contract `opfuse.v1` as version 0.1 of opfuse documents it.

It uses every hook that a fusion or a recipe needs, with the arguments it had then. It is not
changed any more: what breaks it breaks the plugins of others.
"""

import dataclasses

import torch
from torch.nn import functional as F

import opfuse
from opfuse.core.quantization.formats import ScaledTensor
from opfuse.ops import BasicLinear, Bias, ConstantScale, ReLU


class FrozenLinearBias(opfuse.FusedOperation):
    """Forward: the bias goes into the matrix product."""

    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        linear, bias = basic_op_ctxs
        x, weight = BasicLinear.operands(linear, input_)
        return F.linear(x, weight, bias.params[0].to(x.dtype)), [(), ()]


class FrozenBiasReLU(opfuse.FusedOperation):
    """Forward: leaves the operand that the backward of ReLU reads."""

    def fuser_forward(
        self,
        basic_op_ctxs,
        input_,
        *,
        basic_op_extra_inputs,
        prev_op_grad_output_quantizer,
        next_op_input_quantizer,
        basic_op_kwargs,
    ):
        bias, relu = basic_op_ctxs
        hidden = self.basic_ops[1].operand(relu, input_ + bias.params[0].to(input_.dtype))
        return hidden.relu(), [(), ()]


class FrozenBiasReLUGrad(opfuse.FusedOperation):
    """Backward: reads what the ops, or any forward fusion, left."""

    def fuser_backward(self, basic_op_ctxs, grad_output, *, basic_op_grad_extra_outputs):
        bias, relu = basic_op_ctxs
        (x,) = relu.saved_tensors
        dx = grad_output.masked_fill(x <= 0, 0)
        rows = dx.reshape(-1, dx.shape[-1])
        return dx, [(rows.sum(0) if bias.param_requires_grad[0] else None,), ()], [(), ()]


class FrozenTwiceScaled(opfuse.FusedOperation):
    """Joint: one multiplication instead of two, in each pass, and a number kept between them."""

    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        first, _ = basic_op_ctxs
        first.twice = self.basic_ops[0].scale * self.basic_ops[1].scale
        return input_ * first.twice, [(), ()]

    def fuser_backward(self, basic_op_ctxs, grad_output, **unused):
        return grad_output * basic_op_ctxs[0].twice, [(), ()], [(), ()]


def applies(ops, env):
    """A condition: True, or the reason in words."""
    if env.recipe is not None:
        return "it does not quantize"
    if env.options.get("frozen_v1.off"):
        return "frozen_v1.off turns it off"
    return True if env.dtype is not torch.float16 else "it does not take float16"


@dataclasses.dataclass(frozen=True)
class FrozenInt8(opfuse.Recipe):
    """One scale for each tensor, from its own largest magnitude."""

    levels: int = 127


class FrozenInt8Quantizer(opfuse.Quantizer):
    """Casts to int8, in one documented format."""

    def __init__(self, levels):
        self.levels = levels

    def quantize(self, tensor, usage, out=None):
        x = tensor.detach().float().contiguous()
        largest = x.abs().amax() if x.numel() else x.new_zeros(())
        scale = torch.where(largest == 0, 1.0, largest / self.levels).reshape(1)
        codes = (x / scale).nan_to_num().round().clamp(-self.levels, self.levels).to(torch.int8)
        rowwise = codes if usage.rowwise else None
        columnwise = codes.view(-1, codes.shape[-1]).t().contiguous() if usage.columnwise else None
        made = ScaledTensor(tensor.shape, tensor.dtype, self, rowwise, columnwise, scale)
        if out is None:
            return made
        for there, new in zip(out.tensors(), made.tensors(), strict=True):
            if there is not None:
                there.copy_(new)
        return out


@opfuse.hookimpl
def opfuse_forward_fusions():
    return [
        opfuse.Fusion((BasicLinear, Bias), FrozenLinearBias, when=applies),
        opfuse.Fusion(
            (Bias, ReLU), FrozenBiasReLU, when=applies, benefit=9, name="FrozenBiasReLU", priority=1
        ),
    ]


@opfuse.hookimpl
def opfuse_backward_fusions():
    return [opfuse.Fusion((Bias, ReLU), FrozenBiasReLUGrad, when=applies)]


@opfuse.hookimpl
def opfuse_joint_fusions():
    return [opfuse.Fusion((ConstantScale, ConstantScale), FrozenTwiceScaled)]


@opfuse.hookimpl
def opfuse_recipes():
    return {"frozen-int8": FrozenInt8}


@opfuse.hookimpl
def opfuse_options():
    return {"frozen_v1.off": False}


@opfuse.hookimpl
def opfuse_quantizer(recipe, role, env):
    return FrozenInt8Quantizer(recipe.levels) if isinstance(recipe, FrozenInt8) else None
