"""Fusions whose pattern has a cast, or which cast inside: some as they should be, the others wrong in one way."""

import torch
from chains import Joint
from faulty import faulty
from torch.nn import functional as F

import opfuse
from opfuse.core.quantization import COLUMNWISE, ROWWISE
from opfuse.core.quantization.formats import ScaledTensor
from opfuse.ops import GELU, BasicLinear, Bias, Cast, RMSNorm

# As they should be


class GeluCast(opfuse.FusedOperation):
    """The forward of an activation, cast."""

    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        act, (ctx, cast) = self.basic_ops[0], basic_op_ctxs
        hidden = act.operand(ctx, input_)
        return self.cast(cast, act.forward_value(hidden), hidden), [(), ()]

    def cast(self, ctx, y, hidden):
        return ctx.quantizer(y, ctx.usage)


class NormCast(opfuse.FusedOperation):
    """The forward of a norm, cast."""

    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        y = self.basic_ops[0].op_forward(basic_op_ctxs[0], input_)
        cast = basic_op_ctxs[1]
        return cast.quantizer(y, cast.usage), [(), ()]


class RecomputingGeluCast(GeluCast):
    """The same, computed and cast again in the backward."""

    recomputes = True

    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        y, extras = super().fuser_forward(basic_op_ctxs, input_)
        if basic_op_ctxs[0].may_recompute and basic_op_ctxs[0].input_requires_grad:
            basic_op_ctxs[0].recomputable_output = y
        return y, extras

    def fuser_recompute(self, basic_op_ctxs):
        act, cast = basic_op_ctxs
        (x,), (scales,) = act.saved_tensors, cast.saved_tensors
        return self.again(cast, self.basic_ops[0].forward_value(x), scales)

    def again(self, ctx, y, scales):
        return ctx.quantizer.requantize(y, scales, ctx.usage)


class BiasGeluGrad(opfuse.FusedOperation):
    """The backward of bias and activation, cast."""

    def fuser_backward(self, basic_op_ctxs, grad_output, **unused):
        cast, bias, act = basic_op_ctxs
        dx = self.basic_ops[2].backward_value(grad_output, act.saved_tensors[0])
        made = cast.quantizer(dx, cast.usage)
        db = None
        if bias.param_requires_grad[0]:
            db = self.summed(dx, made).reshape(-1, dx.shape[-1]).sum(0)
        return made, [(), (db,), ()], [(), (), ()]

    def summed(self, dx, made):
        return dx


class LinearGrad(opfuse.FusedOperation):
    """The backward of a linear layer from a gradient that it casts."""

    def fuser_backward(self, basic_op_ctxs, grad_output, **unused):
        linear, cast = basic_op_ctxs
        (x, weight), dtype = linear.saved_tensors, grad_output.dtype
        dy, dx, dw = cast.quantizer(grad_output, cast.usage), None, None
        if weight is not None:
            dx = dy.dequantize(self.usage(cast.usage)) @ weight.dequantize(COLUMNWISE).to(dtype)
        if x is not None:
            columns = dy.dequantize(COLUMNWISE).reshape(-1, grad_output.shape[-1])
            dw = columns.t() @ x.dequantize(COLUMNWISE).to(dtype).reshape(-1, x.shape[-1])
        return dx, [(dw,), ()], [(), ()]

    def usage(self, here):
        return ROWWISE


SOUND = {
    "GELU, Cast": ("forward", opfuse.Fusion((GELU, Cast), GeluCast)),
    "GELU, Cast again": ("forward", opfuse.Fusion((GELU, Cast), RecomputingGeluCast)),
    "Cast, Bias, GELU": ("backward", opfuse.Fusion((Cast, Bias, GELU), BiasGeluGrad)),
    "BasicLinear, Cast": ("backward", opfuse.Fusion((BasicLinear, Cast), LinearGrad)),
    "RMSNorm, Cast": ("forward", opfuse.Fusion((RMSNorm, Cast), NormCast)),
    "inside": ("joint", opfuse.Fusion((GELU, BasicLinear), Joint, declares=("casts",))),
}

# Wrong


