"""Fusions with casts, of another plugin than the recipe's: one op instead of two, and of three."""

import opfuse
from opfuse.ops import GELU, Bias, Cast
from opfuse.ops.activation import Activation


class GELUCast(opfuse.FusedOperation):
    """``quantize(gelu(x))``; computes it again in the backward, from the scale of the forward."""

    recomputes = True

    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        act, cast = basic_op_ctxs
        gelu: Activation = self.basic_ops[0]
        y = cast.quantizer.quantize(gelu.op_forward(act, input_), cast.usage)
        if act.may_recompute:
            act.recomputable_output = y
        return y, [(), ()]

    def fuser_recompute(self, basic_op_ctxs):
        act, cast = basic_op_ctxs
        (x,), (scales,) = act.saved_tensors, cast.saved_tensors
        y = self.basic_ops[0].value(x).to(x.dtype)
        return cast.quantizer.requantize(y, scales, cast.usage)


class GELUBiasGradCast(opfuse.FusedOperation):
    """The gradient of GELU, its sum as that of the bias, and the same gradient quantized."""

    def fuser_backward(self, basic_op_ctxs, grad_output, **unused):
        cast, bias, act = basic_op_ctxs
        dx, _ = self.basic_ops[2].op_backward(act, grad_output)
        grad_bias = dx.flatten(0, -2).sum(0) if bias.param_requires_grad[0] else None
        return cast.quantizer.quantize(dx, cast.usage), [(), (grad_bias,), ()], [(), (), ()]


@opfuse.hookimpl
def opfuse_forward_fusions():
    return [opfuse.Fusion((GELU, Cast), GELUCast)]


@opfuse.hookimpl
def opfuse_backward_fusions():
    return [opfuse.Fusion((Cast, Bias, GELU), GELUBiasGradCast)]
