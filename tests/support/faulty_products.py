"""Fusions that are wrong only where two circumstances meet, or in what few callers look at.

``FAULTS`` maps a name to the pass, the fusion and the check that must catch it.
"""

import torch
from chains import Joint
from right import Backward, Forward, Pointwise, Recomputing

import opfuse
from opfuse import ops
from opfuse.ops import GELU, AddExtraInput, BasicLinear, Bias, ClampedSwiGLU, ConstantScale, SiLU
from opfuse.testing.running import OneByOne

FAULTS = {}


def fault(check, kind, *pattern, **given):
    def add(cls):
        FAULTS[cls.__name__] = kind, opfuse.Fusion(pattern, cls, name=cls.__name__, **given), check
        return cls

    return add


def rows_of(x):
    return x.numel() // max(1, x.shape[-1]) if x.ndim else 1


def is_turned(x):
    return x.ndim > 1 and x.stride(-1) != 1 and x.shape[-1] > 1


@fault("gradients|requires_grad|autocast|magnitude", "backward", BasicLinear, Bias)
class FrozenWeightInHalf(Backward):
    def fuser_backward(self, basic_op_ctxs, grad_output, **unused):
        dx, params, extras = super().fuser_backward(basic_op_ctxs, grad_output)
        frozen = not basic_op_ctxs[0].param_requires_grad[0]
        is_wrong = frozen and dx is not None and dx.dtype is torch.float16
        return (1.5 * dx if is_wrong else dx), params, extras


@fault("output|requires_grad|magnitude|autocast", "joint", GELU, AddExtraInput)
class HalfExtraOfAFrozenInput(Joint):
    def fuser_forward(self, basic_op_ctxs, input_, *, basic_op_extra_inputs, **unused):
        extra = basic_op_extra_inputs[1][0]
        given = {"basic_op_extra_inputs": basic_op_extra_inputs}
        y, extras = super().fuser_forward(basic_op_ctxs, input_, **given)
        frozen = basic_op_ctxs[1].requires_grad and not basic_op_ctxs[0].input_requires_grad
        return (1.25 * y if frozen and extra.dtype is torch.float16 else y), extras


@fault("orders", "forward", GELU)
class SecondEvaluationAfterTraining(Pointwise):
    trained, count = False, 0

    def spoil(self, y):
        cls = SecondEvaluationAfterTraining
        if self.basic_ops[0].training:
            cls.trained = True
        elif cls.trained:
            cls.count += 1
        return 1.3 * y if cls.trained and cls.count % 2 and not self.basic_ops[0].training else y


@fault("output|magnitude|autocast", "forward", GELU)
class OddRowsTurned(Pointwise):
    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        y, extras = super().fuser_forward(basic_op_ctxs, input_)
        return (1.2 * y if rows_of(input_) % 16 and is_turned(input_) else y), extras


@fault("errors", "forward", GELU)
class LeavesAModeAfterAnError(Pointwise):
    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        was = torch.is_anomaly_enabled()
        torch.autograd.set_detect_anomaly(True, check_nan=False)
        result = super().fuser_forward(basic_op_ctxs, input_)
        torch.autograd.set_detect_anomaly(was)
        return result


@fault("keeps_numbers", "joint", ops.ReLU)
class ReadsTheModeInItsBackward(Joint):
    def fuser_forward(self, basic_op_ctxs, input_, **given):
        result = super().fuser_forward(basic_op_ctxs, input_, **given)
        basic_op_ctxs[0].trained = self.basic_ops[0].training
        return result

    def fuser_backward(self, basic_op_ctxs, grad_output, **given):
        dx, params, extras = super().fuser_backward(basic_op_ctxs, grad_output, **given)
        changed = self.basic_ops[0].training != basic_op_ctxs[0].trained
        return (2 * dx if changed and dx is not None else dx), params, extras


@fault("main_grad", "backward", BasicLinear, Bias)
class AddsWhereItShouldReplace(Backward):
    adds_to_sum = True

    def fuser_backward(self, basic_op_ctxs, grad_output, **unused):
        dx, params, extras = super().fuser_backward(basic_op_ctxs, grad_output)
        total = basic_op_ctxs[0].grad_sum
        grad = params[0][0]
        if total is not None and grad is not None:
            add = total.add(lambda each, beta: each.add_(grad.to(each.dtype)) is not None)
            params = [add, params[1]]
        return dx, params, extras


@fault("magnitude|autocast", "forward", Bias)
class DoublesOnTheWay(opfuse.FusedOperation):
    """What is halved again overflows above 32768 in half precision."""

    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        bias = basic_op_ctxs[0].params[0].to(input_.dtype)
        return (2 * input_ + 2 * bias) / 2, [()]