def coded(made, y, scale):
    """Other codes, of ``y`` for a scale."""
    codes = (y.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn).contiguous()
    return made.rebuild((codes, codes.reshape(-1, y.shape[-1]).t().contiguous(), scale))


@faulty(
    "runs", "it raised TypeError: .*ends with a Cast; got a plain tensor", "forward", GELU, Cast
)
class IgnoresTheCast(GeluCast):
    def cast(self, ctx, y, hidden):
        return y


@faulty("codes", "scale_inv is .* instead of", "forward", GELU, Cast)
class ScalesByAnotherTensor(GeluCast):
    def cast(self, ctx, y, hidden):
        made = super().cast(ctx, y, hidden)
        if isinstance(made, ScaledTensor) and y.numel():
            scale = hidden.detach().abs().amax().float().reshape(1) / 448
            made = coded(made, y, scale)
        return made


@faulty("codes", "codes differ .*; round where the separate ops round", "forward", GELU, Cast)
class CastsBeforeItRounds(GeluCast):
    def cast(self, ctx, y, hidden):
        made = super().cast(ctx, y, hidden)
        if isinstance(made, ScaledTensor) and y.dtype is not torch.float64:
            made = coded(made, F.gelu(hidden.float(), approximate="tanh"), made.scale_inv)
        return made


@faulty("codes", "shares memory with the state 'scale' of the quantizer", "forward", GELU, Cast)
class KeepsTheScaleOfTheQuantizer(GeluCast):
    def cast(self, ctx, y, hidden):
        made = super().cast(ctx, y, hidden)
        if "scale" in ctx.quantizer.state_names:
            made.scale_inv = ctx.quantizer.scale
        return made


@faulty("runs", "it raised TypeError: .*quantizes for Usage", "forward", GELU, Cast)
class MakesOneCopy(GeluCast):
    def cast(self, ctx, y, hidden):
        return ctx.quantizer(y, ROWWISE)


@faulty("runs", "gave tensors for a Cast", "forward", GELU, Cast)
class GivesTensorsForTheCast(GeluCast):
    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        y, _ = super().fuser_forward(basic_op_ctxs, input_)
        return y, [(), (input_,)]


@faulty(
    "recipe", "after three steps under Delayed.* is .* instead of .*once", "forward", GELU, Cast
)
class RecordsTwice(GeluCast):
    def cast(self, ctx, y, hidden):
        ctx.quantizer(y, ctx.usage)
        return super().cast(ctx, y, hidden)


@faulty("recompute", "and casts is not bit by bit what it was", "forward", GELU, Cast)
class CastsAgainWithANewScale(RecomputingGeluCast):
    def again(self, ctx, y, scales):
        return ctx.quantizer(y, ctx.usage)


@faulty("recompute", "after a backward that computes again, the quantizer", "forward", GELU, Cast)
class RecordsWhatItComputesAgain(RecomputingGeluCast):
    def again(self, ctx, y, scales):
        ctx.quantizer(y, ctx.usage)
        return super().again(ctx, y, scales)


@faulty("gradients", "the gradient of bias of op 1 .* is wrong by", "backward", Cast, Bias, GELU)
class SumsWhatWasRounded(BiasGeluGrad):
    def summed(self, dx, made):
        return made.dequantize(ROWWISE if made.usage.rowwise else COLUMNWISE)


@faulty("gradients", "the gradient of the input is wrong by", "backward", BasicLinear, Cast)
class ReadsTheWrongCopy(LinearGrad):
    def usage(self, here):
        return COLUMNWISE if here.columnwise else ROWWISE


@faulty(
    "recipe",
    "in step 1 under PerTensor.* wrong by",
    "joint",
    GELU,
    BasicLinear,
    declares=("casts",),
)
class CastsNothingInside(Joint):
    def fuser_forward(self, basic_op_ctxs, input_, **given):
        y, extras = super().fuser_forward(basic_op_ctxs, input_, **given)
        if basic_op_ctxs[1].quantizers:
            hidden = F.gelu(input_, approximate="tanh")
            y = F.linear(hidden, basic_op_ctxs[1].params[0].to(hidden.dtype))
        return y, extras
