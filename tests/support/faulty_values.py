"""Fusions that are wrong where a call is not the only one, or an argument not the default."""

import torch
from faulty import faulty
from right import Forward, L2Forward, Pointwise, RMSNormForward

import opfuse
from opfuse.ops import GELU, BasicLinear, Bias, ClampedSwiGLU, Dropout, L2Normalization, RMSNorm

# State of one call, kept on the fused op


def _not_compiling(ops, env):
    return "it keeps state" if env.compiling else True


class Joint(opfuse.FusedOperation):
    """Forward and backward of one activation, as they should be but for where the state is kept."""

    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        (ctx,), (act,) = basic_op_ctxs, self.basic_ops
        hidden = input_.to(ctx.dtype or input_.dtype)
        if ctx.requires_grad:
            ctx.save_for_backward(self.keep(hidden))
        return act.forward_value(hidden), [()]

    def fuser_backward(self, basic_op_ctxs, grad_output, **unused):
        hidden = self.kept(basic_op_ctxs[0].saved_tensors[0])
        return self.basic_ops[0].backward_value(grad_output.to(hidden.dtype), hidden), [()], [()]


@faulty(
    "interleaved",
    "in number 1, the gradient of the input is wrong by",
    "joint",
    GELU,
    when=_not_compiling,
)
class KeepsAFactorOnItself(Joint):
    def keep(self, hidden):
        self.factor = float(hidden.abs().max()) if hidden.numel() else 1.0
        return hidden / self.factor

    def kept(self, saved):
        return saved * self.factor


@faulty("interleaved", "it raised RuntimeError: shape", "joint", GELU, when=_not_compiling)
class KeepsAShapeOnItself(Joint):
    def keep(self, hidden):
        self.shape = hidden.shape
        return hidden.flatten()

    def kept(self, saved):
        return saved.reshape(self.shape)


@faulty("interleaved", "in number 1, the output is wrong by", "forward", GELU, when=_not_compiling)
class ReusesAWorkspace(Pointwise):
    workspace = None

    def spoil(self, y):
        if self.workspace is None or (self.workspace.shape, self.workspace.dtype) != (
            y.shape,
            y.dtype,
        ):
            self.workspace = torch.empty_like(y)
        return self.workspace.copy_(y).detach()


# Arguments


@faulty(
    "gradients", r"(?s)gradient of the input is wrong by.*ops.Dropout, 0\.5", "backward", Dropout
)
class IgnoresTheMask(opfuse.FusedOperation):
    def fuser_backward(self, basic_op_ctxs, grad_output, **unused):
        return grad_output * 1, [()], [()]


@faulty("output", "(?s)the output is wrong by.*(switched=|training=False)", "joint", Dropout)
class DropsInEvaluationToo(opfuse.FusedOperation):
    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        y, mask = torch.native_dropout(input_, self.basic_ops[0].p, True)
        if basic_op_ctxs[0].requires_grad:
            basic_op_ctxs[0].save_for_backward(mask)
        return y, [()]

    def fuser_backward(self, basic_op_ctxs, grad_output, **unused):
        (mask,) = basic_op_ctxs[0].saved_tensors
        return grad_output * mask / (1 - self.basic_ops[0].p), [()], [()]


def _one_dimension(ops, env):
    several = len(ops[0].normalized_shape) > 1
    return "it normalizes the last dimension" if several else has_a_weight(ops, env)


def has_a_weight(ops, env):
    return True if ops[0].param_names else "it multiplies by a weight"


@faulty(
    "saved_state",
    r"(?s)'rstd' for op 0 \(RMSNorm\) is wrong by.*eps=0\.1",
    "forward",
    RMSNorm,
    when=_one_dimension,
)
class HardCodesEps(RMSNormForward):
    def rstd(self, square, eps):
        return super().rstd(square, 1e-5)


@faulty(
    "saved_state",
    r"(?s)'rstd' for op 0 \(RMSNorm\) has shape.*RMSNorm, \(4, 8\)",
    "forward",
    RMSNorm,
    when=has_a_weight,
)
class NormalizesTheLastDimensionOnly(RMSNormForward):
    def mean_square(self, x, input_):
        return x.square().mean(-1, keepdim=True)


@faulty("output", r"(?s)the output is wrong by.*limit=0\.5", "forward", ClampedSwiGLU)
class IgnoresItsArguments(Pointwise):
    def value(self, x):
        (act,) = self.basic_ops
        return ClampedSwiGLU(glu_interleave_size=act.glu_interleave_size).forward_value(x)


@faulty("output", "wrong by .*take those in ctx.params", "forward", BasicLinear, Bias)
class ReadsTheBiasOnce(Forward):
    def __init__(self, basic_ops):
        super().__init__(basic_ops)
        self.bias = basic_ops[1].bias.detach().clone()

    def product(self, x, weight, bias):
        return super().product(x, weight, self.bias.to(x.dtype))


@faulty(
    "follows_values",
    "after its tensors or numbers were changed, (under no_grad, )?the output",
    "forward",
    L2Normalization,
)
class ReadsEpsOnce(L2Forward):
    def __init__(self, basic_ops):
        super().__init__(basic_ops)
        self.eps = basic_ops[0].eps

    def rstd(self, x):
        return torch.rsqrt(x.square().sum(-1, keepdim=True) + self.eps)


@faulty(
    "follows_values",
    "after its tensors or numbers were changed, (under no_grad, )?the output",
    "joint",
    Dropout,
)
class ReadsTheProbabilityOnce(opfuse.FusedOperation):
    def __init__(self, basic_ops):
        super().__init__(basic_ops)
        self.p = basic_ops[0].p

    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        drops = self.basic_ops[0].training and self.p
        y, mask = torch.native_dropout(input_, self.p, True) if drops else (input_, None)
        if basic_op_ctxs[0].requires_grad:
            basic_op_ctxs[0].save_for_backward(mask)
        return y, [()]

    def fuser_backward(self, basic_op_ctxs, grad_output, **unused):
        (mask,) = basic_op_ctxs[0].saved_tensors
        scale = 1 / (1 - self.p) if self.p < 1 else 0.0
        return grad_output * 1 if mask is None else grad_output * mask * scale, [()], [()]


class Tempered(opfuse.BasicOperation):
    """A scale whose backward uses the number that the forward used."""

    saved_names, context_names = (), ("temperature",)

    def __init__(self, temperature=2.0):
        super().__init__()
        self.temperature = temperature

    def op_forward(self, ctx, input_, **unused):
        if ctx.requires_grad:
            ctx.temperature = self.temperature
        return input_ / self.temperature

    def op_backward(self, ctx, grad_output):
        return grad_output / ctx.temperature, ()


@faulty(
    "keeps_numbers",
    "between forward and backward, the gradient of the input is wrong",
    "backward",
    Tempered,
)
class ReadsTheNumberInItsBackward(opfuse.FusedOperation):
    def fuser_backward(self, basic_op_ctxs, grad_output, **unused):
        return grad_output / self.basic_ops[0].temperature, [()], [()]