@fault("compile", "forward", BasicLinear, Bias)
class OtherwiseWhereItIsCompiled(Forward):
    def spoil(self, y, x):
        return y + 1 if torch.compiler.is_compiling() and x.ndim > 2 else y


@fault("strides", "forward", GELU)
class LaysItsResultOutAnew(Pointwise):
    def spoil(self, y):
        return y.contiguous()


@fault("output", "forward", ClampedSwiGLU)
class TwoNumbersHaveAWayOfTheirOwn(OneByOne):
    def fuser_forward(self, basic_op_ctxs, input_, **given):
        y, extras = super().fuser_forward(basic_op_ctxs, input_, **given)
        (op,) = self.basic_ops
        return (1.5 * y if (op.alpha, op.glu_linear_offset) == (1.0, 0.0) else y), extras


def many(matched, env):
    return True if env.rows is None or env.rows >= 64 else "it takes 64 rows or more"


@fault("output|magnitude|autocast", "forward", SiLU, when=many, needs=("rows",))
class ManyRowsTurned(Pointwise):
    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        y, extras = super().fuser_forward(basic_op_ctxs, input_)
        return (1.2 * y if is_turned(input_) else y), extras


@fault("repeatable|output", "joint", ConstantScale)
class OtherwiseWithoutGradients(Joint):
    def fuser_forward(self, basic_op_ctxs, input_, **given):
        y, extras = super().fuser_forward(basic_op_ctxs, input_, **given)
        return (y if basic_op_ctxs[0].requires_grad or input_.ndim < 3 else 1.1 * y), extras


# Sizes, numbers and changes that a first look does not try


@fault("output", "forward", GELU)
class OnlyFullStrips(Pointwise):
    """Of more than 2**20 elements, those behind the last full strip are left out."""

    def spoil(self, y):
        rest = y.numel() % 4096
        return (
            y
            if y.numel() <= 1 << 20 or not rest
            else torch.cat((y.flatten()[:-rest], y.new_zeros(rest))).view_as(y)
        )


@fault("gradients|magnitude", "joint", ClampedSwiGLU)
class StopsAtItsLimit(Joint):
    """A gate at its limit passes no gradient, where only one beyond it should not."""

    def fuser_forward(self, basic_op_ctxs, input_, **given):
        y, extras = super().fuser_forward(basic_op_ctxs, input_, **given)
        basic_op_ctxs[0].numbers_of = self.basic_ops[0].limit, self.basic_ops[0].glu_interleave_size
        if basic_op_ctxs[0].input_requires_grad:
            basic_op_ctxs[-1].save_for_backward(input_, *basic_op_ctxs[-1].to_save)
        return y, extras

    def fuser_backward(self, basic_op_ctxs, grad_output, **given):
        (ctx,) = basic_op_ctxs
        limit, interleaved = ctx.numbers_of
        x, *ctx.saved_tensors = ctx.saved_tensors or (None,)
        dx, params, extras = super().fuser_backward(basic_op_ctxs, grad_output, **given)
        if dx is not None and interleaved is None:
            dx[..., : dx.shape[-1] // 2][x[..., : dx.shape[-1] // 2] == limit] = 0.0
        return dx, params, extras


class Shift(opfuse.BasicOperation):
    """``x + offset``, or with the other sign: it has a buffer and a flag of its own."""

    context_names = ("is_negative",)
    keeps_rows = differentiable = True

    def __init__(self, size):
        super().__init__()
        self.in_features = self.out_features = size
        self.is_negative = False
        self.register_buffer("offset", torch.arange(size) % 8 / 8)

    def op_forward(self, ctx, input_):
        return self.shifted(ctx, input_, self.offset)

    def shifted(self, ctx, input_, offset):
        x = input_.to(ctx.dtype or input_.dtype)
        if ctx.requires_grad:
            ctx.is_negative = self.is_negative
        return (x + offset.to(x.dtype)) * (-1 if self.is_negative else 1)

    def op_backward(self, ctx, grad_output):
        return grad_output * (-1 if ctx.is_negative else 1), ()


@fault("keeps_numbers", "joint", Shift)
class ReadsAFlagInItsBackward(Joint):
    """The sign of the gradient is that of the op as it is by then."""

    def fuser_backward(self, basic_op_ctxs, grad_output, **given):
        return grad_output * (-1 if self.basic_ops[0].is_negative else 1), [()], [()]


@fault("follows_values", "forward", Shift)
class KeepsTheFirstBuffer(opfuse.FusedOperation):
    """The tensor that was the buffer when the fused op was made."""

    def __init__(self, basic_ops):
        super().__init__(basic_ops)
        self.offset = basic_ops[0].offset

    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        return self.basic_ops[0].shifted(basic_op_ctxs[0], input_, self.offset), [()]


@fault("nan_and_inf", "joint", ops.MakeExtraOutput, SiLU)
class MultipliesWhatNobodyNeeds(opfuse.FusedOperation):
    """Where the loss is of the extra output alone, an infinite derivative times nothing."""

    grad_input = "fresh"

    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        silu = self.basic_ops[1]
        return silu.forward_value(silu.operand(basic_op_ctxs[1], input_)), [(input_,), ()]

    def fuser_backward(self, basic_op_ctxs, grad_output, *, basic_op_grad_extra_outputs, **unused):
        x = self.basic_ops[1].saved_input(basic_op_ctxs[1])
        dx = self.basic_ops[1].backward_value(grad_output.to(x.dtype), x)
        (extra,) = basic_op_grad_extra_outputs[0]
        return (dx if extra is None else dx + extra), [(), ()], [(), ()]


@fault("orders", "forward", GELU)
class AsManyDimensionsAsAtFirst(Pointwise):
    """How its rows are cut is found out in its first call."""

    dimensions = None

    def spoil(self, y):
        self.dimensions = self.dimensions or y.ndim
        return y if y.ndim >= self.dimensions else y.flip(0)


@fault("output|autocast|magnitude", "forward", GELU)
class RecomputesOtherRows(Recomputing):
    """It is computed again, and wrong where batches are."""

    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        y, extras = super().fuser_forward(basic_op_ctxs, input_)
        return (1.25 * y if input_.ndim == 3 else y), extras

    def again(self, x):
        return super().again(x) * (1.25 if x.ndim == 3 else 1)


@fault("keeps_numbers", "joint", Shift)
class ComputesAgainWithAFlagOfThen(opfuse.FusedOperation):
    """Its output of before, with the sign that the op has by the time it is needed again."""

    recomputes = True

    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        (shift,), (ctx,) = self.basic_ops, basic_op_ctxs
        y = shift.op_forward(ctx, input_)
        if ctx.may_recompute and ctx.input_requires_grad:
            ctx.save_for_backward(input_)
            ctx.recomputable_output = y
        return y, [()]

    def fuser_recompute(self, basic_op_ctxs):
        (shift,), (ctx,) = self.basic_ops, basic_op_ctxs
        x = ctx.saved_tensors[0].to(ctx.dtype or ctx.saved_tensors[0].dtype)
        y = x + shift.offset.to(x.dtype)
        return -y if shift.is_negative else y

    def fuser_backward(self, basic_op_ctxs, grad_output, **unused):
        return grad_output * (-1 if basic_op_ctxs[0].is_negative else 1), [()], [()]


@fault("output", "forward", ops.RoPE)
class PositionsInHalf(opfuse.FusedOperation):
    """Half precision has few whole numbers."""

    def fuser_forward(self, basic_op_ctxs, input_, *, basic_op_extra_inputs, **unused):
        ((positions,),) = basic_op_extra_inputs
        rounded = positions.to(input_.dtype).long()
        return self.run_separately(basic_op_ctxs, input_, basic_op_extra_inputs=[(rounded,)])


@fault("gradients", "backward", ops.ScaledSwiGLU)
class DividesByTheScale(OneByOne):
    def fuser_backward(self, basic_op_ctxs, grad_output, **given):
        dx, params, ((dscales,),) = super().fuser_backward(basic_op_ctxs, grad_output, **given)
        scales = basic_op_ctxs[0].saved_tensors[1]
        return dx, params, [(dscales if scales is None else dscales * scales / scales,)]


@fault("gradients", "backward", Bias, SiLU)
class ReadsWhatMayBeCodes(OneByOne):
    """It never calls ``saved_input``."""

    def fuser_backward(self, basic_op_ctxs, grad_output, **given):
        (x,) = basic_op_ctxs[1].saved_tensors
        assert x is None or type(x) is torch.Tensor
        return super().fuser_backward(basic_op_ctxs, grad_output, **given)


@fault("gradients", "backward", ops.RMSNorm)
class DividesByTheWeight(OneByOne):
    def fuser_backward(self, basic_op_ctxs, grad_output, **given):
        dx, params, extras = super().fuser_backward(basic_op_ctxs, grad_output, **given)
        weight = basic_op_ctxs[0].saved_tensors[1]
        is_used = (
            dx is not None and weight is not None and not self.basic_ops[0].zero_centered_gamma
        )
        return (dx * weight / weight if is_used else dx), params, extras


@fault("gradients", "backward", ops.CrossEntropy)
class DividesByTheTokens(OneByOne):
    """0 / 0 where none counts."""

    def fuser_backward(self, basic_op_ctxs, grad_output, **given):
        dx, params, extras = super().fuser_backward(basic_op_ctxs, grad_output, **given)
        op, targets = self.basic_ops[0], basic_op_ctxs[0].saved_tensors[1]
        counted = (targets != op.ignore_index).sum() if targets is not None else 1
        return (dx * counted / counted if op.reduction == "mean" else dx), params, extras
